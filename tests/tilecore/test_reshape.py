"""One query per head: heads that share keys and values become the queries of one, with the same results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tile_specs import MASKS, AttentionForm, attention_case, tensor

from tilecore.call import load_kernel
from tilecore.compile import compile_spec, prepare
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Load, const
from tilecore.contract.reshape import heads_as_queries, single_query
from tilecore.contract.spec import AttentionSpec, extent_of, outputs_of
from tilecore.profile import detect_profile
from tilecore.toolchain import Toolchain, find_toolchain

PROFILE = detect_profile()
DECODING = AttentionForm(heads=8, groups=4, queries=1, keys=45, depth=8)
FORMS = (
    *(replace(DECODING, mask=mask, poison="value-nan" if mask == "padding" else "none") for mask in MASKS),
    replace(DECODING, sink=True, softcap=True),
    replace(DECODING, rope=True, two_outputs=True),
    replace(DECODING, groups=8, guard=True, mask="padding"),
)


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(cache_directory=object_cache)


def one_query(form: AttentionForm) -> tuple[AttentionSpec, dict[str, np.ndarray]]:
    case = attention_case(form, np.random.default_rng(0))
    assert isinstance(case.spec, AttentionSpec)
    found = single_query(case.spec)
    assert found is not None
    return found[1], dict(case.arrays)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_keys_are_read_once_for_the_heads_that_share_them(form: AttentionForm) -> None:
    spec, arrays = one_query(form)
    shared = heads_as_queries(spec)
    assert shared is not None
    heads = [extent_of(one) for one in shared.score_axes[1:3]]
    assert heads == [const(form.heads // form.groups), const(form.groups)]
    assert prepare(spec) == prepare(shared)
    for name, value in evaluate(spec, arrays).items():
        np.testing.assert_allclose(evaluate(shared, arrays)[name], value, rtol=1e-5, atol=1e-6)


def test_what_else_is_told_by_head_and_query_stays() -> None:
    spec, _ = one_query(DECODING)
    length = Load(tensor("length", spec.q.shape[0], dtype=DType.I64), (spec.score_axes[0],))
    assert heads_as_queries(replace(spec, weight=spec.probability * 2.0)) is None
    assert heads_as_queries(replace(spec, length=length)) is None
    assert heads_as_queries(one_query(replace(DECODING, groups=1))[0]) is None
    several = attention_case(replace(DECODING, queries=3), np.random.default_rng(0)).spec
    assert isinstance(several, AttentionSpec)
    assert heads_as_queries(several) is None


@pytest.mark.cpu
@pytest.mark.parametrize("form", FORMS[:3] + FORMS[-3:], ids=str)
def test_the_kernel_agrees_with_the_heads_apart(form: AttentionForm, toolchain: Toolchain) -> None:
    spec, arrays = one_query(form)
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(PROFILE.target,))
    found = load_kernel(kernel, PROFILE.target, toolchain)(*(arrays[one.name] for one in spec.inputs))
    wanted = evaluate(spec, {name: array.astype(np.float64) for name, array in arrays.items()})
    for one, value in zip(outputs_of(spec), found, strict=True):
        np.testing.assert_allclose(value.astype(float), wanted[one.name], rtol=2e-3, atol=2e-5)
