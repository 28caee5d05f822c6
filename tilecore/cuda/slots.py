"""When slots of rings are free: after the last statement that reads a tile in them, which is a product or element work.

Comes in: a plan. Goes out: per statement the text that hands slots back to the producer. Every warpgroup hands back on
its own; where element programs have read a slot, all of its warps must have, and meet first.
"""

from collections.abc import Sequence

from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import WARPGROUP, KernelPlan, Ring, read_by_element
from tilecore.cuda.stores import STORE
from tilecore.graph import buffers_of
from tilecore.ir import Buffer, For, Gemm, Parallel, Stmt, statements


def spot(plan: KernelPlan) -> str:
    """The slot of what a tile reads before its loop."""
    return "spot" if plan.ahead > 1 else "0"


def place_in(ring: Ring, slot: str, phase: str, *, ahead: str = "") -> tuple[str, str]:
    """Where a ring of the loop is in an iteration, and its phase. With one slot beside others' two the number of their
    slot tells the phase; `ahead` is what flips it for who fills the slot.
    """
    return ("0", f"{slot}{ahead}") if ring.slots == 1 else (slot, phase)


def next_tile(plan: KernelPlan) -> list[str]:
    """What both roles do with that slot at the end of a tile."""
    return [f"if (++spot == {plan.ahead}) spot = 0, once ^= 1;"] if plan.ahead > 1 else ["once ^= 1;"]


class Slots:
    """The last reader of every ring. CudaError for a tile that nothing reads."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.by_element = read_by_element(plan.program, plan.rings)
        self.last_reader = {ring.name: self._last_reader(ring) for ring in plan.rings}

    def _last_reader(self, ring: Ring) -> Stmt:
        own = {tile.buffer.name for tile in ring.tiles}
        own |= {name for name, holder in self.plan.roles.held.items() if holder in own}
        readers = [
            stmt for stmt in statements(self.plan.program.body)
            if isinstance(stmt, Gemm | Parallel) and own & {buffer.name for buffer in buffers_of(stmt)[0]}
        ]  # fmt: skip
        if not readers:
            raise CudaError(f"nothing reads {', '.join(sorted(own))}, which is copied from memory")
        return readers[-1]

    def last_read_by(self, stmt: Stmt) -> set[Buffer]:
        """Tiles of rings whose slots are free after a statement."""
        return {tile.buffer for ring in self.plan.rings if self.last_reader[ring.name] is stmt for tile in ring.tiles}

    def freed_by(self, done: Sequence[Stmt], slot: str, condition: str = "") -> list[str]:
        """What is free after `done`: `slot` of a ring in the loop, where the condition holds; a tile's other slots, if
        `done` are not in the loop.
        """
        found: list[tuple[Ring, str]] = []
        for ring in self.plan.rings:
            last = self.last_reader[ring.name]
            if not any(last is stmt for stmt in done):
                continue
            if ring.copies[0] not in self.plan.program.body:
                found.append((ring, place_in(ring, slot, "")[0]))
            elif any(last is stmt for stmt in self.plan.program.body):
                found.append((ring, spot(self.plan)))
        return self._handed_back(found, condition)

    def freed_by_loop(self, loop: For) -> list[str]:
        """What was read before the loop last and is free after it."""
        rings = [ring for ring in self.plan.rings if ring.copies[0] in self.plan.program.body]
        inside = [ring for ring in rings if any(self.last_reader[ring.name] is stmt for stmt in loop.body)]
        return self._handed_back([(ring, spot(self.plan)) for ring in inside], "")

    def _handed_back(self, found: list[tuple[Ring, str]], condition: str) -> list[str]:
        also = f" && {condition}" if condition else ""
        meet = [f"named_sync({STORE} + warpgroup, {WARPGROUP});"]
        lines = meet if any(ring.name in self.by_element for ring, _ in found) else []
        for ring, slot in found:
            lines += ["__syncwarp();"] if ring.decoded else []
            who = "lane" if ring.decoded else "thread"
            lines.append(f"if ({who} == 0{also}) barrier_arrive(empty_{ring.name} + 8 * {slot});")
        return lines
