"""wgmma as C++ functions: one per shape, element type and operand layout that a kernel uses."""

from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.roles import CHUNK, Roles, Staged, extents
from tilecore.graph import depth_axes
from tilecore.ir import Gemm, statements

SHORT, COARSE_SHORT = 4, 8  # steps of the depth whose products of 8 bits have a sum of their own
EIGHTH = {"f8e4m3": "e4m3", "f8e5m2": "e5m2"}  # types by what instructions call them


@dataclass(frozen=True, slots=True)
class Product:
    """One instruction: m64 n`columns`, 32 bytes deep, A in registers or shared memory; `minor` is a side that is not
    contiguous along its depth.
    """

    columns: int
    dtype: str
    registers: bool
    a_minor: bool
    b_minor: bool

    @property
    def name(self) -> str:
        """Of the function."""
        left = "registers" if self.registers else "minor" if self.a_minor else "major"
        return f"product_{self.columns}_{self.dtype}_{left}_{'minor' if self.b_minor else 'major'}"


def product_of(gemm: Gemm, roles: Roles) -> Product:
    """The instruction of a product."""
    a_depth, b_depth = depth_axes(gemm)
    left = roles.staged.get(gemm.a.name)
    return Product(
        extents(gemm.c)[1] // roles.parts_of(gemm.c.name),
        str(gemm.b.dtype),
        gemm.a.name in roles.packed,
        left is not None and left.decoding is None and left.contiguous != a_depth[1],
        gemm.b.name in roles.exchanged or roles.staged[gemm.b.name].contiguous != b_depth[1],
    )


def own_columns(product: Product, gemm: Gemm, roles: Roles) -> str:
    """Where a warpgroup's columns of the right operand begin: at a chunk of them, or at a row of every chunk."""
    if roles.parts_of(gemm.c.name) == 1:
        return ""
    chunk = roles.staged[gemm.b.name].chunk_rows * 128
    return f" + warpgroup * {product.columns // CHUNK * chunk if product.b_minor else product.columns * 128}"


def descriptor(tile: Staged, slot: str, *, minor: bool, skip: str) -> str:
    """Of step x of the depth, 32 bytes each, in a slot of the tile's ring."""
    chunk = tile.chunk_rows * 128
    base = f"tile_{tile.buffer.name} + {slot} * {tile.bytes}{skip}"
    if minor:
        return f"depth_minor({base}, {chunk}) + x * {16 * 128 // 16}"
    return f"depth_major({base} + x / 4 * {chunk}) + x % 4 * 2"


def short_steps(roles: Roles) -> int:
    """How many steps have a sum of their own: twice as many where all results are rounded to bf16, which is coarser
    than what sums of that length lose.
    """
    return COARSE_SHORT if all(one.dtype is DType.BF16 for one in roles.program.outputs) else SHORT


def wait_for(roles: Roles, flying: int, condition: str) -> list[str]:
    """Wait for all products but the last `flying`; under a condition for all, to add what parts of the depth have
    summed by themselves.
    """
    plain = f"products_wait<{flying}>();"
    if not roles.short_sums:
        return [plain]
    lines = [f"if ({condition}) {{", "  products_wait<0>();"]
    for name in roles.short_sums:
        add = f"{name}[x] += {name}_part[x];"
        lines += [f"  pin({name}_part);", f"  TILE_UNROLL for (int x = 0; x < {roles.fragments[name]}; x++) {add}"]
    return [*lines, *(["} else {", f"  {plain}"] if flying else []), "}"]


def product_functions(plan: KernelPlan) -> Iterator[str]:
    """Every function that the kernel calls."""
    if plan.roles.by_warps:
        return
    gemms = (stmt for stmt in statements(plan.program.body) if isinstance(stmt, Gemm))
    for product in dict.fromkeys(product_of(gemm, plan.roles) for gemm in gemms):
        yield _function(product)


def _function(product: Product) -> str:
    count = product.columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if product.registers:
        left, operands = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", 4
        parameters = "const u32* a"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
        flags = f"p, 1, 1, {int(product.b_minor)}"
    else:
        left, operands = f"%{count}", 1
        parameters = "u64 a"
        inputs = '"l"(a)'
        flags = f"p, 1, 1, {int(product.a_minor)}, {int(product.b_minor)}"
    right, add = f"%{count + operands}", f"%{count + operands + 1}"
    kind, depth = EIGHTH.get(product.dtype, product.dtype), 16
    if kind != product.dtype:  # these have no bits for the order of operands
        flags, depth = "p, 1, 1", 32
    instruction = f"wgmma.mma_async.sync.aligned.m64n{product.columns}k{depth}.f32.{kind}.{kind}"
    return (
        f"TILE_FN void {product.name}(float (&d)[{count}], {parameters}, u64 b, int add) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {add}, 0;\\n{instruction} {{{sums}}}, {left}, {right}, '
        f'{flags};\\n}}"\n      : {outputs} : {inputs}, "l"(b), "r"(add));\n}}'
    )
