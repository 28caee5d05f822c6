"""Compiled kernels as Python callables over numpy arrays: for tests, tuning and kernel authors.

Calls run on the calling thread; `time_call` runs a call on several, as hosts do, and says how long it takes.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilecore.aligned import LINE
from tilecore.compile import HEADERS, Kernel
from tilecore.contract.spec import outputs_of
from tilecore.link import Linkable, Objects, link_kernels
from tilecore.target import Target
from tilecore.toolchain import Source, Toolchain, load_library


class KernelError(ValueError):
    """A call whose arrays do not fit the kernel's signature; carries the kernel's own message."""


class _Table(ctypes.Structure):
    """`tile_kernel` of tile_kernel.h."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("n_inputs", ctypes.c_int32), ("n_outputs", ctypes.c_int32),
        ("input_types", ctypes.c_void_p), ("outputs", ctypes.c_void_p), ("bind", ctypes.c_void_p),
        ("shape", ctypes.c_void_p), ("tasks", ctypes.c_void_p), ("group", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p), ("work", ctypes.c_void_p), ("run", ctypes.c_void_p),
        ("check", ctypes.c_void_p),
    )  # fmt: skip


class _Variant(ctypes.Structure):
    _fields_ = (
        ("isa", ctypes.c_char_p), ("supported", ctypes.CFUNCTYPE(ctypes.c_int32)), ("n_kernels", ctypes.c_int32),
        ("kernels", ctypes.POINTER(ctypes.POINTER(_Table))),
    )  # fmt: skip


class _Library(ctypes.Structure):
    _fields_ = (("abi", ctypes.c_int32), ("n_variants", ctypes.c_int32), ("variants", ctypes.POINTER(_Variant)))


_Sizes = ctypes.POINTER(ctypes.c_int64)
_BIND = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.POINTER(_Sizes), ctypes.POINTER(ctypes.c_int32), _Sizes, ctypes.c_char_p, ctypes.c_size_t
)
_SHAPE = ctypes.CFUNCTYPE(None, _Sizes, ctypes.c_int32, _Sizes)
_COUNT = ctypes.CFUNCTYPE(ctypes.c_int64, _Sizes)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int32, _Sizes, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p, ctypes.c_size_t)
_RUN = ctypes.CFUNCTYPE(
    None,
    _Sizes,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
    _Sizes,
    ctypes.c_int64,
    ctypes.c_int64,
)


@dataclass(frozen=True)
class Native:
    """A kernel's table in a loaded library, as Python functions."""

    name: str
    library: ctypes.CDLL
    table: _Table

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> "ctypes.Array[ctypes.c_int64]":
        """The symbols of a call with inputs of these shapes. KernelError when they do not fit."""
        symbols = (ctypes.c_int64 * 32)()
        dims = [(ctypes.c_int64 * max(1, len(shape)))(*shape) for shape in shapes]
        rows = (_Sizes * max(1, len(dims)))(*(ctypes.cast(shape, _Sizes) for shape in dims))
        ranks = (ctypes.c_int32 * max(1, len(shapes)))(*map(len, shapes))
        error = ctypes.create_string_buffer(256)
        if _BIND(self.table.bind)(rows, ranks, symbols, error, 256):
            raise KernelError(f"{self.name}: {error.value.decode()}")
        return symbols

    def look_at(self, symbols: "ctypes.Array[ctypes.c_int64]", inputs: "ctypes.Array[ctypes.c_void_p]") -> None:
        """KernelError when an index that an input brings is out of range."""
        error = ctypes.create_string_buffer(256)
        if self.table.check and _CHECK(self.table.check)(symbols, inputs, error, 256):
            raise KernelError(f"{self.name}: {error.value.decode()}")

    def cell(self, name: str) -> ctypes.c_int32:
        """A variable that the kernel's library exports."""
        return ctypes.c_int32.in_dll(self.library, name)

    def shape(self, symbols: "ctypes.Array[ctypes.c_int64]", output: int, rank: int) -> tuple[int, ...]:
        """The dims of an output."""
        dims = (ctypes.c_int64 * 8)()
        _SHAPE(self.table.shape)(symbols, output, dims)
        return tuple(dims[:rank])

    def tasks(self, symbols: "ctypes.Array[ctypes.c_int64]") -> tuple[int, int]:
        """(tasks, how many neighbours are cheapest in one run)."""
        return _COUNT(self.table.tasks)(symbols), _COUNT(self.table.group)(symbols)

    def worker(
        self, symbols: "ctypes.Array[ctypes.c_int64]", inputs: Sequence[int | None], outputs: Sequence[int]
    ) -> Callable[[int, int], None]:
        """A function that runs tasks [begin, end) with scratch of its own: one per thread, for the tasks of one call.

        `inputs` and `outputs` are addresses; None where nothing is read.
        """
        size = _COUNT(self.table.scratch)(symbols)
        try:
            scratch = np.full(size + LINE, 0xFF, np.uint8)
        except MemoryError as error:
            raise KernelError(f"{self.name}: no memory for the {size} bytes of its tiles: use smaller ones") from error
        base = scratch[-scratch.ctypes.data % LINE :].ctypes.data
        read = (ctypes.c_void_p * max(1, len(inputs)))(*inputs)
        written = (ctypes.c_void_p * max(1, len(outputs)))(*outputs)
        copied = ctypes.c_int64(-1)
        function = _RUN(self.table.run)

        def run(begin: int, end: int, memory: np.ndarray = scratch) -> None:
            function(symbols, read, written, base, copied, begin, end)

        return run


@dataclass(frozen=True)
class Call:
    """One call's arguments; keeps the arrays that its pointers lead to."""

    symbols: "ctypes.Array[ctypes.c_int64]"
    inputs: "ctypes.Array[ctypes.c_void_p]"
    outputs: "ctypes.Array[ctypes.c_void_p]"
    arrays: list[np.ndarray]
    results: tuple[np.ndarray, ...]
    scratch: np.ndarray
    stride: int  # bytes of scratch of each thread
    tasks: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel in memory: call it with one array per input of its (packed) spec, in order."""

    kernel: Kernel
    native: Native

    def __call__(self, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        """The outputs, in order; each is filled with a poison first. KernelError when a shape does not fit."""
        call = self.prepare(*inputs)
        copied = ctypes.c_int64(-1)
        scratch = call.scratch.ctypes.data
        _RUN(self.native.table.run)(call.symbols, call.inputs, call.outputs, scratch, copied, 0, call.tasks)
        return call.results

    def prepare(self, *inputs: np.ndarray, threads: int = 1) -> "Call":
        """A call with everything that it needs, not run yet. KernelError when a shape does not fit."""
        tensors = self.kernel.spec.inputs
        if len(inputs) != len(tensors):
            raise KernelError(f"{self.kernel.name} takes {len(tensors)} inputs, got {len(inputs)}")
        arrays = [np.asarray(a, order="C") for a in inputs]  # ascontiguousarray gives a number an axis
        for tensor, array in zip(tensors, arrays, strict=True):
            if array.dtype != tensor.dtype.row.numpy:
                raise KernelError(f"{tensor.name} must be {tensor.dtype}, got {array.dtype}")
        symbols = self.native.bind([array.shape for array in arrays])
        outputs = tuple(
            poisoned(self.native.shape(symbols, i, len(t.shape)), t.dtype.row.numpy)
            for i, t in enumerate(outputs_of(self.kernel.spec))
        )
        table = self.native.table
        stride = -(-_COUNT(table.scratch)(symbols) // LINE) * LINE
        whole = np.full(stride * threads + LINE, 0xFF, np.uint8)
        scratch = whole[-whole.ctypes.data % LINE :]
        pointers = (pointers_to(arrays), pointers_to(outputs))
        self.native.look_at(symbols, pointers[0])
        return Call(symbols, *pointers, arrays, outputs, scratch, stride, _COUNT(table.tasks)(symbols))

    def time_call(self, call: "Call", *, threads: int, rounds: int) -> float:
        """Seconds of a call, from `rounds` runs, that was prepared for as many threads.

        They are put together from the best time of each chunk of tasks, which other processes disturb little.
        """
        function = self.native.library.tile_time
        function.restype = ctypes.c_double
        scratch, stride = ctypes.c_void_p(call.scratch.ctypes.data), ctypes.c_int64(call.stride)
        pointers = (call.symbols, call.inputs, call.outputs, scratch, stride)
        seconds = function(ctypes.byref(self.native.table), *pointers, ctypes.c_int32(threads), ctypes.c_int32(rounds))
        if seconds < 0:
            raise KernelError(f"{self.kernel.name}: cannot start {threads} threads")
        return float(seconds)


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An output that shows what was not written: NaN, or the bit pattern of -1."""
    size = int(np.prod(shape)) * dtype.itemsize
    return np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape)


def pointers_to(arrays: Sequence[np.ndarray]) -> "ctypes.Array[ctypes.c_void_p]":
    """The addresses of arrays, as kernels take them."""
    return (ctypes.c_void_p * max(1, len(arrays)))(*(a.ctypes.data for a in arrays))


def load_kernel(kernel: Kernel, target: Target, toolchain: Toolchain) -> CompiledKernel:
    """Build `kernel` for `target` and load it into this process. BuildError when the compiler refuses it."""
    return load_kernels([kernel], target, toolchain)[0]


def load_kernels(kernels: Sequence[Kernel], target: Target, toolchain: Toolchain) -> list[CompiledKernel]:
    """Build kernels of distinct names as one library and load it, in their order."""
    timer = Source((HEADERS / "tile_time.c").read_text(), ("-pthread",), (HEADERS,))
    with Objects(lambda: toolchain) as objects:
        natives = _natives(kernels, link_kernels(kernels, [target], objects, host=[timer]))
    return [CompiledKernel(kernel, native) for kernel, native in zip(kernels, natives, strict=True)]


def load_native(kernel: Linkable, target: Target, toolchain: Toolchain) -> Native:
    """The table of a kernel with C text for `target`, in this process. BuildError when the compiler refuses it."""
    with Objects(lambda: toolchain) as objects:
        return _natives([kernel], link_kernels([kernel], [target], objects))[0]


def _natives(kernels: Sequence[Linkable], path: Path) -> list[Native]:
    library = load_library(path)
    variant = _Library.in_dll(library, "tile_generated_library").variants[0]
    variant.supported()  # asks the system for what the processor's tiles need
    return [Native(kernel.name, library, variant.kernels[i].contents) for i, kernel in enumerate(kernels)]
