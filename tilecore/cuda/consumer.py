"""The body of a consumer warpgroup: every statement of the tile program over the fragments that its threads hold.

Products are issued and left in flight until something touches their results; the last one of the loop's body stays in
flight into the next iteration, so that the next products follow it without a gap. A slot of a ring is free when the
last product that reads it is done.
"""

from collections.abc import Sequence
from itertools import groupby

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr
from tilecore.cuda.apart import apart_text
from tilecore.cuda.elements import summed
from tilecore.cuda.errors import CudaError
from tilecore.cuda.flight import Flight, readers_of, to_wait_for
from tilecore.cuda.fragments import GROUP_ROW, Fragments
from tilecore.cuda.joins import join_text
from tilecore.cuda.kernel import WARPGROUP, KernelPlan, Ring
from tilecore.cuda.levels import Levels, before_loop, declarations, levels_in, product_text, values_of_tile
from tilecore.cuda.overlap import Overlap
from tilecore.cuda.partial import partial_sums
from tilecore.cuda.products import descriptor, own_columns, product_of, short_steps, wait_for
from tilecore.cuda.reference import LARGE, LARGEST
from tilecore.cuda.roles import GROUP_ROWS, STEP_BYTES, extents
from tilecore.cuda.slots import Slots, next_tile, place_in, spot
from tilecore.cuda.stores import exchange, exchanged_tile, staged_store
from tilecore.graph import depth_axes
from tilecore.ir import Buffer, Copy, CumSum, Fill, For, Gemm, If, Join, Parallel, Reduce, Stmt, statements

TURN = 1  # named barriers of up to 3 warpgroups that take turns; those of `stores` follow


class Consumer:
    """Writes the consumer role of one plan."""

    def __init__(self, plan: KernelPlan, names: dict[Expr, str], walk: list[str], number: str) -> None:
        self.plan = plan
        self.roles = plan.roles
        self.names: dict[Expr, str] = {**names, GROUP_ROW: "group_row"}
        self.walk, self.number = walk, number  # the head of the loop over tiles, and which of them one is
        self.lines: list[str] = []
        self.flying: list[Flight] = []  # oldest first
        self.at = "slot"  # of the rings inside the loop
        self.slots = Slots(plan)
        self.begun: tuple[Copy, ...] = ()  # copies that were waited for already
        self.work = Fragments(plan, self.names, self._slot, staged_store)
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
        exchanges = 0 if self.plan.split.apart else len(self.plan.split.groups)
        if exchanges:
            self.lines.append("u32 joined = 0;")
        if self.plan.turns:
            self.lines.append(f"if (warpgroup == consumers - 1) named_arrive({TURN}, {2 * WARPGROUP});")
        self.lines += self.walk
        outer, self.lines = self.lines, []
        self.lines += self.work.declarations()
        self.lines += [] if self.levels is None else declarations(self.levels)
        body = self.plan.program.body
        met = next((at for at, stmt in enumerate(body) if isinstance(stmt, Join)), len(body))
        apart = body[met:] if self.plan.split.apart else ()
        self.lines += self._written(body[: len(body) - len(apart)])
        self._drain()
        if apart:
            self._check_free(apart)
            self.lines += apart_text(apart, self.plan.split, self.roles, self._written)
        self.lines += next_tile(self.plan)
        if exchanges:
            self.lines.append("joined ^= 1;")
        outer += ["  " + line for line in self.lines]
        outer += ["}"] if self.plan.reference is None else ["}", "}"]
        if self.plan.staging_bytes:
            outer.append("if (thread == 0) stores_done();")
        for number in range(exchanges):  # others may still read what this block has
            outer.append(f"cluster_wait(done_{number}, joined ^ 1);")
        return outer

    def _written(self, body: Sequence[Stmt]) -> list[str]:
        outer, self.lines = self.lines, []
        for stmt in body:
            self._statement(stmt)
        found, self.lines = self.lines, outer
        return found

    def _check_free(self, tail: Sequence[Stmt]) -> None:
        """CudaError where slots of rings would be handed back by the last task alone."""
        last = self.slots.last_reader
        kept = [name for name, reader in last.items() if any(reader is stmt for stmt in statements(tuple(tail)))]
        if kept:
            raise CudaError(f"{', '.join(kept)} is read after the joins of tasks that run apart")

    def _statement(self, stmt: Stmt) -> None:
        span = stmt.span
        if span is not None and not isinstance(stmt, Copy):
            self.lines.append(f"// {span.file.rsplit('/', 1)[-1]}:{span.line}")
        match stmt:
            case For():
                self._drain()
                self.lines += self.work.opened(partial_sums(stmt, self.roles.statistics))
                self._loop(stmt) if self.plan.overlap is None else self._overlapped(stmt, self.plan.overlap)
                self.lines += self.work.closed()
                for one in () if self.plan.reference is None else self.plan.reference.sums:
                    self.lines.append(f"if (pass == 0) mark_unless_finite(again_at, {self.number}, {one.name});")
            case Copy():
                if stmt not in self.begun:
                    self._copy(stmt)
            case Gemm():
                self._gemm(stmt)
            case Fill():
                self._drain(stmt)
                self.lines += self.work.fill(stmt)
            case Reduce():
                self._drain(stmt)
                self.lines += self.work.reduce(stmt)
            case Parallel():
                self._drain(stmt)
                self.lines += self.work.parallel(stmt)
                self._wait_for(readers_of(self.flying, self.slots.last_read_by(stmt)))
                if stmt not in self.work.ahead:
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
                self.lines.append(f"if ({self.work.values().text(stmt.condition, guarded=True)}) {{")
                outer, self.lines = self.lines, []
                for inner in stmt.then:
                    self._statement(inner)
                self.lines = [*outer, *("  " + line for line in self.lines), "}"]
            case _:
                raise CudaError(f"{type(stmt).__name__} has no CUDA form yet")

    # ---- the loop and its products ----

    def _loop(self, loop: For) -> None:
        values = self.work.values()
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
        if self.levels is not None:
            carried = tuple(Flight(stmt) for stmt in loop.body if isinstance(stmt, Gemm))
        if carried and not self.roles.by_warps:
            self.lines += [
                *wait_for(self.roles, 0, f"(last - first) % {short_steps(self.roles)} != 0"),
                *self._pins(carried),
            ]
        if carried:
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
        values = self.work.values()
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
        self._fetch_ahead(parts)
        self._wait(parts.scores, 0, "slot")
        for stmt in (*parts.between, *parts.late):
            self._statement(stmt)
        self.lines += [*step, "#pragma unroll 1", f"for ({var} = first + 1; {var} < last; {var}++) {{"]
        head, self.lines = self.lines, []
        self._issue(parts.scores, parts.score_copies, "slot", "phase", turn="take")
        self._issue(parts.sums, parts.sum_copies, "before", "before_phase", turn="give")
        self._fetch_ahead(parts)
        self.lines += self._rise()
        self._wait(parts.scores, 1, "slot")
        self._statements(parts.between)
        self._wait(parts.sums, 0, "before")
        self._statements(parts.late)
        self.lines += step
        self.lines = [*head, *("  " + line for line in self.lines), "}"]
        self._issue(parts.sums, parts.sum_copies, "before", "before_phase", turn="all")
        self._wait(parts.sums, 0, "before")
        self.lines = [*outer, *("  " + line for line in self.lines), "}"]
        del self.names[loop.var]
        self.work.ahead, self.begun = (), ()
        self.lines += self.slots.freed_by_loop(loop)

    def _rise(self) -> list[str]:
        """Whether the reference of a warp's rows is to rise with this iteration's scores."""
        reference = self.plan.reference
        if reference is None:
            return []
        weights = {gemm.a.dtype for gemm in self.plan.loop.body if isinstance(gemm, Gemm)}
        large = min(LARGE.get(dtype, LARGEST) for dtype in weights)
        totals = [one.name for one in reference.sums if one.name in self.roles.statistics]
        found = [f"must_rise({reference.top.name}, {name}, {large}f)" for name in totals]
        return [f"const bool rise = pass != 0 || {' || '.join(found)};"]

    def _statements(self, body: Sequence[Stmt]) -> None:
        """Statements, those that raise a reference where it is to rise."""
        rising = () if self.plan.reference is None else self.plan.reference.rising
        for seldom, group in groupby(body, lambda stmt: stmt in rising):
            outer, self.lines = self.lines, []
            for stmt in group:
                self._statement(stmt)
            own = ["if (rise) {", *("  " + line for line in self.lines), "}"] if seldom else self.lines
            self.lines = [*outer, *own]

    def _fetch_ahead(self, parts: Overlap) -> None:
        """Take tiles that are read beside the scores into registers while those are computed; their slots are free."""
        self.work.ahead, self.begun = (), ()
        for ring in self.plan.rings:
            reader = self.slots.last_reader[ring.name]
            flags = any(tile.tensor.dtype is DType.BOOL for tile in ring.tiles)  # often all that is needed is one vote
            if isinstance(reader, Parallel) and reader in parts.between and not flags:
                self._copy(ring.copies[0])
                self.lines += self.work.fetched(reader)
                self.lines += self.slots.freed_by([reader], self.at)
                self.work.ahead += (reader,)
                self.begun += ring.copies

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
        right = self._described(gemm.b, product.b_minor, "")
        call = f"{product.name}({gemm.c.name}, {gemm.a.name} + 4 * x, {right}, 1);"
        tile = self.roles.staged[gemm.b.name]
        freed = self.slots.freed_by([gemm], "before", f"{var} > first")
        self.lines += product_text(levels, gemm, tile, call, freed)

    def _level_origin(self, levels: Levels) -> str:
        return self.work.values().text(levels.tile.origin[0])

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
            result, add = (
                f"{result}_part",
                f"x != 0 || ({self.plan.loop.var.name} - first) % {short_steps(self.roles)} != 0",
            )
        self.lines += [
            f"pin({result});",
            "products_fence();",
            f"TILE_UNROLL for (int x = 0; x < {depth * gemm.a.dtype.row.bytes // STEP_BYTES}; x++)",
            f"  {product.name}({result}, {left}, {right}, {add});",
            "products_commit();",
        ]

    def _slot(self, buffer: Buffer) -> str:
        ring = self._ring(buffer)
        return spot(self.plan) if ring.copies[0] in self.plan.program.body else place_in(ring, self.at, "")[0]

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
        short = short_steps(self.roles)
        condition = f"({self.plan.loop.var.name} - first) % {short} == {short - 1}"
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
                self.levels, self.work.values().text(self.levels.tile.origin[0]), self.plan.loop.var.name
            )
        for ring in self.plan.rings:
            if copy is ring.copies[0]:
                in_loop = ring.copies[0] not in self.plan.program.body
                at, phase = place_in(ring, "slot", "phase") if in_loop else (spot(self.plan), "once")
                self.lines.append(f"barrier_wait(full_{ring.name} + 8 * {at}, {phase});")
        if not (isinstance(source, Buffer) and isinstance(target, Buffer)):
            return
        self._drain(copy)
        if target.name in self.roles.exchanged:
            self.lines += exchange(self.plan, source, self.work.count(source), target)
        elif target.name in self.roles.packed:
            self.lines += self.work.packed(source, target)
        else:
            self.lines += self.work.copied(source, target)
