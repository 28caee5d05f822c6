"""Plays ONNX Runtime's part towards a library's ops for the CUDA provider, where there is no ONNX Runtime with CUDA.

Comes in: a library and tensors in whatever memory the caller has, as (address, ONNX type, shape). Goes out: what the
library wrote through the addresses that `allocate` gave it. Only the slots that it uses are there: any other is 0.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POINTER = ctypes.c_void_p
SLOTS = 425
PROVIDER = "CUDAExecutionProvider"


class RefusedError(Exception):
    """The library gave back a status."""


@dataclass(frozen=True)
class Value:
    """A tensor of the node."""

    address: int
    kind: int
    shape: tuple[int, ...]


Allocate = Callable[[tuple[int, ...], int], int]  # (shape, element bytes or 1) → address


class PlayedRuntime:
    """One ONNX Runtime 1.`minor` with a CUDA provider that has `stream`."""

    def __init__(self, library: Path, *, stream: int, scratch: Callable[[int], int], minor: int = 24) -> None:
        self.library = ctypes.CDLL(str(library))
        self.stream = stream
        self.scratch = scratch
        self.statuses: list[tuple[int, str]] = []
        self.ops: list[int] = []
        self.values: list[Value] = []
        self.inputs: Sequence[int] = ()
        self.outputs: dict[int, int] = {}
        self.allocate: Callable[[int, tuple[int, ...]], Value] | None = None
        self.freed: list[int] = []
        self.allocated: list[int] = []
        self.version = ctypes.create_string_buffer(f"1.{minor}.0".encode())
        self.kept: list[Any] = []
        self.table = (POINTER * SLOTS)()
        self._fill()
        get_api = ctypes.CFUNCTYPE(POINTER, ctypes.c_uint32)(lambda version: ctypes.addressof(self.table))
        get_version = ctypes.CFUNCTYPE(POINTER)(lambda: ctypes.addressof(self.version))
        self.kept += [get_api, get_version]
        self.base = (POINTER * 2)(*(ctypes.cast(one, POINTER) for one in (get_api, get_version)))
        self.library.RegisterCustomOps.restype = POINTER
        self._expect(self.library.RegisterCustomOps(POINTER(1), ctypes.byref(self.base)))

    def _expect(self, status: int | None) -> None:
        if status:
            raise RefusedError(self.statuses[status - 1][1])

    def _slot(self, index: int, arguments: Sequence[Any], body: Callable[..., Any], result: Any = POINTER) -> None:
        function = ctypes.CFUNCTYPE(result, *arguments)(body)
        self.kept.append(function)
        self.table[index] = ctypes.cast(function, POINTER).value

    def _fill(self) -> None:
        out, size = ctypes.POINTER(POINTER), ctypes.c_size_t
        longs, ints, sizes = (ctypes.POINTER(kind) for kind in (ctypes.c_int64, ctypes.c_int32, size))
        self._slot(0, [ctypes.c_int, ctypes.c_char_p], self._create_status)
        self._slot(26, [ctypes.c_char_p, out], lambda domain, found: self._give(found, 1))
        self._slot(27, [POINTER, POINTER], lambda domain, op: self.ops.append(op))
        self._slot(28, [POINTER, POINTER], lambda options, domain: None)
        self._slot(51, [POINTER, out], lambda value, found: self._give(found, self.values[value - 1].address))
        self._slot(60, [POINTER, ints], lambda value, found: self._write(found, self.values[value - 1].kind))
        self._slot(61, [POINTER, sizes], lambda value, found: self._write(found, len(self.values[value - 1].shape)))
        self._slot(62, [POINTER, longs, size], self._dimensions)
        self._slot(65, [POINTER, out], lambda value, found: self._give(found, value))
        self._slot(75, [POINTER, size, out], self._alloc)
        self._slot(76, [POINTER, POINTER], lambda allocator, memory: self.freed.append(memory))
        self._slot(90, [POINTER, size, out], lambda context, index, found: self._give(found, self.inputs[index]))
        self._slot(91, [POINTER, size, longs, size, out], self._output)
        self._slot(93, [POINTER], lambda status: None, None)
        self._slot(99, [POINTER], lambda info: None, None)
        self._slot(101, [POINTER], lambda domain: None, None)
        self._slot(132, [POINTER], lambda allocator: None, None)
        self._slot(193, [POINTER, out], lambda context, found: self._give(found, self.stream))
        self._slot(194, [POINTER, out], lambda value, found: self._give(found, 1))
        self._slot(253, [POINTER, POINTER, out], lambda context, memory, found: self._give(found, 1))
        self._slot(414, [POINTER, ints, ctypes.POINTER(longs), sizes], self._reference)

    def _create_status(self, code: int, message: bytes) -> int:
        self.statuses.append((code, message.decode()))
        return len(self.statuses)

    def _give(self, found: Any, value: int) -> None:
        found[0] = value

    def _write(self, found: Any, value: int) -> None:
        found[0] = value

    def _dimensions(self, value: int, found: Any, rank: int) -> None:
        for axis, extent in enumerate(self.values[value - 1].shape):
            found[axis] = extent

    def _reference(self, value: int, kind: Any, dims: Any, rank: Any) -> None:
        shape = self.values[value - 1].shape
        array = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.kept.append(array)
        kind[0], rank[0] = self.values[value - 1].kind, len(shape)
        dims[0] = ctypes.cast(array, ctypes.POINTER(ctypes.c_int64))

    def _alloc(self, allocator: int, size: int, found: Any) -> None:
        found[0] = self.scratch(size)
        self.allocated.append(found[0])

    def _output(self, context: int, index: int, dims: Any, rank: int, found: Any) -> None:
        if index not in self.outputs:
            assert self.allocate is not None
            self.values.append(self.allocate(index, tuple(dims[:rank])))
            self.outputs[index] = len(self.values)
        found[0] = self.outputs[index]

    def _member(self, op: int, index: int, result: Any, *arguments: Any) -> Any:
        address = POINTER.from_address(op + 8 * index).value
        assert address is not None
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def names(self, provider: str | None) -> dict[str, int]:
        """The ops of a provider, None for the CPU's: their addresses by name."""
        found: dict[str, int] = {}
        for op in self.ops:
            own = self._member(op, 3, ctypes.c_char_p, POINTER)(op)
            if (own.decode() if own else None) == provider:
                found[self._member(op, 2, ctypes.c_char_p, POINTER)(op).decode()] = op
        return found

    def create(self, op: int) -> int:
        """A kernel of an op, as at session creation. RefusedError with the library's text."""
        kernel = POINTER()
        create = self._member(op, 17, POINTER, POINTER, POINTER, POINTER, ctypes.POINTER(POINTER))
        self._expect(create(op, ctypes.addressof(self.table), 1, ctypes.byref(kernel)))
        assert kernel.value is not None
        return kernel.value

    def run(
        self, op: int, kernel: int, inputs: Sequence[Value], allocate: Callable[[int, tuple[int, ...]], Value]
    ) -> None:
        """One call of a node. RefusedError with the library's text."""
        self.values = list(inputs)
        self.inputs, self.outputs, self.allocate = range(1, len(inputs) + 1), {}, allocate
        self._expect(self._member(op, 18, POINTER, POINTER, POINTER)(kernel, 1))
