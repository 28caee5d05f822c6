"""Rows that turn: which kernels have them, and that they compute the same, whatever rows and columns there are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated_targets import emulated_targets
from tile_specs import axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Sym, Var, binary, const, unary
from tilecore.contract.spec import Place, Result, RowSpec, Step
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
TARGETS = tuple(target for target in (*detect_targets(), *emulated_targets()) if not target.base)
LARGE = replace(PROFILE, l3=6)  # no result fits such a cache: all go past it


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def norm(columns: int, *, skip: bool = False) -> RowSpec:
    """y[r, c] = x[r, c] / √(mean square of the row) · w[c] + b[c]; x is a sum of two tensors with `skip`."""
    r, c = axis("r", Sym("R")), axis("c", const(columns))
    x, other, y = (tensor(name, Sym("R"), const(columns)) for name in ("x", "other", "y"))
    w, b = (tensor(name, const(columns)) for name in ("w", "b"))
    steps, value = (), Load(x, (r, c))
    if skip:
        tile = Var("tile", DType.F32)
        steps, value = (Step(tile, "tile", binary("add", value, Load(other, (r, c)))),), tile
    total = Var("total", DType.F32)
    mean = binary("div", total, const(float(columns), DType.F32))
    scaled = binary("mul", binary("mul", value, unary("rsqrt", mean)), Load(w, (c,)))
    return RowSpec(
        (x, *((other,) if skip else ()), w, b),
        r,
        c,
        (*steps, Step(total, "sum", binary("mul", value, value))),
        (Result(Place(y, (r, c), (r, c)), binary("add", scaled, Load(b, (c,)))),),
    )


def compiled(spec: RowSpec, target: Target, rows: int, *, large: bool = False) -> Kernel:
    profile = LARGE if large else PROFILE
    return compile_spec(spec, label="Turns", profile=profile, targets=(target,), config={"block_m": rows})


@pytest.mark.parametrize(
    ("columns", "skip", "turns"),
    [(4096, False, True), (2816, False, True), (768, False, False), (8192, False, False), (4096, True, False)],
)
def test_rows_turn_where_the_first_cache_holds_them_but_not_what_they_share(
    columns: int, skip: bool, turns: bool
) -> None:
    text = compiled(norm(columns, skip=skip), PROFILE.target, 4).sources[PROFILE.target.name]
    assert (" ? -1 : 1) * " in text) == turns


@pytest.mark.parametrize("large", [False, True], ids=["kept", "past caches"])
@pytest.mark.parametrize(("columns", "block"), [(4096, 8), (2816, 3), (3001, 4), (4096, 1)])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_column_is_computed_once(
    columns: int, block: int, large: bool, target: Target, toolchain: Toolchain
) -> None:
    run = load_kernel(compiled(norm(columns), target, block, large=large), target, toolchain)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, columns), dtype=np.float32)
    x[2, 5], x[4, -1] = np.nan, np.inf
    w, b = (rng.standard_normal(columns, dtype=np.float32) for _ in range(2))
    (got,) = run(x, w, b)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64) / np.sqrt(np.square(x.astype(np.float64)).mean(1, keepdims=True)) * w + b
    np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6)
