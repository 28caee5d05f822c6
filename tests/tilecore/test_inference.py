"""Tile inference and recommendation: what is cut and what must not be, conflicts, and how configurations are ranked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tile_specs import AttentionForm, Case, attention_case, contraction_case, row_case

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Sym, Var, const
from tilecore.contract.spec import ContractionSpec, Place, Result, Tensor, View
from tilecore.copies import expand_buffer_copies
from tilecore.infer import InferenceError, Plan, choose_register_tile, choose_tall_tiles, infer
from tilecore.library import kernel_for
from tilecore.profile import PROFILES, profile_named
from tilecore.recommend import Machine, costs_of, nominal_sizes, rank, recommend
from tilecore.target import TARGETS, RegisterTile, target_named
from tilecore.trace import trace

AVX2 = target_named("x86-64-v3")
EXTENTS = {"block_m": 4, "block_n": 8}


def plan_of(case: Case, extents: Mapping[str, int]) -> Plan:
    kernel, operands = kernel_for(case.spec)
    program = trace(kernel, inputs=case.spec.inputs, operands=operands, extents=extents)
    return infer(expand_buffer_copies(program), AVX2)


def attention_plan(mask: str) -> Plan:
    return plan_of(attention_case(AttentionForm(mask=mask, queries=7, keys=7), np.random.default_rng(0)), EXTENTS)


def own_class(plan: Plan, buffer: str, axis: int) -> int:
    return plan.graph.classes[buffer, axis]


def test_rows_and_keys_of_attention_are_cut_to_the_data() -> None:
    plan = attention_plan("none")
    assert own_class(plan, "q", 0) == own_class(plan, "s", 0) == own_class(plan, "o", 0) == own_class(plan, "top", 0)
    assert own_class(plan, "k", 0) == own_class(plan, "s", 1) == own_class(plan, "v", 0)
    assert {own_class(plan, "q", 0), own_class(plan, "k", 0)} == set(plan.live)
    assert not plan.needed


def test_a_causal_score_needs_no_key_past_the_last_query() -> None:
    plan = attention_plan("causal")
    assert list(plan.needed) == [own_class(plan, "s", 1)]


@pytest.mark.parametrize("mask", ["padding", "bias"])
def test_a_score_that_is_finite_or_data_everywhere_needs_every_key(mask: str) -> None:
    assert not attention_plan(mask).needed


def kernel_with_sum(finite: bool) -> Plan:
    rows = T.dynamic("rows")

    def sums(X: T.Tensor((rows, 5), T.float32), Y: T.Tensor((rows,), T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            x = T.alloc_fragment((5, 8), T.float32)
            total = T.alloc_fragment((5,), T.float32)
            for i, j in T.Parallel(5, 8):
                x[i, j] = X[j, i] + 1.0 if finite else X[j, i]
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(5):
                Y[i] = total[i]

    return infer(trace(sums), AVX2)


def test_a_sum_over_padding_that_is_not_zero_is_not_cut() -> None:
    plan = kernel_with_sum(finite=True)
    assert own_class(plan, "x", 1) not in plan.live


def test_a_tile_in_two_layouts_is_a_conflict_that_shows_both_uses() -> None:
    def twice(X: T.Tensor((8, 8), T.float32), Y: T.Tensor((8, 8), T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            x = T.alloc_shared((8, 8), T.float32)
            c = T.alloc_fragment((8, 8), T.float32)
            T.copy(X[0, 0], x)
            T.gemm(x, x, c, clear=True)
            for i, j in T.Parallel(8, 8):
                Y[i, j] = c[i, j]

    with pytest.raises(InferenceError, match="two layouts") as caught:
        infer(trace(twice), AVX2)
    text = str(caught.value)
    assert "packed panels of axis 1" in text
    assert "plain rows" in text
    assert text.count("^^^") >= 2


def test_a_reduction_that_the_target_cannot_do_is_refused_with_its_place() -> None:
    def columns(X: T.Tensor((8, 8), T.float32), Y: T.Tensor((8,), T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            x = T.alloc_fragment((8, 8), T.float32)
            total = T.alloc_fragment((8,), T.float32)
            T.copy(X[0, 0], x)
            T.reduce_sum(x, total, dim=0)
            for i in T.Parallel(8):
                Y[i] = total[i]

    with pytest.raises(InferenceError, match=r"axis 0 of 2"):
        infer(trace(columns), AVX2)


@pytest.mark.parametrize("target", TARGETS)
def test_the_register_tile_fits_and_no_larger_one_of_its_shape_does(target: Any) -> None:
    tile = choose_register_tile(target)
    assert target.fits(tile)
    wider = RegisterTile(tile.rows, tile.vectors + target.smallest_vectors)
    assert wider.columns(target.lanes) > 64 or not target.fits(wider)


@pytest.mark.parametrize(
    ("name", "again", "tiles"),
    [
        ("x86-64-v4", False, [(rows, 2) for rows in range(7, 13)]),
        ("x86-64-v3", True, [(7, 2)]),  # one vector of B stays in memory
        ("x86-64-v3", False, []),
        ("aarch64", True, []),
    ],
)
def test_rows_that_one_tile_holds_pass_the_right_operand_once(name: str, again: bool, tiles: Any) -> None:
    found = choose_tall_tiles(target_named(name), again=again)
    assert [(tile.rows, tile.vectors) for tile in found] == tiles


CASES = {
    "attention": attention_case(AttentionForm(), np.random.default_rng(0)),
    "contraction": contraction_case(1, rows=5, columns=70, depth=90),
    "row": row_case("layernorm", rows=3, columns=16, dynamic=False),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_recommendation_is_the_first_of_the_ranking_and_can_be_traced(kind: str, profile: Any) -> None:
    spec = CASES[kind].spec
    ranked = rank(spec, profile, profile.target)
    assert [c.cost for c in ranked if not c.rejected] == sorted(c.cost for c in ranked if not c.rejected)
    choice = recommend(spec, profile, profile.target)
    assert choice.config == ranked[0].config
    kernel, operands = kernel_for(spec)
    assert not trace(kernel, inputs=spec.inputs, operands=operands, extents=choice.config).tunables


def test_a_machine_without_room_rejects_with_the_bytes() -> None:
    tiny = replace(profile_named("zen3"), l2=1 << 10)
    spec = attention_case(AttentionForm(), np.random.default_rng(0)).spec
    rejected = [candidate for candidate in rank(spec, tiny, tiny.target) if candidate.rejected]
    assert rejected
    assert all("KiB" in candidate.rejected for candidate in rejected)


def test_padding_that_a_later_turn_of_a_loop_changes_is_not_cut() -> None:
    rows = T.dynamic("rows")

    def sums(X: T.Tensor((rows, 5), T.float32), Y: T.Tensor((rows,), T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            x = T.alloc_fragment((5, 8), T.float32)
            total = T.alloc_fragment((5,), T.float32)
            T.clear(total)
            for i, j in T.Parallel(5, 8):
                x[i, j] = X[j, i]
            for _ in T.serial(2):
                T.reduce_sum(x, total, dim=1, clear=False)
                for i, j in T.Parallel(5, 8):
                    x[i, j] = x[i, j] + 1.0
            for i in T.Parallel(5):
                Y[i] = total[i]

    plan = infer(trace(sums), AVX2)
    assert own_class(plan, "x", 1) not in plan.live


def test_padding_that_one_side_of_a_branch_changes_is_not_cut() -> None:
    rows = T.dynamic("rows")

    def sums(X: T.Tensor((rows, 5), T.float32), Y: T.Tensor((rows,), T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(2) as m:
            x = T.alloc_fragment((5, 8), T.float32)
            total = T.alloc_fragment((5,), T.float32)
            with T.If(m == 0):
                for i, j in T.Parallel(5, 8):
                    x[i, j] = X[j, i] + 1.0
            with T.Else():
                for i, j in T.Parallel(5, 8):
                    x[i, j] = X[j, i]
            T.reduce_sum(x, total, dim=1)
            for i in T.Parallel(5):
                Y[m * 5 + i] = total[i]

    plan = infer(trace(sums), AVX2)
    assert own_class(plan, "x", 1) not in plan.live


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_rows_that_a_typical_size_has_none_of_are_ranked(profile: Any) -> None:
    """Frames of a strided convolution: a short sequence has none of them."""
    frames, count = Sym("samples") // const(400), Sym("samples")
    x = Tensor("x", DType.F32, (count, const(32)))
    w = Tensor("w", DType.F32, (const(32), const(16)))
    extents = (const(1), frames, const(32), const(16))
    one, m, k, n = (Var(name, extent=extent) for name, extent in zip("bmkn", extents, strict=True))
    out = Place(Tensor("y", DType.F32, (frames, const(16))), (one, m, n), (m, n))
    acc = Var("acc", DType.F32)
    right = View("b", (one, k, n), Load(w, (k, n)) * 2.0)
    spec = ContractionSpec((x, w), View("a", (one, m, k), Load(x, (m, k))), right, acc, (Result(out, acc),))
    assert recommend(spec, profile, profile.target).config


def product_of(*lead: int | str) -> ContractionSpec:
    """[*lead, 3072] times [3072, 768]."""
    dims = tuple(const(dim) if isinstance(dim, int) else Sym(dim) for dim in lead)
    x = Tensor("x", DType.F32, (*dims, const(3072)))
    w = Tensor("w", DType.F32, (const(3072), const(768)))
    extents = (const(1), *dims)[-2:]
    b, m, k, n = (
        Var(name, extent=extent) for name, extent in zip("bmkn", (*extents, const(3072), const(768)), strict=True)
    )
    places = (b, m) if len(dims) > 1 else (m,)
    out = Place(Tensor("y", DType.F32, (*dims, const(768))), (b, m, n), (*places, n))
    acc = Var("acc", DType.F32)
    right = View("b", (b, k, n), Load(w, (k, n)))
    return ContractionSpec((x, w), View("a", (b, m, k), Load(x, (*places, k))), right, acc, (Result(out, acc),))


def test_a_batch_that_alone_is_symbolic_is_not_taken_for_rows() -> None:
    assert nominal_sizes(product_of("batch", 197), 128) == {"batch": 1}
    assert nominal_sizes(product_of("batch", 197), 512) == {"batch": 2}
    assert nominal_sizes(product_of("tokens", 12), 512) == {"tokens": 42}
    assert nominal_sizes(product_of("rows"), 512) == {"rows": 512}
    assert nominal_sizes(product_of("batch", "seq"), 512) == {"batch": 1, "seq": 512}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_the_choice_for_an_open_batch_suits_one_of_it(profile: Any) -> None:
    spec = product_of("batch", 197)
    cost = costs_of(spec, Machine(profile, profile.target, {"batch": 1}))
    ranked = [candidate.config for candidate in rank(spec, profile, profile.target) if not candidate.rejected]
    assert cost(ranked[0]).cost <= 1.05 * min(cost(config).cost for config in ranked)
