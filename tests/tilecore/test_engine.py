"""What multiplies a block, and the extents that are chosen for it: no compiler needed."""

from dataclasses import replace

import numpy as np
import pytest
from tile_specs import AttentionForm, attention_case, axis, tensor

from tilecore.compile import prepare
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, const
from tilecore.contract.narrow import narrowed
from tilecore.contract.reshape import single_query
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, Tensor, View
from tilecore.engine import engine_for
from tilecore.profile import HardwareProfile, profile_named
from tilecore.recommend import Machine, key_bounds, needed_keys, rank

OPEN = Sym("M")


def linear(depth: int, columns: int, rows: Expr = OPEN) -> ContractionSpec:
    """y = a · b for a constant b."""
    acc = Var("acc", DType.F32)
    a, b = tensor("a", rows, depth), Tensor("b", DType.F32, (const(depth), const(columns)), True)
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", depth), axis("n", columns)
    result = Result(Place(tensor("y", rows, columns), (g, m, n), (m, n)), acc)
    return ContractionSpec(
        (a, b), View("a", (g, m, k), Load(a, (m, k))), View("b", (g, k, n), Load(b, (k, n))), acc, (result,)
    )


@pytest.mark.parametrize(
    ("row", "dtype", "block", "bytes_", "faster"),
    [
        ("sapphire-rapids", DType.BF16, (32, 32), 2, 16),
        ("zen4", DType.BF16, (6, 64), 2, 2),
        ("zen3", DType.BF16, (6, 16), 4, 1),  # widened
        ("sapphire-rapids", DType.F32, (6, 64), 4, 1),
        ("zen3", DType.I16, (6, 16), 2, 1.3),
    ],
)
def test_the_engine_follows_from_type_and_machine(
    row: str, dtype: DType, block: tuple[int, int], bytes_: int, faster: float
) -> None:
    profile = profile_named(row)
    engine = engine_for(dtype, profile, profile.target)
    assert (engine.rows, engine.columns, engine.bytes) == (*block, bytes_)
    assert engine.rate == pytest.approx(faster * profile.macs_per_cycle)


@pytest.mark.parametrize(("depth", "columns"), [(768, 3072), (3072, 768), (768, 768), (1000, 1000)])
def test_tile_registers_get_whole_blocks_and_the_whole_depth(depth: int, columns: int) -> None:
    profile = profile_named("sapphire-rapids")
    spec, _ = prepare(narrowed(linear(depth, columns)))
    best = rank(spec, profile, profile.target)[0]
    assert best.config["block_m"] % 32 == 0
    assert best.config["block_n"] % 32 == 0
    assert best.config["block_k"] == depth
    wide = rank(prepare(linear(depth, columns))[0], profile, profile.target)[0]
    assert best.cycles < 0.5 * wide.cycles


@pytest.mark.parametrize(
    ("depth", "columns", "slower"),
    [  # microseconds of 128 and of 512 rows on one core of a Sapphire Rapids
        (768, 3072, {(256, 3072): 2942, (128, 3072): 3108, (64, 1536): 4267}),
        (3072, 768, {(128, 768): 3173, (64, 768): 4380}),
        (768, 768, {(256, 768): 850, (64, 768): 924}),
    ],
)
def test_extents_in_tile_registers_rank_as_measured(
    depth: int, columns: int, slower: dict[tuple[int, int], int]
) -> None:
    """Weights that do not stay in L2 between tasks, and few rows that wait for them, cost what they cost."""
    profile = replace(profile_named("sapphire-rapids"), cores=1)
    spec, _ = prepare(narrowed(linear(depth, columns)))
    order = [(c.config["block_m"], c.config["block_n"]) for c in rank(spec, profile, profile.target)]
    places = [order.index(extents) for extents in slower]
    assert places[0] == 0
    assert places == sorted(places)


@pytest.mark.parametrize("depth", [768, 3072])
def test_few_large_tasks_rank_behind_more_that_cores_can_share(depth: int) -> None:
    """128 rows on two cores of a Sapphire Rapids: 10 and 7 % lost with three tasks each, in the mean of four runs."""
    profile = replace(profile_named("sapphire-rapids"), cores=2)
    spec, _ = prepare(linear(depth, 768, const(128)))
    best = rank(spec, profile, profile.target)[0].config
    assert -(-128 // best["block_m"]) * -(-768 // best["block_n"]) >= 12


def test_few_queries_that_fetch_all_keys_from_the_second_cache_rank_behind_more() -> None:
    """Measured on two cores of a Sapphire Rapids: 12 queries take 1.05 to 1.16 times as long as 48 and 96."""
    form = AttentionForm(heads=12, depth=64)
    profile = replace(profile_named("sapphire-rapids"), cores=2, l1=48 << 10, l2=2 << 20, l3=300 << 20)
    best = rank(attention_case(form, np.random.default_rng(0)).spec, profile, profile.target)[0].config
    assert best["block_m"] >= 48


@pytest.mark.parametrize("row", ["zen3", "zen5", "sapphire-rapids"])
def test_few_queries_walk_many_keys_before_their_values(row: str) -> None:
    """They read both where they lie: turns from the one to the other cost, and no panel has to stay in a cache."""
    form = AttentionForm(heads=32, groups=4, depth=128)
    grouped, _ = prepare(attention_case(form, np.random.default_rng(0)).spec)
    assert isinstance(grouped, AttentionSpec)
    special = single_query(grouped)
    assert special is not None
    _, spec = special
    profile = replace(profile_named(row), cores=2)
    assert rank(spec, profile, profile.target)[0].config["block_n"] == 512


@pytest.mark.parametrize("mask", ["none", "causal", "past", "window", "near"])
@pytest.mark.parametrize(("block_m", "block_n"), [(4, 8), (12, 5), (7, 64)])
def test_keys_count_from_the_first_tile_that_is_seen_to_the_last_key(mask: str, block_m: int, block_n: int) -> None:
    queries, keys = (20, 50) if mask == "past" else (50, 50)
    spec = attention_case(AttentionForm(mask=mask), np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    profile = profile_named("zen3")
    machine = Machine(profile, profile.target, {"B": 1, "Q": queries, "K": keys})
    q, k = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
    seen = {"none": k < keys, "window": (k <= q) & (q - k < 3), "near": abs(q - k) < 3}.get(mask, k <= q)
    seen = np.broadcast_to(seen, (queries, keys))
    columns = [np.flatnonzero(seen[first : first + block_m].any(axis=0)) for first in range(0, queries, block_m)]
    expected = [int(some[-1]) + 1 - int(some[0]) // block_n * block_n for some in columns]
    config = {"block_m": block_m, "block_n": block_n}
    assert needed_keys(key_bounds(spec, machine), queries, keys, config) == expected


def test_profiles_say_what_multiplies_bf16() -> None:
    fields = profile_named("sapphire-rapids").to_json()
    assert HardwareProfile.from_json(fields) == profile_named("sapphire-rapids")
    assert np.isclose(HardwareProfile.from_json({**fields, "narrow": ""}).bf16_per_cycle, 512)
    with pytest.raises(ValueError, match="unknown target 'x86-64-v9'"):
        HardwareProfile.from_json({**fields, "narrow": "x86-64-v9"})
