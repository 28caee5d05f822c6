"""Kernel plans as CUDA C++: parameters, a shared-memory layout, the tile order, and one body per role.

Comes in: a `KernelPlan`. Goes out: text that needs `tile_sm90.cuh` and nothing else, the same bytes for the same plan.
"""

from collections.abc import Iterator

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, variables
from tilecore.cuda.consumer import Consumer
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import ALIGNMENT, WARPGROUP, KernelPlan, Ring
from tilecore.cuda.products import product_functions
from tilecore.cuda.roles import Staged
from tilecore.cuda.slots import next_tile, place_in, spot
from tilecore.cuda.values import STORAGE, Values, dim, pointer

GROUP_TILES = 8  # rows of tiles per sweep of columns


def emit_cuda(plan: KernelPlan, name: str) -> str:
    """The kernel as text, with entry point `name`."""
    program = plan.program
    names: dict[Expr, str] = {symbol: dim(symbol) for symbol in plan.symbols}
    lines = ["// " + line for line in describe(plan)]
    lines += ['#include "tile_sm90.cuh"', "", *product_functions(plan), ""]
    cluster = f" __cluster_dims__({plan.cluster}, 1, 1)" if plan.cluster > 1 else ""
    lines.append(f'extern "C" __global__ void{cluster} __launch_bounds__({plan.threads}, {plan.blocks})')
    lines.append(f"{name}({', '.join(parameters(plan))}) {{")
    lines += indented([*_layout(plan), *_barriers(plan), *tiles_of(plan, names)])
    names |= {axis: axis.name for axis in program.grid}
    if plan.cluster > 1 and plan.split.axis is not None:
        lines.append(f"  const int {plan.split.axis.name} = blockIdx.x % {plan.cluster};")
    lines += indented(["if (warpgroup == consumers) {  // producer", *indented(_producer(plan, names)), "} else {"])
    stored = ["  if (thread == 0) stores_done();"] if plan.staging_bytes else []
    tiles = passes(plan, walk(plan, names), [*stored, "  barrier_arrive(judged);"])
    lines += indented(indented(Consumer(plan, names, tiles, tile_number(plan)).body()))
    lines += ["  }", "}", ""]
    return "\n".join(lines)


def describe(plan: KernelPlan) -> list[str]:
    """What was decided, in words."""
    roles = plan.roles
    warps, strips = plan.threads // 32, f", {roles.strips} strips of 16 rows each" if roles.strips > 1 else ""
    who = f"{roles.consumers} consumer warpgroups, {plan.producer_threads} producer threads"
    lines = [
        f"{plan.program.name}: {who if plan.profile.warpgroups else f'{warps} warps{strips}'}, "
        f"{plan.shared_bytes} bytes of shared memory{', balanced' if plan.balanced else ''}"
    ]
    for ring in plan.rings:
        for tile in ring.tiles:
            side = "elements" if tile.line else "columns" if tile.contiguous == 1 else "rows"
            shape = " x ".join(map(str, tile.buffer.shape))
            kind = tile.buffer.dtype if tile.decoding is None else f"levels of {tile.decoding.bits} bits"
            lines.append(f"{tile.buffer.name}: {shape} {kind}, {ring.slots} slots, contiguous {side}")
    lines += [f"{name}: the first columns of {holder}" for name, holder in roles.held.items()]
    lines += [f"{name}: {words} registers" for name, words in {**roles.fragments, **roles.packed}.items()]
    return lines


def indented(lines: list[str]) -> list[str]:
    """A block's lines."""
    return ["  " + line if line else line for line in lines]


def parameters(plan: KernelPlan) -> Iterator[str]:
    """Tensor maps, pointers and extents, as the launcher passes them."""
    written = set(plan.program.outputs)
    yield from (f"const __grid_constant__ TensorMap {one.name}" for one in plan.maps)
    for tensor in plan.pointers:
        constant = "" if tensor in written else "const "
        yield f"{constant}{STORAGE[tensor.dtype]}* __restrict__ {pointer(tensor)}"
    if plan.workspace is not None:
        yield "u32* workspace"
    yield from (f"int {dim(symbol)}" for symbol in plan.symbols)


def _layout(plan: KernelPlan) -> list[str]:
    consumers = plan.roles.consumers
    lines = [
        "extern __shared__ u8 shared[];",
        f"constexpr int consumers = {consumers};",
        f"const u32 base = (shared_address(shared) + {ALIGNMENT - 1}) & ~{ALIGNMENT - 1}u;",
    ]
    offset = 0
    tiles = [(tile, ring.slots) for ring in plan.rings for tile in ring.tiles]
    for tile, slots in (one for one in tiles if not one[0].line):
        lines.append(f"const u32 tile_{tile.buffer.name} = base + {offset};  // + {tile.bytes} per slot")
        offset += tile.bytes * slots
    for name, size in plan.exchanged:
        lines.append(f"const u32 {name} = base + {offset};  // + {size}")
        offset += size
    if plan.staging_bytes:
        lines.append(f"const u32 staging = base + {offset};  // + {plan.staging_bytes} per warpgroup")
        offset += plan.staging_bytes * consumers
    for tile, slots in (one for one in tiles if one[0].line):
        lines.append(f"const u32 tile_{tile.buffer.name} = base + {offset};  // + {tile.bytes} per slot")
        offset += tile.bytes * slots
    for ring in plan.rings:
        lines.append(f"const u32 full_{ring.name} = base + {offset}, empty_{ring.name} = full_{ring.name} + "
                     f"{8 * ring.slots};")  # fmt: skip
        offset += 16 * ring.slots
    for number, group in enumerate(plan.split.groups):
        lines.append(f"const u32 exchange_{number} = base + {offset};  // + {group.bytes} per warpgroup")
        offset += group.bytes * consumers
    for number in range(0 if plan.split.apart else len(plan.split.groups)):
        lines.append(f"const u32 ready_{number} = base + {offset}, done_{number} = ready_{number} + 8;")
        offset += 16
    if plan.reference is not None:
        lines.append(f"const u32 judged = base + {offset}, again_at = judged + 8;")
    lines.append(f"const int warpgroup = threadIdx.x / {WARPGROUP};")
    return lines


def _barriers(plan: KernelPlan) -> list[str]:
    lines = ["if (threadIdx.x == 0) {", *(f"  map_fetch(&{one.name});" for one in plan.maps)]
    for ring in plan.rings:
        lines.append(f"  for (int i = 0; i < {ring.slots}; i++) {{")
        lines.append(f"    barrier_init(full_{ring.name} + 8 * i, 1);")
        readers = "4 * consumers" if ring.decoded else "consumers"
        lines.append(f"    barrier_init(empty_{ring.name} + 8 * i, {readers});")
        lines.append("  }")
    for number in range(0 if plan.split.apart else len(plan.split.groups)):
        lines.append(f"  barrier_init(ready_{number}, consumers * {plan.cluster});")
        lines.append(f"  barrier_init(done_{number}, consumers * {plan.cluster});")
    if plan.reference is not None:
        lines.append(f"  barrier_init(judged, consumers * {WARPGROUP});")
        lines.append("  shared_write(again_at, 0);")
    return [*lines, "}", "barriers_ready();", *(["cluster_ready();"] if plan.cluster > 1 else []), "grid_wait();"]


def tiles_of(plan: KernelPlan, names: dict[Expr, str]) -> list[str]:
    """How many tiles there are."""
    values = Values(names, no_element)
    grid = plan.tile_axes
    if not 1 <= len(grid) <= 3:
        raise CudaError(f"{plan.program.name} has {len(grid)} grid axes; CUDA kernels have 1 to 3")
    lines = [f"const int count_{axis.name} = {values.text(_extent(axis))};" for axis in grid]
    lines.append(f"const int tiles = {' * '.join(f'count_{axis.name}' for axis in grid)};")
    return lines


def _extent(axis: Var) -> Expr:
    assert axis.extent is not None
    return axis.extent


def walk(plan: KernelPlan, names: dict[Expr, str]) -> list[str]:
    """The head of the loop over tiles: which tile is it?"""
    grid = [axis.name for axis in plan.tile_axes]
    own = f" / {plan.cluster}" if plan.cluster > 1 else ""
    if plan.balanced and grid[1:]:
        return _balanced(grid, own, some=plan.profile.warpgroups)
    lines = [f"for (int t = blockIdx.x{own}; t < tiles; t += gridDim.x{own}) {{"]
    if plan.split.apart and plan.split.axis is not None:
        tasks = plan.split.tasks
        lines = [f"for (int task = blockIdx.x; task < tiles * {tasks}; task += gridDim.x) {{",
                 f"  const int t = task / {tasks}, {plan.split.axis.name} = task % {tasks};"]  # fmt: skip
    first, others = grid[0], grid[1:]
    if not others:
        return [*lines, f"  const int {first} = t;"]
    if plan.grouped:
        low, high = grid[0], grid[1]
        lines.append(f"  int {low}, {high};")
        area = f"(count_{low} * count_{high})"
        if grid[2:]:
            lines.append(f"  const int {grid[2]} = t / {area};")
        inside = f"t % {area}" if grid[2:] else "t"
        lines.append(f"  grouped_tile({inside}, count_{low}, count_{high}, {GROUP_TILES}, {low}, {high});")
        return lines
    lines.append(f"  int {first}, head;")
    lines.append(f"  {first} = t % count_{first}, head = t / count_{first};")
    return [*lines, *_heads(others)]


def _heads(others: list[str]) -> list[str]:
    lines = [f"  const int {others[0]} = head % count_{others[0]};"]
    return [*lines, f"  const int {others[1]} = head / count_{others[0]};"] if others[1:] else lines


def _balanced(grid: list[str], own: str, *, some: bool) -> list[str]:
    """`some`: where heads would not fill all blocks evenly, only some of them go in pairs."""
    first, others = grid[0], grid[1:]
    heads = " * ".join(f"count_{name}" for name in others)
    sizes = f"gridDim.x{own}, count_{first}, {heads}"
    verb, paired = ("mixed_tile", ", paired") if some else ("balanced_tile", "")
    return [
        *([f"const int paired = paired_heads({sizes});"] if some else []),
        "for (int turn = 0;; turn++) {",
        f"  int {first}, head;",
        f"  const int found = {verb}(turn, blockIdx.x{own}, {sizes}{paired}, {first}, head);",
        "  if (found == 0) break;",
        "  if (found == 2) continue;",
        *_heads(others),
    ]


def _producer(plan: KernelPlan, names: dict[Expr, str]) -> list[str]:
    lines: list[str] = []
    if plan.role_registers[1]:
        lines.append(f"registers_lower<{plan.role_registers[1]}>();")
    lines.append(f"if (threadIdx.x == consumers * {WARPGROUP}) {{")
    inner = ["int slot = 0;", "u32 phase = 1, once = 1;", *(["int spot = 0;"] if plan.ahead > 1 else [])]
    inner += passes(plan, walk(plan, names), [])
    before = [line for ring in plan.rings if ring.copies[0] in plan.program.body
              for line in _fetch(ring, names, spot(plan), "once")]  # fmt: skip
    inner += indented(before)
    loop = plan.loop
    names = names | {loop.var: loop.var.name}
    values = Values(names, no_element)
    body = [line for ring in plan.rings if ring.copies[0] in loop.body
            for line in _fetch(ring, names, *place_in(ring, "slot", "phase", ahead=" ^ 1"))]  # fmt: skip
    stages = max(ring.slots for ring in plan.rings)
    inner += indented(
        [
            f"const int last = {values.text(_extent(loop.var))};",
            "#pragma unroll 1",
            f"for (int {loop.var.name} = {values.text(loop.start)}; {loop.var.name} < last; {loop.var.name}++) {{",
            *indented(body),
            f"  if (++slot == {stages}) slot = 0, phase ^= 1;",
            "}",
            *next_tile(plan),
        ]
    )
    ends = ["}"] if plan.reference is None else ["}", "}"]
    return [*lines, *indented([*inner, *ends]), "}"]


def passes(plan: KernelPlan, tiles: list[str], meet: list[str]) -> list[str]:
    """The head of the loop over tiles; with a reference it is inside one of two passes, the second over tiles whose
    sums were not finite. `meet` is what a role does before it looks which these are.
    """
    if plan.reference is None:
        return tiles
    known, word = "again = line_word(again_at);", "again"
    start = ["u32 again = 0;"]
    if not plan.balanced:  # where no register is left to hold it
        known, word, start = "const u32 again = line_word(again_at);", "line_word(again_at)", []
    return [
        *start,
        "for (int pass = 0; pass < 2; pass++) {",
        "if (pass != 0) {",
        *meet,
        "  barrier_wait(judged, 0);",
        f"  {known}",
        "  if (again == 0) break;",
        "}",
        *tiles,
        f"  if (pass != 0 && ({word} >> ({tile_number(plan)} & 31) & 1) == 0) continue;",
    ]


def tile_number(plan: KernelPlan) -> str:
    """How many tiles a block had before one; the bits that stand for tiles to compute again count modulo 32."""
    own = f" / {plan.cluster}" if plan.cluster > 1 else ""
    return "turn" if plan.balanced and plan.tile_axes[1:] else f"(t / (gridDim.x{own}))"


def _fetch(ring: Ring, names: dict[Expr, str], slot: str, phase: str) -> list[str]:
    lines = [
        f"barrier_wait(empty_{ring.name} + 8 * {slot}, {phase});",
        f"barrier_expect(full_{ring.name} + 8 * {slot}, {ring.bytes});",
    ]
    for tile in ring.tiles:
        lines += _copies(ring, tile, names, slot)
    return lines


def _copies(ring: Ring, tile: Staged, names: dict[Expr, str], slot: str) -> Iterator[str]:
    values = Values(names, no_element)
    for chunk in range(tile.chunks):
        origin = [values.text(start) for start in tile.origin]
        if chunk:
            origin[tile.dims[tile.contiguous]] += f" + {chunk * tile.chunk}"
        skip = chunk * tile.chunk_rows * tile.chunk_bytes
        target = f"tile_{tile.buffer.name} + {slot} * {tile.bytes} + {skip}"
        at = ", ".join(reversed(origin))
        yield f"load_tile({target}, &map_{tile.buffer.name}, full_{ring.name} + 8 * {slot}, {at});"


def no_element(load: Load) -> str | None:
    """CudaError for an element outside a parallel loop."""
    if load.dtype is DType.I64 or not variables(load):
        return None
    raise CudaError(f"{load} is read outside a parallel loop; CUDA kernels read elements in parallel loops only")
