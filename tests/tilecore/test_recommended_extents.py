"""Extents that the cost model ranks first, against what was measured on a Zen 5: no compiler needed."""

from dataclasses import replace

import numpy as np
import pytest
from test_engine import linear
from test_few_rows import Weight
from test_few_rows import spec_of as weights
from test_task_order import table_spec
from tile_specs import AttentionForm, attention_case, row_case

from tilecore.compile import prepare
from tilecore.contract.expr import const
from tilecore.contract.spec import Spec
from tilecore.profile import profile_named
from tilecore.recommend import Candidate, Machine, costs_of, rank


def ranked(spec: Spec, name: str = "zen5", cores: int = 1) -> list[Candidate]:
    profile = replace(profile_named(name), cores=cores)
    return [c for c in rank(prepare(spec)[0], profile, profile.target) if not c.rejected]


def rows_of(kind: str, columns: int) -> list[int]:
    spec = row_case(kind, rows=4, columns=columns, dynamic=False).spec
    return [candidate.config["block_m"] for candidate in ranked(spec)]


def queries_of(mask: str, name: str = "zen5") -> list[int]:
    form = AttentionForm(heads=12, depth=64, mask=mask)
    return [c.config["block_m"] for c in ranked(attention_case(form, np.random.default_rng(0)).spec, name)]


def test_long_rows_wait_together_for_their_reductions() -> None:
    """One row of 4,096 at a time took 1.02 to 1.05 times as long as eight."""
    assert rows_of("softmax", 4096)[0] > 1


@pytest.mark.parametrize(("kind", "columns"), [("softmax", 512), ("layernorm", 768), ("pointwise", 3072)])
def test_rows_that_wait_for_nothing_are_alike(kind: str, columns: int) -> None:
    """In flight, or without a reduction: blocks of 1 to 64 rows took within 7 % of each other, one row the longest."""
    spec = row_case(kind, rows=4, columns=columns, dynamic=False).spec
    costs = [candidate.cost for candidate in ranked(spec)]
    assert max(costs) < 1.06 * min(costs)
    assert rows_of(kind, columns)[-1] == 1


def test_blocks_leave_room_for_tables_that_other_rows_read() -> None:
    """RoPE of 32 heads of 128 in blocks of 64 rows took 1.3 to 1.5 times as long as in blocks of 8, one row 1.1."""
    assert ranked(table_spec(32, columns=128))[0].config["block_m"] in (4, 8, 16)


def test_causal_queries_are_cut_finely() -> None:
    """24 queries took 1.01 to 1.05 times as long as 12, 96 took 1.04 to 1.3 times: fetching keys again hid."""
    assert queries_of("causal")[0] == 12


def test_a_bias_is_fetched_by_large_blocks() -> None:
    """Nothing asks for a block's first row of it: 12 queries took 1.07 times as long as 96, and 24 took 1.04."""
    order = list(dict.fromkeys(queries_of("bias")))
    assert order == [96, 48, 24, 12]


@pytest.mark.parametrize("name", ["zen5", "zen3"])
def test_blocks_of_one_row_are_alike(name: str) -> None:
    """Its tile walks two panels side by side, whatever the block; starting more tasks costs nothing."""
    costs = [c.cost for c in ranked(linear(768, 768, const(1)), name) if c.config["block_k"] == 768]
    assert max(costs) < 1.03 * min(costs)


def test_two_rows_fill_a_register_tile() -> None:
    """Sums of two panels wait for each other: 1.12 to 1.16 times the time of four."""
    assert ranked(linear(768, 768, const(2)))[0].config["block_n"] >= 64


def test_blocks_larger_than_the_data_count_once() -> None:
    """They make the same work: the first five are five kernels."""
    configs = [c.config for c in ranked(linear(768, 96, const(7)))]
    assert {config["block_m"] for config in configs} == {24}
    assert {config["block_n"] for config in configs} == {32, 64, 128}
    assert {c.config["block_m"] for c in ranked(linear(768, 96))} == {24, 48, 96, 192}, "an open extent may be any"


def test_rows_are_rounded_to_bytes_once_for_all_columns() -> None:
    """With one block of rows: narrow blocks of columns took as long as wide ones, at one row and at 16."""
    weight = Weight(bits=4, depth=4096, columns=4096, block=32, in_bytes=True)
    spec, _ = weights(weight, np.random.default_rng(0))
    one = replace(profile_named("zen5"), cores=1)
    machine = Machine(one, one.target, {"M": 1})
    cost = costs_of(spec, machine)
    cycles = [cost({"block_m": 24, "block_n": n, "block_k": 4096}).cycles for n in (32, 64, 128, 256, 512)]
    assert max(cycles) < 1.02 * min(cycles)
