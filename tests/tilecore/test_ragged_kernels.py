"""Attention over sequences of different lengths in one tensor: rows of all sequences one after the other, and starts.

The oracle knows nothing of specs: softmax(Q Kᵀ) V in float64 for each sequence and head by itself.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tile_specs import F32, MINUS_INFINITY, axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const, select
from tilecore.contract.spec import AttentionSpec, Place, Result, View, check
from tilecore.cuda.adapt import adaptations
from tilecore.cuda.errors import CudaError
from tilecore.interpret import interpret
from tilecore.library import kernel_for
from tilecore.profile import detect_profile
from tilecore.target import target_named
from tilecore.toolchain import find_toolchain
from tilecore.trace import trace

Array = np.ndarray
HEADS, DEPTH, WIDTH = 2, 8, 9
PROFILE = detect_profile()
LENGTHS = {
    "mixed": (7, 40, 1, 16, 33),
    "equal": (16, 16),
    "one sequence": (29,),
    "one token": (1,),
    "a sequence without tokens": (5, 0, 18),
    "no tokens": (0, 0),
    "no sequences": (),
}


@dataclass(frozen=True)
class Form:
    """A variant of the attention: `causal`, keys and queries scaled, `late` a program of the probabilities."""

    causal: bool = False
    scaled: bool = False
    biased: bool = False
    late: bool = False


FORMS = {
    "plain": Form(),
    "causal": Form(causal=True),
    "scaled": Form(scaled=True),
    "a bias by position": Form(biased=True),
    "rounded weights": Form(late=True),
}


def ragged_spec(form: Form) -> AttentionSpec:
    """Q, K and V as [tokens, heads · depth], of sequences that begin at `starts` [batch + 1]."""
    B, L, N = Sym("B"), Sym("L"), Sym("N")
    mask, starts = tensor("mask", B, L), tensor("starts", B + 1, dtype=DType.I64)
    q_rows, k_rows = tensor("q", N, HEADS * DEPTH), tensor("k", N, HEADS * DEPTH)
    v_rows, bias = tensor("v", N, HEADS * WIDTH), tensor("bias", HEADS, L, L)
    b, h, q, k = axis("b", B), axis("h", HEADS), axis("q", L), axis("k", L)
    d, e = axis("d", DEPTH), axis("e", WIDTH)
    first = binary("max", Load(starts, (b,)), const(0))
    length = binary("min", Load(starts, (b + 1,)), N) - first
    raw, acc, p = Var("raw", F32), Var("acc", F32), Var("p", F32)
    score: Expr = raw * 0.25
    if form.biased:
        score = score + Load(bias, (h, q, k))
    if form.causal:
        score = select(binary("le", k, q), score, MINUS_INFINITY)
    query, key = Load(q_rows, (first + q, h * DEPTH + d)), Load(k_rows, (first + k, h * DEPTH + d))
    spec = AttentionSpec(
        (q_rows, k_rows, v_rows, starts, mask, bias),
        View("q", (b, h, q, d), query * 1.5 if form.scaled else query),
        View("k", (b, h, k, d), key * 0.5 if form.scaled else key),
        View("v", (b, h, k, e), Load(v_rows, (first + k, h * WIDTH + e))),
        raw,
        (b, h, q, k),
        score,
        acc,
        (Result(Place(tensor("y", N, HEADS * WIDTH), (b, h, q, e), (first + q, h * WIDTH + e)), acc),),
        weight=cast(cast(p * 15.0, DType.I32), F32) if form.late else None,
        length=length,
    )
    check(spec)
    return spec


def arrays_for(lengths: tuple[int, ...], rng: np.random.Generator) -> dict[str, Array]:
    """Rows for sequences of these lengths, in padded batches that are a little longer than the longest."""
    total, most = sum(lengths), max(lengths, default=0) + 3
    normal = {"q": (total, HEADS * DEPTH), "k": (total, HEADS * DEPTH), "v": (total, HEADS * WIDTH)}
    normal |= {"mask": (len(lengths), most), "bias": (HEADS, most, most)}
    rows = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in normal.items()}
    return rows | {"starts": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)}


def oracle(arrays: dict[str, Array], lengths: tuple[int, ...], form: Form) -> Array:
    """Every sequence and head by itself, in float64."""
    done: list[Array] = []
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k = (arrays[name][rows].astype(np.float64).reshape(length, HEADS, DEPTH) for name in ("q", "k"))
        v = arrays["v"][rows].astype(np.float64).reshape(length, HEADS, WIDTH)
        scores = np.einsum("qhd,khd->hqk", q, k) * (0.25 * 0.75 if form.scaled else 0.25)
        if form.biased:
            scores = scores + arrays["bias"][:, :length, :length]
        if form.causal:
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        weights = np.trunc(weights * 15) if form.late else weights
        done.append(np.einsum("hqk,khe->qhe", weights, v).reshape(length, HEADS * WIDTH))
        start += length
    return np.concatenate([*done, np.zeros((0, HEADS * WIDTH))])


def tolerance(form: Form) -> float:
    """Of a kernel in float32; a weight next to a level may be rounded to its neighbour, which is 1 less."""
    return 1e-5 if not form.late else 4.0


@pytest.mark.parametrize("form", FORMS)
def test_every_sequence_sees_its_own_rows(form: str) -> None:
    """The definition of the spec, and the tile program that computes it, in float64."""
    spec = ragged_spec(FORMS[form])
    kernel, operands = kernel_for(spec)
    program = trace(kernel, inputs=spec.inputs, operands=operands, extents={"block_m": 4, "block_n": 8})
    for lengths in LENGTHS.values():
        arrays = arrays_for(lengths, np.random.default_rng(0))
        want = oracle(arrays, lengths, FORMS[form])
        np.testing.assert_allclose(evaluate(spec, arrays)["y"], want, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(interpret(program, arrays)["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.cpu
@pytest.mark.parametrize("blocks", [None, (4, 8), (16, 32)])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_kernels_do_too(form: str, blocks: tuple[int, int] | None, object_cache: Path) -> None:
    spec = ragged_spec(FORMS[form])
    config = None if blocks is None else {"block_m": blocks[0], "block_n": blocks[1]}
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(PROFILE.target,), config=config)
    compiled = load_kernel(kernel, PROFILE.target, find_toolchain(object_cache))
    for lengths in LENGTHS.values():
        arrays = arrays_for(lengths, np.random.default_rng(1))
        (got,) = compiled(*(arrays[tensor.name] for tensor in spec.inputs))
        want = oracle(arrays, lengths, FORMS[form])
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(FORMS[form]))


@pytest.mark.cpu
def test_rows_beside_a_sequence_change_nothing(object_cache: Path) -> None:
    """Another sequence's infinities and NaN do not reach across, and each sequence has the bits that it has alone."""
    spec = ragged_spec(FORMS["plain"])
    compiled = load_kernel(
        compile_spec(spec, label="Test", profile=PROFILE, targets=(PROFILE.target,)),
        PROFILE.target,
        find_toolchain(object_cache),
    )
    lengths = LENGTHS["mixed"]
    arrays = arrays_for(lengths, np.random.default_rng(2))
    for name in ("q", "k", "v"):
        arrays[name][7] = np.nan if name == "q" else np.inf
    (got,) = compiled(*(arrays[tensor.name] for tensor in spec.inputs))
    start = 0
    for number, length in enumerate(lengths):
        own = {name: arrays[name][start : start + length] for name in ("q", "k", "v")}
        alone = {**arrays, **own, "starts": np.array([0, length]), "mask": arrays["mask"][:1]}
        (single,) = compiled(*(alone[tensor.name] for tensor in spec.inputs))
        np.testing.assert_array_equal(got[start : start + length], single)
        assert np.isfinite(single).all() == (number != 1)
        start += length


@pytest.mark.cpu
@pytest.mark.parametrize("starts", [[0, 50, 97], [-9, 5, 97], [60, 20, 97], [0, 2**62, 97], [5, 5, 4]])
def test_no_table_makes_a_kernel_read_or_write_outside(starts: list[int], object_cache: Path) -> None:
    """A wrong table gives wrong rows, never an access outside of the tensors: what is in them is as defined."""
    spec = ragged_spec(FORMS["plain"])
    compiled = load_kernel(
        compile_spec(spec, label="Test", profile=PROFILE, targets=(PROFILE.target,)),
        PROFILE.target,
        find_toolchain(object_cache),
    )
    arrays = arrays_for((4, 5), np.random.default_rng(3)) | {"starts": np.array(starts)}
    (got,) = compiled(*(arrays[tensor.name] for tensor in spec.inputs))
    want = evaluate(spec, arrays)["y"]
    np.testing.assert_allclose(got[~np.isnan(want)], want[~np.isnan(want)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_rows_are_read_where_they_lie_without_a_guard(name: str) -> None:
    """That a sequence's rows are inside their tensor is proved, so that they are copied as whole vectors."""
    spec = ragged_spec(FORMS["plain"])
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(target_named(name),))
    (text,) = kernel.sources.values()
    assert "pack_transposed_f32(input1" in text
    assert "gather_f32" not in text
    assert ("load_f32(input0" if name == "x86-64-v3" else "load_masked_f32(input0") in text  # 8 columns of 16 lanes


def test_cards_have_no_kernel_for_it() -> None:
    with pytest.raises(CudaError, match="as many rows as data says"):
        next(adaptations(ragged_spec(FORMS["plain"])))
