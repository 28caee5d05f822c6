"""Lines touched ahead: the next task's queries and this task's output, each where it lies; nothing through tables."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from tile_specs import AttentionForm, attention_case

from tilecore.compile import kernel_for, plan_of, prepare
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, loads, substitute
from tilecore.contract.spec import AttentionSpec, Tensor
from tilecore.loops import Let, Loop, LoopProgram, LoopStmt, Memory, Put, Touch, VectorLoop, loop_statements
from tilecore.lower import lower
from tilecore.target import target_named
from tilecore.trace import trace


def attention() -> AttentionSpec:
    spec = attention_case(AttentionForm(), np.random.default_rng(0)).spec
    assert isinstance(spec, AttentionSpec)
    return spec


def lowered(spec: AttentionSpec) -> LoopProgram:
    packed, _ = prepare(spec)
    function, operands = kernel_for(packed)
    extents = {"block_m": 6, "block_n": 32}
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
