"""Products of few rows read their right operand where it lies: decoding over a cache, and plain products.

The oracle is numpy in double precision. Caches end where a page begins that cannot be read.
"""

import ctypes
import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulated_targets import emulated_targets
from tile_specs import axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const
from tilecore.contract.few_rows import FEW_ROWS
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Spec, View, check
from tilecore.profile import detect_profile, profile_named
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_toolchain

PROFILE = detect_profile()
KINDS = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16}
KEYS = (1, 8, 521, 1031)  # the last ones pass tiles of keys


@dataclass(frozen=True)
class Cache:
    """Heads of queries that share each head of keys, the size of a head, and how a cache lies."""

    group: int
    size: int
    dtype: DType = DType.F32
    by_position: bool = False  # [B, K, H, D], else [B, H, K, D]
    queries: int | None = 1  # None: known at run time only
    rounded: bool = False  # operands of products to bf16


def attention(cache: Cache, *, dim: str = "Q") -> AttentionSpec:
    """Scaled dot products of 2 · `group` heads over caches of 2 heads; `dim`: what an unknown number of queries is."""
    B, K, D, H = Sym("B"), Sym("K"), cache.size, 2 * cache.group
    Q = Sym(dim) if cache.queries is None else const(cache.queries)
    b, h, q, k, d, e = axis("b", B), axis("h", H), axis("q", Q), axis("k", K), axis("d", D), axis("e", D)
    head = binary("floordiv", h, const(cache.group))
    xq = tensor("xq", B, H, Q, D)
    shape = (B, K, 2, D) if cache.by_position else (B, 2, K, D)
    caches = [tensor(name, *shape, dtype=cache.dtype) for name in ("xk", "xv")]

    def stored(number: int, last: Var) -> Expr:
        load: Expr = Load(caches[number], (b, k, head, last) if cache.by_position else (b, head, k, last))
        return narrow(load if cache.dtype is DType.F32 else cast(load, DType.F32))

    def narrow(value: Expr) -> Expr:
        return cast(value, DType.BF16) if cache.rounded else value

    raw, acc = Var("raw", DType.F32), Var("acc", DType.F32)
    place = Place(tensor("y", B, H, Q, D), (b, h, q, e), (b, h, q, e))
    left = View("q", (b, h, q, d), narrow(Load(xq, (b, h, q, d))))
    keys, values = (View(name, (b, h, k, last), stored(i, last)) for i, (name, last) in enumerate((("k", d), ("v", e))))
    spec = AttentionSpec((xq, *caches), left, keys, values, raw, (b, h, q, k), raw * 0.25, acc, (Result(place, acc),))
    check(spec)
    return spec


def product(*, transposed: bool) -> ContractionSpec:
    """y = a · b for b [19, 53] or, transposed, [53, 19], any number of rows."""
    rows, depth, columns = Sym("M"), 19, 53
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", depth), axis("n", columns)
    a, b = tensor("a", rows, depth), tensor("b", columns, depth) if transposed else tensor("b", depth, columns)
    acc = Var("acc", DType.F32)
    return ContractionSpec(
        (a, b),
        View("a", (g, m, k), Load(a, (m, k))),
        View("b", (g, k, n), Load(b, (n, k) if transposed else (k, n))),
        acc,
        (Result(Place(tensor("y", rows, columns), (g, m, n), (m, n)), acc),),
    )


def made(spec: Spec, target: Target = PROFILE.target) -> Kernel:
    profile = PROFILE if target == PROFILE.target else replace(profile_named("zen4"), target=target)
    return compile_spec(spec, label="Test", profile=profile, targets=(target,))


def before_a_wall(array: np.ndarray) -> np.ndarray:
    """A copy that ends where memory that cannot be read begins."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


def expected(cache: Cache, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The attention of arrays as the kernel takes them, in double precision."""
    if cache.by_position:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if cache.rounded:
        q, k, v = ((part * scale).astype(ml_dtypes.bfloat16) for part, scale in ((q, 0.25), (k, 1), (v, 1)))
    q, k, v = (part.astype(np.float64) for part in (q, k, v))
    k, v = (np.repeat(part, cache.group, 1) for part in (k, v))
    scores = q @ k.swapaxes(2, 3) * (1.0 if cache.rounded else 0.25)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(cache_directory=object_cache)


def compare(cache: Cache, toolchain: Toolchain, target: Target = PROFILE.target, queries: int = 1) -> Kernel:
    """The kernel of `cache`, after it has agreed with double precision at every number of keys."""
    kernel = made(attention(cache), target)
    loaded = load_kernel(kernel, target, toolchain)
    rng = np.random.default_rng(cache.size)
    for keys in KEYS:
        shape = (3, keys, 2, cache.size) if cache.by_position else (3, 2, keys, cache.size)
        k, v = (before_a_wall(rng.standard_normal(shape).astype(KINDS[cache.dtype])) for _ in "kv")
        q = rng.standard_normal((3, 2 * cache.group, queries, cache.size)).astype(np.float32)
        (got,) = loaded(q, k, v)
        want = expected(cache, q, k, v)
        tolerance = 2e-2 if cache.rounded else 3e-6  # weights are rounded, too
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
    return kernel


CACHES = (
    Cache(1, 40),
    Cache(4, 64, by_position=True),
    Cache(7, 80),
    Cache(8, 96),
    Cache(4, 128),
    Cache(1, 256, by_position=True),
    Cache(2, 13),
    Cache(3, 40, DType.F16),
    Cache(4, 72, DType.BF16),
    Cache(4, 40, rounded=True),
)


@pytest.mark.cpu
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_caches_are_read_where_they_lie(cache: Cache, toolchain: Toolchain) -> None:
    text = compare(cache, toolchain).sources[PROFILE.target.name]
    assert "tile_few_dot" in text
    assert "tile_few_sum" in text
    assert "pack_" not in text


@pytest.mark.cpu
@pytest.mark.parametrize("target", emulated_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("cache", [CACHES[2], CACHES[6], CACHES[7]], ids=str)
def test_caches_are_read_where_they_lie_in_emulation(cache: Cache, target: Target, toolchain: Toolchain) -> None:
    compare(cache, toolchain, target)


@pytest.mark.cpu
@pytest.mark.parametrize("group", [1, 4])
def test_few_or_many_queries_are_told_apart_when_they_are_there(group: int, toolchain: Toolchain) -> None:
    cache = Cache(group, 24, queries=None)
    for queries in (1, 3, FEW_ROWS, FEW_ROWS + 1, 50):
        text = compare(cache, toolchain, queries=queries).sources[PROFILE.target.name]
        assert "pack_transposed_f32(" in text
        assert ("run_special" in text) == (group > 1)


@pytest.mark.cpu
@pytest.mark.parametrize("transposed", [False, True])
def test_plain_products(transposed: bool, toolchain: Toolchain) -> None:
    kernel = made(product(transposed=transposed))
    assert ("tile_few_dot" if transposed else "tile_few_sum") in kernel.sources[PROFILE.target.name]
    loaded, rng = load_kernel(kernel, PROFILE.target, toolchain), np.random.default_rng(1)
    b = before_a_wall(rng.standard_normal((53, 19) if transposed else (19, 53)).astype(np.float32))
    for rows in (1, 2, 3, 4, 7, FEW_ROWS, FEW_ROWS + 1, 60):
        a = before_a_wall(rng.standard_normal((rows, 19)).astype(np.float32))
        want = a.astype(np.float64) @ (b.T if transposed else b).astype(np.float64)
        np.testing.assert_allclose(loaded(a, b)[0], want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_what_is_as_long_as_its_queries_is_packed() -> None:
    texts = {
        name: made(attention(Cache(4, 24, queries=queries), dim=dim)).sources[PROFILE.target.name]
        for name, queries, dim in (("cache", None, "Q"), ("known", 48, "Q"), ("encoder", None, "K"))
    }
    assert {name for name, text in texts.items() if "tile_few" in text} == {"cache"}
    assert {name for name, text in texts.items() if "run_special" in text} == {"cache"}
