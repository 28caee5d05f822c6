"""The CUDA driver by ctypes: modules, launches and tensor maps, in the context that the caller's framework has made."""

import ctypes
from functools import cache
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.cuda.errors import CudaError

MAP_TYPES = {DType.F16: 6, DType.BF16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
SWIZZLE_128, PROMOTE_256 = 3, 3
MAX_DYNAMIC_SHARED, PROCESSORS = 8, 16  # a function's and a device's attribute


class TensorMap(ctypes.Structure):
    """The bytes of a CUtensorMap; allocate with `new_map`, which aligns it."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


@cache
def libcuda() -> Any:
    """The driver, initialised. CudaError where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("libcuda.so.1 was not found: launching needs an NVIDIA driver") from error
    status = library.cuInit(0)
    if status:
        raise CudaError(f"cuInit failed with status {status}: is there a GPU?")
    return library


def call(name: str, *args: Any) -> None:
    """A driver function. CudaError names it and its status."""
    library = libcuda()
    status = getattr(library, name)(*args)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{name} failed: {text.value.decode() if text.value else status}")


def ensure_context(device: int) -> int:
    """Make the device's primary context, which frameworks use, current where none is; its address."""
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        libcuda()
        handle = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(handle), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        call("cuCtxSetCurrent", context)
    assert context.value is not None
    return context.value


def load_function(image: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    """A kernel of a cubin, allowed `shared_bytes` of dynamic shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared_bytes)
    return function


def processors(device: int) -> int:
    """Multiprocessors of a device."""
    handle, count = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDeviceGetAttribute", ctypes.byref(count), PROCESSORS, handle)
    return count.value


def new_map(address: int, dtype: DType, shape: tuple[int, ...], pitches: tuple[int, ...],
            box: tuple[int, ...]) -> Any:  # fmt: skip
    """A tensor map: dims outermost first, `pitches` in bytes of all but the last; zeros beyond the tensor."""
    rank = len(shape)
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    result = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    call(
        "cuTensorMapEncodeTiled", ctypes.byref(result), MAP_TYPES[dtype], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)), (ctypes.c_uint64 * (rank - 1))(*reversed(pitches)),
        (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*([1] * rank)), 0, SWIZZLE_128, PROMOTE_256,
        0,
    )  # fmt: skip
    return result
