"""Region specs in half precision: what the tests of the CUDA backend and its benchmark build."""

from dataclasses import dataclass

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, binary, cast, const, select, unary
from tilecore.contract.panel import packed_level
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Result, RowSpec, Step, Tensor, View

F32, F16, BF16, F8 = DType.F32, DType.F16, DType.BF16, DType.F8E4M3
Dim = Expr | int


def tensor(name: str, dtype: DType, *shape: Dim) -> Tensor:
    """A physical input or output."""
    return Tensor(name, dtype, tuple(const(dim) if isinstance(dim, int) else dim for dim in shape))


def axis(name: str, extent: Dim) -> Var:
    """An index variable."""
    return Var(name, extent=const(extent) if isinstance(extent, int) else extent)


@dataclass(frozen=True)
class ProductForm:
    """A matrix product: C[M, N] of A[M, K] and B[N, K], or B[K, N]; `program` is what follows it."""

    rows: Dim
    columns: Dim
    depth: Dim
    dtype: DType = BF16
    output: DType | None = None
    right_rows: bool = False
    program: str = "none"


@dataclass(frozen=True)
class AttentionForm:
    """Attention over [B, H, S, D]; `program` is what is done to scores besides scaling them."""

    batch: Dim
    heads: int
    queries: Dim
    keys: Dim
    width: int
    dtype: DType = BF16
    groups: int = 1
    causal: bool = False
    program: str = "none"


def product_spec(form: ProductForm) -> ContractionSpec:
    """The spec of a product; inputs "x", "w" and what the program reads, output "y"."""
    M, N, K = form.rows, form.columns, form.depth
    a = tensor("x", form.dtype, M, K)
    b = tensor("w", form.dtype, K, N) if form.right_rows else tensor("w", form.dtype, N, K)
    c = tensor("y", form.output or form.dtype, M, N)
    g, m, n, k = axis("g", 1), axis("m", M), axis("n", N), axis("k", K)
    acc = Var("acc", F32)
    value, more = _epilogue(form, acc, m, n)
    right = Load(b, (k, n) if form.right_rows else (n, k))
    result = Result(Place(c, (g, m, n), (m, n)), cast(value, c.dtype))
    left = View("left", (g, m, k), Load(a, (m, k)))
    return ContractionSpec((a, b, *more), left, View("right", (g, k, n), right), acc, (result,))


def _epilogue(form: ProductForm, acc: Var, m: Var, n: Var) -> tuple[Expr, tuple[Tensor, ...]]:
    if form.program == "residual":
        residual = tensor("residual", form.dtype, form.rows, form.columns)
        return acc + cast(Load(residual, (m, n)), F32), (residual,)
    if form.program == "scales":  # of whole tensors, as products of 8 bits have them
        left, right = tensor("left_scale", F32, 1), tensor("right_scale", F32, 1)
        return acc * Load(left, (const(0),)) * Load(right, (const(0),)), (left, right)
    if form.program == "silu":
        return acc * unary("sigmoid", acc), ()
    if form.program in ("bias", "gelu"):
        bias = tensor("bias", form.dtype, form.columns)
        value = acc + cast(Load(bias, (n,)), F32)
        if form.program == "gelu":
            inner = const(0.7978845608, F32) * (value + const(0.044715, F32) * value * value * value)
            value = value * const(0.5, F32) * (unary("tanh", inner) + 1.0)
        return value, (bias,)
    return acc, ()


def attention_spec(form: AttentionForm) -> AttentionSpec:
    """The spec of an attention region; inputs "q", "k", "v" and what the program reads, output "o"."""
    B, H, D, S, K = form.batch, form.heads, form.width, form.queries, form.keys
    inputs = [
        tensor("q", form.dtype, B, H, S, D),
        tensor("k", form.dtype, B, H // form.groups, K, D),
        tensor("v", form.dtype, B, H // form.groups, K, D),
    ]
    b, h, i, j, d, e = axis("b", B), axis("h", H), axis("i", S), axis("j", K), axis("d", D), axis("e", D)
    group = h if form.groups == 1 else binary("floordiv", h, const(form.groups))
    raw, acc = Var("raw", F32), Var("acc", F32)
    score: Expr = raw * const(D**-0.5, F32)
    if form.program == "cap":
        score = unary("tanh", score * const(1 / 30, F32)) * const(30.0, F32)
    if form.program == "sharp":  # most of it where tanh bends
        score = unary("tanh", score) * const(4.0, F32)
    if form.program == "slope":
        score = score + cast(j - i, F32) * const(0.0625, F32)
    if form.program == "bias":
        inputs.append(tensor("bias", form.dtype, S, K))
        score = score + cast(Load(inputs[-1], (i, j)), F32)
    if form.program in ("kept", "hidden"):  # keys of a row of the batch, told by flags
        inputs.append(tensor("flags", DType.BOOL, B, K))
        flag: Expr = Load(inputs[-1], (b, j))
        score = select(unary("not", flag) if form.program == "hidden" else flag, score, const(-np.inf, F32))
    if form.program == "key bias":
        inputs.append(tensor("bias", form.dtype, B, K))
        score = score + cast(Load(inputs[-1], (b, j)), F32)
    if form.causal:
        score = select(binary("le", j, i), score, const(-np.inf, F32))
    output = tensor("o", form.dtype, B, H, S, D)
    return AttentionSpec(
        tuple(inputs),
        View("query", (b, h, i, d), Load(inputs[0], (b, h, i, d))),
        View("key", (b, h, j, d), Load(inputs[1], (b, group, j, d))),
        View("value", (b, h, j, e), Load(inputs[2], (b, group, j, e))),
        raw,
        (b, h, i, j),
        score,
        acc,
        (Result(Place(output, (b, h, i, e), (b, h, i, e)), cast(acc, form.dtype)),),
    )


@dataclass(frozen=True)
class LatentForm:
    """One query per head over one cache [B, K, latent + rotary] for all heads: its rows are keys, and values as far as
    `latent` goes.
    """

    batch: int
    heads: int
    keys: Dim
    latent: int = 512
    rotary: int = 64
    dtype: DType = F16


def latent_spec(form: LatentForm) -> AttentionSpec:
    """The spec of decoding from a latent cache; inputs "q" and "c", output "o"."""
    B, H, K, D, E = form.batch, form.heads, form.keys, form.latent + form.rotary, form.latent
    q, c = tensor("q", form.dtype, B, H, 1, D), tensor("c", form.dtype, B, K, D)
    o = tensor("o", form.dtype, B, H, 1, E)
    b, h, i, j, d, e = axis("b", B), axis("h", H), axis("i", 1), axis("j", K), axis("d", D), axis("e", E)
    raw, acc = Var("raw", F32), Var("acc", F32)
    return AttentionSpec(
        (q, c),
        View("query", (b, h, i, d), Load(q, (b, h, i, d))),
        View("key", (b, h, j, d), Load(c, (b, j, d))),
        View("value", (b, h, j, e), Load(c, (b, j, e))),
        raw,
        (b, h, i, j),
        raw * const((form.latent // 4 + form.rotary) ** -0.5, F32),
        acc,
        (Result(Place(o, (b, h, i, e), (b, h, i, e)), cast(acc, form.dtype)),),
    )


@dataclass(frozen=True)
class RowForm:
    """A program over rows by name; `positions` are the rows of a table of rotary factors."""

    kind: str
    rows: Dim
    columns: int
    dtype: DType = BF16
    positions: int = 1


def row_spec(form: RowForm) -> RowSpec:
    """The spec of a row program; inputs "x" and what the kind needs, output "y"."""
    R, C = form.rows, form.columns
    r, c = axis("r", R), axis("c", C)
    x, y = tensor("x", form.dtype, R, C), tensor("y", form.dtype, R, C)
    inputs, steps, value = [x], list[Step](), cast(Load(x, (r, c)), F32)

    def more(name: str, *shape: Dim) -> Tensor:
        inputs.append(tensor(name, form.dtype, *shape))
        return inputs[-1]

    def step(name: str, kind: str, what: Expr) -> Expr:
        steps.append(Step(Var(name, F32), kind, what))
        return steps[-1].var

    match form.kind:
        case "rmsnorm":
            scale = unary("rsqrt", step("squares", "sum", value * value) / float(C) + 1e-5)
            result = value * scale * cast(Load(more("weight", C), (c,)), F32)
        case "layernorm":
            centred = step("centred", "tile", value - step("total", "sum", value) / float(C))
            scale = unary("rsqrt", step("squares", "sum", centred * centred) / float(C) + 1e-5)
            result = centred * scale * cast(Load(more("weight", C), (c,)), F32) + cast(Load(more("bias", C), (c,)), F32)
        case "softmax":
            weight = step("weight", "tile", unary("exp", value - step("top", "max", value)))
            result = weight / step("total", "sum", weight)
        case "swiglu":
            result = value * unary("sigmoid", value) * cast(Load(more("up", R, C), (r, c)), F32)
        case "rope":
            half, at = C // 2, binary("mod", r, const(form.positions))
            cos, sin = (cast(Load(more(name, form.positions, C), (at, c)), F32) for name in ("cos", "sin"))
            other = select(binary("lt", c, const(half)), unary("neg", cast(Load(x, (r, c + half)), F32)),
                           cast(Load(x, (r, c - half)), F32))  # fmt: skip
            result = value * cos + other * sin
        case _:
            raise ValueError(form.kind)
    output = Result(Place(y, (r, c), (r, c)), cast(result, form.dtype))
    return RowSpec(tuple(inputs), r, c, tuple(steps), (output,))


@dataclass(frozen=True)
class LevelForm:
    """A product by weights of `bits` bits in groups of `group` along the depth: C[M, N] of A[M, K] and packed levels.

    `zero` is "middle", "packed" (as the levels are) or "bytes"; `scale` the type of scales.
    """

    rows: Dim
    columns: int
    depth: int
    bits: int = 4
    group: int = 128
    dtype: DType = BF16
    zero: str = "packed"
    scale: DType | None = None
    signed: bool = False


def level_spec(form: LevelForm) -> ContractionSpec:
    """The spec of such a product; inputs "x", "levels" [N, groups, bytes], "scale" and "zero" by group, output "y"."""
    M, N, K, bits = form.rows, form.columns, form.depth, form.bits
    groups = -(-K // form.group)
    x, y = tensor("x", form.dtype, M, K), tensor("y", form.dtype, M, N)
    levels = tensor("levels", DType.I8 if form.signed else DType.U8, N, groups, form.group * bits // 8)
    scale = tensor("scale", form.scale or form.dtype, N, groups)
    inputs = [x, levels, scale]
    g, m, n, k = axis("g", 1), axis("m", M), axis("n", N), axis("k", K)
    number, within, each = k // const(form.group), k % const(form.group), const(8 // bits)
    real: Expr = cast(packed_level(Load(levels, (n, number, within // each)), within, bits), F32)
    if form.zero == "middle":
        real = real - (0.0 if form.signed else float(1 << (bits - 1)))
    elif form.zero == "packed":
        inputs.append(tensor("zero", DType.U8, N, -(-groups * bits // 8)))
        real = real - cast(packed_level(Load(inputs[-1], (n, number // each)), number, bits), F32)
    else:
        inputs.append(tensor("zero", DType.U8, N, groups))
        real = real - cast(Load(inputs[-1], (n, number)), F32)
    value = cast(real * cast(Load(scale, (n, number)), F32), form.dtype)
    acc = Var("acc", F32)
    result = Result(Place(y, (g, m, n), (m, n)), cast(acc, form.dtype))
    left = View("left", (g, m, k), Load(x, (m, k)))
    return ContractionSpec(tuple(inputs), left, View("right", (g, k, n), value), acc, (result,))
