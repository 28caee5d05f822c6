"""Masks by position however they are spelled: added, computed, finite; clipped only where that is proved."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from region_oracle import check_regions, scanned

from fuser.visibility import by_position
from models.graph import GraphWriter
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Var, apply, binary, const, select
from tilecore.contract.spec import AttentionSpec
from tilecore.library.score import score_of

LOWEST = float(np.finfo(np.float32).min)
Mask = Callable[[GraphWriter, str, str], str]  # (writer, query positions [q, 1], key positions [1, k]) → added mask


def chosen(value: float, *, window: int = 0) -> Mask:
    """Where(k ≤ q, 0, value), of a window if one is given."""

    def build(g: GraphWriter, q: str, k: str) -> str:
        seen = g.op("LessOrEqual", k, q)
        if window:
            seen = g.op("And", seen, g.op("Greater", k, g.op("Sub", q, g.constant(np.array(window, np.int64)))))
        return g.op("Where", seen, number(g, 0.0), number(g, value))

    return build


def computed(value: float) -> Mask:
    """(1 − float(k ≤ q)) · value."""

    def build(g: GraphWriter, q: str, k: str) -> str:
        seen = g.op("Cast", g.op("LessOrEqual", k, q), to=1)
        return g.op("Mul", g.op("Sub", number(g, 1.0), seen), number(g, value))

    return build


def negated(g: GraphWriter, q: str, k: str) -> str:
    """Log(float(not (k > q)))."""
    return g.op("Log", g.op("Cast", g.op("Not", g.op("Greater", k, q)), to=1))


def product(g: GraphWriter, q: str, k: str) -> str:
    """(1 − float(k ≤ q) · float(k > q − 3)) · finfo.min."""
    low = g.op("Greater", k, g.op("Sub", q, g.constant(np.array(3, np.int64))))
    seen = g.op("Mul", g.op("Cast", g.op("LessOrEqual", k, q), to=1), g.op("Cast", low, to=1))
    return g.op("Mul", g.op("Sub", number(g, 1.0), seen), number(g, LOWEST))


def number(g: GraphWriter, value: float) -> str:
    return g.constant(np.array(value, np.float32))


def scalar(g: GraphWriter, extent: int | str) -> str:
    return extent if isinstance(extent, str) else g.constant(np.array(extent, np.int64))


def model(mask: Mask, *, past: bool, padded: bool, cap: bool, static: bool) -> GraphWriter:
    """Attention over past and new keys; `padded` adds a mask of the model's input, `cap` a soft-cap before."""
    sizes = {"batch": 2, "seq": 5, "past": 3} if static else None
    g = GraphWriter(18, sizes=sizes)
    total = "past + seq" if past else "seq"
    q, k, v = (g.input(name, np.float32, ("batch", 2, "seq", 4)) for name in "qkv")
    old = [g.input(f"old_{name}", np.float32, ("batch", 2, "past", 4)) for name in "kv"] if past else []
    if old:
        k, v = (g.op("Concat", before, new, axis=2) for before, new in zip(old, (k, v), strict=True))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    if cap:
        scores = g.op("Mul", g.op("Tanh", scores), number(g, 20.0))
    zero, one = (g.constant(np.array(i, np.int64)) for i in (0, 1))
    queries = g.op("Range", zero, scalar(g, g.extent(q, 2, "seq")), one)
    if old:
        queries = g.op("Add", queries, scalar(g, g.extent(old[0], 2, "past")))
    keys = g.op("Range", zero, scalar(g, g.extent(k, 2, total)), one)
    row = g.op("Unsqueeze", queries, g.constant(np.array([1], np.int64)))
    column = g.op("Unsqueeze", keys, g.constant(np.array([0], np.int64)))
    scores = g.op("Add", mask(g, row, column), scores)
    if padded:
        scores = g.op("Add", scores, g.input("padding", np.float32, ("batch", 1, 1, total)))
    g.op("MatMul", g.op("Softmax", scores), v, out="y")
    g.output("y", np.float32, ("batch", 2, "seq", 4))
    return g


def feeds(*, batch: int, seq: int, past: int | None, padded: bool, size: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seq)
    made = dict.fromkeys("qkv", (batch, 2, seq, 4))
    made |= {} if past is None else {f"old_{name}": (batch, 2, past, 4) for name in "kv"}
    values = {name: (size * random.standard_normal(shape)).astype(np.float32) for name, shape in made.items()}
    if padded:
        hidden = random.random((batch, 1, 1, seq + (past or 0))) < 0.3
        hidden[0, ..., 0] = True  # the first row of the first batch sees nothing
        values["padding"] = np.where(hidden, -np.inf, 0.0).astype(np.float32)
    return values


SPELLINGS = {
    "infinite": (chosen(-np.inf), 1),
    "lowest": (chosen(LOWEST), 1),
    "window": (chosen(-np.inf, window=3), 2),
    "lowest window": (chosen(LOWEST, window=3), 2),
    "computed": (computed(LOWEST), 1),
    "log": (negated, 1),
    "product": (product, 2),
}


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_keys_that_an_added_mask_hides_are_left_out(name: str, past: bool, static: bool, tmp_path: Path) -> None:
    mask, bounds = SPELLINGS[name]
    found = scanned(model(mask, past=past, padded=False, cap=False, static=static).finish(), tmp_path)
    (region,) = found.regions
    assert isinstance(region.spec, AttentionSpec)
    assert len(score_of(region.spec).bounds) == bounds
    for seq, length, size in ((5, 3, 1.0),) if static else ((5, 3, 1.0), (1, 0, 1.0), (7, 0, 100.0), (1, 4, 1.0)):
        check_regions(found, feeds(batch=2, seq=seq, past=length if past else None, padded=False, size=size))


@pytest.mark.parametrize(
    ("mask", "padded", "cap", "bounds"),
    [
        (chosen(-1e9), False, False, 0),  # a dot product may be larger than that
        (computed(-1e9), False, True, 1),  # a soft-capped one may not
        (chosen(-100.0), False, True, 0),  # exp(−100 + 2 · 20) is not 0
        (chosen(LOWEST), True, False, 0),  # rows may be hidden altogether, and then weigh every key alike
        (chosen(-np.inf), True, False, 1),
    ],
)
def test_finite_masks_are_clipped_only_where_that_changes_nothing(
    mask: Mask, padded: bool, cap: bool, bounds: int, tmp_path: Path
) -> None:
    found = scanned(model(mask, past=False, padded=padded, cap=cap, static=False).finish(), tmp_path)
    (region,) = found.regions
    assert isinstance(region.spec, AttentionSpec)
    assert len(score_of(region.spec).bounds) == bounds
    check_regions(found, feeds(batch=2, seq=9, past=None, padded=padded, size=3.0))


def test_a_row_that_sees_no_key_keeps_its_finite_mask() -> None:
    """k < q hides every key from the first query: all of them weigh the same there."""
    query, key = Var("q", extent=const(6)), Var("k", extent=const(6))
    score = Var("raw", DType.F32) + select(binary("lt", key, query), const(0.0), const(LOWEST))
    assert by_position(score, key) == score
    mended = Var("raw", DType.F32) + select(binary("le", key, query), const(0.0), const(LOWEST))
    assert by_position(mended, key) == select(binary("le", key, query), Var("raw", DType.F32), -np.inf)


def test_conditions_of_data_stay_where_they_are() -> None:
    """Of `k ≤ q and data`, the first part alone is by position."""
    query, key = Var("q", extent=const(6)), Var("k", extent=const(6))
    raw = Var("raw", DType.F32)
    data = binary("gt", Var("seen", DType.F32), 0.0)
    near = binary("le", key, query)
    score = raw + select(apply("and", near, data), const(0.0), const(-np.inf))
    assert by_position(score, key) == select(near, raw + select(data, const(0.0), const(-np.inf)), -np.inf)
