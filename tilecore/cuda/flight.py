"""Products in flight: which of them a statement has to wait for. They finish in the order in which they were issued."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilecore.graph import buffers_of
from tilecore.ir import Buffer, Gemm, Stmt


@dataclass(frozen=True, slots=True)
class Flight:
    """A product that was issued and not waited for; `carried`: by the iteration before."""

    gemm: Gemm
    carried: bool = False


def to_wait_for(flying: Sequence[Flight], stmt: Stmt) -> int:
    """How many of the oldest must be done before `stmt`: it touches a result of the last of them, or overwrites an
    operand.
    """
    reads, writes = buffers_of(stmt)
    touched = {*reads, *writes}
    found = 0
    for count, flight in enumerate(flying, 1):
        gemm = flight.gemm
        if gemm.c in touched or {gemm.a, gemm.b} & set(writes):
            found = count
    return found


def readers_of(flying: Sequence[Flight], tiles: set[Buffer]) -> int:
    """How many of the oldest must be done until none reads `tiles`."""
    return max((count for count, flight in enumerate(flying, 1) if {flight.gemm.a, flight.gemm.b} & tiles), default=0)
