"""Weights that do not fit the last cache together: products of one row walk more panels at once."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models import regions
from models.graph import write
from runtime import compile as compiling
from runtime.compile import optimize
from runtime.machine import save_profile
from runtime.options import Options
from runtime.session import load
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target

WIDTHS = (40, 83, 40, 112)  # panels of 16 columns: 6, 3 and 7
RNG = np.random.default_rng(3)
pytestmark = pytest.mark.cpu


def layers_of(model: onnx.ModelProto) -> list[np.ndarray]:
    """Weights and biases in turn, in double precision."""
    arrays = (numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer)
    return [array for array in arrays if array.ndim]


def wanted(layers: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """The stack in double precision: x · W + b and an exact GELU for each layer."""
    y = x.astype(np.float64)
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        z = y @ weight + bias
        y = z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    return y


@pytest.mark.parametrize("target", [t for t in detect_targets() if not t.base], ids=lambda target: target.name)
@pytest.mark.parametrize("l3", [16 << 10, 4 << 20], ids=["out of memory", "out of the cache"])
def test_stacks_of_layers_for_few_rows(
    target: Target, l3: int, tmp_path: Path, object_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "objects").symlink_to(object_cache)
    object_cache.mkdir(parents=True, exist_ok=True)
    options = Options(cache=tmp_path / "cache", fuse_all=True, target=target.name)
    save_profile(replace(detect_profile(), target=target, l3=l3, l3_cores=0), options)
    linked: list[Any] = []
    link = compiling.link_kernels

    def watched(*given: Any, **named: Any) -> Path:
        linked.append(named["from_memory"])
        return link(*given, **named)

    monkeypatch.setattr(compiling, "link_kernels", watched)
    model = regions.linears(widths=WIDTHS, gelu=True)
    fused = tmp_path / "fused.onnx"
    report = optimize(write(model, tmp_path / "stack.onnx"), fused, options=options, progress=lambda stage: None)
    assert len(report.regions) == len(WIDTHS) - 1
    assert not report.faults
    weights = 4 * sum(a * b + b for a, b in pairwise(WIDTHS))
    assert linked == [weights > l3]
    session, layers = load(fused, threads=2), layers_of(model)
    for rows in (1, 2, 3, 4, 5, 13):
        x = RNG.standard_normal((1, rows, WIDTHS[0])).astype(np.float32)
        (got,) = map(np.asarray, session.run(None, {"x": x}))
        np.testing.assert_allclose(got, wanted(layers, x), rtol=1e-4, atol=1e-5)
