"""Cases of products: bf16 with and without epilogues, few rows, 8-bit floats, weights of packed levels."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from h100_case import (
    PEAK,
    Arrays,
    Case,
    Run,
    axes,
    named,
    quack,
    tensor,
    tilelang,
    torch,
    triton,
)

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, cast, const, unary
from tilecore.contract.panel import packed_level
from tilecore.contract.spec import ContractionSpec, Place, Result, Tensor, View

PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (2048, 2048, 2048), (512, 4096, 4096),
            (128, 4096, 4096), (16, 4096, 4096), (1, 4096, 4096), (128, 8192, 8192), (16, 8192, 8192),
            (1, 8192, 8192))  # fmt: skip
EPILOGUES = ((4096, "gelu"), (8192, "gelu"), (4096, "residual"), (128, "gelu"), (16, "gelu"), (1, "gelu"))
LEVELS = ((1, 4), (16, 4), (64, 4), (128, 4), (512, 4), (2048, 4), (1, 8), (16, 8), (128, 8), (2048, 8))
WEIGHTS, GROUP = 8192, 128  # of products by packed weights: columns and depth, elements that share a scale
EIGHTHS = (4096, 8192)  # of cubic products of 8-bit floats
FEW = 64  # rows up to which a product is a matter of bandwidth


def cases(*, quick: bool) -> Iterator[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    for shape in PRODUCTS[::3] if quick else PRODUCTS:
        yield lambda shape=shape: product_case(*shape)
    for rows, program in EPILOGUES[::3] if quick else EPILOGUES:
        yield lambda rows=rows, program=program: product_case(rows, max(rows, 4096), max(rows, 4096), program)
    for size in EIGHTHS[1:] if quick else EIGHTHS:
        yield lambda size=size: eighth_case(size)
    for rows, bits in LEVELS[::5] if quick else LEVELS:
        yield lambda rows=rows, bits=bits: level_case(rows, bits)


def product_case(rows: int, columns: int, depth: int, program: str = "") -> Case:
    """C = A · Bᵀ, both contiguous along the depth; what few rows make a matter of bandwidth is counted in bytes."""
    x, w, y = tensor("x", rows, depth), tensor("w", columns, depth), tensor("y", rows, columns)
    g, m, n, k = axes(g=1, m=rows, n=columns, k=depth)
    acc = Var("acc", DType.F32)
    value, more = _epilogue(program, acc, m, n)
    left, right = View("left", (g, m, k), Load(x, (m, k))), View("right", (g, k, n), Load(w, (n, k)))
    result = Result(Place(y, (g, m, n), (m, n)), cast(value, DType.BF16))
    spec = ContractionSpec((x, w, *more), left, right, acc, (result,))
    moved = 2.0 * (rows * depth + columns * depth + rows * columns * (2 if program == "residual" else 1))
    flops = 2.0 * rows * columns * depth if rows > FEW else 0.0
    name = f"product {rows} x {columns} x {depth}{' ' + program if program else ''}"
    reference, blas = _references(program)
    peers = {"cuBLAS": blas} if program else named(
        cuBLAS=(torch, blas),
        TileLang=(tilelang, lambda a: tilelang.product(a["x"], a["w"], a["y"])),
        quack=(quack, lambda a: quack.product(a)),
    )  # fmt: skip
    return Case("product" if rows > FEW else "few rows", name, spec, reference, peers, flops, moved)


def _epilogue(program: str, acc: Expr, m: Var, n: Var) -> tuple[Expr, tuple[Tensor, ...]]:
    rows, columns = (int(str(axis.extent)) for axis in (m, n))
    if program == "residual":
        residual = tensor("residual", rows, columns)
        return acc + cast(Load(residual, (m, n)), DType.F32), (residual,)
    if program == "gelu":
        bias = tensor("bias", columns)
        value = acc + cast(Load(bias, (n,)), DType.F32)
        inner = const(math.sqrt(2 / math.pi), DType.F32) * (value + const(0.044715, DType.F32) * value * value * value)
        return value * const(0.5, DType.F32) * (unary("tanh", inner) + 1.0), (bias,)
    return acc, ()


def _references(program: str) -> tuple[Run, Run]:
    """(in float32, by cuBLAS)."""

    def exact(a: Arrays) -> object:
        value = a["x"].float() @ a["w"].float().T
        if program == "residual":
            return value + a["residual"].float()
        return torch.nn.functional.gelu(value + a["bias"].float(), approximate="tanh") if program else value

    def blas(a: Arrays) -> object:
        if program == "residual":
            return torch.addmm(a["residual"], a["x"], a["w"].T, out=a["y"])
        if program == "gelu":
            return torch._addmm_activation(a["bias"], a["x"], a["w"].T, use_gelu=True, out=a["y"])
        return torch.mm(a["x"], a["w"].T, out=a["y"])

    return exact, blas


def level_case(rows: int, bits: int) -> Case:
    """C = A · Bᵀ by weights of 4 or 8 bits, groups of `GROUP` with a scale and a packed zero point; beside them cuBLAS
    with the same weights in bf16.
    """
    groups, each = WEIGHTS // GROUP, const(8 // bits)
    x, y = tensor("x", rows, WEIGHTS), tensor("y", rows, WEIGHTS)
    levels = tensor("levels", WEIGHTS, groups, GROUP * bits // 8, dtype=DType.U8)
    scale, zero = tensor("scale", WEIGHTS, groups), tensor("zero", WEIGHTS, groups * bits // 8, dtype=DType.U8)
    g, m, n, k = axes(g=1, m=rows, n=WEIGHTS, k=WEIGHTS)
    number, within = k // const(GROUP), k % const(GROUP)
    level = packed_level(Load(levels, (n, number, within // each)), within, bits)
    real = cast(level, DType.F32) - cast(packed_level(Load(zero, (n, number // each)), number, bits), DType.F32)
    value = cast(real * cast(Load(scale, (n, number)), DType.F32), DType.BF16)
    acc = Var("acc", DType.F32)
    result = Result(Place(y, (g, m, n), (m, n)), cast(acc, DType.BF16))
    views = View("left", (g, m, k), Load(x, (m, k))), View("right", (g, k, n), value)

    def dense(a: Arrays) -> Any:
        if "dense" not in a:
            parts = [a[name] for name in ("levels", "zero")]
            if bits == 4:
                parts = [torch.stack([part & 15, part >> 4], -1) for part in parts]
            whole, zeros = parts[0].view(WEIGHTS, groups, GROUP), parts[1].reshape(WEIGHTS, groups, 1)
            a["dense"] = ((whole.float() - zeros) * a["scale"].float()[..., None]).view(WEIGHTS, -1).bfloat16()
        return a["dense"]

    operands = ("x", "levels", "scale", "zero", "y")
    peers = named(
        cuBLAS_bf16=(torch, lambda a: torch.mm(a["x"], dense(a).T, out=a["y"])),
        Triton=(triton, lambda a: triton.levels(*(a[name] for name in operands), bits, GROUP)),
        TileLang=(tilelang, lambda a: tilelang.levels(*(a[name] for name in operands), bits, GROUP)),
        quack=(quack if bits == 4 else None, lambda a: quack.levels(a, GROUP)),
    )
    moved = WEIGHTS * (WEIGHTS * bits / 8 + groups * (2 + bits / 8)) + 4.0 * rows * WEIGHTS
    flops = 2.0 * rows * WEIGHTS * WEIGHTS if rows > FEW else 0.0
    spec = ContractionSpec((x, levels, scale, zero), *views, acc, (result,))
    name = f"int{bits} product {rows} x {WEIGHTS} x {WEIGHTS}"
    return Case("levels", name, spec, lambda a: a["x"].float() @ dense(a).float().T, peers, flops, moved)


def eighth_case(size: int) -> Case:
    """C = A · Bᵀ of 8-bit floats with a scale for each side; cuBLASLt with and without its fast sums."""
    x, w = (tensor(name, size, size, dtype=DType.F8E4M3) for name in "xw")
    y, left, right = tensor("y", size, size), *(tensor(name, 1, dtype=DType.F32) for name in ("left", "right"))
    g, m, n, k = axes(g=1, m=size, n=size, k=size)
    acc = Var("acc", DType.F32)
    value = cast(acc * Load(left, (const(0),)) * Load(right, (const(0),)), DType.BF16)
    views = View("a", (g, m, k), Load(x, (m, k))), View("b", (g, k, n), Load(w, (n, k)))
    spec = ContractionSpec((x, w, left, right), *views, acc, (Result(Place(y, (g, m, n), (m, n)), value),))

    def scaled(fast: bool) -> Run:
        return lambda a: torch._scaled_mm(
            a["x"], a["w"].T, scale_a=a["left"], scale_b=a["right"], out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def exact(a: Arrays) -> object:
        return a["x"].float() @ a["w"].float().T * (a["left"] * a["right"])

    peers = named(
        cuBLASLt=(torch, scaled(fast=False)),
        cuBLASLt_fast=(torch, scaled(fast=True)),
        TileLang=(tilelang, lambda a: tilelang.product(a["x"], a["w"], a["y"], (a["left"], a["right"]))),
    )
    return Case("fp8", f"fp8 product {size}^3", spec, exact, peers, 2.0 * size**3, rate=2 * PEAK)
