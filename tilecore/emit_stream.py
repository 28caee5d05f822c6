"""Products whose right operand is computed as it is used (`loops.Stream`, `loops.ByteStream`), as C.

Per panel of columns, four, two or one rows at a time: sums over a group of rows of b stay in registers, several of them
so that no multiply-add waits for the one before it, and join the result with the group's factor. Sums of levels are
made by the verbs of `tile_bytes.h`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tilecore.contract.expr import Const, Expr, Load, Var, binary, const, loads, substitute
from tilecore.contract.panel import PANEL
from tilecore.emit_expr import Expressions, Lanes, Scope, memory_name
from tilecore.loops import ByteStream, Memory, Operand, RoundRows, Stream
from tilecore.target import Target

Names = tuple[tuple[str, ...], ...]  # of registers, by row and vector

ROWS = (4, 2, 1)  # that share the elements of b, most first
SUMS = 8  # multiply-adds in flight
AHEAD = 8192  # bytes from what is read to what is asked for: processors' own prefetchers stop at the end of a page
LINE = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True)
class _Registers:
    """The registers of one block: `rows` of c, one panel wide."""

    rows: int
    vectors: int
    unroll: int  # rows of b per turn
    totals: tuple[tuple[str, ...], ...]  # by row and vector
    sums: tuple[tuple[tuple[str, ...], ...], ...]  # by row, vector and share of the turn's rows of b


def emit_stream(printer: Expressions, stream: Stream, target: Target) -> None:
    """Append the statement's lines to the innermost scope."""
    _panels(printer, stream, lambda count, first: _rows(printer, stream, target, count, first))


def emit_byte_stream(printer: Expressions, stream: ByteStream, target: Target) -> None:
    """Append the statement's lines to the innermost scope."""
    fused = printer.fresh("fused")
    printer.line(f"const int {fused} = tile_fused_levels();")
    _panels(printer, stream, lambda count, first: _byte_rows(printer, stream, target, fused, (count, first)))


def emit_rounding(printer: Expressions, stmt: RoundRows) -> None:
    """Append the statement's line to the innermost scope."""
    a, levels, scales = (f"{_address(printer, part)}, {printer.scalar(part.row)}" for part in (stmt.a, *stmt.made))
    sizes = f"{printer.scalar(stmt.rows)}, {printer.scalar(stmt.depth)}, {stmt.block}"
    where = f" // {stmt.span.file.rpartition('/')[2]}:{stmt.span.line}" if stmt.span else ""
    verb = f"round_rows_{stmt.levels.memory.dtype}"
    printer.line(f"{verb}(tile_fused_levels(), {a}, {sizes}, {levels}, {scales});{where}")


def _address(printer: Expressions, part: Operand) -> str:
    return f"{memory_name(part.memory)} + {printer.scalar(part.offset)}"


def _panels(printer: Expressions, stream: Stream | ByteStream, rows_of: Callable[[int, Var], None]) -> None:
    """Loops over panels and over the rows in each, so many at a time as `rows_of` is told, from a first one on."""
    rows, columns = printer.scalar(stream.rows), printer.scalar((stream.columns + (PANEL - 1)) // PANEL)
    panel, row = printer.fresh("panel_"), printer.fresh("row_")
    where = f" // {stream.span.file.rpartition('/')[2]}:{stream.span.line}" if stream.span else ""
    header = f"for (int64_t {panel} = 0; {panel} < {columns}; {panel}++)"
    with _block(printer, header, {stream.panel: panel}):
        printer.line(f"int64_t {row} = 0;{where}")
        first = Var("row")
        for count in ROWS:
            with _block(printer, f"for (; {row} + {count} <= {rows}; {row} += {count})", {first: row}):
                rows_of(count, first)


@contextmanager
def _block(printer: Expressions, header: str, bound: dict[Var, str]) -> Generator[None]:
    """A block of C; what its lines need from around it is printed before the header."""
    printer.scopes.append(Scope(variables=bound))
    yield
    lines = printer.scopes.pop().lines
    printer.line(f"{header} {{")
    printer.scopes[-1].lines.extend(f"    {line}" for line in lines)
    printer.line("}")


def _rows(printer: Expressions, stream: Stream, target: Target, count: int, first: Var) -> None:
    vectors = PANEL // target.lanes
    unroll = max(SUMS // vectors, 4)
    shares = max(1, SUMS // (vectors * count))
    totals = tuple(tuple(printer.fresh("total") for _ in range(vectors)) for _ in range(count))
    sums = tuple(
        tuple(tuple(printer.fresh("sum") for _ in range(shares)) for _ in range(vectors)) for _ in range(count)
    )
    block = _Registers(count, vectors, unroll, totals, sums)
    lanes = {Var(f"lane{v}"): str(v * target.lanes) for v in range(vectors)}
    printer.scopes[-1].variables |= lanes
    places = _begin_totals(printer, stream, target, first, totals)
    group = printer.fresh("group_")
    size: Expr = stream.depth if stream.size is None else const(stream.size)
    groups = const(1) if stream.size is None else (stream.depth + (size - 1)) // size
    header = f"for (int64_t {group} = 0; {group} < {printer.scalar(groups)}; {group}++)"
    with _block(printer, header, {stream.group: group}):
        _group(printer, stream, block, size, first, tuple(lanes))
    _end_totals(printer, totals, places)


def _begin_totals(
    printer: Expressions, stream: Stream | ByteStream, target: Target, first: Var, totals: Names
) -> list[list[str]]:
    """Declare the totals of some rows; where in c they are stored."""
    c = stream.c
    places = [
        [f"{memory_name(c.memory)} + {printer.scalar(at)} + {v * target.lanes}" for v in range(len(totals[0]))]
        for at in (c.offset + (first + r) * c.row + stream.panel * PANEL for r in range(len(totals)))
    ]
    for names, addresses in zip(totals, places, strict=True):
        for name, address in zip(names, addresses, strict=True):
            printer.line(f"f32v {name} = {'{0}' if stream.clear else f'load_f32({address})'};")
    return places


def _end_totals(printer: Expressions, totals: Names, places: list[list[str]]) -> None:
    for names, addresses in zip(totals, places, strict=True):
        for name, address in zip(names, addresses, strict=True):
            printer.line(f"store_f32({address}, {name});")


def _byte_rows(
    printer: Expressions, stream: ByteStream, target: Target, fused: str, rows: tuple[int, Var]
) -> None:  # fmt: skip
    """So many rows from a first one on: sums of a group as integers, then scaled and added to the totals."""
    (count, first), vectors = rows, PANEL // target.lanes
    totals = tuple(tuple(printer.fresh("total") for _ in range(vectors)) for _ in range(count))
    lanes = {Var(f"lane{v}"): str(v * target.lanes) for v in range(vectors)}
    printer.scopes[-1].variables |= lanes
    places = _begin_totals(printer, stream, target, first, totals)
    group, sums = printer.fresh("group_"), printer.fresh("sums")
    header = f"for (int64_t {group} = 0; {group} < {printer.scalar(stream.groups)}; {group}++)"
    with _block(printer, header, {stream.group: group}):
        levels = replace(stream.levels, offset=first * stream.levels.row + stream.group * stream.block)
        _ask_ahead(printer, stream)
        printer.line(f"i32v {sums}[{count * vectors}];")
        left = f"{memory_name(levels.memory)}, {printer.scalar(levels.offset)}, {printer.scalar(levels.row)}"
        right = f"{memory_name(stream.b)} + {printer.scalar(stream.offset)}, {stream.block}"
        printer.line(f"dot_levels_{stream.bits}({fused}, {count}, {left}, {right}, {sums});")
        scaled = [stream.scales.offset + (first + r) * stream.scales.row + stream.group * 2 for r in range(count)]
        pairs = [[Load(stream.scales.memory, (at + part,)) for part in (0, 1)] for at in scaled]
        for v, lane in enumerate(lanes):
            factor, rest = (
                None if part is None else printer.vector(substitute(part, {stream.lane: lane}), Lanes(lane))
                for part in (stream.factor, stream.rest)
            )
            for r, (scale, total) in enumerate(pairs):
                value = f"__builtin_convertvector({sums}[{r * vectors + v}], f32v)"
                if rest is not None:
                    value = f"({value} + {rest} * {printer.vector(total, Lanes(lane))})"
                left = printer.vector(scale, Lanes(lane))
                printer.line(f"{totals[r][v]} += {left if factor is None else f'({factor} * {left})'} * {value};")
    _end_totals(printer, totals, places)


def _ask_ahead(printer: Expressions, stream: ByteStream) -> None:
    """Ask for levels of a later group, and for what is read of it once: bytes of zero points hide from prefetchers."""
    size = stream.block * stream.bits // 8 * PANEL
    for line in range(AHEAD, AHEAD + size, LINE):
        printer.line(f"__builtin_prefetch({memory_name(stream.b)} + {printer.scalar(stream.offset)} + {line});")
    later: dict[Expr, Expr] = {stream.group: stream.group + AHEAD // size, stream.lane: const(0)}
    shared = [loads(part) for part in (stream.factor, stream.rest) if part is not None]
    for load in dict.fromkeys(load for part in shared for load in part):
        assert isinstance(load.source, Memory)
        at = printer.scalar(substitute(load.index[0], later))
        printer.line(f"__builtin_prefetch({memory_name(load.source)} + {at});")


def _group(
    printer: Expressions, stream: Stream, block: _Registers, size: Expr, first: Var, lanes: tuple[Var, ...]
) -> None:
    """The sums of one group, and their share of the totals."""
    for names in block.sums:
        for name in (name for shares in names for name in shares):
            printer.line(f"f32v {name} = {{0}};")
    unroll = block.unroll
    count = size if stream.size is None else binary("min", size, stream.depth - stream.group * size)
    whole = binary("mod", stream.depth, const(unroll)) == const(0) and binary("mod", size, const(unroll)) == const(0)
    if whole and isinstance(size, Const) and binary("mod", stream.depth, size) == const(0):
        count = size
    stop, step = printer.scalar(count), printer.fresh("k_")
    base = const(0) if stream.size is None else stream.group * size
    turn = Var("turn", extent=size // unroll)
    printer.line(f"int64_t {step} = 0;")
    with _block(printer, f"for (; {step} * {unroll} + {unroll} <= {stop}; {step}++)", {turn: step}):
        for u in range(unroll):
            _element(printer, stream, block, (turn * unroll + u, base), (u, first), lanes)
    if not whole:
        last = Var("last", extent=size)
        name = printer.fresh("k_")
        header = f"for (int64_t {name} = {step} * {unroll}; {name} < {stop}; {name}++)"
        with _block(printer, header, {last: name}):
            _element(printer, stream, block, (last, base), (0, first), lanes)
    for v, lane in enumerate(lanes):
        factor = None
        if stream.factor is not None:
            factor = printer.vector(substitute(stream.factor, {stream.lane: lane}), Lanes(lane))
        for r in range(block.rows):
            joined = " + ".join(block.sums[r][v])
            printer.line(f"{block.totals[r][v]} += {f'{factor} * ({joined})' if factor else joined};")


def _element(
    printer: Expressions, stream: Stream, block: _Registers, at: tuple[Expr, Expr], turn: tuple[int, Var],
    lanes: tuple[Var, ...],
) -> None:  # fmt: skip
    """One row of b, at position `at[0]` of the group that starts at `at[1]`, times the block's elements of a."""
    (position, base), (number, first), a = at, turn, stream.a
    for v, lane in enumerate(lanes):
        value = printer.vector(substitute(stream.value, {stream.position: position, stream.lane: lane}), Lanes(lane))
        for r in range(block.rows):
            left = Load(a.memory, (a.offset + (first + r) * a.row + (base + position) * a.column,))
            shares = block.sums[r][v]
            printer.line(f"{shares[number % len(shares)]} += {printer.vector(left, Lanes(lane))} * {value};")
