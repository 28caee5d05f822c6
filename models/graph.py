"""Writes ONNX graphs by hand: operators and seeded weights in, a checked ModelProto out.

Every name is unique and every random weight comes from one seeded stream, so the same calls give the same bytes.
A writer with `sizes` builds the static twin of a symbolic graph: its dims become numbers, and shape arithmetic
(`extent`, `shape`) becomes constants, as exporters fold it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Dim = int | str
Extent = int | str  # a number, or the name of a scalar int64 value that holds one
IR_VERSION = 9  # readable by every runtime since ONNX Runtime 1.17
IR_VERSION_OF_LATE_OPSETS = 10


class GraphWriter:
    """Collects nodes and initializers of one graph; `finish` returns the model."""

    def __init__(
        self,
        opset: int,
        *,
        seed: int = 0,
        sizes: Mapping[str, int] | None = None,
        constants: Literal["initializers", "nodes"] = "initializers",
    ) -> None:
        """`constants="nodes"` writes small constants as Constant nodes, as the TorchScript exporter does."""
        self.opset = opset
        self._sizes = sizes
        self._constant_nodes = constants == "nodes"
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._counts: dict[str, int] = {}
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Generator[None]:
        """Prefixes the names of nodes written inside, as module paths do in exported models."""
        outer = self._scope
        self._scope = f"{outer}/{name}"
        yield
        self._scope = outer

    @property
    def static(self) -> bool:
        """Whether dims are numbers."""
        return self._sizes is not None

    def dim(self, dim: Dim) -> Dim:
        """The dim as this graph declares it: a number when static; "a + b" adds up the sizes of a and b."""
        if self._sizes is None or isinstance(dim, int):
            return dim
        return sum(int(part) if part.isdigit() else self._sizes[part] for part in dim.split(" + "))

    def input(self, name: str, dtype: npt.DTypeLike, dims: Sequence[Dim | None]) -> str:
        """Declares a graph input. Raises ValueError if the name is taken."""
        if name in self._counts:
            raise ValueError(f"the input {name!r} has the name of another value")
        self._counts[name] = 1
        self._inputs.append(self._value_info(name, dtype, dims))
        return name

    def output(self, name: str, dtype: npt.DTypeLike, dims: Sequence[Dim | None]) -> None:
        """Declares that the value `name` is a graph output; a dim that is None is left open."""
        self._outputs.append(self._value_info(name, dtype, dims))

    def op(self, op_type: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Writes a node of one output and returns the output's name."""
        return self.ops(op_type, *inputs, outs=(out,), **attributes)[0]

    def ops(self, op_type: str, *inputs: str, outs: Sequence[str | None], **attributes: Any) -> tuple[str, ...]:
        """Writes a node of `len(outs)` outputs; None takes a name made from the scope and the operator."""
        name = self._unique(f"{self._scope}/{op_type}")
        outputs = tuple(out or f"{name}_output_{i}" for i, out in enumerate(outs))
        self._nodes.append(helper.make_node(op_type, list(inputs), list(outputs), name=name, **attributes))
        return outputs

    def body(self, name: str, write: Callable[[], None]) -> onnx.GraphProto:
        """The graph of an attribute of If, Loop or Scan: `write` writes its nodes and declares its inputs and outputs.

        It may read whatever was written before. Bodies that are written one after the other use the same names for
        different values, as exporters have it; weights and constants are those of the whole model.
        """
        outer = self._nodes, self._inputs, self._outputs, self._counts
        self._nodes, self._inputs, self._outputs, self._counts = [], [], [], dict(self._counts)
        weights = len(self._initializers)
        write()
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs)
        self._nodes, self._inputs, self._outputs, self._counts = outer
        self._counts |= {tensor.name: 1 for tensor in self._initializers[weights:]}
        return graph

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> str:
        """A small constant; Python floats become float32 and ints int64 unless `dtype` says otherwise."""
        array = np.asarray(value, dtype=dtype)
        if dtype is None and array.dtype == np.float64:
            array = array.astype(np.float32)
        if self._constant_nodes:
            return self.op("Constant", value=numpy_helper.from_array(array))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.initializer(array, "constant")
        return self._constants[key]

    def initializer(self, array: npt.NDArray[np.generic], name: str = "weight") -> str:
        """A weight with the given values."""
        unique = self._unique(f"{self._scope}/{name}".lstrip("/").replace("/", "."))
        self._initializers.append(numpy_helper.from_array(array, unique))
        return unique

    def normal(
        self,
        shape: Sequence[int],
        *,
        std: float,
        mean: float = 0.0,
        dtype: npt.DTypeLike = np.float32,
        name: str = "weight",
    ) -> str:
        """A weight drawn from the seeded stream."""
        values = self._random.standard_normal(tuple(shape), dtype=np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        return self.initializer(values.astype(dtype, copy=False), name)

    def extent(self, value: str, axis: int, dim: Dim) -> Extent:
        """Size of `axis` of `value`, declared as `dim`: a number when that is known, else Shape and Gather."""
        known = self.dim(dim)
        if isinstance(known, int):
            return known
        return self.op("Gather", self.op("Shape", value), self.constant(axis), axis=0)

    def vector(self, extent: Extent) -> str:
        """The extent as an int64 vector of one element."""
        return self.op("Unsqueeze", extent, self.constant([0])) if isinstance(extent, str) else self.constant([extent])

    def shape(self, *parts: Extent) -> str:
        """A shape vector: one constant when every part is a number, else Unsqueeze and Concat."""
        if not any(isinstance(part, str) for part in parts):
            return self.constant(list(parts), np.int64)
        return self.op("Concat", *[self.vector(part) for part in parts], axis=0)

    def finish(self, name: str = "main_graph") -> onnx.ModelProto:
        """The model. It is not checked here: models of 2 GB and more can only be checked as files."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._initializers)
        version = IR_VERSION if self.opset < 21 else IR_VERSION_OF_LATE_OPSETS
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=version,
            producer_name="tilefuse.models",
        )

    def _value_info(self, name: str, dtype: npt.DTypeLike, dims: Sequence[Dim | None]) -> onnx.ValueInfoProto:
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        sizes = [None if dim is None else self.dim(dim) for dim in dims]
        return helper.make_tensor_value_info(name, element, sizes)

    def _unique(self, name: str) -> str:
        unique = name
        while unique in self._counts:
            self._counts[name] += 1
            unique = f"{name}_{self._counts[name] - 1}"
        self._counts[unique] = 1
        return unique


def write(model: onnx.ModelProto, path: Path, *, external: bool = False) -> Path:
    """Saves the model; `external` puts the weights into PATH.data beside it, as models over 2 GB must have them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)
    else:
        onnx.save(model, path)
    return path
