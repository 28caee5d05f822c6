"""Leaves out padding: what a model computes for each token by itself is computed for the tokens that the mask shows.

Comes in: a loaded model, changed in place, and the name of its mask, an input [batch, length] that is 0 at padding.
Goes out: the same model and interface; projections, norms and what is between them work on [1, tokens, …], gathered
where they begin and put back, with zeros at the padding, where something mixes tokens (attention, pooling). Outputs
[batch, length, …] are zero at the padding.

Which nodes are per token is proved (`per_token.py`). That the rest of the model ignores what stands at the padding is
the caller's promise, as it is of every batch that is padded; `verify` checks it on random masks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from fuser.element import attribute, shape_of
from fuser.per_token import Tokens, Use, Uses, per_token
from fuser.shapes import describe, infer
from fuser.simplify import simplify
from tilecore.contract.expr import Sym, const

MASK_KEY = "tilefuse.unpadded"  # of the model's metadata: the mask's name
OLDEST_OPSET = 13  # whose forms of Squeeze and Unsqueeze are written here
SHAPED = {"Reshape": -1, "Expand": 1}  # input 1 is the shape of the result; what stands for the tokens in it
STANDARD = ("", "ai.onnx")
PREFIX = "tilefuse/unpad/"  # of names
# Tables: where tokens stand in the padded order (twice), where each sequence's first token stands, the mask at tokens
ROWS, PLACES, STARTS, SHOWN = (f"{PREFIX}{name}" for name in ("rows", "places", "starts", "shown"))
MOST = 2**31 - 1  # the end of a Shape that has none


class UnpadError(ValueError):
    """A model that cannot be computed without its padding; the message says what was found and what to do."""


def unpad(model: ir.Model, mask: str) -> None:
    """Change `model` so that padding costs nothing where it can (module docstring). UnpadError when it cannot."""
    source = _mask_input(model, mask)
    shapes = infer(model)
    tokens = Tokens(shapes, shape_of(source, shapes), model.graph.opset_imports.get("", 1))
    chosen = per_token(model.graph, source, tokens)
    if not chosen:
        raise UnpadError(
            f"nothing would be saved: no projection of tensors that begin with {describe(tokens.dims)} is computed for "
            f"each token by itself; is {mask!r} the mask of the tokens?"
        )
    surgery = _Surgery.begin(model.graph, source, tokens)
    surgery.gather(chosen)
    surgery.put_back(chosen)
    surgery.hide(chosen)
    _check(model, chosen, tokens)
    model.metadata_props[MASK_KEY] = mask
    simplify(model)


def hide_padding(model: ir.Model, mask: str) -> None:
    """Change `model` so that its outputs are zero at the padding, as those of `unpad` are, and nothing else."""
    source = _mask_input(model, mask)
    shapes = infer(model)
    tokens = Tokens(shapes, shape_of(source, shapes), model.graph.opset_imports.get("", 1))
    _Surgery.begin(model.graph, source, tokens).hide({})


def write_tables(model: ir.Model) -> None:
    """Add what attention over packed rows reads to an unpadded model; nobody needs it yet.

    `STARTS` [batch + 1] says which token is a sequence's first, `SHOWN` [tokens] what the mask is at each.
    """
    mask, rows = (_named(model.graph, name) for name in (model.metadata_props.get(MASK_KEY), ROWS))
    if mask is None or rows is None or _named(model.graph, STARTS) is not None:
        return
    write, maker = _Writer(model.graph, taken=STARTS), rows.producer()
    assert maker is not None
    visible = write.op("Cast", write.op("Cast", mask, to=ir.DataType.BOOL), to=ir.DataType.INT64)
    ends = write.op("CumSum", write.op("ReduceSum", visible, write.ints(1), keepdims=0), write.constant(np.array(0)))
    write.op("Concat", write.ints(0), ends, axis=0, named=STARTS)
    write.op("Gather", write.op("Reshape", mask, write.ints(-1)), rows, axis=0, named=SHOWN)
    write.after(maker)


def _named(graph: ir.Graph, name: str | None) -> ir.Value | None:
    """An input of the graph, or a result of one of its nodes."""
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    return next((value for value in values if name and value.name == name), None)


def _mask_input(model: ir.Model, name: str) -> ir.Value:
    """The mask. UnpadError when it cannot be one."""
    found = next((value for value in model.graph.inputs if value.name == name), None)
    if found is None:
        known = ", ".join(value.name or "" for value in model.graph.inputs)
        raise UnpadError(f"the model has no input {name!r} to tell padding by; its inputs are {known}")
    if found.shape is None or len(found.shape) != 2:
        raise UnpadError(f"the mask {name!r} is {found.shape}, expected [batch, length]")
    if found.dtype is None or found.dtype == ir.DataType.STRING:
        raise UnpadError(f"the mask {name!r} is {found.dtype}, expected numbers that are 0 at padding")
    version = model.graph.opset_imports.get("", 1)
    if version < OLDEST_OPSET:
        raise UnpadError(f"padding is left out of models of opset {OLDEST_OPSET} or later; this one has {version}")
    return found


def _check(model: ir.Model, chosen: Mapping[ir.Node, Uses], tokens: Tokens) -> None:
    """That every chosen node now works on tokens alone."""
    shapes = infer(model)
    counts: set[Sym] = set()
    for value in (value for node in chosen for value in node.outputs if value.name):
        shape, rest = shape_of(value, shapes), tuple(map(const, tokens.rest(value)))
        outer = shape[: len(shape) - len(rest)]
        if shape[len(outer) :] != rest or outer[:-1] not in ((), (const(1),)) or not isinstance(outer[-1], Sym):
            raise UnpadError(f"a fault of TileFuse, please report the model: {value.name!r} is {describe(shape)}")
        counts.add(outer[-1])
    if len(counts) != 1:
        raise UnpadError(f"a fault of TileFuse, please report the model: tokens are counted {len(counts)} times")


# -- the change -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Writes nodes and constants into a graph."""

    graph: ir.Graph
    nodes: list[ir.Node] = field(default_factory=list[ir.Node])
    constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = field(
        default_factory=dict[tuple[str, tuple[int, ...], bytes], ir.Value]
    )
    count: int = 0
    taken: str = PREFIX  # what names begin with

    def op(self, op_type: str, *inputs: ir.Value, named: str = "", **attributes: Any) -> ir.Value:
        """A node with one output, put into the graph by `before` or `after`."""
        given = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        output = ir.Value(name=named or self._name(op_type))
        self.nodes.append(ir.Node("", op_type, inputs, given, outputs=[output], name=output.name))
        return output

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    def zero(self, dtype: ir.DataType | None) -> ir.Value:
        """A constant scalar 0."""
        return self.constant(np.zeros(()), dtype)

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant; equal ones are shared."""
        tensor = ir.tensor(array) if dtype is None else ir.tensor(array.astype(dtype.numpy()), dtype=dtype)
        key = (tensor.dtype.name, array.shape, tensor.tobytes())
        if key not in self.constants:
            value = ir.Value(name=self._name("constant"), shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
            value.const_value = tensor
            self.graph.register_initializer(value)
            self.constants[key] = value
        return self.constants[key]

    def before(self, node: ir.Node) -> None:
        """Put what was written before `node`."""
        self.graph.insert_before(node, self.nodes)
        self.nodes = []

    def after(self, node: ir.Node) -> None:
        """Put what was written after `node`."""
        self.graph.insert_after(node, self.nodes)
        self.nodes = []

    def _name(self, op_type: str) -> str:
        self.count += 1
        return f"{self.taken}{op_type}_{self.count}"


@dataclass(frozen=True, slots=True)
class _Surgery:
    """The graph while it changes: outputs of chosen nodes become [1, tokens, …] or [tokens, …], and keep their names.

    `visible` [batch, length] is true at tokens, `rows` [tokens] says where each stands in the padded order, and
    `places` [tokens, 1] are the same for ScatterND.
    """

    write: _Writer
    tokens: Tokens
    shape: ir.Value
    visible: ir.Value
    rows: ir.Value
    places: ir.Value
    declared: Mapping[ir.Value, ir.Shape | None]

    @staticmethod
    def begin(graph: ir.Graph, mask: ir.Value, tokens: Tokens) -> "_Surgery":
        """Write what all the rest needs at the start of the graph."""
        write = _Writer(graph)
        shape = write.op("Shape", mask)
        visible = write.op("Cast", mask, to=ir.DataType.BOOL)
        flat = write.op("Reshape", visible, write.ints(-1))
        rows = write.op("Squeeze", write.op("NonZero", flat), write.ints(0), named=ROWS)
        places = write.op("Unsqueeze", rows, write.ints(1), named=PLACES)
        write.before(graph[0])
        return _Surgery(write, tokens, shape, visible, rows, places, {value: value.shape for value in graph.outputs})

    def gather(self, chosen: Mapping[ir.Node, Uses]) -> None:
        """Give every chosen node its tokens in the place of padded tensors."""
        own = {value for node in chosen for value in node.outputs}
        gathered: dict[ir.Value, ir.Value] = {}
        for node, uses in chosen.items():
            for position, value in enumerate(node.inputs):
                if value is None or value in own or uses.get(value, "same") == "same":
                    continue
                if value not in gathered:
                    gathered[value] = self._gathered(value, uses[value])
                node.replace_input_with(position, gathered[value])
            if node.op_type in SHAPED and node.domain in STANDARD:
                (result,) = node.outputs
                lead = [1, SHAPED[node.op_type]][2 - self.tokens.lead(result) :]
                node.replace_input_with(1, self.write.ints(*lead, *self.tokens.rest(result)))
            self.write.before(node)
            for value in node.outputs:
                value.shape = None  # what the file recorded is of the padded one

    def _gathered(self, value: ir.Value, use: Use) -> ir.Value:
        """The tokens of a padded tensor, or of one that is the same for all rows or all places."""
        write = self.write
        if self.tokens.lead(value) == 1:
            return write.op("Gather", value, self.rows, axis=0)
        rest = self.tokens.numbers(value)
        if use == "spread":
            value = write.op("Expand", value, write.op("Concat", self.shape, write.ints(*[1] * len(rest)), axis=0))
        listed = write.op("Reshape", value, write.ints(-1, *rest))
        return write.op("Unsqueeze", write.op("Gather", listed, self.rows, axis=0), write.ints(0))

    def put_back(self, chosen: Mapping[ir.Node, Uses]) -> None:
        """Give everybody else, and the graph's outputs, padded tensors again."""
        for node in chosen:
            for value in node.outputs:
                users = [use for use in value.uses() if use.node not in chosen]
                for use in [use for use in users if _asks_shape(use.node)]:
                    users.remove(use)
                    use.node.outputs[0].replace_all_uses_with(self._shape_of(value, use.node))
                if users or value.is_graph_output():
                    padded = self._padded(value)
                    for use in users:
                        use.node.replace_input_with(use.idx, padded)
                    self._give_out(value, padded)
                self.write.after(node)

    def hide(self, chosen: Mapping[ir.Node, Uses]) -> None:
        """Make the padding of all other outputs zero as well."""
        own = {value for node in chosen for value in node.outputs}
        for value in tuple(self.write.graph.outputs):
            producer = value.producer()
            made_here = producer is not None and (producer.name or "").startswith(PREFIX)
            if producer is None or made_here or value in own or not self.tokens.lead(value):
                continue
            self._give_out(value, self._shown(value, self.tokens.lead(value), self.tokens.numbers(value)))
            self.write.after(producer)

    def _padded(self, value: ir.Value) -> ir.Value:
        """A tensor of tokens as it was padded, with zeros at the padding."""
        write, rest, lead = self.write, self.tokens.rest(value), self.tokens.lead(value)
        listed = write.op("Reshape", value, write.ints(-1, *rest)) if lead == 2 else value
        count = write.op("Reshape", write.op("Size", self.visible), write.ints(1))
        shape = write.op("Concat", count, write.ints(*rest), axis=0) if rest else count
        zero = write.zero(self.tokens.shapes.dtype(value))
        padded = write.op("ScatterND", write.op("Expand", zero, shape), self.places, listed)
        if lead == 1:
            return padded
        return write.op(
            "Reshape", padded, write.op("Concat", self.shape, write.ints(*rest), axis=0) if rest else self.shape
        )

    def _shown(self, value: ir.Value, lead: int, rest: Sequence[int]) -> ir.Value:
        """A padded tensor with zeros at the padding."""
        write, dtype = self.write, self.tokens.shapes.dtype(value)
        visible = self.visible if lead == 2 else write.op("Reshape", self.visible, write.ints(-1))
        if rest:
            visible = write.op("Unsqueeze", visible, write.ints(*range(lead, lead + len(rest))))
        return write.op("Where", visible, value, write.zero(dtype))

    def _shape_of(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """The shape of the padded tensor that `value` was, as `node` asks for it."""
        write, lead = self.write, self.shape
        if self.tokens.lead(value) == 1:
            lead = write.op("Mul", *(write.op("Gather", self.shape, write.ints(axis), axis=0) for axis in (0, 1)))
        whole = write.op("Concat", lead, write.ints(*self.tokens.rest(value)), axis=0)
        start, end = int(attribute(node, "start", 0)), int(attribute(node, "end", MOST))
        return write.op("Slice", whole, write.ints(start), write.ints(end)) if (start, end) != (0, MOST) else whole

    def _give_out(self, value: ir.Value, padded: ir.Value) -> None:
        """If `value` is an output of the graph, `padded` takes its place, name and declaration."""
        outputs = self.write.graph.outputs
        for number, output in enumerate(outputs):
            if output is value:
                name, value.name = value.name, f"{PREFIX}{value.name}"
                padded.name, padded.type, padded.shape = name, value.type, self.declared.get(value)
                outputs[number] = padded


def _asks_shape(node: ir.Node) -> bool:
    return node.op_type == "Shape" and node.domain in STANDARD and not node.outputs[0].is_graph_output()
