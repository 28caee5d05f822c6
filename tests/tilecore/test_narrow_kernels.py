"""Products of bfloat16 operands, compiled: against numpy with operands rounded by ml_dtypes and sums in float64."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulated_targets import emulated_targets
from tile_specs import axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import HEADERS, Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, const, select, unary
from tilecore.contract.narrow import narrowed
from tilecore.contract.panel import pack_groups
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Spec, Tensor, View, check
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target, target_named, targets_for
from tilecore.toolchain import Source, Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
TARGETS = detect_targets()
F32 = DType.F32
ROWS = Sym("M")


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def rounded(x: np.ndarray) -> np.ndarray:
    """In float64, as bfloat16 holds it."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def made(spec: Spec, target: Target, **config: int) -> Kernel:
    check(spec)
    return compile_spec(spec, label="Narrow", profile=PROFILE, targets=(target,), config=config or None)


def contraction(
    depth: int, columns: int, *, constant: bool, transposed: bool, scaled: bool, rows: Expr = ROWS
) -> ContractionSpec:
    """y[m, n] = silu(Σ_k a[m, k] · b[k, n] + bias[n]), b stored [k, n] or [n, k]."""
    a, bias = tensor("a", rows, depth), tensor("bias", columns)
    shape = (const(columns), const(depth)) if transposed else (const(depth), const(columns))
    b = Tensor("b", F32, shape, constant)
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", depth), axis("n", columns)
    acc = Var("acc", F32)
    total = acc + Load(bias, (n,))
    left: Expr = Load(a, (m, k))
    return ContractionSpec(
        (a, b, bias),
        View("a", (g, m, k), left * 3.0 if scaled else left),
        View("b", (g, k, n), Load(b, (n, k) if transposed else (k, n))),
        acc,
        (Result(Place(tensor("y", rows, columns), (g, m, n), (m, n)), total * unary("sigmoid", total)),),
    )


@dataclass(frozen=True)
class Product:
    """Sizes of a contraction and extents of its tiles."""

    rows: int
    depth: int
    columns: int
    config: Mapping[str, int] = field(default_factory=dict[str, int])


STEPS = Product(70, 131, 83, {"block_m": 48, "block_n": 48, "block_k": 64})  # several, the last of them odd
SHORT = Product(150, 96, 208, {"block_m": 160, "block_n": 208, "block_k": 96})  # whole blocks, the last of fewer rows
UNEVEN = Product(140, 64, 240, {"block_m": 128, "block_n": 112, "block_k": 64})  # panels and a few rows are left over
SMALL = Product(23, 37, 50)
PRODUCTS = (
    Product(1, 37, 50),
    Product(2, 64, 16),
    SMALL,
    STEPS,
    Product(97, 96, 200, {"block_m": 96, "block_n": 128, "block_k": 96}),
    Product(33, 8, 17),
    SHORT,
    UNEVEN,
    Product(90, 77, 144, {"block_m": 96, "block_n": 144, "block_k": 77}),  # tiles ask ahead, and turns leave rows over
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: f"{case.rows}-{case.depth}-{case.columns}")
@pytest.mark.parametrize("layout", ["constant", "constant transposed", "given", "given transposed"])
def test_contractions(case: Product, layout: str, target: Target, toolchain: Toolchain) -> None:
    compare_contraction(case, layout, target, toolchain)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("rows", range(1, 26))
def test_every_number_of_rows(rows: int, target: Target, toolchain: Toolchain) -> None:
    config = {"block_m": 48, "block_n": 112, "block_k": 77}
    compare_contraction(Product(rows, 77, 163, config), "constant", target, toolchain)


EMULATED = emulated_targets()


@pytest.mark.parametrize("target", EMULATED, ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("case", "layout"),
    [(STEPS, "given"), (SHORT, "constant"), (UNEVEN, "given transposed")],
    ids=["steps", "short", "uneven"],
)
def test_contractions_in_emulation(case: Product, layout: str, target: Target, toolchain: Toolchain) -> None:
    compare_contraction(case, layout, target, toolchain)


def compare_contraction(case: Product, layout: str, target: Target, toolchain: Toolchain) -> None:
    """One kernel against float64."""
    rows, depth, columns = case.rows, case.depth, case.columns
    constant, transposed = "constant" in layout, "transposed" in layout
    spec = contraction(depth, columns, constant=constant, transposed=transposed, scaled=layout == "given")
    kernel = made(narrowed(spec), target, **case.config)
    rng = np.random.default_rng(depth)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (depth, columns)))
    bias = rng.standard_normal(columns).astype(np.float32)
    given = pack_groups(b.astype(ml_dtypes.bfloat16), 2) if constant else b.T.copy() if transposed else b
    assert kernel.packed == ((1,) if constant else ())
    (got,) = load_kernel(kernel, target, toolchain)(a, given, bias)
    product = rounded(a * np.float32(3.0) if layout == "given" else a) @ rounded(b)
    want = product + bias.astype(np.float64)
    want = want / (1 + np.exp(-want))
    assert np.abs(got - want).max() <= 4e-6 * np.abs(want).max()
    exact = (a.astype(np.float64) * (3 if layout == "given" else 1)) @ b.astype(np.float64)
    assert np.abs(product - exact).max() > 1e-3 * np.abs(exact).mean(), "rounding is not seen: the test says nothing"


def attention(size: int, *, causal: bool, flat: bool) -> AttentionSpec:
    """y = softmax(q · kᵀ / 4 + mask) · v; keys and values [B, H, K, D], or [B, K, H · D] if `flat`."""
    B, Q, K, H = Sym("B"), Sym("Q"), Sym("K"), 2
    xq, mask = tensor("xq", B, Q, H * size), tensor("mask", B, K)
    xk, xv = (tensor(n, B, K, H * size) if flat else tensor(n, B, H, K, size) for n in ("xk", "xv"))
    b, h, q, k = axis("b", B), axis("h", H), axis("q", Q), axis("k", K)
    d, e = axis("d", size), axis("e", size)
    raw, acc = Var("raw", F32), Var("acc", F32)
    score = raw * 0.25 + Load(mask, (b, k))
    spec = AttentionSpec(
        (xq, xk, xv, mask),
        View("q", (b, h, q, d), Load(xq, (b, q, h * size + d))),
        View("k", (b, h, k, d), Load(xk, (b, k, h * size + d) if flat else (b, h, k, d))),
        View("v", (b, h, k, e), Load(xv, (b, k, h * size + e) if flat else (b, h, k, e))),
        raw,
        (b, h, q, k),
        select(binary("le", k, q), score, const(-np.inf, F32)) if causal else score,
        acc,
        (Result(Place(tensor("y", B, Q, H * size), (b, h, q, e), (b, q, h * size + e)), acc),),
    )
    check(spec)
    return spec


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention and extents of its tiles."""

    queries: int
    keys: int
    size: int
    config: Mapping[str, int]


ATTENTIONS = (
    Heads(13, 27, 16, {"block_m": 6, "block_n": 16}),
    Heads(100, 129, 64, {"block_m": 48, "block_n": 64}),
    Heads(70, 70, 40, {"block_m": 96, "block_n": 128}),
    Heads(1, 45, 24, {"block_m": 12, "block_n": 32}),
    Heads(9, 33, 13, {"block_m": 12, "block_n": 32}),
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("case", ATTENTIONS, ids=lambda case: f"{case.queries}-{case.keys}-{case.size}")
@pytest.mark.parametrize("causal", [False, True])
def test_attention(case: Heads, causal: bool, target: Target, toolchain: Toolchain) -> None:
    compare_attention(case, causal, target, toolchain)


@pytest.mark.parametrize("target", EMULATED, ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("case", "causal"), [(ATTENTIONS[1], False), (ATTENTIONS[4], True)], ids=["whole registers", "odd sizes"]
)
def test_attention_in_emulation(case: Heads, causal: bool, target: Target, toolchain: Toolchain) -> None:
    compare_attention(case, causal, target, toolchain)


def compare_attention(case: Heads, causal: bool, target: Target, toolchain: Toolchain) -> None:
    """One kernel against float64."""
    queries, keys, size, config = case.queries, case.keys, case.size, case.config
    flat = keys == 129
    kernel = made(narrowed(attention(size, causal=causal, flat=flat)), target, **config)
    rng = np.random.default_rng(size)
    q = rng.standard_normal((2, queries, 2, size)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, keys, size)).astype(np.float32) for _ in range(2))
    mask = np.where(rng.random((2, keys)) < 0.3, -10000.0, 0.0).astype(np.float32)
    given = [x.transpose(0, 2, 1, 3).reshape(2, keys, -1) if flat else x for x in (k, v)]
    (got,) = load_kernel(kernel, target, toolchain)(q.reshape(2, queries, -1), *given, mask)
    scores = np.einsum("bqhd,bhkd->bhqk", rounded(q), rounded(k)) / 4 + mask[:, None, None]
    if causal:
        scores = np.where(np.arange(keys) <= np.arange(queries)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhqk,bhke->bqhe", weights / weights.sum(-1, keepdims=True), rounded(v)).reshape(got.shape)
    error = np.abs(got - want)
    # Weights are rounded under a maximum that differs from numpy's: each by up to half a unit in its last place.
    bound = 2.0**-8 * np.einsum("bhqk,bhke->bqhe", weights / weights.sum(-1, keepdims=True), np.abs(rounded(v)))
    assert (error <= bound.reshape(got.shape) + 1e-5).all(), error.max()
    assert np.sqrt((error**2).mean() / (want**2).mean()) < 2.0**-9


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")
@pytest.mark.parametrize("target", targets_for("x86_64"), ids=lambda target: target.name)
def test_every_row_of_x86_builds_where_it_cannot_run(target: Target, toolchain: Toolchain) -> None:
    """Flags that make every warning an error are the toolchain's own."""
    specs = (contraction(37, 50, constant=True, transposed=False, scaled=False), attention(13, causal=True, flat=False))
    for spec in specs:
        kernel = made(narrowed(spec), target)
        text = kernel.sources[target.name]
        assert ("product_narrow(" in text) == target.amx
        shared = target.multiplies_bf16 and not target.amx
        assert ("tile_product_narrow_x86_64_v4_bf16(" in text) == shared, "tiles that ask ahead are of the library"
        assert ("TILE_AMX_PRODUCT(" in text) == target.amx
        assert toolchain.object(Source(text, target.flags, (HEADERS,))).exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")
@pytest.mark.parametrize(("depth", "columns", "beside"), [(64, 48, True), (64, 50, False), (40, 48, False)])
def test_tile_registers_finish_whole_blocks_beside_the_next(
    depth: int, columns: int, beside: bool, toolchain: Toolchain
) -> None:
    target = target_named("x86-64-v4-amx")
    spec = contraction(depth, columns, constant=True, transposed=False, scaled=False)
    text = made(narrowed(spec), target, block_m=96, block_n=64, block_k=64).sources[target.name]
    assert ("tile_fused_step(" in text) == beside
    assert ("tile_ahead(" in text) == beside, "panels of a weight are asked for before they are due"
    assert ("__builtin_prefetch(output0" in text) == beside, "and so is where the next block's results go"
    assert text.count("sigmoid_f32(") == (2 if beside else 1) + (columns % 16 > 0), "few rows keep the plain form"
    assert toolchain.object(Source(text, target.flags, (HEADERS,))).exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")
def test_panels_that_a_task_makes_are_not_asked_for(toolchain: Toolchain) -> None:
    """Of rows that are known to be many: a few would read the right operand where it lies."""
    target = target_named("x86-64-v4-amx")
    spec = contraction(64, 48, constant=False, transposed=True, scaled=False, rows=const(64))
    text = made(narrowed(spec), target).sources[target.name]
    assert "tile_fused_step(" in text
    assert "tile_ahead(" not in text
    assert toolchain.object(Source(text, target.flags, (HEADERS,))).exists()


def test_shallow_products_and_those_of_integers_keep_their_operands() -> None:
    spec = contraction(4, 50, constant=True, transposed=False, scaled=False)
    assert narrowed(spec) is spec
