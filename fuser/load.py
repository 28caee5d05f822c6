"""Reads an ONNX file into the one form that the fuser works on.

Comes in: a path. Goes out: an onnx-ir model without model-local functions (but those of domain `tilefuse`), with
constants as initializers, no identities, and foldable shape arithmetic folded. Weights in external files stay there and
are mapped into memory when somebody asks for them. Inputs and outputs are those of the file, names and order included.

A file that ONNX Runtime could not run is refused with a `LoadError` of one line.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import inliner, numpy_helper
from onnx_ir.passes import common

from fuser.body import DOMAIN
from fuser.simplify import simplify

OLDEST_OPSET = 7
LFS_POINTER = b"version https://git-lfs"


class LoadError(ValueError):
    """A file that is not a model that can be run. The message is one line and starts with the path."""


def load(path: Path) -> ir.Model:
    """The model at `path`, simplified; see the module docstring. Raises LoadError."""
    path = Path(path)
    proto = read_proto(path)
    try:
        _check(proto)
        _densify(proto)
        if any(function.domain != DOMAIN for function in proto.functions):
            proto = _inlined(proto)
        model = _deserialized(proto, path)
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    if model.ir_version < 4:  # initializers had to be inputs too, and were constants all the same
        common.RemoveInitializersFromInputsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    simplify(model)
    return model


# -- reading ----------------------------------------------------------------------------------------------------------


def read_proto(path: Path) -> onnx.ModelProto:
    """What is in the file, as it is, external data left where they are. Raises LoadError."""
    if not path.is_file():
        raise LoadError(f"{path}: {'a folder, not a model file' if path.is_dir() else 'there is no such file'}")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise LoadError(f"{path}: this is a Git LFS pointer, not the model: run `git lfs pull`")
    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise LoadError(f"{path}: not an ONNX model, or the file is cut short ({path.stat().st_size} bytes)") from error
    if not proto.ir_version or not proto.HasField("graph"):
        raise LoadError(f"{path}: not an ONNX model, or the file is cut short ({path.stat().st_size} bytes): no graph")
    if not proto.graph.output:
        raise LoadError(f"{path}: its graph has no outputs, so that it computes nothing, or the file is cut short")
    return proto


def _densify(proto: onnx.ModelProto) -> None:
    """Write sparse tensors out, in place, in bodies and functions too: nothing that follows knows of them."""
    _densify_graph(proto.graph)
    for function in proto.functions:
        _densify_nodes(function.node)


def _densify_graph(graph: onnx.GraphProto) -> None:
    graph.initializer.extend(_dense(sparse) for sparse in graph.sparse_initializer)
    del graph.sparse_initializer[:]
    _densify_nodes(graph.node)


def _densify_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("sparse_tensor"):
                value = _dense(attribute.sparse_tensor)
                attribute.CopyFrom(onnx.helper.make_attribute("value", value))
        for subgraph in _subgraphs(node):
            _densify_graph(subgraph)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise LoadError(f"the sparse tensor {sparse.values.name!r} is not valid: {error}") from error
    return numpy_helper.from_array(dense, sparse.values.name)


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """All functions inlined but ours; functions of another opset are converted on the way."""
    defaults = {(f.domain, f.name, f.overload): list(f.attribute_proto) for f in proto.functions}
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _write_defaults(nodes, defaults)
    ours = [(function.domain, function.name) for function in proto.functions if function.domain == DOMAIN]
    try:
        if ours:
            return inliner.inline_selected_functions(proto, ours, exclude=True)
        if all(_opset(function) == _opset(proto) for function in proto.functions):
            return inliner.inline_local_functions(proto)
        typed = onnx.shape_inference.infer_shapes(proto)  # the conversion asks for the types of what a call is given
        converted = inliner.inline_local_functions(typed, convert_version=True)
        _tell_apart(converted.graph.node)
        return converted
    except (RuntimeError, ValueError, onnx.shape_inference.InferenceError) as error:
        raise LoadError(f"its model-local functions cannot be inlined: {_first_line(error)}") from error


def _tell_apart(nodes: Iterable[onnx.NodeProto]) -> None:
    """Rename what is defined again: onnx's conversion uses one new name in every call of a function that it converts.

    Calls stand one after the other, so that a name means what was last defined under it.
    """
    taken: set[str] = set()
    current: dict[str, str] = {}
    for node in nodes:
        _read_current(node, current)
        for position, name in enumerate(node.output):
            new, number = name, 1
            while name and new in taken:
                new, number = f"{name}.{number}", number + 1
            taken.add(new)
            if new != name:
                current[name] = node.output[position] = new


def _read_current(node: onnx.NodeProto, current: Mapping[str, str]) -> None:
    for position, name in enumerate(node.input):
        node.input[position] = current.get(name, name)
    for graph in _subgraphs(node):
        own = _made_by(graph.node) | {value.name for value in (*graph.input, *graph.initializer)}
        outer = {name: new for name, new in current.items() if name not in own}
        for inner in graph.node:
            _read_current(inner, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)


def _opset(part: onnx.ModelProto | onnx.FunctionProto) -> int | None:
    return next((entry.version for entry in part.opset_import if entry.domain in ("", "ai.onnx")), None)


def _write_defaults(
    nodes: Iterable[onnx.NodeProto], defaults: Mapping[tuple[str, str, str], Sequence[onnx.AttributeProto]]
) -> None:
    """Write the default attributes of a function to its calls: onnx's inliner leaves them out."""
    for node in nodes:
        given = {attribute.name for attribute in node.attribute}
        for attribute in defaults.get((node.domain, node.op_type, node.overload), ()):
            if attribute.name not in given:
                node.attribute.append(attribute)
        for subgraph in _subgraphs(node):
            _write_defaults(subgraph.node, defaults)


def _deserialized(proto: onnx.ModelProto, path: Path) -> ir.Model:
    try:
        model = ir.from_proto(proto)
    except (ValueError, TypeError, KeyError, ir.serde.SerdeError) as error:
        raise LoadError(f"the graph is not valid: {_first_line(_cause(error))}") from error
    for graph in model.graphs():
        ir.external_data.set_base_dir(graph, path.parent)
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                _check_external(value.const_value)
    try:
        model.graph.sort()
    except ValueError as error:
        raise LoadError("the graph has a cycle: a node needs its own result") from error
    return model


def _check_external(tensor: ir.ExternalTensor) -> None:
    file = Path(tensor.path)
    if not file.is_file():
        raise LoadError(f"the weights of {tensor.name!r} should be in {file}, which is missing: put it there")
    if not file.resolve().is_relative_to(Path(tensor.base_dir).resolve()):
        raise LoadError(f"{file} is a link to another folder, which is not followed: copy the file there")
    if file.stat().st_nlink > 1:
        raise LoadError(f"{file} has a hard link elsewhere, so that it may change unseen: copy the file")
    end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    size = file.stat().st_size
    if size < end:
        raise LoadError(f"{file} has {size} bytes; the weights of {tensor.name!r} end at byte {end}: it is cut short")


def _cause(error: BaseException) -> BaseException:
    """What an error was raised from in the first place."""
    return error if error.__cause__ is None else _cause(error.__cause__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- checking ---------------------------------------------------------------------------------------------------------


def _check(proto: onnx.ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    version = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), None)
    if version is not None and not OLDEST_OPSET <= version <= newest:
        raise LoadError(f"opset {version} is not supported, {OLDEST_OPSET} to {newest} are: convert the model")
    if version is None and any(node.domain in ("", "ai.onnx") for node in proto.graph.node):
        raise LoadError("the model does not say which opset it uses")
    _check_graph(proto.graph, set())
    for function in proto.functions:
        _check_names(function.node, set(function.input), f"function {function.name}", set())
        missing = [name for name in function.output if name not in _made_by(function.node) | set(function.input)]
        if missing:
            raise LoadError(f"function {function.name} returns {missing[0]!r}, which it does not compute")


def _check_graph(graph: onnx.GraphProto, outer: set[str]) -> None:
    inputs = [value.name for value in graph.input]
    _refuse_twice(inputs, "input")
    _refuse_twice([tensor.name for tensor in graph.initializer], "initializer")
    for tensor in graph.initializer:
        _check_size(tensor)
    sparse = {tensor.values.name for tensor in graph.sparse_initializer}
    given = {*inputs, *(tensor.name for tensor in graph.initializer), *sparse}
    _check_names(graph.node, given, f"graph {graph.name!r}", outer)
    known = given | _made_by(graph.node) | outer
    for value in graph.output:
        if value.name not in known:
            raise LoadError(f"the output {value.name!r} is not computed by any node")


def _made_by(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.output if name}


def _check_names(nodes: Iterable[onnx.NodeProto], given: set[str], where: str, outer: set[str]) -> None:
    """Every value is computed once, and every value that is read is computed somewhere."""
    nodes = list(nodes)
    made = set(given)
    for node in nodes:
        for name in node.output:
            if name and name in made:
                raise LoadError(f"two values of {where} have the name {name!r}, the second from {_label(node)}")
            made.add(name)
    known = made | outer | {""}
    for node in nodes:
        for name in node.input:
            if name not in known:
                raise LoadError(f"{_label(node)} reads {name!r}, which nothing computes")
        for subgraph in _subgraphs(node):
            _check_graph(subgraph, known)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _label(node: onnx.NodeProto) -> str:
    return f"node {node.name!r} ({node.op_type})" if node.name else f"a {node.op_type} node"


def _refuse_twice(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise LoadError(f"two {what}s have the name {name!r}")
        seen.add(name)


def _check_size(tensor: onnx.TensorProto) -> None:
    """Weights in the file are as long as their shape says."""
    if not tensor.HasField("raw_data") or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    needed = (prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    if len(tensor.raw_data) != needed:
        raise LoadError(
            f"the initializer {tensor.name!r} of shape {list(tensor.dims)} has {len(tensor.raw_data)} bytes, "
            f"not {needed}: the file is damaged"
        )
