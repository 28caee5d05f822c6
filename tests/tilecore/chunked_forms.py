"""Linear attention and Mamba-2's chunk scan: specs, operands, random arrays, and the latter in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda_specs import BF16, F16, F32, Dim, axis, tensor

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, cast, const, unary
from tilecore.contract.spec import Cell, Place, Result, ScanSpec, State, Tensor, Total

Operands = dict[str, Any]
CONSTANT = 0.875  # a decay


@dataclass(frozen=True)
class LinearForm:
    """Linear attention, `depth` columns of q and k and `width` of v. `steps_first`: [B, S, H, D], else [B, H, S, D].

    `past`: from a state of the same type on; `present`: the last state is a result too; `late`: a step reads what was
    there before it; `decay`: what the state is multiplied by in each step, "exp" or "sigmoid" of "g" (f32, [B, S, H])
    or "constant"; `weighted`: each step counts "w" times (f32, [B, S, H]).
    """

    batch: int
    heads: int
    steps: Dim
    depth: int
    width: int
    dtype: DType = BF16
    steps_first: bool = False
    past: bool = False
    present: bool = False
    late: bool = False
    decay: str = ""
    weighted: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class ScanForm:
    """A chunk scan; `length` steps are a chunk, the last may be cut short."""

    batch: int
    steps: int
    heads: int
    width: int
    state: int
    length: int
    groups: int = 1
    decays: DType = F16
    dtype: DType = F16

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.steps // self.length)


def linear_spec(form: LinearForm) -> ScanSpec:
    """The spec; inputs "q", "k", "v" and "past", outputs "o" and "present", both states [B, H, depth, width]."""
    H, D, E = form.heads, form.depth, form.width
    g, t, d, e, over, query = (axis(name, extent) for name, extent in (
        ("g", form.batch * H), ("t", form.steps), ("d", D), ("e", E), ("over", D), ("query", 1)
    ))  # fmt: skip
    b, h = g // H, g % H

    def memory(name: str, columns: int) -> Tensor:
        inner = (form.steps, H) if form.steps_first else (H, form.steps)
        return tensor(name, form.dtype, form.batch, *inner, columns)

    def at(one: Tensor, column: Var) -> Expr:
        return cast(Load(one, (b, t, h, column) if form.steps_first else (b, h, t, column)), F32)

    q, k, v, o = memory("q", D), memory("k", D), memory("v", E), memory("o", E)
    past, present = (tensor(name, form.dtype, form.batch, H, D, E) for name in ("past", "present"))
    old, new = (Cell(name, F32, (form.batch * H, D, E)) for name in ("s", "s.next"))  # type: ignore[arg-type]
    read = Cell("r", F32, tuple(map(const, (form.batch * H, E))))
    first = cast(Load(past, (b, h, d, e)), F32) if form.past else const(0.0, F32)
    gate, weight = (tensor(name, F32, form.batch, form.steps, H) for name in ("g", "w"))
    kept, added = Load(old, (g, d, e)), at(k, d) * at(v, e)
    if form.decay:
        factor = const(CONSTANT, F32) if form.decay == "constant" else unary(form.decay, Load(gate, (b, t, h)))
        kept = kept * factor  # type: ignore[assignment]
    if form.weighted:
        added = Load(weight, (b, t, h)) * added
    state = State(old, new, (d, e), first, kept + added)
    total = Total(read, (e,), over, "sum", at(q, over) * Load(old if form.late else new, (g, over, e)))
    place = Place(o, (g, t, e), (b, t, h, e) if form.steps_first else (b, h, t, e))
    results = [Result(place, cast(Load(read, (g, e)) * const(form.scale, F32), form.dtype))]
    if form.present:
        last = Place(present, (g, d, e), (b, h, d, e))
        results.append(Result(last, cast(Load(old, (g, d, e)), form.dtype)))
    more = ((past, form.past), (gate, form.decay in ("exp", "sigmoid")), (weight, form.weighted))
    inputs = (q, k, v, *(one for one, given in more if given))
    return ScanSpec(inputs, g, t, e, (state,), (total,), query, (), tuple(results))


def linear_arrays(form: LinearForm, steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a spec, as they lie in memory."""
    rng = np.random.default_rng(seed)
    inner = (steps, form.heads) if form.steps_first else (form.heads, steps)
    shapes = {name: (form.batch, *inner, form.width if name == "v" else form.depth) for name in "qkv"}
    shapes |= {"past": (form.batch, form.heads, form.depth, form.width)} if form.past else {}
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if form.decay in ("exp", "sigmoid"):
        found["g"] = rng.standard_normal((form.batch, steps, form.heads)) + 2
        found["g"] = -np.log1p(np.exp(-found["g"])) if form.decay == "exp" else found["g"]
    if form.weighted:
        found["w"] = rng.standard_normal((form.batch, steps, form.heads))
    return found


def exact_linear(form: LinearForm, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(o in memory's order, the last state) in float64, step by step."""
    given = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    q, k, v = (given[name].swapaxes(1, 2) if form.steps_first else given[name] for name in "qkv")
    state = given["past"].copy() if form.past else np.zeros((form.batch, form.heads, form.depth, form.width))
    gate = {"exp": np.exp, "sigmoid": lambda g: 1 / (1 + np.exp(-g))}.get(form.decay)
    out = np.zeros(v.shape)
    for t in range(q.shape[2]):
        before = state
        kept = state * gate(given["g"][:, t])[..., None, None] if gate else state * (CONSTANT if form.decay else 1.0)
        weight = given["w"][:, t][..., None, None] if form.weighted else 1.0
        state = kept + weight * k[:, :, t, :, None] * v[:, :, t, None, :]
        out[:, :, t] = np.einsum("bhd,bhde->bhe", q[:, :, t], before if form.late else state)
    return (out.swapaxes(1, 2) if form.steps_first else out) * form.scale, state


def scan_operands(form: ScanForm) -> Operands:
    """The tensors of a chunk scan by parameter, named like it in small letters."""
    B, S, H, P, N, L, c, G = (form.batch, form.steps, form.heads, form.width, form.state, form.length, form.chunks,
                              form.groups)  # fmt: skip
    return {
        "CB": tensor("cb", form.dtype, B, c, G, L, L), "X": tensor("x", form.dtype, B, S, H, P),
        "dt": tensor("dt", form.decays, B, H, c, L), "dA": tensor("da", form.decays, B, H, c, L),
        "C": tensor("c", form.dtype, B, S, G, N), "states": tensor("states", form.dtype, B, c, H, P, N),
        "D": tensor("d", form.decays, H), "out": tensor("o", form.dtype, B, S, H, P),
    }  # fmt: skip


def scan_arrays(form: ScanForm, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs: steps of 0 to 1 and decays that fall along a chunk."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for one in scan_operands(form).values():
        shape = tuple(int(str(extent)) for extent in one.shape)
        if one.name == "da":
            found[one.name] = -np.cumsum(rng.random(shape) * 0.05, -1)
        elif one.name != "o":
            found[one.name] = rng.random(shape) if one.name == "dt" else rng.standard_normal(shape)
    return found


def exact_scan(form: ScanForm, arrays: dict[str, Any]) -> np.ndarray:
    """The chunk scan in float64, chunk by chunk and head by head."""
    given = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    out = np.zeros((form.batch, form.steps, form.heads, form.width))
    for b, chunk, h in np.ndindex(form.batch, form.chunks, form.heads):
        first = chunk * form.length
        here = slice(first, min(first + form.length, form.steps))
        steps, group = here.stop - first, h * form.groups // form.heads
        decay, step = given["da"][b, h, chunk, :steps], given["dt"][b, h, chunk, :steps]
        apart = np.minimum(decay[:, None] - decay, 0.0)  # above the diagonal, where it counts for nothing
        weights = np.tril(given["cb"][b, chunk, group, :steps, :steps] * np.exp(apart) * step)
        x = given["x"][b, here, h]
        before = given["c"][b, here, group] @ given["states"][b, chunk, h].T
        out[b, here, h] = weights @ x + np.exp(decay)[:, None] * before + given["d"][h] * x
    return out


TYPES = {BF16: "bfloat16", F16: "float16", F32: "float32"}
