"""Plans for cards without tensor copies as CUDA C++: one body for all warps of a block.

Comes in: a `KernelPlan` of `plan_warps`. Goes out: text that needs `tile_sm80.cuh` and nothing else, the same bytes for
the same plan. Copies of later iterations are in flight while the products of this one run; a slot of a ring is written
again after all warps have met once more. Tiles lie as tensor copies would lay them.
"""

from tilecore.contract.expr import Const, Expr, Var
from tilecore.contract.spec import View
from tilecore.cuda.emit_cuda import describe, indented, no_element, parameters, tiles_of, walk
from tilecore.cuda.errors import CudaError
from tilecore.cuda.fragments import GROUP_ROW, Fragments
from tilecore.cuda.kernel import ALIGNMENT, WARPGROUP, KernelPlan, Ring, extent_of_axis, read_by_element
from tilecore.cuda.partial import partial_sums
from tilecore.cuda.roles import CHUNK, GROUP_ROWS, SWIZZLE, Staged, extents, number
from tilecore.cuda.stores import Lines
from tilecore.cuda.values import Values, dim, pointer
from tilecore.cuda.vectors import multiple
from tilecore.cuda.warps import DEPTH, UNIT, rectangle_of
from tilecore.graph import depth_axes
from tilecore.ir import Buffer, Copy, Fill, For, Gemm, If, Parallel, Reduce, Stmt, statements

UNIT_ROW, UNIT_COLUMN = Var("unit_row"), Var("unit_column")  # of a tensor, where a unit begins
KINDS = {"bf16": "Bf16", "f16": "F16"}


def emit_warps(plan: KernelPlan, name: str) -> str:
    """The kernel as text, with entry point `name`."""
    names: dict[Expr, str] = {symbol: dim(symbol) for symbol in plan.symbols}
    lines = ["// " + line for line in describe(plan)]
    lines += ['#include "tile_sm80.cuh"', ""]
    lines.append(f'extern "C" __global__ void __launch_bounds__({plan.threads}, {plan.blocks})')
    lines.append(f"{name}({', '.join(parameters(plan))}) {{")
    lines += indented([*_layout(plan), *tiles_of(plan, names)])
    names |= {axis: axis.name for axis in plan.program.grid}
    lines += indented([*walk(plan, names), *indented(_Body(plan, names).text()), "}"])
    return "\n".join([*lines, "}", ""])


def _layout(plan: KernelPlan) -> list[str]:
    """Tiles of the loop first: staged stores use their place when it is over."""
    lines = [
        "extern __shared__ u8 shared[];",
        f"const u32 base = (shared_address(shared) + {ALIGNMENT - 1}) & ~{ALIGNMENT - 1}u;",
    ]
    offset = 0
    for ring in sorted(plan.rings, key=lambda ring: ring.copies[0] not in plan.loop.body):
        for tile in ring.tiles:
            lines.append(f"const u32 tile_{tile.buffer.name} = base + {offset};  // + {tile.bytes} per slot")
            offset += tile.bytes * ring.slots
    return [
        *lines,
        f"const int warpgroup = threadIdx.x / {WARPGROUP}, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;",
        f"const int group_row = warpgroup * {GROUP_ROWS * plan.roles.strips};",
        f"const int warp_row = group_row + {GROUP_ROWS // 4 * plan.roles.strips} * warp;",
        "const int own_row = warp_row + lane / 4, own_column = 2 * (lane % 4);",
    ]


class _Body:
    """Writes what a block does with one tile."""

    def __init__(self, plan: KernelPlan, names: dict[Expr, str]) -> None:
        self.plan = plan
        self.roles = plan.roles
        self.names: dict[Expr, str] = {**names, GROUP_ROW: "group_row"}
        self.work = Fragments(plan, self.names, self._slot, _staged_store)
        self.early = [ring for ring in plan.rings if ring.copies[0] not in plan.loop.body]
        self.late = [ring for ring in plan.rings if ring.copies[0] in plan.loop.body]
        self.stages = max(ring.slots for ring in self.late)

    def text(self) -> list[str]:
        """The lines."""
        lines = self.work.declarations()
        for ring in self.early:
            lines += self._copies(ring, "0", self.names)
        for stmt in self.plan.program.body:
            lines += self._statement(stmt)
        kept = read_by_element(self.plan.program, tuple(self.early))
        return [*lines, "__syncthreads();"] if kept or self.plan.staged_stores else lines

    def _statement(self, stmt: Stmt) -> list[str]:
        span = stmt.span
        head = [] if span is None or isinstance(stmt, Copy) else [f"// {span.file.rsplit('/', 1)[-1]}:{span.line}"]
        match stmt:
            case For():
                return [*head, *self.work.opened(partial_sums(stmt, self.roles.statistics)), *self._loop(stmt),
                        *self.work.closed()]  # fmt: skip
            case Copy():
                return self._copy(stmt)
            case Gemm():
                return [*head, *self._product(stmt)]
            case Fill():
                return [*head, *self.work.fill(stmt)]
            case Reduce():
                return [*head, *self.work.reduce(stmt)]
            case Parallel():
                return [*head, *self.work.parallel(stmt)]
            case If() if not stmt.otherwise and not any(isinstance(one, Gemm | For) for one in statements(stmt.then)):
                condition = self.work.values().text(stmt.condition, guarded=True)
                inner = [line for one in stmt.then for line in self._statement(one)]
                return [*head, f"if ({condition}) {{", *indented(inner), "}"]
            case _:
                raise CudaError(f"{type(stmt).__name__} has no form for {self.plan.profile.arch}")

    def _loop(self, loop: For) -> list[str]:
        """Copies run `stages` - 1 iterations ahead of products."""
        values, var, stages = self.work.values(), loop.var.name, self.stages
        assert loop.var.extent is not None
        coming = {**self.names, loop.var: "coming"}
        ahead = [line for ring in self.late for line in self._copies(ring, "early", coming)]
        following = [line for ring in self.late for line in self._copies(ring, "free_slot", coming)]
        self.names[loop.var] = var
        body = [line for stmt in loop.body for line in self._statement(stmt)]
        del self.names[loop.var]
        return [
            f"const int first = {values.text(loop.start)}, last = {values.text(loop.var.extent)};",
            f"TILE_UNROLL for (int early = 0; early < {stages - 1}; early++) {{",
            "  const int coming = first + early;",
            *indented(["if (coming < last) {", *indented(ahead), "}"]),
            "  copies_commit();",
            "}",
            f"int slot = 0, free_slot = {stages - 1};",
            "#pragma unroll 1",
            f"for (int {var} = first; {var} < last; {var}++) {{",
            f"  copies_wait<{stages - 2}>();",
            "  __syncthreads();",
            f"  const int coming = {var} + {stages - 1};",
            *indented(["if (coming < last) {", *indented(following), "}"]),
            "  copies_commit();",
            *indented(body),
            f"  if (++slot == {stages}) slot = 0;",
            f"  if (++free_slot == {stages}) free_slot = 0;",
            "}",
            "copies_wait<0>();",
            "__syncthreads();",
        ]

    def _slot(self, buffer: Buffer) -> str:
        return "0" if any(tile.buffer == buffer for ring in self.early for tile in ring.tiles) else "slot"

    def _copies(self, ring: Ring, slot: str, names: dict[Expr, str]) -> list[str]:
        return [line for tile in ring.tiles for line in _fetch(tile, slot, names, self.plan.threads)]

    def _copy(self, copy: Copy) -> list[str]:
        source, target = copy.src.source, copy.dst.source
        if isinstance(source, View):  # copies from memory are where their ring is
            return []
        assert isinstance(source, Buffer)
        if not isinstance(target, Buffer):
            raise CudaError(f"{source.name} is copied to {target.name}; results are stored in parallel loops")
        packed = target.name in self.roles.packed
        return self.work.packed(source, target) if packed else self.work.copied(source, target)

    def _product(self, gemm: Gemm) -> list[str]:
        roles, strips, result = self.roles, self.roles.strips, gemm.c.name
        (_, left_depth), (_, right_depth) = depth_axes(gemm)
        left, right = roles.staged.get(gemm.a.name), roles.staged[gemm.b.name]
        if left is None:
            fetch = f"packed_left<{strips}>(left, {gemm.a.name}, x);"
        else:
            at = f"{self._address(left)}, warp_row + 16 * strip, {DEPTH} * x"
            minor = _truth(left.contiguous != left_depth)
            each = f"TILE_UNROLL for (int strip = 0; strip < {strips}; strip++)"
            fetch = f"{each} fetch_left<{minor}>(left + 4 * strip, {at});"
        kind = f"{KINDS[str(gemm.b.dtype)]}, {strips}, {_truth(right.contiguous != right_depth)}"
        clear = f"TILE_UNROLL for (int x = 0; x < {roles.fragments[result]}; x++) {result}[x] = 0.0f;"
        return [
            *([clear] if gemm.clear else []),
            f"TILE_UNROLL for (int x = 0; x < {extents(gemm.a)[left_depth] // DEPTH}; x++) {{",
            f"  u32 left[{4 * strips}];",
            f"  {fetch}",
            f"  multiply<{kind}>({result}, left, {self._address(right)}, {DEPTH} * x);",
            "}",
        ]

    def _address(self, tile: Staged) -> str:
        """Of a tile's slot, and of its chunks."""
        return f"tile_{tile.buffer.name} + {self._slot(tile.buffer)} * {tile.bytes}, {tile.chunk_rows * SWIZZLE}"


def _truth(value: object) -> str:
    return "true" if value else "false"


def _fetch(tile: Staged, slot: str, names: dict[Expr, str], threads: int) -> list[str]:
    """The copy of one tile by all threads; where rows are no units of 16 bytes, elements are fetched one by one."""
    tensor = tile.tensor
    column_dim, row_dim = tile.dims[tile.contiguous], tile.dims[1 - tile.contiguous]
    values = Values(names, no_element)
    start, extent = tile.origin[column_dim], tensor.shape[column_dim]
    row, column, height, width = map(values.text, (tile.origin[row_dim], start, tensor.shape[row_dim], extent))
    pitch = " * ".join(f"(i64)({values.text(dim)})" for dim in tensor.shape[row_dim + 1 :])
    source = f"{pointer(tensor)} + {values.offset(tensor, tile.origin)}"
    at = f"tile_{tile.buffer.name} + {slot} * {tile.bytes}, {source}, {pitch}, {row}, {height}, {column}, {width}"

    def call(verb: str) -> str:
        return f"{verb}<{tile.chunk_rows}, {tile.chunks}, {threads}>({at});"

    if multiple(start, UNIT) and multiple(extent, UNIT):
        return [call("copy_tile")]
    if not multiple(start, UNIT) or isinstance(extent, Const):
        return [call("gather_tile")]
    return [f"if ({width} % {UNIT} == 0)", f"  {call('copy_tile')}", "else", f"  {call('gather_tile')}"]


def _staged_store(
    plan: KernelPlan, stmt: Parallel, starts: list[str], setup: list[str], value: str, gate: Lines | None
) -> list[str]:
    """A warp's rows by way of the rings' shared memory; `starts` are the rectangle's origin, `value` is element x."""
    assert gate is None
    place, (row_dim, column_dim), _ = rectangle_of(stmt)
    tensor, halves = place.tensor, 2 * plan.roles.strips
    names: dict[Expr, str] = {symbol: dim(symbol) for symbol in plan.symbols}
    index: list[Expr] = [Var(f"start_{axis}") for axis in range(len(starts))]
    names |= {**dict(zip(index, starts, strict=True)), UNIT_ROW: "unit_row", UNIT_COLUMN: "unit_column"}
    values = Values(names, no_element)
    index[row_dim], index[column_dim] = UNIT_ROW, UNIT_COLUMN
    height, width = values.text(tensor.shape[row_dim]), values.text(tensor.shape[column_dim])
    chunks = number(extent_of_axis(stmt, 1), "a width") // CHUNK
    return [
        "{",
        f"const u32 staged = base + (warp_row * {SWIZZLE});",
        f"TILE_UNROLL for (int chunk = 0; chunk < {chunks}; chunk++) {{",
        "  __syncwarp();",
        f"  TILE_UNROLL for (int pair = 0; pair < {CHUNK // 8 * halves}; pair++) {{",
        "    float v[2];",
        "    TILE_UNROLL for (int y = 0; y < 2; y++) {",
        f"      const int x = chunk * {CHUNK // 4 * halves} + 2 * pair + y;",
        *("      " + line for line in setup),
        f"      v[y] = {value};",
        "    }",
        f"    stage_pair(staged, lane / 4 + pair % {halves} * 8, pair / {halves} * 8 + own_column, "
        f"pair_{place.dtype}(v[0], v[1]));",
        "  }",
        "  __syncwarp();",
        f"  TILE_UNROLL for (int y = 0; y < {2 * halves}; y++) {{",
        "    const int row = y * 4 + lane / 8, own = lane % 8 * 8;",
        f"    const int unit_row = {starts[row_dim]} + warp_row + row;",
        f"    const int unit_column = {starts[column_dim]} + chunk * {CHUNK} + own;",
        f"    if (unit_row < {height} && unit_column < {width})",
        f"      store_staged({pointer(tensor)} + {values.offset(tensor, tuple(index))}, staged, row, own);",
        "  }",
        "}",
        "}",
    ]
