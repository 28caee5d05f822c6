"""Random region specs with arrays for them: what the tests of the kernels run against the definition in `evaluate`."""

from dataclasses import dataclass, replace

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Sym, Var, binary, cast, const, select, unary
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Place,
    Product,
    Result,
    RowSpec,
    Spec,
    Step,
    Tensor,
    View,
    check,
)

F32 = DType.F32
MINUS_INFINITY = const(-np.inf, F32)


@dataclass(frozen=True)
class Case:
    """A spec and one set of inputs for it."""

    spec: Spec
    arrays: dict[str, np.ndarray]


def axis(name: str, extent: Expr | int) -> Var:
    """An index variable."""
    return Var(name, extent=const(extent) if isinstance(extent, int) else extent)


def tensor(name: str, *shape: Expr | int, dtype: DType = F32) -> Tensor:
    """A physical input or output."""
    return Tensor(name, dtype, tuple(const(dim) if isinstance(dim, int) else dim for dim in shape))


@dataclass(frozen=True)
class AttentionForm:
    """What a random attention region looks like."""

    batch: int = 2
    heads: int = 2
    groups: int = 1
    queries: int = 7
    keys: int = 7
    depth: int = 4
    mask: str = "none"
    rope: bool = False
    softcap: bool = False
    sink: bool = False
    guard: bool = False
    two_outputs: bool = False
    poison: str = "none"


MASKS = ("none", "causal", "past", "window", "near", "padding", "select", "bias", "rows", "capped-causal", "both")


def attention_case(form: AttentionForm, rng: np.random.Generator) -> Case:
    """A spec of that form: Q and K/V in [B, S, H·D], V key-major or not, K shared by `groups` heads."""
    B, Q, K = Sym("B"), Sym("Q"), Sym("K")
    H, D, E = form.heads, form.depth, form.depth + 1
    shared = H // form.groups
    inputs = [tensor("xq", B, Q, H * D), tensor("xk", B, K, shared, D), tensor("xv", B, shared, K, E)]
    b, h, q, k = axis("b", B), axis("h", H), axis("q", Q), axis("k", K)
    d, e = axis("d", D), axis("e", E)
    group = const(form.groups)
    head = binary("floordiv", h, group)
    views = {
        "q": View("q", (b, h, q, d), Load(inputs[0], (b, q, h * D + d))),
        "k": View("k", (b, h, k, d), Load(inputs[1], (b, k, head, d))),
        "v": View("v", (b, h, k, e), Load(inputs[2], (b, head, k, e))),
    }
    if form.rope:
        inputs += [tensor("cos", Q, D), tensor("sin", Q, D)]
        half = D // 2
        turned = select(
            binary("lt", d, const(half)),
            unary("neg", Load(inputs[0], (b, q, h * D + d + half))),
            Load(inputs[0], (b, q, h * D + d - half)),
        )
        value = views["q"].value * Load(inputs[3], (q, d)) + turned * Load(inputs[4], (q, d))
        views["q"] = View("q", (b, h, q, d), value)
    raw, acc = Var("raw", F32), Var("acc", F32)
    score = _masked(form, raw * 0.5, (b, h, q, k), inputs)
    sink = None
    if form.sink:
        inputs.append(tensor("logit", H))
        sink = View("sink", (b, h, q), Load(inputs[-1], (h,)))
    out = tensor("out", B, Q, H * E)
    outputs = [Result(Place(out, (b, h, q, e), (b, q, h * E + e)), acc)]
    if form.two_outputs:
        other = tensor("other", B, H, Q, E, dtype=DType.F16)
        outputs.append(Result(Place(other, (b, h, q, e), (b, h, q, e)), cast(acc * 2.0, DType.F16)))
    spec = AttentionSpec(
        tuple(inputs),
        views["q"],
        views["k"],
        views["v"],
        raw,
        (b, h, q, k),
        score,
        acc,
        tuple(outputs),
        form.guard,
        sink,
    )
    check(spec)
    return Case(spec, _attention_arrays(form, spec, rng))


def _masked(form: AttentionForm, score: Expr, index: tuple[Var, Var, Var, Var], inputs: list[Tensor]) -> Expr:
    b, h, q, k = index
    B, Q, K = Sym("B"), Sym("Q"), Sym("K")
    if form.softcap:
        score = unary("tanh", score / 5.0) * 5.0
    causal = binary("le", k, q)
    match form.mask:
        case "causal":
            return select(causal, score, MINUS_INFINITY)
        case "past":  # the last Q of K positions ask
            return select(binary("gt", k - (K - Q), q), MINUS_INFINITY, score)
        case "window":
            near = binary("and", causal, binary("lt", q - k, const(3)))
            return select(near, score, MINUS_INFINITY)
        case "near":  # in 32-bit integers, as some exporters count positions
            distance = unary("abs", cast(q, DType.I32) - cast(k, DType.I32))
            return select(binary("lt", distance, const(3, DType.I32)), score, MINUS_INFINITY)
        case "padding":
            inputs.append(tensor("mask", B, K))
            return score + Load(inputs[-1], (b, k))
        case "select":
            inputs.append(tensor("keep", B, 1, Q, K, dtype=DType.BOOL))
            return select(Load(inputs[-1], (b, const(0), q, k)), score, MINUS_INFINITY)
        case "bias":
            inputs.append(tensor("bias", 1, form.heads, Q, K))
            return score + Load(inputs[-1], (const(0), h, q, k))
        case "rows":
            return select(binary("lt", q, const(3)), score, MINUS_INFINITY)
        case "capped-causal":
            return select(causal, score, MINUS_INFINITY) * 2.0 + 1.0
        case "both":
            inputs.append(tensor("mask", B, K))
            return select(causal, score, MINUS_INFINITY) + Load(inputs[-1], (b, k))
        case _:
            return score


def _attention_arrays(form: AttentionForm, spec: AttentionSpec, rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = random_arrays(spec, {"B": form.batch, "Q": form.queries, "K": form.keys}, rng)
    if "mask" in arrays:
        arrays["mask"] = np.where(rng.random(arrays["mask"].shape) < 0.4, -np.inf, 0.0).astype(np.float32)
        arrays["mask"][0] = -np.inf
    target = {"query": "xq", "key": "xk", "value": "xv"}.get(form.poison.split("-")[0])
    if target and arrays[target].size:
        flat = arrays[target].reshape(-1)
        flat[rng.integers(flat.size)] = {"nan": np.nan, "inf": np.inf, "minus": -np.inf}[form.poison.split("-")[1]]
    return arrays


def random_arrays(spec: Spec, sizes: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal numbers for every input, in its type."""
    arrays: dict[str, np.ndarray] = {}
    for source in spec.inputs:
        shape = tuple(int(dim.value) if isinstance(dim, Const) else sizes[str(dim)] for dim in source.shape)
        values = rng.standard_normal(shape)
        arrays[source.name] = values > -0.5 if source.dtype is DType.BOOL else values.astype(source.dtype.row.numpy)
    return arrays


def contraction_case(seed: int, *, rows: int, columns: int, depth: int, batch: int = 1) -> Case:
    """A·B with one of several layouts and epilogues, by seed."""
    rng = np.random.default_rng(seed)
    G, M = Sym("G"), Sym("M")
    g, m, n, k = axis("g", G), axis("m", M), axis("n", columns), axis("k", depth)
    a, bias = tensor("a", M, G, depth), tensor("bias", columns)
    b = tensor("b", columns, depth) if seed % 2 else tensor("b", depth, columns)
    residual = tensor("residual", G, M, columns)
    acc = Var("acc", F32)
    biased = acc + Load(bias, (n,))
    gelu = biased * 0.5 * (1.0 + unary("erf", biased * 0.70710678))
    value = (acc, biased, gelu, biased + Load(residual, (g, m, n)))[seed % 4]
    first = Result(Place(tensor("c", G, M, columns), (g, m, n), (g, m, n)), value)
    second = Result(
        Place(tensor("t", columns, G, M, dtype=DType.F16), (g, m, n), (n, g, m)), cast(unary("tanh", acc), DType.F16)
    )
    spec = ContractionSpec(
        (a, b, bias, residual),
        View("left", (g, m, k), Load(a, (m, g, k)) * (2.0 if seed % 3 else 1.0)),
        View("right", (g, k, n), Load(b, (n, k) if seed % 2 else (k, n))),
        acc,
        (first, second) if seed % 3 == 0 else (first,),
    )
    check(spec)
    return Case(spec, random_arrays(spec, {"G": batch, "M": rows}, rng))


def siblings_case(kind: str, *, rows: int, columns: int, depth: int, count: int = 2) -> Case:
    """Several products of one A: "gated" has silu(first) · second as its only output, "apart" an output per product."""
    rng = np.random.default_rng(rows)
    M = Sym("M")
    g, m, n, k = axis("g", const(1)), axis("m", M), axis("n", columns), axis("k", depth)
    a, bias = tensor("a", M, depth), tensor("bias", columns)
    weights = [replace(tensor(f"w{i}", depth, columns), constant=True) for i in range(count)]
    accs = [Var(f"acc{i}", F32) for i in range(count)]
    products = [
        Product(View(f"b{i}", (g, k, n), Load(w, (k, n))), acc)
        for i, (w, acc) in enumerate(zip(weights, accs, strict=True))
    ]
    if kind == "gated":
        values: list[Expr] = [accs[0] * unary("sigmoid", accs[0]) * accs[1]]
    else:
        values = [acc + Load(bias, (n,)) if i else acc for i, acc in enumerate(accs)]
    places = [Place(tensor(f"c{i}", M, columns), (g, m, n), (m, n)) for i in range(len(values))]
    spec = ContractionSpec(
        (a, *weights, bias),
        View("left", (g, m, k), Load(a, (m, k))),
        products[0].b,
        products[0].acc,
        tuple(Result(place, value) for place, value in zip(places, values, strict=True)),
        siblings=tuple(products[1:]),
    )
    check(spec)
    return Case(spec, random_arrays(spec, {"M": rows}, rng))


def row_case(kind: str, *, rows: int, columns: int, dynamic: bool, seed: int = 0) -> Case:
    """A row program by name, over a known or a dynamic number of columns."""
    rng = np.random.default_rng(seed)
    R, C = Sym("R"), Sym("C") if dynamic else const(columns)
    x, skip, gamma = tensor("x", R, C), tensor("skip", R, C), tensor("gamma", C)
    r, c = axis("r", R), axis("c", C)
    count = float(max(columns, 1))

    def step(name: str, how: str, value: Expr) -> Step:
        return Step(Var(name, F32), how, value)

    y = tensor("y", R, C)
    whole = Place(y, (r, c), (r, c))
    load = Load(x, (r, c))
    steps: list[Step] = []
    match kind:
        case "layernorm":
            steps.append(step("h", "tile", load + Load(skip, (r, c))))
            steps.append(step("total", "sum", steps[0].var))
            steps.append(step("d", "tile", steps[0].var - steps[1].var / count))
            steps.append(step("square", "sum", steps[2].var * steps[2].var))
            scale = unary("rsqrt", steps[3].var / count + 1e-5)
            outputs = [
                Result(whole, steps[2].var * scale * Load(gamma, (c,))),
                Result(Place(tensor("sum", R, C), (r, c), (r, c)), steps[0].var),
                Result(Place(tensor("scale", R), (r,), (r,)), scale),
            ]
        case "softmax":
            steps.append(step("top", "max", load))
            steps.append(step("p", "tile", unary("exp", load - steps[0].var)))
            steps.append(step("total", "sum", steps[1].var))
            outputs = [Result(whole, steps[1].var / steps[2].var)]
        case "pointwise":
            outputs = [Result(whole, load * unary("sigmoid", load) * Load(gamma, (c,)))]
        case "reductions":
            steps.append(step("low", "min", load))
            steps.append(step("product", "prod", load))
            steps.append(step("again", "sum", steps[0].var))
            outputs = [
                Result(
                    Place(tensor("y", R, dtype=DType.F64), (r,), (r,)), cast(steps[0].var + steps[1].var, DType.F64)
                ),
                Result(Place(tensor("again_out", R), (r,), (r,)), steps[2].var),
            ]
        case "index":
            position = cast(r * 3 + c, F32)
            outputs = [Result(Place(tensor("y", C, R), (r, c), (c, r)), select(binary("lt", c, r), load, position))]
        case _:
            raise ValueError(kind)
    spec = RowSpec((x, skip, gamma), r, c, tuple(steps), tuple(outputs))
    check(spec)
    return Case(spec, random_arrays(spec, {"R": rows, "C": columns}, rng))
