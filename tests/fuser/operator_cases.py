"""Models of one fused operator: built with fixed or symbolic dims, run by ONNX Runtime, expanded and scanned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper, numpy_helper

from fuser.expand.apply import expand
from fuser.load import load
from fuser.shapes import infer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A call of an operator of com.microsoft. Inputs in `weights` are constants of the model; None is left out.

    `symbols` names dims: (input, axis) → name. `outputs` are the positions that are asked for.
    """

    op: str
    inputs: Sequence[Array | None]
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outputs: tuple[int, ...] = (0,)
    weights: frozenset[int] = frozenset()
    symbols: Mapping[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    opset: int = 17
    domain: str = "com.microsoft"

    def model(self, *, dynamic: bool) -> onnx.ModelProto:
        """The model of this one node."""
        names = [f"in{i}" if value is not None else "" for i, value in enumerate(self.inputs)]
        outs = [f"out{i}" if i in self.outputs else "" for i in range(max(self.outputs) + 1)]
        node = helper.make_node(self.op, names, outs, name="fused", domain=self.domain, **self.attributes)
        given = [(i, value) for i, value in enumerate(self.inputs) if value is not None]
        inputs = [
            helper.make_tensor_value_info(
                names[i], helper.np_dtype_to_tensor_dtype(value.dtype), self._shape(i, dynamic)
            )
            for i, value in given
            if i not in self.weights
        ]
        weights = [numpy_helper.from_array(value, names[i]) for i, value in given if i in self.weights]
        dtype = next(value.dtype for _, value in given if value.dtype.kind == "f")
        types = [np.dtype(np.int32) if self.op == "EmbedLayerNormalization" and i == 1 else dtype for i in self.outputs]
        outputs = [
            helper.make_tensor_value_info(f"out{i}", helper.np_dtype_to_tensor_dtype(kind), None)
            for i, kind in zip(self.outputs, types, strict=True)
        ]
        graph = helper.make_graph([node], "case", inputs, outputs, weights)
        imports = [helper.make_opsetid("", self.opset)]
        if self.domain:
            imports.append(helper.make_opsetid(self.domain, 1))
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def _shape(self, position: int, dynamic: bool) -> list[int | str]:
        value = self.inputs[position]
        assert value is not None
        return [self.symbols.get((position, a), d) if dynamic else d for a, d in enumerate(value.shape)]

    def feeds(self) -> dict[str, Array]:
        """The inputs by name."""
        return {f"in{i}": v for i, v in enumerate(self.inputs) if v is not None and i not in self.weights}


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs by ONNX Runtime without its optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, dict(feeds))]


def expanded(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The model with every operator that has a definition in pieces. AssertionError, with the reason, without one."""
    path = folder / "case.onnx"
    onnx.save(model, path)
    loaded = load(path)
    done = expand(loaded, infer(loaded), ())
    assert done.done, done.refused
    assert not done.refused
    return ir.to_proto(loaded)
