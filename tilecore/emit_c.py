"""The C printer: one loop program becomes one translation unit that defines a `tile_kernel`.

Comes in: a loop program, the signature (inputs, outputs, an estimate of the work) and the target's row. Goes out: C
text, the same bytes for the same program, in terms of the verbs of `tile_cpu.h`; statements carry the line they came
from.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, binary, const, loads, variables
from tilecore.contract.spec import extent_of
from tilecore.emit_blocks import emit_blocks
from tilecore.emit_expr import (
    ELEMENT,
    HALF,
    SCALAR,
    VECTOR,
    Expressions,
    Lanes,
    Scope,
    held,
    instruction_count,
    memory_name,
    unrounded,
)
from tilecore.emit_host import (
    Signature,
    Special,
    aligned,
    descriptor,
    dispatch,
    flags,
    group_of,
    scratch_bytes,
    symbol_order,
)
from tilecore.emit_lookups import emit_lookups
from tilecore.emit_product import (
    asks_ahead,
    few_declaration,
    few_function,
    in_tiles,
    kind_of,
    product_function,
    product_text,
)
from tilecore.emit_stream import emit_byte_stream, emit_rounding, emit_stream
from tilecore.graph import split_affine
from tilecore.jumps import jumps
from tilecore.large_results import goes_past
from tilecore.loops import (
    FIRST_TASK,
    MULTIPLIES_BYTES,
    PAST_TASKS,
    Blocks,
    Branch,
    ByteStream,
    Check,
    FewRows,
    Fold,
    Let,
    Loop,
    LoopProgram,
    LoopStmt,
    Memory,
    Mma,
    Once,
    Operand,
    PackTransposed,
    Put,
    Repeat,
    RoundRows,
    Say,
    Stream,
    Touch,
    VectorLoop,
    loop_statements,
    written,
)
from tilecore.settled import settled
from tilecore.span import Span
from tilecore.target import Target
from tilecore.unused import drop_unused

NEUTRAL = {"sum": "0.0f", "prod": "1.0f", "max": "-INFINITY", "fmax": "-INFINITY", "min": "INFINITY"}
JOIN = {
    "sum": "{0} + {1}", "prod": "{0} * {1}", "max": "max_{2}({0}, {1})", "fmax": "fmax_{2}({0}, {1})",
    "min": "min_{2}({0}, {1})",
}  # fmt: skip
FAILED = "tile_failed_assertion"  # the number of an assertion that did not hold, from 1; kernels with T.assert_ only
PRINTED = {
    DType.F32: ("%g", "double"), DType.F64: ("%g", "double"), DType.I32: ("%d", "int"),
    DType.I64: ("%lld", "long long"), DType.BOOL: ("%d", "int"),
}  # fmt: skip
SHORT_BODY = 8  # operations: below this, a reduction waits for its own latency unless several run at once


def lanes_of(fold: Fold) -> str:
    """The verb that joins a vector's lanes."""
    return f"{fold.kind}_lanes" if fold.into.dtype is DType.F32 else f"{fold.kind}_lanes_{fold.into.dtype}"


def emit_c(program: LoopProgram, signature: Signature, target: Target, special: Special | None = None) -> str:
    """The translation unit of one kernel; `special` serves those of its calls that it is for."""
    names = {symbol: f"n{i}" for i, symbol in enumerate(symbol_order(signature.inputs))}
    printer = _Kernel(program, names, target)
    runs = [printer.run_function("run_general" if special else "run")]
    if special:
        runs += [_Kernel(special.program, names, target).run_function("run_special"), *dispatch(special, names)]
    parts = [
        f"/* {signature.name}: {program.name} for {target.name} */",
        '#include "tile_kernel.h"',
        '#include "tile_cpu.h"',
        '#include "tile_host.h"',
        *([f'__attribute__((visibility("default"))) int32_t {FAILED};'] if printer.checks else []),
        *_products((program, special.program) if special else (program,), target),
        *runs,
        *emit_lookups(signature, names),
        *descriptor(program, signature, names, target, special),
    ]
    return "\n".join(parts) + "\n"


def _products(programs: tuple[LoopProgram, ...], target: Target) -> list[str]:
    parts = [part for program in programs for part in loop_statements(program.body)]
    kinds = dict.fromkeys(kind_of(part) for part in parts if isinstance(part, Mma))
    few = dict.fromkeys(few_declaration(part, target) for part in parts if isinstance(part, FewRows))
    return [*(line for kind in kinds for line in product_text(kind, programs[0].tile, target)), *few]


def _has_tiles(program: LoopProgram, target: Target) -> bool:
    """Whether tile registers are used."""
    if not target.amx:
        return False
    parts = loop_statements(program.body)
    return any(isinstance(part, Blocks) or (isinstance(part, Mma) and in_tiles(kind_of(part))) for part in parts)


class _Kernel(Expressions):
    """Prints the statements of one loop program."""

    def __init__(self, program: LoopProgram, symbols: dict[str, str], target: Target) -> None:
        super().__init__(symbols, exact=jumps(program))
        self.checks: list[Check] = []
        self.streaming = ""  # C: whether stores of results go past the caches
        self.asking = False  # for lines that are read and written next
        self.program = program
        self.target = target

    # ---- the function around the grid

    def run_function(self, name: str) -> str:
        """The C function called `name` that runs tasks."""
        program = self.program
        head = self.scopes[0]
        for number, symbol in enumerate(self.symbols.values()):
            head.lines.append(f"const int64_t {symbol} = symbols[{number}];")
        for memory in program.memories:
            if memory.kind != "scratch":
                qualifier = "const " if memory.kind == "input" else ""
                kind = f"{qualifier}{ELEMENT[memory.dtype]}* restrict"
                array = "inputs" if memory.kind == "input" else "outputs"
                head.lines.append(
                    f"{kind} {memory_name(memory)} = ({qualifier}{ELEMENT[memory.dtype]}*){array}[{memory.position}];"
                )
        self._scratch_pointers()
        head.variables[MULTIPLIES_BYTES] = "tile_fused_levels()"
        sizes = [extent_of(axis) for axis in program.grid]
        extents = [self.scalar(const(1) if size == const(0) else size) for size in sizes]  # 0: there is no task
        onces = flags(program)
        self.scopes.append(Scope())
        if program.spans:
            head.variables |= {FIRST_TASK: "begin", PAST_TASKS: "end"}
        else:
            self._grid_point(extents)
        if onces:
            group = self.scalar(group_of(program))
            self.line(f"if (task / {group} != *copied) {{")
            self.line(f"    *copied = task / {group};")
            for once in onces:
                self.line(f"    memset(once_{once.name}, 0, (size_t)({self.scalar(once.count)}));")
            self.line("}")
        self.block(program.body)
        body = self.scopes.pop().lines
        if not program.spans:
            body = ["for (int64_t task = begin; task < end; task++) {", *_indent(body), "}"]
        text = [*head.lines, *body, *self._end()]
        if _has_tiles(program, self.target):
            text = [*head.lines, "tile_begin();", *text[len(head.lines) :], "tile_end();"]
        unused = [f"(void){given};" for given in ("symbols", "inputs", "outputs", "scratch", "copied")]
        return "\n".join(
            [
                f"static void {name}(const int64_t* symbols, const void* const* inputs, void* const* outputs,",
                "                void* scratch, int64_t* copied, int64_t begin, int64_t end) {",
                *_indent(unused + drop_unused(text)),
                "}",
            ]
        )

    def _end(self) -> list[str]:
        """What stands behind the last task: stores past the caches are seen by other threads."""
        loops = (stmt for stmt in loop_statements(self.program.body) if isinstance(stmt, VectorLoop))
        large = {loop.large for loop in loops if loop.large is not None}
        return [f"if ({self.scalar(condition)}) streams_done();" for condition in large]

    def _grid_point(self, extents: list[str]) -> None:
        rest, order = "task", self.program.order
        if order:
            where, apart, times = map(self.scalar, (order.where, order.apart, order.times))
            addresses = " | ".join(f"(uintptr_t){memory_name(memory)}" for memory in order.passing)
            near, run = self.fresh("near"), f"task / {order.run}"
            self.scopes[0].lines.append(f"const int {near} = {where} && ({addresses}) % 64 == 0;")
            moved = f"{run} % {times} * {apart} + {run} / {times} * {order.run} + task % {order.run}"
            rest = f"({near} ? {moved} : task)"
        for axis, extent in zip(self.program.grid, extents, strict=True):
            name = self.fresh(f"{axis.name}_")
            last = axis is self.program.grid[-1]
            self.line(f"const int64_t {name} = {rest};" if last else f"const int64_t {name} = {rest} % {extent};")
            self.scopes[-1].variables[axis] = name
            rest = f"{rest} / {extent}"

    def _scratch_pointers(self) -> None:
        offset: Expr = const(0)
        for memory in self.program.memories:
            if memory.kind == "scratch":
                element = ELEMENT[memory.dtype]
                place = f"({element}*)((char*)scratch + {self.scalar(offset)})"
                self.line(f"{element}* restrict {memory_name(memory)} = {place};")
                offset += scratch_bytes(memory)
        for once in flags(self.program):
            self.line(f"uint8_t* once_{once.name} = (uint8_t*)scratch + {self.scalar(offset)};")
            offset += aligned(once.count)

    # ---- statements

    def block(self, body: tuple[LoopStmt, ...]) -> None:
        """Statements in order, in the innermost scope."""
        for stmt in body:
            self.statement(stmt)

    def nested(self, header: str, body: tuple[LoopStmt, ...], bound: dict[Var, str], *first: str) -> None:
        """A block with a header line and `first` lines; `bound` are the variables it defines."""
        self.scopes.append(Scope(list(first), variables=dict(bound)))
        self.block(body)
        lines = self.scopes.pop().lines
        self.line(f"{header} {{")
        self.scopes[-1].lines.extend(_indent(lines))
        self.line("}")

    def statement(self, stmt: LoopStmt) -> None:
        """One statement."""
        match stmt:
            case Let():
                self.scopes[-1].variables[stmt.var] = self.scalar(stmt.value)
            case Loop():
                self.forget(written(stmt.body))
                start, stop = self.scalar(stmt.start), self.scalar(stmt.stop)
                name = self.fresh(f"{stmt.var.name}_")
                self.nested(
                    f"for (int64_t {name} = {start}; {name} < {stop}; {name} += {stmt.step})",
                    stmt.body,
                    {stmt.var: name},
                )
                self.forget(written(stmt.body))
            case Branch():
                self._branch(stmt)
                self.forget(written((stmt,)))
            case Repeat():
                self._repeat(stmt)
            case Say():
                self._say(stmt)
            case Check():
                self.checks.append(stmt)
                failed = f"__atomic_store_n(&{FAILED}, {len(self.checks)}, __ATOMIC_RELAXED);"
                self.line(f"if (!({self.scalar(stmt.condition)})) {failed}{_where(stmt.span)}")
            case Put():
                self._put(stmt)
            case VectorLoop():
                self._vector_loop(stmt)
                self.forget(written((stmt,)))
            case Mma() | FewRows():
                self._mma(stmt)
                self.forget(written((stmt,)))
            case Stream():
                emit_stream(self, stmt, self.target)
                self.forget(written((stmt,)))
            case RoundRows():
                emit_rounding(self, stmt)
                self.forget(written((stmt,)))
            case ByteStream():
                emit_byte_stream(self, stmt, self.target)
                self.forget(written((stmt,)))
            case Blocks():
                emit_blocks(self, stmt, self._points)
                self.forget(written((stmt,)))
            case PackTransposed():
                self._pack_transposed(stmt)
                self.forget(written((stmt,)))
            case Once():
                flag = f"once_{stmt.name}[{self.scalar(stmt.index)}]"
                self.nested(f"if (!{flag})", stmt.body, {}, f"{flag} = 1;")
                self.forget(written(stmt.body))
            case Touch():
                address = f"{memory_name(stmt.memory)} + {self.scalar(stmt.offset)}"
                self.line(f"__builtin_prefetch({address}, {int(stmt.write)});")
            case Fold():
                raise ValueError("a Fold stands inside a vector loop")

    def _branch(self, branch: Branch) -> None:
        """Both sides are made before either is printed: what they need from around them stands before the `if`."""
        condition, sides = self.scalar(branch.condition), list[list[str]]()
        for body in (branch.then, branch.otherwise):
            self.scopes.append(Scope())
            self.block(body)
            sides.append(_indent(self.scopes.pop().lines))
        self.line(f"if ({condition}) {{")
        self.scopes[-1].lines.extend(sides[0])
        self.scopes[-1].lines.extend(["} else {", *sides[1], "}"] if branch.otherwise else ["}"])

    def _repeat(self, loop: Repeat) -> None:
        """The condition is computed anew in every turn, inside the loop."""
        self.forget(written(loop.body))
        self.scopes.append(Scope())
        self.line(f"if (!({self.scalar(loop.condition)})) break;{_where(loop.span)}")
        self.block(loop.body)
        lines = self.scopes.pop().lines
        self.line("for (;;) {")
        self.scopes[-1].lines.extend(_indent(lines))
        self.line("}")
        self.forget(written(loop.body))

    def _say(self, say: Say) -> None:
        formats = [say.message.replace("%", "%%"), *(PRINTED[held(value.dtype)][0] for value in say.values)]
        text = " ".join(part for part in formats if part).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        values = [f", ({PRINTED[held(value.dtype)][1]}){self.scalar(value)}" for value in say.values]
        self.line(f'printf("{text}\\n"{"".join(values)});{_where(say.span)}')

    def _put(self, put: Put) -> None:
        value = self.scalar(put.value)
        if put.update:
            guard = "" if put.guard is None else f"if ({self.scalar(put.guard)}) "
            address = f"{memory_name(put.memory)} + {self.scalar(put.offset)}"
            self.line(f"{guard}atomic_{put.update}_{put.memory.dtype}({address}, {value});{_where(put.span)}")
            return
        stored = f"bits_{put.memory.dtype}_s({value})" if put.memory.dtype in HALF else value
        text = f"{memory_name(put.memory)}[{self.scalar(put.offset)}] = {stored};"
        if put.guard is not None:
            text = f"if ({self.scalar(put.guard)}) {text}"
        self.line(text + _where(put.span))
        self.forget({put.memory})
        if put.guard is None:
            self.scopes[-1].names["scalar", Load(put.memory, (put.offset,))] = value

    def _mma(self, mma: Mma | FewRows) -> None:
        def operand(part: Operand) -> str:
            return f"{memory_name(part.memory)} + {self.scalar(part.offset)}"

        a, b, c = mma.a, mma.b, mma.c
        step, among, along = b.row, "", a.column
        if isinstance(mma, FewRows):
            function = few_function(mma, self.target)
            step = b.row if b.column == const(1) else b.column
        else:
            kind, along = kind_of(mma), a.column if mma.shift is None else mma.shift
            function = product_function(kind, self.program.tile, self.target)
            if asks_ahead(kind, self.target):
                among = "".join(f", {self.scalar(part)}" for part in mma.among or (const(0), mma.rows))
        self.line(
            f"{function}({operand(a)}, {self.scalar(a.row)}, {self.scalar(along)}, "
            f"{operand(b)}, {self.scalar(step)}, {operand(c)}, {self.scalar(c.row)}, "
            f"{self.scalar(mma.rows)}, {self.scalar(mma.columns)}, {self.scalar(mma.depth)}, {int(mma.clear)}{among});"
            f"{_where(mma.span)}"
        )

    def _pack_transposed(self, pack: PackTransposed) -> None:
        source = f"{memory_name(pack.source.memory)} + {self.scalar(pack.source.offset)}"
        verb = "pack_pairs" if pack.panels.dtype is DType.BF16 else "pack_transposed"
        kind = f"{pack.source.memory.dtype}{'_rounded' if pack.rounded and verb == 'pack_transposed' else ''}"
        self.line(
            f"{verb}_{kind}({source}, {self.scalar(pack.source.row)}, "
            f"{memory_name(pack.panels)} + {self.scalar(pack.offset)}, {self.scalar(pack.panel)}, "
            f"{self.scalar(pack.columns)}, {self.scalar(pack.depth)});{_where(pack.span)}"
        )

    # ---- vector loops

    def _vector_loop(self, loop: VectorLoop) -> None:
        """Whole vectors, then one partial vector under a mask, unless memory is padded to whole vectors."""
        stop = self.scalar(loop.stop)
        folds = [part for part in loop.body if isinstance(part, Fold)]
        short = sum(instruction_count(part.value) for part in loop.body) <= SHORT_BODY
        copies = 1 if not folds else loop.at_once or (4 if short else 1)
        totals = {fold.into: [self.fresh("acc") for _ in range(copies)] for fold in folds}
        for fold in folds:
            for name in totals[fold.into]:
                self.line(f"{VECTOR[fold.into.dtype]} {name} = splat_{fold.into.dtype}({NEUTRAL[fold.kind]});")
        if loop.backwards is not None:
            self.scalar(loop.backwards)  # said here: between `if` and `else` there is no place for it
        name = self.fresh("j")
        self.line(f"int64_t {name} = 0;")
        if loop.padded and not folds and _scratch_only(loop):
            self._vector_body(loop, f"for (; {name} < {stop}; {name} += {self.target.lanes})", [name], totals, None)
            return
        if loop.far is None:
            self.asking = True
            self._whole_vectors(loop, name, stop, totals, copies)
            self.asking = False
        else:
            with self.within(f"if ({self.scalar(loop.far)})", {}):
                self.asking = True
                self._far_vectors(loop, name, stop, totals, copies)
                self.asking = False
            with self.within("else", {}):
                self._whole_vectors(loop, name, stop, totals, copies)
        for fold in folds:
            accumulators = totals[fold.into]
            joined = accumulators[0]
            for other in accumulators[1:]:
                joined = JOIN[fold.kind].format(joined, other, fold.into.dtype)
            result = self.fresh(f"{fold.kind}_")
            self.line(f"const {SCALAR[fold.into.dtype]} {result} = {lanes_of(fold)}({joined});{_where(fold.span)}")
            self.scopes[-1].variables[fold.into] = result

    def _whole_vectors(self, loop: VectorLoop, name: str, stop: str, totals: dict[Var, list[str]], copies: int) -> None:
        """Whole vectors, then what is left, which is nothing if lanes divide what there is.

        Where index comparisons are settled, vectors go without them.
        """
        lanes, ranges, reached = self.target.lanes, settled(loop), const(0)
        for clean in ranges:
            start = const(0) if clean.first is None else clean.first
            whole = start == reached and not self.streaming and _divides(start, lanes)
            if start != const(0) and not whole:
                before = f"{name} < {self.scalar(start)} && {name} + {lanes} <= {stop}"
                self._vector_body(loop, f"for (; {before}; {name} += {lanes})", [name], totals, None)
            self._vectors(clean.loop, name, self.scalar(clean.loop.stop), totals, copies)
            reached = clean.loop.stop
        if reached != loop.stop:
            self._vectors(loop, name, stop, totals, 1 if ranges else copies)
        if self.streaming or not _divides(loop.stop, lanes):
            self._vector_body(loop, f"if ({name} < {stop})", [name], totals, f"lanes_below({stop} - {name})")

    def _vectors(self, loop: VectorLoop, name: str, stop: str, totals: dict[Var, list[str]], copies: int) -> None:
        """Vectors that end before `stop`, `copies` at a time as long as there are."""
        lanes = self.target.lanes
        if copies > 1:
            parts = [name, *(self.fresh("j") for _ in range(copies - 1))]
            step = copies * lanes
            self._vector_body(loop, f"for (; {name} + {step} <= {stop}; {name} += {step})", parts, totals, None)
        if _at_least(loop.stop, lanes):
            header = f"for (; {name} + {lanes} <= {stop}; {name} += {lanes})"
            back = loop.backwards if not self.streaming and _divides(loop.stop, lanes) else None
            self._vector_body(loop, header, [name], totals, None, back)

    def _far_vectors(self, loop: VectorLoop, name: str, stop: str, totals: dict[Var, list[str]], copies: int) -> None:
        """The same with results stored past the caches: elements up to the first whole vector's address first."""
        first = next((part for part in loop.body if isinstance(part, Put) and goes_past(part, loop)), None)
        if first is None or loop.large is None:
            self._whole_vectors(loop, name, stop, totals, copies)
            return
        start = self.scalar(split_affine(first.offset, loop.var)[1] or const(0))
        head = self.fresh("head")
        self.line(f"const int64_t {head} = min_i64({stop}, lanes_to_vector({memory_name(first.memory)} + {start}));")
        self._vector_body(loop, f"if ({head} > 0)", [name], totals, f"lanes_below({head})")
        self.line(f"{name} = {head};")
        self.streaming = "1" if loop.large == loop.far else self.scalar(loop.large)
        self._whole_vectors(loop, name, stop, totals, copies)
        self.streaming = ""

    def _vector_body(
        self, loop: VectorLoop, header: str, names: list[str], totals: dict[Var, list[str]], tail: str | None,
        back: Expr | None = None,
    ) -> None:  # fmt: skip
        """A block of the vectors at `names`; where `back` holds, at as many columns from the last vector on."""
        turn = None if back is None else self.scalar(back)
        self.scopes.append(Scope())
        outer = self.scopes[-1]
        if turn is not None:
            last, at = self.scalar(loop.stop - self.target.lanes), self.fresh("at")
            outer.lines.append(f"const int64_t {at} = ({turn} ? {last} : 0) + ({turn} ? -1 : 1) * {names[0]};")
            names = [at]
        for copy, name in enumerate(names):
            if copy:
                outer.lines.append(f"const int64_t {name} = {names[0]} + {copy * self.target.lanes};")
            into = {var: accumulators[copy] for var, accumulators in totals.items()}
            for touch in loop.ahead if self.asking else ():
                at = f"{memory_name(touch.memory)} + {self.scalar(split_affine(touch.offset, loop.var)[1] or const(0))}"
                unless = f"if (!{self.scalar(loop.large)}) " if touch.write and loop.large is not None else ""
                outer.lines.append(f"{unless}__builtin_prefetch({at} + {name}{', 1' if touch.write else ''});")
            self._points(loop.body, loop.var, name, tail, into)
        lines = self.scopes.pop().lines
        self.line(f"{header} {{")
        self.scopes[-1].lines.extend(_indent(lines))
        self.line("}")

    def _points(
        self, body: tuple[Let | Put | Fold, ...], var: Var, name: str, tail: str | None = None,
        into: Mapping[Var, str] | None = None,
    ) -> None:  # fmt: skip
        """One vector of points of a loop over `var`, from `name` on."""
        self.scopes.append(Scope(variables={var: name}))
        mask = None
        if tail:
            mask = self.fresh("m")
            self.line(f"const i32v {mask} = {tail};")
        lanes = Lanes(var, mask)
        for part in body:
            match part:
                case Let():
                    self.scopes[-1].variables[part.var] = self.vector(part.value, lanes)
                    if lanes.varies(part.value):
                        lanes = replace(lanes, bound=lanes.bound | {part.var})
                    else:
                        self.scopes[-1].variables[part.var] = self.scalar(part.value)
                case Put():
                    self._vector_put(part, lanes)
                    self.forget({part.memory})
                case Fold():
                    assert into is not None
                    self._fold(part, lanes, into[part.into])
        lines = self.scopes.pop().lines
        self.scopes[-1].lines.extend(lines)

    def _fold(self, fold: Fold, lanes: Lanes, accumulator: str) -> None:
        value, dtype = self.vector(fold.value, lanes), fold.into.dtype
        if lanes.tail:
            value = f"select_{dtype}({lanes.tail}, {value}, splat_{dtype}({NEUTRAL[fold.kind]}))"
        self.line(f"{accumulator} = {JOIN[fold.kind].format(accumulator, value, dtype)};{_where(fold.span)}")

    def _store(self, put: Put, given: str) -> str:
        """The store of a whole vector."""
        plain = f"store_{put.value.dtype}({given});"
        if not self.streaming or put.memory.kind != "output" or put.memory.dtype is not DType.F32:
            return plain
        return f"{'' if self.streaming == '1' else f'if (!{self.streaming}) {plain} else '}stream_f32({given});"

    def _vector_put(self, put: Put, lanes: Lanes) -> None:
        step, rest = split_affine(put.offset, lanes.var)
        element = str(put.value.dtype)
        value = self.vector(unrounded(put.value), lanes)
        masks = [self.vector(put.guard, lanes)] if put.guard is not None else []
        if lanes.tail:
            masks.append(lanes.tail)
        mask = " & ".join(masks)
        memory = memory_name(put.memory)
        if put.odd is not None:  # both halves of a whole panel
            step, rest = split_affine(put.offset, lanes.var)
            assert rest is not None
            assert step == const(2)
            odd = self.vector(unrounded(put.odd), lanes)
            text = f"store_pairs_{element}({memory} + {self._sum(rest, lanes)}, {value}, {odd});"
        elif put.update:
            at = self.vector(put.offset, lanes) if lanes.varies(put.offset) else f"splat_i64({self.scalar(put.offset)})"
            text = f"atomic_{put.update}_lanes_{element}({memory}, {at}, {mask or 'splat_bool(1)'}, {value});"
        elif rest is not None and step == const(1):
            address = f"{memory} + {self._sum(rest, lanes)}"
            masked = f"store_masked_{element}({address}, {mask}, {value});"
            text = masked if mask else self._store(put, f"{address}, {value}")
        else:
            at = self.vector(put.offset, lanes)
            text = f"scatter_{element}({memory}, {at}, {mask or 'splat_bool(1)'}, {value});"
        self.line(text + _where(put.span))


def _scratch_only(loop: VectorLoop) -> bool:
    """Whether every memory that the loop walks along is scratch, which is padded to whole vectors."""
    puts = [part for part in loop.body if isinstance(part, Put)]
    if any(part.guard is not None or part.update for part in puts):
        return False
    walking = [load for part in loop.body for load in loads(part.value) if loop.var in variables(load)]
    if any(split_affine(load.index[0], loop.var)[0] != const(1) for load in walking):
        return False  # what is read for a point past the end may lie anywhere
    walked = {load.source for load in walking}
    return all(m.kind == "scratch" for m in (*walked, *(put.memory for put in puts)) if isinstance(m, Memory))


def _at_least(extent: Expr, count: int) -> bool:
    """False only when the extent is known to be below `count`: then there is no whole vector."""
    return not (isinstance(extent, Const) and extent.value < count)


def _divides(extent: Expr, count: int) -> bool:
    return binary("mod", extent, const(count)) == const(0)


def _where(span: Span | None) -> str:
    return f" // {os.path.basename(span.file)}:{span.line}" if span else ""


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]
