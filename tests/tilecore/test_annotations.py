"""Partial annotations: any part of a complete solution leads to a legal, equal program; conflicts show both places."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_texts import underlined
from random_programs import random_program as random_tile_program

import tilecore
from tilecore import language as T
from tilecore.compile import plan_of
from tilecore.contract.expr import const
from tilecore.emit_c import emit_c
from tilecore.emit_host import Signature
from tilecore.errors import TileError
from tilecore.infer import InferenceError, Plan
from tilecore.interpret import interpret
from tilecore.ir import Annotation, Gemm, Parallel, Program, statements
from tilecore.jitted import JitKernel, Settings, compile_program
from tilecore.lower import lower
from tilecore.target import target_named
from tilecore.trace import trace

AVX2 = target_named("x86-64-v3")
ROWS, DEPTH, COLUMNS = 13, 10, 21


def random_program(
    blocks: tuple[int, int], scaled: bool, transposed: bool, summed: bool, masked: bool, dtype: str
) -> Program:
    """A product with what may stand around it; tiles that do not divide the data."""
    block_m, block_n = blocks
    shape = (COLUMNS, DEPTH) if transposed else (DEPTH, COLUMNS)
    tile = (block_n, DEPTH) if transposed else (DEPTH, block_n)

    def kernel(
        A: T.Tensor((ROWS, DEPTH), dtype),  # type: ignore[valid-type]
        B: T.Tensor(shape, dtype),  # type: ignore[valid-type]
        C: T.Tensor((ROWS, COLUMNS), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(COLUMNS, block_n), T.ceildiv(ROWS, block_m)) as (n, m):
            a, b = T.alloc_shared((block_m, DEPTH), dtype), T.alloc_shared(tile, dtype)
            c = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m,), "float32")
            T.copy(A[m * block_m, 0], a)
            T.copy(B[n * block_n, 0] if transposed else B[0, n * block_n], b)
            if scaled:
                for i, j in T.Parallel(*tile):
                    b[i, j] = b[i, j] * 0.5
            T.gemm(a, b, c, transpose_B=transposed, clear=True)
            if masked:
                for i, j in T.Parallel(block_m, block_n):
                    c[i, j] = T.if_then_else((m * block_m + i) >= (n * block_n + j), c[i, j], 0.0)
            T.fill(total, 0.0)
            if summed:
                T.reduce_sum(c, total, dim=1)
            for i, j in T.Parallel(block_m, block_n):
                C[m * block_m + i, n * block_n + j] = c[i, j] + total[i]

    return trace(kernel)


PROGRAMS = st.builds(
    random_program,
    st.tuples(st.sampled_from([4, 5, 16]), st.sampled_from([8, 24, 32])),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["float32", "float16"]),
)


def solution(program: Program, plan: Plan) -> list[Annotation]:
    """Everything that inference decided about what stands in the text."""
    names = {"rows": "rows"}
    notes = [
        Annotation("layout", buffer.name, names.get(layout.kind, f"panels of axis {layout.column}"))
        for buffer in program.buffers
        if (layout := plan.layouts.get(buffer.name))
    ]
    own = {stmt.axes for stmt in statements(program.body) if isinstance(stmt, Parallel)}
    for stmt, axis in plan.vector_axis.items():
        if stmt.axes in own and axis is not None:
            notes.append(Annotation("vector_axis", ",".join(each.name for each in stmt.axes), stmt.axes.index(axis)))
    tile = (plan.register_tile.rows, plan.register_tile.vectors)
    products = {stmt.c.name for stmt in statements(program.body) if isinstance(stmt, Gemm)}
    return notes + [Annotation("register_tile", name, tile) for name in sorted(products)]


def text_of(plan: Plan) -> str:
    program = plan.program
    return emit_c(lower(plan), Signature("K", program.inputs, program.outputs, const(0)), AVX2)


@given(program=PROGRAMS, data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_part_of_what_is_inferred_infers_the_rest(program: Program, data: st.DataObject) -> None:
    plan = plan_of(program, AVX2)
    whole = solution(program, plan)
    part = data.draw(st.lists(st.sampled_from(whole), unique_by=lambda note: (note.what, note.subject)))
    assert text_of(plan_of(replace(program, annotations=tuple(part)), AVX2)) == text_of(plan)


@pytest.mark.parametrize("seed", range(25))
def test_a_part_of_what_is_inferred_for_any_program_infers_the_rest(seed: int) -> None:
    """The random programs of `test_program_fuzz.py`: branches, loops, several products, tiles that data do not fill."""
    program, rng = random_tile_program(seed).program, np.random.default_rng(seed)
    plan = plan_of(program, AVX2)
    whole = solution(program, plan)
    wanted = text_of(plan)
    for _ in range(2):
        part = tuple(note for note in whole if rng.random() < 0.5)
        assert text_of(plan_of(replace(program, annotations=part), AVX2)) == wanted
    assert text_of(plan_of(replace(program, annotations=tuple(whole)), AVX2)) == wanted


@pytest.fixture(scope="module")
def run(object_cache: Path) -> Callable[..., np.ndarray]:
    def result(program: Program, *arrays: np.ndarray) -> np.ndarray:
        step = compile_program(program, Settings(given_cache=object_cache))
        names = tuple(tensor.name for tensor in (*program.inputs, *program.outputs))
        return JitKernel("kernel", names, names[-1:], (), (step,), {}, 1)(*arrays)

    return result


@pytest.mark.cpu
@pytest.mark.parametrize("seed", range(5))
def test_a_solution_of_one_s_own_and_a_part_of_it_give_equal_results(seed: int, run: Callable[..., Any]) -> None:
    """Vectors along other axes, tiles that no product reads in panels, another register tile, other task counts."""
    rng = np.random.default_rng(seed)
    flags = [bool(flag) for flag in rng.integers(0, 2, 4)]
    program = random_program((int(rng.choice([4, 5])), 24), flags[0], flags[1], flags[2], flags[3], "float32")
    notes = [
        Annotation("vector_axis", ",".join(axis.name for axis in stmt.axes), int(rng.integers(0, 2)))
        for stmt in statements(program.body)
        if isinstance(stmt, Parallel)
    ]
    notes += [Annotation("register_tile", "c", (3, 2)), Annotation("tasks", "", 2)]
    if flags[0]:  # b is computed, so that the product reads a copy and b itself may lie anyhow
        notes.append(Annotation("layout", "b", f"panels of axis {rng.integers(0, 2)}"))
    shapes = [(ROWS, DEPTH), (COLUMNS, DEPTH) if flags[1] else (DEPTH, COLUMNS)]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    wanted = interpret(program, dict(zip("AB", arrays, strict=True)))["C"]
    kept = [note for note in notes if rng.integers(0, 2)]
    for chosen in (notes, kept):
        found = run(replace(program, annotations=tuple(chosen)), *arrays)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def annotated(annotate: Callable[[Any, Any, Any], None]) -> Program:
    def kernel(A: T.Tensor((8, 8), "float32"), C: T.Tensor((8, 8), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((8, 8), "float32"), T.alloc_shared((8, 8), "float32")
            c = T.alloc_fragment((8, 8), "float32")
            annotate(a, b, c)
            T.copy(A, a)
            T.copy(A, b)
            T.gemm(a, b, c, clear=True)
            T.copy(c, C)

    return trace(kernel)


def test_a_layout_that_a_product_cannot_read_shows_both_places() -> None:
    with pytest.raises(InferenceError, match="b is used in two layouts") as caught:
        plan_of(annotated(lambda a, b, c: T.annotate_layout({b: T.rows()})), AVX2)
    text = str(caught.value)
    assert "T.annotate_layout({b: T.rows()})" in text
    assert "T.gemm(a, b, c, clear=True)" in text
    assert sum(set(line.strip()) == {"|", " ", "^"} for line in text.splitlines()) == 2


def test_two_layouts_of_one_tile_show_both_places() -> None:
    def annotate(a: Any, b: Any, c: Any) -> None:
        T.annotate_layout({c: T.rows()})
        T.annotate_layout({c: T.panels(1)})

    with pytest.raises(InferenceError, match="c is used in two layouts") as caught:
        plan_of(annotated(annotate), AVX2)
    assert "{c: T.rows()}" in str(caught.value)
    assert "{c: T.panels(1)}" in str(caught.value)


def test_register_tiles_that_differ_or_do_not_fit() -> None:
    def two(A: T.Tensor((8, 8), "float32"), C: T.Tensor((8, 8), "float32"), second: Any) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((8, 8), "float32"), T.alloc_shared((8, 8), "float32")
            c = T.alloc_fragment((8, 8), "float32")
            T.copy(A, a)
            T.copy(A, b)
            T.gemm(a, b, c, clear=True, register_tile=(4, 2))
            T.gemm(a, b, c, register_tile=second)
            T.copy(c, C)

    with pytest.raises(InferenceError, match="a kernel has one register tile") as caught:
        plan_of(trace(two, operands={"second": (3, 2)}), AVX2)
    assert "register_tile=(4, 2)" in str(caught.value)
    assert "register_tile=second" in str(caught.value)

    def large(a: Any, b: Any, c: Any) -> None:
        T.annotate_tasks(3)

    assert plan_of(annotated(large), AVX2).tasks == 3
    tile = Annotation("register_tile", "c", (8, 4))
    with pytest.raises(InferenceError, match="8 rows × 4 vectors takes 37 of 16 registers"):
        plan_of(replace(annotated(large), annotations=(tile,)), AVX2)


def test_task_counts_that_differ_show_both_places() -> None:
    def annotate(a: Any, b: Any, c: Any) -> None:
        T.annotate_tasks(2)
        T.annotate_tasks(4)

    with pytest.raises(InferenceError, match="threads take tasks in one way") as caught:
        plan_of(annotated(annotate), AVX2)
    assert "T.annotate_tasks(2)" in str(caught.value)
    assert "T.annotate_tasks(4)" in str(caught.value)


def test_a_vector_axis_that_is_not_there() -> None:
    def kernel(C: T.Tensor((8, 8), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i, j in T.Parallel(8, 8, vector_axis=2):
                C[i, j] = 0.0

    with pytest.raises(TileError, match=r"a T\.Parallel of 2 axes has no axis 2") as caught:
        trace(kernel)
    assert underlined(caught.value) == "T.Parallel(8, 8, vector_axis=2)"


@pytest.mark.parametrize("axis", [0, 1])
def test_a_vector_axis_is_honoured(axis: int) -> None:
    def kernel(C: T.Tensor((8, 8), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i, j in T.Parallel(8, 8, vector_axis=axis):
                C[i, j] = 1.0

    (chosen,) = plan_of(trace(kernel), AVX2).vector_axis.values()
    assert chosen is not None
    assert chosen.name == "ij"[axis]


def product(
    A: T.Tensor((ROWS, DEPTH), "float32"),  # type: ignore[valid-type]
    B: T.Tensor((DEPTH, COLUMNS), "float32"),  # type: ignore[valid-type]
    C: T.Tensor((ROWS, COLUMNS), "float32"),  # type: ignore[valid-type]
    block_m: int = T.auto,  # type: ignore[assignment]
    block_n: int = T.auto,  # type: ignore[assignment]
    block_k: int = T.auto,  # type: ignore[assignment]
) -> None:
    with T.Kernel(T.ceildiv(COLUMNS, block_n), T.ceildiv(ROWS, block_m)) as (n, m):
        a, b = T.alloc_shared((block_m, block_k), "float32"), T.alloc_shared((block_k, block_n), "float32")
        c = T.alloc_fragment((block_m, block_n), "float32")
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(DEPTH, block_k)):
            T.copy(A[m * block_m, k * block_k], a)
            T.copy(B[k * block_k, n * block_n], b)
            T.gemm(a, b, c)
        T.copy(c, C[m * block_m, n * block_n])


@pytest.mark.cpu
def test_any_of_the_extents_may_be_given(object_cache: Path) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    names = ("block_m", "block_n", "block_k")
    chosen = tilecore.compile(product, out_idx=2, cache=object_cache).config
    for solution_ in ({name: int(chosen[name]) for name in names}, {"block_m": 5, "block_n": 7, "block_k": 3}):
        for part_ in (names[:1], names[1:2], names[2:], names[::2], names):
            part = {name: solution_[name] for name in part_}
            kernel = tilecore.compile(product, out_idx=2, cache=object_cache, config=part)
            assert part.items() <= kernel.config.items()
            np.testing.assert_allclose(kernel(a, b), a.astype(np.float64) @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_m": 0}, "block_m is 0: expected a whole number of at least 1"),
        ({"block_m": 2.5}, "block_m is 2.5: expected a whole number"),
        ({"blok": 4}, r"config has blok; parameters of product that are T\.auto: block_m, block_n, block_k"),
    ],
)
def test_an_extent_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(tilecore.KernelError, match=message):
        tilecore.compile(product, out_idx=2, config=config)
