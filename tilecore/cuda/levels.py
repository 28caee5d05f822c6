"""Levels on their way from shared memory to products: bytes to pairs of halves in the registers of a left operand.

Comes in: the tile of a decoded operand and where its rows begin. Goes out: text. A thread reads the byte, or two, of
each pair of levels that the product wants of it. What is the same for a run of the depth is fetched from memory an
iteration ahead. Where that gives the same bits, halves are computed with, two at a time; else floats.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, cast, children, const, loads, substitute, variables
from tilecore.contract.spec import View
from tilecore.cuda.decoding import LEVEL, Decoding, Exact, exact_of
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan, Ring
from tilecore.cuda.roles import DECODED, Staged, extents
from tilecore.cuda.values import HALVES, STORAGE, Values, held, literal, pointer, unrounded
from tilecore.ir import Copy, Gemm

RUN = Var("level_run")  # number of a run of the depth
ROW = Var("level_row")
STEPS = DECODED // 16 * 4  # words of a thread that are decoded together
READ_WHOLE = 64  # columns of a product up to which a long step's bytes are read before any of them is decoded
UNITS = {DType.BF16: 1 << 7, DType.F16: 1 << 10}  # halves from here to twice as much are whole numbers
ONES = {DType.BF16: 0x4300, DType.F16: 0x6400}  # the bits of those
REAL = cast(LEVEL, DType.F32)


@dataclass(frozen=True, slots=True)
class Levels:
    """A decoded operand: its tile, what is fetched beside it, and the values of a run that are kept in registers."""

    tile: Staged
    decoding: Decoding
    exact: Exact | None
    value: Expr  # over LEVEL, ROW and RUN
    fetched: tuple[Load, ...]
    kept: tuple[Expr, ...]
    ring: Ring
    by_warps: bool

    @property
    def name(self) -> str:
        """Of the operand."""
        return self.tile.buffer.name

    @property
    def dtype(self) -> DType:
        """Of the operand."""
        return self.tile.buffer.dtype

    @property
    def parts(self) -> int:
        """Parts of the tile's depth that are decoded one by one."""
        return extents(self.tile.buffer)[1] // DECODED

    @property
    def run(self) -> int:
        """Elements of the depth that share what is kept."""
        return min(self.decoding.run, extents(self.tile.buffer)[1])

    @property
    def entries(self) -> int:
        """Of two rows, over a tile's depth."""
        return extents(self.tile.buffer)[1] // self.run * 2


def levels_in(plan: KernelPlan) -> Levels | None:
    """Those of a kernel, if it has any."""
    if plan.roles.decoded is None:
        return None
    (ring,) = plan.rings
    copy = next(one for one in ring.copies if one.dst.source == plan.roles.decoded.buffer)
    return _levels_of(plan.roles.decoded, copy, ring, by_warps=plan.roles.by_warps)


def _levels_of(tile: Staged, copy: Copy, ring: Ring, *, by_warps: bool) -> Levels:
    """What is done with the levels of a tile."""
    decoding, view = tile.decoding, copy.src.source
    assert decoding is not None
    assert isinstance(view, View)
    _, row, k = view.axes
    run = min(decoding.run, extents(tile.buffer)[1])
    moved: dict[Expr, Expr] = {row: ROW, k: RUN * run}
    value = substitute(decoding.value, moved)
    exact = exact_of(decoding)
    if exact is not None:
        zero, scale = substitute(exact.zero, moved), substitute(exact.scale, moved)
        kept = (*(() if isinstance(zero, Const) else (zero,)), scale)
    else:
        kept = tuple(dict.fromkeys(_apart(value)))
    fetched = tuple(dict.fromkeys(load for expr in kept for load in loads(expr)))
    for load in fetched:
        if any(loads(entry) for entry in load.index):
            raise CudaError(f"{load} is read at a place that is read itself: no decoding of that kind yet")
    return Levels(tile, decoding, exact, value, fetched, kept, ring, by_warps)


def _apart(expr: Expr) -> Iterator[Expr]:
    """The largest parts that the level has no part in but memory has."""
    if LEVEL not in variables(expr):
        if loads(expr) or variables(expr):
            yield expr
        return
    for part in children(expr):
        yield from _apart(part)


def declarations(levels: Levels) -> list[str]:
    """Of a tile's registers, and where a thread's levels lie."""
    width, bits = levels.tile.chunk_bytes, levels.decoding.bits
    kinds = {load: STORAGE[load.dtype] for load in levels.fetched}
    lines = [f"{kind} {levels.name}_next{i}[{levels.entries}];" for i, kind in enumerate(kinds.values())]
    lines += [f"{_kind(levels, i)} {levels.name}_kept{i}[{levels.entries}];" for i in range(len(levels.kept))]
    # what the compiler knows nothing of it does not compute again and again
    lines.append("const u32 level_mask = __shfl_sync(0xffffffff, 0x000f000f + blockIdx.z, lane);")
    own, swizzle = f"lane % 4 * {bits // 4}", f"own_row / {128 // width} % {width // 16} * 16"
    if levels.by_warps:
        own = f"lane % 4 * {2 * bits}"
        lines.append("const u32 column_at = opaque(lane / 4 * 128 + (lane % 4 * 2 ^ lane / 4) * 16);")
    lines.append(f"const u32 level_at = opaque(own_row * {width} + ({swizzle} ^ {own}));")
    return lines


def _in_halves(levels: Levels) -> bool:
    """Whether differences of levels and zero points are taken in halves, and are exact there."""
    exact = levels.exact
    if exact is None:
        return False
    lowest, highest = levels.decoding.levels
    unit = UNITS[levels.dtype]
    return highest - lowest < unit and 0 <= unit - lowest + exact.most <= 2 * unit and highest <= unit


def _kind(levels: Levels, position: int) -> str:
    if levels.exact is None:
        return held(levels.kept[position].dtype)
    pair = position == len(levels.kept) - 1 or _in_halves(levels)
    return "u32" if pair else "float"


def _fetch(levels: Levels, origin: str, tile: str) -> list[str]:
    """What the runs of tile number `tile` of the depth need; `origin` is the first row of the tile."""
    if not levels.fetched:
        return []
    rows = levels.decoding.rows
    each = levels.entries // 2
    values = Values({ROW: ROW.name, RUN: RUN.name}, lambda _: None)
    reads = [
        f"{levels.name}_next{i}[x] = {pointer(load.source)}[{values.offset(load.source, load.index)}];"  # type: ignore[arg-type]
        for i, load in enumerate(levels.fetched)
    ]
    last = -(-levels.decoding.depth // levels.run) - 1
    return [
        f"TILE_UNROLL for (int x = 0; x < {levels.entries}; x++) {{",
        f"  const int {ROW.name} = min({origin} + own_row + x % 2 * 8, {rows - 1});",
        f"  const int {RUN.name} = min({tile} * {each} + x / 2, {last});",
        *("  " + line for line in (*values.lines, *reads)),
        "}",
    ]


def _keep(levels: Levels, origin: str, tile: str) -> list[str]:
    """What was fetched for this tile of the depth, as it is computed with."""
    if not levels.kept:
        return []
    at = {load: f"{levels.name}_next{i}[x]" for i, load in enumerate(levels.fetched)}

    def element(load: Load) -> str | None:
        text = at.get(load)
        return f"from_{load.dtype}({text})" if text is not None and load.dtype in HALVES else text

    values = Values({ROW: ROW.name, RUN: RUN.name}, element)
    writes: list[str] = []
    for i, expr in enumerate(levels.kept):
        text = values.text(expr)
        if levels.exact is not None and i < len(levels.kept) - 1:
            text = f"{_base(levels)} + {text}"
        if _kind(levels, i) == "u32":
            text = f"pair_{levels.dtype}({text}, {text})"
        writes.append(f"{levels.name}_kept{i}[x] = {text};")
    each = levels.entries // 2
    return [
        f"TILE_UNROLL for (int x = 0; x < {levels.entries}; x++) {{",
        f"  const int {ROW.name} = min({origin} + own_row + x % 2 * 8, {levels.decoding.rows - 1});",
        f"  const int {RUN.name} = {tile} * {each} + x / 2;",
        *("  " + line for line in (*values.lines, *writes)),
        "}",
    ]


def _base(levels: Levels) -> str:
    """What is subtracted beside the zero point from a level whose bits are the low ones of a whole number's."""
    unit = UNITS[levels.dtype] if _in_halves(levels) else 1 << 23
    return literal(const(float(unit - levels.decoding.offset), DType.F32))


def values_of_tile(levels: Levels, origin: str, tile: str) -> list[str]:
    """What was fetched for a tile, as it is computed with, and what the next one needs, on its way; once per run."""
    each = levels.decoding.run // extents(levels.tile.buffer)[1]  # tiles that share a run
    if each <= 1:
        return [*_keep(levels, origin, tile), *_fetch(levels, origin, f"({tile} + 1)")]
    body = [*_keep(levels, origin, tile), *_fetch(levels, origin, f"({tile} + {each})")]
    return [f"if ({tile} % {each} == 0 || {tile} == first) {{", *("  " + line for line in body), "}"]


def before_loop(levels: Levels, origin: str) -> list[str]:
    """What the first tile needs, on its way."""
    return _fetch(levels, origin, "first")


def product_text(levels: Levels, gemm: Gemm, right: Staged, call: str, freed: list[str]) -> list[str]:
    """The product of a tile, and the slot of the one before, `freed`. By warps, of 16 rows each by 8 columns at a time,
    parts of the depth in turn: the products of the tile before have been issued, hence all that they read has come. By
    warpgroups through `call` for step x of the depth, in two halves: while one is multiplied, the other one's registers
    are written, and the slot before is free when its second half is done.
    """
    name = gemm.a.name
    if not levels.by_warps:
        words = levels.parts * STEPS // 2
        whole = levels.parts == 1 or extents(gemm.c)[1] <= READ_WHOLE
        lines = [*_places(levels, "slot"), *(_read(levels, 0, 2 * words) if whole else ())]
        for half in range(2):
            lines += [
                *(() if whole else _read(levels, half * words, words)),
                "products_wait<1>();",
                f"pin_part<{half * words}, {words}>({name});",  # in use until here
                *(freed if half else []),
                *_decode(levels, name, half * words, words),
                f"pin_part<{half * words}, {words}>({name});",
                "products_fence();",
                f"TILE_UNROLL for (int x = {half * words // 4}; x < {(half + 1) * words // 4}; x++) {call}",
                "products_commit();",
            ]
        return lines
    at = f"tile_{gemm.b.name} + slot * {right.bytes} + part * {right.chunk_rows * 128}"
    issue = f"warp_product_{levels.dtype}({gemm.c.name} + 4 * group, {name} + 4 * y"
    return [
        *freed,
        f"TILE_UNROLL for (int part = 0; part < {levels.parts}; part++) {{",
        *("  " + line for line in (*_read_words(levels, "slot"), *_decode(levels, name))),
        f"  TILE_UNROLL for (int group = 0; group < {extents(gemm.c)[1] // 8}; group++) {{",
        "    u32 pairs[8];",
        f"    column_words<{levels.decoding.bits}>(pairs, {at} + group * 1024 + column_at);",
        f"    TILE_UNROLL for (int y = 0; y < {DECODED // 16}; y++) {issue}, pairs[2 * y], pairs[2 * y + 1]);",
        "  }",
        "}",
    ]


def _places(levels: Levels, slot: str) -> list[str]:
    """Where a thread's bytes in a slot begin, by what the swizzle makes of each 16 of a row."""
    count = levels.tile.chunk_bytes // 16
    return [
        f"u32 raw[{levels.parts * STEPS}], bytes_at[{count}];",
        f"bytes_at[0] = opaque(tile_{levels.name} + {slot} * {levels.tile.bytes} + level_at);",
        f"TILE_UNROLL for (int x = 1; x < {count}; x++) bytes_at[x] = bytes_at[0] ^ 16 * x;",
    ]


def _read(levels: Levels, start: int, count: int) -> list[str]:
    """The bytes of `count` words of the tile from `start` on, to `raw`: each pair that the product wants."""
    tile, bits = levels.tile, levels.decoding.bits
    width = tile.chunk_bytes
    place = f"bytes_at[at % {width} / 16] + at / {width} * {tile.chunk_rows * width} + at % 16"
    return [
        f"TILE_UNROLL for (int x = {start}; x < {start + count}; x++) {{",
        f"  const int at = x / 4 * {2 * bits} + x / 2 % 2 * {bits};",
        f"  raw[x] = shared_u{2 * bits}({place} + x % 2 * {8 * width});",
        "}",
    ]


def _read_words(levels: Levels, slot: str) -> list[str]:
    """A thread's quarter of part `part`, in one piece of each of its two rows, to `raw`. Which elements of the depth
    make a pair is for the reader to choose, as long as the right operand has them so too.
    """
    tile, bits = levels.tile, levels.decoding.bits
    width = tile.chunk_bytes
    place = f"at / {width} * {tile.chunk_rows * width} + (level_at ^ at % {width}) + x * {8 * width}"
    return [
        f"u32 raw[2][{bits // 2}];",
        "TILE_UNROLL for (int x = 0; x < 2; x++) {",
        f"  const int at = part * {8 * bits};",
        f"  shared_words<{bits // 2}>(raw[x], tile_{levels.name} + {slot} * {tile.bytes} + {place});",
        "}",
    ]


def _decode(levels: Levels, target: str, start: int = 0, count: int = STEPS) -> list[str]:
    """Those bytes as halves, to `count` registers from `start` on."""
    bits, flip = levels.decoding.bits, levels.decoding.flip
    ones = f"{(ONES[levels.dtype] | flip) * 0x10001:#010x}u"
    each = 16 // bits  # pairs of a word
    raw, pair = "raw[x]", f"levels_{bits}<{ones}>(raw[x], level_mask)"
    places = ("0", str(bits))
    if levels.by_warps:
        raw = f"raw[x % 2][x / {2 * each}]"
        pair = f"level_pair_{bits}<{ones}>({raw}, x / 2 % {each}, level_mask)"
        first = f"x / 2 % {each} * {4 if bits == 4 else 16}"
        places = (first, f"{first} + {16 if bits == 4 else 8}")
    floats = [f"level_f32<{bits}, {flip}>({raw}, {place})" for place in places]
    lines, value = _value(levels, pair, floats)
    place = f"part * {DECODED}" if levels.by_warps else "x / 4 * 16"
    return [
        f"TILE_UNROLL for (int x = {start}; x < {start + count}; x++) {{",
        f"  const int run = {place} / {levels.run} * 2 + x % 2;",
        *("  " + line for line in lines),
        f"  {target}[x] = {value};",
        "}",
    ]


def _value(levels: Levels, pair: str, floats: list[str]) -> tuple[list[str], str]:
    """The pair of halves of two levels, given as whole numbers in halves and in floats: lines before it, and text."""
    dtype = levels.dtype
    kept = [f"{levels.name}_kept{i}[run]" for i in range(len(levels.kept))]
    if levels.exact is None:
        return _in_floats(levels, kept, floats)
    zero = kept[0]
    if len(kept) == 1:
        assert isinstance(levels.exact.zero, Const)
        zero = f"({_base(levels)} + {literal(levels.exact.zero)})"
    if _in_halves(levels):
        zero = f"pair_{dtype}({zero}, {zero})" if len(kept) == 1 else zero
        return [], f"multiply_{dtype}(subtract_{dtype}({pair}, {zero}), {kept[-1]})"
    low, high = (f"{text} - {zero}" for text in floats)
    return [], f"multiply_{dtype}(pair_{dtype}({low}, {high}), {kept[-1]})"


def _in_floats(levels: Levels, kept: list[str], floats: list[str]) -> tuple[list[str], str]:
    base = literal(const(float((1 << 23) - levels.decoding.offset), DType.F32))
    lines: list[str] = []
    halves: list[str] = []
    for half, text in enumerate(floats):
        names: dict[Expr, str] = dict(zip(levels.kept, kept, strict=True))
        names[REAL] = f"real{half}"
        lines.append(f"const float real{half} = {text} - {base};")
        if any(LEVEL in variables(part) for part in _uses(levels.value)):
            names[LEVEL] = f"(int)real{half}"
        values = Values(names, lambda _: None, f"v{half}_")
        halves.append(values.text(unrounded(levels.value, levels.dtype)))
        lines += values.lines
    return lines, f"pair_{levels.dtype}({', '.join(halves)})"


def _uses(expr: Expr) -> Iterator[Expr]:
    """Where the level stands in an expression other than as a float."""
    if expr == REAL:
        return
    if expr == LEVEL:
        yield expr
    for part in children(expr):
        yield from _uses(part)
