"""Products in tile registers, finished block by block (`loops.Blocks`), as C.

One loop over the blocks and one more turn. In each, the steps of a block's products, and after every step some vectors
of the block before, whose results lie in the other half of a small array. Where several blocks in turn read the same
panels of a model's weight, each asks for its share of the panels after those (`tile_ahead`). With every vector, the
lines are asked for where the next block will read and write: the registers' loads would wait behind those that miss.
"""

from collections.abc import Callable, Iterator

from tilecore.contract.expr import Expr, Var, const, loads, substitute, variables
from tilecore.contract.panel import PANEL
from tilecore.emit_expr import Expressions, memory_name
from tilecore.loops import Blocks, Let, Memory, Operand, Put
from tilecore.target import ASKING_BLOCKS, BLOCK

NEXT = Var("next_row"), Var("next_column")  # the origin of the block that is multiplied
Points = Callable[[tuple[Let | Put, ...], Var, str], None]  # prints a vector's statements; the variable and its C name


def emit_blocks(printer: Expressions, blocks: Blocks, points: Points) -> None:
    """Append the statement's lines to the innermost scope."""

    def address(part: Operand) -> str:
        return f"{memory_name(part.memory)} + {printer.scalar(part.offset)}"

    first, count = blocks.products[0], len(blocks.products)
    number = printer.fresh("")
    ahead = all(mma.b.memory.kind == "input" for mma in blocks.products)
    rows, columns, lda = (printer.scalar(value) for value in (first.rows, first.columns, first.a.row))
    rights = ", ".join(address(mma.b) for mma in blocks.products)
    strides = ", ".join(printer.scalar(mma.b.row) for mma in blocks.products)
    where = f" // {first.span.file.rpartition('/')[2]}:{first.span.line}" if first.span else ""
    for text in (
        f"float sums{number}[2][{count}][{BLOCK * BLOCK}] __attribute__((aligned(64)));{where}",
        f"const uint16_t* const left{number} = {address(first.a)};",
        f"const uint16_t* const rights{number}[] = {{{rights}}};",
        f"const int64_t strides{number}[] = {{{strides}}};",
        f"const int64_t panels{number} = {columns} / {PANEL};",
        f"const int64_t tall{number} = ({rows} + {BLOCK - 1}) / {BLOCK};",
        f"const int64_t count{number} = tall{number} * ((panels{number} + 1) / 2);",
        f"int64_t done_row{number} = 0, done_column{number} = 0, done_width{number} = 1, vectors{number} = 0;",
        "TILE_FENCE();",
    ):
        printer.line(text)
    origins = (*blocks.origin, *NEXT)
    names = (f"row{number}", f"column{number}", f"i{number}", f"next_column{number}")
    bound = dict(zip(origins, names, strict=True))
    with printer.within(f"for (int64_t b{number} = 0; b{number} <= count{number}; b{number}++)", bound):
        for text in (
            *_block_lines(number, rows, str(count), printer.scalar(first.depth), ahead),
            *_result_lines(blocks, number),
        ):
            printer.line(text)
        with printer.within(f"for (int64_t q{number} = 0; q{number} < products{number}; q{number}++)", {}):
            _product(printer, blocks, number, lda, points, ahead)
        for text in (
            f"done_row{number} = i{number}, done_column{number} = p{number} * {PANEL};",
            f"done_width{number} = width{number}, vectors{number} = height{number} * width{number};",
            "TILE_FENCE();",
        ):
            printer.line(text)


def _block_lines(n: str, rows: str, count: str, depth: str, ahead: bool) -> tuple[str, ...]:
    """What is known of a block, and of the one before: where it is, and how many of its vectors go with each step.

    `ahead`: how many lines of the next panels a step asks for, too. A step of a pair of panels reads 32 lines.
    """
    share = (f"const int64_t lines{n} = tall{n} < {ASKING_BLOCKS} ? 0 : ({BLOCK - 1} + tall{n}) / tall{n};",)
    return (
        *(share if ahead else ()),
        f"const int live{n} = b{n} < count{n};",
        f"const int64_t p{n} = b{n} / tall{n} * 2, i{n} = b{n} % tall{n} * {BLOCK}, next_column{n} = p{n} * {PANEL};",
        f"const int64_t height{n} = min_i64({rows} - i{n}, {BLOCK}), width{n} = min_i64(panels{n} - p{n}, 2);",
        f"const int64_t products{n} = live{n} ? {count} : 1, deep{n} = live{n} ? {depth} : {BLOCK};",
        f"const int64_t steps{n} = products{n} * deep{n} / {BLOCK}, each{n} = (vectors{n} + steps{n} - 1) / steps{n};",
        f"const int64_t row{n} = done_row{n}, column{n} = done_column{n}, wide{n} = done_width{n} - 1;",
        f"int64_t v{n} = 0, stop{n} = 0;",
    )


def _result_lines(blocks: Blocks, n: str) -> list[str]:
    return [
        f"const float* const {memory_name(memory)} = sums{n}[(b{n} + 1) & 1][{number}];"
        for number, memory in enumerate(blocks.results)
    ]


def _lines_of_next(blocks: Blocks) -> Iterator[tuple[Memory, Expr, bool]]:
    """Where the next block's vector of the same place is read or written: (memory, offset, whether it is written)."""
    places = [(part.memory, part.offset, True) for part in blocks.body if isinstance(part, Put)]
    for part in blocks.body:
        read = [load for load in loads(part.value) if isinstance(load.source, Memory) and load.source.kind == "input"]
        places += [(load.source, load.index[0], False) for load in read if isinstance(load.source, Memory)]
    named = {part.var for part in blocks.body if isinstance(part, Let)}
    for memory, offset, written in dict.fromkeys(places):
        column = blocks.column
        along = substitute(offset, {column: const(1)}) - substitute(offset, {column: const(0)}) == const(1)
        if along and blocks.row in variables(offset) and not named & variables(offset):
            yield memory, substitute(offset, dict(zip(blocks.origin, NEXT, strict=True))), written


def _product(printer: Expressions, blocks: Blocks, n: str, lda: str, points: Points, ahead: bool) -> None:
    """The steps of one product of a block, and beside them the vectors that are due."""
    next_panels = (
        f"const uint16_t* const next{n} = right{n} + 2 * strides{n}[q{n}] + i{n} / {BLOCK} * deep{n} * lines{n};",
    )
    for text in (
        f"const uint16_t* const right{n} = rights{n}[q{n}] + p{n} * strides{n}[q{n}];",
        *(next_panels if ahead else ()),
        f"if (live{n}) tile_clear();",
    ):
        printer.line(text)
    with printer.within(f"for (int64_t k{n} = 0; k{n} < deep{n}; k{n} += {BLOCK})", {}):
        if ahead:
            printer.line(f"if (live{n}) tile_ahead(next{n} + k{n} * lines{n}, lines{n});")
        printer.line(
            f"if (live{n}) tile_fused_step(left{n} + i{n} * {lda} + k{n}, {lda}, right{n} + k{n} * {PANEL}, "
            f"strides{n}[q{n}], height{n} > 16, width{n} > 1);"
        )
        printer.line(f"stop{n} = min_i64(stop{n} + each{n}, vectors{n});")
        at = {blocks.row: f"r{n}", blocks.column: f"x{n}"}
        with printer.within(f"for (; v{n} < stop{n}; v{n}++)", at):
            printer.line(f"const int64_t r{n} = v{n} >> wide{n}, x{n} = (v{n} & wide{n}) * {PANEL};")
            for memory, offset, written in _lines_of_next(blocks):
                printer.line(f"__builtin_prefetch({memory_name(memory)} + {printer.scalar(offset)}, {int(written)});")
            points(blocks.body, blocks.column, f"x{n}")
    printer.line(f"if (live{n}) tile_write(sums{n}[b{n} & 1][q{n}], {BLOCK}, height{n} > 16, width{n} > 1);")
