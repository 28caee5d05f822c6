"""Single operators and short chains of fixed sizes from file to result, against numpy in float64.

Each is here because its kernel was refused by the C compiler or gave something else than the operator's definition.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.graph import GraphWriter, write
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load

pytestmark = pytest.mark.cpu

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """What is written from x, and what it is in float64."""

    x: Array
    nodes: Callable[[GraphWriter, str], str]
    wanted: Callable[[Array], Array]


def _numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def _softmax(x: Array, axis: int) -> Array:
    weight = np.exp(x - x.max(axis, keepdims=True))
    return weight / weight.sum(axis, keepdims=True)


def _instance_norm(x: Array) -> Array:
    axes = tuple(range(2, x.ndim))
    centred = x - x.mean(axes, keepdims=True)
    scale = np.arange(1, x.shape[1] + 1).reshape(-1, *(1 for _ in axes))
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5) * scale + scale


def _instance_nodes(g: GraphWriter, x: str, channels: int) -> str:
    scale = g.constant(np.arange(1, channels + 1, dtype=np.float32))
    return g.op("InstanceNormalization", x, scale, scale)


def _over_norm(x: Array, p: int) -> Array:
    norm = (np.abs(x) ** p).sum(-1, keepdims=True) ** (1 / p)
    return np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm))


def _with_holes() -> Array:
    x = _numbers(5, 7)
    x[1], x[2, 3], x[3, 4] = 0, np.nan, np.inf
    return x


CASES = {
    "a norm of channels that are read again": Case(
        _numbers(2, 7, 2, 12), lambda g, x: _instance_nodes(g, x, 7), _instance_norm
    ),
    "a norm of more images than channels": Case(
        _numbers(5, 6, 16), lambda g, x: _instance_nodes(g, x, 6), _instance_norm
    ),
    "a softmax of doubles": Case(
        _numbers(4, 3, dtype=np.float64), lambda g, x: g.op("Softmax", x), lambda x: _softmax(x, -1)
    ),
    "a log-softmax of a few doubles": Case(
        _numbers(2, 37, 2, dtype=np.float64),
        lambda g, x: g.op("LogSoftmax", x, axis=1),
        lambda x: np.log(_softmax(x, 1)),
    ),
    "a flag beside itself": Case(
        _with_holes(),
        lambda g, x: g.op("Cast", g.op("Xor", g.op("IsNaN", x), g.op("IsNaN", x)), to=1),
        lambda x: np.zeros(x.shape),
    ),
    "rows over their length, some of length 0": Case(
        _with_holes(), lambda g, x: g.op("LpNormalization", x), lambda x: _over_norm(x, 2)
    ),
    "rows over the sum of their sizes, some 0": Case(
        _with_holes(), lambda g, x: g.op("LpNormalization", x, p=1), lambda x: _over_norm(x, 1)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_fused_is_the_operator(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    g = GraphWriter(17)
    x = g.input("x", case.x.dtype, case.x.shape)
    g.op("Identity", case.nodes(g, x), out="y")
    g.output("y", case.x.dtype, case.x.shape)
    path, output = write(g.finish(), tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    options = replace(Options.from_environment(), fuse_all=True)
    report = optimize(path, output, options=options, progress=lambda stage: None, verify=False)
    assert report.regions
    assert not report.faults
    (y,) = (np.asarray(made) for made in load(output).run(None, {"x": case.x}))
    with np.errstate(invalid="ignore"):
        wanted = case.wanted(case.x.astype(np.float64))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
