"""GPU profiles: what recommendation and the checks know of a card."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One card. Cycles are those of a multiprocessor; `copy_bytes` is what it fetches per cycle from the L2 cache."""

    name: str
    arch: str
    processors: int
    cluster_counts: tuple[int, ...]  # clusters of 1, 2, … blocks that run at once, a block taking a whole processor
    shared_bytes: int  # that one block may have
    registers: int  # of one multiprocessor
    flops_per_cycle: int  # f16 and bf16 products of one multiprocessor
    copy_bytes: float
    memory_bytes: float  # what all of them together fetch per cycle from memory
    start_cycles: int  # of a tile: filling its pipeline and draining its epilogue
    warpgroups: bool = True  # whether it has their products, tensor copies and clusters, as sm_90a has

    def clusters(self, blocks: int) -> int:
        """Clusters of `blocks` that run at the same time: they do not leave a group of processors."""
        return self.cluster_counts[blocks - 1]


A100 = GpuProfile("a100", "sm_80", 108, (108,), 166912, 65536, 2048, 40.0, 1100.0, 1500, warpgroups=False)
H100 = GpuProfile("h100", "sm_90a", 132, (132, 66, 39, 30, 22, 17, 15, 15), 232448, 65536, 4096, 56.0, 1900.0, 1500)
