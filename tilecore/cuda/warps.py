"""The plan of kernels for cards without tensor copies and warpgroup products (sm_80).

Comes in: roles of buffers and a number of stages. Goes out: a `KernelPlan` without a producer: every warp copies,
multiplies and computes. What has no form there, or no room, is refused here, with what was found.
"""

from tilecore.contract.expr import Expr
from tilecore.contract.spec import Place
from tilecore.cuda.errors import CudaError
from tilecore.cuda.joins import Split
from tilecore.cuda.kernel import (
    KernelPlan,
    bound_by_grid,
    check_room,
    grouped,
    loop_of,
    pointers_of,
    read_by_element,
    rings_of,
    stageable,
    symbols_of,
    turned_store,
)
from tilecore.cuda.profile import GpuProfile
from tilecore.cuda.roles import SWIZZLE, Roles, extents, stored_rectangle
from tilecore.cuda.vectors import multiple
from tilecore.ir import Gemm, Join, Parallel, statements

UNIT = 8  # elements that a thread copies or stores at a time
DEPTH = 16  # of one product
MORE_REGISTERS = 48  # of a thread, beside those of tiles
MOST_REGISTERS = 255


def plan_warps(roles: Roles, profile: GpuProfile, *, stages: int, blocks: int = 1) -> KernelPlan:
    """The plan for `stages` slots per ring in the loop and `blocks` that share a processor. CudaError for what has no
    form on such cards, and where there is no room.
    """
    _check_roles(roles, profile)
    program, loop = roles.program, loop_of(roles.program)
    if stages < 2:
        raise CudaError(f"{stages} stages: copies of the next iteration need a slot of their own, so at least 2")
    rings = rings_of(roles, loop, stages, 1)
    after = program.body[program.body.index(loop) + 1 :]
    room = sum(ring.bytes * ring.slots for ring in rings if ring.copies[0] in loop.body)
    stores = tuple(
        stmt for stmt in statements(after)
        if isinstance(stmt, Parallel) and roles.block_rows * SWIZZLE <= room and _in_units(stmt, roles)
    )  # fmt: skip
    read = (tile.tensor for ring in rings for tile in ring.tiles)
    written = (place.tensor for place, _, _ in map(rectangle_of, stores))
    plan = KernelPlan(
        roles, profile, rings, (), stores, pointers_of(program, stores, tuple(dict.fromkeys((*read, *written)))),
        symbols_of(program), loop, 0, (0, 0), balanced=bound_by_grid(loop, program, Split()),
        grouped=grouped(rings, program), turns=False, split=Split(), overlap=None, blocks=blocks,
    )  # fmt: skip
    _check_plan(plan)
    return plan


def _check_roles(roles: Roles, profile: GpuProfile) -> None:
    """CudaError for what warps do not share on such cards."""
    name = roles.program.name
    joins = [stmt.buffer.name for stmt in statements(roles.program.body) if isinstance(stmt, Join)]
    refused = {
        f"tasks that share {', '.join(joins)} are blocks of a cluster": bool(joins),
        "columns shared by warpgroups": roles.parts > 1 or bool(roles.shared) or bool(roles.exchanged),
        "packed levels decoded on their way to a product": roles.decoded is not None,
        "lines of a chunk's steps": bool(roles.lines) or any(tile.line for tile in roles.staged.values()),
    }
    for what, found in refused.items():
        if found:
            raise CudaError(f"{what}, in {name}: for sm_90a alone, {profile.name} is {profile.arch}")


def _check_plan(plan: KernelPlan) -> None:
    roles, loop = plan.roles, plan.loop
    gemms = [stmt for stmt in statements(plan.program.body) if isinstance(stmt, Gemm)]
    if any(gemm not in loop.body for gemm in gemms):
        raise CudaError(f"{plan.program.name} has products outside its loop; for {plan.profile.arch} they are in it")
    for gemm in gemms:
        columns = extents(gemm.c)[1]
        if columns % DEPTH:
            raise CudaError(f"a product of {columns} columns in {gemm.c.name}: warps take {DEPTH} at a time")
    by_element = read_by_element(plan.program, plan.rings)
    if by_element and roles.strips > 1:
        raise CudaError(f"{', '.join(sorted(by_element))} read by element, by warps of {roles.strips} strips of rows")
    limit = min(MOST_REGISTERS, plan.profile.registers // plan.threads // plan.blocks)
    if roles.registers + MORE_REGISTERS > limit:
        names = ", ".join(f"{name}: {words}" for name, words in {**roles.fragments, **roles.packed}.items())
        raise CudaError(f"{roles.registers} registers of tiles ({names}) in threads that have {limit}")
    check_room(plan)


def rectangle_of(stmt: Parallel) -> tuple[Place, tuple[int, int], tuple[Expr, ...]]:
    """`stored_rectangle` of a staged store."""
    found = stored_rectangle(stmt)
    assert found is not None
    return found


def _in_units(stmt: Parallel, roles: Roles) -> bool:
    """Whether a warp can store its rows 16 bytes at a time."""
    if not stageable(stmt, roles) or turned_store(stmt):
        return False
    _, (_, column_dim), origin = rectangle_of(stmt)
    return multiple(origin[column_dim], UNIT)
