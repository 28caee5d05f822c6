"""docs/tilelang_examples.md, row by row: what it says runs is run, with only the imports changed, against float64.

The kernels are our own, in `tilelang_texts/`, written as TileLang's users write theirs and taking the same arguments as
the example of their row. With `--tilelang FOLDER`, TileLang's `examples/`, the examples themselves take their place.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tilelang_loading import load

import tilecore
from tilecore import language

TEXTS = Path(__file__).parent / "tilelang_texts"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tilelang_examples.md"
Array = np.ndarray
Check = Callable[[Any, np.random.Generator], None]


@dataclass(frozen=True)
class Example:
    """A row of the page (by words of its first column), a kernel of ours, TileLang's, and how to run and check it."""

    row: str
    ours: str
    theirs: str
    check: Check


def near(found: Any, wanted: Array, *, error: float) -> None:
    """The largest difference is at most `error` of the largest wanted value, and nothing is NaN."""
    difference = np.abs(np.asarray(found, np.float64) - wanted)
    assert float(np.max(difference)) <= error * float(np.max(np.abs(wanted)))


def halves(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.standard_normal(shape) * 0.5).astype(np.float16)


def wide(*arrays: Array) -> Any:
    found = [array.astype(np.float64) for array in arrays]
    return found[0] if len(found) == 1 else found


def check_matmul(*, clipped: bool) -> Check:
    def check(kernel: Any, rng: np.random.Generator) -> None:
        a, b = halves(rng, 37, 50), halves(rng, 50, 45)
        wanted = wide(a) @ wide(b)
        near(kernel(a, b, 32, 32, 16), np.maximum(wanted, 0) if clipped else wanted, error=1e-3)

    return check


def check_any_size(kernel: Any, rng: np.random.Generator) -> None:
    for turn_a, turn_b, rows in ((False, False, 33), (True, False, 5), (False, True, 70), (True, True, 33)):
        a, b = halves(rng, rows, 41), halves(rng, 41, 35)
        given = np.ascontiguousarray(a.T) if turn_a else a, np.ascontiguousarray(b.T) if turn_b else b
        types = (language.float16, language.float16, language.float32)
        near(kernel(*given, 32, 32, 32, turn_a, turn_b, *types, 2, 128), wide(a) @ wide(b), error=1e-3)


def check_split_depth(**options: Any) -> Check:
    def check(kernel: Any, rng: np.random.Generator) -> None:
        a, b, c = halves(rng, 32, 64), halves(rng, 64, 48), np.zeros((32, 48), np.float32)
        kernel(a, b, c, 16, 16, 16, 2, **options)
        near(c, wide(a) @ wide(b), error=1e-5)

    return check


def check_matrix_vector(kernel: Any, rng: np.random.Generator) -> None:
    a, x = halves(rng, 50, 70), halves(rng, 70)
    near(kernel(a, x, **blocks(kernel, 16, 32)), wide(a) @ wide(x), error=1e-3)


def names(kernel: Any) -> set[str]:
    function = getattr(kernel, "original", None) or kernel.function.original
    return set(function.__code__.co_varnames)


def check_nibbles(kernel: Any, rng: np.random.Generator) -> None:
    a = rng.integers(-128, 128, (33, 256)).astype(np.int8)
    packed = rng.integers(0, 256, (40, 128)).astype(np.uint8)
    levels = np.stack([packed << 4, packed], -1).view(np.int8).reshape(40, 256) >> 4
    made = kernel(33, 40, 256, language.int8, language.int32, language.int32, **blocks(kernel, 32, 32, 128))
    np.testing.assert_array_equal(made(a, packed), levels.astype(np.int64) @ a.astype(np.int64).T)


def check_nibbles_of_both(kernel: Any, rng: np.random.Generator) -> None:
    a, b = (rng.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (33, 40))
    levels = [np.stack([p << 4, p], -1).view(np.int8).reshape(len(p), 64).astype(np.int64) >> 4 for p in (a, b)]
    made = tilecore.compile(kernel(33, 40, 64, 16, 16, 32), out_idx=2)
    np.testing.assert_array_equal(made(a, b), levels[0] @ levels[1].T)


def check_groups(kernel: Any, rng: np.random.Generator) -> None:
    counts, depth, columns = [5, 16, 1, 20], 24, 40
    sizes, padded = np.array(counts, np.int32), np.array([-(-count // 16) * 16 for count in counts])
    firsts, padded = ((np.cumsum(each) - each).astype(np.int32) for each in (sizes, padded))
    for turned in (False, True):
        a, b = halves(rng, sum(counts), depth), halves(rng, 4, *((columns, depth) if turned else (depth, columns)))
        rows = zip(firsts, counts, wide(b), strict=True)
        wanted = [wide(a)[first : first + count] @ (part.T if turned else part) for first, count, part in rows]
        found = kernel(a, b, sizes, firsts, padded, counts, 16, 16, 16, turned)
        near(found, np.concatenate(wanted), error=2e-3)


def check_streams_mixed(kernel: Any, rng: np.random.Generator) -> None:
    tokens, streams, hidden = 5, 4, 70
    a, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, streams, streams), (tokens, streams)))
    b, d = (bfloats(rng, *shape) for shape in ((tokens, streams, hidden), (tokens, hidden)))
    x = np.zeros((tokens, streams, hidden), ml_dtypes.bfloat16)
    kernel(a, b, c, d, x, streams, hidden)
    near(x, c[:, :, None] * wide(d)[:, None] + np.einsum("nij,nih->njh", a, wide(b)), error=1e-2)


def bfloats(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.standard_normal(shape) * 0.5).astype(ml_dtypes.bfloat16)


def gates(rng: np.random.Generator, *shape: int) -> Array:
    return (-0.2 * rng.random(shape).cumsum(1)).astype(np.float32)


def chunked(size: int, length: int, heads: int) -> list[tuple[slice, int]]:
    return [(slice(at, min(at + size, length)), head) for at in range(0, length, size) for head in range(heads)]


def check_scaled_products(kernel: Any, rng: np.random.Generator) -> None:
    length, heads, depth = 50, 2, 40
    k, beta, gate = bfloats(rng, 1, length, heads, depth), bfloats(rng, 1, length, heads), gates(rng, 1, length, heads)
    made = kernel(1, length, heads, depth, 16, language.bfloat16, language.bfloat16, language.float32, True, 16, 32)
    wanted = np.zeros((1, length, heads, 16))
    for steps, head in chunked(16, length, heads):
        keys, scale, g = (wide(x)[0, steps, head] for x in (k, beta, gate))
        found = np.tril(keys * scale[:, None] @ keys.T * np.exp(g[:, None] - g), -1)
        wanted[0, steps, head, : len(g)] = found
    near(made(k, beta, gate), wanted, error=2e-2)


def check_chunk_outputs(kernel: Any, rng: np.random.Generator) -> None:
    length, heads, depth, columns = 48, 2, 24, 20
    q, k, v = (bfloats(rng, 1, length, heads, size) for size in (depth, depth, columns))
    states, gate = bfloats(rng, 1, length // 16, heads, depth, columns), gates(rng, 1, length, heads)
    types = ("bfloat16", "bfloat16", "float32", "float32")
    found = kernel(1, length, heads, depth, columns, *types, 16, 0.25, True, 16, 16, 16)(q, k, v, states, gate)
    wanted = np.zeros((1, length, heads, columns))
    for steps, head in chunked(16, length, heads):
        queries, keys, values, g = (wide(x)[0, steps, head] for x in (q, k, v, gate))
        own = np.tril(queries @ keys.T * np.exp(g[:, None] - g)) @ values
        state = wide(states)[0, steps.start // 16, head]
        wanted[0, steps, head] = 0.25 * (queries @ state * np.exp(g)[:, None] + own)
    near(found, wanted, error=2e-2)


def check_weighted(kernel: Any, rng: np.random.Generator) -> None:
    length, heads, depth, columns = 48, 2, 24, 20
    k, v, a = (bfloats(rng, 1, length, heads, size) for size in (depth, columns, 16))
    beta, gate = bfloats(rng, 1, length, heads), gates(rng, 1, length, heads)
    types = ("bfloat16", "bfloat16", "float32", "float32")
    w, u = kernel(1, length, heads, depth, columns, *types, 16, 16, 16, 16)(k, v, beta, gate, a)
    wanted_w, wanted_u = np.zeros(k.shape), np.zeros(v.shape)
    for steps, head in chunked(16, length, heads):
        keys, values, scale, g, weights = (wide(x)[0, steps, head] for x in (k, v, beta, gate, a))
        wanted_w[0, steps, head] = weights @ (keys * (scale * np.exp(g))[:, None])
        wanted_u[0, steps, head] = weights @ (values * scale[:, None])
    near(w, wanted_w, error=2e-2)
    near(u, wanted_u, error=2e-2)


def blocks(kernel: Any, m: int, n: int, k: int | None = None) -> dict[str, int]:
    """Extents of tiles by the names that a kernel has for them."""
    known = names(kernel)
    given = {"m": m, "n": n} | ({} if k is None else {"k": k})
    sizes = {f"block_{letter}": size for x, size in given.items() for letter in (x, x.upper())}
    return {name: size for name, size in sizes.items() if name in known}


def check_add(kernel: Any, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((37, 45)).astype(np.float32) for _ in range(2))
    np.testing.assert_array_equal(kernel(a, b, 16, 32, language.float32, language.float32, 128), a + b)


def check_rms(*blocked: int) -> Check:
    def check(kernel: Any, rng: np.random.Generator) -> None:
        x = rng.standard_normal((9, 70)).astype(np.float32)
        near(kernel(x, *blocked), wide(x) / np.sqrt((wide(x) ** 2).mean(1, keepdims=True) + 1e-12), error=1e-5)

    return check


def check_layer_norm(kernel: Any, rng: np.random.Generator) -> None:
    x, g, b = (halves(rng, *shape) for shape in ((6, 70), (70,), (70,)))
    y, mean, rstd = kernel(6, 70, in_dtype="float16", out_dtype="float16")(x, g, b)
    mean_, rstd_ = wide(x).mean(1), 1 / np.sqrt(wide(x).var(1) + 1e-5)
    near(y, (wide(x) - mean_[:, None]) * rstd_[:, None] * wide(g) + wide(b), error=2e-3)
    near(mean, mean_, error=1e-5)
    near(rstd, rstd_, error=1e-5)


def check_layer_norm_backward(kernel: Any, rng: np.random.Generator) -> None:
    dy, x = ((rng.standard_normal((64, 70)) * 0.5).astype(ml_dtypes.bfloat16) for _ in range(2))
    g = rng.standard_normal(70).astype(ml_dtypes.bfloat16)
    mean, rstd = wide(x).mean(1), 1 / np.sqrt(wide(x).var(1) + 1e-5)
    sums = np.zeros(70, np.float32), np.zeros(70, np.float32)
    dx = kernel(64, 70)(dy, x, g, mean.astype(np.float32), rstd.astype(np.float32), *sums)
    hat = (wide(x) - mean[:, None]) * rstd[:, None]
    slope = wide(dy) * wide(g)
    wanted = slope - slope.mean(1, keepdims=True) - hat * (slope * hat).mean(1, keepdims=True)
    near(dx, wanted * rstd[:, None], error=1e-2)
    near(sums[0], (wide(dy) * hat).sum(0), error=1e-5)
    near(sums[1], wide(dy).sum(0), error=1e-5)


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def check_softmax(kernel: Any, rng: np.random.Generator) -> None:
    extents = kernel.original.__globals__
    for columns in (96, 71):
        if isinstance(extents["M"], int):  # its text names a module's numbers, and its tiles have to divide them
            extents.update(M=5, N=96)
            columns = 96
        x = rng.standard_normal((5, columns)).astype(np.float16)
        near(kernel(x, BLOCK_M=2, BLOCK_N=32), softmax(wide(x)), error=2e-3)


def check_largest(kernel: Any, rng: np.random.Generator) -> None:
    x = rng.permutation(20 * 45).reshape(20, 45).astype(np.float32)
    gates, indices = kernel(x, 3, 8)
    order = np.argsort(-x, axis=1)[:, :3]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(gates, np.take_along_axis(x, order, 1))


def check_running_sums(kernel: Any, rng: np.random.Generator) -> None:
    for head_first, reverse, fragment in ((False, False, False), (True, True, False), (False, True, True)):
        g = halves(rng, 2, 3, 64) if head_first else halves(rng, 2, 64, 3)
        options = {"head_first": head_first, "reverse": reverse, "use_fragment": fragment}
        made = kernel(2, 64, 3, chunk_size=32, block_S=32, **options)
        by_head = wide(g) if head_first else wide(g).swapaxes(1, 2)
        parts = by_head.reshape(2, 3, 2, 32)
        sums = np.cumsum(parts[..., ::-1], -1)[..., ::-1] if reverse else np.cumsum(parts, -1)
        sums = sums.reshape(2, 3, 64)
        near(made(g), sums if head_first else sums.swapaxes(1, 2), error=1e-5)


def attend(q: Array, k: Array, v: Array, seen: Any = True, sinks: Array | None = None) -> Array:
    """float64 attention over the last two axes of arrays [..., steps, dim]."""
    scores = np.where(seen, wide(q) @ wide(k).swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))], -1)
    return softmax(scores)[..., : k.shape[-2]] @ wide(v)


def triangle(queries: int, keys: int) -> Array:
    return np.arange(keys) <= np.arange(queries)[:, None] + keys - queries


def check_heads_first(kernel: Any, rng: np.random.Generator) -> None:
    for causal in (False, True):
        q, k, v = halves(rng, 1, 2, 37, 16), halves(rng, 1, 2, 70, 16), halves(rng, 1, 2, 70, 16)
        made = kernel(1, 2, 37, 70, 16, causal, block_M=32, block_N=32)
        near(made(q, k, v), attend(q, k, v, triangle(37, 70) if causal else True), error=2e-3)


def check_heads_last(groups: int) -> Check:
    def check(kernel: Any, rng: np.random.Generator) -> None:
        for causal in (False, True):
            q = halves(rng, 1, 70, 4, 16)
            k, v = (halves(rng, 1, 70, 4 // groups, 16) for _ in range(2))
            more = {"groups": groups} if groups > 1 else {}
            made = kernel(1, 4, 70, 16, causal, block_M=32, block_N=32, **more)
            turned = [np.repeat(x.swapaxes(1, 2), 4 // x.shape[2], 1) for x in (q, k, v)]
            wanted = attend(*turned, triangle(70, 70) if causal else True)
            near(made(q, k, v), wanted.swapaxes(1, 2), error=2e-3)

    return check


def check_sequences(groups: int) -> Check:
    def check(kernel: Any, rng: np.random.Generator) -> None:
        queries, keys = np.array([0, 5, 42]), np.array([0, 33, 90])
        q, k, v = (halves(rng, *shape) for shape in ((42, 4, 16), (90, 4 // groups, 16), (90, 4 // groups, 16)))
        shared = {} if "groups" not in names(kernel) else {"groups": groups}
        for causal in (False, True):
            sizes = {"UQ": 42, "UKV": 90, "heads": 4, "dim": 16, "is_causal": causal, "block_M": 32, "block_N": 32,
                     "num_stages": 1, "threads": 128}  # fmt: skip
            made = kernel(batch_size=2, **shared, **sizes)
            found = made(q, k, v, queries.astype(np.int32), keys.astype(np.int32), 37)
            for b in range(2):
                rows, columns = slice(queries[b], queries[b + 1]), slice(keys[b], keys[b + 1])
                parts = [np.repeat(x.swapaxes(0, 1), 4 // x.shape[1], 0) for x in (q[rows], k[columns], v[columns])]
                seen = triangle(parts[0].shape[1], parts[1].shape[1]) if causal else True
                near(found[rows], attend(parts[0], parts[1], parts[2], seen).swapaxes(0, 1), error=2e-3)

    return check


def check_sinks(kernel: Any, rng: np.random.Generator) -> None:
    q, k, v = (halves(rng, 1, 2, 70, 16) for _ in range(3))
    sinks = halves(rng, 2)
    for window in (None, 32):
        made = kernel(1, 2, 70, 70, 16, window_size=window, block_M=32, block_N=32)
        seen = triangle(70, 70)
        if window is not None:
            seen = seen & (np.arange(70) > np.arange(70)[:, None] - window)
        near(made(q, k, v, sinks), attend(q, k, v, seen, wide(sinks)), error=2e-3)


def check_decode(kernel: Any, rng: np.random.Generator) -> None:
    for splits, length in ((1, 70), (2, 128)):
        q = halves(rng, 2, 8, 16)
        k, v = (halves(rng, 2, length, 2, 16) for _ in range(2))
        seen = (rng.random((2, length, 2)) < 0.8).astype(np.uint8)
        made = kernel(2, 8, 2, length, 16, 32, 16, splits, 1, 128)
        grouped = q.reshape(2, 2, 4, 16)
        wanted = attend(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2), (seen != 0).swapaxes(1, 2)[:, :, None])
        near(made(q, k, v, seen), wanted.reshape(2, 8, 16), error=4e-3)


def check_two_grids(kernel: Any, rng: np.random.Generator) -> None:
    q, k, v = (halves(rng, 1, steps, 2, 16) for steps in (32, 256, 256))
    made = kernel(1, 2, 32, 256, 16, False, 32, 32)
    wanted = attend(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)
    near(made(q, k, v), wanted, error=4e-3)


def check_masked_blocks(kernel: Any, rng: np.random.Generator) -> None:
    a, b, mask = halves(rng, 64, 96), halves(rng, 96, 64), rng.random((2, 2, 3)) < 0.5
    sizes = {"block_M": 32, "block_N": 32, "block_K": 32, "num_stages": 1, "thread_num": 128}
    found = kernel(a, b, mask, **sizes, enable_rasteration=True)
    kept = mask.repeat(32, 0).repeat(32, 1).repeat(32, 2)
    near(found, np.einsum("mk,kn,mnk->mn", wide(a), wide(b), kept), error=2e-3)


def check_streams(kernel: Any, rng: np.random.Generator) -> None:
    m, n, k, tasks, steps, tiles = 96, 128, 64, 5, 4, 24
    first = tiles % tasks + tasks
    kernel.original.__globals__.update(
        streamk_programs=tasks, total_sm=tasks, iters_per_tile=steps, streamk_full_tiles=first * steps // tasks,
        streamk_partial_tiles=first * steps % tasks, sm_patition_factor=(tiles - first) // tasks,
    )  # fmt: skip
    a, b, found = halves(rng, m, k), halves(rng, n, k), np.zeros((m, n), np.float32)
    kernel(a, b, found, first, 16, 32, 16, False, True, "float16", "float32", "float32", 1, 128)
    near(found, wide(a) @ wide(b).T, error=1e-5)


def check_decode_with_maxima(kernel: Any, rng: np.random.Generator) -> None:
    starts, q = np.array([0, 33, 97], np.int32), halves(rng, 2, 8, 32)
    k, v = (halves(rng, 97, 2, 32) for _ in range(2))
    made = kernel(2, 8, 2, 64, 97, 32, False, block_N=16, block_H=16)
    found, maxima = made(q, k, v, starts, np.zeros(8, np.float32))
    for b in range(2):
        keys, values = (x[starts[b] : starts[b + 1]].swapaxes(0, 1).repeat(4, 0) for x in (k, v))
        near(found[b], attend(q[b][:, None], keys, values)[:, 0], error=2e-3)
        weights = softmax(np.einsum("hd,hkd->hk", wide(q[b]), wide(keys)) / np.sqrt(32))
        whole = keys.shape[1] // 16
        near(maxima[b, :, :whole], weights[:, : whole * 16].reshape(8, whole, 16).max(-1), error=2e-3)


def check_chosen_blocks(kernel: Any, rng: np.random.Generator) -> None:
    q, chosen = halves(rng, 1, 64, 4, 32), np.full((1, 64, 2, 3), 4, np.int32)
    k, v = (halves(rng, 1, 64, 2, 32) for _ in range(2))
    seen = np.zeros((4, 64, 64), bool)
    for t, h in np.ndindex(64, 2):
        blocks = sorted({t // 16, *rng.integers(0, t // 16 + 1, 2).tolist()})
        chosen[0, t, h, : len(blocks)] = blocks
        seen[2 * h : 2 * h + 2, t] = np.isin(np.arange(64) // 16, blocks) & (np.arange(64) <= t)
    found = kernel(q, k, v, chosen, dim=32, is_causal=True, block_size=16, groups=2, selected_blocks=3)
    turned = [x[0].swapaxes(0, 1).repeat(4 // x.shape[2], 0) for x in (q, k, v)]
    near(found[0].swapaxes(0, 1), attend(turned[0], turned[1], turned[2], seen), error=2e-3)


def check_linear(kernel: Any, rng: np.random.Generator) -> None:
    q, k, v = (halves(rng, 1, 128, 2, 64) for _ in range(3))
    out = np.zeros((1, 128, 2, 64), np.float32)
    last = kernel(1, 128, 2, 64, 64)(q, k, v, out)
    near(out, recurrence(q, k, v, np.ones(2)), error=3e-3)
    near(last, np.einsum("bshd,bshe->bhde", wide(k), wide(v)), error=2e-3)


def recurrence(q: Array, k: Array, v: Array, decay: Array) -> Array:
    """Sums over the steps so far of (q·k) v, weighted by powers of each head's decay."""
    steps = np.arange(q.shape[1])
    age = steps[:, None] - steps
    weight = np.where(age >= 0, decay[:, None, None] ** np.maximum(age, 0), 0)
    scores = np.einsum("bshd,bthd->bhst", wide(q), wide(k)) * q.shape[-1] ** -0.5
    return np.einsum("bhst,bthe->bshe", scores * weight, wide(v))


def check_retention(kernel: Any, rng: np.random.Generator) -> None:
    q, k, v = (halves(rng, 1, 128, 2, 64) for _ in range(3))
    found = kernel(1, 128, 2, 64, 64)(q, k, v)[0]
    near(found, recurrence(q, k, v, 1 - np.exp2(-5.0 - np.arange(2))), error=3e-3)


def check_chunk_scan(kernel: Any, rng: np.random.Generator) -> None:
    batch, chunks, chunk, groups, heads, width, state = 1, 2, 64, 1, 2, 32, 128
    steps = chunks * chunk
    cb, x = halves(rng, batch, chunks, groups, chunk, chunk), halves(rng, batch, steps, heads, width)
    dt = rng.uniform(0, 1, (batch, heads, chunks, chunk)).astype(np.float16)
    decay = -np.cumsum(rng.uniform(0, 0.05, (batch, heads, chunks, chunk)), -1).astype(np.float16)
    c, states = halves(rng, batch, steps, groups, state), halves(rng, batch, chunks, heads, width, state)
    d = halves(rng, heads)
    given = {"block_M": 32, "block_N": 32, "block_K": 32, "block_Dstate": 128}
    found = kernel(cb, x, dt, decay, c, states, d, **given)
    by_chunk = wide(x).reshape(batch, chunks, chunk, heads, width)
    age = wide(decay)[..., :, None] - wide(decay)[..., None, :]
    weight = np.where(np.tri(chunk, dtype=bool), np.exp(np.minimum(age, 0)), 0) * wide(dt)[..., None, :]
    scores = wide(cb).repeat(heads // groups, 2).swapaxes(1, 2) * weight
    wanted = np.einsum("bhclt,bcthp->bclhp", scores, by_chunk)
    read = np.einsum("bclgn,bchpn->bclhp", wide(c).reshape(batch, chunks, chunk, groups, state), wide(states))
    wanted += read * np.exp(wide(decay)).transpose(0, 2, 3, 1)[..., None]
    near(found, wanted.reshape(batch, steps, heads, width) + wide(x) * wide(d)[:, None], error=3e-3)


def check_chunk_state(kernel: Any, rng: np.random.Generator) -> None:
    batch, chunks, chunk, heads, width, state = 1, 2, 64, 2, 32, 32
    b, x = halves(rng, batch, chunks * chunk, 1, state), halves(rng, batch, chunks * chunk, heads, width)
    dt = rng.uniform(0, 1, (batch, heads, chunks, chunk)).astype(np.float16)
    decay = -np.cumsum(rng.uniform(0, 0.05, (batch, heads, chunks, chunk)), -1).astype(np.float16)
    found = kernel(b, x, dt, decay, block_M=32, block_N=32, block_K=32)
    weight = np.exp(wide(decay)[..., -1:] - wide(decay)) * wide(dt)
    parts = wide(x).reshape(batch, chunks, chunk, heads, width), wide(b).reshape(batch, chunks, chunk, state)
    near(found, np.einsum("bhcl,bclhp,bcln->bchpn", weight, *parts), error=3e-3)


EXAMPLES = (
    Example("quickstart", "products.clipped_matmul", "quickstart.matmul", check_matmul(clipped=True)),
    Example("elementwise_add", "rows.add", "elementwise/example_elementwise_add.elementwise_add", check_add),
    Example("gemm/example_gemm`", "products.matmul", "gemm/example_gemm.matmul", check_matmul(clipped=False)),
    Example("example_dynamic", "products.any_size", "dynamic_shape/example_dynamic.matmul_dynamic_mnk", check_any_size),
    Example("gemm_splitk", "products.split_depth", "gemm_splitk/example_tilelang_gemm_splitk.matmul",
            check_split_depth()),
    Example("gemm_splitk", "products.split_depth",
            "gemm_splitk/example_tilelang_gemm_splitk_vectorize_atomicadd.matmul", check_split_depth()),
    Example("gemv_alloc_reducer", "products.matrix_vector", "gemv/example_gemv.gemv_alloc_reducer",
            check_matrix_vector),
    Example("rms_norm", "rows.rms_norm", "norm/rms_norm.rms_norm", check_rms(4)),
    Example("rms_norm", "rows.rms_norm_in_steps", "norm/rms_norm.rms_norm_splitk", check_rms(4, 32)),
    Example("layernorm", "rows.layer_norm", "norm/layernorm._layernorm_fwd", check_layer_norm),
    Example("layernorm", "rows.layer_norm_backward", "norm/layernorm._layernorm_bwd", check_layer_norm_backward),
    Example("online_softmax", "rows.softmax", "online_softmax/online_softmax.softmax_kernel", check_softmax),
    Example("topk", "rows.largest", "topk/example_topk.tl_topk", check_largest),
    Example("example_cumsum", "rows.running_sums", "gdn/example_cumsum.tilelang_chunk_local_cumsum_scalar",
            check_running_sums),
    Example("mha_fwd_bhsd", "attention.heads_first", "flash_attention/example_mha_fwd_bhsd.flashattn",
            check_heads_first),
    Example("_bshd", "attention.heads_last", "flash_attention/example_mha_fwd_bshd.flashattn", check_heads_last(1)),
    Example("gqa_fwd_bshd", "attention.heads_last", "flash_attention/example_gqa_fwd_bshd.flashattn",
            check_heads_last(2)),
    Example("mha_fwd_varlen", "attention.sequences", "flash_attention/example_mha_fwd_varlen.flashattn",
            check_sequences(1)),
    Example("gqa_fwd_varlen", "attention.sequences", "flash_attention/example_gqa_fwd_varlen.flashattn",
            check_sequences(2)),
    Example("mha_sink_fwd", "attention.with_sinks", "attention_sink/example_mha_sink_fwd_bhsd.flashattn", check_sinks),
    Example("gqa_decode", "attention.decode", "flash_decoding/example_gqa_decode.flashattn", check_decode),
    Example("mha_inference", "attention.two_grids", "flash_decoding/example_mha_inference.flashattn", check_two_grids),
    Example("gqa_decode_varlen_logits", "attention.decode_with_maxima",
            "flash_decoding/example_gqa_decode_varlen_logits.flashattn", check_decode_with_maxima),
    Example("nsa_fwd", "attention.chosen_blocks", "deepseek_nsa/example_tilelang_nsa_fwd.native_sparse_attention",
            check_chosen_blocks),
    Example("blocksparse_gemm", "products.masked_blocks",
            "blocksparse_gemm/example_blocksparse_gemm.blocksparse_matmul", check_masked_blocks),
    Example("gemm_streamk", "products.streams_of_depth",
            "gemm_streamk/example_tilelang_gemm_streamk.tl_matmul_streamk", check_streams),
    Example("linear_attn_fwd", "recurrences.linear",
            "linear_attention/example_linear_attn_fwd.tl_fused_chunk_fwd_kernel", check_linear),
    Example("retention_fwd", "recurrences.retention",
            "linear_attention/example_retention_fwd.chunk_retention_fwd_kernel", check_retention),
    Example("mamba_chunk_scan", "recurrences.chunk_scan", "linear_attention/example_mamba_chunk_scan.chunk_scan_fwd",
            check_chunk_scan),
    Example("mamba_chunk_state", "recurrences.chunk_state",
            "linear_attention/example_mamba_chunk_state.chunk_state_fwd", check_chunk_state),
    Example("gemm_int4", "products.nibbles", "gemm_int4/example_tilelang_gemm_int4.matmul_nt_int4",
            check_nibbles_of_both),
    Example("grouped_gemm_fwd", "products.groups", "grouped_gemm/example_grouped_gemm_fwd.grouped_gemm", check_groups),
    Example("mhc_post", "rows.mixed_streams", "deepseek_mhc/example_mhc_post.mhc_post_tilelang", check_streams_mixed),
    Example("chunk_scaled_dot_kkt", "chunks.scaled_products",
            "gdn/example_chunk_scaled_dot_kkt.tilelang_chunk_scaled_dot_kkt_fwd", check_scaled_products),
    Example("chunk_o", "chunks.outputs", "gdn/example_chunk_o.tilelang_chunk_fwd_o", check_chunk_outputs),
    Example("wy_fast", "chunks.weighted", "gdn/example_wy_fast.tilelang_recompute_w_u_fwd", check_weighted),
    Example("gemm_w4a8", "products.bytes_by_nibbles", "dequantize_gemm/example_dequant_gemm_w4a8.matmul_int8xint4",
            check_nibbles),
)  # fmt: skip


def rows(verdict: str) -> list[list[str]]:
    """The rows of the page's table with this verdict."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[1] == verdict]


@pytest.mark.cpu
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.theirs.replace("/", "."))
def test_a_row_that_runs(
    example: Example, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.config.getoption("--tilelang")
    place, function = (example.theirs if folder else example.ours).rsplit(".", 1)
    monkeypatch.syspath_prepend(str((Path(str(folder)) / place).parent if folder else TEXTS))
    module = load((Path(str(folder)) if folder else TEXTS) / f"{place}.py", tmp_path)
    example.check(getattr(module, function), np.random.default_rng(5))


def test_every_row_that_runs_is_run() -> None:
    for row in rows("runs"):
        assert any(example.row in row[0] for example in EXAMPLES), row[0]
    for example in EXAMPLES:
        assert any(example.row in row[0] for row in rows("runs")), example.row
    assert {row[1] for row in rows("runs") + rows("no")} == {"runs", "no"}


def test_what_the_other_rows_need_is_refused_by_name() -> None:
    needed = {name for row in rows("no") for name in re.findall(r"`T\.(\w+)`", row[2])}
    assert {"get_thread_binding", "call_extern", "im2col"} <= needed
    for name in needed:
        with pytest.raises(tilecore.TileError, match=f"T.{name} is for GPU threads"):
            getattr(language, name)
