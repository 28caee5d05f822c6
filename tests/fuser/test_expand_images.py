"""Definitions of the operators of image models, which ONNX Runtime cannot run on a CPU, against numpy."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from operator_cases import Case, expanded, run
from region_oracle import check_regions, scanned

Array = npt.NDArray[Any]

RANDOM = np.random.default_rng(0)
N, HEIGHT, WIDTH, CHANNELS = 2, 3, 5, 16
PIXELS = {(0, 0): "batch", (0, 1): "height", (0, 2): "width"}


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def normalised(x: Array, gamma: Array, beta: Array, *, groups: int, swish: bool) -> Array:
    """Channels last, group by group."""
    result = np.empty(x.shape, np.float64)
    size = x.shape[-1] // groups
    for n in range(x.shape[0]):
        for start in range(0, x.shape[-1], size):
            part = x[n, :, :, start : start + size].astype(np.float64)
            result[n, :, :, start : start + size] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
    result = result * gamma + beta
    return result / (1 + np.exp(-result)) if swish else result


@dataclass(frozen=True)
class Image:
    """A case and what it computes."""

    case: Case
    wanted: Callable[..., tuple[Array, ...]]


def case(
    op: str, *inputs: Array, outputs: tuple[int, ...] = (0,), weights: tuple[int, ...] = (1, 2), **more: int
) -> Case:
    given = {**more, **({"epsilon": 1e-5} if "Norm" in op else {})}
    symbols = PIXELS if inputs[0].ndim == 4 else {(0, 0): "batch", (0, 1): "pixels"}
    symbols = {**symbols, **({(3, 0): "batch"} if op == "SkipGroupNorm" else {})}
    return Case(op, inputs, given, outputs, frozenset(weights), symbols)


X, SCALE, SHIFT = floats(N, HEIGHT, WIDTH, CHANNELS), floats(CHANNELS), floats(CHANNELS)
TOKENS = floats(N, 6, CHANNELS)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # within 5e-4 of the exact one


def skipped(x: Array, gamma: Array, beta: Array, skip: Array, bias: Array) -> tuple[Array, ...]:
    total = x + skip[:, None, None] + bias
    return normalised(total, gamma, beta, groups=4, swish=False), total


FIRST = np.ascontiguousarray(X.transpose(0, 3, 1, 2))
SKIP = (X, SCALE, SHIFT, floats(N, CHANNELS), floats(CHANNELS))
IMAGES = {
    "GroupNorm": Image(
        case("GroupNorm", X, SCALE, SHIFT, groups=4, activation=1),
        lambda x, g, b: (normalised(x, g, b, groups=4, swish=True),),
    ),
    "GroupNorm, channels first": Image(
        case("GroupNorm", FIRST, SCALE, SHIFT, groups=2, channels_last=0, activation=0),
        lambda x, g, b: (normalised(x.transpose(0, 2, 3, 1), g, b, groups=2, swish=False).transpose(0, 3, 1, 2),),
    ),
    "SkipGroupNorm": Image(
        case("SkipGroupNorm", *SKIP, outputs=(0, 1), weights=(1, 2, 4), groups=4, activation=0), skipped
    ),
    "BiasSplitGelu": Image(
        case("BiasSplitGelu", TOKENS, floats(CHANNELS), weights=(1,)),
        lambda x, b: ((x + b)[..., : CHANNELS // 2] * gelu((x + b)[..., CHANNELS // 2 :]),),
    ),
    "BiasAdd": Image(
        case("BiasAdd", TOKENS, floats(CHANNELS), TOKENS[::-1].copy(), weights=(1,)), lambda x, b, s: (x + b + s,)
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_definition_computes_what_numpy_does_inside_regions(name: str, tmp_path: Path) -> None:
    image = IMAGES[name]
    model = image.case.model(dynamic="channels first" not in name)
    wanted = image.wanted(*(value for value in image.case.inputs if value is not None))
    tolerance = 3e-3 if "Gelu" in name else 2e-5
    for value, expected in zip(run(expanded(model, tmp_path), image.case.feeds()), wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)
    found = scanned(model, tmp_path)
    assert found.regions or name == "BiasAdd"  # two sums are no region by themselves
    assert not any(node.domain == "com.microsoft" for node in found.model.graph)
    check_regions(found, image.case.feeds())


def test_operators_without_a_definition_are_misses_that_say_why(tmp_path: Path) -> None:
    heads = [floats(2, 1, 16)] * 3
    (miss,) = scanned(
        Case("DecoderMaskedMultiHeadAttention", heads, {"num_heads": 2}).model(dynamic=False), tmp_path
    ).misses
    assert miss.kind == "attention"
    assert "shared cache at a length that is known at run time only" in miss.reason
