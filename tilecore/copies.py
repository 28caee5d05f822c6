"""A first pass: whole-tile copies between buffers become elementwise statements, so that later stages know one kind."""

from dataclasses import replace

from tilecore.contract.expr import Load, Var, cast
from tilecore.ir import Buffer, Copy, For, If, Parallel, Program, Stmt, Store, While, with_bodies


def expand_buffer_copies(program: Program) -> Program:
    """`program` with every copy of a whole buffer to a whole buffer of the same shape as a `Parallel`."""
    return replace(program, body=_body(program.body))


def _body(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    return tuple(_statement(stmt) for stmt in body)


def _statement(stmt: Stmt) -> Stmt:
    match stmt:
        case For() | While() | If():
            return with_bodies(stmt, _body)
        case Copy():
            source, target = stmt.src.source, stmt.dst.source
            whole = isinstance(source, Buffer) and isinstance(target, Buffer) and source.shape == target.shape
            if not whole or stmt.src.shape != source.shape or stmt.dst.shape != source.shape:
                return stmt
            assert isinstance(source, Buffer)
            assert isinstance(target, Buffer)
            axes = tuple(Var(f"{target.name}_{i}", extent=extent) for i, extent in enumerate(source.shape))
            return Parallel(axes, (Store(target, axes, cast(Load(source, axes), target.dtype), stmt.span),), stmt.span)
        case _:
            return stmt
