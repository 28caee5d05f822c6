from pathlib import Path

import pytest

from runtime.options import Options, OptionsError


def test_empty_environment_gives_the_defaults() -> None:
    options = Options.from_environment({})
    assert options == Options(cache=Path.home() / ".cache" / "tilefuse")


def test_every_variable_is_read() -> None:
    options = Options.from_environment(
        {
            "TILEFUSE_CACHE": "/c",
            "TILEFUSE_DUMP": "/d",
            "TILEFUSE_USE": "/u/70_kernel.c",
            "TILEFUSE_DEBUG": "1",
            "TILEFUSE_CC": "clang",
            "TILEFUSE_THREADS": "2",
            "TILEFUSE_TARGET": "cpu",
            "TILEFUSE_PROFILE": "zen4",
        }
    )
    assert options == Options(
        cache=Path("/c"), dump=Path("/d"), use=Path("/u/70_kernel.c"), debug=True, compiler="clang", threads=2,
        profile="zen4",
    )  # fmt: skip


def test_cache_follows_xdg_and_empty_means_unset() -> None:
    assert Options.from_environment({"XDG_CACHE_HOME": "/x", "TILEFUSE_CACHE": ""}).cache == Path("/x/tilefuse")


@pytest.mark.parametrize(
    ("name", "value"),
    [("TILEFUSE_DEBUG", "yes"), ("TILEFUSE_THREADS", "0"), ("TILEFUSE_THREADS", "two"), ("TILEFUSE_THREADS", "-1")],
)
def test_a_wrong_value_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(OptionsError, match=name):
        Options.from_environment({name: value})


def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(OptionsError, match="no home directory: set TILEFUSE_CACHE"):
        Options.from_environment({})
    assert Options.from_environment({"TILEFUSE_CACHE": "/y"}).cache == Path("/y")
