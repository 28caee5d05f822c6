"""Definitions of ONNX Runtime's operators against its own kernels, and that they fuse whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from operator_cases import Array, Case, expanded, run
from region_oracle import check_regions, scanned

HEADS, WIDTH, HIDDEN = 2, 8, 16
RANDOM = np.random.default_rng(0)
MASK = np.array([[1, 1, 0, 1], [0, 2, 1, 1]], np.int32)
SELF = {(i, axis): name for i in range(3) for axis, name in ((0, "batch"), (1, "seq"))}


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def tokens(length: int, hidden: int = HIDDEN) -> Array:
    return floats(2, length, hidden)


def mha(*inputs: Array | None, **more: object) -> Case:
    outputs = more.pop("outputs", (0,))
    symbols = more.pop("symbols", SELF)
    return Case("MultiHeadAttention", inputs, {"num_heads": HEADS, **more}, outputs, symbols=symbols)  # type: ignore[arg-type]


def past(length: int = 3) -> Array:
    return floats(2, HEADS, length, WIDTH)


PAST = {**SELF, (6, 0): "batch", (6, 2): "past", (7, 0): "batch", (7, 2): "past"}
QKV = tuple(tokens(4) for _ in range(3))
MULTI_HEAD: dict[str, Case] = {
    "plain": mha(*QKV),
    "cross": mha(tokens(3), *QKV[1:], symbols={(0, 0): "batch", (0, 1): "queries", (1, 0): "batch", (2, 0): "batch"}),
    "scale": mha(*QKV, scale=0.3),
    "wide values": mha(*QKV[:2], tokens(4, 24)),
    "bias": mha(*QKV, floats(3 * HIDDEN)),
    "key padding": mha(*QKV, None, MASK, symbols={**SELF, (4, 0): "batch", (4, 1): "seq"}),
    "filter value": mha(*QKV, None, MASK * 0, mask_filter_value=-3.0),
    "lengths": mha(*QKV, None, np.array([2, 4], np.int32), symbols={**SELF, (4, 0): "batch"}),
    "mask by query": mha(*QKV, None, np.tril(np.ones((2, 4, 4), np.int32))),
    "attention bias": mha(*QKV, None, None, floats(1, HEADS, 4, 4)),
    "wide attention bias": mha(*QKV, None, MASK, floats(2, 1, 4, 4)),
    "unidirectional": mha(*QKV, None, MASK, unidirectional=1, symbols={**SELF, (4, 0): "batch", (4, 1): "seq"}),
    "past": mha(*QKV, None, None, None, past(), past(), outputs=(0, 1, 2), symbols=PAST),
    "past, unidirectional": mha(
        *QKV, None, None, None, past(), past(), outputs=(0, 1, 2), symbols=PAST, unidirectional=1
    ),
    "past, masked": mha(
        *QKV, None, np.array([[1, 0, 1, 1, 1, 1, 0]] * 2, np.int32), None, past(), past(), outputs=(0, 1, 2)
    ),
    "keys by head": mha(tokens(3), past(4), past(4), floats(3 * HIDDEN), symbols={}),
}  # fmt: skip


def attention(*inputs: Array | None, **more: object) -> Case:
    outputs = more.pop("outputs", (0,))
    symbols = more.pop("symbols", {(0, 0): "batch", (0, 1): "seq"})
    attributes = {"num_heads": HEADS, **more}
    return Case("Attention", inputs, attributes, outputs, frozenset({1, 2}), symbols)  # type: ignore[arg-type]


INPUT = (tokens(4, 12), floats(12, 3 * HIDDEN), floats(3 * HIDDEN))
MASKED = {(0, 0): "batch", (0, 1): "seq", (3, 0): "batch", (3, 1): "seq"}
PACKED: dict[str, Case] = {
    "plain": attention(*INPUT),
    "without bias": attention(*INPUT[:2], None),
    "mask": attention(*INPUT, MASK, symbols=MASKED),
    "mask by query": attention(*INPUT, np.tril(np.ones((2, 4, 4), np.int32))),
    "lengths": attention(*INPUT, np.array([3, 4], np.int32), symbols={**MASKED, (3, 0): "batch"}),
    "unidirectional": attention(*INPUT, unidirectional=1),
    "sizes": attention(INPUT[0], floats(12, 56), floats(56), qkv_hidden_sizes=[16, 16, 24]),
    "past": attention(
        *INPUT, None, floats(2, 2, HEADS, 3, WIDTH), outputs=(0, 1), unidirectional=1,
        symbols={(0, 0): "batch", (0, 1): "seq", (4, 1): "batch", (4, 3): "past"},
    ),
    "bias": attention(*INPUT, None, None, floats(1, HEADS, 4, 4)),
}  # fmt: skip


def rotary(value: Array, positions: Array, half: int = WIDTH // 2, **attributes: int) -> Case:
    tables = (floats(16, half), floats(16, half))
    symbols = {(0, 0): "batch"} if value.ndim == 4 else {(0, 0): "batch", (0, 1): "seq"}
    return Case("RotaryEmbedding", (value, positions, *tables), attributes, symbols=symbols)


POSITIONS = np.array([[0, 1, 2, 3], [2, 3, 4, 5]], np.int64)
ROTARY: dict[str, Case] = {
    "plain": rotary(tokens(4), POSITIONS),
    "offset": rotary(tokens(4), np.array([3], np.int64)),
    "interleaved": rotary(tokens(4), POSITIONS, interleaved=1),
    "by head": rotary(past(4), POSITIONS),
    "partial": rotary(tokens(4), POSITIONS, 2, num_heads=HEADS, rotary_embedding_dim=4),
    "partial, interleaved": rotary(tokens(4), POSITIONS, 2, num_heads=HEADS, rotary_embedding_dim=4, interleaved=1),
}

IDS = RANDOM.integers(0, 9, (2, 4)).astype(np.int32)
TABLES = (floats(9, HIDDEN), floats(8, HIDDEN), floats(2, HIDDEN), floats(HIDDEN), floats(HIDDEN))


def embedding(*more: Array | None, outputs: tuple[int, ...] = (0, 1)) -> Case:
    symbols = {(i, axis): name for i in (0, 1, 7, 8) for axis, name in ((0, "batch"), (1, "seq"))}
    inputs = (IDS, IDS % 2, *TABLES, *more)
    return Case("EmbedLayerNormalization", inputs, {"epsilon": 1e-5}, outputs, frozenset(range(2, 7)), symbols)


EMBEDDING: dict[str, Case] = {
    "plain": embedding(),
    "mask": embedding(np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32)),
    "mask of other numbers": embedding(np.array([[2, 1, 0, 1], [-1, 5, 1, 0]], np.int32)),
    "positions": embedding(None, IDS % 8, outputs=(0, 1, 2)),
}

QUERIES, GROUPS, WIDE = 4, 2, 16


def grouped(new: int, cached: int, seqlens: list[int], total: int, *more: Array | None, **attributes: float) -> Case:
    batch = len(seqlens)
    qkv = (floats(batch, new, QUERIES * WIDE), *(floats(batch, new, GROUPS * WIDE) for _ in range(2)))
    cache = tuple(floats(batch, GROUPS, cached, WIDE) for _ in range(2))
    lengths = (np.array(seqlens, np.int32), np.array(total, np.int32))
    symbols = {(i, 0): "batch" for i in range(6)} | {(i, 1): "new" for i in range(3)} | {(3, 2): "past", (4, 2): "past"}
    given = {"num_heads": QUERIES, "kv_num_heads": GROUPS, **attributes}
    return Case("GroupQueryAttention", (*qkv, *cache, *lengths, *more), given, (0, 1, 2), frozenset({6}), symbols)


TURNS = (floats(16, WIDE // 2), floats(16, WIDE // 2))
GROUPED: dict[str, Case] = {
    "prompt": grouped(4, 0, [3, 3], 4),
    "padded prompt": grouped(4, 0, [3, 1], 4),
    "padded prompt into a buffer": grouped(4, 6, [3, 1], 4),
    "decode": grouped(1, 4, [4, 2], 5),
    "decode in a buffer": grouped(1, 8, [4, 2], 5),
    "chunk": grouped(2, 4, [5], 6),
    "window": grouped(1, 4, [4, 2], 5, local_window_size=2),
    "prompt, window": grouped(6, 0, [5], 6, local_window_size=2),
    "soft-cap": grouped(1, 4, [4, 2], 5, softcap=3.0, scale=0.4),
    "rotary prompt": grouped(4, 0, [3, 2], 4, *TURNS, do_rotary=1),
    "rotary decode": grouped(1, 4, [4, 2], 5, *TURNS, do_rotary=1),
    "rotary chunk, interleaved": grouped(2, 4, [5], 6, *TURNS, do_rotary=1, rotary_interleaved=1),
    "rotary, positions": grouped(1, 4, [4, 2], 5, *TURNS, np.array([[7], [5]], np.int64), do_rotary=1),
    "rotary prompt, positions": grouped(3, 0, [2], 3, *TURNS, np.array([[2, 3, 4]], np.int64), do_rotary=1),
    "bias": grouped(1, 4, [4, 2], 5, None, None, None, floats(1, QUERIES, 1, 5)),
    "sinks": grouped(1, 4, [4, 2], 5, None, None, None, None, floats(QUERIES)),
    "smooth softmax": grouped(4, 0, [3, 3], 4, smooth_softmax=1),
}


def levels(*shape: int, kind: type[np.generic] = np.int8) -> Array:
    """Small ones: no sum of bytes saturates in any of ONNX Runtime's kernels."""
    return RANDOM.integers(0 if kind is np.uint8 else -60, 61, shape).astype(kind)


def single(value: float, kind: type[np.generic] = np.float32) -> Array:
    return np.array(value, kind)


def dynamic(columns: int, *more: Array | None, scale: Array | None = None) -> Case:
    given = single(0.02) if scale is None else scale
    inputs = (tokens(4, 12), levels(12, columns), given, *more)
    return Case("DynamicQuantizeMatMul", inputs, {}, (0,), frozenset(range(1, 5)), {(0, 0): "batch", (0, 1): "seq"})


COLUMN_SCALES = RANDOM.uniform(0.01, 0.03, 20).astype(np.float32)
DYNAMIC: dict[str, Case] = {
    "plain": dynamic(20),
    "zero point, bias": dynamic(20, single(-5, np.int8), floats(20)),
    "scales by column": dynamic(20, None, floats(20), scale=COLUMN_SCALES),
    "scale of one element": dynamic(17, scale=np.array([0.02], np.float32)),
    "zero points by column": dynamic(20, levels(20), scale=COLUMN_SCALES),
}


def quantized(*more: Array | None, kind: type[np.generic] = np.uint8, scale: Array | None = None, **rest: Any) -> Case:
    bias, weight_scale = floats(3 * HIDDEN), single(0.02) if scale is None else scale
    inputs = (levels(2, 4, 12, kind=kind), levels(12, 3 * HIDDEN), bias, single(0.03), weight_scale, *more)
    outputs, symbols = rest.pop("outputs", (0,)), rest.pop("symbols", {(0, 0): "batch", (0, 1): "seq"})
    attributes = {"num_heads": HEADS, **rest}
    return Case("QAttention", inputs, attributes, outputs, frozenset((1, 2, 3, 4, 6, 7)), symbols)


QUANTIZED: dict[str, Case] = {
    "plain": quantized(),
    "mask": quantized(
        MASK, single(30, np.uint8), symbols={(0, 0): "batch", (0, 1): "seq", (5, 0): "batch", (5, 1): "seq"}
    ),
    "weights by column": quantized(None, single(31, np.uint8), scale=np.tile(COLUMN_SCALES[:16], 3)),
    "unidirectional": quantized(None, single(30, np.uint8), single(-3, np.int8), unidirectional=1),
    "past": quantized(
        None, single(30, np.uint8), None, floats(2, 2, HEADS, 3, WIDTH), outputs=(0, 1), unidirectional=1
    ),
}

CASES = {
    f"{case.op}: {name}": case
    for group in (MULTI_HEAD, PACKED, GROUPED, ROTARY, EMBEDDING, DYNAMIC, QUANTIZED)
    for name, case in group.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_definition_computes_what_the_kernel_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.model(dynamic=True)
    got = run(expanded(model, tmp_path), case.feeds())
    for value, wanted in zip(got, run(model, case.feeds()), strict=True):
        assert value.shape == wanted.shape
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=2e-4 if "filter" in name else 2e-5)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_definition_is_inside_regions(name: str, dynamic: bool, tmp_path: Path) -> None:
    case = CASES[name]
    found = scanned(case.model(dynamic=dynamic), tmp_path)
    assert not any(node.op_type == case.op for node in found.model.graph), found.misses
    check_regions(found, case.feeds())
    if "Attention" in name:
        assert len(found.of("attention")) == 1
