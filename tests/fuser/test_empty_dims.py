"""Dims of size 0 and 1: a past of length 0, one row where many were meant. No proof may lean on a dim being larger."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from region_oracle import check_regions, scanned
from test_bodies import run
from test_rewrite import fused

from models.attention import SPELLINGS
from models.catalogue import Entry
from models.graph import GraphWriter, write
from tilecore.contract.expr import Sym, Var, const, nonnegative

PAST, SEQ, ROWS = Sym("past"), Sym("seq"), Sym("rows")
CACHED = [entry for entry in SPELLINGS if any("past" in sizes for sizes in entry.sizes)]


def test_a_symbol_may_be_zero_beside_another() -> None:
    assert not nonnegative(PAST + SEQ - 2)
    assert not nonnegative(PAST + SEQ - 1)
    assert nonnegative(PAST + SEQ)
    assert nonnegative(PAST + 1 - const(1))


def test_an_index_proves_its_extent_and_no_more() -> None:
    row, key = Var("row", extent=SEQ), Var("key", extent=PAST + SEQ)
    assert nonnegative(row + SEQ - 1)
    assert nonnegative(SEQ - row - 1)
    assert not nonnegative(row + PAST - 1)
    assert nonnegative(key + PAST + SEQ - 1)
    assert not nonnegative(key + PAST - 1)
    assert nonnegative(PAST + SEQ - key - 1)


def joined_and_added() -> onnx.ModelProto:
    """Past and present joined, then added to another input: a joined row alone is repeated for each of its rows."""
    g = GraphWriter(17)
    past = g.input("past", np.float32, ("past", 64))
    present = g.input("present", np.float32, ("seq", 64))
    other = g.input("other", np.float32, ("rows", 64))
    joined = g.op("Concat", past, present, axis=0)
    g.op("Tanh", g.op("Mul", g.op("Add", joined, other), other), out="y")
    g.output("y", np.float32, ("more", 64))
    return g.finish()


def test_one_joined_row_is_repeated(tmp_path: Path) -> None:
    path = write(joined_and_added(), tmp_path / "model.onnx")
    found = scanned(onnx.load(path), tmp_path)
    assert found.regions
    fused(path, tmp_path / "fused.onnx")
    random = np.random.default_rng(0)
    for past, seq, rows in ((0, 1, 5), (1, 0, 5), (2, 3, 5), (2, 3, 1), (0, 0, 1), (0, 5, 5)):
        sizes = {"past": past, "present": seq, "other": rows}
        feeds = {name: random.standard_normal((size, 64)).astype(np.float32) for name, size in sizes.items()}
        check_regions(found, feeds)
        for after, before in zip(run(tmp_path / "fused.onnx", feeds), run(path, feeds), strict=True):
            np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entry", CACHED, ids=lambda entry: entry.name)
@pytest.mark.parametrize("sizes", [(2, 5, 0), (1, 1, 0), (2, 1, 1)], ids=str)
def test_attention_with_a_cache_means_the_same_without_a_past(
    entry: Entry, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    found = scanned(entry.build(dynamic=True), tmp_path)
    check_regions(found, entry.feeds(dict(zip(("batch", "seq", "past"), sizes, strict=True))))
