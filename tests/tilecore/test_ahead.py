"""Lines touched ahead: the next task's queries and this task's output, each where it lies; nothing through tables."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tile_specs import AttentionForm, attention_case

import tilecore
from tilecore import language as T
from tilecore.compile import kernel_for, plan_of, prepare
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, const, loads, substitute
from tilecore.contract.spec import AttentionSpec, Tensor
from tilecore.loops import Let, Loop, LoopProgram, LoopStmt, Memory, Mma, Put, Touch, VectorLoop, loop_statements
from tilecore.lower import lower
from tilecore.target import target_named
from tilecore.trace import trace


def attention() -> AttentionSpec:
    spec = attention_case(AttentionForm(), np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    return spec


def lowered(spec: AttentionSpec, block_m: int = 6) -> LoopProgram:
    packed, _ = prepare(spec)
    function, operands = kernel_for(packed)
    extents = {"block_m": block_m, "block_n": 32}
    program = trace(function, inputs=packed.inputs, operands=operands, extents=extents)
    return lower(plan_of(program, target_named("x86-64-v3")))


def touches(body: tuple[LoopStmt, ...], *, write: bool) -> list[tuple[Touch, Var]]:
    """Every touch, with the variable that steps over lines."""
    nests = [stmt for stmt in loop_statements(body) if isinstance(stmt, Loop) and stmt.step != 1]
    found = [(part, nest.var) for nest in nests for part in nest.body if isinstance(part, Touch)]
    return [(touch, line) for touch, line in found if touch.write is write]


def walked(body: tuple[LoopStmt, ...]) -> Iterator[tuple[Memory, Expr, Var]]:
    """What vector loops load and store: memory, offset and the loop's variable."""
    for stmt in loop_statements(body):
        if not isinstance(stmt, VectorLoop):
            continue
        for part in stmt.body:
            for load in loads(part.value) if isinstance(part, Put | Let) else ():
                assert isinstance(load.source, Memory)
                yield load.source, load.index[0], stmt.var
            if isinstance(part, Put):
                yield part.memory, part.offset, stmt.var


def test_the_next_rows_of_queries_and_these_rows_of_the_output_are_touched() -> None:
    program = lowered(attention())
    task = program.grid[0]
    for write, kind, at in ((False, "input", task + 1), (True, "output", task)):
        ((touch, line),) = touches(program.body, write=write)
        places = [(offset, var) for memory, offset, var in walked(program.body) if memory == touch.memory]
        assert touch.memory.kind == kind
        assert touch.offset in [substitute(offset, {var: line, task: at}) for offset, var in places]


def test_what_a_table_points_to_for_another_task_is_not_read() -> None:
    spec = attention()
    query = spec.q.axes[2]
    table = Tensor("table", DType.I64, (spec.inputs[0].shape[1],))
    value = substitute(spec.q.value, {query: Load(table, (query,))})
    program = lowered(replace(spec, inputs=(*spec.inputs, table), q=replace(spec.q, value=value)))
    assert touches(program.body, write=False) == []
    assert len(touches(program.body, write=True)) == 1


def test_rows_beside_scores_are_asked_for_a_block_before_they_are_read() -> None:
    spec = attention_case(AttentionForm(mask="bias"), np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    program = lowered(spec, block_m := 48)
    steps = next(
        s for s in program.body if isinstance(s, Loop) and any(isinstance(p, Mma) for p in loop_statements((s,)))
    )
    blocks = next(stmt for stmt in steps.body if isinstance(stmt, Loop) and stmt.step != 1)
    first, later = (stmt for stmt in blocks.body if isinstance(stmt, Loop))
    (asking,) = [part for part in later.body if isinstance(part, VectorLoop) and part.ahead]
    (touch,) = asking.ahead
    assert touch.memory.position == 3  # the bias
    reads = [(memory, offset, column) for memory, offset, column in walked(first.body) if memory == touch.memory]
    read, column = next((offset, column) for _, offset, column in reads)
    task: dict[Expr, Expr] = dict.fromkeys(program.grid, const(0))
    sizes: dict[Expr, Expr] = {Sym("B"): const(1), Sym("Q"): const(100), Sym("K"): const(100)}

    def at(offset: Expr, row: int, step: int, column: Var) -> Expr:
        placed = substitute(offset, sizes)
        return substitute(placed, {**task, first.var: const(row), steps.var: const(step), column: const(0)})

    for row in range(block_m):
        wanted = (row + 16, 1) if row + 16 < block_m else (row + 16 - block_m, 2)
        assert at(touch.offset, row, 1, asking.var) == at(read, *wanted, column)


def test_what_all_rows_share_is_not_asked_for_again() -> None:
    spec = attention_case(AttentionForm(mask="padding"), np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    assert not [s for s in loop_statements(lowered(spec, 48).body) if isinstance(s, VectorLoop) and s.ahead]


TASKS, ROWS, DEPTH = 4, 8, 16


def counted_rows(cache: Path) -> Any:
    """As many rows of every block as `counts` has there, times a matrix."""

    tall, square = T.Tensor((TASKS * ROWS, DEPTH), "float32"), T.Tensor((DEPTH, DEPTH), "float32")
    table = T.Tensor((TASKS,), "int64")

    def kernel(A: tall, counts: table, B: square, C: tall) -> None:  # type: ignore[valid-type]
        with T.Kernel(TASKS) as m:
            a, b = T.alloc_shared((ROWS, DEPTH), "float32"), T.alloc_shared((DEPTH, DEPTH), "float32")
            c = T.alloc_fragment((ROWS, DEPTH), "float32")
            T.clear(a)
            for i in T.serial(T.min(ROWS, counts[m])):
                for j in T.Parallel(DEPTH):
                    a[i, j] = A[m * ROWS + i, j]
            T.copy(B, b)
            T.gemm(a, b, c, clear=True)
            T.copy(c, C[m * ROWS, 0])

    return tilecore.jit(kernel, out_idx=-1, cache=cache)


def before_a_guard(values: np.ndarray) -> np.ndarray:
    """A copy of `values` that ends where memory that may not be read begins."""
    page = mmap.PAGESIZE
    room = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    found = np.frombuffer(room, values.dtype, values.size, page - values.nbytes)
    found[:] = values
    return found


def multiply_counted_rows(cache: str) -> None:
    """Run the kernel with its table at the end of a page, and compare; for a process of its own."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((n, DEPTH)).astype(np.float32) for n in (TASKS * ROWS, DEPTH))
    counts = np.array([3, 0, 8, 5])
    kept = np.arange(ROWS) < counts[:, None]
    wanted = np.where(kept.reshape(-1, 1), a, 0).astype(np.float64) @ b
    made = counted_rows(Path(cache))(a, before_a_guard(counts), b)
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-5)


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mprotect"), reason="memory is guarded by mprotect")
def test_a_table_of_numbers_of_rows_is_not_read_past_its_end(object_cache: Path) -> None:
    script = f"import test_ahead; test_ahead.multiply_counted_rows({str(object_cache)!r})"
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"returned {ran.returncode}: {ran.stderr}"
