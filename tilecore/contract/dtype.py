"""Element types: one row each with its ONNX code, size and numpy equivalent."""

import enum
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DTypeRow:
    """What the compiler knows of one element type."""

    label: str
    onnx: int  # TensorProto.DataType
    bytes: int
    numpy: np.dtype
    kind: str  # "float", "int" (signed or not) or "bool"


class DType(enum.Enum):
    """An element type. `DType.F32.row.bytes` is 4."""

    __hash__ = object.__hash__  # members are unique, and expressions hash them all the time

    F64 = DTypeRow("f64", 11, 8, np.dtype(np.float64), "float")
    F32 = DTypeRow("f32", 1, 4, np.dtype(np.float32), "float")
    F16 = DTypeRow("f16", 10, 2, np.dtype(np.float16), "float")
    BF16 = DTypeRow("bf16", 16, 2, np.dtype(ml_dtypes.bfloat16), "float")
    F8E4M3 = DTypeRow("f8e4m3", 17, 1, np.dtype(ml_dtypes.float8_e4m3fn), "float")  # no infinities
    F8E5M2 = DTypeRow("f8e5m2", 19, 1, np.dtype(ml_dtypes.float8_e5m2), "float")
    I64 = DTypeRow("i64", 7, 8, np.dtype(np.int64), "int")
    I32 = DTypeRow("i32", 6, 4, np.dtype(np.int32), "int")
    I16 = DTypeRow("i16", 5, 2, np.dtype(np.int16), "int")
    I8 = DTypeRow("i8", 3, 1, np.dtype(np.int8), "int")
    U8 = DTypeRow("u8", 2, 1, np.dtype(np.uint8), "int")
    I4 = DTypeRow("i4", 22, 1, np.dtype(ml_dtypes.int4), "int")  # below 8 bits: `bytes` are those of one alone
    U4 = DTypeRow("u4", 21, 1, np.dtype(ml_dtypes.uint4), "int")
    I2 = DTypeRow("i2", 26, 1, np.dtype(ml_dtypes.int2), "int")
    U2 = DTypeRow("u2", 25, 1, np.dtype(ml_dtypes.uint2), "int")
    BOOL = DTypeRow("bool", 9, 1, np.dtype(np.bool_), "bool")

    @classmethod
    def _missing_(cls, value: object) -> "DType | None":
        """The member of a name or of another library's type: `DType("float32")`, `DType(np.float32)`."""
        name = type_name(value)
        return next((dtype for dtype in cls if dtype.value.numpy.name == name), None)

    @property
    def row(self) -> DTypeRow:
        """The table row of this type."""
        return self.value

    @property
    def is_float(self) -> bool:
        """True for f64, f32, f16, bf16 and the two of 8 bits."""
        return self.value.kind == "float"

    @property
    def is_int(self) -> bool:
        """True for the integer types, bool excluded."""
        return self.value.kind == "int"

    @property
    def is_eighth(self) -> bool:
        """True for floats of 8 bits, which kernels for cards multiply and nothing else computes with."""
        return self.is_float and self.value.bytes == 1

    @property
    def bits(self) -> int:
        """Bits of one element among others: 4 or 2 where a byte holds several."""
        return {DType.I4: 4, DType.U4: 4, DType.I2: 2, DType.U2: 2}.get(self, 8 * self.value.bytes)

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest number of an integer type."""
        info = ml_dtypes.iinfo(self.value.numpy)
        return int(info.min), int(info.max)

    def __call__(self, value: Any) -> Any:
        """`value` in this type: a number as a numpy scalar, a symbolic value by its own `astype`."""
        return value.astype(self) if hasattr(value, "astype") else self.value.numpy.type(value)

    def __str__(self) -> str:
        return self.value.label

    def __repr__(self) -> str:
        return self.value.label


def from_onnx(code: int) -> DType:
    """The type with ONNX `TensorProto.DataType` code `code`; KeyError when graphs' values of it are left alone."""
    for dtype in DType:
        if dtype.value.onnx == code and not dtype.is_eighth:
            return dtype
    raise KeyError(code)


def from_numpy(dtype: np.dtype) -> DType:
    """The type with numpy dtype `dtype`; KeyError when the compiler has none."""
    for candidate in DType:
        if candidate.value.numpy == dtype:
            return candidate
    raise KeyError(dtype)


def type_name(dtype: object) -> str:
    """The name of a type of whatever library: "float32" of that string, `np.float32` and `torch.float32`."""
    return str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]
