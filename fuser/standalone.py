"""A region as a model of its own: what a report of a fault needs, and nothing else of the model.

Comes in: a region of a model that is not rewritten yet. Goes out: a model of standard operators. Its inputs are the
region's inputs that are no weights, its outputs the region's, under their names and with symbolic dims as inferred.
"""

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from fuser.body import DOMAIN, function_of
from fuser.region import Region
from fuser.shapes import Shapes
from tilecore.contract.expr import Const

IR_VERSION = 10
PRODUCER = "tilefuse"


def standalone(region: Region, shapes: Shapes, opsets: Mapping[str, int]) -> ir.Model:
    """The region alone. RewriteError when its nodes cannot be written as a function."""
    function = function_of(region, "Region", packings={}, shapes=shapes, opsets=opsets)
    inputs = [_described(value, shapes) for value in region.inputs]
    outputs = [_described(value, shapes) for value in region.outputs]
    weights = [new for old, new in zip(region.inputs, inputs, strict=True) if is_weight(old)]
    for old, new in zip(region.inputs, inputs, strict=True):
        new.const_value = old.const_value if is_weight(old) else None
    node = ir.Node(DOMAIN, "Region", inputs, outputs=outputs)
    graph = ir.Graph(
        [value for value in inputs if value not in weights],
        outputs,
        nodes=[node],
        initializers=weights,
        opset_imports={**opsets, DOMAIN: 1},
        name=region.kind,
    )
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name=PRODUCER, functions=[function])
    common.InlinePass()(model)
    del graph.opset_imports[DOMAIN]
    return model


def is_weight(value: ir.Value) -> bool:
    """Whether a value is a constant of the model."""
    return value.const_value is not None and not value.is_graph_input()


def _described(value: ir.Value, shapes: Shapes) -> ir.Value:
    """A value of the same name, type and shape."""
    shape, dtype = shapes.shape(value), shapes.dtype(value)
    dims = None if shape is None else ir.Shape([int(d.value) if isinstance(d, Const) else str(d) for d in shape])
    return ir.Value(name=value.name, shape=dims, type=None if dtype is None else ir.TensorType(dtype))
