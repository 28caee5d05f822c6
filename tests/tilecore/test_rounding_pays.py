"""Where rounding operands to bfloat16 pays, and calls of one query that keep them: against double precision."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tile_specs import AttentionForm, attention_case, axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Load, Sym, Var, cast, const
from tilecore.contract.few_rows import FEW_ROWS, one_query, rounded_on_the_way, wide_alone
from tilecore.contract.narrow import narrowed
from tilecore.contract.reshape import single_query
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Tensor, View, outputs_of
from tilecore.contract.tensors import with_tensors
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_toolchain

PROFILE = detect_profile()
FORM = AttentionForm(heads=8, keys=45, depth=8)


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(cache_directory=object_cache)


def attention(form: AttentionForm) -> AttentionSpec:
    spec = attention_case(form, np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    return spec


def decoding(groups: int, heads: int = 16) -> AttentionSpec:
    """One query a head, `groups` of them over the same keys."""
    found = single_query(attention(replace(FORM, heads=heads, groups=groups)))
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (4, 4), (8, 8), (16, 0)])
def test_rounding_a_cache_for_few_queries_does_not_pay(groups: int, rows: int) -> None:
    assert rounded_on_the_way(decoding(groups)) == 0, "nothing is rounded"
    assert rounded_on_the_way(narrowed(decoding(groups))) == rows


@pytest.mark.parametrize("kept", ["xk", "xv", ""])
def test_what_lies_in_memory_as_bfloat16_costs_nothing(kept: str) -> None:
    spec = narrowed(decoding(4))
    stored = {one: one if one.name == kept else replace(one, dtype=DType.BF16) for one in spec.inputs}
    spec = with_tensors(spec, stored, {one: one for one in outputs_of(spec)})
    assert rounded_on_the_way(spec) == (4 if kept else 0)


def test_half_precision_is_rounded_on_the_way_too_and_computed_keys_where_they_are_made() -> None:
    spec = decoding(4)
    half = with_tensors(
        spec, {one: replace(one, dtype=DType.F16) for one in spec.inputs}, {one: one for one in outputs_of(spec)}
    )
    assert isinstance(half, AttentionSpec)
    sides = (replace(view, value=cast(view.value, DType.F32)) for view in (half.q, half.k, half.v))
    assert rounded_on_the_way(narrowed(replace(half, **dict(zip("qkv", sides, strict=True))))) == 4
    both = {name: replace(view, value=view.value * 2.0) for name, view in (("k", spec.k), ("v", spec.v))}
    assert rounded_on_the_way(narrowed(replace(spec, **both))) == 0


@pytest.mark.parametrize(
    ("rows", "constant", "few"), [(4, False, 4), (4, True, 0), (FEW_ROWS + 1, False, 0), ("M", False, 0)]
)
def test_products_of_few_rows(rows: int | str, constant: bool, few: int) -> None:
    count = Sym(rows) if isinstance(rows, str) else const(rows)
    a, b = tensor("a", count, 64), Tensor("b", DType.F32, (const(64), const(48)), constant)
    g, m, k, n = axis("g", 1), axis("m", count), axis("k", 64), axis("n", 48)
    acc = Var("acc", DType.F32)
    left: Expr = Load(a, (m, k))
    spec = ContractionSpec(
        (a, b),
        View("a", (g, m, k), left),
        View("b", (g, k, n), Load(b, (k, n))),
        acc,
        (Result(Place(tensor("y", count, 48), (g, m, n), (m, n)), acc),),
    )
    assert rounded_on_the_way(spec) == 0
    assert rounded_on_the_way(narrowed(spec)) == few
    assert wide_alone(narrowed(spec)) == narrowed(spec)


def test_one_query_of_an_unknown_number_keeps_its_operands_where_rounding_does_not_pay() -> None:
    spec = narrowed(attention(replace(FORM, groups=4)))
    own = wide_alone(spec)
    assert isinstance(spec, AttentionSpec)
    assert isinstance(own, AttentionSpec)
    assert own == replace(spec, wide_alone=True)
    kept, rounds = one_query(own), one_query(spec)
    assert kept is not None
    assert rounds is not None
    assert [kept[1].q.dtype, rounds[1].q.dtype] == [DType.F32, DType.BF16]
    many = narrowed(attention(replace(FORM, heads=16, groups=16)))
    assert wide_alone(many) is many, "sixteen queries share a key"
    same = narrowed(attention(FORM))
    assert wide_alone(same) is not same, "heads need not share any"
    assert wide_alone(narrowed(decoding(4))) == narrowed(decoding(4)), "the number is known"


@pytest.mark.cpu
@pytest.mark.parametrize("target", detect_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize(
    "form",
    [
        replace(FORM, groups=4, mask="past"),
        replace(FORM, mask="past"),
        replace(FORM, groups=4, mask="padding", poison="value-nan"),
        replace(FORM, rope=True, sink=True),
    ],
    ids=str,
)
def test_kernels_agree_with_the_definition(
    form: AttentionForm, queries: int, target: Target, toolchain: Toolchain
) -> None:
    case = attention_case(replace(form, queries=queries), np.random.default_rng(1))
    spec = wide_alone(narrowed(case.spec))
    assert isinstance(spec, AttentionSpec)
    assert spec.wide_alone
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(target,))
    found = load_kernel(kernel, target, toolchain)(*(case.arrays[one.name] for one in spec.inputs))
    exact = evaluate(case.spec, {name: array.astype(np.float64) for name, array in case.arrays.items()})
    rounds = evaluate(spec, case.arrays, wide=False)
    for one, value in zip(outputs_of(spec), found, strict=True):
        np.testing.assert_allclose(value.astype(float), rounds[one.name].astype(float), rtol=2e-2, atol=2e-2)
        off = np.nanmax(np.abs(value - exact[one.name]))
        assert (off < 1e-5) == (queries == 1), "one query's operands are not rounded, those of more are"
