"""Engines: what multiplies a block of a product, by the types of its operands and the machine.

Comes in: an element type and a machine. Goes out: the block of results that is summed at once, how wide elements are
there, and at what rate. Vector units hold a register tile of results; tile registers (AMX) a block of 32 × 32, and
leave a core's instruction slots to the work beside.
"""

from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.infer import choose_register_tile, choose_tall_tiles
from tilecore.profile import HardwareProfile
from tilecore.target import BLOCK, Target, target_named

CALL_CYCLES = 60.0  # of one register tile: its call, and its accumulators' first and last access
TILE_CYCLES = 100.0  # of one block of tile registers: clearing them, and storing them row by row
PACKED_SPEED = 3.0  # multiply-adds of bytes by packed levels for one of f32
BYTES_LANES, BYTES_SPEED = 16, 4.0  # targets whose processors, but for the oldest, multiply bytes by bytes
INTEGER_SPEED = 1.3  # multiply-adds of 16-bit levels for one of f32: two in an instruction, and the addition another


@dataclass(frozen=True, slots=True)
class Engine:
    """`rows` × `columns` results at once, `depth` steps of the sum an instruction, elements of `bytes` bytes.

    `rate`: multiply-adds per cycle. `cycles`: of beginning and ending a block. `beside`: results are finished while the
    next block is multiplied (`blocks.py`). `alone`: up to so many rows that are all there are pass B once.
    """

    rows: int
    columns: int
    depth: int
    bytes: int
    rate: float
    cycles: float = CALL_CYCLES
    beside: bool = False
    alone: int = 0


def engine_for(dtype: DType, profile: HardwareProfile, target: Target) -> Engine:
    """What multiplies operands of `dtype` on a machine: f32, 16-bit levels, bytes (by packed levels), or bf16, which is
    widened without an instruction for it."""
    tile, rate = choose_register_tile(target), profile.macs_per_cycle
    rows, columns = tile.rows, tile.columns(target.lanes)
    if dtype is DType.I16:
        return Engine(rows, columns, 2, 2, rate * (BYTES_SPEED if target.lanes == BYTES_LANES else INTEGER_SPEED))
    if dtype is DType.I8:
        return Engine(rows, columns, 2, 1, rate * PACKED_SPEED)
    if dtype is DType.BF16 and profile.narrow and profile.bf16_per_cycle:
        narrow = target_named(profile.narrow)
        if narrow.amx:
            return Engine(BLOCK, BLOCK, BLOCK, 2, profile.bf16_per_cycle, TILE_CYCLES, beside=True)
        return Engine(rows, columns, 2, 2, profile.bf16_per_cycle, alone=_tallest(narrow, again=False))
    return Engine(rows, columns, 1, 4, rate, alone=_tallest(target, again=True))


def _tallest(target: Target, *, again: bool) -> int:
    return max((tile.rows for tile in choose_tall_tiles(target, again=again)), default=0)
