"""Kernels for sm_80 on the processor: their text as it is, with what is machine code in their header told in C++.

Every thread of a block is a fiber; matrix loads, products and exchanges happen between the lanes of a warp that meet,
copies arrive when they are waited for and leave NaN until then. So a wrong address, layout, wait or meeting shows.
"""

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tilecore.contract.dtype import DType
from tilecore.cuda.compile import CudaSource
from tilecore.cuda.nvrtc import FOLDER
from tilecore.cuda.values import STORAGE

HERE = Path(__file__).parent
FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?TILE_FN [^\n]*(?:\}|\{[^\n]*\n(?:[ }][^\n]*\n|\n)*?\})(?: *//[^\n]*)?\n", re.M
)
TYPES: Mapping[DType, Any] = {
    DType.BF16: ml_dtypes.bfloat16, DType.F16: np.float16, DType.F32: np.float32, DType.I32: np.int32,
    DType.I64: np.int64, DType.BOOL: np.bool_, DType.U8: np.uint8, DType.I8: np.int8,
}  # fmt: skip
RUN = """
extern "C" void emulate(void** data, const int* sizes, int blocks, int block_threads, unsigned bytes) {
  gridDim.x = blocks, threads = block_threads, shared_size = bytes;
  static std::vector<std::vector<char>> stacks(1024);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(shared, 0xff, bytes);
    block_meeting = {threads, 0, 0};
    for (auto& one : warp_meetings) one = {32, 0, 0};
    static void** pointers;
    static const int* dims;
    pointers = data, dims = sizes;
    for (int thread = 0; thread < threads; thread++) {
      in_flight[thread].clear(), finished[thread] = false, stacks[thread].resize(1 << 16);
      getcontext(&fibers[thread]);
      fibers[thread].uc_stack.ss_sp = stacks[thread].data(), fibers[thread].uc_stack.ss_size = 1 << 16;
      fibers[thread].uc_link = &scheduler;
      makecontext(&fibers[thread], (void (*)())+[] { const int self = threadIdx.x; KERNEL; finished[self] = true; }, 0);
    }
    for (int left = threads; left;)
      for (int thread = 0; thread < threads; thread++)
        if (!finished[thread]) {
          threadIdx.x = thread;
          swapcontext(&scheduler, &fibers[thread]);
          left -= finished[thread];
        }
  }
}
"""


def emulate(
    source: CudaSource, arrays: Mapping[str, Any], sizes: Mapping[str, int], folder: Path, *, blocks: int = 2
) -> None:
    """Run a kernel on contiguous numpy arrays by tensor name, its outputs in place, by as few blocks as told."""
    plan = source.plan
    library = ctypes.CDLL(str(_built(source, folder)))
    data = (ctypes.c_void_p * len(plan.pointers))(*(arrays[tensor.name].ctypes.data for tensor in plan.pointers))
    for tensor in plan.pointers:
        array = arrays[tensor.name]
        assert array.flags.c_contiguous
        assert array.dtype == TYPES[tensor.dtype], (tensor, array.dtype)
    dims = (ctypes.c_int * max(1, len(plan.symbols)))(*(sizes[symbol.name] for symbol in plan.symbols))
    library.emulate(data, dims, blocks, plan.threads, ctypes.c_uint(plan.shared_bytes))


def _built(source: CudaSource, folder: Path) -> Path:
    header = (FOLDER / "tile_sm80.cuh").read_text(encoding="utf-8")
    types, rest = header[: header.index("// ---- shared memory")], header[header.index("// ---- shared memory") :]
    types = types.replace("#pragma once", "")
    rest = re.sub(r"#define TILE_WARP_PRODUCT(?:[^\n]*\\\n)+[^\n]*\n|^TILE_WARP_PRODUCT\(\w+\)\n", "", rest, flags=re.M)
    rest = FUNCTION.sub(lambda found: "" if "asm" in found[0] else found[0], rest)
    plan = source.plan
    arguments = [f"({STORAGE[tensor.dtype]}*)pointers[{x}]" for x, tensor in enumerate(plan.pointers)]
    arguments += [f"dims[{x}]" for x in range(len(plan.symbols))]
    kernel = source.text.replace('#include "tile_sm80.cuh"', "").replace("extern __shared__ u8 shared[];", "")
    run = RUN.replace("KERNEL", f"{source.name}({', '.join(arguments)})")
    verbs = [(HERE / name).read_text(encoding="utf-8") for name in ("card_emulator.h", "card_emulator_verbs.h")]
    text = "\n".join((verbs[0], types, verbs[1], rest, kernel, run))
    text = text.replace("static __device__ __forceinline__", "static inline")
    path = folder / f"emulated_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.with_suffix(".so").exists():
        path.with_suffix(".cpp").write_text(text, encoding="utf-8")
        flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
        subprocess.run(["g++", *flags, "-o", path.with_suffix(".so"), path.with_suffix(".cpp")], check=True)
    return path.with_suffix(".so")
