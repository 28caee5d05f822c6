"""Regions as the fuser makes them of 16-bit models: operands widened, scaled and computed from what a node reads."""

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const, select, unary
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Place, Product, Result, Tensor, View

F32, F16 = DType.F32, DType.F16
BATCH, SHARED, HEADS, WIDTH = 2, 2, 4, 64


def _tensor(name: str, *shape: Expr | int) -> Tensor:
    return Tensor(name, F16, tuple(const(dim) if isinstance(dim, int) else dim for dim in shape))


def _axis(name: str, extent: Expr | int) -> Var:
    return Var(name, extent=const(extent) if isinstance(extent, int) else extent)


def rotated_attention() -> AttentionSpec:
    """Causal attention with rotary embeddings: x0 [2, S, 4, 64], keys and values of 2 heads, cos and sin [S, 64]."""
    S = Sym("S")
    queries = _tensor("x0", BATCH, S, HEADS, WIDTH)
    keys, values = (_tensor(name, BATCH, S, SHARED, WIDTH) for name in ("x1", "x2"))
    cos, sin = (_tensor(name, S, WIDTH) for name in ("x3", "x4"))
    b, h, i, j, d, e = (
        _axis("b", BATCH), _axis("h", HEADS), _axis("i", S), _axis("j", S), _axis("d", WIDTH), _axis("e", WIDTH),
    )  # fmt: skip

    def rotated(source: Tensor, head: Expr, at: Var) -> Expr:
        def element(column: Expr) -> Expr:
            return cast(Load(source, (b, at, head, column)), F32)

        half = WIDTH // 2
        other = select(binary("lt", d, half), unary("neg", element(d + half)), element(d - half))
        return element(d) * cast(Load(cos, (at, d)), F32) + other * cast(Load(sin, (at, d)), F32)

    raw, acc = Var("raw", F32), Var("acc", F32)
    output = Tensor("y0", F16, (const(BATCH), S, const(HEADS), const(WIDTH)))
    return AttentionSpec(
        (queries, keys, values, cos, sin),
        View("q", (b, h, i, d), rotated(queries, h, i) * 0.125),
        View("k", (b, h, j, d), rotated(keys, h // 2, j)),
        View("v", (b, h, j, e), cast(Load(values, (b, j, h // 2, e)), F32)),
        raw,
        (b, h, i, j),
        select(binary("le", j, i), raw, const(float("-inf"), F32)),
        acc,
        (Result(Place(output, (b, h, i, e), (b, i, h, e)), cast(acc, F16)),),
    )


def packed_attention() -> AttentionSpec:
    """The same without rotation and mask, of queries, keys and values in one [2 * S, 3 * 4 * 64] with x1 [2, S]."""
    S = Sym("S")
    packed = _tensor("x0", S * BATCH, 3 * HEADS * WIDTH)
    lengths = Tensor("x1", DType.I64, (const(BATCH), S))
    b, h, i, j, d, e = (
        _axis("b", BATCH), _axis("h", HEADS), _axis("i", S), _axis("j", S), _axis("d", WIDTH), _axis("e", WIDTH),
    )  # fmt: skip

    def part(name: str, number: int, at: Var, column: Var) -> View:
        index = (b * S + at, h * WIDTH + column + number * HEADS * WIDTH)
        return View(name, (b, h, at, column), cast(Load(packed, index), F32))

    raw, acc = Var("raw", F32), Var("acc", F32)
    output = Tensor("y0", F16, (const(BATCH), S, const(HEADS * WIDTH)))
    seen = cast(Load(lengths, (b, j)), F32)
    return AttentionSpec(
        (packed, lengths), part("q", 0, i, d), part("k", 1, j, d), part("v", 2, j, e), raw, (b, h, i, j),
        raw * 0.125 + seen, acc, (Result(Place(output, (b, h, i, e), (b, i, h * WIDTH + e)), cast(acc, F16)),),
    )  # fmt: skip


def flat_product(*, siblings: int = 1, scaled: bool = False) -> ContractionSpec:
    """x [B, S, 128] times `siblings` weights [128, 64], each with a bias of its own: m counts rows of all batches."""
    B, S = Sym("B"), Sym("S")
    x = _tensor("x0", B, S, 128)
    g, m, n, k = _axis("g", 1), _axis("m", B * S), _axis("n", 64), _axis("k", 128)
    left = cast(Load(x, (m // S, m % S, k)), F32)
    inputs, products, outputs = [x], list[Product](), list[Result]()
    for number in range(siblings):
        weight = Tensor(f"x{2 * number + 1}", F16, (const(128), const(64)), constant=True)
        bias = Tensor(f"x{2 * number + 2}", F16, (const(64),), constant=True)
        acc = Var(f"acc{number}", F32)
        products.append(Product(View(f"b{number}", (g, k, n), cast(Load(weight, (k, n)), F32)), acc))
        place = Place(_tensor(f"y{number}", B, S, 64), (g, m, n), (m // S, m % S, n))
        outputs.append(Result(place, cast(acc + cast(Load(bias, (n,)), F32), F16)))
        inputs += [weight, bias]
    first, *others = products
    a = View("a", (g, m, k), left * 0.25 if scaled else left)
    return ContractionSpec(
        tuple(inputs), a, first.b, first.acc, tuple(outputs), siblings=tuple(others)
    )  # fmt: skip


def masked_attention() -> AttentionSpec:
    """Queries, keys and values [2, S, 4 * 64], a padding mask bool [2, S] that adds −65504 or nothing, a NaN guard."""
    S = Sym("S")
    tensors = [_tensor(f"x{number}", BATCH, S, HEADS * WIDTH) for number in range(3)]
    mask = Tensor("x3", DType.BOOL, (const(BATCH), S))
    b, h, i, j, d, e = (
        _axis("b", BATCH), _axis("h", HEADS), _axis("i", S), _axis("j", S), _axis("d", WIDTH), _axis("e", WIDTH),
    )  # fmt: skip

    def view(name: str, tensor: Tensor, at: Var, column: Var) -> View:
        return View(name, (b, h, at, column), cast(Load(tensor, (b, at, h * WIDTH + column)), F32))

    raw, acc = Var("raw", F32), Var("acc", F32)
    hidden = select(Load(mask, (b, j)), const(0.0, F32), const(-65504.0, F32))
    score = raw * 0.125 + hidden
    minus = const(float("-inf"), F32)
    output = _tensor("y0", BATCH, S, HEADS * WIDTH)
    return AttentionSpec(
        (*tensors, mask), view("q", tensors[0], i, d), view("k", tensors[1], j, d), view("v", tensors[2], j, e), raw,
        (b, h, i, j), select(binary("le", score, const(-65520.0, F32)), minus, score), acc,
        (Result(Place(output, (b, h, i, e), (b, i, h * WIDTH + e)), cast(acc, F16)),), nan_guard=True,
    )  # fmt: skip
