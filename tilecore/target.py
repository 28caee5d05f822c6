"""Instruction sets as rows of a table: what the compiler must know of each, and how the library asks for it."""

from dataclasses import dataclass

from tilecore.contract.panel import PANEL

BLOCK = 32  # rows and columns of results that tile registers sum at once, and the depth of a step (tile_amx.h)
FEW_TILE_ROWS = 4  # up to here vector registers are as fast
ASKING_BLOCKS = 4  # of rows, from which a product asks for its next panels: fewer would ask for too many lines at once


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """A block of C held in registers: `rows` × `vectors` accumulators of one vector each."""

    rows: int
    vectors: int

    def columns(self, lanes: int) -> int:
        """Width of the tile in elements."""
        return self.vectors * lanes


@dataclass(frozen=True, slots=True)
class Target:
    """One instruction set. `supported` is a C expression that asks the running processor."""

    name: str
    lanes: int  # f32 elements of one vector register
    registers: int  # vector registers
    flags: tuple[str, ...]  # for the C compiler
    supported: str
    base: str = ""  # the row that this one is with instructions for products of bf16, which only such kernels need
    amx: bool = False  # products of bf16 in tiles of 16 × 16 results
    fused_dot: str = ""  # C: whether it has TILE_DOT_FUSED, asked once a library
    from_memory: bool = True  # multiply-adds take an operand out of memory

    @property
    def multiplies_bf16(self) -> bool:
        """Whether products of bf16 have instructions of their own, which read pairs of the summed axis."""
        return bool(self.base)

    @property
    def smallest_vectors(self) -> int:
        """Vectors in one packed panel: the granularity of a register tile's width."""
        return max(1, PANEL // self.lanes)

    def fits(self, tile: RegisterTile) -> bool:
        """True when accumulators, one row of B and one broadcast of A fit the register file."""
        return tile.rows * tile.vectors + tile.vectors + 1 <= self.registers

    def fits_tightly(self, tile: RegisterTile) -> bool:
        """True when accumulators fit beside one vector of B and one broadcast, the rest of B being read from memory."""
        return self.from_memory and tile.rows * tile.vectors + 2 <= self.registers


_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_BF16 = (*_V4, "-mavx512bf16")
TARGETS: tuple[Target, ...] = (  # best first: a library tries them in this order
    Target(
        "x86-64-v4-amx",
        16,
        32,
        (*_BF16, "-mamx-tile", "-mamx-bf16"),
        "tile_x86_amx()",
        "x86-64-v4",
        amx=True,
        fused_dot="tile_x86_vnni(512)",
    ),
    Target("x86-64-v4-bf16", 16, 32, _BF16, "tile_x86_bf16()", "x86-64-v4", fused_dot="tile_x86_vnni(512)"),
    Target("x86-64-v4", 16, 32, _V4, "tile_x86_level() >= 4", fused_dot="tile_x86_vnni(512)"),
    Target("x86-64-v3", 8, 16, ("-march=x86-64-v3",), "tile_x86_level() >= 3", fused_dot="tile_x86_vnni(256)"),
    Target("aarch64", 4, 32, (), "1", from_memory=False),
)


def target_named(name: str) -> Target:
    """The row called `name`. ValueError lists the names there are."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise ValueError(f"unknown target {name!r}; there are {', '.join(target.name for target in TARGETS)}")


def targets_for(machine: str) -> tuple[Target, ...]:
    """Rows for a processor family as `platform.machine()` names it. ValueError for a family without a row."""
    family = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}.get(machine.lower())
    if family is None:
        raise ValueError(f"no CPU target for {machine!r}: TileFuse generates code for x86-64 and aarch64")
    return tuple(target for target in TARGETS if target.name.startswith(family))
