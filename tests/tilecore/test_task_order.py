"""The order of tasks where rows read a table again: every task is run once, whatever sizes divide.

The oracle is numpy in double precision.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated_targets import emulated_targets
from tile_specs import axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.expr import Expr, Load, Sym, binary, const
from tilecore.contract.spec import Place, Result, RowSpec
from tilecore.profile import detect_profile
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
SMALL = replace(PROFILE, l2=4096)  # no table is in such a cache when it is read again
TARGETS = (PROFILE.target, *(target for target in emulated_targets() if not target.base))
COLUMNS = 512  # two rows are a page
each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def table_spec(heads: int | None = None, columns: int = COLUMNS) -> RowSpec:
    """y[h, s, c] = x[h, s, c] · table[s, c], over rows h · S + s."""
    times: Expr = Sym("H") if heads is None else const(heads)
    r, c = axis("r", times * Sym("S")), axis("c", const(columns))
    x, table = tensor("x", times, Sym("S"), const(columns)), tensor("table", Sym("S"), const(columns))
    head, place = binary("floordiv", r, Sym("S")), binary("mod", r, Sym("S"))
    value = Load(x, (head, place, c)) * Load(table, (place, c))
    y = tensor("y", times, Sym("S"), const(columns))
    return RowSpec((x, table), r, c, (), (Result(Place(y, (r, c), (head, place, c)), value),))


def compiled(target: Target, *, block: int, large: bool = False, small: bool = True) -> Kernel:
    profile = replace(SMALL, l3=6) if large else SMALL if small else PROFILE
    return compile_spec(table_spec(), label="Test", profile=profile, targets=(target,), config={"block_m": block})


def from_a_line_on(array: np.ndarray, beside: int = 0) -> np.ndarray:
    """The same, beginning where a line does, or so many bytes after that."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + beside
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@each_target
@pytest.mark.parametrize("large", [False, True], ids=["kept", "past caches"])
@pytest.mark.parametrize("block", [1, 2, 4, 3])
def test_every_row_is_computed(block: int, large: bool, target: Target, toolchain: Toolchain) -> None:
    kernel = compiled(target, block=block, large=large)
    assert " ? task" in kernel.sources[target.name]
    run = load_kernel(kernel, target, toolchain)
    rng = np.random.default_rng(0)
    for heads, places in ((1, 1), (3, 8), (4, 12), (5, 7), (7, 24), (2, 6), (9, 2), (0, 4), (3, 0)):
        x = rng.standard_normal((heads, places, COLUMNS), np.float32)
        table = rng.standard_normal((places, COLUMNS), np.float32)
        for beside in (0, 16):
            call = run.prepare(from_a_line_on(x, beside), table)
            got = from_a_line_on(call.results[0])
            inputs = [array.ctypes.data for array in call.arrays]
            run.native.worker(call.symbols, inputs, [got.ctypes.data])(0, call.tasks)
            np.testing.assert_allclose(got, x.astype(np.float64) * table, rtol=1e-6)


def test_a_row_of_its_own_keeps_the_order() -> None:
    """What no row reads again, or all rows do, leaves nothing to bring together."""
    spec = table_spec()
    x, (r, c) = spec.inputs[0], (spec.row, spec.column)
    scale = tensor("scale", const(COLUMNS))
    places = spec.outputs[0].place
    alone = replace(spec, inputs=(x, scale), outputs=(Result(places, Load(x, places.index) * Load(scale, (c,))),))
    assert r in alone.outputs[0].place.axes
    kernel = compile_spec(alone, label="Test", profile=SMALL, targets=(PROFILE.target,), config={"block_m": 2})
    assert " ? task" not in kernel.sources[PROFILE.target.name]
