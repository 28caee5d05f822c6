"""CUDA C++ to cubins by NVRTC, which needs no GPU; cubins are kept by the hash of all that made them.

What ptxas says of a kernel is read: registers, spills and shared memory come out as a `Report`, and the warnings that
mean serialised products or ignored register roles are errors, as spills are.
"""

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tilecore.cuda.errors import CudaError

FOLDER = Path(__file__).parent.parent / "csrc"
HEADERS = ("tile_sm80.cuh", "tile_sm90.cuh")  # what kernels include
NO_CACHE = "--no-cache"  # what NVRTC takes from a cache of its own comes without the report; old ones have none
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--extra-device-vectorization")
# setmaxnreg ignored; products serialised for registers; products serialised for control flow; a fence put in for us
REFUSED = ("C7508", "C7510", "C7512", "C7514", "C7519", "C7520")


INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION


@dataclass(frozen=True, slots=True)
class Report:
    """What ptxas says of a kernel: registers at its start, spilled bytes and the stack of one thread."""

    registers: int
    spills: int
    stack: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A built kernel."""

    image: bytes
    report: Report


def build_cubin(source: str, *, arch: str, cache_directory: Path) -> Cubin:
    """The cubin of a kernel's text. CudaError when there is no NVRTC or it refuses, spills or serialises."""
    library = load_nvrtc()
    headers = {name: (FOLDER / name).read_text(encoding="utf-8") for name in HEADERS}
    options = (f"--gpu-architecture={arch}", *OPTIONS)
    key = hashlib.sha256("\0".join((source, *headers.values(), version(library), *options)).encode()).hexdigest()[:24]
    image, log = cache_directory / f"{key}.cubin", cache_directory / f"{key}.log"
    if not (image.exists() and log.exists()):
        built, text = _compile(library, source, headers, options)
        cache_directory.mkdir(parents=True, exist_ok=True)
        for path, data in ((image, built), (log, text.encode())):
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_bytes(data)
            part.replace(path)
    return Cubin(image.read_bytes(), read_report(log.read_text(encoding="utf-8")))


def read_report(log: str) -> Report:
    """The figures of a compile log. CudaError for spills and for warnings that cost what the kernel is made for."""
    refused = [line for line in log.splitlines() if any(code in line for code in REFUSED)]
    if refused:
        raise CudaError("the compiler serialised products or ignored register roles:\n" + "\n".join(refused))
    registers = re.findall(r"Used (\d+) registers", log)
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not memory:
        raise CudaError(f"the compile log has no resource report:\n{log}")
    stack, stores, fetches = max((tuple(map(int, entry)) for entry in memory), key=sum)
    if stores or fetches:
        raise CudaError(f"registers were spilled ({stores} bytes stored, {fetches} loaded): take smaller tiles")
    return Report(max(map(int, registers)), stores + fetches, stack)


def _compile(library: Any, source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> tuple[bytes, str]:
    program, count = ctypes.c_void_p(), len(headers)
    texts, names = ((ctypes.c_char_p * count)(*(one.encode() for one in side)) for side in (headers.values(), headers))
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", count, texts, names)
    _expect(status, "nvrtcCreateProgram")
    try:
        for tried in ((*options, NO_CACHE), options):
            arguments = (ctypes.c_char_p * len(tried))(*(option.encode() for option in tried))
            status = library.nvrtcCompileProgram(program, len(tried), arguments)
            if status != INVALID_OPTION:
                break
        log = _bytes(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode()
        if status:
            raise CudaError(f"NVRTC refused a generated kernel:\n{log}")
        return _bytes(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _expect(size_of(program, ctypes.byref(size)), "an NVRTC size")
    buffer = ctypes.create_string_buffer(size.value)
    _expect(read(program, buffer), "an NVRTC result")
    return buffer.raw.rstrip(b"\0") if size_of.__name__ == "nvrtcGetProgramLogSize" else buffer.raw


def _expect(status: int, what: str) -> None:
    if status:
        raise CudaError(f"{what} failed with NVRTC status {status}")


def version(library: Any) -> str:
    """Of NVRTC, as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _expect(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


@cache
def load_nvrtc() -> Any:
    """The NVRTC library of the `nvidia-cuda-nvrtc` wheel, or the system's. CudaError when there is none."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if (Path(entry) / "nvidia").is_dir()]
    found = sorted((path for folder in folders for path in folder.rglob("libnvrtc.so.*")), key=str)
    for path in found:
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("NVRTC was not found: pip install nvidia-cuda-nvrtc")
