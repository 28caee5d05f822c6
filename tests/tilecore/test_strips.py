"""Products finished strip by strip, and tasks that go along the columns: programs, and results against float64."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_narrow_kernels import contraction
from tile_specs import siblings_case

from tilecore.blocks import finish_in_blocks
from tilecore.call import load_kernel, load_native, poisoned
from tilecore.compile import compile_spec, plan_of, prepare
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Expr, const, substitute, variables
from tilecore.contract.narrow import narrowed
from tilecore.contract.panel import pack, pack_groups
from tilecore.contract.spec import ContractionSpec, Spec
from tilecore.library import kernel_for
from tilecore.loops import Loop, LoopProgram, Mma, Once, Put, VectorLoop, loop_statements
from tilecore.lower import lower
from tilecore.profile import detect_profile, detect_targets, profile_named
from tilecore.recommend import keeps_left
from tilecore.strips import FEW_ROWS, FEW_VECTORS, STRIP_TILES, finish_in_strips
from tilecore.target import Target, target_named
from tilecore.toolchain import Toolchain, find_toolchain
from tilecore.trace import trace

V3, V4 = target_named("x86-64-v3"), target_named("x86-64-v4")
ZEN4 = profile_named("zen4")
WHOLE = {"block_m": 192, "block_n": 128, "block_k": 96}


def program_of(spec: Spec, target: Target, config: Mapping[str, int]) -> LoopProgram:
    packed, _ = prepare(spec)
    function, operands = kernel_for(packed)
    if isinstance(packed, ContractionSpec) and keeps_left(packed, ZEN4, ZEN4.target):
        operands["columns_first"] = True
    program = trace(function, inputs=packed.inputs, operands=operands, extents=config)
    return finish_in_strips(finish_in_blocks(lower(plan_of(program, target)), target), target)


def products_of(program: LoopProgram) -> list[Mma]:
    return [stmt for stmt in loop_statements(program.body) if isinstance(stmt, Mma)]


def linear(*, narrow: bool = False, scaled: bool = False) -> ContractionSpec:
    spec = contraction(96, 200, constant=True, transposed=False, scaled=scaled)
    found = narrowed(spec) if narrow else spec
    assert isinstance(found, ContractionSpec)
    return found


@pytest.mark.parametrize("target", [V3, V4], ids=lambda target: target.name)
def test_a_product_over_its_whole_depth_is_finished_in_strips(target: Target) -> None:
    program = program_of(linear(), target, WHOLE)
    (mma,) = products_of(program)
    height, width = STRIP_TILES * mma.tile.rows, max(mma.tile.vectors, FEW_VECTORS) * target.lanes
    sums = next(memory for memory in program.memories if memory.name == "c")
    assert mma.c.memory == sums
    assert sums.size == const((2 * height - 1) * width), "as much as the last strip may have"
    assert mma.among is not None, "tiles share the next panels as those of the whole block would"


@pytest.mark.parametrize("target", [V3, V4], ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 96])
def test_strips_of_few_rows_are_wide(rows: int, target: Target) -> None:
    """One or two rows in a narrow register tile would wait for their own sums."""
    spec = contraction(96, 192, constant=True, transposed=False, scaled=False, rows=const(rows))
    (mma,) = products_of(program_of(spec, target, {**WHOLE, "block_n": 64}))
    first = substitute(mma.columns, {var: const(0) for var in variables(mma.columns)})
    vectors = max(mma.tile.vectors, FEW_VECTORS) if rows <= FEW_ROWS else mma.tile.vectors
    assert Evaluator({}, {})(first) == vectors * target.lanes


@pytest.mark.parametrize("block_n", [64, 128])
def test_a_strip_asks_for_the_lines_that_the_next_one_stores(block_n: int) -> None:
    """Down the rows, then to the next panels; after the last ones it stays, as what follows is another task's."""
    program = program_of(linear(), V4, {**WHOLE, "block_n": block_n})
    loops = [stmt for stmt in loop_statements(program.body) if isinstance(stmt, Loop)]
    panels, strips = (next(loop for loop in loops if loop.var.name == name) for name in ("panels", "strip"))
    (finish,) = [stmt for stmt in loop_statements(program.body) if isinstance(stmt, VectorLoop) and stmt.ahead]
    (touch,), (put,) = finish.ahead, [part for part in finish.body if isinstance(part, Put)]
    assert touch.write
    assert touch.memory == put.memory
    rows, height = 192, STRIP_TILES * products_of(program)[0].tile.rows

    def at(value: Expr, panel: int, strip: int) -> int:
        where: dict[Expr, Expr] = dict.fromkeys(variables(value), const(0))
        return int(
            Evaluator({}, {"M": rows})(substitute(value, {**where, panels.var: const(panel), strips.var: const(strip)}))
        )

    last, wide = rows // height - 1, block_n // 64 - 1
    assert at(touch.offset, 0, 0) == at(put.offset, 0, 1)
    assert at(touch.offset, 0, last) == at(put.offset, min(1, wide), 0)
    assert at(touch.offset, wide, last) == at(put.offset, wide, 0)


def test_a_step_of_a_deeper_sum_is_not() -> None:
    (mma,) = products_of(program_of(linear(), V4, {**WHOLE, "block_k": 48}))
    assert mma.among is None


def test_tile_registers_finish_in_blocks() -> None:
    target = target_named("x86-64-v4-amx")
    assert all(mma.among is None for mma in products_of(program_of(linear(narrow=True), target, WHOLE)))


@pytest.mark.parametrize(("narrow", "scaled"), [(False, False), (False, True), (True, False)])
def test_a_left_operand_that_is_computed_is_kept_while_the_columns_move(narrow: bool, scaled: bool) -> None:
    program = program_of(linear(narrow=narrow, scaled=scaled), target_named("x86-64-v4-bf16"), WHOLE)
    kept = [stmt for stmt in loop_statements(program.body) if isinstance(stmt, Once)]
    assert [once.name for once in kept] == (["a"] if narrow or scaled else [])
    (mma,) = products_of(program)
    fastest = program.grid[0]
    assert (fastest in variables(mma.b.offset)) is (narrow or scaled)


def test_a_right_operand_that_is_packed_here_is_kept_instead() -> None:
    spec = contraction(96, 200, constant=False, transposed=False, scaled=True)
    assert not keeps_left(spec, ZEN4, ZEN4.target)


def test_tile_registers_keep_panels() -> None:
    profile = profile_named("sapphire-rapids")
    assert not keeps_left(linear(narrow=True), profile, profile.target)
    assert keeps_left(linear(scaled=True), profile, profile.target), "its float32 products are those of vectors"


@pytest.mark.cpu
@pytest.mark.parametrize("target", detect_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 2, 5, 23, 24, 25, 47, 48, 49, 97, 193])
def test_tasks_in_any_order_give_rounded_products(rows: int, target: Target, object_cache: Path) -> None:
    """As several threads take them: a few tasks at a time, from the last ones on, with tiles that others left."""
    spec, config = linear(narrow=True), {**WHOLE, "block_m": 96, "block_n": 64}
    kernel = compile_spec(spec, label="Strips", profile=detect_profile(), targets=(target,), config=config)
    native = load_native(kernel, target, find_toolchain(object_cache))
    rng = np.random.default_rng(rows)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 96), (96, 200)))
    a[rows // 2, 3], a[rows // 3, 7] = np.nan, np.inf
    bias = rng.standard_normal(200).astype(np.float32)
    inputs = [a, pack_groups(b.astype(ml_dtypes.bfloat16), 2), bias]
    symbols = native.bind([array.shape for array in inputs])
    out = poisoned((rows, 200), np.dtype(np.float32))
    run = native.worker(symbols, [array.ctypes.data for array in inputs], [out.ctypes.data])
    tasks, _ = native.tasks(symbols)
    for begin in reversed(range(0, tasks, 3)):
        run(begin, min(begin + 3, tasks))
    left, right = (x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        want = left @ right + bias
        want = want / (1 + np.exp(-want))
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
    finite = np.isfinite(want)
    assert np.abs(out[finite] - want[finite]).max(initial=0) <= 4e-6 * np.abs(want[finite]).max(initial=1)


@pytest.fixture
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


@pytest.mark.cpu
@pytest.mark.parametrize("rows", [1, 3, 24, 71])
@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_siblings_share_strips(rows: int, name: str, toolchain: Toolchain) -> None:
    target = target_named(name)
    if target not in detect_targets():
        pytest.skip(f"this machine has no {name}")
    case = siblings_case("gated", rows=rows, columns=83, depth=40)
    config = {"block_m": 96, "block_n": 96, "block_k": 40}
    kernel = compile_spec(case.spec, label="Strips", profile=detect_profile(), targets=(target,), config=config)
    arrays = [case.arrays[tensor.name] for tensor in case.spec.inputs]
    inputs = [pack(x) if position in kernel.packed else x for position, x in enumerate(arrays)]
    (got,) = load_kernel(kernel, target, toolchain)(*inputs)
    a, first, second, _ = (x.astype(np.float64) for x in arrays)
    gate = a @ first
    want = gate / (1 + np.exp(-gate)) * (a @ second)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
