"""The one symbolic shape engine: shapes, element types and contents of every value of a model.

Comes in: an onnx-ir model. Goes out: `Shapes`. Dims are expressions over symbols for the dynamic dims of the graph's
inputs; a fresh symbol stands where a dim depends on values. Two dims are the same expression exactly when they were
proved equal in every run that raises no error.

Facts are: the graph inputs' shapes and dim names, constants, and the operators' rules. What an exporter recorded for
inner values is used only for operators that have no rule, and then only its numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir

from fuser import shape_attention, shape_contents, shape_rules, shape_spatial, shape_types
from fuser.dim_names import parse
from fuser.dims import ZERO, Dims, Facts, Shape, dim
from fuser.shape_call import CONTENT_LIMIT, Call, Content, Known, constant_of, contents_of
from fuser.shape_rules import Rule
from tilecore.contract.expr import Expr, Sym, const, symbols

NAMELESS = frozenset({"", "?"})  # what exporters write where they know neither a number nor a name
ROUNDS = 6  # each round starts anew with the facts of the one before; two or three do
STANDARD: Mapping[str, Rule] = {**shape_rules.RULES, **shape_spatial.RULES, **shape_attention.STANDARD}
CONTRIB: Mapping[str, Rule] = {**STANDARD, **shape_attention.CONTRIB}
DOMAINS: Mapping[str, Mapping[str, Rule]] = {"": STANDARD, "ai.onnx": STANDARD, "com.microsoft": CONTRIB}


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """What is known of every value. `facts` hold in every run of the model that raises no error.

    `branches` has, per branch of an If, the facts that hold whenever that branch runs and raises no error.
    """

    shapes: Mapping[ir.Value, Shape]
    contents: Mapping[ir.Value, Content]
    dtypes: Mapping[ir.Value, ir.DataType]
    facts: Facts
    fresh: frozenset[Sym]
    branches: Mapping[ir.Graph, Facts]

    def inside(self, graph: ir.Graph) -> "Shapes":
        """The same for nodes of `graph`, a body of one of the nodes that these are for."""
        return replace(self, facts=self.branches.get(graph, self.facts))

    def shape(self, value: ir.Value) -> Shape | None:
        """The dims of a tensor; None when not even its rank is known."""
        return self.shapes.get(value)

    def content(self, value: ir.Value) -> Content | None:
        """The elements of a small tensor as an object array of expressions (0-d for a scalar); None when unknown."""
        return self.contents.get(value)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type; None when unknown."""
        return self.dtypes.get(value)

    def bounds(self, known: frozenset[Sym]) -> tuple[Expr, ...]:
        """Expressions over `known` that are at least 0 in every run without an error: what a kernel may have to check.

        `512 - seq`, say, where a table of 512 rows is sliced to `seq` rows and added to `seq` rows.
        """
        return tuple(bound for bound in self.facts.checks if symbols(bound) <= known)

    def dims(self) -> Dims:
        """Dim arithmetic (broadcasting, proofs) under this model's facts."""
        return Dims(self.facts)


def infer(model: ir.Model) -> Shapes:
    """Shapes, types and contents of every value in the graph and its subgraphs. The model is not changed."""
    facts = {model.graph: Facts()}
    engine = _infer_once(model, facts)
    for _ in range(ROUNDS):
        wider = {graph: facts.get(graph, Facts()).joined(found) for graph, found in engine.found.items()}
        if wider == facts:
            break
        facts = wider
        engine = _infer_once(model, facts)
    known = engine.known
    return Shapes(
        MappingProxyType(known.shapes),
        MappingProxyType(known.contents),
        MappingProxyType(known.dtypes),
        facts[model.graph],
        frozenset(engine.dims.fresh),
        MappingProxyType(engine.given),
    )


def _infer_once(model: ir.Model, facts: Mapping[ir.Graph, Facts]) -> "_Engine":
    whole = _whole_dims(model.graph.inputs)
    dims = Dims(facts[model.graph], whole=whole, hints=_hints(model.graph.inputs, whole))
    engine = _Engine(model, dims, facts=facts)
    engine.enter_inputs(model.graph.inputs)
    engine.infer_graph(model.graph)
    engine.found[model.graph] = engine.dims.found
    return engine


@dataclass(slots=True)
class _Engine:
    """One round of inference.

    `facts` are those of the rounds before, `found` the new ones, per graph: the main one and each branch of an If, as
    what a branch needs holds only where it runs. `given` has all facts that hold in a branch.
    """

    model: ir.Model
    dims: Dims
    known: Known = field(default_factory=Known)
    facts: Mapping[ir.Graph, Facts] = field(default_factory=dict[ir.Graph, Facts])
    found: dict[ir.Graph, Facts] = field(default_factory=dict[ir.Graph, Facts])
    given: dict[ir.Graph, Facts] = field(default_factory=dict[ir.Graph, Facts])

    # -- graphs -------------------------------------------------------------------------------------------------------

    def enter_inputs(self, inputs: Iterable[ir.Value]) -> None:
        """Facts of graph inputs: their declared dims, equal names being equal dims.

        Some exporters write -1 or "?" for a dim that they do not know: no number, and no name that two dims can share.
        """
        for value in inputs:
            if value.shape is not None:
                self.known.shapes[value] = tuple(
                    dim(size) if isinstance(size, int) and size >= 0 else self._declared(size, f"{value.name}.{axis}")
                    for axis, size in enumerate(value.shape)
                )
            if value.dtype is not None:
                self.known.dtypes[value] = value.dtype

    def _declared(self, size: int | ir.SymbolicDim, own: str) -> Expr:
        """The symbol of a dim without a number: its name if it has one, else `own`."""
        name = None if isinstance(size, int) else size.value
        return self.dims.known(Sym(name if name is not None and name not in NAMELESS else own))

    def infer_graph(self, graph: ir.Graph) -> None:
        """All nodes in order; initializers first."""
        for value in graph.initializers.values():
            self._enter_constant(value)
        for node in graph:
            self._infer_node(node, graph.opset_imports)

    def _enter_constant(self, value: ir.Value) -> None:
        tensor = value.const_value
        if tensor is None:
            self.enter_inputs((value,))
            return
        self.known.dtypes[value] = tensor.dtype
        if value.is_graph_input():  # a default that the caller may override
            return
        sizes = tuple(int(size) for size in tensor.shape.numpy())
        self.known.shapes[value] = tuple(map(dim, sizes))
        if np.prod(sizes, dtype=np.int64) <= CONTENT_LIMIT and tensor.dtype.name in shape_contents.TYPES:
            content = contents_of(tensor.numpy())
            if content is not None:
                self.known.contents[value] = content

    def _infer_node(self, node: ir.Node, opsets: Mapping[str, int]) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        call = Call(node, self.known, self.dims, opsets.get(domain, self.model.graph.opset_imports.get(domain, 1)))
        function = self.model.functions.get(node.op_identifier())
        if function is not None:
            self._infer_function(node, function)
        elif domain == "" and node.op_type in ("If", "Loop", "Scan"):
            _SUBGRAPHS[node.op_type](self, call)
        else:
            rule = DOMAINS.get(domain, {}).get(node.op_type)
            self._set_types(call, known_domain=domain in DOMAINS and rule is not None)
            if rule is None:
                self._fall_back(call)
            else:
                self._set_shapes(node, rule(call))
            self._set_contents(call, domain)
        for value in node.outputs:  # what the file says of an operator that has no rule
            if value not in self.known.dtypes and value.dtype is not None:
                self.known.dtypes[value] = value.dtype

    def _set_shapes(self, node: ir.Node, shapes: Sequence[Shape | None]) -> None:
        for value, shape in zip(node.outputs, shapes, strict=False):
            if shape is not None:
                self.known.shapes[value] = self.dims.exists(shape) if self.dims.recording else shape
            elif value.shape is not None:  # the rule is at a loss: the recorded rank and numbers are all there is
                self.known.shapes[value] = self._recorded(value, value.shape)

    def _recorded(self, value: ir.Value, shape: ir.Shape) -> Shape:
        return tuple(
            dim(size) if isinstance(size, int) and size >= 0 else self.dims.symbol(f"{value.name}.{axis}")
            for axis, size in enumerate(shape)
        )

    def _set_types(self, call: Call, *, known_domain: bool) -> None:
        if not known_domain:
            return
        rule = shape_types.RULES.get(call.node.op_type, shape_types.like(0))
        for value, dtype in zip(call.node.outputs, rule(call), strict=False):
            if dtype is not None:
                self.known.dtypes[value] = dtype

    def _set_contents(self, call: Call, domain: str) -> None:
        if call.node.op_type == "Constant" and domain == "":
            self._constant_content(call)
            return
        rule = shape_contents.RULES.get(call.node.op_type) if domain == "" else None
        if rule is None:
            return
        for value, content in zip(call.node.outputs, rule(call), strict=False):
            dtype = self.known.dtypes.get(value)
            if content is not None and dtype is not None and dtype.name in shape_contents.TYPES:
                self.known.contents[value] = content
                self.known.shapes.setdefault(value, tuple(map(dim, content.shape)))

    def _constant_content(self, call: Call) -> None:
        value = call.node.outputs[0]
        tensor = constant_of(call.node)
        if tensor is not None and tensor.size <= CONTENT_LIMIT and tensor.dtype.name in shape_contents.TYPES:
            content = contents_of(tensor.numpy())
            if content is not None:
                self.known.contents[value] = content

    # -- operators without a rule -------------------------------------------------------------------------------------

    def _fall_back(self, call: Call) -> None:
        """ONNX's own inference on this one node; then the numbers that the file recorded."""
        inferred = self._ask_onnx(call)
        for index, value in enumerate(call.node.outputs):
            shape = inferred.get(index)
            if shape is None and value.shape is not None:
                shape = self._recorded(value, value.shape)
            if shape is not None:
                self.known.shapes[value] = shape

    def _ask_onnx(self, call: Call) -> dict[int, Shape]:
        node = call.node
        if not onnx.defs.has(node.op_type, node.domain):
            return {}
        schema = onnx.defs.get_schema(node.op_type, call.version, node.domain)
        names: dict[str, Expr] = {}
        types: dict[str, onnx.TypeProto] = {}
        for value in node.inputs:
            if value is None or value.name is None:
                continue
            shape, dtype = self.known.shapes.get(value), self.known.dtypes.get(value)
            if dtype is None:
                return {}
            sizes = None if shape is None else [_onnx_dim(size, names) for size in shape]
            types[value.name] = onnx.helper.make_tensor_type_proto(int(dtype), sizes)
        try:
            found = onnx.shape_inference.infer_node_outputs(schema, ir.to_proto(node), types, self._constants(node))
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
            return {}
        result: dict[int, Shape] = {}
        for index, value in enumerate(node.outputs):
            tensor = found[value.name].tensor_type if value.name in found else None
            if tensor is None:
                continue
            if tensor.elem_type:
                self.known.dtypes[value] = ir.DataType(tensor.elem_type)
            if tensor.HasField("shape"):
                result[index] = tuple(
                    dim(size.dim_value)
                    if size.HasField("dim_value")
                    else names.get(size.dim_param) or self.dims.symbol(f"{value.name}.{axis}")
                    for axis, size in enumerate(tensor.shape.dim)
                )
        return result

    @staticmethod
    def _constants(node: ir.Node) -> dict[str, onnx.TensorProto]:
        """The node's small constant inputs."""
        small = (
            (value.name, value.const_value)
            for value in node.inputs
            if value is not None and value.const_value is not None and not value.is_graph_input()
        )
        return {
            name: ir.to_proto(ir.tensor(tensor.numpy(), name=name))
            for name, tensor in small
            if name is not None and tensor.size <= CONTENT_LIMIT
        }

    # -- subgraphs and functions --------------------------------------------------------------------------------------

    def _infer_function(self, node: ir.Node, function: ir.Function) -> None:
        """A call of a model-local function: its body, with the call's inputs."""
        inner = _Engine(self.model, self.dims, self.known.copy(), self.facts, self.found, self.given)
        for parameter, value in zip(function.inputs, node.inputs, strict=False):
            _move(value, parameter, self.known, inner.known)
        for inner_node in function:
            inner._infer_node(inner_node, function.opset_imports)
        for result, value in zip(function.outputs, node.outputs, strict=False):
            _move(result, value, inner.known, self.known)

    def infer_if(self, call: Call) -> None:
        """If: what both branches agree on; one branch alone when the condition is known."""
        branches = [attr.as_graph() for name in ("then_branch", "else_branch") if (attr := call.attribute(name))]
        for branch in branches:
            self._infer_branch(branch)
        condition = call.content(0)
        if condition is not None and condition.size == 1 and hasattr(condition.flat[0], "value"):
            branches = branches[:1] if condition.flat[0].value else branches[1:]
        for index, value in enumerate(call.node.outputs):
            self._merge(value, [branch.outputs[index] for branch in branches])

    def _infer_branch(self, branch: ir.Graph) -> None:
        """A branch of an If under facts of its own."""
        outer = self.dims
        self.dims = outer.within(self.facts.get(branch, Facts()))
        self.infer_graph(branch)
        self.found[branch], self.given[branch] = self.dims.found, self.dims.facts
        self.dims = outer

    def _merge(self, value: ir.Value, sources: Sequence[ir.Value]) -> None:
        shapes = [self.known.shapes.get(source) for source in sources]
        if shapes and all(shape is not None and len(shape) == len(shapes[0] or ()) for shape in shapes):
            self.known.shapes[value] = tuple(
                sizes[0] if all(size == sizes[0] for size in sizes) else self.dims.symbol(f"{value.name}.{axis}")
                for axis, sizes in enumerate(zip(*(shape or () for shape in shapes), strict=True))
            )
        contents = [self.known.contents.get(source) for source in sources]
        first = contents[0] if contents else None
        if first is not None and all(
            other is not None and other.shape == first.shape and list(other.flat) == list(first.flat)
            for other in contents
        ):
            self.known.contents[value] = first
        dtype = self.known.dtypes.get(sources[0]) if sources else None
        if dtype is not None:
            self.known.dtypes[value] = dtype

    def infer_loop(self, call: Call) -> None:
        """Loop: carried values keep the dims that the body keeps; stacked outputs have an unknown length."""
        attr = call.attribute("body")
        if attr is None:
            return
        body = attr.as_graph()
        carried = len(body.inputs) - 2
        for value, dtype in zip(body.inputs[:2], (ir.DataType.INT64, ir.DataType.BOOL), strict=True):
            self.known.shapes[value], self.known.dtypes[value] = (), dtype
        initial = [call.input(index + 2) for index in range(carried)]
        self._settle(body, initial, body.inputs[2:], body.outputs[1 : 1 + carried])
        length = self._trips(call, body)
        for index, value in enumerate(call.node.outputs):
            source = body.outputs[index + 1]
            if index < carried:
                _move(body.inputs[index + 2], value, self.known, self.known)
            else:
                self._stack(source, value, length)

    def _trips(self, call: Call, body: ir.Graph) -> Expr:
        """How often a Loop runs: as often as it is told to when its condition is the constant true, else unknown."""
        count = call.content(0)
        held = all(
            value is None or (source := _source(value)) is body.inputs[1] or self._is_true(source)
            for value in (call.input(1), body.outputs[0])
        )
        if held and count is not None and count.size == 1:
            return count.flat[0]
        return self.dims.symbol(f"{call.node.outputs[0].name}.trips")

    def _is_true(self, value: ir.Value) -> bool:
        content = self.known.contents.get(value)
        return content is not None and content.size == 1 and content.flat[0] == const(True)

    def infer_scan(self, call: Call) -> None:
        """Scan: states keep the dims that the body keeps; scanned axes have the length of the scanned inputs."""
        attr = call.attribute("body")
        if attr is None or call.version < 9:
            return
        body = attr.as_graph()
        scanned = call.integer("num_scan_inputs")
        states = len(body.inputs) - scanned
        in_axes = call.integers("scan_input_axes") or [0] * scanned
        length: Expr | None = None
        for index in range(scanned):
            source, target = call.input(states + index), body.inputs[states + index]
            shape = call.shape(states + index)
            if source in self.known.dtypes:
                self.known.dtypes[target] = self.known.dtypes[source]
            if shape is not None:
                axis = in_axes[index] % len(shape)
                length = shape[axis]
                self.known.shapes[target] = (*shape[:axis], *shape[axis + 1 :])
        initial = [call.input(index) for index in range(states)]
        self._settle(body, initial, body.inputs[:states], body.outputs[:states])
        out_axes = call.integers("scan_output_axes") or [0] * (len(body.outputs) - states)
        for index, value in enumerate(call.node.outputs):
            if index < states:
                _move(body.inputs[index], value, self.known, self.known)
            else:
                count = length if length is not None else self.dims.symbol(f"{value.name}.trips")
                self._stack(body.outputs[index], value, count, out_axes[index - states])

    def _stack(self, source: ir.Value, value: ir.Value, length: Expr, axis: int = 0) -> None:
        if source in self.known.dtypes:
            self.known.dtypes[value] = self.known.dtypes[source]
        shape = self.known.shapes.get(source)
        if shape is not None:
            axis %= len(shape) + 1
            self.known.shapes[value] = (*shape[:axis], length, *shape[axis:])

    def _settle(
        self,
        body: ir.Graph,
        initial: Sequence[ir.Value | None],
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
    ) -> None:
        """Infer a loop's body until the dims of its carried values are the same before and after it."""
        recording, self.dims.recording = self.dims.recording, False
        for source, target in zip(initial, inputs, strict=True):
            _move(source, target, self.known, self.known)
            self.known.contents.pop(target, None)  # it changes from one iteration to the next
        while True:
            self.infer_graph(body)
            changed = False
            for before, after in zip(inputs, outputs, strict=True):
                old, new = self.known.shapes.get(before), self.known.shapes.get(after)
                if old is None or old == new:
                    continue
                changed = True
                if new is None or len(new) != len(old):
                    del self.known.shapes[before]
                    continue
                self.known.shapes[before] = tuple(
                    a if a == b or a in self.dims.fresh else self.dims.symbol(f"{before.name}.{axis}")
                    for axis, (a, b) in enumerate(zip(old, new, strict=True))
                )
                if self.known.shapes[before] == old:
                    changed = False
            if not changed:
                break
        self.dims.recording = recording


_SUBGRAPHS = {"If": _Engine.infer_if, "Loop": _Engine.infer_loop, "Scan": _Engine.infer_scan}


def _named_dims(inputs: Iterable[ir.Value]) -> set[str]:
    dims = (size for value in inputs if value.shape is not None for size in value.shape)
    return {size.value for size in dims if isinstance(size, ir.SymbolicDim) and size.value is not None}


def _whole_dims(inputs: Iterable[ir.Value]) -> frozenset[Sym]:
    """The symbols of the inputs' dims: what a call says by its shapes."""
    return frozenset(map(Sym, _named_dims(inputs) - NAMELESS))


def _hints(inputs: Iterable[ir.Value], whole: frozenset[Sym]) -> dict[Expr, Expr]:
    """What names of dims claim, where it can be checked by other dims of the model's inputs."""
    found = {Sym(name): parse(name) for name in _named_dims(inputs)}
    return {symbol: expr for symbol, expr in found.items() if expr is not None and symbols(expr) <= whole}


def _source(value: ir.Value) -> ir.Value:
    """What a chain of Identity nodes passes on."""
    node = value.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _move(source: ir.Value | None, target: ir.Value, old: Known, new: Known) -> None:
    """Give `target` what is known of `source`, and nothing else."""
    for known, have in ((new.shapes, old.shapes), (new.contents, old.contents), (new.dtypes, old.dtypes)):
        found = None if source is None else have.get(source)  # pyright: ignore[reportArgumentType]
        known.pop(target, None)  # pyright: ignore[reportArgumentType]
        if found is not None:
            known[target] = found  # pyright: ignore[reportArgumentType]


def _onnx_dim(size: Expr, names: dict[str, Expr]) -> int | str:
    """A dim as ONNX's inference takes it: a number, or a name that stands for the expression."""
    if hasattr(size, "value"):
        return int(size.value)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]
    names[str(size)] = size
    return str(size)


def describe(shape: Shape | None) -> str:
    """A shape for messages: `[batch, seq, 768]`."""
    return "[?]" if shape is None else f"[{', '.join(map(str, shape))}]"


__all__ = ["ZERO", "Shapes", "describe", "infer"]
