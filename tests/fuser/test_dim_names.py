"""Names of dims that are arithmetic: what is read from them, and that nothing wrong follows from one that lies."""

import itertools
import re

import onnx
import onnx_ir as ir
import pytest

from fuser.assumptions import assumptions_of, checked
from fuser.dim_names import parse
from fuser.dims import Dims, Facts, candidates_of, dim
from fuser.find import find
from fuser.shapes import infer
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Op, Sym, symbols

PAST, SEQ, NAMED = Sym("past"), Sym("seq"), Sym("past + seq")
HEADER = '<ir_version: 8, opset_import: ["" : 17]>\n'
CACHED = "float[b, past, 8] cache, float[b, seq, 8] x"
KEYS = "keys = Concat<axis = 1>(cache, x) total = ReduceMean<axes = [2], keepdims = 0>(keys)"


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEADER + text))


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("past + seq", "a + b"), ("past_sequence_length + 1", "a + 1"), ("2*n", "2 * a"), ("n - 1", "a - 1"),
        ("floor(seq/2)", "a // 2"), ("(n + m)//4", "(a + b) // 4"), ("(n + 3) // 2 * 2", "(a + 3) // 2 * 2"),
        ("Max(n, 2*m)", "max(a, 2 * b)"), ("min(n, 7) + m", "min(a, 7) + b"), ("n % 3", "a % 3"), ("s0+s1", "a + b"),
    ],
)  # fmt: skip
def test_a_name_means_what_python_says(name: str, python: str) -> None:
    expr = parse(name)
    assert expr is not None
    order = sorted(symbols(expr), key=lambda symbol: re.findall(r"\w+", name).index(symbol.name))
    for a, b in itertools.product(range(1, 9), repeat=2):
        sizes = {symbol.name: size for symbol, size in zip(order, (a, b), strict=False)}
        assert int(Evaluator({}, sizes)(expr)) == eval(python, {"a": a, "b": b, "min": min, "max": max})


@pytest.mark.parametrize(
    "name",
    [
        "", "?", "seq", "unk__123", "batch-size", "batch size", "a/b", "a // n", "a // 0", "a.b", "a[0]", "f(a)",
        "a if b else c", "__import__('os')", "1.5*n", "True + n", "a ** b", "floor(a)", "min(a)", "(" * 90,
        "n + " * 80 + "n", "x\0y", "-1 +",
    ],
)  # fmt: skip
def test_other_names_are_left_alone(name: str) -> None:
    assert parse(name) is None


def test_dims_that_meet_are_what_their_names_say() -> None:
    model = model_of(f"agraph ({CACHED}, float[b, t] mask) => (float[b, k] y) {{ {KEYS} y = Add(total, mask) }}")
    model.graph.inputs[2].shape = ir.Shape(["b", "past + seq"])
    shapes = infer(model)
    assert shapes.shape(model.graph.outputs[0]) == (Sym("b"), PAST + SEQ)
    assert shapes.facts.assumed
    assert set(shapes.facts.assumed) <= set(shapes.facts.checks)
    sizes = itertools.product(range(4), range(4), range(6))
    for past, seq, named in sizes:
        held = all(
            int(Evaluator({}, {"past": past, "seq": seq, "past + seq": named})(bound)) >= 0
            for bound in shapes.facts.assumed
        )
        runs = named == past + seq or 1 in (named, past + seq)
        length = named if past + seq == 1 else past + seq
        assert not runs or held == (length == past + seq)  # only a call where the name lies is refused


def test_names_over_unknown_symbols_are_opaque() -> None:
    """No input has `n` as a dim, so that nothing could check what the name claims."""
    model = model_of("agraph (float[b, s] x, float[b, t] y) => (float[b, k] z) { z = Add(x, y) }")
    model.graph.inputs[1].shape = ir.Shape(["b", "2*n"])
    shapes = infer(model)
    found = shapes.shape(model.graph.outputs[0])
    assert found is not None
    assert set(candidates_of(found[1])) == {Sym("s"), Sym("2*n")}
    assert not shapes.facts.assumed


def test_nothing_is_assumed_where_the_model_uses_another_length() -> None:
    """As in a merged decoder's first call: the cache is a dummy, and the mask as long as the new tokens."""
    model = model_of(
        f"agraph ({CACHED}, float[b, t] mask) => (float[b, k] y) {{"
        "s = ReduceMean<axes = [2], keepdims = 0>(x) y = Add(s, mask) }"
    )
    model.graph.inputs[2].shape = ir.Shape(["b", "past + seq"])
    shapes = infer(model)
    found = shapes.shape(model.graph.outputs[0])
    assert found is not None
    assert set(candidates_of(found[1])) == {SEQ, NAMED}
    assert not shapes.facts.assumed


def test_a_product_proves_what_a_name_says() -> None:
    """Nothing is assumed then: the original itself fails where the dims differ."""
    model = model_of(f"agraph ({CACHED}, float[b, 5, t] w) => (float[b, 5, 8] y) {{ {KEYS} y = MatMul(w, keys) }}")
    shapes = infer(model)
    assert dict(shapes.facts.equal)[Sym("t")] == PAST + SEQ
    assert not shapes.facts.assumed


def test_a_region_is_made_to_check_or_left_out() -> None:
    """The region itself reads neither the mask nor the cache: dims alone, and those it must be given."""
    model = model_of(
        f"agraph ({CACHED}, float[b, t] mask) => (float[b, k] y, float[b, seq, 8] z) {{"
        f"{KEYS} sum = Add(total, mask) y = Hardmax(sum) shape = Shape(sum) one = Constant<value_int = 1>()"
        "length = Gather(shape, one) real = Cast<to = 1>(length) n = Mul(x, real) m = Tanh(n) z = Softmax(m) }"
    )
    model.graph.inputs[2].shape = ir.Shape(["b", "past + seq"])
    found = find(model)
    regions = [region for region in found.regions if "Softmax" in {node.op_type for node in region.nodes}]
    assumptions = assumptions_of(found.model, found.shapes)
    assert regions
    assert assumptions
    kept, lost = checked(regions, assumptions, found.shapes, found.model.graph.inputs, lambda _: True)
    assert not lost
    assert all(any(a.bound in region.spec.requires for region in kept) for a in assumptions)
    assert {"mask", "cache", "x"} <= {value.name for value in kept[0].inputs}
    kept, lost = checked(regions, assumptions, found.shapes, found.model.graph.inputs, lambda _: False)
    assert not kept or all(any(a.bound in region.spec.requires for region in kept) for a in assumptions)
    assert len(kept) + len(lost) == len(regions)


def test_the_end_of_a_table_is_assumed_not_to_be_reached() -> None:
    """Rows [past, past + seq) of 64: at the end a single row could be broadcast, which no one means."""
    dims = Dims(Facts(), whole=frozenset({PAST, SEQ}))
    rows = dims.minimum(PAST + SEQ, dim(64)) - dims.minimum(PAST, dim(64))
    assert dims.broadcast(rows, SEQ) == SEQ
    assert dims.found.assumed
    assert 64 - PAST - SEQ in dims.found.assumed


def test_reshapes_settle_broadcasts() -> None:
    """As many elements before as after: [b, select] as [b, past + seq] says what the broadcast is."""
    dims = Dims(Facts(), whole=frozenset({PAST, SEQ, Sym("t"), Sym("b")}))
    joined = dims.broadcast(Sym("t"), PAST + SEQ)
    assert isinstance(joined, Op)
    dims.same_count((Sym("b"), joined, dim(6)), (Sym("b"), dim(2), dim(3), PAST + SEQ))
    assert dict(dims.found.equal)[joined] == PAST + SEQ
    assert dims.found.assumed  # b may be 0
