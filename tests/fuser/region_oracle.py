"""Checks regions without a compiler: the graph evaluated by onnx.reference against the specs' numpy meaning.

Both run in float64. A region's spec gets the graph's own values for the region's inputs, and must give its outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from fuser.find import find
from fuser.load import load
from fuser.region import Miss, Region
from fuser.shapes import Shapes
from runtime.oracle import evaluate as evaluate_graph
from tilecore.contract.evaluate import evaluate

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Scanned:
    """A model, its regions and what was missed."""

    model: ir.Model
    shapes: Shapes
    regions: tuple[Region, ...]
    misses: tuple[Miss, ...]

    def of(self, kind: str) -> list[Region]:
        """The regions of one kind."""
        return [region for region in self.regions if region.kind == kind]


def scanned(model: onnx.ModelProto, folder: Path) -> Scanned:
    """The model, saved, loaded and scanned as `optimize` does it."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    found = find(load(path))
    return Scanned(found.model, found.shapes, found.regions, found.misses)


def check_regions(found: Scanned, feeds: Feeds, *, tolerance: float = 1e-6) -> None:
    """Assert that every region's spec gives what the graph gives: both in float64, NaN and infinities as in f32."""
    names = sorted({value.name or "" for region in found.regions for value in (*region.inputs, *region.outputs)})
    values = evaluate_graph(ir.to_proto(found.model), Path(), feeds, names).values
    for region in found.regions:
        arrays = {tensor.name: values[tensor.name] for tensor in region.spec.inputs}
        wide = evaluate(region.spec, arrays)
        with np.errstate(all="ignore"):
            narrow = evaluate(region.spec, arrays, wide=False)
        for value in region.outputs:
            name = value.name or ""
            assert_close(wide[name], narrow[name], values[name], tolerance, f"{region.label} → {name}")


def assert_close(wide: Any, narrow: Any, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Same shape; the same NaNs and infinities as in the model's precision; else close to the largest magnitude."""
    assert wide.shape == expected.shape, f"{what}: shape {wide.shape}, expected {expected.shape}"
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(wide, expected, what)
        return
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.asarray(narrow, np.float64)[~finite], expected[~finite], what)
    scale = np.abs(expected[finite]).max(initial=1e-6)
    np.testing.assert_allclose(wide[finite], expected[finite], rtol=0, atol=tolerance * scale, err_msg=what)
