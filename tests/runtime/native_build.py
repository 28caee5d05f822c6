"""Builds the hand-written kernel library and the C host of csrc/, with the system's compiler or else ziglang."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from runtime import native

SOURCES = Path(__file__).parent / "csrc"
INCLUDES = [f"-I{folder}" for folder in native.INCLUDE_DIRECTORIES]
ZIG = (sys.executable, "-m", "ziglang", "cc")


def find_compiler() -> tuple[str, ...]:
    """Return the command of a C compiler."""
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return ZIG if found is None else (found,)


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def build_library(output: Path, *, flags: Sequence[str] = (), compiler: Sequence[str] | None = None) -> Path:
    """Link the shim with the hand-written kernels; `flags` are added, e.g. -DHAND_EMPTY."""
    sources = [*map(str, native.SHIM_SOURCES), str(SOURCES / "hand_kernels.c")]
    options = [*native.COMPILE_FLAGS, *native.LINK_FLAGS, *INCLUDES, *flags]
    _compile([*(compiler or find_compiler()), *options, *sources, "-o", str(output)])
    return output


def build_host(output: Path, *, flags: Sequence[str] = ()) -> Path:
    """Build csrc/host.c."""
    options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", *INCLUDES, *flags]
    _compile([*find_compiler(), *options, str(SOURCES / "host.c"), "-o", str(output), "-ldl", "-lpthread", "-lm"])
    return output


def find_onnxruntime() -> Path:
    """Return the C library inside the installed onnxruntime wheel."""
    (found,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    return found
