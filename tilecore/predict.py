"""Predicted seconds: of a spec as one kernel, and of single operators as a runtime without fusion runs them.

Comes in: a spec, or bytes and operations; a hardware profile. Goes out: seconds. The kernel's figure is that of the
extents that recommendation chooses. Products are taken to run as fast in both, and so is what stands between the two of
an attention: what a kernel can win there is traffic, calls and what follows the products.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilecore.contract.expr import Op, Var, substitute, variables, walk
from tilecore.contract.spec import ContractionSpec, Result, RowSpec, Spec, extent_of
from tilecore.emit_expr import instructions_of
from tilecore.profile import HardwareProfile
from tilecore.recommend import NOMINAL, Machine, nominal_sizes, rank
from tilecore.target import Target

CALL = 4e-6  # seconds of one node: its dispatch, its outputs' allocation, and waking the other threads
SINGLE = 20_000.0  # cycles below which a runtime keeps an operator on one thread


@dataclass(frozen=True, slots=True)
class Predictor:
    """Costs on one machine."""

    profile: HardwareProfile
    target: Target

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        """The sizes of the symbolic dims that predictions are for."""
        return nominal_sizes(spec, NOMINAL[0])

    def kernel(self, spec: Spec) -> float:
        """Seconds of one call of the kernel for `spec`."""
        best = rank(spec, self.profile, self.target)[0]
        return CALL + max(best.cycles, self._pointwise(spec)) / self.profile.clock

    def _pointwise(self, spec: Spec) -> float:
        """Cycles of a row program's arithmetic; the other kinds have theirs counted in `rank`."""
        if not isinstance(spec, RowSpec):
            return 0.0
        machine = Machine(self.profile, self.target, self.sizes(spec))
        points = machine.size(extent_of(spec.row)) * machine.size(extent_of(spec.column))
        moving = {spec.column, *(step.var for step in spec.steps if step.kind == "tile")}
        programs = [step.value for step in spec.steps] + [result.value for result in spec.outputs]
        parts = {part for program in programs for part in walk(program) if isinstance(part, Op)}
        own = [part for part in parts if moving & variables(part)]  # the others are computed once per row
        count = sum(instructions_of(part) for part in own)
        cycles = points * (count + len(programs)) / self.target.lanes
        return cycles / (self.profile.cores if cycles > SINGLE else 1)

    def operator(self, moved: int, operations: float) -> float:
        """Seconds of one operator by itself that moves so many bytes and does so many vectorised operations."""
        machine = Machine(self.profile, self.target, {})
        cycles = moved / machine.rate(moved) + operations / self.target.lanes
        return CALL + cycles / (self.profile.cores if cycles > SINGLE else 1) / self.profile.clock

    def products(self, spec: ContractionSpec) -> float:
        """Seconds of the products of `spec` in one operator each, without what follows them."""
        total = 0.0
        for product in spec.products:
            bare = Result(spec.outputs[0].place, product.acc)
            total += self.kernel(replace(spec, b=product.b, acc=product.acc, outputs=(bare,), siblings=()))
        return total

    def apart(self, spec: ContractionSpec) -> float:
        """Seconds of the products of `spec` in one kernel each; an output belongs to the last product that it reads."""
        accs = [product.acc for product in spec.products]
        total = 0.0
        for number, product in enumerate(spec.products):
            own = [result for result in spec.outputs if _last(result, accs) == number]
            if not own:  # its sum goes through memory, to the kernel that reads it
                own = [Result(spec.outputs[0].place, product.acc)]
                total += self._through_memory(spec)
            outputs = tuple(Result(r.place, substitute(r.value, dict.fromkeys(accs, product.acc))) for r in own)
            total += self.kernel(replace(spec, b=product.b, acc=product.acc, outputs=outputs, siblings=()))
        return total

    def _through_memory(self, spec: ContractionSpec) -> float:
        """Seconds of writing one sum and reading it again."""
        machine = Machine(self.profile, self.target, self.sizes(spec))
        moved = 2 * 4 * math.prod(machine.size(extent_of(axis)) for axis in spec.outputs[0].place.axes)
        return moved / machine.rate(moved) / self.profile.cores / self.profile.clock


def _last(result: Result, accs: list[Var]) -> int:
    read = variables(result.value)
    return max((number for number, acc in enumerate(accs) if acc in read), default=0)
