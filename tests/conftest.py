"""What all tests share: one cache of compiled objects, the switch that rewrites goldens, and the tiers of tests.

Tests without a mark need no compiler; `cpu` ones build and run native code; `gpu` ones are skipped without a GPU and
`browser` ones without a Chromium.
"""

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of our own."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing")
    parser.addoption("--programs", type=int, default=80, help="random tile programs to compile and compare")
    parser.addoption("--graphs", type=int, default=16, help="random graphs of operators to fuse and compare")
    parser.addoption("--first-graph", type=int, default=0, help="the seed that random graphs begin with")
    parser.addoption("--specs", type=int, default=24, help="random regions for cards to write, build and run")
    parser.addoption("--tilelang", type=Path, default=None, help="TileLang's examples/, to run in place of our texts")
    parser.addoption("--first-program", type=int, default=0, help="the seed that random tile programs begin with")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying why."""
    if CHROMIUM is None:
        no_browser = pytest.mark.skip(reason=f"needs a browser: none of {', '.join(BROWSERS)} is on the path")
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(no_browser)
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: there is no /dev/nvidia0")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser that tests marked `browser` drive."""
    assert CHROMIUM is not None
    return CHROMIUM


@pytest.fixture(scope="session")
def object_cache(request: pytest.FixtureRequest) -> Path:
    """A folder for compiled objects that all tests and later runs share: names are hashes of what went in."""
    cache = request.config.cache
    assert cache is not None
    return cache.mkdir("tilefuse") / "objects"


@pytest.fixture(scope="session", autouse=True)
def private_cache(object_cache: Path) -> Generator[None]:
    """Everything that reads TILEFUSE_CACHE stays out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEFUSE_CACHE", str(object_cache.parent))
        yield
