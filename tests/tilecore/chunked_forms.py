"""Operands of linear attention and of Mamba-2's chunk scan, random arrays for them, and both in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda_specs import BF16, F16, F32, Dim, axis, tensor

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load
from tilecore.contract.spec import Place, View

Operands = dict[str, Any]


@dataclass(frozen=True)
class LinearForm:
    """Linear attention, `depth` columns of q and k and `width` of v. `steps_first`: [B, S, H, D], else [B, H, S, D]."""

    batch: int
    heads: int
    steps: Dim
    depth: int
    width: int
    dtype: DType = BF16
    steps_first: bool = False


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


def linear_operands(form: LinearForm) -> Operands:
    """Q, K, V and out over (b, h, t, column), of tensors "q", "k", "v", "o"."""
    found: Operands = {}
    for name, columns in (("q", form.depth), ("k", form.depth), ("v", form.width), ("o", form.width)):
        b, h, t, c = axis("b", form.batch), axis("h", form.heads), axis("t", form.steps), axis("c", columns)
        index = (b, t, h, c) if form.steps_first else (b, h, t, c)
        memory = tensor(name, form.dtype, *(var.extent for var in index if var.extent is not None))
        if name == "o":
            found["out"] = Place(memory, (b, h, t, c), index)
        else:
            found[name.upper()] = View(name, (b, h, t, c), Load(memory, index))
    return found


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
