"""Code for rows as vectors run it: errors of functions, quotients by one divisor, results that pass the caches by.

The oracle is numpy in double precision, or in single precision where a quotient has to be exact.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from math import erf, erfc
from pathlib import Path

import numpy as np
import pytest
from emulated_targets import emulated_targets
from tile_specs import Case, axis, row_case, tensor

from tilecore.call import load_kernel
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, const, select, unary, variables
from tilecore.contract.spec import Place, Result, RowSpec, Step, outputs_of
from tilecore.implied_nan import pass_over_nan
from tilecore.profile import detect_profile
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_compiler, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
SMALL = replace(PROFILE, l3=6)  # every result is larger than what such a cache has room for
TARGETS = (PROFILE.target, *(target for target in emulated_targets() if not target.base))
EDGES = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38)
each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def compiled(spec: RowSpec, target: Target = PROFILE.target, *, small: bool = False) -> Kernel:
    return compile_spec(
        spec, label="Test", profile=SMALL if small else PROFILE, targets=(target,), config={"block_m": 3}
    )


def row_spec(value: Callable[[Expr, Expr], Expr], kind: str = "max") -> RowSpec:
    """y[r, c] = value(x[r, c], the reduction of row r)."""
    x, r, c = tensor("x", Sym("R"), Sym("C")), axis("r", Sym("R")), axis("c", Sym("C"))
    load, total = Load(x, (r, c)), Var("total", DType.F32)
    steps = (Step(total, kind, load),) if total in variables(value(load, total)) else ()
    return RowSpec(
        (x,), r, c, steps, (Result(Place(tensor("y", Sym("R"), Sym("C")), (r, c), (r, c)), value(load, total)),)
    )


def function(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "erf": np.vectorize(erf)}.get(name) or getattr(np, name)


def test_how_large_a_call_is_whose_results_pass_the_caches_by_follows_from_the_cores_at_work() -> None:
    """Each of two cores has a last cache of its own here, half of which results may fill."""
    spec = row_spec(lambda x, _: x * 2.0)
    for cores, room in (1, 1 << 20), (2, 2 << 20):
        profile = replace(PROFILE, cores=cores, l3=2 << 20, l3_cores=1, kept=0.5)
        kernel = compile_spec(spec, label="Test", profile=profile, targets=(PROFILE.target,), config={"block_m": 3})
        text = kernel.sources[PROFILE.target.name]
        (large,) = re.findall(r"if \((\w+)\) streams_done", text)
        assert re.search(rf"int32_t {large} = \w+ >= {room};", text), text


@each_target
@pytest.mark.parametrize(
    ("name", "low", "high", "units"),
    [("exp", -86.9, 88.7, 2.4), ("exp2", -125.4, 127.99, 3), ("sigmoid", -80, 80, 3.6), ("tanh", -12, 12, 6),
     ("erf", -5, 5, 7), ("log", 1e-37, 3e38, 1.1)],
)  # fmt: skip
def test_errors_of_functions_in_units_of_the_last_place(
    name: str, low: float, high: float, units: float, target: Target, toolchain: Toolchain
) -> None:
    rng = np.random.default_rng(3)
    spread = np.exp(rng.uniform(np.log(1e-30), np.log(high), 4000)) * (1 if low > 0 else rng.choice([-1, 1], 4000))
    x = np.concatenate([rng.uniform(low, high, 20000), spread]).astype(np.float32)
    x = x[(x >= low) & (x <= high)][None]
    run = load_kernel(compiled(row_spec(lambda x, _: unary(name, x)), target), target, toolchain)
    (got,) = run(x)
    want = function(name)(x.astype(np.float64))
    unit = np.ldexp(1.0, np.frexp(want)[1] - 24)
    assert np.abs((got - want) / unit).max() <= units

    edges = np.array([[*EDGES, 88.73, 128.0, -87.4, -126.1, 89.5, -150.0]], np.float32)
    (got,) = run(edges)
    with np.errstate(all="ignore"):
        want = function(name)(edges.astype(np.float64)).astype(np.float32)
    flushed = np.where(np.abs(want) < 1.7e-38, 0.0, want)
    near = np.isclose(got, want, rtol=1e-6, atol=1.2e-38, equal_nan=True) | (got == flushed)
    assert near.all(), (edges[~near], got[~near], want[~near])


def gelu(x: Expr, spelling: str) -> Expr:
    """GELU as exporters write it."""
    inner = unary("erf", x / float(np.sqrt(2)) if spelling == "quotient" else x * 0.70710678)
    if spelling == "half last":
        return (x * (inner + 1.0)) * 0.5
    if spelling == "twice":
        return x * (1.0 + inner)
    return (x * 0.5) * (inner + 1.0) if spelling == "half first" else (x / 2.0) * (1.0 + inner)


@each_target
@pytest.mark.parametrize("spelling", ["half first", "half last", "quotient", "twice"])
def test_gelu(spelling: str, target: Target, toolchain: Toolchain) -> None:
    """Not further from the truth than the formula in single precision; edges as in the formula."""
    rng = np.random.default_rng(4)
    spread = np.exp(rng.uniform(np.log(1e-30), np.log(3e38), 4000)) * rng.choice([-1, 1], 4000)
    x = np.concatenate([rng.uniform(-7, 7, 20000), spread, np.arange(-64, 64) * 0.09375]).astype(np.float32)[None]
    kernel = compiled(row_spec(lambda x, _: gelu(x, spelling)), target)
    assert "gelu_f32" in kernel.sources[target.name]
    run = load_kernel(kernel, target, toolchain)
    (got,) = run(x)
    wide, factor = x.astype(np.float64), 2.0 if spelling == "twice" else 1.0
    want = factor * np.where(
        wide < 0, wide / 2 * np.vectorize(erfc)(-wide / 2**0.5), wide / 2 * (1 + function("erf")(wide / 2**0.5))
    )
    seen = np.abs(want) < 3e38
    assert (np.abs(got - want)[seen] <= 2.5e-7 * factor * np.abs(wide)[seen]).all()

    edges = np.array([EDGES[:-2]], np.float32)
    with np.errstate(all="ignore"):
        want = factor * edges / 2 * (1 + function("erf")(edges / 2**0.5))
    np.testing.assert_allclose(run(edges)[0], want, rtol=1e-6, atol=1e-38)


def test_what_is_no_gelu_stays_as_it_is() -> None:
    other = row_spec(lambda x, _: (x * 0.5) * (unary("erf", x * 0.5) + 1.0))
    assert "gelu_f32" not in compiled(other).sources[PROFILE.target.name]
    rounded = row_spec(lambda x, _: unary("round", gelu(x, "half first")))
    assert "gelu_f32" not in compiled(rounded).sources[PROFILE.target.name]


@each_target
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("columns", [5, 64, 150])
def test_the_largest_number_of_a_row_that_holds_no_number(
    kind: str, columns: int, target: Target, toolchain: Toolchain
) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((columns + 3, columns)).astype(np.float32)
    x[np.arange(columns), np.arange(columns)] = np.nan  # at every place, and three rows without
    x[-1] = -3e38 if kind == "max" else 3e38
    (got,) = load_kernel(compiled(row_spec(lambda x, total: total + 0.0 * x, kind), target), target, toolchain)(x)
    want = (np.max if kind == "max" else np.min)(x, 1)
    np.testing.assert_array_equal(got[-3:], np.broadcast_to(want[-3:, None], (3, columns)))
    assert np.isnan(got[:-3]).all()


@each_target
def test_quotients_by_the_rows_own_number(target: Target, toolchain: Toolchain) -> None:
    """One reciprocal serves a row, also where the reciprocal itself is too large or too small for a float."""
    rng = np.random.default_rng(5)
    sizes = np.array([1e-44, 1e-39, 1e-38, 1e-30, 1.0, 1e30, 1.6e38, 3.3e38, 0.0, -1e-42], np.float32)
    x = (rng.uniform(0.1, 1.0, (len(sizes), 37)) * sizes[:, None]).astype(np.float32)
    x = np.concatenate([x, np.full((4, 37), 1.5, np.float32)])
    for row, number in zip(range(-4, 0), (np.inf, -np.inf, np.nan, 1e-41), strict=True):
        x[row, 5] = number
    (got,) = load_kernel(compiled(row_spec(lambda x, total: x / total), target), target, toolchain)(x)
    with np.errstate(all="ignore"):
        want = x / x.max(1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=0, equal_nan=True)


def test_quotients_that_are_rounded_are_exact(toolchain: Toolchain) -> None:
    rng = np.random.default_rng(6)
    scale = np.float32(0.0472)
    x = (rng.integers(-4000, 4000, (3, 500)) * np.float32(0.5) * scale).astype(np.float32)
    (got,) = load_kernel(compiled(row_spec(lambda x, _: unary("round", x / float(scale)))), PROFILE.target, toolchain)(
        x
    )
    np.testing.assert_array_equal(got, np.rint(x / scale))


@each_target
@pytest.mark.parametrize(("kind", "columns"), [("softmax", 37), ("layernorm", 150), ("softmax", 5), ("layernorm", 32)])
def test_results_past_the_caches(kind: str, columns: int, target: Target, toolchain: Toolchain) -> None:
    """Rows begin at any address; what is stored and what was there beside it are as without."""
    case = row_case(kind, rows=7, columns=columns, dynamic=columns in (5, 37))
    assert isinstance(case.spec, RowSpec)
    large, plain = compiled(case.spec, target, small=True), compiled(case.spec, target)
    assert "stream_f32" in large.sources[target.name]
    assert kind != "softmax" or "__builtin_prefetch(input0" in large.sources[target.name]
    compare(case, large, target, toolchain)
    compare(case, plain, target, toolchain)


@each_target
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("width", [40, 48])
@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_parts_of_a_row_with_values_of_their_own(
    parts: int, width: int, small: bool, target: Target, toolchain: Toolchain
) -> None:
    """As rows that are joined from several: the first columns are not those of what comes later."""
    columns = const(parts * width)
    x, r, c = tensor("x", Sym("R"), columns), axis("r", Sym("R")), axis("c", columns)
    value: Expr = Load(x, (r, c)) * float(parts)
    for part in range(parts - 1, 0, -1):
        value = select(binary("lt", c, const(part * width)), Load(x, (r, c)) * float(part), value)
    spec = RowSpec((x,), r, c, (), (Result(Place(tensor("y", Sym("R"), columns), (r, c), (r, c)), value),))
    given = np.random.default_rng(0).standard_normal((7, parts * width), dtype=np.float32)
    (got,) = load_kernel(compiled(spec, target, small=small), target, toolchain)(given)
    np.testing.assert_array_equal(got, given * np.repeat(np.arange(1, parts + 1, dtype=np.float32), width))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_no_number_stays_in_its_row_past_the_caches(poison: float, toolchain: Toolchain) -> None:
    case = row_case("softmax", rows=5, columns=43, dynamic=True)
    case.arrays["x"][2, 17] = poison
    assert isinstance(case.spec, RowSpec)
    compare(case, compiled(case.spec, small=True), PROFILE.target, toolchain)


def compare(case: Case, kernel: Kernel, target: Target, toolchain: Toolchain) -> None:
    got = load_kernel(kernel, target, toolchain)(*(case.arrays[tensor.name] for tensor in case.spec.inputs))
    want = evaluate(case.spec, case.arrays)
    for output, value in zip(outputs_of(case.spec), got, strict=True):
        np.testing.assert_allclose(value, want[output.name], rtol=1e-5, atol=3e-6, err_msg=output.name)


@pytest.mark.parametrize("rows", [7, 64])
def test_lines_are_asked_for_while_a_row_computes(rows: int, toolchain: Toolchain) -> None:
    """Only calls that move more than a core's own cache holds do, and not for results that go past the caches."""
    case = row_case("softmax", rows=rows, columns=150, dynamic=True)
    assert isinstance(case.spec, RowSpec)
    small = replace(PROFILE, l2=rows * 150)  # every call is far
    kernel = compile_spec(case.spec, label="Test", profile=small, targets=(PROFILE.target,), config={"block_m": 3})
    text = kernel.sources[PROFILE.target.name]
    assert "__builtin_prefetch(input0" in text
    assert re.search(r"if \(!t\d+\) __builtin_prefetch\(output0", text)
    compare(case, kernel, PROFILE.target, toolchain)
    pointwise = row_case("reductions", rows=rows, columns=150, dynamic=True)
    assert isinstance(pointwise.spec, RowSpec)
    assert "prefetch" not in compiled(pointwise.spec).sources[PROFILE.target.name]


@each_target
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("columns", [5, 64, 150])
def test_softmax_of_what_is_no_number(columns: int, poison: float, target: Target, toolchain: Toolchain) -> None:
    """Its maximum passes NaN over, as the sum of such a row is NaN in any case."""
    case = row_case("softmax", rows=columns + 2, columns=columns, dynamic=True)
    assert isinstance(case.spec, RowSpec)
    case.arrays["x"][np.arange(columns), np.arange(columns)] = poison
    case.arrays["x"][-1] = poison
    kernel = compiled(case.spec, target)
    assert "fmax_lanes" in kernel.sources[target.name]
    with np.errstate(invalid="ignore"):
        compare(case, kernel, target, toolchain)


def test_maxima_that_something_else_shows_look_for_nan() -> None:
    case = row_case("softmax", rows=5, columns=64, dynamic=False)
    spec = case.spec
    assert isinstance(spec, RowSpec)
    top, total = spec.steps[0].var, spec.steps[2].var
    place = Place(tensor("tops", Sym("R")), (spec.row,), (spec.row,))
    for shown, kind in ((top, "max"), (top + total, "fmax"), (binary("max", top, total), "max")):
        outputs = (*spec.outputs, Result(place, shown))
        assert pass_over_nan(replace(spec, outputs=outputs)).steps[0].kind == kind
    chosen = select(binary("gt", spec.steps[1].var, const(0.5, DType.F32)), spec.steps[1].var, const(0.0, DType.F32))
    steps = (*spec.steps[:2], Step(total, "sum", chosen))
    assert pass_over_nan(replace(spec, steps=steps)).steps[0].kind == "max"


def test_scratch_that_nothing_reads_is_not_written() -> None:
    case = row_case("softmax", rows=5, columns=8192, dynamic=False)  # too long for several rows in flight
    assert isinstance(case.spec, RowSpec)
    text = compiled(case.spec).sources[PROFILE.target.name]
    assert text.count("store_f32(s_") == 2  # exponentials, which the sum needs first: with and without asking ahead
    assert "s_result" not in text


@each_target
@pytest.mark.parametrize(("columns", "asked"), [(1024, False), (2048, True), (2051, True)])
def test_short_loops_over_long_rows_ask_for_lines_of_results(
    columns: int, asked: bool, target: Target, toolchain: Toolchain
) -> None:
    """The last loop before results are stored does, for those of its own row, where calls are far but not large."""
    case = row_case("layernorm", rows=5, columns=columns, dynamic=False)
    assert isinstance(case.spec, RowSpec)
    near = replace(PROFILE, l2=5 * columns)  # every call is far
    kernel = compile_spec(case.spec, label="Test", profile=near, targets=(target,), config={"block_m": 3})
    assert ("__builtin_prefetch(output0" in kernel.sources[target.name]) == asked
    compare(case, kernel, target, toolchain)
    small = replace(near, l3=6)
    compare(case, compile_spec(case.spec, label="Test", profile=small, targets=(target,)), target, toolchain)


@each_target
@pytest.mark.parametrize("of_wheel", [False, True])
def test_exponentials_below_a_maximum(
    target: Target, of_wheel: bool, toolchain: Toolchain, object_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row: 0, what lies down to 87 below it, and what is too small for a float.

    clang, which the ziglang wheel has, rounds a product that two sums share, unless it is told not to.
    """
    if of_wheel:
        monkeypatch.setattr("tilecore.toolchain.shutil.which", lambda name: None)
        toolchain = Toolchain(find_compiler.__wrapped__(None), object_cache)
        assert toolchain.compiler.is_zig
    least = np.float32(-3.4028235e38)
    falling = np.concatenate([[0.0], np.random.default_rng(4).uniform(-86.5, 0, 4001)]).astype(np.float32)
    x = np.stack([falling, falling])
    x[1, 1:8] = (-104.0, -np.inf, least, -1e30, -3e9, -88.0, -120.5)
    kernel = compiled(row_spec(lambda x, top: unary("exp", x - top)), target)
    assert "exp_below_f32" in kernel.sources[target.name]
    (got,) = load_kernel(kernel, target, toolchain)(x)
    want = np.exp(x.astype(np.float64))
    units = np.abs(got - want)[0] / np.ldexp(1.0, np.frexp(want[0])[1] - 24)
    assert (units <= 3 + np.abs(falling) / 4).all(), units.max()
    np.testing.assert_array_equal(got[1, 1:8], 0)
    assert got[0, 0] == got[1, 0] == 1


@each_target
def test_a_softmax_of_the_least_floats(target: Target, toolchain: Toolchain) -> None:
    """As of rows that a mask hides whole."""
    case = row_case("softmax", rows=5, columns=43, dynamic=True)
    assert isinstance(case.spec, RowSpec)
    for row, value in enumerate((-3.4028235e38, 3.4028235e38, 3e38, -1e9)):
        case.arrays["x"][row] = value
    compare(case, compiled(case.spec, target), target, toolchain)
    case.arrays["x"][3:, 5] = 3.4028235e38
    compare(case, compiled(case.spec, target), target, toolchain)


def test_what_may_be_above_is_an_exponential_as_any() -> None:
    for value in (lambda x, top: unary("exp", top - x), lambda x, top: unary("exp", x + x - top)):
        assert "exp_below" not in compiled(row_spec(value)).sources[PROFILE.target.name]
    assert (
        "exp_below" not in compiled(row_spec(lambda x, top: unary("exp", x - top), "min")).sources[PROFILE.target.name]
    )
