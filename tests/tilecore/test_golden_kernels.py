"""Golden kernels: the tile program and the C of one kernel of each kind, and proof that they compute what they should.

`pytest --update-golden` writes tests/golden/ anew. Read the difference like any other change before committing it.
"""

import difflib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tile_specs import MINUS_INFINITY, axis, random_arrays, tensor

from tilecore.call import load_kernel
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Load, Sym, Var, binary, const, select, unary
from tilecore.contract.panel import pack
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Place,
    Result,
    RowSpec,
    Spec,
    Step,
    Tensor,
    View,
    outputs_of,
)
from tilecore.profile import detect_target, profile_named
from tilecore.target import target_named, targets_for
from tilecore.toolchain import find_toolchain

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TARGET = target_named("x86-64-v3")
ACC = Var("acc", DType.F32)
TOLERANCE = 3e-6  # float32 rounding of sums of at most 64 terms around 1


@dataclass(frozen=True)
class Golden:
    """A spec at fixed tile extents, and sizes for its symbols that divide by no tile."""

    spec: Spec
    config: Mapping[str, int]
    sizes: Mapping[str, int]


def attention_causal() -> Golden:
    """Q, K and V as slices of one projection [B, S, 3, H, D], a scale, a causal mask; out [B, S, H·D]."""
    B, S, H, D = Sym("B"), Sym("S"), 2, 64
    x, y = tensor("x", B, S, 3, H, D), tensor("y", B, S, H * D)
    b, h, q, k, d, e = axis("b", B), axis("h", H), axis("q", S), axis("k", S), axis("d", D), axis("e", D)
    views = [
        View(name, (b, h, row, column), Load(x, (b, row, const(part), h, column)))
        for part, (name, row, column) in enumerate((("q", q, d), ("k", k, d), ("v", k, e)))
    ]
    raw = Var("raw", DType.F32)
    score = select(binary("le", k, q), raw * 0.125, MINUS_INFINITY)
    result = Result(Place(y, (b, h, q, e), (b, q, h * D + e)), ACC)
    spec = AttentionSpec((x,), views[0], views[1], views[2], raw, (b, h, q, k), score, ACC, (result,))
    return Golden(spec, {"block_m": 24, "block_n": 32}, {"B": 2, "S": 77})


def contraction_bias_gelu() -> Golden:
    """A constant weight [64, 48], which is packed into panels; bias and GELU by erf as the epilogue."""
    M, N, K = Sym("M"), 48, 64
    a, bias, c = tensor("a", M, K), tensor("bias", N), tensor("c", M, N)
    weight = Tensor("w", DType.F32, tensor("w", K, N).shape, constant=True)
    b, m, n, k = axis("b", 1), axis("m", M), axis("n", N), axis("k", K)
    biased = ACC + Load(bias, (n,))
    gelu = biased * 0.5 * (1.0 + unary("erf", biased * 0.70710678))
    result = Result(Place(c, (b, m, n), (m, n)), gelu)
    views = View("a", (b, m, k), Load(a, (m, k))), View("b", (b, k, n), Load(weight, (k, n)))
    return Golden(
        ContractionSpec((a, weight, bias), views[0], views[1], ACC, (result,)),
        {"block_m": 24, "block_n": 48, "block_k": 64},
        {"M": 53},
    )


def row_skip_layernorm() -> Golden:
    """x + skip, normalised over 48 columns in two passes, times gamma plus beta; the sum is a second result."""
    R, C = Sym("R"), 48
    x, skip = tensor("x", R, C), tensor("skip", R, C)
    gamma, beta = tensor("gamma", C), tensor("beta", C)
    y, total = tensor("y", R, C), tensor("total", R, C)
    r, c = axis("r", R), axis("c", C)
    names = [Var(name, DType.F32) for name in ("h", "sum", "difference", "squares")]
    h, summed, difference, squares = names
    steps = (
        Step(h, "tile", Load(x, (r, c)) + Load(skip, (r, c))),
        Step(summed, "sum", h),
        Step(difference, "tile", h - summed / float(C)),
        Step(squares, "sum", difference * difference),
    )
    scaled = difference * unary("rsqrt", squares / float(C) + 1e-5)
    results = (
        Result(Place(y, (r, c), (r, c)), scaled * Load(gamma, (c,)) + Load(beta, (c,))),
        Result(Place(total, (r, c), (r, c)), h),
    )
    return Golden(RowSpec((x, skip, gamma, beta), r, c, steps, results), {"block_m": 8}, {"R": 37})


CASES = {case.__name__: case for case in (attention_causal, contraction_bias_gelu, row_skip_layernorm)}


@cache
def compiled(name: str) -> tuple[Kernel, str]:
    """The kernel and its printed tile program."""
    golden, stages = CASES[name](), dict[str, str]()
    kernel = compile_spec(
        golden.spec,
        label="Golden",
        profile=profile_named("zen3"),
        targets=(TARGET,),
        config=golden.config,
        dump=stages.__setitem__,
    )
    return kernel, stages[f"30_program_{kernel.name}.txt"]


def matches(path: Path, text: str, *, update: bool) -> None:
    """Compare with the golden file, or write it."""
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    known = path.read_text(encoding="utf-8")
    if text != known:
        lines = difflib.unified_diff(known.splitlines(), text.splitlines(), path.name, "generated now", lineterm="")
        pytest.fail("\n".join([*list(lines)[:60], "if this is meant, run pytest --update-golden"]), pytrace=False)


@pytest.mark.parametrize("name", CASES)
def test_the_tile_program_is_the_golden_one(name: str, update_golden: bool) -> None:
    _, program = compiled(name)
    matches(GOLDEN / f"{name}.txt", program, update=update_golden)


@pytest.mark.parametrize("name", CASES)
def test_the_c_is_the_golden_one(name: str, update_golden: bool) -> None:
    kernel, _ = compiled(name)
    text = kernel.sources[TARGET.name]
    matches(GOLDEN / f"{name}.{TARGET.name}.c", text, update=update_golden)


def test_every_golden_file_has_a_test() -> None:
    wanted = {f"{name}.{ending}" for name in CASES for ending in ("txt", f"{TARGET.name}.c")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted


@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_the_golden_kernel_computes_its_spec(name: str, object_cache: Path) -> None:
    if TARGET not in targets_for(platform.machine()) or detect_target().lanes < TARGET.lanes:
        pytest.skip(f"this processor does not run {TARGET.name}")
    golden, (kernel, _) = CASES[name](), compiled(name)
    arrays = random_arrays(golden.spec, dict(golden.sizes), np.random.default_rng(0))
    inputs = [arrays[source.name] for source in golden.spec.inputs]
    for position in kernel.packed:
        inputs[position] = pack(inputs[position])
    outputs = load_kernel(kernel, TARGET, find_toolchain(object_cache))(*inputs)
    expected = evaluate(golden.spec, arrays)
    for place, value in zip(outputs_of(golden.spec), outputs, strict=True):
        want = expected[place.name]
        np.testing.assert_allclose(value, want, rtol=0, atol=TOLERANCE * float(np.abs(want).max()), err_msg=place.name)
