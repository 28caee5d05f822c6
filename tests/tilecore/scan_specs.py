"""Recurrences as specs, each with inputs and with what plain numpy loops make of them in float64."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, const, unary
from tilecore.contract.spec import Cell, Place, Result, ScanSpec, State, Tensor, Total, check

F32 = DType.F32
ZERO = const(0.0, F32)
B, T = Sym("B"), Sym("T")
NO_QUERY = Var("q", extent=const(1))


@dataclass(frozen=True)
class ScanCase:
    """A spec, inputs, and the expected outputs."""

    spec: ScanSpec
    arrays: dict[str, np.ndarray]
    expected: Mapping[str, np.ndarray]


def axis(name: str, extent: Expr | int) -> Var:
    """An index variable."""
    return Var(name, extent=const(extent) if isinstance(extent, int) else extent)


def tensor(name: str, *shape: Expr | int) -> Tensor:
    """A physical input or output."""
    return Tensor(name, F32, tuple(const(dim) if isinstance(dim, int) else dim for dim in shape))


def cell(name: str, group: Var, *axes: Var) -> Cell:
    """A cell over the group and `axes`."""
    return Cell(name, F32, tuple(a.extent for a in (group, *axes) if a.extent is not None))


def checked(spec: ScanSpec) -> ScanSpec:
    """The spec, if it is one."""
    check(spec)
    return spec


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal f32 numbers."""
    return rng.standard_normal(shape).astype(np.float32)


def delta_case(rng: np.random.Generator, *, batch: int, time: int, depth: int, width: int, readers: int) -> ScanCase:
    """The gated delta rule over [B, T, H, …] with a past state, `readers` query heads per state, and both results."""
    H = 2
    q = tensor("q", B, T, H * readers, depth)
    k, gate = tensor("k", B, T, H, depth), tensor("gate", B, T, H, depth)
    v, beta, past = tensor("v", B, T, H, width), tensor("beta", B, T, H), tensor("past", B, H, depth, width)
    y, last = tensor("y", B, T, H * readers, width), tensor("last", B, H, depth, width)
    g, t = axis("g", B * H), axis("t", T)
    i, j, u, w = axis("i", depth), axis("j", width), axis("u", readers), axis("w", depth)
    b, h = g // H, g % H
    old, new = cell("S", g, i, j), cell("S'", g, i, j)
    guess, out = cell("guess", g, j), cell("out", g, u, j)

    def decayed(row: Expr) -> Expr:
        return unary("exp", Load(gate, (b, t, h, row))) * Load(old, (g, row, j))

    error = Load(v, (b, t, h, j)) - Load(guess, (g, j))
    update = decayed(i) + Load(k, (b, t, h, i)) * (Load(beta, (b, t, h)) * error)
    spec = ScanSpec(
        (q, k, gate, v, beta, past), g, t, j,
        (State(old, new, (i, j), Load(past, (b, h, i, j)), update),),
        (
            Total(guess, (j,), w, "sum", decayed(w) * Load(k, (b, t, h, w))),
            Total(out, (u, j), w, "sum", Load(new, (g, w, j)) * Load(q, (b, t, h * readers + u, w))),
        ),
        NO_QUERY, (),
        (
            Result(Place(y, (g, t, u, j), (b, t, h * readers + u, j)), Load(out, (g, u, j)) * 0.5),
            Result(Place(last, (g, i, j), (b, h, i, j)), Load(old, (g, i, j))),
        ),
    )  # fmt: skip
    arrays = {
        "q": normal(rng, batch, time, H * readers, depth), "k": normal(rng, batch, time, H, depth) / depth**0.5,
        "gate": -np.abs(normal(rng, batch, time, H, depth)), "v": normal(rng, batch, time, H, width),
        "beta": normal(rng, batch, time, H), "past": normal(rng, batch, H, depth, width),
    }  # fmt: skip
    a = {name: value.astype(np.float64) for name, value in arrays.items()}
    state, steps = a["past"], [np.zeros((batch, 0, H * readers, width))]
    for now in range(time):
        state = np.exp(a["gate"][:, now])[..., None] * state
        guessed = np.einsum("bhij,bhi->bhj", state, a["k"][:, now])
        change = a["beta"][:, now][..., None] * (a["v"][:, now] - guessed)
        state = state + a["k"][:, now][..., None] * change[..., None, :]
        steps.append(0.5 * np.einsum("bhij,bhi->bhj", state.repeat(readers, axis=1), a["q"][:, now])[:, None])
    return ScanCase(checked(spec), arrays, {"y": np.concatenate(steps, axis=1), "last": state})


def normalised_case(rng: np.random.Generator, *, causal: bool, batch: int, time: int, depth: int) -> ScanCase:
    """Linear attention over [B, T, D] with its normaliser: S = Σ k vᵀ, z = Σ k, (q·S) / (q·z)."""
    q, k, v = (tensor(name, B, T, depth) for name in "qkv")
    y = tensor("y", B, T, depth)
    g, t, clock = axis("g", B), axis("t", T), axis("q", T)
    i, j, w = axis("i", depth), axis("j", depth), axis("w", depth)
    old, new, past, sums = cell("S", g, i, j), cell("S'", g, i, j), cell("z", g, i), cell("z'", g, i)
    top, bottom = cell("top", g, j), cell("bottom", g)
    states = (
        State(old, new, (i, j), ZERO, Load(old, (g, i, j)) + Load(k, (g, t, i)) * Load(v, (g, t, j))),
        State(past, sums, (i,), ZERO, Load(past, (g, i)) + Load(k, (g, t, i))),
    )
    when, matrix, vector = (t, new, sums) if causal else (clock, old, past)
    totals = (
        Total(top, (j,), w, "sum", Load(q, (g, when, w)) * Load(matrix, (g, w, j))),
        Total(bottom, (), w, "sum", Load(q, (g, when, w)) * Load(vector, (g, w))),
    )
    results = (Result(Place(y, (g, when, j), (g, when, j)), Load(top, (g, j)) / Load(bottom, (g,))),)
    if causal:
        results += (Result(Place(tensor("last", B, depth), (g, i), (g, i)), Load(past, (g, i))),)
    spec = ScanSpec(
        (q, k, v), g, t, j, states, totals if causal else (), NO_QUERY if causal else clock, () if causal else totals,
        results,
    )  # fmt: skip
    arrays = {"q": np.abs(normal(rng, batch, time, depth)), "k": np.abs(normal(rng, batch, time, depth)),
              "v": normal(rng, batch, time, depth)}  # fmt: skip
    scores = np.einsum("bqi,bki->bqk", arrays["q"].astype(np.float64), arrays["k"])
    if causal:
        scores = np.tril(scores)
    expected = {"y": (scores / scores.sum(-1, keepdims=True)) @ arrays["v"]}
    return ScanCase(checked(spec), arrays, expected | ({"last": arrays["k"].sum(1, np.float64)} if causal else {}))


def selective_case(rng: np.random.Generator, *, batch: int, time: int, channels: int, states: int) -> ScanCase:
    """A selective state-space scan over [B, T, D]: h = exp(Δ·A) h + Δ·B·x, y = C·h + x."""
    x, step = tensor("x", B, T, channels), tensor("step", B, T, channels)
    a, into, out = tensor("a", channels, states), tensor("into", B, T, states), tensor("out", B, T, states)
    y = tensor("y", B, T, channels)
    g, t, n, d, w = axis("g", B), axis("t", T), axis("n", states), axis("d", channels), axis("w", states)
    old, new, total = cell("h", g, n, d), cell("h'", g, n, d), cell("out", g, d)
    delta = Load(step, (g, t, d))
    decay = unary("exp", delta * Load(a, (d, n)))
    update = decay * Load(old, (g, n, d)) + delta * Load(into, (g, t, n)) * Load(x, (g, t, d))
    spec = ScanSpec(
        (x, step, a, into, out), g, t, d, (State(old, new, (n, d), ZERO, update),),
        (Total(total, (d,), w, "sum", Load(new, (g, w, d)) * Load(out, (g, t, w))),),
        NO_QUERY, (), (Result(Place(y, (g, t, d), (g, t, d)), Load(total, (g, d)) + Load(x, (g, t, d))),),
    )  # fmt: skip
    arrays = {
        "x": normal(rng, batch, time, channels), "step": np.abs(normal(rng, batch, time, channels)),
        "a": -np.abs(normal(rng, channels, states)), "into": normal(rng, batch, time, states),
        "out": normal(rng, batch, time, states),
    }  # fmt: skip
    f = {name: value.astype(np.float64) for name, value in arrays.items()}
    h, steps = np.zeros((batch, channels, states)), [np.zeros((batch, 0, channels))]
    for now in range(time):
        dt = f["step"][:, now, :, None]
        h = np.exp(dt * f["a"]) * h + dt * f["into"][:, now, None] * f["x"][:, now, :, None]
        steps.append(((h * f["out"][:, now, None]).sum(-1) + f["x"][:, now])[:, None])
    return ScanCase(checked(spec), arrays, {"y": np.concatenate(steps, axis=1)})


def recurrent_case(rng: np.random.Generator, *, batch: int, time: int, width: int) -> ScanCase:
    """A plain recurrent layer over [T, B, D], h = tanh(W h + x), and the largest element of the old state per step."""
    x, weight, first = tensor("x", T, B, width), tensor("weight", width, width), tensor("first", B, width)
    y, peak = tensor("y", T, B, width), tensor("peak", T, B)
    g, t, i, w = axis("g", B), axis("t", T), axis("i", width), axis("w", width)
    old, new, product, top = cell("h", g, i), cell("h'", g, i), cell("Wh", g, i), cell("top", g)
    spec = ScanSpec(
        (x, weight, first), g, t, None,
        (State(old, new, (i,), Load(first, (g, i)), unary("tanh", Load(product, (g, i)) + Load(x, (t, g, i)))),),
        (
            Total(product, (i,), w, "sum", Load(weight, (i, w)) * Load(old, (g, w))),
            Total(top, (), w, "max", Load(old, (g, w))),
        ),
        NO_QUERY, (),
        (
            Result(Place(y, (g, t, i), (t, g, i)), Load(new, (g, i))),
            Result(Place(peak, (g, t), (t, g)), Load(top, (g,))),
        ),
    )  # fmt: skip
    arrays = {"x": normal(rng, time, batch, width), "weight": normal(rng, width, width) / width**0.5,
              "first": normal(rng, batch, width)}  # fmt: skip
    f = {name: value.astype(np.float64) for name, value in arrays.items()}
    h, steps, peaks = f["first"], [np.zeros((0, batch, width))], [np.zeros((0, batch))]
    for now in range(time):
        peaks.append(h.max(-1)[None])
        h = np.tanh(h @ f["weight"].T + f["x"][now])
        steps.append(h[None])
    return ScanCase(checked(spec), arrays, {"y": np.concatenate(steps), "peak": np.concatenate(peaks)})


def prefix_case(rng: np.random.Generator, *, batch: int, time: int, width: int) -> ScanCase:
    """Sums of what came before, over [B, T, D]: what is stored is the state before the step; time runs backwards."""
    x, y = tensor("x", B, T, width), tensor("y", B, T, width)
    g, t, d = axis("g", B), axis("t", T), axis("d", width)
    back = T - 1 - t
    old, new = cell("s", g, d), cell("s'", g, d)
    spec = ScanSpec(
        (x,), g, t, d, (State(old, new, (d,), ZERO, Load(old, (g, d)) + Load(x, (g, back, d))),), (), NO_QUERY, (),
        (Result(Place(y, (g, t, d), (g, back, d)), Load(old, (g, d))),),
    )  # fmt: skip
    arrays = {"x": normal(rng, batch, time, width)}
    sums = np.cumsum(arrays["x"][:, ::-1].astype(np.float64), axis=1)[:, ::-1]
    return ScanCase(checked(spec), arrays, {"y": sums - arrays["x"]})


def scan_cases(seed: int, *, batch: int = 2, time: int = 5) -> dict[str, ScanCase]:
    """One of each form, of odd sizes."""
    rng = np.random.default_rng(seed)
    sizes = {"batch": batch, "time": time}
    return {
        "delta": delta_case(rng, **sizes, depth=3, width=21, readers=1),
        "delta-shared": delta_case(rng, **sizes, depth=4, width=5, readers=3),
        "causal": normalised_case(rng, causal=True, **sizes, depth=19),
        "whole": normalised_case(rng, causal=False, **sizes, depth=6),
        "selective": selective_case(rng, **sizes, channels=37, states=4),
        "recurrent": recurrent_case(rng, **sizes, width=9),
        "prefix": prefix_case(rng, **sizes, width=23),
    }
