"""A pass: an accumulator that one product fills at once need not be cleared first."""

from dataclasses import replace

from tilecore.contract.expr import Const, const
from tilecore.graph import buffers_of
from tilecore.ir import Buffer, Fill, For, Gemm, Program, Stmt, statements


def start_from_products(program: Program) -> Program:
    """`program` with `c = 0; c += a · b` as `c = a · b` where nothing comes between, also across a loop of one trip."""
    return replace(program, body=_body(program.body))


def _body(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    done: list[Stmt] = []
    for position, stmt in enumerate(body):
        if isinstance(stmt, Fill) and stmt.value == const(0, stmt.dst.dtype):
            found = _first_user(body, position + 1, stmt.dst)
            changed = None if found is None else _cleared(body[found], stmt.dst)
            if found is not None and changed is not None:
                return (*done, *_body((*body[position + 1 : found], changed, *body[found + 1 :])))
        done.append(stmt)
    return tuple(done)


def _first_user(body: tuple[Stmt, ...], start: int, buffer: Buffer) -> int | None:
    return next((i for i in range(start, len(body)) if _uses(body[i], buffer)), None)


def _uses(stmt: Stmt, buffer: Buffer) -> bool:
    return any(buffer in group for inner in statements((stmt,)) for group in buffers_of(inner))


def _cleared(stmt: Stmt, buffer: Buffer) -> Stmt | None:
    """`stmt` with its product into `buffer` overwriting it, if that comes first and runs exactly once."""
    match stmt:
        case Gemm() if stmt.c == buffer and not stmt.clear:
            return replace(stmt, clear=True)
        case For() if stmt.var.extent is not None and isinstance(stmt.var.extent - stmt.start, Const):
            if stmt.var.extent - stmt.start != const(1):
                return None
            first = _first_user(stmt.body, 0, buffer)
            changed = None if first is None else _cleared(stmt.body[first], buffer)
            if first is None or changed is None:
                return None
            return replace(stmt, body=(*stmt.body[:first], changed, *stmt.body[first + 1 :]))
        case _:
            return None
