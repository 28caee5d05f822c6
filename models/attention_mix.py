"""Attention put together at random: every part in one of the spellings that exporters and authors use for it.

Comes in: a function that chooses one option per feature, so that a seeded generator and a property-based one share one
builder. Goes out: a checked model and inputs for it. Invariant: equal mixes give equal bytes, and whatever was chosen,
the graph holds exactly one attention.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from models.attention_scores import Scores
from models.attention_sides import Sides
from models.graph import GraphWriter

Array = npt.NDArray[np.generic]

# The first option of a feature is the plain one: what does not go together with the rest of a mix falls back to it.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "projection": ("linear", "biased", "gemm", "conv", "einsum", "inputs"),
    "packing": ("apart", "split", "slice", "gather"),
    "order": ("batch first", "sequence first"),
    "product": ("matmul", "bmm", "einsum", "einsum rows"),
    "grouping": ("none", "expand", "gather", "five axes", "broadcast"),
    "norm": ("none", "rms", "unit"),
    "rope": ("none", "half", "interleaved", "partial"),
    "past": ("none", "past"),
    "scale": ("multiplied", "divided", "query", "both", "computed", "learned", "none"),
    "cap": ("none", "tanh"),
    "bias": ("none", "alibi", "table", "buckets"),
    "mask": (
        *("none", "added", "lowest", "infinite", "where", "where before scale", "full", "added input"),
        *("causal constant", "causal trilu", "causal range", "top left", "window"),
    ),
    "guard": ("none", "isnan", "max", "clip"),
    "softmax": ("operator", "pieces", "cast", "log"),
    "sink": ("none", "concatenated"),
    "leftover": ("none", "identity", "times one", "transposed twice", "cast pair"),
    "extra": ("none", "weights", "scores", "key", "value"),
    "dims": ("symbolic", "static"),
    "dtype": ("float32", "float16"),
    "opset": ("17", "13", "14", "18", "20", "21"),
    "heads": ("2", "1", "3"),
    "group": ("2", "3"),
    "width": ("4", "1", "3", "6", "8", "17"),
    "batch": ("2", "1", "3"),
    "seq": ("7", "1", "3", "17"),
    "cached": ("3", "1", "5"),
}
PLAIN_SHARE = 0.4  # of the features of a seeded mix that take the plain option without a draw
NEEDS_TRILU = 14  # the opset from which Trilu exists


@dataclass(frozen=True)
class Mix:
    """One option per feature, and the seed of weights and inputs."""

    options: Mapping[str, str]
    seed: int = 0

    def __getitem__(self, feature: str) -> str:
        return self.options[feature]

    def number(self, feature: str) -> int:
        """The option of a feature that is a number."""
        return int(self.options[feature])

    @property
    def text(self) -> str:
        """What is not plain, for reports."""
        parts = (f"{name}={option}" for name, option in self.options.items() if option != FEATURES[name][0])
        return ", ".join(parts)

    @property
    def sizes(self) -> tuple[Mapping[str, int], ...]:
        """Sizes of the dims to run the model with: two of every symbolic one, or those that are fixed."""
        first = {"batch": self.number("batch"), "seq": self.number("seq"), "past": self.number("cached")}
        if self["dims"] == "static":
            return (first,)
        return (first, {"batch": first["batch"] + 1, "seq": first["seq"] + 4, "past": first["past"] + 2})


def draw(choose: Callable[[str, tuple[str, ...]], str], *, seed: int = 0) -> Mix:
    """A mix of options that go together; `choose` gets a feature and its options."""
    return Mix(_reconciled({name: choose(name, options) for name, options in FEATURES.items()}), seed)


def seeded(seed: int) -> Mix:
    """The mix of a seed."""
    source = random.Random(seed)

    def choose(feature: str, options: tuple[str, ...]) -> str:
        return options[0] if source.random() < PLAIN_SHARE else source.choice(options)

    return draw(choose, seed=seed)


def _reconciled(options: Mapping[str, str]) -> Mapping[str, str]:
    """The options with those made plain that have no meaning beside the others."""
    final = dict(options)
    plain = {name: choices[0] for name, choices in FEATURES.items()}
    if final["projection"] in ("einsum", "inputs") or (final["packing"] == "gather" and final["grouping"] != "none"):
        final["packing"] = plain["packing"]
    if final["rope"] != "none" and final["width"] in ("1", "3", "17"):
        final["width"] = plain["width"]
    if final["mask"] == "causal trilu" and int(final["opset"]) < NEEDS_TRILU:
        final["opset"] = plain["opset"]
    if final["grouping"] in ("five axes", "broadcast") and final["product"] != "matmul":
        final["product"] = plain["product"]
    if (final["seq"], final["dims"], final["past"]) == ("1", "static", "none"):  # one key: nothing to normalise
        final["seq"] = plain["seq"]
    if final["softmax"] == "log" and final["guard"] == "isnan":
        final["softmax"] = plain["softmax"]
    return final


def build(mix: Mix) -> onnx.ModelProto:
    """The model: x (or query, key and value) and what the mix needs → y [batch, seq, heads * width]."""
    sizes = mix.sizes[0] if mix["dims"] == "static" else None
    g = GraphWriter(mix.number("opset"), seed=mix.seed, sizes=sizes)
    sides = Sides(g, mix.options)
    query, key, value = sides.operands()
    scores = Scores(g, mix.options, sides)
    weights, context = scores.attend(query, key, value)
    g.op("Identity", sides.joined(context), out="y")
    g.output("y", sides.dtype, [None] * 3)
    shown = {"weights": weights, "scores": scores.shown, "key": sides.shown_key, "value": sides.shown_value}
    if mix["extra"] in shown:
        g.op("Identity", shown[mix["extra"]], out="shown")
        g.output("shown", sides.dtype, [None] * 4)
    model = g.finish()
    onnx.checker.check_model(model)
    return model


def feeds(mix: Mix, sizes: Mapping[str, int], model: onnx.ModelProto) -> dict[str, Array]:
    """Inputs of the given sizes: masks have holes, padding on the left, and one row of the batch hides everything."""
    source = np.random.default_rng([mix.seed, *sizes.values()])
    found: dict[str, Array] = {}
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        shape = tuple(dim if isinstance(dim, int) else sum(sizes[part] for part in dim.split(" + ")) for dim in dims)
        if value.name == "mask":
            found[value.name] = _mask(source, shape).astype(kind)
        else:
            found[value.name] = source.standard_normal(shape).astype(kind)
    return found


def _mask(source: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    visible = source.random(shape) < 0.7  # the rest are holes
    visible[0] = True
    visible[0, ..., : math.floor(shape[-1] / 3)] = False
    if shape[0] > 1:
        visible[-1] = False
    return visible
