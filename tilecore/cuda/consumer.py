"""The body of a consumer warpgroup: every statement of the tile program over the fragments that its threads hold.

Products are issued and left in flight until something touches their results; the last one of the loop's body stays in
flight into the next iteration, so that the next products follow it without a gap. A slot of a ring is free when the
last product that reads it is done.
"""

from collections.abc import Sequence

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, const, loads, rewrite, substitute, variables
from tilecore.contract.spec import Place, Tensor
from tilecore.cuda.elements import (
    LINE_POSITION,
    computed,
    computes_line,
    fetched_element,
    fetched_elements,
    readable,
    summed,
)
from tilecore.cuda.errors import CudaError
from tilecore.cuda.flight import Flight, readers_of, to_wait_for
from tilecore.cuda.joins import REDUCTIONS, join_text
from tilecore.cuda.kernel import WARPGROUP, KernelPlan, Ring, extent_of_axis
from tilecore.cuda.levels import Levels, before_loop, declarations, levels_in, product_text, values_of_tile
from tilecore.cuda.masks import inside
from tilecore.cuda.overlap import Overlap
from tilecore.cuda.partial import partial_sums
from tilecore.cuda.products import SHORT, descriptor, own_columns, product_of, wait_for
from tilecore.cuda.roles import GROUP_ROWS, STEP_BYTES, extents, stored_rectangle
from tilecore.cuda.slots import Slots, next_tile, spot
from tilecore.cuda.stores import MEET, exchange, exchanged_tile, staged_store
from tilecore.cuda.values import HALVES, Values, pointer, stored, unrounded
from tilecore.cuda.views import in_bounds
from tilecore.graph import depth_axes
from tilecore.ir import Buffer, Copy, CumSum, Fill, For, Gemm, If, Join, Parallel, Reduce, Stmt, Store, statements

GROUP_ROW = Var("group_row")  # the first row of the warpgroup
TURN = 1  # named barriers of up to 3 warpgroups that take turns; those of `stores` follow


class Consumer:
    """Writes the consumer role of one plan."""

    def __init__(self, plan: KernelPlan, names: dict[Expr, str], walk: list[str]) -> None:
        self.plan = plan
        self.roles = plan.roles
        self.names: dict[Expr, str] = {**names, GROUP_ROW: "group_row"}
        self.walk = walk
        self.lines: list[str] = []
        self.flying: list[Flight] = []  # oldest first
        self.at = "slot"  # of the rings inside the loop
        self.axes: tuple[Var, ...] = ()  # of the parallel loop being written
        self.partial: tuple[str, ...] = ()  # row sums that the four threads of a row keep apart
        self.slots = Slots(plan)
        self.levels = levels_in(plan)

    def body(self) -> list[str]:
        """The role's text."""
        if self.plan.role_registers[0]:
            self.lines.append(f"registers_raise<{self.plan.role_registers[0]}>();")
        self.lines += [
            f"const int thread = threadIdx.x % {WARPGROUP}, warp = thread / 32, lane = threadIdx.x % 32;",
            f"const int group_row = {'0' if self.roles.parts > 1 else f'warpgroup * {GROUP_ROWS}'};",
            "const int own_row = group_row + 16 * warp + lane / 4, own_column = 2 * (lane % 4);",
            "int slot = 0;",
            "u32 phase = 0, once = 0;",
            *(["int spot = 0;"] if self.plan.ahead > 1 else []),
            *(["int row_slot = 0;"] if self.roles.parts > 1 else ["u32 written = 0;"] if self.roles.exchanged else []),
        ]
        if self.plan.split.groups:
            self.lines.append("u32 joined = 0;")
        if self.plan.turns:
            self.lines.append(f"if (warpgroup == consumers - 1) named_arrive({TURN}, {2 * WARPGROUP});")
        self.lines += self.walk
        outer, self.lines = self.lines, []
        self._declare()
        for stmt in self.plan.program.body:
            self._statement(stmt)
        self._drain()
        self.lines += next_tile(self.plan)
        if self.plan.split.groups:
            self.lines.append("joined ^= 1;")
        outer += ["  " + line for line in self.lines]
        outer.append("}")
        if self.plan.staging_bytes:
            outer.append("if (thread == 0) stores_done();")
        for number in range(len(self.plan.split.groups)):  # others may still read what this block has
            outer.append(f"cluster_wait(done_{number}, joined ^ 1);")
        return outer

    def _declare(self) -> None:
        self.lines += [f"float {name}[{count}];" for name, count in self.roles.fragments.items()]
        self.lines += [f"float {name}_part[{self.roles.fragments[name]}];" for name in self.roles.short_sums]
        self.lines += [f"u32 {name}[{count}];" for name, count in self.roles.packed.items()]
        self.lines += [] if self.levels is None else declarations(self.levels)
        self.lines += [f"float {name}[2];" for name in self.roles.statistics]

    def _statement(self, stmt: Stmt) -> None:
        span = stmt.span
        if span is not None and not isinstance(stmt, Copy):
            self.lines.append(f"// {span.file.rsplit('/', 1)[-1]}:{span.line}")
        match stmt:
            case For():
                self._drain()
                self.partial = partial_sums(stmt, self.roles.statistics)
                others = "lane % 4 != 0" + (" || warpgroup != 0" if self.roles.parts > 1 else "")
                self.lines += [f"if ({others}) {name}[0] = {name}[1] = 0.0f;" for name in self.partial]
                self._loop(stmt) if self.plan.overlap is None else self._overlapped(stmt, self.plan.overlap)
                for name in self.partial:
                    self.lines.append(f"join_quads<Sum>({name});")
                    self._join_parts("Sum", name)
                self.partial = ()
            case Copy():
                self._copy(stmt)
            case Gemm():
                self._gemm(stmt)
            case Fill():
                self._drain(stmt)
                self._fill(stmt)
            case Reduce():
                self._drain(stmt)
                self._reduce(stmt)
            case Parallel():
                for store in stmt.body:
                    if store.guard is not None or store.update:
                        what = f"T.atomic_{store.update}" if store.update else "a store under an if"
                        raise CudaError(f"{what} to {store.target.name} has no CUDA form yet")
                self._drain(stmt)
                self._parallel(stmt)
                self._wait_for(readers_of(self.flying, self.slots.last_read_by(stmt)))
                self.lines += self.slots.freed_by([stmt], self.at)
            case CumSum():
                self.lines += summed(stmt, self.roles)
            case Join():
                self._drain()
                for number, group in enumerate(self.plan.split.groups):
                    if stmt is group.joins[0]:
                        self.lines += join_text(group, number, self.plan.split, self.roles)
            case If() if not stmt.otherwise and not any(isinstance(one, Gemm | For) for one in statements(stmt.then)):
                self._drain()
                self.lines.append(f"if ({self._values().text(stmt.condition, guarded=True)}) {{")
                outer, self.lines = self.lines, []
                for inner in stmt.then:
                    self._statement(inner)
                self.lines = [*outer, *("  " + line for line in self.lines), "}"]
            case _:
                raise CudaError(f"{type(stmt).__name__} has no CUDA form yet")

    # ---- the loop and its products ----

    def _loop(self, loop: For) -> None:
        values = self._values()
        assert loop.var.extent is not None
        var = loop.var.name
        first, last = values.text(loop.start), values.text(loop.var.extent)
        if self.plan.turns:
            self._turn()
        self.lines += [f"const int first = {first}, last = {last};", "int before = 0;"]
        if self.levels is not None:
            self.lines += before_loop(self.levels, self._level_origin(self.levels))
        self.lines.append("#pragma unroll 1")
        self.lines.append(f"for (int {var} = first; {var} < last; {var}++) {{")
        outer, self.lines = self.lines, []
        self.names[loop.var] = var
        carried = self._carried(loop)
        self.flying = list(carried)
        for stmt in loop.body:
            self._statement(stmt)
        self._wait_for(sum(flight.carried for flight in self.flying))
        if not carried:
            self._drain()
        stages = max(ring.slots for ring in self.plan.rings)
        self.lines += ["before = slot;", f"if (++slot == {stages}) slot = 0, phase ^= 1;"]
        outer += ["  " + line for line in self.lines]
        self.lines = [*outer, "}"]
        del self.names[loop.var]
        if self.plan.turns:
            self._pass()
        if self.levels is not None and not self.levels.by_warps:
            carried = tuple(Flight(stmt) for stmt in loop.body if isinstance(stmt, Gemm))
        if carried:
            self.lines += [*wait_for(self.roles, 0, f"(last - first) % {SHORT} != 0"), *self._pins(carried)]
            self.lines += self.slots.freed_by([flight.gemm for flight in carried], "before", "last > first")
        self.flying = []
        self.lines += self.slots.freed_by_loop(loop)

    def _carried(self, loop: For) -> tuple[Flight, ...]:
        """What is in flight from one iteration to the next, by writing one down that is thrown away."""
        if not isinstance(loop.body[-1], Gemm):  # what follows products of this iteration runs beside them
            return ()
        if self.roles.parts > 1:  # slots are few: one is free, and asked for again, as soon as it is read
            return ()
        kept, self.lines = self.lines, []
        for stmt in loop.body:
            self._statement(stmt)
        found = tuple(Flight(flight.gemm, carried=True) for flight in self.flying)
        self.lines, self.flying = kept, []
        return found

    def _overlapped(self, loop: For, parts: Overlap) -> None:
        """Scores of an iteration, then sums of the one before it; softmax while those are still being taken."""
        values = self._values()
        assert loop.var.extent is not None
        var = loop.var.name
        first, last = values.text(loop.start), values.text(loop.var.extent)
        stages = max(ring.slots for ring in self.plan.rings)
        self.names[loop.var] = var
        step = ["before = slot, before_phase = phase;", f"if (++slot == {stages}) slot = 0, phase ^= 1;"]
        self.lines += [f"const int first = {first}, last = {last};", "int before = 0;", "u32 before_phase = 0;"]
        self.lines += ["if (first < last) {", f"  int {var} = first;"]
        outer, self.lines = self.lines, []
        self._issue(parts.scores, parts.score_copies, "slot", "phase", turn="all")
        self._wait(parts.scores, 0, "slot")
        for stmt in (*parts.between, *parts.late):
            self._statement(stmt)
        self.lines += [*step, "#pragma unroll 1", f"for ({var} = first + 1; {var} < last; {var}++) {{"]
        head, self.lines = self.lines, []
        self._issue(parts.scores, parts.score_copies, "slot", "phase", turn="take")
        self._issue(parts.sums, parts.sum_copies, "before", "before_phase", turn="give")
        self._wait(parts.scores, 1, "slot")
        for stmt in parts.between:
            self._statement(stmt)
        self._wait(parts.sums, 0, "before")
        for stmt in parts.late:
            self._statement(stmt)
        self.lines += step
        self.lines = [*head, *("  " + line for line in self.lines), "}"]
        self._issue(parts.sums, parts.sum_copies, "before", "before_phase", turn="all")
        self._wait(parts.sums, 0, "before")
        self.lines = [*outer, *("  " + line for line in self.lines), "}"]
        del self.names[loop.var]
        self.lines += self.slots.freed_by_loop(loop)

    def _issue(self, gemm: Gemm, copies: tuple[Copy, ...], slot: str, phase: str, *, turn: str) -> None:
        self.at = slot
        for copy in copies:
            for ring in self.plan.rings:
                if copy is ring.copies[0]:
                    self.lines.append(f"barrier_wait(full_{ring.name} + 8 * {slot}, {phase});")
        if self.plan.turns and turn != "give":
            self._turn()
        self._product(gemm)
        if self.plan.turns and turn != "take":
            self._pass()
        self.at = "slot"

    def _wait(self, gemm: Gemm, flying: int, slot: str) -> None:
        self.lines += [f"products_wait<{flying}>();", f"pin({gemm.c.name});"]
        self.lines += self.slots.freed_by([gemm], slot)

    def _turn(self) -> None:
        self.lines.append(f"named_sync({TURN} + warpgroup, {2 * WARPGROUP});")

    def _pass(self) -> None:
        following = "(warpgroup + 1 == consumers ? 0 : warpgroup + 1)"
        self.lines.append(f"named_arrive({TURN} + {following}, {2 * WARPGROUP});")

    def _gemm(self, gemm: Gemm) -> None:
        if self.levels is not None:
            self._decoded_product(gemm, self.levels)
            return
        products = [stmt for stmt in self.plan.loop.body if isinstance(stmt, Gemm)]
        if self.plan.turns and gemm is products[-1]:
            self._turn()
        self._product(gemm)
        self.flying.append(Flight(gemm))
        if self.plan.turns and gemm is products[0]:
            self._pass()

    def _decoded_product(self, gemm: Gemm, levels: Levels) -> None:
        product, var = product_of(gemm, self.roles), self.plan.loop.var.name
        when = ("slot", "") if levels.by_warps else ("before", f"{var} > first")
        right = self._described(gemm.b, product.b_minor, "")
        call = f"{product.name}({gemm.c.name}, {gemm.a.name} + 4 * x, {right}, 1);"
        tile = self.roles.staged[gemm.b.name]
        self.lines += product_text(levels, gemm, tile, call, self.slots.freed_by([gemm], *when))

    def _level_origin(self, levels: Levels) -> str:
        return self._values().text(levels.tile.origin[0])

    def _product(self, gemm: Gemm) -> None:
        product = product_of(gemm, self.roles)
        depth = extents(gemm.a)[depth_axes(gemm)[0][1]]
        if gemm.a.name in self.roles.packed:
            left = f"{gemm.a.name} + 4 * x"
            self.lines.append(f"pin({gemm.a.name});")
        elif gemm.a.name in self.roles.exchanged:
            left = f"depth_major(tile_{gemm.a.name} + x / 4 * {GROUP_ROWS * 128}) + x % 4 * 2"
        elif self.roles.parts_of(gemm.c.name) > 1:
            left = self._described(gemm.a, product.a_minor, "")
        else:
            rows = self.roles.staged[gemm.a.name].chunk_rows
            # a warpgroup's rows: 64 rows of each chunk along the depth, or one chunk of rows
            skip = rows * 128 if product.a_minor else GROUP_ROWS * 128
            left = self._described(gemm.a, product.a_minor, f" + warpgroup * {skip}")
        if gemm.b.name in self.roles.exchanged:
            right = f"depth_minor({exchanged_tile(self.plan, gemm.b)}, {GROUP_ROWS * 128}) + x * {16 * 128 // 16}"
        else:
            right = self._described(gemm.b, product.b_minor, own_columns(product, gemm, self.roles))
        result, add = gemm.c.name, "x != 0" if gemm.clear else "1"
        if result in self.roles.short_sums:
            result, add = f"{result}_part", f"x != 0 || ({self.plan.loop.var.name} - first) % {SHORT} != 0"
        self.lines += [
            f"pin({result});",
            "products_fence();",
            f"TILE_UNROLL for (int x = 0; x < {depth * gemm.a.dtype.row.bytes // STEP_BYTES}; x++)",
            f"  {product.name}({result}, {left}, {right}, {add});",
            "products_commit();",
        ]

    def _slot(self, buffer: Buffer) -> str:
        ring = self._ring(buffer)
        return spot(self.plan) if ring.copies[0] in self.plan.program.body else self.at

    def _ring(self, buffer: Buffer) -> Ring:
        holder = self.roles.holder(buffer)
        return next(ring for ring in self.plan.rings if any(tile.buffer == holder for tile in ring.tiles))

    def _described(self, buffer: Buffer, minor: bool, skip: str) -> str:
        return descriptor(self.roles.staged[self.roles.holder(buffer).name], self._slot(buffer), minor=minor, skip=skip)

    def _drain(self, stmt: Stmt | None = None) -> None:
        """Wait for the products in flight that `stmt` has to wait for, or for all, and free what they read."""
        self._wait_for(len(self.flying) if stmt is None else to_wait_for(self.flying, stmt))

    def _wait_for(self, count: int) -> None:
        if count == 0:
            return
        done, self.flying = self.flying[:count], self.flying[count:]
        condition = f"({self.plan.loop.var.name} - first) % {SHORT} == {SHORT - 1}"
        self.lines += [*wait_for(self.roles, len(self.flying), condition), *self._pins(done)]
        for flight in done:
            where = ("before", f"{self.plan.loop.var.name} > first") if flight.carried else ("slot", "")
            self.lines += self.slots.freed_by([flight.gemm], *where)

    def _pins(self, done: Sequence[Flight]) -> list[str]:
        names = dict.fromkeys(name for flight in done for name in (flight.gemm.c.name, flight.gemm.a.name))
        held = {name for name in self.roles.fragments if name not in self.roles.short_sums} | set(self.roles.packed)
        return [f"pin({name});" for name in names if name in held]

    def _copy(self, copy: Copy) -> None:
        source, target = copy.src.source, copy.dst.source
        if self.levels is not None and target == self.levels.tile.buffer:
            self.lines += values_of_tile(
                self.levels, self._values().text(self.levels.tile.origin[0]), self.plan.loop.var.name
            )
        for ring in self.plan.rings:
            if copy is ring.copies[0]:
                in_loop = ring.copies[0] not in self.plan.program.body
                at, phase = ("slot", "phase") if in_loop else (spot(self.plan), "once")
                self.lines.append(f"barrier_wait(full_{ring.name} + 8 * {at}, {phase});")
        if not (isinstance(source, Buffer) and isinstance(target, Buffer)):
            return
        self._drain(copy)
        if target.name in self.roles.exchanged:
            self.lines += exchange(self.plan, source, self._count(source), target)
        elif target.name in self.roles.packed:
            count = self.roles.packed[target.name]
            pair = f"pair_{target.dtype}({source.name}[2 * x], {source.name}[2 * x + 1])"
            self.lines.append(f"TILE_UNROLL for (int x = 0; x < {count}; x++) {target.name}[x] = {pair};")
        else:
            count = self._count(target)
            self.lines.append(f"TILE_UNROLL for (int x = 0; x < {count}; x++) {target.name}[x] = {source.name}[x];")

    # ---- warpgroups that share rows ----

    def _join_parts(self, kind: str, name: str) -> None:
        if self.roles.parts > 1:
            size = self.roles.parts * GROUP_ROWS * 4
            self.lines.append(
                f"join_groups<{kind}, {self.roles.parts}>({name}, row_parts + row_slot * {size}, {MEET});"
            )
            self.lines.append("row_slot ^= 1;")

    # ---- work on elements ----

    def _count(self, buffer: Buffer) -> int:
        return 2 if buffer.name in self.roles.statistics else self.roles.fragments[buffer.name]

    def _fill(self, fill: Fill) -> None:
        value = self._values().text(fill.value)
        count = self._count(fill.dst)
        self.lines.append(f"TILE_UNROLL for (int x = 0; x < {count}; x++) {fill.dst.name}[x] = {value};")

    def _reduce(self, reduce: Reduce) -> None:
        if reduce.axis != 1 or reduce.dst.name not in self.roles.statistics:
            raise CudaError(f"a reduction of {reduce.src.name} over axis {reduce.axis}: rows alone are reduced")
        if reduce.dst.name in self.partial:
            self.lines.append(f"add_columns({reduce.src.name}, {reduce.dst.name});")
            return
        kind = REDUCTIONS[reduce.kind]
        if self.roles.parts > 1:
            name = reduce.dst.name
            self.lines += ["{", "float part[2];", f"reduce_columns<{kind}>({reduce.src.name}, part, true);"]
            self._join_parts(kind, "part")
            value = "part[h]" if reduce.clear else f"{kind}::join({name}[h], part[h])"
            self.lines += [f"TILE_UNROLL for (int h = 0; h < 2; h++) {name}[h] = {value};", "}"]
            return
        clear = "true" if reduce.clear else "false"
        self.lines.append(f"reduce_columns<{kind}>({reduce.src.name}, {reduce.dst.name}, {clear});")

    def _values(self, more: dict[Expr, str] | None = None) -> Values:
        return Values({**self.names, **(more or {})}, self._element)

    def _element(self, load: Load) -> str | None:
        if not isinstance(load.source, Buffer):
            return None
        name = load.source.name
        if name in self.roles.fragments:
            return f"{name}[x]"
        if name in self.roles.statistics:
            return f"{name}[x >> 1 & 1]"
        if name in self.roles.staged or name in self.roles.lines:
            return fetched_element(load, self.axes, self.roles)
        raise CudaError(f"{name} is read element by element; only products and row values are")

    def _parallel(self, stmt: Parallel) -> None:
        self.axes = stmt.axes
        fetched = fetched_elements(stmt, self.roles, self._where(stmt), self._slot)
        if fetched:
            self.lines += ["{", *fetched]
        if stmt in self.plan.staged_stores:
            self._staged_store(stmt)
        else:
            for store in stmt.body:
                self._check_indices(stmt, store)
                if isinstance(store.target, Place):
                    self._direct_store(stmt, store)
                elif store.target.name in (*self.roles.packed, *self.roles.lines):
                    self._computed(stmt, store, store.target)
                else:
                    self._elementwise(stmt, store)
        if fetched:
            self.lines.append("}")

    def _computed(self, stmt: Parallel, store: Store, target: Buffer) -> None:
        value, names, positions = self._positions(stmt, unrounded(store.value, target.dtype))
        values = self._values(names)
        text = values.text(value)
        self.lines += computed(target, self.roles, [*positions, *values.lines], text)

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

    def _elementwise(self, stmt: Parallel, store: Store) -> None:
        assert isinstance(store.target, Buffer)
        target = store.target
        masks = inside(store.value, self._spread(stmt)) if len(stmt.axes) == 2 else None
        if masks is None:
            self.lines += self._each(stmt, target, store.value)
            return
        needed, plain = masks
        if any(isinstance(slack, Const) and slack.value < 0 for slack in needed):
            self.lines += self._each(stmt, target, store.value)
            return
        values = self._values()
        condition = " && ".join(f"{values.text(slack)} >= 0" for slack in needed)
        self.lines += [f"if ({condition}) {{  // no element of the warpgroup is masked"]
        self.lines += ["  " + line for line in self._each(stmt, target, plain)]
        self.lines += ["} else {", *("  " + line for line in self._each(stmt, target, store.value)), "}"]

    def _spread(self, stmt: Parallel) -> dict[Var, tuple[Expr, Expr]]:
        rows, columns = stmt.axes
        first = GROUP_ROW if self._on_rows(stmt) else const(0)
        return {
            rows: (first + 0, first + (GROUP_ROWS - 1)),
            columns: (const(0), extent_of_axis(stmt, 1) - 1),
        }

    def _each(self, stmt: Parallel, target: Buffer, value: Expr) -> list[str]:
        if isinstance(value, Load) and value.source == target:
            return []
        value, names, positions = self._positions(stmt, value)
        values = self._values(names)
        text = values.text(value)
        count = self._count(target)
        step = "x" if len(stmt.axes) == 2 else "2 * x"  # of a row value, element 2 h stands for half h
        head = f"TILE_UNROLL for (int y = 0; y < {count}; y++) {{ const int x = {step.replace('x', 'y')};"
        index = "x" if len(stmt.axes) == 2 else "y"
        body = (*positions, *values.lines, f"{target.name}[{index}] = {text};")
        return [head, *("  " + line for line in body), "}"]

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
                    text = f"min({text}, {self._values().text(limit - 1)})"
                lines.append(f"const int {inside_of[var].name} = {text};")
                names[inside_of[var]] = inside_of[var].name
        return clipped, names, lines

    def _where(self, stmt: Parallel) -> tuple[str, str]:
        """Row and column of element x."""
        if computes_line(stmt, self.roles):
            return LINE_POSITION, ""
        column = "own_column + (x >> 2) * 8 + (x & 1)"
        if len(stmt.axes) == 2 and (self.roles.sharing(stmt.axes[0]) or 1) > 1:
            column += f" + warpgroup * {2 * self._elements(stmt)}"
        row = "own_row" if self._on_rows(stmt) else "own_row - group_row"
        return f"{row} + (x >> 1 & 1) * 8", column

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

    def _direct_store(self, stmt: Parallel, store: Store) -> None:
        place = store.target
        assert isinstance(place, Place)
        value, names, positions = self._positions(stmt, store.value)
        where = self._where(stmt)
        free = {var: f"{var.name}_at" for var in stmt.axes}
        values, places = self._values(names), self._values({**free})
        text = values.text(value)
        index = tuple(substitute(position, dict(zip(place.axes, store.index, strict=True))) for position in place.index)
        guards = [
            f"{places.text(position)} < {places.text(extent)}"
            for position, extent in zip(store.index, place.shape, strict=True)
            if set(stmt.axes) & set(variables(position))
        ]
        count = self._elements(stmt)
        step = 1 if len(stmt.axes) == 2 else 2
        self.lines.append(f"TILE_UNROLL for (int x = 0; x < {count}; x += {step}) {{")
        at = [f"const int {free[var]} = {text_at};" for var, text_at in zip(stmt.axes, where, strict=False)]
        write = f"{pointer(place.tensor)}[{places.offset(place.tensor, index)}] = {stored(place.dtype, text)};"
        own = "" if len(stmt.axes) == 2 else " && lane % 4 == 0"
        body = [*at, *positions, *values.lines, *places.lines, f"if ({' && '.join(guards)}{own}) {write}"]
        self.lines += [*("  " + line for line in body), "}"]

    def _elements(self, stmt: Parallel) -> int:
        if len(stmt.axes) == 1:
            return 4
        extent = extent_of_axis(stmt, 1)
        assert isinstance(extent, Const)
        return int(extent.value) // 2 // (self.roles.sharing(stmt.axes[0]) or 1)

    def _staged_store(self, stmt: Parallel) -> None:
        self._check_indices(stmt, stmt.body[0])
        found = stored_rectangle(stmt)
        assert found is not None
        place, _, origin = found
        assert place.dtype in HALVES or place.dtype is DType.I16
        value, names, positions = self._positions(stmt, stmt.body[0].value)
        values = self._values(names)
        text = values.text(unrounded(value, place.dtype))
        starts = [self._values().text(start) for start in origin]
        self.lines += staged_store(self.plan, stmt, starts, [*positions, *values.lines], text)
