"""The CUDA driver by ctypes: modules, launches and tensor maps, in the context that the caller's framework has made."""

import ctypes
from functools import cache
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.cuda.errors import CudaError

MAP_TYPES = {
    DType.F16: 6, DType.F32: 7, DType.BF16: 9, DType.U8: 0, DType.I8: 0, DType.F8E4M3: 0, DType.F8E5M2: 0,
    DType.BOOL: 0,
}  # CU_TENSOR_MAP_DATA_TYPE_*  # fmt: skip
SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a box along its last dim
PROMOTIONS = {128: 2, 256: 3}  # by the bytes that the L2 cache fetches at a time
MAX_DYNAMIC_SHARED, WIDE_CLUSTER = 8, 14  # attributes of a function
PROCESSORS, MAJOR, MINOR, SHARED_BYTES = 16, 75, 76, 97  # attributes of a device
CLUSTER_SHAPE, EARLY = 4, 6  # attributes of a launch; EARLY: it may begin before the one before it in its stream ends
RELAXED, NON_BLOCKING = 2, 1  # what a thread may do while it captures; how a stream is created
PORTABLE_CLUSTER = 8  # blocks that any card's clusters may have


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


def load_function(image: bytes, name: str, shared_bytes: int, *, wide_cluster: bool = False) -> ctypes.c_void_p:
    """A kernel of a cubin, allowed `shared_bytes` of dynamic shared memory and, if asked, clusters of 16 blocks."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared_bytes)
    if wide_cluster:
        call("cuFuncSetAttribute", function, WIDE_CLUSTER, 1)
    return function


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; of its value, as many words as the attribute has."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


def clusters(function: ctypes.c_void_p, cluster: int, threads: int, shared_bytes: int) -> int:
    """How many clusters of `cluster` blocks run at the same time: they do not cross groups of processors."""
    attribute = _Attribute(CLUSTER_SHAPE, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
    launch = _Launch((cluster, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1)
    count = ctypes.c_int()
    call("cuOccupancyMaxActiveClusters", ctypes.byref(count), function, ctypes.byref(launch))
    if count.value == 0:
        raise CudaError(f"no cluster of {cluster} blocks with {shared_bytes} bytes of shared memory each fits the card")
    return count.value


def launch(
    function: ctypes.c_void_p, blocks: int, threads: int, shared_bytes: int, stream: int, arguments: Any, *, early: bool
) -> None:
    """Put a kernel on a stream. `early`: it sets itself up while the one before it ends, and waits for that itself."""
    begin = _Attribute(EARLY, 0, (ctypes.c_uint * 16)(1))
    shape = (blocks, 1, 1), (threads, 1, 1), shared_bytes
    config = _Launch(*shape, ctypes.c_void_p(stream), ctypes.pointer(begin), int(early))
    call("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)


def capture(stream: int) -> int:
    """The number of the capture that a stream is in, 0 for none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    told = ctypes.byref(status), ctypes.byref(number), None, None, None
    call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *told)
    return number.value if status.value else 0


def zeros(size: int) -> int:
    """The address of `size` bytes of zeros, which stay; streams of this thread may be captured meanwhile."""
    mode, address, stream = ctypes.c_int(RELAXED), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        call("cuMemsetD8Async", address, ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)
        call("cuStreamSynchronize", stream)
        call("cuStreamDestroy_v2", stream)
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert address.value is not None
    return address.value


def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return _attribute(device, PROCESSORS)


def capability(device: int) -> tuple[int, int]:
    """The compute capability of a device."""
    return _attribute(device, MAJOR), _attribute(device, MINOR)


def shared_bytes(device: int) -> int:
    """Shared memory that one block may have."""
    return _attribute(device, SHARED_BYTES)


def runs_on(arch: str, found: tuple[int, int]) -> bool:
    """Whether cubins for `arch` run on a card: those for sm_90a on 9.0 alone, those for sm_80 on 8.0 and later 8.x."""
    number = int(arch.removeprefix("sm_").rstrip("a"))
    major, minor = divmod(number, 10)
    return found == (major, minor) if arch.endswith("a") else found[0] == major and found[1] >= minor


def _attribute(device: int, which: int) -> int:
    handle, value = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDeviceGetAttribute", ctypes.byref(value), which, handle)
    return value.value


def swizzle_of(dtype: DType, box: tuple[int, ...], *, swizzled: bool) -> int:
    """The driver's name for the swizzle of a box, which spans its rows."""
    return SWIZZLES[box[-1] * dtype.row.bytes] if swizzled else 0


def new_map(address: int, dtype: DType, shape: tuple[int, ...], pitches: tuple[int, ...],
            box: tuple[int, ...], *, fetched: int, swizzled: bool = True) -> Any:  # fmt: skip
    """A tensor map: dims outermost first, `pitches` in bytes of all but the last; zeros beyond the tensor. The L2 cache
    gets `fetched` bytes of memory at a time.
    """
    rank = len(shape)
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    result = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    call(
        "cuTensorMapEncodeTiled", ctypes.byref(result), MAP_TYPES[dtype], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)), (ctypes.c_uint64 * (rank - 1))(*reversed(pitches)),
        (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*([1] * rank)), 0,
        swizzle_of(dtype, box, swizzled=swizzled), PROMOTIONS[fetched], 0,
    )  # fmt: skip
    return result
