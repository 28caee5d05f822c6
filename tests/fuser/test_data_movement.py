"""Moved data is read where it lies: tables by data, shifted windows, appended caches, masks of index arithmetic."""

from pathlib import Path

import numpy as np
import pytest
from region_oracle import check_regions, scanned

from fuser.settle import settled
from models.graph import GraphWriter
from tilecore.contract.evaluate import Evaluator, evaluate
from tilecore.contract.expr import Expr, Sym, Var, apply, binary, const, select
from tilecore.contract.spec import AttentionSpec, ContractionSpec
from tilecore.library.score import score_of


def test_an_embedding_sum_and_its_norm_are_one_region(tmp_path: Path) -> None:
    g = GraphWriter(18)
    words = g.input("words", np.int64, ("batch", "seq"))
    kinds = g.input("kinds", np.int64, ("batch", "seq"))
    total = g.op("Gather", g.normal((50, 24), std=1.0), words)
    total = g.op("Add", total, g.op("Gather", g.normal((3, 24), std=1.0), kinds))
    g.op("LayerNormalization", total, g.normal((24,), std=1.0), g.normal((24,), std=1.0), out="y", axis=-1)
    g.output("y", np.float32, ("batch", "seq", 24))
    found = scanned(g.finish(), tmp_path)
    (region,) = found.regions
    assert [node.op_type for node in region.nodes].count("Gather") == 2
    random = np.random.default_rng(0)
    for shape in ((2, 5), (1, 1)):
        check_regions(found, {"words": random.integers(-50, 50, shape), "kinds": random.integers(0, 3, shape)})


def test_an_index_out_of_range_shows(tmp_path: Path) -> None:
    """ONNX Runtime fails there; a kernel cannot, and must not give a row of the table as if nothing were."""
    g = GraphWriter(18)
    rows = g.input("rows", np.int64, (4,))
    g.op("Tanh", g.op("Exp", g.op("Gather", g.normal((5, 8), std=1.0), rows)), out="y")
    g.output("y", np.float32, (4, 8))
    (region,) = scanned(g.finish(), tmp_path).regions
    arrays = {t.name: np.ones([5, 8], np.float32) for t in region.spec.inputs if t.name != "rows"}
    from_spec = evaluate(region.spec, {**arrays, "rows": np.array([4, 5, -6, -5])})[region.outputs[0].name or ""]
    np.testing.assert_array_equal(np.isnan(from_spec).all(axis=1), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(from_spec).any(axis=1), [False, True, True, False])


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_grows_is_one_copy(static: bool, tmp_path: Path) -> None:
    g = GraphWriter(18, sizes={"batch": 2, "seq": 3, "past": 4} if static else None)
    packed = g.input("packed", np.float32, ("batch", "seq", 24))
    past = g.input("past_k", np.float32, ("batch", 2, "past", 4))
    _, k, _ = g.ops("Split", packed, g.constant(np.array([8, 8, 8], np.int64)), outs=(None, None, None), axis=2)
    shape = g.shape(g.extent(packed, 0, "batch"), g.extent(packed, 1, "seq"), 2, 4)
    heads = g.op("Transpose", g.op("Reshape", k, shape), perm=[0, 2, 1, 3])
    g.op("Concat", past, heads, out="present", axis=2)
    g.output("present", np.float32, ("batch", 2, None, 4))
    found = scanned(g.finish(), tmp_path)
    (region,) = found.regions
    assert {"Split", "Transpose", "Concat"} <= {node.op_type for node in region.nodes}
    for old in (4,) if static else (4, 0):
        random = np.random.default_rng(old)
        shapes = {"packed": (2, 3, 24), "past_k": (2, 2, old, 4)}
        check_regions(found, {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()})


def test_a_cyclic_shift_is_read_by_the_product(tmp_path: Path) -> None:
    g = GraphWriter(18)
    x = g.input("x", np.float32, ("batch", 6, 8))
    first = g.op("Slice", x, *(g.constant([i]) for i in (2, 2**31, 1)))
    second = g.op("Slice", x, *(g.constant([i]) for i in (0, 2, 1)))
    rolled = g.op("Concat", first, second, axis=1)
    g.op("Add", g.op("MatMul", rolled, g.normal((8, 16), std=1.0)), g.normal((16,), std=1.0), out="y")
    g.output("y", np.float32, ("batch", 6, 16))
    found = scanned(g.finish(), tmp_path)
    (region,) = found.regions
    assert isinstance(region.spec, ContractionSpec)
    assert region.spec.inputs[0].name == "x"
    check_regions(found, {"x": np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)})


@pytest.mark.parametrize("static", [False, True])
def test_a_mask_of_packed_sequences_is_causal_where_there_is_one_sequence(static: bool, tmp_path: Path) -> None:
    """Positions are counted up, so that none starts again: a sum of such starts is 0, and the same for every key."""
    g = GraphWriter(18, sizes={"batch": 2, "seq": 5} if static else None)
    q, k, v = (g.input(name, np.float32, ("batch", 2, "seq", 4)) for name in "qkv")
    zero, one = (g.constant(np.array(i, np.int64)) for i in (0, 1))
    seq = g.extent(q, 2, "seq")
    steps = g.op("Range", zero, seq if isinstance(seq, str) else g.constant(np.array(seq, np.int64)), one)
    places = g.op("Tile", g.op("Unsqueeze", steps, g.constant([0])), g.shape(g.extent(q, 0, "batch"), 1))
    before = g.op("Sub", g.op("Slice", places, g.constant([0]), g.constant([1]), g.constant([1])), one)
    joined = g.op("Concat", before, places, axis=1)
    later, earlier = (g.op("Slice", joined, *(g.constant([i]) for i in (a, b, 1))) for a, b in ((1, 2**31), (0, -1)))
    starts = g.op("Not", g.op("Equal", g.op("Sub", later, earlier), one))
    number = g.op("CumSum", g.op("Cast", starts, to=7), g.constant(np.array(1, np.int64)))
    own = g.op("Equal", g.op("Unsqueeze", number, g.constant([2])), g.op("Unsqueeze", number, g.constant([1])))
    near = g.op("LessOrEqual", g.op("Unsqueeze", places, g.constant([1])), g.op("Unsqueeze", places, g.constant([2])))
    seen = g.op("Unsqueeze", g.op("And", near, own), g.constant([1]))
    numbers = (g.constant(np.array(value, np.float32)) for value in (0, np.finfo(np.float32).min))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    g.op("MatMul", g.op("Softmax", g.op("Add", scores, g.op("Where", seen, *numbers))), v, out="y")
    g.output("y", np.float32, ("batch", 2, "seq", 4))
    found = scanned(g.finish(), tmp_path)
    (region,) = found.regions
    assert isinstance(region.spec, AttentionSpec)
    assert len(score_of(region.spec).bounds) == 1, str(region.spec.score)
    for length in (5,) if static else (5, 1):
        random = np.random.default_rng(length)
        check_regions(found, {name: random.standard_normal((2, 2, length, 4)).astype(np.float32) for name in "qkv"})


def test_a_sum_of_other_numbers_stays(tmp_path: Path) -> None:
    """Positions that data gives are summed by the operator."""
    g = GraphWriter(18)
    mask = g.input("mask", np.int64, ("batch", "seq"))
    counted = g.op("CumSum", mask, g.constant(np.array(1, np.int64)))
    g.op("Exp", g.op("Cast", g.op("Mul", counted, mask), to=1), out="y")
    g.output("y", np.float32, ("batch", "seq"))
    found = scanned(g.finish(), tmp_path)
    assert not any(node.op_type == "CumSum" for region in found.regions for node in region.nodes)
    check_regions(found, {"mask": np.array([[1, 1, 0], [0, 1, 1]])})


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_is_settled_is_the_same_number(size: int) -> None:
    dim = Sym("n")
    i = Var("i", extent=dim)
    one = apply("min", const(1), dim)
    shifted = (i - one + 1) % dim
    cases: list[Expr] = [
        shifted,
        select(binary("lt", i, one), i - 1, (i - one) % dim),
        select(binary("lt", i, const(2)), i % dim, (i - 2) % dim),
        binary("eq", shifted - select(binary("lt", i, one), i - 1, (i - one) % dim), const(1)),
        apply("max", i, dim - 1),
    ]
    for case in cases:
        evaluate_at = Evaluator({}, {"n": size})
        for place in range(size):
            assert evaluate_at(settled(case), {i: place}) == evaluate_at(case, {i: place}), case
    assert settled(cases[3]) == const(True)


@pytest.mark.parametrize("static", [False, True])
def test_rotated_keys_and_values_are_appended_in_one_region(static: bool, tmp_path: Path) -> None:
    """RoPE of the new keys, and both caches with their new entries, which attention and the model's caller read."""
    g = GraphWriter(18, sizes={"batch": 2, "seq": 3, "past": 4} if static else None)
    q, k, v = (g.input(name, np.float32, ("batch", 2, "seq", 8)) for name in "qkv")
    cos, sin = (g.input(name, np.float32, ("seq", 8)) for name in ("cos", "sin"))
    old = [g.input(f"past_{name}", np.float32, ("batch", 2, "past", 8)) for name in "kv"]
    low, high = (g.op("Slice", k, *(g.constant([i]) for i in (a, b, 3))) for a, b in ((0, 4), (4, 8)))
    turned = g.op("Mul", g.op("Concat", g.op("Neg", high), low, axis=3), sin)
    k = g.op("Add", g.op("Mul", k, cos), turned)
    present = [
        g.op("Concat", before, new, axis=2, out=f"present_{name}")
        for name, before, new in zip("kv", old, (k, v), strict=True)
    ]
    scores = g.op("MatMul", q, g.op("Transpose", present[0], perm=[0, 1, 3, 2]))
    g.op("MatMul", g.op("Softmax", scores), present[1], out="y")
    for name in ("y", *present):
        g.output(name, np.float32, ("batch", 2, None, 8))
    found = scanned(g.finish(), tmp_path)
    assert sorted(region.kind for region in found.regions) == ["attention", "row"]
    (append,) = found.of("row")
    assert {value.name for value in append.outputs} == set(present)
    for past in (4,) if static else (4, 0):
        random = np.random.default_rng(past)
        shapes = dict.fromkeys("qkv", (2, 2, 3, 8)) | {f"past_{name}": (2, 2, past, 8) for name in "kv"}
        shapes |= {"cos": (3, 8), "sin": (3, 8)}
        check_regions(found, {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()})
