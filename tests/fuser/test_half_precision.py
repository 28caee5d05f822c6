"""16-bit floats: every spelling in float16 and bfloat16 fuses as in float32, and what the precision policy keeps."""

import math
from pathlib import Path

import numpy as np
import pytest
from region_oracle import check_regions, scanned

from fuser.precision import HALF, widened
from models.attention import SPELLINGS
from models.graph import GraphWriter
from models.half import in_half
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Load, Op, Var, binary, cast, const, unary, walk
from tilecore.contract.spec import AttentionSpec, Place, Result, RowSpec, Spec, Step, Tensor, views_of

NAMES = {entry.name: entry for entry in SPELLINGS}
SPELLED = ("bert_lowest", "guarded", "clipped", "boolean_where", "soft_cap", "half_precision", "decomposed", "einsum",
           "causal_trilu", "window", "alibi", "sink", "rotary", "normed_query", "llama", "windowed_image")  # fmt: skip


def programs(spec: Spec) -> list[Expr]:
    found = [view.value for view in views_of(spec)] + [result.value for result in spec.outputs]
    if isinstance(spec, AttentionSpec):
        found.append(spec.score)
    if isinstance(spec, RowSpec):
        found += [step.value for step in spec.steps]
    return found


def arithmetic_in_16_bits(spec: Spec) -> list[Expr]:
    nodes = [node for program in programs(spec) for node in walk(program) if node.dtype in HALF]
    return [node for node in nodes if isinstance(node, Op) and node.name != "cast"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SPELLED)
def test_spellings_fuse_in_16_bits(name: str, kind: str, tmp_path: Path) -> None:
    whole = NAMES[name].build(dynamic=True)
    found = scanned(in_half(whole, kind), tmp_path)
    assert len(found.of("attention")) == 1
    for region in found.regions:
        assert not arithmetic_in_16_bits(region.spec)


def test_a_region_in_16_bits_means_what_the_graph_does(tmp_path: Path) -> None:
    for name in ("bert_div", "guarded", "causal_range", "grouped", "sink"):
        entry = NAMES[name]
        found = scanned(in_half(entry.build(dynamic=True), "float16"), tmp_path)
        feeds = {key: half(value) for key, value in entry.feeds(entry.sizes[0]).items()}
        check_regions(found, feeds, tolerance=2e-6)


def half(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float16) if value.dtype == np.float32 else value


@pytest.mark.parametrize("kept", [frozenset[str](), frozenset({"Softmax"})], ids=["half", "float32 softmax"])
def test_a_softmax_between_casts_is_fused(kept: frozenset[str], tmp_path: Path) -> None:
    model = in_half(NAMES["bert_div"].build(dynamic=True), "float16", keep=kept)
    (region,) = scanned(model, tmp_path).of("attention")
    assert isinstance(region.spec, AttentionSpec)
    assert region.spec.score.dtype is DType.F32


# ---- the policy, on one row program: y = f(x) for x f16


ROWS, COLUMNS = Var("r", extent=const(1)), Var("c", extent=const(4))
X = Tensor("x", DType.F16, (const(1), const(4)))
ELEMENT = Load(X, (ROWS, COLUMNS))


def f16(value: Expr) -> Expr:
    """An operator's result, rounded to its type as element rules write it."""
    return cast(value, DType.F16)


def f32(value: Expr) -> Expr:
    return cast(value, DType.F32)


def result_of(program: Expr, x: list[float]) -> np.ndarray:
    """The compiled spec's result, in its own types."""
    y = Tensor("y", program.dtype, (const(1), const(4)))
    spec = RowSpec((X,), ROWS, COLUMNS, (), (Result(Place(y, (ROWS, COLUMNS), (ROWS, COLUMNS)), program),))
    spec = widened(spec)
    assert not arithmetic_in_16_bits(spec)
    return evaluate(spec, {"x": np.array([x], np.float16)}, wide=False)["y"][0]


def test_a_sum_of_squares_does_not_overflow() -> None:
    square = f16(f32(ELEMENT) * f32(ELEMENT))
    total = Var("total", DType.F32)
    y = Tensor("y", DType.F16, (const(1), const(4)))
    scaled = f16(f32(ELEMENT) * unary("rsqrt", total * 0.25))
    spec = widened(
        RowSpec(
            (X,),
            ROWS,
            COLUMNS,
            (Step(total, "sum", f32(square)),),
            (Result(Place(y, (ROWS, COLUMNS), (ROWS, COLUMNS)), scaled),),
        )
    )
    got = evaluate(spec, {"x": np.array([[9000, 9000, -9000, 9000]], np.float16)}, wide=False)["y"]
    np.testing.assert_array_equal(got, np.array([[1, 1, -1, 1]], np.float16))


def test_steps_of_16_bits_are_kept_in_float32() -> None:
    kept = Var("kept", DType.F16)
    y = Tensor("y", DType.F16, (const(1), const(4)))
    place = Place(y, (ROWS, COLUMNS), (ROWS, COLUMNS))
    steps = (Step(kept, "tile", f16(f32(ELEMENT) * 4096.0)),)
    spec = widened(RowSpec((X,), ROWS, COLUMNS, steps, (Result(place, f16(f32(kept) / 4096.0)),)))
    got = evaluate(spec, {"x": np.array([[1, 100, -100, 7]], np.float16)}, wide=False)["y"]
    np.testing.assert_array_equal(got, np.array([[1, 100, -100, 7]], np.float16))


def test_comparisons_see_rounded_operands() -> None:
    doubled = f16(f32(ELEMENT) * 2.0)
    infinite = result_of(binary("eq", f32(doubled), math.inf), [40000, 30000, 1, 0])
    np.testing.assert_array_equal(infinite, [True, False, False, False])
    shifted = f16(f32(ELEMENT) + 0.25)  # 2048.25 is 2048 in float16
    same = result_of(binary("eq", f32(shifted), f32(ELEMENT)), [2048, 1, 4096, 8])
    np.testing.assert_array_equal(same, [True, False, True, False])


def test_casts_to_integers_see_rounded_operands() -> None:
    shifted = f16(f32(ELEMENT) + 0.9)
    got = result_of(cast(shifted, DType.I64), [2048, 4096, 1, 2])
    np.testing.assert_array_equal(got, np.array([2048.9, 4096.9, 1.9, 2.9], np.float16).astype(np.int64))


def test_counters_saturate_as_in_the_model() -> None:
    count = cast(cast(COLUMNS, DType.I64) * 1023 + 2046, DType.F16)
    got = result_of(f16(f32(count) + f32(ELEMENT)), [0, 0, 0, 0])
    np.testing.assert_array_equal(got, np.arange(2046, 6138, 1023).astype(np.float16))


def test_elements_that_are_only_moved_keep_their_bits() -> None:
    assert (
        result_of(ELEMENT, [math.nan, -0.0, math.inf, 6e-8]).tobytes()
        == np.array([math.nan, -0.0, math.inf, 6e-8], np.float16).tobytes()
    )


# ---- masks at the end of float16's range


def masked(count: int, *, guard: bool, folder: Path) -> AttentionSpec:
    """The attention of scores to which `count` float16 masks are added one after the other."""
    g = GraphWriter(17)
    q, k, v = (g.input(name, np.float16, [1, 2, 4, 8]) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    for i in range(count):
        scores = g.op("Add", scores, g.input(f"mask{i}", np.float16, [1, 1, 1, 4]))
    weights = g.op("Softmax", scores, axis=-1)
    if guard:
        weights = g.op("Where", g.op("IsNaN", weights), g.constant(0.0, np.float16), weights)
    g.op("MatMul", weights, v, out="y")
    g.output("y", np.float16, [1, 2, 4, 8])
    (region,) = scanned(g.finish("masked"), folder).of("attention")
    assert isinstance(region.spec, AttentionSpec)
    return region.spec


def attended(spec: AttentionSpec, *masks: list[float]) -> np.ndarray:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((1, 2, 4, 8)).astype(np.float16) for name in "qkv"}
    arrays |= {f"mask{i}": np.array(mask, np.float16).reshape(1, 1, 1, 4) for i, mask in enumerate(masks)}
    return evaluate(spec, arrays, wide=False)["y"]


LOWEST = -65504.0


def test_one_mask_of_the_lowest_number_hides_and_stays_finite(tmp_path: Path) -> None:
    spec = masked(1, guard=False, folder=tmp_path)
    some = attended(spec, [0, LOWEST, 0, LOWEST])
    np.testing.assert_array_equal(some, attended(spec, [0, -math.inf, 0, -math.inf]))
    assert np.isfinite(attended(spec, [LOWEST / 2] * 4)).all()


@pytest.mark.parametrize("guard", [False, True])
def test_masks_that_overflow_together_hide_completely(guard: bool, tmp_path: Path) -> None:
    spec = masked(2, guard=guard, folder=tmp_path)
    everything = attended(spec, [LOWEST] * 4, [LOWEST] * 4)
    assert (everything == 0).all() if guard else np.isnan(everything).all()
    some = attended(spec, [LOWEST, 0, LOWEST, 0], [LOWEST, 0, 0, LOWEST])
    np.testing.assert_array_equal(some, attended(spec, [-math.inf, 0, -math.inf, -math.inf], [0, 0, 0, 0]))


def test_scores_that_are_only_scaled_have_no_range(tmp_path: Path) -> None:
    g = GraphWriter(17)
    q, k, v = (g.input(name, np.float16, [1, 2, 4, 8]) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", scores, g.constant(2.0**-12, np.float16))
    g.op("MatMul", g.op("Softmax", scores, axis=-1), v, out="y")
    g.output("y", np.float16, [1, 2, 4, 8])
    (region,) = scanned(g.finish("scaled"), tmp_path).of("attention")
    arrays = {name: np.full((1, 2, 4, 8), 200.0, np.float16) for name in "qkv"}  # q · kᵀ is 320,000
    np.testing.assert_array_equal(evaluate(region.spec, arrays, wide=False)["y"], arrays["v"])
