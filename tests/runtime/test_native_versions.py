"""One and the same library in several releases of ONNX Runtime, each in a process of its own without our packages."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import native_build
import native_models
import numpy as np
import onnxruntime as ort
import pytest

pytestmark = pytest.mark.cpu

INSTALLED = ort.__version__
# What each release needs beside itself; the older ones were built for numpy 1.
REQUIREMENTS = {"1.16.3": ["numpy==1.26.4"], "1.17.3": ["numpy==1.26.4"]}
RELEASES = ["1.17.3", "1.23.2", "1.24.4", INSTALLED]
KERNELS = ["MeanSplit_0b", "Repeat_0c", "ScaleAdd_0a", "Triple_0d"]
UNREACHABLE = ("Retrying (", "Failed to establish", "Name or service not known", "Read timed out", "ProxyError")
RUNNER = Path(__file__).parent / "plain_runner.py"


def install_release(version: str, cache: Path) -> Path | None:
    """Return a folder to import onnxruntime `version` from, filled on first use; None for the installed release."""
    if version == INSTALLED:
        return None
    folder = cache / version
    if not folder.is_dir():
        partial = cache / f"{version}.{os.getpid()}"
        wheels = [f"onnxruntime=={version}", *REQUIREMENTS.get(version, [])]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(partial), *wheels]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if done.returncode != 0:
            shutil.rmtree(partial, ignore_errors=True)
            if any(sign in done.stderr for sign in UNREACHABLE):
                pytest.skip(f"the package index cannot be reached to fetch onnxruntime {version}")
            pytest.fail(done.stderr)
        partial.rename(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    native_models.write_sampler(folder / "sampler.onnx")
    native_build.build_library(folder / "sampler.so")
    return folder


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> tuple[str, Path | None]:
    return request.param, install_release(request.param, request.config.cache.mkdir("onnxruntime"))


def start_runner(
    folder: Path, release: tuple[str, Path | None], mode: str, feeds: Mapping[str, np.ndarray]
) -> subprocess.CompletedProcess[str]:
    np.savez(folder / "feeds.npz", x=feeds["x"], s=feeds["s"], flat=feeds["flat"], ids=feeds["ids"])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if release[1] is not None:
        environment["PYTHONPATH"] = str(release[1])
    files = ["sampler.onnx", "sampler.so", mode, "feeds.npz", "outputs.npz"]
    arguments = [name if name == mode else str(folder / name) for name in files]
    command = [sys.executable, "-P", str(RUNNER), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder, timeout=120
    )


def minor(release: tuple[str, Path | None]) -> int:
    return int(release[0].split(".")[1])


@pytest.mark.parametrize("mode", ["plain", "custom", "provider"])
def test_release_runs_the_library(folder: Path, release: tuple[str, Path | None], mode: str) -> None:
    feeds = native_models.sample_feeds(130, 70)
    done = start_runner(folder, release, mode, feeds)
    if mode == "provider" and minor(release) < 24:
        assert done.returncode != 0
        if minor(release) == 23:  # before it, Python cannot register such libraries at all
            assert f"needs ONNX Runtime 1.24 or newer, found {release[0]}" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == release[0]
    assert report["ours"] == []
    outputs = np.load(folder / "outputs.npz")
    for name, expected in native_models.expect_sample(feeds).items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    if mode == "plain":
        assert not set(KERNELS) & {entry.split("@")[0] for entry in report["ran"]}
        return
    provider = "CPUExecutionProvider" if mode == "custom" else "TileFuseExecutionProvider"
    assert report["ran"] == [f"{kernel}@{provider}" for kernel in KERNELS]
    assert "ScaleAdd_0a: input 1 dim 0 is 2, expected 70" in report["refusal"]
    assert report["dims"]["rest"] == ["n", "m"]
    assert report["dims"]["mean"] == ["n", 1]


def test_two_releases_live_in_one_process(folder: Path, request: pytest.FixtureRequest) -> None:
    other = install_release("1.24.4", request.config.cache.mkdir("onnxruntime"))
    assert other is not None
    host = native_build.build_host(folder / "host")
    libraries = [native_build.find_onnxruntime(), *(other / "onnxruntime" / "capi").glob("libonnxruntime.so.*")]
    for mode in ("custom", "provider"):
        command = [str(host), str(folder / "sampler.onnx"), str(folder / "sampler.so"), mode, *map(str, libraries)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert f"{INSTALLED} {mode}: right" in done.stdout
        assert f"1.24.4 {mode}: right" in done.stdout


def test_too_old_a_release_runs_the_function_bodies(folder: Path, request: pytest.FixtureRequest) -> None:
    release = ("1.16.3", install_release("1.16.3", request.config.cache.mkdir("onnxruntime")))
    feeds = native_models.sample_feeds(20, 30)
    done = start_runner(folder, release, "custom", feeds)
    assert done.returncode == 0, done.stderr
    assert "tilefuse: ONNX Runtime 1.16.3 is older than 1.17; the model runs through its function bodies" in done.stderr
    np.testing.assert_allclose(
        np.load(folder / "outputs.npz")["rest"], native_models.expect_sample(feeds)["rest"], rtol=1e-5, atol=1e-5
    )
    assert not set(KERNELS) & {entry.split("@")[0] for entry in json.loads(done.stdout)["ran"]}
