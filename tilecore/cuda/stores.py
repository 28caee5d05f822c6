"""Fragments to swizzled shared memory: for other warpgroups, or from there to memory by tensor copies, which clip them.

Rows of a fragment become rows of the tensor, 64 columns per copy; or, where the tensor is contiguous along the
fragment's rows, they are turned on the way and a warpgroup's 64 rows are one copy.
"""

import math

from tilecore.cuda.kernel import STAGING_CHUNKS, WARPGROUP, KernelPlan, extent_of_axis, turned_store
from tilecore.cuda.roles import CHUNK, GROUP_ROWS, extents, number, stored_rectangle
from tilecore.ir import Buffer, Parallel

STORE = 5  # named barrier of the first warpgroup's staged stores; the others' follow
MEET = 8  # of all warpgroups
Lines = tuple[list[str], str]  # and what is said with them
ELEMENT = "const int x = first_chunk * 32 + part * 8 + y;"  # number y of 8 that are stored together


def exchanged_tile(plan: KernelPlan, target: Buffer) -> str:
    """Where an operand that warpgroups write for each other lies now."""
    if plan.exchange_slots == 1:
        return f"tile_{target.name}"
    size = math.prod(extents(target)) * 2
    return f"tile_{target.name} + (written >> {plan.roles.exchanged.index(target.name)} & 1) * {size}"


def exchange(plan: KernelPlan, source: Buffer, count: int, target: Buffer) -> list[str]:
    """A fragment, `count` elements of a thread, to swizzled shared memory, where every warpgroup has its columns."""
    parts = count // 8  # of 16 columns
    pairs = ", ".join(f"pair_{target.dtype}({source.name}[8 * x + {i}], {source.name}[8 * x + {i + 1}])"
                      for i in range(0, 8, 2))  # fmt: skip
    meet = f"named_sync({MEET}, {plan.roles.consumers * WARPGROUP});"
    other = f"written ^= {1 << plan.roles.exchanged.index(target.name)};"
    return [
        meet if plan.exchange_slots == 1 else other,  # nobody reads what is there any more
        f"TILE_UNROLL for (int x = 0; x < {parts}; x++) {{",
        f"  const int part = warpgroup * {parts} + x;",
        f"  const u32 tile = {exchanged_tile(plan, target)} + part / 4 * {GROUP_ROWS * 128};",
        "  const u32 row = tile + (warp * 16 + lane % 16) * 128;",
        f"  store_matrices(row + ((part % 4 * 2 + lane / 16 ^ lane % 8) << 4), {pairs});",
        "}",
        "show_to_copies();",
        meet,
    ]


def _gates(setup: list[str], exponent: str) -> list[str]:
    """Those of 8 elements."""
    return [
        "float gates[8];",
        "TILE_UNROLL for (int y = 0; y < 8; y++) {",
        f"  {ELEMENT}",
        *("  " + line for line in setup),
        f"  gates[y] = gate_inverse({exponent});",
        "}",
        "invert_fours(gates);",
    ]


def staged_store(
    plan: KernelPlan, stmt: Parallel, starts: list[str], setup: list[str], value: str, gate: Lines | None
) -> list[str]:
    """The text of a store. `starts` are the rectangle's origin, `value` is element x, after the lines of `setup`, and
    `gate` the exponent of its gate, after lines of its own.
    """
    found = stored_rectangle(stmt)
    assert found is not None
    place, (row_dim, column_dim), _ = found
    turned = turned_store(stmt)
    columns = number(extent_of_axis(stmt, 1), "a width")
    starts = list(starts)
    starts[row_dim] += " + group_row"
    chunks = 1 if turned else columns // CHUNK
    together = STAGING_CHUNKS if chunks % STAGING_CHUNKS == 0 else 1
    parts = columns // 16 if turned else 4 * together
    if not turned:
        starts[column_dim] += f" + (first_chunk + chunk) * {CHUNK}"
    pairs = ", ".join(f"pair_{place.dtype}(v[{2 * i}], v[{2 * i + 1}])" for i in range(4))
    map_name = f"map_out{plan.staged_stores.index(stmt)}"
    base = f"staging + warpgroup * {plan.staging_bytes}"
    if turned:  # lane i of a group of 8 has column i of a matrix, which is row i of what is stored
        at = f"{base} + (part * 16 + lane / 16 * 8 + lane % 8) * 128"
        swizzled = "(warp * 2 + lane / 8 % 2 ^ lane % 8)"
    else:
        at = f"{base} + part / 4 * {GROUP_ROWS * 128} + (warp * 16 + lane % 16) * 128"
        swizzled = "(part % 4 * 2 + lane / 16 ^ lane % 8)"
    verb = "store_turned" if turned else "store_matrices"
    return [
        f"TILE_UNROLL for (int first_chunk = 0; first_chunk < {chunks}; first_chunk += {together}) {{",
        "  if (thread == 0) stores_read();",
        f"  named_sync({STORE} + warpgroup, {WARPGROUP});",
        f"  TILE_UNROLL for (int part = 0; part < {parts}; part++) {{  // 16 columns each",
        "    float v[8];",
        *("    " + line for line in ([] if gate is None else _gates(*gate))),
        "    TILE_UNROLL for (int y = 0; y < 8; y++) {",
        f"      {ELEMENT}",
        *("      " + line for line in setup),
        f"      v[y] = {value};",
        "    }",
        f"    const u32 row = {at};",
        f"    {verb}(row + ({swizzled} << 4), {pairs});",
        "  }",
        "  show_to_copies();",
        f"  named_sync({STORE} + warpgroup, {WARPGROUP});",
        "  if (thread == 0) {",
        f"    for (int chunk = 0; chunk < {together}; chunk++)",
        f"      store_tile(&{map_name}, {base} + chunk * {GROUP_ROWS * 128}, {', '.join(reversed(starts))});",
        "    stores_commit();",
        "  }",
        "}",
    ]
