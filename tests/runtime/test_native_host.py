"""The library in a C program that knows nothing of Python: three ways to open the model, and under a sanitizer."""

import os
import subprocess
from pathlib import Path

import native_build
import native_models
import pytest

pytestmark = pytest.mark.cpu

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
REFUSAL = "ScaleAdd_0a: input 1 dim 0 is 4, expected 5"


def run_host(host: Path, *arguments: str | Path) -> str:
    environment = {"PATH": os.environ["PATH"]}
    command = [str(host), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host")
    native_models.write_sampler(folder / "sampler.onnx")
    native_build.build_library(folder / "sampler.so")
    native_build.build_host(folder / "host")
    return folder


@pytest.mark.parametrize(("mode", "refusal"), [("plain", "Mul node"), ("custom", REFUSAL), ("provider", REFUSAL)])
def test_c_program_runs_the_model(folder: Path, mode: str, refusal: str) -> None:
    runtime = native_build.find_onnxruntime()
    said = run_host(folder / "host", folder / "sampler.onnx", folder / "sampler.so", mode, runtime)
    assert f" {mode}: right; refused: " in said
    assert refusal in said


def test_c_program_opens_the_model_again_in_the_same_process(folder: Path) -> None:
    runtime = native_build.find_onnxruntime()
    said = run_host(folder / "host", folder / "sampler.onnx", folder / "sampler.so", "custom", runtime, runtime)
    assert said.count(REFUSAL) == 2


@pytest.mark.parametrize("mode", ["custom", "provider"])
def test_no_address_leak_or_undefined_behaviour(folder: Path, tmp_path: Path, mode: str) -> None:
    compiler = native_build.find_compiler()
    if compiler == native_build.ZIG:
        pytest.skip("ziglang ships no address sanitizer; install gcc or clang")
    host = native_build.build_host(tmp_path / "host", flags=SANITIZERS)
    library = native_build.build_library(tmp_path / "sampler.so", flags=[*SANITIZERS, "-Wl,-z,undefs"])
    said = run_host(host, folder / "sampler.onnx", library, mode, native_build.find_onnxruntime())
    assert REFUSAL in said
