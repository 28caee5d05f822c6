"""Products in tile registers whose results are finished block by block, while the next block is multiplied.

Comes in: a loop program. Goes out: the same, where products over their whole depth that only one pointwise loop reads
have become `Blocks`. A tile register's products need hardly any of a core's instruction slots, which the pointwise work
takes meanwhile, and its operands are still in the first cache. Few rows keep the old form, which suits them better.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, binary, const, loads, rewrite, substitute
from tilecore.contract.panel import PANEL
from tilecore.loops import (
    Blocks,
    Branch,
    Let,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Mma,
    Once,
    Operand,
    Put,
    Repeat,
    VectorLoop,
    loop_statements,
)
from tilecore.target import BLOCK, FEW_TILE_ROWS, Target


def finish_in_blocks(program: LoopProgram, target: Target) -> LoopProgram:
    """`program` for a target with tile registers, itself for others."""
    return replace(program, body=_body(program.body, program)) if target.amx else program


def _body(body: tuple[LoopStmt, ...], program: LoopProgram) -> tuple[LoopStmt, ...]:
    done: list[LoopStmt] = []
    position = 0
    while position < len(body):
        blocks = finished_products(body[position:], program, _suits)
        if blocks is not None:
            plain = body[position : position + len(blocks.products) + 1]
            done.append(_unless_few(blocks.products[0].rows, blocks, plain))
            position += len(plain)
            continue
        done.append(_inside(body[position], program))
        position += 1
    return tuple(done)


def finished_products(body: tuple[LoopStmt, ...], program: LoopProgram, suits: Callable[[Mma], bool]) -> Blocks | None:
    """The products at the start of `body` that suit, with the loop after them that finishes all of their results; None
    where there are none, or it does something else."""
    products = _products(body, suits)
    after = body[len(products)] if len(products) < len(body) else None
    return _blocks(products, after, program) if products and isinstance(after, Loop) else None


def _inside(stmt: LoopStmt, program: LoopProgram) -> LoopStmt:
    match stmt:
        case Loop() | Repeat() | Once():
            return replace(stmt, body=_body(stmt.body, program))
        case Branch():
            return replace(stmt, then=_body(stmt.then, program), otherwise=_body(stmt.otherwise, program))
        case _:
            return stmt


def _unless_few(rows: Expr, blocks: Blocks, plain: tuple[LoopStmt, ...]) -> LoopStmt:
    if isinstance(rows, Const) and rows.value > FEW_TILE_ROWS:
        return blocks
    return Branch(binary("le", rows, const(FEW_TILE_ROWS)), plain, (blocks,))


def _products(body: tuple[LoopStmt, ...], suits: Callable[[Mma], bool]) -> tuple[Mma, ...]:
    """The products at the start of `body` that suit, of one left operand and of one shape."""
    found: list[Mma] = []
    for stmt in body:
        if not isinstance(stmt, Mma) or not suits(stmt) or (found and not _alike(stmt, found[0])):
            break
        found.append(stmt)
    return tuple(found)


def _suits(mma: Mma) -> bool:
    """Operands in bf16; a left one in scratch, whose rows are padded to whole registers; nothing past whole blocks."""
    narrow = mma.a.memory.dtype is DType.BF16 and mma.b.memory.dtype is DType.BF16 and mma.b.pairs
    whole = isinstance(mma.depth, Const) and mma.depth.value % BLOCK == 0 and _divides(mma.columns, PANEL)
    return narrow and whole and mma.clear and mma.a.memory.kind == "scratch" and mma.a.column == const(1)


def _alike(one: Mma, other: Mma) -> bool:
    return (one.a, one.rows, one.columns, one.depth) == (other.a, other.rows, other.columns, other.depth)


def _divides(extent: Expr, count: int) -> bool:
    """Whether an extent is proved to be a multiple; a minimum is, if both of its sides are."""
    if isinstance(extent, Op) and extent.name == "min":
        return all(_divides(side, count) for side in extent.args)
    return binary("mod", extent, const(count)) == const(0)


def _blocks(products: tuple[Mma, ...], after: Loop, program: LoopProgram) -> Blocks | None:
    """The products with `after`, which finishes their results, or None where it is not a pointwise loop over them."""
    first = products[0]
    if after.start != const(0) or after.stop != first.rows or after.step != 1 or len(after.body) != 1:
        return None
    inner = after.body[0]
    if not isinstance(inner, VectorLoop) or inner.stop != first.columns:
        return None
    body = [part for part in inner.body if isinstance(part, Let) or (isinstance(part, Put) and _is_plain(part))]
    if len(body) < len(inner.body):
        return None
    origin = Var("block_row"), Var("block_column")
    row, column = Var("row_of_block"), Var("column_of_block")
    results = tuple(
        Memory(f"results{number}", mma.c.memory.dtype, const(BLOCK * BLOCK), "scratch")
        for number, mma in enumerate(products)
    )
    there: dict[Expr, Expr] = {}
    for mma, memory in zip(products, results, strict=True):
        place = Load(mma.c.memory, (mma.c.offset + after.var * mma.c.row + inner.var,))
        there[place] = Load(memory, (row * BLOCK + column,))
    sums = {mma.c.memory for mma in products}
    if len(sums) < len(products) or not _read_here_only(products, set(there), after, program):
        return None

    def moved(value: Expr) -> Expr:
        swapped = rewrite(value, there.get)
        return substitute(swapped, {after.var: origin[0] + row, inner.var: origin[1] + column})

    def part_of(part: Let | Put) -> Let | Put:
        if isinstance(part, Let):
            return replace(part, value=moved(part.value))
        return replace(part, value=moved(part.value), offset=moved(part.offset))

    parts = tuple(part_of(part) for part in body)
    return Blocks(products, results, origin, row, column, parts, after.span)


def _is_plain(put: Put) -> bool:
    """Whether points may be stored in any order, before other blocks are multiplied."""
    return put.memory.kind == "output" and put.guard is None and not put.update and put.odd is None


def _read_here_only(products: tuple[Mma, ...], known: set[Expr], after: Loop, program: LoopProgram) -> bool:
    """Whether the results of `products` are read at `known` places alone, by `after`, and written by nothing else."""
    sums, own = {mma.c.memory for mma in products}, set(map(id, loop_statements((after,))))
    for stmt in loop_statements(program.body):
        if stmt in products:
            continue
        touched = {part.memory for part in _fields(stmt) if isinstance(part, Operand)}
        touched |= {stmt.memory} if isinstance(stmt, Put) else set()
        if not sums.isdisjoint(touched):
            return False
        values = [part for part in _fields(stmt) if isinstance(part, Const | Op | Load | Var)]
        read = {load for value in values for load in loads(value) if load.source in sums}
        if read and (id(stmt) not in own or not read <= known):
            return False
    return True


def _fields(stmt: LoopStmt) -> Iterator[object]:
    """What a statement itself is made of; what stands inside it are statements of their own."""
    for each in fields(stmt):
        value = getattr(stmt, each.name)
        yield from value if isinstance(value, tuple) else (value,)
