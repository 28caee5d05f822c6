"""wgmma as C++ functions: one per shape, element type and operand layout that a kernel uses."""

from collections.abc import Iterator
from dataclasses import dataclass

from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.roles import Roles, extents
from tilecore.graph import depth_axes
from tilecore.ir import Gemm, statements


@dataclass(frozen=True, slots=True)
class Product:
    """One instruction: m64 n`columns` k16, A in registers or shared memory, either side contiguous along its depth."""

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
        left is not None and left.contiguous != a_depth[1],
        gemm.b.name in roles.exchanged or roles.staged[gemm.b.name].contiguous != b_depth[1],
    )


def product_functions(plan: KernelPlan) -> Iterator[str]:
    """Every function that the kernel calls."""
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
    instruction = f"wgmma.mma_async.sync.aligned.m64n{product.columns}k16.f32.{product.dtype}.{product.dtype}"
    return (
        f"TILE_FN void {product.name}(float (&d)[{count}], {parameters}, u64 b, int add) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {add}, 0;\\n{instruction} {{{sums}}}, {left}, {right}, '
        f'{flags};\\n}}"\n      : {outputs} : {inputs}, "l"(b), "r"(add));\n}}'
    )
