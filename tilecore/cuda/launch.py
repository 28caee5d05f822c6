"""Launching a built kernel on arrays in device memory, on the caller's stream.

Invariant: no copy or synchronisation, so a launch may be captured in a CUDA graph. Tensor maps are kept by the arrays'
addresses, shapes and strides. A kernel with a workspace is given one of its own per stream, and per capture of it, when
it first runs there; like the kernel it stays as long as the context. A graph must not run beside itself, as ever.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Const, Expr, Sym
from tilecore.contract.spec import Tensor
from tilecore.cuda import driver
from tilecore.cuda.array import DeviceArray, device_array
from tilecore.cuda.compile import CudaKernel
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import MapPlan
from tilecore.cuda.row_plan import RowPlan

EARLY_ARCH = "sm_90a"  # whose kernels may begin before the launch before them has ended
PITCH = 16  # bytes that every pitch and address of a tensor copy is a multiple of


class Launcher:
    """A kernel loaded in the current context. Call it with arrays by tensor name."""

    def __init__(self, kernel: CudaKernel) -> None:
        self.kernel = kernel
        self.plan = kernel.plan
        self.tensors = (*self.plan.program.inputs, *self.plan.program.outputs)
        self.functions: dict[int, ctypes.c_void_p] = {}
        self.maps: dict[Any, Any] = {}
        self.room: dict[int, int] = {}  # tiles that run at the same time, by context
        # (address, bytes) by context, stream and capture
        self.workspaces: dict[tuple[int, int, int], tuple[int, int]] = {}

    def __call__(self, arrays: Mapping[str, Any], *, stream: int = 0) -> None:
        """Run on `arrays`, outputs included, in order on `stream` (a CUstream's address; 0 is the default stream).

        CudaError for a missing array, another dtype, shapes that do not fit together, or rows that are not aligned.
        """
        found = {tensor.name: self._array(tensor, arrays) for tensor in self.tensors}
        sizes = self._sizes(found)
        tiles = self._tiles(sizes)
        if tiles == 0:
            return
        device = next(iter(found.values())).device
        context = driver.ensure_context(device)
        cluster = self.plan.cluster
        if context not in self.functions:
            self._check_card(device)
            image = self.kernel.cubin.image
            self.functions[context] = driver.load_function(
                image,
                self.kernel.name,
                self.plan.shared_bytes,
                wide_cluster=self.plan.cluster > driver.PORTABLE_CLUSTER,
            )
            function = self.functions[context]
            self.room[context] = (
                driver.processors(device) * self.plan.blocks if cluster == 1
                else driver.clusters(function, cluster, self.plan.threads, self.plan.shared_bytes)
            )  # fmt: skip
        room = tiles if isinstance(self.plan, RowPlan) else self.room[context]
        blocks = min(tiles, room) * cluster
        values = self._arguments(found, sizes, self._workspace(sizes, context, stream))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = blocks, self.plan.threads, self.plan.shared_bytes
        driver.launch(self.functions[context], *shape, stream, pointers, early=self.plan.profile.arch == EARLY_ARCH)

    def _check_card(self, device: int) -> None:
        profile, found = self.plan.profile, driver.capability(device)
        if not driver.runs_on(profile.arch, found):
            card = ".".join(map(str, found))
            raise CudaError(
                f"{self.kernel.name} was built for {profile.arch}, this card has compute capability {card}: build it "
                "with the profile of such a card"
            )
        room = driver.shared_bytes(device)
        if self.plan.shared_bytes > room:
            raise CudaError(
                f"{self.kernel.name} takes {self.plan.shared_bytes} bytes of shared memory, as {profile.name} has "
                f"them; this card has {room}"
            )

    def _array(self, tensor: Tensor, arrays: Mapping[str, Any]) -> DeviceArray:
        if tensor.name not in arrays:
            raise CudaError(f"no array for {tensor}; the kernel takes {', '.join(map(str, self.tensors))}")
        array = device_array(arrays[tensor.name], tensor.name)
        if tensor.dtype.is_eighth and array.dtype is DType.U8:  # not every framework exports such arrays otherwise
            array = replace(array, dtype=tensor.dtype)
        if array.dtype is not tensor.dtype or len(array.shape) != len(tensor.shape):
            raise CudaError(f"{tensor.name} is {array.dtype}{list(array.shape)}; the kernel takes {tensor}")
        if tensor in self.plan.pointers and not array.dense:
            raise CudaError(f"{tensor.name} has strides {array.strides}; the kernel reads it dense and row-major")
        if tensor in self.plan.aligned and array.address % PITCH:
            raise CudaError(
                f"{tensor.name} starts at {array.address:#x}; the kernel reads or writes {PITCH} bytes at a time there"
            )
        return array

    def _sizes(self, found: Mapping[str, DeviceArray]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for tensor in self.plan.program.inputs:
            for dim, extent in zip(tensor.shape, found[tensor.name].shape, strict=True):
                if isinstance(dim, Sym) and sizes.setdefault(dim.name, extent) != extent:
                    raise CudaError(f"{tensor.name} has {dim} = {extent}, where another input has {sizes[dim.name]}")
        for tensor in self.tensors:
            expected = tuple(_value(dim, sizes) for dim in tensor.shape)
            if expected != found[tensor.name].shape:
                raise CudaError(f"{tensor.name} is {list(found[tensor.name].shape)}, expected {list(expected)}")
        if any(extent >= 2**31 for array in found.values() for extent in array.shape):
            raise CudaError("an extent of 2^31 or more: kernels count positions in 32 bits")
        if "tile_floordiv" in self.kernel.source:  # positions themselves are 32-bit there
            large = [name for name, array in found.items() if math.prod(array.shape) >= 2**31]
            if large:
                raise CudaError(f"{', '.join(large)}: 2^31 elements or more in a kernel that divides positions")
        return sizes

    def _tiles(self, sizes: Mapping[str, int]) -> int:
        tiles = 1
        for axis in self.plan.task_axes:
            assert axis.extent is not None
            tiles *= _value(axis.extent, sizes)
        if tiles >= 2**31:
            raise CudaError(f"{tiles} tiles: kernels count them in 32 bits")
        return tiles

    def _workspace(self, sizes: Mapping[str, int], context: int, stream: int) -> list[int]:
        """The address of memory that no launch at the same time uses, its counters 0; nothing where none is needed."""
        tensor = self.plan.workspace
        if tensor is None:
            return []
        size = _value(tensor.shape[0], sizes) * tensor.dtype.row.bytes
        key = context, stream, driver.capture(stream)
        if self.workspaces.get(key, (0, 0))[1] < size:  # launches before may still use the one they had
            self.workspaces[key] = driver.zeros(size), size
        return [self.workspaces[key][0]]

    def _arguments(
        self, found: Mapping[str, DeviceArray], sizes: Mapping[str, int], workspace: Sequence[int]
    ) -> list[Any]:
        values: list[Any] = [self._map(plan, found[plan.tensor.name]) for plan in self.plan.maps]
        addresses = [*(found[tensor.name].address for tensor in self.plan.pointers), *workspace]
        values += [ctypes.c_void_p(address) for address in addresses]
        return values + [ctypes.c_int(sizes[symbol.name]) for symbol in self.plan.symbols]

    def _map(self, plan: MapPlan, array: DeviceArray) -> Any:
        key = (plan, array)
        if key not in self.maps:
            size = array.dtype.row.bytes
            if plan.shape is not None:
                if not array.dense:
                    raise CudaError(f"{plan.tensor.name} has strides {array.strides}; levels are read dense")
                array = replace(array, shape=plan.shape, strides=(plan.shape[1], 1))
            if 0 in array.shape:
                shape = list(array.shape)
                raise CudaError(
                    f"{plan.tensor.name} is {shape}: it is empty, and nothing can be summed over it on a card"
                )
            pitches = tuple(stride * size for stride in array.strides[:-1])
            for dim, pitch in enumerate(pitches):
                if array.shape[dim] > 1 and pitch % PITCH:
                    raise CudaError(
                        f"{plan.tensor.name} has a pitch of {pitch} bytes along dim {dim}: tensor copies need "
                        f"multiples of {PITCH}; pad its rows to a multiple of {PITCH // size} elements and "
                        "pass the narrowed view"
                    )
            if array.strides[-1] != 1 or array.address % PITCH:
                raise CudaError(f"{plan.tensor.name} must be contiguous along its last dim and {PITCH}-byte aligned")
            # a dim of one element may have any stride; the driver still wants an aligned one
            aligned = tuple(-(-pitch // PITCH) * PITCH for pitch in pitches)
            self.maps[key] = driver.new_map(
                array.address,
                array.dtype,
                array.shape,
                aligned,
                plan.box,
                fetched=plan.fetched,
                swizzled=plan.swizzled,
            )
        return self.maps[key]


def _value(expr: Expr, sizes: Mapping[str, int]) -> int:
    return int(expr.value) if isinstance(expr, Const) else int(Evaluator({}, sizes)(expr))
