"""Products of packed levels by a left operand that may be rounded to bytes: sums of integers, block by block.

Comes in: streams whose products have that licence (`Gemm.byte_block`). Goes out: the statements that round the rows of
a and multiply levels by levels; none where a stream has another form. No spelling of levels is looked for: what is done
to a stored byte is evaluated for every byte and every position in a block, and its offset for every row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Source,
    Var,
    const,
    loads,
    rewrite,
    substitute,
    unary,
    variables,
)
from tilecore.contract.panel import PANEL
from tilecore.graph import split_affine
from tilecore.loops import ByteStream, Memory, Operand, RoundRows, Stream
from tilecore.streams import GROUP

LEAST_BLOCK = 16  # and a multiple of it: whole vectors of every instruction set
LARGEST_BLOCK = 512  # sums of 16-bit levels times bytes are exact in 32 bits, and converted exactly to f32


@dataclass(frozen=True, slots=True)
class _Levels:
    """What a stream's elements are: `value` of the byte that `stored` loads, plus `rest`."""

    value: Expr
    stored: Load
    rest: Expr | None


def in_bytes(streams: Sequence[Stream], licences: Sequence[int]) -> tuple[RoundRows | ByteStream, ...]:
    """What does the work of streams of one left operand in integers; () where one of them cannot be."""
    block, first = licences[0], streams[0]
    if not block or set(licences) != {block} or any(stream.a != first.a for stream in streams):
        return ()
    rounding = _rounding(first, block)
    if rounding is None:
        return ()
    found = [_byte_stream(stream, rounding) for stream in streams]
    products = [part for part in found if part is not None]
    return (rounding, *products) if len(products) == len(found) else ()


def _rounding(stream: Stream, block: int) -> RoundRows | None:
    rows, depth = stream.most
    shared = block if stream.size is None else stream.size
    alone = isinstance(depth, Const) and depth.value <= block
    if block % LEAST_BLOCK or block > LARGEST_BLOCK or shared != block or (stream.size is None and not alone):
        return None
    if not isinstance(depth, Const) or stream.a.memory.dtype is not DType.F32 or stream.a.column != const(1):
        return None
    groups = -(-int(depth.value) // block)
    name = stream.a.memory.name
    kind = DType.I8 if _bits(stream, block) == 4 else DType.I16
    levels = Memory(f"{name}_levels_{kind}", kind, rows * (groups * block), "scratch")
    scales = Memory(f"{name}_scales", DType.F32, rows * (2 * groups), "scratch")
    zero = const(0)
    return RoundRows(
        stream.a, stream.rows, stream.depth, block,
        Operand(levels, zero, const(groups * block), const(1)), Operand(scales, zero, const(2 * groups), const(1)),
        stream.span,
    )  # fmt: skip


def _byte_stream(stream: Stream, rounding: RoundRows) -> ByteStream | None:
    block = rounding.block
    found, bits = _levels(stream), _bits(stream, block)
    if found is None or not bits or (bits == 4) != (rounding.levels.memory.dtype is DType.I8):
        return None
    offset = _offset(stream, found.stored, bits, block)
    if offset is None:
        return None
    assert isinstance(found.stored.source, Memory)
    return ByteStream(
        rounding.levels, rounding.scales, stream.c, stream.rows, stream.columns, (stream.depth + (block - 1)) // block,
        block, found.stored.source, offset, bits, stream.factor, found.rest, stream.panel, stream.lane, stream.group,
        stream.clear, stream.span,
    )  # fmt: skip


def _levels(stream: Stream) -> _Levels | None:
    """The elements as integers made of one stored byte, plus what a group shares."""
    level, rest = stream.value, None
    match stream.value:
        case Op(name="add" | "sub", args=(left, right)):
            level, rest = left, _of_group(right, stream)
            rest = rest if stream.value.name == "add" else unary("neg", rest)
        case _:
            pass
    if rest is not None and stream.position in variables(rest):
        return None
    match level:
        case Op(name="cast", args=(value,)) if value.dtype is DType.I32 and level.dtype is DType.F32:
            stored = tuple(dict.fromkeys(loads(value)))
        case _:
            return None
    if len(stored) != 1 or stored[0].dtype is not DType.U8 or not isinstance(stored[0].source, Memory):
        return None
    return _Levels(value, stored[0], rest)


def _of_group(expr: Expr, stream: Stream) -> Expr:
    """`expr` with indices that are the same for a whole group written without the position in it."""
    size, depth = stream.size, stream.most[1]
    if size is None or not isinstance(depth, Const):
        return expr
    at = {stream.position: np.arange(size)[:, None], stream.group: np.arange(-(-int(depth.value) // size))[None, :]}

    def change(node: Expr) -> Expr | None:
        if node.dtype is not DType.I64 or stream.position not in variables(node):
            return None
        first = substitute(node, {stream.position: const(0)})
        moved = node - first
        same = variables(moved) <= {stream.position, stream.group} and not Evaluator({}, {})(moved, at).any()
        return first if same else None

    return rewrite(expr, change)


def _bits(stream: Stream, block: int) -> int:
    """8 if a level is its byte, 4 if it is the low half of it for even positions and the high half for odd ones."""
    found = _levels(stream)
    if found is None:
        return 0
    byte = Var("byte", DType.U8)
    value = substitute(found.value, {found.stored: byte})
    if not variables(value) <= {byte, stream.position}:
        return 0
    positions, every = np.arange(block)[:, None], np.arange(256)[None, :]
    made = Evaluator({}, {})(value, {byte: every, stream.position: positions})
    forms = {8: every, 4: every >> 4 * (positions % 2) & 15}
    return next((bits for bits, form in forms.items() if np.array_equal(np.broadcast_to(form, made.shape), made)), 0)


def _offset(stream: Stream, stored: Load, bits: int, block: int) -> Expr | None:
    """Where the levels of a group begin, if bytes of a panel lie in fours from there (`panel.group_of`)."""
    step, rest = split_affine(stored.index[0], stream.lane)
    if rest is None or step != const(GROUP):
        return None
    base = substitute(rest, {stream.position: const(0)})
    inside, depth = rest - base, stream.most[1]
    if not variables(inside) <= {stream.position, stream.group} or not isinstance(depth, Const):
        return None
    groups = -(-int(depth.value) // block)
    at = {stream.position: np.arange(block)[:, None], stream.group: np.arange(groups)[None, :]}
    walked = Evaluator({}, {})(inside, at)
    row = at[stream.position] * bits // 8
    wanted = row // GROUP * (GROUP * PANEL) + row % GROUP
    if not np.array_equal(np.broadcast_to(walked, (block, groups)), np.broadcast_to(wanted, (block, groups))):
        return None
    whole = int(depth.value) % block == 0 and stream.depth == depth
    return base if whole or _has_room(stream, stored.source, base, groups, block * bits // 8 * PANEL) else None


def _has_room(stream: Stream, memory: Source, base: Expr, groups: int, size: int) -> bool:
    """Whether a panel, or the only one, holds `size` bytes of its last group, too, which has fewer rows."""
    panel, _ = split_affine(base, stream.panel)
    last, first = (substitute(base, {stream.group: const(number)}) for number in (groups - 1, 0))
    room = panel - (last - first) - size
    return memory.shape == (const(groups * size),) or (isinstance(room, Const) and room.value >= 0)
