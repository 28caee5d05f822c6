"""Arrays of any framework as address, shape and strides, by DLPack; nothing is copied or synchronised."""

import ctypes
from dataclasses import dataclass
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.cuda.errors import CudaError

CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
NO_SYNCHRONISATION = -1
TYPES = {
    (2, 32): DType.F32, (2, 16): DType.F16, (4, 16): DType.BF16, (0, 64): DType.I64, (0, 32): DType.I32,
    (0, 8): DType.I8, (1, 8): DType.U8, (6, 8): DType.BOOL, (10, 8): DType.F8E4M3, (12, 8): DType.F8E5M2,
}  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]  # fmt: skip


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array in device memory; strides in elements."""

    address: int
    device: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Row-major without gaps, as arrays of no elements are, whatever their strides."""
        if 0 in self.shape:
            return True
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


def device_array(array: Any, name: str) -> DeviceArray:
    """What an object with `__dlpack__` holds. CudaError for one that is not on a CUDA device."""
    if not hasattr(array, "__dlpack__"):
        raise CudaError(f"{name} is {type(array).__name__}, which has no __dlpack__: pass a torch, CuPy or JAX array")
    if array.__dlpack_device__()[0] not in CUDA_DEVICES:
        raise CudaError(f"{name} is not in CUDA memory")
    capsule = array.__dlpack__(stream=NO_SYNCHRONISATION)
    tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    dtype = TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise CudaError(f"{name} has an element type that no kernel reads (DLPack {tensor.code}, {tensor.bits} bits)")
    shape = tuple(tensor.shape[i] for i in range(tensor.rank))
    dense: list[int] = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        dense[i] = dense[i + 1] * shape[i + 1]
    strides = tuple(tensor.strides[i] for i in range(tensor.rank)) if tensor.strides else tuple(dense)
    address = (tensor.data or 0) + tensor.offset
    return DeviceArray(address, tensor.device, dtype, shape, strides)
