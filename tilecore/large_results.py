"""Results that no cache will hold: stored past the caches, while what is read next is asked for.

Comes in: a loop program and the bytes of results from which on this pays. Goes out: the same, in which vector loops
that store results run in a second form when a call's results are that large. A plain store of a line that no cache has
reads it first and drives out something else; one past the caches is a third less traffic, also for a kernel that reads
the results next, since it would not find them either. Programs with products are left alone: they wait for others.
"""

from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Var, binary, const, loads, substitute, variables
from tilecore.graph import split_affine
from tilecore.loops import (
    Blocks,
    Branch,
    ByteStream,
    FewRows,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Mma,
    Put,
    Repeat,
    Stream,
    Touch,
    VectorLoop,
    loop_statements,
)

SHARE = 6  # of the last cache: what results may take of it, beside as much that is read and whatever others keep there
PRODUCTS = Mma | FewRows | Stream | ByteStream | Blocks
AHEAD_BYTES = 4096  # how far before its use a line is asked for


def store_past_caches(program: LoopProgram, room: int) -> LoopProgram:
    """`program` with a second form of the loops that store results, for calls with results of `room` bytes or more."""
    if any(isinstance(stmt, PRODUCTS) for stmt in loop_statements(program.body)):
        return program
    size: Expr = const(0)
    for memory in program.memories:
        if memory.kind == "output":
            size = size + memory.size * (memory.dtype.bits // 8)
    large = binary("ge", size, const(room))
    return program if large == const(False, DType.BOOL) else replace(program, body=_marked(program.body, large))


def goes_past(put: Put, loop: VectorLoop) -> bool:
    """Whether `put` stores whole vectors of floats side by side to a result."""
    plain = put.guard is None and not put.update and put.odd is None
    step, rest = split_affine(put.offset, loop.var)
    whole = rest is not None and step == const(1)
    return plain and whole and put.memory.kind == "output" and put.memory.dtype is DType.F32


def _marked(body: tuple[LoopStmt, ...], large: Expr) -> tuple[LoopStmt, ...]:
    done: list[LoopStmt] = []
    for stmt in body:
        match stmt:
            case VectorLoop() if any(isinstance(part, Put) and goes_past(part, stmt) for part in stmt.body):
                alike = [other for other in body if isinstance(other, VectorLoop) and other.stop == stmt.stop]
                stmt = replace(stmt, large=large, ahead=_ahead(alike, stmt.var))
            case Loop() | Repeat():
                stmt = replace(stmt, body=_marked(stmt.body, large))
            case Branch():
                stmt = replace(stmt, then=_marked(stmt.then, large), otherwise=_marked(stmt.otherwise, large))
            case _:
                pass
        done.append(stmt)
    return tuple(done)


def _ahead(loops: list[VectorLoop], var: Var) -> tuple[Touch, ...]:
    """Lines of inputs, over `var`, that loops over one row walk along and that are others in the next row."""
    found: list[Touch] = []
    for loop in loops:
        for load in (load for part in loop.body for load in loads(part.value)):
            memory, offset = load.source, load.index[0]
            if not isinstance(memory, Memory) or memory.kind != "input" or loads(offset):
                continue
            step, rest = split_affine(offset, loop.var)
            if step != const(1) or rest is None or not variables(rest):
                continue
            ahead = substitute(offset, {loop.var: var}) + AHEAD_BYTES * 8 // memory.dtype.bits
            beside = (touch.offset - ahead for touch in found if touch.memory == memory)
            if not any(isinstance(distance, Const) for distance in beside):  # else the same lines, sooner or later
                found.append(Touch(memory, ahead, write=False))
    return tuple(found)
