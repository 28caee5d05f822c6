"""Kernels over 16-bit floats, compiled: conversions to the last bit, and regions against the definition of their spec.

The oracle of conversions is numpy for float16 and ml_dtypes for bfloat16.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from tile_specs import axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import HEADERS, Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const, select, unary
from tilecore.contract.panel import pack
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, RowSpec, Spec, Step, Tensor, View
from tilecore.profile import detect_profile
from tilecore.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
KINDS = {"f16": DType.F16, "bf16": DType.BF16}
UNIT = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
F32 = DType.F32


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def run(spec: Spec, toolchain: Toolchain, *arrays: np.ndarray, **config: int) -> tuple[Kernel, tuple[np.ndarray, ...]]:
    kernel = compile_spec(spec, label="Half", profile=PROFILE, targets=(PROFILE.target,), config=config or None)
    return kernel, load_kernel(kernel, PROFILE.target, toolchain)(*arrays)


def wide(value: Expr) -> Expr:
    return cast(value, F32)


def row_spec(x: DType, y: DType, program: Expr | None, columns: int) -> tuple[RowSpec, Expr]:
    rows = Sym("N")
    source, target = tensor("x", rows, columns, dtype=x), tensor("y", rows, columns, dtype=y)
    r, c = axis("r", rows), axis("c", columns)
    element = Load(source, (r, c))
    value = cast(element, y) if program is None else program
    return RowSpec((source,), r, c, (), (Result(Place(target, (r, c), (r, c)), value),)), element


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    kind = {2: np.uint16, 4: np.uint32}[want.dtype.itemsize]
    np.testing.assert_array_equal(got.view(kind)[~nan], want.view(kind)[~nan])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 61])  # whole vectors, and a tail under a mask
def test_every_16_bit_number_is_widened_exactly(kind: str, columns: int, toolchain: Toolchain) -> None:
    dtype = KINDS[kind].row.numpy
    every = np.arange(2**16, dtype=np.uint16)[: 2**16 // columns * columns].view(dtype).reshape(-1, columns)
    _, (got,) = run(row_spec(KINDS[kind], F32, None, columns)[0], toolchain, every)
    same_bits(got, every.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 61])
def test_rounding_is_to_nearest_even(kind: str, columns: int, toolchain: Toolchain) -> None:
    dtype = KINDS[kind].row.numpy
    rng = np.random.default_rng(0)
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        between = (every[:-1] + every[1:]) / 2  # ties, and what overflows
        anything = rng.integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
        x = np.concatenate([every, between, np.nextafter(between, np.float32(0)), anything])
        x = x[: x.size // columns * columns].reshape(-1, columns)
        want = x.astype(dtype)
    _, (got,) = run(row_spec(F32, KINDS[kind], None, columns)[0], toolchain, x)
    same_bits(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_rounds_to_its_type(kind: str, toolchain: Toolchain) -> None:
    dtype = KINDS[kind]
    _, element = row_spec(dtype, dtype, None, 19)
    one = const(1.0, dtype)
    program = select(binary("lt", element, one), element * element + one, unary("sqrt", element)) - const(0.1, dtype)
    spec, _ = row_spec(dtype, dtype, program, 19)
    x = np.random.default_rng(1).uniform(0, 2, (5, 19)).astype(dtype.row.numpy)
    _, (got,) = run(spec, toolchain, x)
    same_bits(got, evaluate(spec, {"x": x}, wide=False)["y"])


def contraction(dtype: DType, depth: int, columns: int, *, constant: bool, transposed: bool) -> ContractionSpec:
    """y[m, n] = gelu(Σ_k a[m, k] · b[k, n] + bias[n]), b stored [k, n] or [n, k]."""
    rows = Sym("M")
    a, bias = tensor("a", rows, depth, dtype=dtype), tensor("bias", columns, dtype=dtype)
    shape = (const(columns), const(depth)) if transposed else (const(depth), const(columns))
    b = Tensor("b", dtype, shape, constant)
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", depth), axis("n", columns)
    acc = Var("acc", F32)
    total = acc + wide(Load(bias, (n,)))
    value = total * unary("sigmoid", total)
    place = Place(tensor("y", rows, columns, dtype=dtype), (g, m, n), (m, n))
    return ContractionSpec(
        (a, b, bias),
        View("a", (g, m, k), wide(Load(a, (m, k)))),
        View("b", (g, k, n), wide(Load(b, (n, k) if transposed else (k, n)))),
        acc,
        (Result(place, cast(value, dtype)),),
    )


def close(got: np.ndarray, want: np.ndarray, dtype: DType) -> None:
    """Within one rounding to the type of each element, and float32 sums."""
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= 1.01 * UNIT[dtype] * np.abs(want) + 4e-6).all(), error.max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("rows", [1, 23])
def test_contractions(kind: str, transposed: bool, constant: bool, rows: int, toolchain: Toolchain) -> None:
    dtype = KINDS[kind]
    depth, columns = 37, 50
    spec = contraction(dtype, depth, columns, constant=constant, transposed=transposed)
    rng = np.random.default_rng(2)
    arrays = {
        name: rng.standard_normal(shape).astype(dtype.row.numpy)
        for name, shape in (("a", (rows, depth)), ("b", (depth, columns)), ("bias", (columns,)))
    }
    arrays["b"] = arrays["b"].T.copy() if transposed else arrays["b"]
    matrix = arrays["b"].T if transposed else arrays["b"]
    kernel, (got,) = run(spec, toolchain, arrays["a"], pack(matrix) if constant else arrays["b"], arrays["bias"])
    assert kernel.packed == ((1,) if constant else ())
    product = arrays["a"].astype(np.float64) @ matrix.astype(np.float64) + arrays["bias"].astype(np.float64)
    close(got, product / (1 + np.exp(-product)), dtype)
    text = kernel.sources[PROFILE.target.name]
    assert (f"product_{kind}_" in text) == constant  # panels stay 16 bits wide, everything else is widened when copied


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, toolchain: Toolchain) -> None:
    dtype = KINDS[kind]
    B, Q, K = Sym("B"), Sym("Q"), Sym("K")
    H, D = 2, 16
    xq, xk, xv = tensor("xq", B, Q, H * D, dtype=dtype), *(tensor(n, B, H, K, D, dtype=dtype) for n in ("xk", "xv"))
    mask = tensor("mask", B, K, dtype=dtype)
    b, h, q, k, d, e = axis("b", B), axis("h", H), axis("q", Q), axis("k", K), axis("d", D), axis("e", D)
    raw, acc = Var("raw", F32), Var("acc", F32)
    spec = AttentionSpec(
        (xq, xk, xv, mask),
        View("q", (b, h, q, d), wide(Load(xq, (b, q, h * D + d)))),
        View("k", (b, h, k, d), wide(Load(xk, (b, h, k, d)))),
        View("v", (b, h, k, e), wide(Load(xv, (b, h, k, e)))),
        raw,
        (b, h, q, k),
        raw * 0.25 + wide(Load(mask, (b, k))),
        acc,
        (Result(Place(tensor("y", B, Q, H * D, dtype=dtype), (b, h, q, e), (b, q, h * D + e)), cast(acc, dtype)),),
    )
    rng = np.random.default_rng(3)
    arrays = {
        "xq": rng.standard_normal((2, 13, H * D)),
        "xk": rng.standard_normal((2, H, 27, D)),
        "xv": rng.standard_normal((2, H, 27, D)),
        "mask": np.where(rng.random((2, 27)) < 0.3, -10000.0, 0.0),
    }
    arrays = {name: value.astype(dtype.row.numpy) for name, value in arrays.items()}
    kernel, (got,) = run(spec, toolchain, *arrays.values(), block_m=12, block_n=16)
    assert f"pack_transposed_{kind}(" in kernel.sources[PROFILE.target.name]
    want = evaluate(spec, {name: value.astype(np.float64) for name, value in arrays.items()})["y"]
    close(got, want, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_norm_with_a_sum(kind: str, toolchain: Toolchain) -> None:
    dtype = KINDS[kind]
    rows, width = Sym("N"), 45
    x, skip, gamma = tensor("x", rows, width, dtype=dtype), tensor("s", rows, width, dtype=dtype), tensor("g", width)
    r, c = axis("r", rows), axis("c", width)
    total, mean, variance = Var("total", F32), Var("mean", F32), Var("variance", F32)
    centred = total - mean / width
    steps = (
        Step(total, "tile", wide(Load(x, (r, c))) + wide(Load(skip, (r, c)))),
        Step(mean, "sum", total),
        Step(variance, "sum", centred * centred),
    )
    y = centred * unary("rsqrt", variance / width + 1e-5) * Load(gamma, (c,))
    outputs = tuple(
        Result(Place(tensor(name, rows, width, dtype=dtype), (r, c), (r, c)), cast(value, dtype))
        for name, value in (("y", y), ("sum", total))
    )
    spec = RowSpec((x, skip, gamma), r, c, steps, outputs)
    rng = np.random.default_rng(4)
    arrays = {name: rng.standard_normal((7, width)).astype(dtype.row.numpy) for name in "xs"}
    arrays["g"] = rng.standard_normal(width).astype(np.float32)
    _, got = run(spec, toolchain, *arrays.values())
    want = evaluate(spec, {name: value.astype(np.float64) for name, value in arrays.items()})
    for name, value in zip(("y", "sum"), got, strict=True):
        close(value, want[name], dtype)


def test_masks_have_a_bit_for_every_lane() -> None:
    """Vectors of 512 bits have 16 lanes here; a mask of 32 or 64 bits would be of bytes or halves, of which a vector
    holds more: what gcc 12 spills of it are the 16 that were set, and what it reads again are 32.
    """
    for header in HEADERS.glob("*.h"):
        found = re.findall(r"_mm512_maskz?_\w*(?:epi8|epi16|ph)\(", header.read_text())
        assert not found, f"{header.name}: {found}"
