"""Removes what computes nothing and folds what is already known. Only exact changes; the graph's interface stays.

Comes in: a model, changed in place. Goes out: the same model, without identities, inference Dropouts and Casts to the
type that is there already. The branch that is always taken stands in the place of its If. Small constant results are
initializers (a mask buffer that is sliced to a dynamic size is not constant and stays). Weights of bodies are in the
main graph, and names in bodies are unique.
"""

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from fuser.dims import literal_product
from fuser.graph import release
from fuser.names import name_apart
from fuser.shape_call import Content
from fuser.shapes import Shapes, infer
from tilecore.contract.expr import Const

RESULT_LIMIT = 64 * 1024  # bytes of a folded result: a file must not grow by what a kernel computes for nothing
INPUT_LIMIT = 4 * 1024 * 1024  # bytes of a constant that is read for folding
CONTENT_TYPES = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.FLOAT}
FOLDED = frozenset(
    """Abs Add And Cast Ceil Concat ConstantOfShape Cos CumSum Div Equal Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Greater GreaterOrEqual Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pad Pow Range
    Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Reshape ScatterElements ScatterND Shape Sign Sin Size
    Slice Split Sqrt Squeeze Sub Tile Transpose Trilu Unsqueeze Where""".split()  # noqa: SIM905
)


def simplify(model: ir.Model) -> None:
    """Apply everything in this module until nothing changes."""
    name_apart(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    while True:
        shapes = infer(model)
        changed = [_unfold(model, shapes), _bypass(model, shapes), _fold(model, shapes)]
        common.RemoveUnusedNodesPass()(model)
        if not any(changed):
            return


# -- operators that do nothing ----------------------------------------------------------------------------------------


def _bypass(model: ir.Model, shapes: Shapes) -> bool:
    changed = False
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        source = _source(node, shapes)
        if source is not None and _replace(node, source):
            changed = True
    return changed


def _source(node: ir.Node, shapes: Shapes) -> ir.Value | None:
    """The input that the first output is a plain copy of; None when it is not one, or when other outputs are used."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return None
    source = node.inputs[0]
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    if node.op_type == "Identity" or (node.op_type == "Dropout" and _infers(node, shapes)):
        return source
    if node.op_type == "Cast" and "to" in node.attributes:
        return source if shapes.dtype(source) == ir.DataType(node.attributes["to"].as_int()) else None
    if (node.op_type == "Concat" and len(node.inputs) == 1) or (node.op_type == "Pad" and _adds_nothing(node, shapes)):
        return source
    return None


def _adds_nothing(node: ir.Node, shapes: Shapes) -> bool:
    """Whether every width of a Pad is 0."""
    if "pads" in node.attributes:
        return not any(node.attributes["pads"].as_ints())
    pads = shapes.content(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    return pads is not None and all(isinstance(width, Const) and width.value == 0 for width in pads.flat)


def _infers(node: ir.Node, shapes: Shapes) -> bool:
    """True when a Dropout passes its input on: always before opset 12, then unless `training_mode` may be true."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    mode = shapes.content(node.inputs[2])
    return mode is not None and mode.size == 1 and mode.flat[0] == Const(False, mode.flat[0].dtype)


def _replace(node: ir.Node, source: ir.Value) -> bool:
    """Let everybody read `source` instead; False where that would lose or rename a graph's input or output."""
    result = node.outputs[0]
    if not result.is_graph_output():
        if source.type is None:
            source.type = result.type
        result.replace_all_uses_with(source)
        graph = node.graph
        if graph is not None:
            graph.remove(node, safe=True)
        return True
    producer = source.producer()
    if producer is None or producer.graph is not node.graph or source.is_graph_output():
        return False
    name, dtype, shape = result.name, result.type, result.shape
    result.replace_all_uses_with(source, replace_graph_outputs=True)
    if node.graph is not None:
        node.graph.remove(node, safe=True)
    source.name, source.type, source.shape = name, dtype, shape  # what the graph declares of its output
    return True


def _unfold(model: ir.Model, shapes: Shapes) -> bool:
    """Put the branch of every If with a known condition in its place; an Identity keeps each of its outputs."""
    changed = False
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        branch, graph = _branch(node, shapes), node.graph
        if branch is None or graph is None:
            continue
        inner, results = list(branch), list(branch.outputs)
        branch.remove(inner)
        for value in list(branch.initializers.values()):  # an output of the branch: others are in the main graph
            branch.initializers.pop(value.name or "")
            model.graph.register_initializer(value)
        branch.outputs.clear()
        copies = [
            ir.Node("", "Identity", [result], outputs=[ir.Value(name=f"{output.name}.chosen", type=output.type)])
            for result, output in zip(results, node.outputs, strict=True)
        ]
        graph.insert_before(node, [*inner, *copies])
        for output, copy in zip(node.outputs, copies, strict=True):
            name, shape = output.name, output.shape
            output.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
            output.name = f"{name}.unused"
            copy.outputs[0].name, copy.outputs[0].shape = name, shape
        graph.remove(node, safe=True)
        release(node)  # what only the other branch reads is not computed
        changed = True
    return changed


def _branch(node: ir.Node, shapes: Shapes) -> ir.Graph | None:
    """The branch that an If always takes; None when that is not known, or the node is no If."""
    if node.op_type != "If" or node.domain not in ("", "ai.onnx") or node.inputs[0] is None:
        return None
    condition = shapes.content(node.inputs[0])
    if condition is None or condition.size != 1 or not isinstance(condition.flat[0], Const):
        return None
    return node.attributes["then_branch" if condition.flat[0].value else "else_branch"].as_graph()


# -- constants --------------------------------------------------------------------------------------------------------


def _fold(model: ir.Model, shapes: Shapes) -> bool:
    taken = {value.name for node in ir.traversal.RecursiveGraphIterator(model.graph) for value in node.outputs}
    taken |= {value.name for graph in model.graphs() for value in (*graph.inputs, *graph.initializers.values())}
    changed = False
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain not in ("", "ai.onnx") or any(output.is_graph_output() for output in node.outputs):
            continue
        arrays = _values(node, shapes, model.graph.opset_imports.get("", 1))
        if arrays is None:
            continue
        for output, array in zip(node.outputs, arrays, strict=True):
            if output.uses():
                output.replace_all_uses_with(_initializer(model, output, array, taken))
                changed = True
    return changed


def _initializer(model: ir.Model, output: ir.Value, array: np.ndarray, taken: set[str | None]) -> ir.Value:
    base, number = f"{output.name}.folded", 0
    name = base
    while name in taken:
        number += 1
        name = f"{base}.{number}"
    taken.add(name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
    value.const_value = ir.tensor(array, name=name)
    model.graph.register_initializer(value)
    return value


def _values(node: ir.Node, shapes: Shapes, opset: int) -> list[np.ndarray] | None:
    """What a node's outputs always are; None when that is not known or too large."""
    known = [_from_content(shapes.content(output), shapes.dtype(output)) for output in node.outputs]
    if all(array is not None for array in known):
        return [array for array in known if array is not None]
    if node.op_type not in FOLDED or not all(_fits(output, shapes) for output in node.outputs):
        return None
    inputs: dict[str, np.ndarray] = {}
    for value in node.inputs:
        if value is None:
            continue
        array = _constant(value, shapes)
        if array is None or value.name is None:
            return None
        inputs[value.name] = array
    return _evaluate(node, inputs, opset)


def _from_content(content: Content | None, dtype: ir.DataType | None) -> np.ndarray | None:
    if (
        content is None
        or dtype is None
        or dtype not in CONTENT_TYPES
        or not all(isinstance(item, Const) for item in content.flat)
    ):
        return None
    return np.array([item.value for item in content.flat]).astype(dtype.numpy()).reshape(content.shape)


def _fits(output: ir.Value, shapes: Shapes) -> bool:
    shape, dtype = shapes.shape(output), shapes.dtype(output)
    count = None if shape is None else literal_product(shape)
    if count is None or dtype is None or dtype == ir.DataType.STRING:
        return False
    return count * dtype.bitwidth // 8 <= RESULT_LIMIT


def _constant(value: ir.Value, shapes: Shapes) -> np.ndarray | None:
    tensor = value.const_value
    if tensor is None or value.is_graph_input():
        return _from_content(shapes.content(value), shapes.dtype(value))
    return tensor.numpy() if tensor.nbytes <= INPUT_LIMIT and tensor.dtype != ir.DataType.STRING else None


def _evaluate(node: ir.Node, inputs: dict[str, np.ndarray], opset: int) -> list[np.ndarray] | None:
    """The node's results by ONNX's reference implementation; None where that cannot run it."""
    proto = ir.to_proto(node)
    names = [name for name in proto.output if name]
    if len(names) != len(node.outputs):
        return None
    imports = [onnx.helper.make_opsetid("", opset)]
    function = onnx.helper.make_function("fold", "Fold", list(inputs), names, [proto], imports)
    try:
        results = ReferenceEvaluator(function).run(None, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None  # a session will report what is wrong with the model, if anything is
    return [np.asarray(result) for result in results]
