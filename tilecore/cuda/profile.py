"""GPU profiles: what recommendation and the checks know of a card."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One card. Cycles are those of a multiprocessor; `copy_bytes` is what it fetches per cycle from the L2 cache."""

    name: str
    arch: str
    processors: int
    shared_bytes: int  # that one block may have
    registers: int  # of one multiprocessor
    flops_per_cycle: int  # f16 and bf16 products of one multiprocessor
    copy_bytes: float
    start_cycles: int  # of a tile: filling its pipeline and draining its epilogue


H100 = GpuProfile("h100", "sm_90a", 132, 232448, 65536, 4096, 56.0, 1500)
