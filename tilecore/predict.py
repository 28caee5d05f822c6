"""Predicted seconds: of a spec as one kernel, and of operators as a runtime without fusion runs them.

Comes in: a spec, or counts of operators; a hardware profile. Goes out: seconds: the terms of `tilecore.terms` with the
coefficients that were fitted on such a machine, dealt out to its cores. The kernel's figure is for the extents that
recommendation chooses. Coefficients go with the rates of a row of the table of profiles: measured rates are not used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tilecore.contract.expr import Var, substitute, variables
from tilecore.contract.spec import ContractionSpec, Result, Spec, extent_of
from tilecore.costs import COSTS
from tilecore.profile import PROFILES, HardwareProfile
from tilecore.recommend import NOMINAL, Machine, cost_of, nominal_sizes, rank
from tilecore.target import Target
from tilecore.terms import Operator, Terms, kernel_terms, operator_terms

MEASURED = "zen3"
SINGLE = 20_000.0  # cycles below which work stays on one thread
LOST = 0.06  # of a runtime's products on 2, 4, 8 … threads, more each time: 1.1 and 1.25 on 4 and 16 cores of a Xeon
ONE_THREAD = frozenset(("move", "loop", "cumulate"))  # operators that ONNX Runtime does not spread over threads


@lru_cache(maxsize=64)
def nominal(profile: HardwareProfile) -> HardwareProfile:
    """The row of the table that coefficients for `profile` go with: its rates, with the profile's cores and caches."""
    row = next(row for row in PROFILES if row.target == profile.target)
    own = {"narrow": profile.narrow, "bf16_per_cycle": profile.bf16_per_cycle}  # no coefficient goes with these
    return replace(row, cores=profile.cores, l1=profile.l1, l2=profile.l2, l3=profile.l3, **own)


def costs_for(profile: HardwareProfile) -> Mapping[str, float]:
    """The coefficients of a row of the table, or of the only machine that was measured."""
    return COSTS.get(profile.name, COSTS[MEASURED])


@dataclass(frozen=True, slots=True)
class Predictor:
    """Costs on one machine."""

    profile: HardwareProfile
    target: Target

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        """The sizes of the symbolic dims that predictions are for."""
        return nominal_sizes(spec, NOMINAL[0])

    def kernel(self, spec: Spec, *, weights: bool = True) -> float:
        """Seconds of one call of the kernel for `spec`; without fetching its `weights`, to compare kernels."""
        config = rank(spec, self.profile, self.target)[0].config
        machine = self._machine(self.sizes(spec))
        alone = replace(machine, profile=replace(machine.profile, cores=1))
        terms = kernel_terms(spec, config, alone)
        seconds = self._total({name: term for name, term in terms.items() if weights or "weights" not in name})
        if seconds * machine.profile.clock <= SINGLE:
            return seconds
        spread = cost_of(spec, config, alone).cycles / max(cost_of(spec, config, machine).cycles, 1.0)
        return seconds / max(spread, 1.0)

    def operators(self, works: Sequence[Operator]) -> float:
        """Seconds of a region's operators, one after the other."""
        weights = sum(work.weights for work in works)
        return sum(self._operator(work, weights) for work in works)

    def _operator(self, work: Operator, weights: int) -> float:
        machine = self._machine({})
        seconds = self._total(operator_terms(work, weights, machine))
        if seconds * machine.profile.clock <= SINGLE or work.kind in ONE_THREAD:
            return seconds
        lost = LOST * math.log2(self.profile.cores) if work.kind == "dense" else 0.0
        return seconds * (1 + lost) / self.profile.cores

    def _total(self, terms: Terms) -> float:
        costs = costs_for(nominal(self.profile))
        return sum(costs.get(name, 0.0) * seconds for name, seconds in terms.items())

    def _machine(self, sizes: Mapping[str, int]) -> Machine:
        return Machine(nominal(self.profile), self.target, sizes)

    def apart(self, spec: ContractionSpec) -> float:
        """Seconds of the products of `spec` in one kernel each, without fetching weights.

        An output belongs to the last product that it reads.
        """
        accs = [product.acc for product in spec.products]
        total = 0.0
        for number, product in enumerate(spec.products):
            own = [result for result in spec.outputs if _last(result, accs) == number]
            if not own:  # its sum goes through memory, to the kernel that reads it
                own = [Result(spec.outputs[0].place, product.acc)]
                total += self._through_memory(spec)
            outputs = tuple(Result(r.place, substitute(r.value, dict.fromkeys(accs, product.acc))) for r in own)
            total += self.kernel(
                replace(spec, b=product.b, acc=product.acc, outputs=outputs, siblings=()), weights=False
            )
        return total

    def _through_memory(self, spec: ContractionSpec) -> float:
        """Seconds of writing one sum and reading it again."""
        machine = self._machine(self.sizes(spec))
        moved = 2 * 4 * math.prod(machine.size(extent_of(axis)) for axis in spec.outputs[0].place.axes)
        return moved / machine.rate(moved) / machine.profile.cores / machine.profile.clock


def _last(result: Result, accs: list[Var]) -> int:
    read = variables(result.value)
    return max((number for number, acc in enumerate(accs) if acc in read), default=0)
