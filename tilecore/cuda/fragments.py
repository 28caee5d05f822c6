"""Element work on fragments: what each thread does to the part of products, row values and lines that it holds.

Comes in: statements of the tile program that are no products and no copies from memory. Goes out: text. Threads of a
warp have the same elements whether warpgroups or single warps multiply, so all cards share this.
"""

from collections.abc import Callable, Mapping

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, const, loads, rewrite, substitute, variables
from tilecore.contract.spec import Place, Tensor
from tilecore.cuda.elements import (
    LINE_POSITION,
    computed,
    computes_line,
    fetched_element,
    fetched_elements,
    fetched_flags,
    readable,
)
from tilecore.cuda.errors import CudaError
from tilecore.cuda.gates import GATE, gate_of
from tilecore.cuda.joins import REDUCTIONS
from tilecore.cuda.kernel import KernelPlan, extent_of_axis
from tilecore.cuda.masks import inside
from tilecore.cuda.near import near_tanh
from tilecore.cuda.roles import GROUP_ROWS, stored_rectangle
from tilecore.cuda.slopes import slopes
from tilecore.cuda.stores import MEET, Lines
from tilecore.cuda.values import HALVES, Values, literal, pointer, stored, unrounded
from tilecore.cuda.views import in_bounds
from tilecore.ir import Buffer, Fill, Parallel, Reduce, Store

GROUP_ROW = Var("group_row")  # the first row of the warpgroup
# (plan, statement, the rectangle's origin, lines before each element, element x)
StagedStore = Callable[[KernelPlan, Parallel, list[str], list[str], str, Lines | None], list[str]]


class Fragments:
    """Writes the element work of one plan. `names` are shared with who writes the rest, `slot` says where in its ring a
    tile lies.
    """

    def __init__(
        self, plan: KernelPlan, names: dict[Expr, str], slot: Callable[[Buffer], str], staged_store: StagedStore
    ) -> None:
        self.plan = plan
        self.roles = plan.roles
        self.names = names
        self.slot = slot
        self.staged_store = staged_store
        self.axes: tuple[Var, ...] = ()  # of the parallel loop being written
        self.ahead: tuple[Parallel, ...] = ()  # whose tiles are in registers already
        self.partial: tuple[str, ...] = ()  # row sums that the four threads of a row keep apart
        self.halves = 2 * self.roles.strips  # rows of a thread, 8 apart
        self.half = f"x >> 1 & {self.halves - 1}"  # of element x
        self.eight = f"x >> {(2 * self.halves).bit_length() - 1}"  # its group of 8 columns

    def declarations(self) -> list[str]:
        """Registers that tiles are held in."""
        lines = [f"float {name}[{count}];" for name, count in self.roles.fragments.items()]
        lines += [f"float {name}_part[{self.roles.fragments[name]}];" for name in self.roles.short_sums]
        lines += [f"u32 {name}[{count}];" for name, count in self.roles.packed.items()]
        return lines + [f"float {name}[{self.halves}];" for name in self.roles.statistics]

    def values(self, more: dict[Expr, str] | None = None) -> Values:
        """What writes expressions here; `more` are further names."""
        return Values({**self.names, **(more or {})}, self._element)

    def count(self, buffer: Buffer) -> int:
        """Elements of a thread."""
        return self.halves if buffer.name in self.roles.statistics else self.roles.fragments[buffer.name]

    # ---- row values and whole fragments ----

    def joined_parts(self, kind: str, name: str) -> list[str]:
        """Row values of warpgroups that share rows, brought together; nothing where none do."""
        if self.roles.parts == 1:
            return []
        size = self.roles.parts * GROUP_ROWS * 4
        call = f"join_groups<{kind}, {self.roles.parts}>({name}, row_parts + row_slot * {size}, {MEET});"
        return [call, "row_slot ^= 1;"]

    def opened(self, partial: tuple[str, ...]) -> list[str]:
        """Begin to keep the sums `partial` apart: what they have so far counts once."""
        self.partial = partial
        others = "lane % 4 != 0" + (" || warpgroup != 0" if self.roles.parts > 1 else "")
        zeros = "".join(f"{{name}}[{half}] = " for half in range(self.halves)) + "0.0f;"
        return [f"if ({others}) {zeros.format(name=name)}" for name in partial]

    def closed(self) -> list[str]:
        """Bring those together."""
        lines: list[str] = []
        for name in self.partial:
            lines += [f"join_quads<Sum>({name});", *self.joined_parts("Sum", name)]
        self.partial = ()
        return lines

    def fill(self, fill: Fill) -> list[str]:
        """Every element the same."""
        value = self.values().text(fill.value)
        return [f"TILE_UNROLL for (int x = 0; x < {self.count(fill.dst)}; x++) {fill.dst.name}[x] = {value};"]

    def packed(self, source: Buffer, target: Buffer) -> list[str]:
        """A fragment as the left operand of a product, in pairs."""
        pair = f"pair_{target.dtype}({source.name}[2 * x], {source.name}[2 * x + 1])"
        count = self.roles.packed[target.name]
        return [f"TILE_UNROLL for (int x = 0; x < {count}; x++) {target.name}[x] = {pair};"]

    def copied(self, source: Buffer, target: Buffer) -> list[str]:
        """A fragment to another one."""
        return [f"TILE_UNROLL for (int x = 0; x < {self.count(target)}; x++) {target.name}[x] = {source.name}[x];"]

    def reduce(self, reduce: Reduce) -> list[str]:
        """A reduction over the columns of a fragment."""
        name = reduce.dst.name
        if reduce.axis != 1 or name not in self.roles.statistics:
            raise CudaError(f"a reduction of {reduce.src.name} over axis {reduce.axis}: rows alone are reduced")
        if name in self.partial:
            return [f"add_columns({reduce.src.name}, {name});"]
        kind = REDUCTIONS[reduce.kind]
        if self.roles.parts > 1:
            value = "part[h]" if reduce.clear else f"{kind}::join({name}[h], part[h])"
            return [
                "{",
                "float part[2];",
                f"reduce_columns<{kind}>({reduce.src.name}, part, true);",
                *self.joined_parts(kind, "part"),
                f"TILE_UNROLL for (int h = 0; h < 2; h++) {name}[h] = {value};",
                "}",
            ]
        clear = "true" if reduce.clear else "false"
        return [f"reduce_columns<{kind}>({reduce.src.name}, {name}, {clear});"]

    # ---- parallel loops ----

    def parallel(self, stmt: Parallel) -> list[str]:
        """A parallel loop: what it reads of tiles, then its stores."""
        for store in stmt.body:
            if store.guard is not None or store.update:
                what = f"T.atomic_{store.update}" if store.update else "a store under an if"
                raise CudaError(f"{what} to {store.target.name} has no CUDA form yet")
        self.axes = stmt.axes
        fetched = [] if stmt in self.ahead else self.fetched(stmt)
        lines: list[str] = []
        if stmt in self.plan.staged_stores:
            lines += self._staged_store(stmt)
        else:
            for store in stmt.body:
                self._check_indices(stmt, store)
                if isinstance(store.target, Place):
                    lines += self._direct_store(stmt, store)
                elif store.target.name in (*self.roles.packed, *self.roles.lines):
                    lines += self._computed(stmt, store, store.target)
                else:
                    lines += self._elementwise(stmt, store)
        return ["{", *fetched, *lines, "}"] if fetched else lines

    def fetched(self, stmt: Parallel) -> list[str]:
        """What a parallel loop reads of tiles in shared memory, in registers."""
        return fetched_elements(stmt, self.roles, self._where(stmt), self.slot)

    def _element(self, load: Load) -> str | None:
        if not isinstance(load.source, Buffer):
            return None
        name = load.source.name
        if name in self.roles.fragments:
            return f"{name}[x]"
        if name in self.roles.statistics:
            return f"{name}[{self.half}]"
        if name in self.roles.staged or name in self.roles.lines:
            return fetched_element(load, self.axes, self.roles)
        raise CudaError(f"{name} is read element by element; only products and row values are")

    def _computed(self, stmt: Parallel, store: Store, target: Buffer) -> list[str]:
        value, names, positions = self._positions(stmt, unrounded(store.value, target.dtype))
        values = self.values(names)
        text = values.text(value)
        return computed(target, self.roles, [*positions, *values.lines], text)

    def _check_indices(self, stmt: Parallel, store: Store) -> None:
        """Fragments are read and written at their own element."""
        accesses = [(load.source, load.index) for load in loads(store.value) if isinstance(load.source, Buffer)]
        if isinstance(store.target, Buffer):
            accesses.append((store.target, store.index))
        for buffer, index in accesses:
            fetched = readable(buffer, index, stmt.axes, self.roles)
            if not (fetched or index == stmt.axes[: len(index)]) or self.roles.sharing(stmt.axes[0]) is None:
                found = ", ".join(map(str, index))
                raise CudaError(f"{buffer.name} is indexed by {found}: fragments by their own axes")

    def _elementwise(self, stmt: Parallel, store: Store) -> list[str]:
        assert isinstance(store.target, Buffer)
        target = store.target
        masks = inside(store.value, self._spread(stmt)) if len(stmt.axes) == 2 else None
        all_of_it = self._near_or_far(stmt, target, store.value)
        if masks is None or any(isinstance(slack, Const) and slack.value < 0 for slack in masks.needed):
            return all_of_it
        values = self.values()
        conditions = [f"{values.text(slack)} >= 0" for slack in masks.needed]
        conditions += [f"flags_are<{int(not one.negated)}>({self._tile(one.line)})" for one in masks.flags]
        whose = "warp" if masks.flags else "warpgroup"
        return [
            f"if ({' && '.join(conditions)}) {{  // no element of the {whose} is masked",
            *("  " + line for line in self._near_or_far(stmt, target, masks.value)),
            "} else {",
            *("  " + line for line in self._each(stmt, target, store.value)),
            "}",
        ]

    def _near_or_far(self, stmt: Parallel, target: Buffer, value: Expr) -> list[str]:
        near = near_tanh(value) if len(stmt.axes) == 2 else None
        if near is None:
            return self._each(stmt, target, value)
        return [
            f"if (all_within({near.buffer.name}, {literal(near.limit)})) {{",
            *("  " + line for line in self._each(stmt, target, value, near.texts)),
            "} else {",
            *("  " + line for line in self._each(stmt, target, value)),
            "}",
        ]

    def _spread(self, stmt: Parallel) -> dict[Var, tuple[Expr, Expr]]:
        rows, columns = stmt.axes
        first = GROUP_ROW if self._on_rows(stmt) else const(0)
        return {
            rows: (first + 0, first + (GROUP_ROWS * self.roles.strips - 1)),
            columns: (const(0), extent_of_axis(stmt, 1) - 1),
        }

    def _each(self, stmt: Parallel, target: Buffer, value: Expr, texts: Mapping[Expr, str] | None = None) -> list[str]:
        """Element by element; `texts` of parts that have a form of their own."""
        if isinstance(value, Load) and value.source == target:
            return []
        starts, sloped = self._sloped(stmt, value)
        value, names, positions = self._positions(stmt, value)
        values = self.values({**names, **sloped, **(texts or {})})
        text = values.text(value)
        count = self.count(target)
        step = "x" if len(stmt.axes) == 2 else "2 * x"  # of a row value, element 2 h stands for half h
        head = f"TILE_UNROLL for (int y = 0; y < {count}; y++) {{ const int x = {step.replace('x', 'y')};"
        index = "x" if len(stmt.axes) == 2 else "y"
        body = (*positions, *values.lines, f"{target.name}[{index}] = {text};")
        before = [*starts, *fetched_flags(value, self._where(stmt)[1], self._tile)]
        lines = [head, *("  " + line for line in body), "}"]
        return ["{", *before, *lines, "}"] if before else lines

    def _sloped(self, stmt: Parallel, value: Expr) -> tuple[list[str], dict[Expr, str]]:
        """(lines with those of a thread's first element, texts) of parts that grow with positions."""
        lines: list[str] = []
        texts: dict[Expr, str] = {}
        if len(stmt.axes) != 2:
            return lines, texts
        rows, columns = self._where(stmt)
        for number, slope in enumerate(slopes(value, (stmt.axes[0], stmt.axes[1]))):
            first = self.values({stmt.axes[0]: f"({rows})", stmt.axes[1]: f"({columns})"})
            factor = literal(const(slope.factor, DType.F32))
            position = first.text(slope.position, guarded=True)
            lines += [
                f"float slope_{number};",
                f"{{ const int x = 0; slope_{number} = {factor} * (float)({position}); }}",
            ]
            row, column = slope.steps
            step = f"{row} * (({self.half}) * 8) + {column} * (({self.eight}) * 8 + (x & 1))"
            texts[slope.part] = f"(slope_{number} + {factor} * (float)({step}))"
        return lines, texts

    def _tile(self, buffer: Buffer) -> str:
        """Where a tile in shared memory lies."""
        return f"tile_{buffer.name} + {self.slot(buffer)} * {self.roles.staged[buffer.name].bytes}"

    def _positions(self, stmt: Parallel, value: Expr) -> tuple[Expr, dict[Expr, str], list[str]]:
        """`value`, and row and column of element x; where memory is read, and there alone, clipped to what exists."""
        where = self._where(stmt)
        outside = {load for load in loads(value) if isinstance(load.source, Tensor) and not in_bounds(load)}
        read = {var for load in outside for var in variables(load)}
        inside_of = {var: Var(f"{var.name}_in") for var in stmt.axes if var in read}

        def clip(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node not in outside:
                return None
            moved: dict[Expr, Expr] = {**inside_of}
            return Load(node.source, tuple(substitute(entry, moved) for entry in node.index), node.span)

        clipped = rewrite(value, clip)
        names: dict[Expr, str] = {}
        lines: list[str] = []
        for var, text in zip(stmt.axes, where, strict=False):
            if var in variables(clipped):
                lines.append(f"const int {var.name} = {text};")
                names[var] = var.name
            if var in inside_of:
                for limit in self._limits(var):
                    text = f"min({text}, {self.values().text(limit - 1)})"
                lines.append(f"const int {inside_of[var].name} = {text};")
                names[inside_of[var]] = inside_of[var].name
        return clipped, names, lines

    def _where(self, stmt: Parallel) -> tuple[str, str]:
        """Row and column of element x."""
        if computes_line(stmt, self.roles):
            return LINE_POSITION, ""
        column = f"own_column + ({self.eight}) * 8 + (x & 1)"
        if len(stmt.axes) == 2 and (self.roles.sharing(stmt.axes[0]) or 1) > 1:
            column += f" + warpgroup * {2 * self._elements(stmt)}"
        row = "own_row" if self._on_rows(stmt) else "own_row - group_row"
        return f"{row} + ({self.half}) * 8", column

    def _on_rows(self, stmt: Parallel) -> bool:
        """Whether the statement goes over the kernel's rows, and not over others that warpgroups share."""
        return self.roles.graph.classes[stmt.axes[0]] == self.roles.rows_class

    def _limits(self, var: Var) -> tuple[Expr, ...]:
        graph = self.roles.graph
        own = graph.classes[var]
        limits = [bound.limit for bound in graph.bounds if graph.classes[bound.axis] == own]
        known = [limit for limit in limits if all(free in self.names for free in variables(limit))]
        if not known:
            raise CudaError(f"{var.name} indexes memory with nothing to say how far it goes")
        return tuple(dict.fromkeys(known))

    # ---- stores ----

    def _direct_store(self, stmt: Parallel, store: Store) -> list[str]:
        place = store.target
        assert isinstance(place, Place)
        value, names, positions = self._positions(stmt, store.value)
        where = self._where(stmt)
        free = {var: f"{var.name}_at" for var in stmt.axes}
        values, places = self.values(names), self.values({**free})
        text = values.text(value)
        index = tuple(substitute(position, dict(zip(place.axes, store.index, strict=True))) for position in place.index)
        guards = [
            f"{places.text(position)} < {places.text(extent)}"
            for position, extent in zip(store.index, place.shape, strict=True)
            if set(stmt.axes) & set(variables(position))
        ]
        count = self._elements(stmt)
        step = 1 if len(stmt.axes) == 2 else 2
        at = [f"const int {free[var]} = {text_at};" for var, text_at in zip(stmt.axes, where, strict=False)]
        write = f"{pointer(place.tensor)}[{places.offset(place.tensor, index)}] = {stored(place.dtype, text)};"
        own = "" if len(stmt.axes) == 2 else " && lane % 4 == 0"
        body = [*at, *positions, *values.lines, *places.lines, f"if ({' && '.join(guards)}{own}) {write}"]
        head = f"TILE_UNROLL for (int x = 0; x < {count}; x += {step}) {{"
        return [head, *("  " + line for line in body), "}"]

    def _elements(self, stmt: Parallel) -> int:
        if len(stmt.axes) == 1:
            return 2 * self.halves
        extent = extent_of_axis(stmt, 1)
        assert isinstance(extent, Const)
        return int(extent.value) // 2 // (self.roles.sharing(stmt.axes[0]) or 1) * self.roles.strips

    def _staged_store(self, stmt: Parallel) -> list[str]:
        self._check_indices(stmt, stmt.body[0])
        found = stored_rectangle(stmt)
        assert found is not None
        place, _, origin = found
        assert place.dtype in HALVES or place.dtype is DType.I16
        value, names, positions = self._positions(stmt, stmt.body[0].value)
        value = unrounded(value, place.dtype)
        starts = [self.values().text(start) for start in origin]
        gate, exponent = gate_of(value), None
        if gate is not None and self.plan.profile.warpgroups:
            own = self.values(names)
            text = own.text(gate.exponent)
            exponent = [*positions, *own.lines], text
            value, names = gate.value, names | {GATE: "gates[y]"}
        values = self.values(names)
        text = values.text(value)
        return self.staged_store(self.plan, stmt, starts, [*positions, *values.lines], text, exponent)
