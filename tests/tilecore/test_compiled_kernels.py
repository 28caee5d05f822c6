"""Compiled kernels against the definition of their specs: the same cases as for the interpreter, as machine code.

Outputs start as NaN and scratch as NaN, so that an element that nobody wrote, or a read of one, shows.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tile_specs import MASKS, AttentionForm, Case, attention_case, contraction_case, row_case, siblings_case

from tilecore.call import CompiledKernel, KernelError, load_kernel
from tilecore.compile import HEADERS, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Sym, Var, binary, cast, const, select, unary
from tilecore.contract.panel import PANEL, pack
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Step, Tensor, outputs_of
from tilecore.emit_expr import EmitError
from tilecore.library.score import score_of
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target
from tilecore.toolchain import Source, Toolchain, find_compiler, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
TARGETS = tuple(target for target in detect_targets() if not target.base)
TOLERANCE = 3e-6  # f32 rounding over the longest sums here, relative to the largest finite value of the output


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


PACKING = """
#include "tile_cpu.h"
__attribute__((visibility("default"))) void packed(const float* source, float* panels, int64_t columns, int64_t depth) {
    pack_transposed_f32(source, depth, panels, depth * TILE_PANEL, columns, depth);
}
"""


@pytest.mark.parametrize("columns", [1, 8, 9, 16, 17, 24, 40, 41])
@pytest.mark.parametrize("depth", [5, 16])
def test_packed_panels_hold_zeros_past_their_columns(columns: int, depth: int, toolchain: Toolchain) -> None:
    """Products multiply whole panels: what scratch held before would be slow there, where it looks like denormals."""
    source = Source(PACKING, PROFILE.target.flags, (HEADERS,))
    packing = ctypes.CDLL(str(toolchain.library([toolchain.object(source)]))).packed
    values = np.random.default_rng(0).standard_normal((columns, depth), dtype=np.float32)
    width = -(-columns // PANEL) * PANEL
    panels = np.full((width // PANEL, depth, PANEL), np.nan, np.float32)
    packing(*(ctypes.c_void_p(a.ctypes.data) for a in (values, panels)), ctypes.c_int64(columns), ctypes.c_int64(depth))
    expected = np.zeros((width, depth), np.float32)
    expected[:columns] = values
    np.testing.assert_array_equal(panels.transpose(0, 2, 1).reshape(width, depth), expected)


def build(
    case: Case, toolchain: Toolchain, config: Mapping[str, int] | None, target: Target = PROFILE.target
) -> CompiledKernel:
    kernel = compile_spec(case.spec, label="Test", profile=PROFILE, targets=(target,), config=config)
    return load_kernel(kernel, target, toolchain)


def compare(case: Case, toolchain: Toolchain, target: Target = PROFILE.target, **config: int) -> None:
    compiled = build(case, toolchain, config or None, target)
    inputs = [case.arrays[tensor.name] for tensor in case.spec.inputs]
    for position in compiled.kernel.packed:
        assert isinstance(case.spec, ContractionSpec)
        matrix = inputs[position]
        inputs[position] = pack(matrix if matrix.shape[0] == case.arrays["a"].shape[-1] else matrix.T)
    got = compiled(*inputs)
    want = evaluate(case.spec, case.arrays)
    for tensor, value in zip(outputs_of(case.spec), got, strict=True):
        expected = want[tensor.name]
        finite = np.abs(expected[np.isfinite(expected)])
        scale = max(1.0, float(finite.max())) if finite.size else 1.0
        np.testing.assert_allclose(value, expected, rtol=0, atol=TOLERANCE * scale, equal_nan=True, err_msg=tensor.name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("block_m", "block_n"), [(3, 5), (4, 8), (16, 96)])
def test_attention_with_each_mask(mask: str, block_m: int, block_n: int, toolchain: Toolchain) -> None:
    """The widest tile has vectors before, in and after the points where a mask by position is settled."""
    large = block_m == 16
    form = AttentionForm(mask=mask, batch=1 + large, queries=97 if large else 17, keys=131 if large else 41, depth=8)
    compare(attention_case(form, np.random.default_rng(1)), toolchain, block_m=block_m, block_n=block_n)


@pytest.mark.parametrize(
    "poison", ["query-nan", "query-inf", "query-minus", "key-nan", "key-inf", "key-minus", "value-nan", "value-inf"]
)
@pytest.mark.parametrize("guard", [False, True])
def test_attention_carries_nan_and_inf_as_softmax_does(poison: str, guard: bool, toolchain: Toolchain) -> None:
    form = AttentionForm(mask="padding", poison=poison, guard=guard, batch=1, heads=1, queries=9, keys=21)
    compare(attention_case(form, np.random.default_rng(2)), toolchain, block_m=4, block_n=8)


@pytest.mark.parametrize("query", [3, None])
def test_a_guarded_row_of_nan_sums_no_weight_of_values(query: int | None, toolchain: Toolchain) -> None:
    """0 · NaN of one column of V is NaN in every row whose weights the guard made 0, and in no other column of it."""
    form = AttentionForm(mask="none", guard=True, batch=1, heads=1, queries=9, keys=21)
    case = attention_case(form, np.random.default_rng(7))
    case.arrays["xq"][..., slice(None) if query is None else query, :] = np.nan
    case.arrays["xv"][:, :, 5, 0] = np.inf
    compare(case, toolchain, block_m=4, block_n=8)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_values_that_a_causal_mask_hides_spoil_no_row_or_make_it_nan(poison: float, toolchain: Toolchain) -> None:
    """0 · NaN is NaN where a hidden key is read; where the loop over keys ends before it, the row is what it should be.

    The definition has NaN in every row then. Which rows the key is read for depends on the tiles; no other number may
    come out, and rows that see the key have it.
    """
    form = AttentionForm(mask="causal", batch=1, heads=1, queries=21, keys=21)
    case = attention_case(form, np.random.default_rng(5))
    compiled = build(case, toolchain, {"block_m": 4, "block_n": 8})
    hidden = 19
    clean = evaluate(case.spec, case.arrays)
    spoilt = case.arrays | {"xv": case.arrays["xv"].copy()}
    spoilt["xv"][:, :, hidden] = poison
    got = compiled(*(spoilt[tensor.name] for tensor in case.spec.inputs))
    for tensor, value in zip(outputs_of(case.spec), got, strict=True):
        rows = np.moveaxis(value, tensor.shape.index(Sym("Q")), 0).reshape(21, -1)
        wanted = np.moveaxis(clean[tensor.name], tensor.shape.index(Sym("Q")), 0).reshape(21, -1)
        assert not np.isfinite(rows[hidden:]).any()
        kept = np.isfinite(rows)
        assert kept[:8].all(), "these rows end before the tile of the key"
        assert np.isnan(rows[:hidden][~kept[:hidden]]).all()
        np.testing.assert_allclose(rows[kept], wanted[kept], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("keys", [0, 1, 19])
def test_rows_without_any_weight(guard: bool, sink: bool, keys: int, toolchain: Toolchain) -> None:
    form = AttentionForm(mask="padding", heads=1, guard=guard, sink=sink, keys=keys)
    compare(attention_case(form, np.random.default_rng(4)), toolchain, block_m=4, block_n=8)


@pytest.mark.parametrize("form", [AttentionForm(queries=0), AttentionForm(batch=0)])
def test_attention_of_nothing(form: AttentionForm, toolchain: Toolchain) -> None:
    compare(attention_case(form, np.random.default_rng(6)), toolchain, block_m=4, block_n=8)


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_a_program_of_the_probabilities_takes_two_passes(mask: str, shift: float, toolchain: Toolchain) -> None:
    """Rounded probabilities; with a shift, keys of probability 0 weigh something, so that none may be left out."""
    form = AttentionForm(mask=mask, guard=True, queries=17, keys=17, depth=8)
    case = attention_case(form, np.random.default_rng(3))
    assert isinstance(case.spec, AttentionSpec)
    share = Var("p", DType.F32)
    weight = unary("floor", share * 7.3) * 0.125 + shift
    spec = replace(case.spec, probability=share, weight=weight)
    compare(replace(case, spec=spec), toolchain, block_m=4, block_n=8)


def with_kept(case: Case, *, reads: str) -> Case:
    """The case with a second output per query and key, and rows emptied where no score of theirs is above 0.5."""
    spec = case.spec
    assert isinstance(spec, AttentionSpec)
    _, _, query, key = spec.score_axes
    extents = tuple(axis.extent for axis in spec.score_axes if axis.extent is not None)
    kept = Tensor("kept", DType.F32, extents)
    program = spec.raw * 2.0 if reads == "raw" else unary("sqrt", spec.probability)
    step = Step(Var("r0", DType.F32), "max", cast(key - query, DType.F32) * 0.25)
    open_rows = binary("gt", step.var, 0.5)
    outputs = tuple(replace(out, value=select(open_rows, out.value, const(0.0))) for out in spec.outputs)
    tap = Result(Place(kept, spec.score_axes, spec.score_axes), program)
    return replace(case, spec=replace(spec, outputs=(*outputs, tap), reductions=(step,)))


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("reads", ["raw", "probability"])
def test_scores_and_probabilities_are_stored_beside_the_sum(mask: str, reads: str, toolchain: Toolchain) -> None:
    form = AttentionForm(mask=mask, queries=17, keys=19 if mask == "none" else 17, depth=8)
    case = with_kept(attention_case(form, np.random.default_rng(3)), reads=reads)
    compare(case, toolchain, block_m=4, block_n=8)


def test_a_reduction_of_the_mask_lets_its_keys_be_left_out(toolchain: Toolchain) -> None:
    """The same causal test in the score and under the maximum: both loops end at the diagonal."""
    case = attention_case(AttentionForm(mask="causal", queries=17, keys=17), np.random.default_rng(3))
    spec = case.spec
    assert isinstance(spec, AttentionSpec)
    _, _, query, key = spec.score_axes
    mask = select(binary("le", key, query), const(0.0), const(-np.inf))
    step = Step(Var("r0", DType.F32), "max", mask)
    outputs = tuple(
        replace(out, value=select(binary("gt", step.var, -1.0), out.value, const(7.0))) for out in spec.outputs
    )
    reduced = replace(spec, score=spec.raw + mask, reductions=(step,), outputs=outputs)
    assert len(score_of(replace(reduced, score=select(binary("le", key, query), spec.raw, const(-np.inf)))).bounds) == 1
    compare(replace(case, spec=reduced), toolchain, block_m=4, block_n=8)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.builds(
        AttentionForm,
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        queries=st.integers(1, 40),
        keys=st.integers(1, 70),
        depth=st.sampled_from([2, 4, 8, 20]),
        mask=st.sampled_from(MASKS),
        rope=st.booleans(),
        softcap=st.booleans(),
        sink=st.booleans(),
        guard=st.booleans(),
    ),
    block_m=st.integers(1, 24),
    block_n=st.sampled_from([4, 8, 16, 23, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_any_attention(form: AttentionForm, block_m: int, block_n: int, seed: int, toolchain: Toolchain) -> None:
    compare(attention_case(form, np.random.default_rng(seed)), toolchain, block_m=block_m, block_n=block_n)


@pytest.mark.parametrize("seed", [1, 2, 4, 5, 7, 8, 10, 11])
@pytest.mark.parametrize(("block_n", "block_k"), [(16, 64), (32, 7), (5, 16)])
def test_matmul(seed: int, block_n: int, block_k: int, toolchain: Toolchain) -> None:
    rows, columns, depth = ((1, 5, 3), (9, 70, 33), (29, 48, 64))[seed // 4]
    case = contraction_case(seed, rows=rows, columns=columns, depth=depth, batch=1 + seed % 2)
    compare(case, toolchain, block_m=1 + 3 * (seed % 5), block_n=block_n, block_k=min(block_k, depth))


@pytest.mark.parametrize("rows", range(1, 15))
def test_every_number_of_rows(rows: int, toolchain: Toolchain) -> None:
    case = contraction_case(1, rows=rows, columns=50, depth=24)
    compare(case, toolchain, block_m=12, block_n=48, block_k=24)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("rows", range(1, 26))
def test_every_number_of_rows_of_a_weight(rows: int, target: Target, toolchain: Toolchain) -> None:
    """Rows that are all there are have register tiles of their own, as do the last of many; columns are left over."""
    case = siblings_case("apart", rows=rows, columns=163, depth=77)
    compare(case, toolchain, target, block_m=48, block_n=112, block_k=77)
    compare(case, toolchain, target, block_m=48, block_n=163, block_k=40)


@pytest.mark.parametrize("blocks", [{}, {"block_m": 24, "block_n": 32, "block_k": 16}])
@pytest.mark.parametrize(("kind", "count"), [("gated", 2), ("apart", 3)])
@pytest.mark.parametrize("rows", [1, 37])
def test_products_that_share_their_left_operand(
    kind: str, count: int, rows: int, blocks: dict[str, int], toolchain: Toolchain
) -> None:
    case = siblings_case(kind, rows=rows, columns=70, depth=40, count=count)
    compare(case, toolchain, PROFILE.target, **blocks)
    assert build(case, toolchain, blocks).kernel.packed == tuple(range(1, count + 1))


@pytest.mark.parametrize("kind", ["layernorm", "softmax", "pointwise", "reductions", "index"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (4, 16), (5, 83), (0, 3), (3, 0)])
def test_row(kind: str, dynamic: bool, rows: int, columns: int, toolchain: Toolchain) -> None:
    compare(row_case(kind, rows=rows, columns=columns, dynamic=dynamic), toolchain, block_m=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_row_carries_nan_and_inf(value: float, toolchain: Toolchain) -> None:
    case = row_case("softmax", rows=4, columns=37, dynamic=True)
    case.arrays["x"][1, 2] = value
    compare(case, toolchain, block_m=3)


def test_a_recommended_configuration_runs(toolchain: Toolchain) -> None:
    compare(attention_case(AttentionForm(mask="causal", queries=70, keys=70), np.random.default_rng(7)), toolchain)
    compare(contraction_case(1, rows=33, columns=70, depth=90), toolchain)
    compare(row_case("layernorm", rows=9, columns=70, dynamic=False), toolchain)


def test_a_wrong_shape_is_an_error_with_both_numbers(toolchain: Toolchain) -> None:
    case = row_case("layernorm", rows=4, columns=16, dynamic=False)
    compiled = build(case, toolchain, {"block_m": 4})
    arrays = [case.arrays[tensor.name] for tensor in case.spec.inputs]
    arrays[1] = arrays[1][:, :15]
    with pytest.raises(KernelError, match="input 1, dim 1: expected 16, found 15"):
        compiled(*arrays)


def test_dims_that_no_valid_call_has_are_refused(toolchain: Toolchain) -> None:
    case = row_case("pointwise", rows=4, columns=16, dynamic=False)
    limited = replace(case, spec=replace(case.spec, requires=(5 - Sym("R"),)))
    compiled = build(limited, toolchain, {"block_m": 4})
    compiled(*(case.arrays[tensor.name] for tensor in case.spec.inputs))
    longer = row_case("pointwise", rows=6, columns=16, dynamic=False)
    with pytest.raises(KernelError, match="must not be negative, is -1"):
        compiled(*(longer.arrays[tensor.name] for tensor in longer.spec.inputs))


def test_equal_specs_give_one_kernel_and_the_same_text() -> None:
    case = row_case("layernorm", rows=4, columns=16, dynamic=False)
    first, second = (
        compile_spec(case.spec, label="Test", profile=PROFILE, targets=(PROFILE.target,)) for _ in range(2)
    )
    assert first == second


def test_the_compiler_of_the_ziglang_wheel_builds_the_same_kernel(
    object_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilecore.toolchain.shutil.which", lambda name: None)
    compiler = find_compiler.__wrapped__(None)
    assert compiler.is_zig
    toolchain = Toolchain(compiler, object_cache)
    compare(attention_case(AttentionForm(mask="causal"), np.random.default_rng(8)), toolchain)
    compare(row_case("softmax", rows=3, columns=0, dynamic=False), toolchain)  # whose scratch memory nothing reads


def test_a_tensor_of_too_many_dims_is_refused(toolchain: Toolchain) -> None:
    case = row_case("pointwise", rows=4, columns=16, dynamic=False)
    wide = Tensor("wide", DType.F32, (const(1),) * 9)
    with pytest.raises(EmitError, match="9 dims"):
        build(replace(case, spec=replace(case.spec, inputs=(*case.spec.inputs, wide))), toolchain, None)


def test_the_cache_builds_nothing_twice(tmp_path: Path) -> None:
    toolchain = find_toolchain(tmp_path)
    case = row_case("pointwise", rows=4, columns=16, dynamic=False)
    kernel = compile_spec(case.spec, label="Test", profile=PROFILE, targets=(PROFILE.target,))
    load_kernel(kernel, PROFILE.target, toolchain)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    load_kernel(kernel, PROFILE.target, toolchain)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
