"""The one text form of a tile program: deterministic, complete, for goldens, dumps and eyes.

Comes in: a program. Goes out: text; equal programs print alike.
"""

from collections.abc import Iterator

from tilecore.contract.expr import Const, Expr
from tilecore.contract.spec import Place, Tensor, View
from tilecore.ir import (
    Assert,
    Buffer,
    Copy,
    CumSum,
    Fill,
    For,
    Gemm,
    If,
    Join,
    Parallel,
    Print,
    Program,
    Reduce,
    Stmt,
    Store,
    Tile,
    While,
)


def print_program(program: Program) -> str:
    """`program` as text, one statement a line."""
    return "\n".join(_lines(program)) + "\n"


def print_statement(stmt: Stmt) -> str:
    """One statement, with its body if it has one."""
    return "\n".join(_statement(stmt))


def _lines(program: Program) -> Iterator[str]:
    yield f"kernel {program.name}({_list(program.inputs)}) -> ({_list(program.outputs)})"
    if program.tunables:
        yield f"  tunable {_list(program.tunables)}"
    for view in program.views:
        yield f"  view {view.name}[{_axes(view)}]: {view.dtype} = {view.value}"
    for place in program.places:
        yield f"  place {place.name}[{_axes(place)}]: {place.dtype} -> {place.name}[{_list(place.index)}]"
    for buffer in program.buffers:
        yield f"  {buffer.scope} {buffer.name}: {buffer.dtype}[{_list(buffer.shape)}]"
    threads = "" if program.threads is None else f" threads={program.threads}"
    yield f"  grid {', '.join(f'{axis.name} < {axis.extent}' for axis in program.grid)}{threads}"
    for note in program.annotations:
        yield f"    annotate {note.what} {note.subject}{' ' if note.subject else ''}= {note.value}"
    for stmt in program.body:
        yield from ("    " + line for line in _statement(stmt))


def _statement(stmt: Stmt) -> Iterator[str]:
    match stmt:
        case Copy():
            yield f"copy {_tile(stmt.dst)} = {_tile(stmt.src)}"
        case Fill():
            yield f"fill {stmt.dst.name} = {stmt.value}"
        case Gemm():
            a = stmt.a.name + ("ᵀ" if stmt.transpose_a else "")
            b = stmt.b.name + ("ᵀ" if stmt.transpose_b else "")
            licence = f", {stmt.a.name} in bytes by {stmt.byte_block}" if stmt.byte_block else ""
            yield f"gemm {stmt.c.name} {'=' if stmt.clear else '+='} {a} · {b}{licence}"
        case Reduce():
            join = "=" if stmt.clear else "with="
            yield f"reduce {stmt.dst.name} {join} {stmt.kind}({stmt.src.name}, axis={stmt.axis})"
        case Join():
            yield f"join {stmt.buffer.name} = {stmt.kind} over {stmt.axis.name}"
        case CumSum():
            way = ", reverse" if stmt.reverse else ""
            yield f"cumsum {stmt.dst.name} = {stmt.src.name}, axis={stmt.axis}{way}"
        case Store():
            join = f"{stmt.update}=" if stmt.update else "="
            guard = "" if stmt.guard is None else f" if {stmt.guard}"
            yield f"{stmt.target.name}[{_list(stmt.index)}] {join} {stmt.value}{guard}"
        case Parallel():
            yield f"parallel {', '.join(f'{axis.name} < {axis.extent}' for axis in stmt.axes)}"
            yield from _block(stmt.body)
        case For():
            stages = f" stages={stmt.stages}" if stmt.kind == "pipelined" else ""
            yield f"for {stmt.var.name} in {stmt.start} .. {stmt.var.extent} {stmt.kind}{stages}"
            yield from _block(stmt.body)
        case While():
            yield f"while {stmt.condition}"
            yield from _block(stmt.body)
        case Print():
            what = stmt.values.name if isinstance(stmt.values, Buffer) else _list(stmt.values)
            yield f"print {stmt.message!r} {what}".rstrip()
        case Assert():
            yield f"assert {stmt.condition}, {stmt.message!r}"
        case If():
            yield f"if {stmt.condition}"
            yield from _block(stmt.then)
            if stmt.otherwise:
                yield "else"
                yield from _block(stmt.otherwise)


def _block(body: tuple[Stmt, ...]) -> Iterator[str]:
    for stmt in body:
        yield from ("  " + line for line in _statement(stmt))


def _tile(tile: Tile) -> str:
    zero = all(isinstance(start, Const) and start.value == 0 for start in tile.origin)
    if isinstance(tile.source, Buffer) and zero and tile.shape == tile.source.shape:
        return tile.source.name
    parts = [
        str(start) if size == Const(1, start.dtype) else f"{start} : +{size}"
        for start, size in zip(tile.origin, tile.shape, strict=True)
    ]
    return f"{tile.source.name}[{', '.join(parts)}]"


def _axes(operand: View | Place) -> str:
    return ", ".join(f"{axis.name} < {axis.extent}" for axis in operand.axes)


def _list(items: tuple[Expr | Tensor, ...]) -> str:
    return ", ".join(map(str, items))
