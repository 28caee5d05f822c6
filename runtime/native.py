"""Where the native half of the runtime lies and how it is compiled: read by whoever links a fused model's library.

A library is the sources below, one generated source that defines `tile_generated_library`, and the generated kernels,
linked with nothing but libc; an NVIDIA driver is opened when it is first needed. The result is at once a custom-op
library (`RegisterCustomOps`) and an execution provider (`CreateEpFactories`); nothing else of it is visible.
"""

from pathlib import Path

import tilecore
from tilecore.toolchain import Source

SHIM_DIRECTORY = Path(__file__).parent / "csrc"
KERNEL_ABI_DIRECTORY = Path(tilecore.__file__).parent / "csrc"

SHIM_NAMES = ("kernel_call.c", "cuda_driver.c", "cuda_call.c", "custom_ops.c", "plugin_ep.c")
SHIM_SOURCES = tuple(SHIM_DIRECTORY / name for name in SHIM_NAMES)
INCLUDE_DIRECTORIES = (SHIM_DIRECTORY, KERNEL_ABI_DIRECTORY)

COMPILE_FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")
# nodelete: threads of ONNX Runtime free their scratch when they end, which may be after the library was unloaded.
LINK_FLAGS = ("-shared", "-pthread", "-ldl", "-Wl,-z,nodelete", "-Wl,-z,defs")

BRIEFLY = "-O1"  # it does nothing per element, and takes the compiler half as long as with -O2


def shim_sources() -> tuple[Source, ...]:
    """The ONNX Runtime shim: what makes a library of kernels custom operators."""
    return tuple(Source(path.read_text(), (BRIEFLY, "-pthread"), INCLUDE_DIRECTORIES) for path in SHIM_SOURCES)
