"""What the scan asks of a cost model: whether contractions are better off as one region.

Comes in: a spec. Goes out: a decision. The model of a machine lives outside of the fuser.
"""

from dataclasses import dataclass
from typing import Protocol

from tilecore.contract.spec import Spec


class CostModel(Protocol):
    """Decisions that depend on the machine."""

    def merges(self, spec: Spec) -> bool:
        """Whether the products of a contraction are better off in one kernel than in one each."""
        ...


@dataclass(frozen=True, slots=True)
class Everything:
    """The cost model that never objects."""

    def merges(self, spec: Spec) -> bool:
        """True."""
        return True


EVERYTHING = Everything()
