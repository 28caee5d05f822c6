"""BERT and MiniLM as exporters spell them: per layer four contractions, one attention and two row programs.

The first contraction is that of query, key and value together.
"""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from region_oracle import Scanned, check_regions, scanned

from fuser.lift_views import VIEWS
from models import bert, minilm
from tilecore.contract.spec import RowSpec, outputs_of

LAYERS = 2
MODELS = {
    "bert torchscript": lambda: bert.model(exporter="torchscript"),
    "bert dynamo": lambda: bert.model(exporter="dynamo"),
    "bert torchscript static": lambda: bert.model(exporter="torchscript", shape=(2, 6)),
    "minilm": lambda: minilm.model(layers=LAYERS, hidden=32, heads=4, vocab=50),
    "minilm of opset 14": lambda: minilm.model(layers=LAYERS, hidden=32, heads=4, vocab=50, opset=14),
}


def left_over(found: Scanned) -> list[ir.Node]:
    """The nodes that compute something and are in no region and needed by no other."""
    made = {value for region in found.regions for value in region.outputs}
    needed = [value for region in found.regions for value in region.inputs] + list(found.model.graph.outputs)
    nodes: list[ir.Node] = []
    seen: set[ir.Value] = set()
    while needed:
        value = needed.pop()
        node = value.producer()
        if node is None or value in made or value in seen or found.shapes.content(value) is not None:
            continue
        seen.add(value)
        nodes.append(node)
        needed += [source for source in node.inputs if source is not None]
    return nodes


@pytest.fixture(params=MODELS)
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Scanned:
    return scanned(MODELS[request.param](), tmp_path)


def test_layers_fuse_whole(found: Scanned) -> None:
    assert len(found.of("attention")) == LAYERS
    assert len(found.of("contraction")) == 4 * LAYERS
    assert sum(len(region.outputs) == 3 for region in found.of("contraction")) == LAYERS
    assert len([r for r in found.of("row") if isinstance(r.spec, RowSpec) and r.spec.steps]) == 1 + 2 * LAYERS
    assert not found.misses


def test_nothing_between_regions_moves_data(found: Scanned) -> None:
    moving = [node.op_type for node in left_over(found) if node.op_type in VIEWS and node.op_type != "Gather"]
    assert not moving


def test_epilogues_take_bias_gelu_and_residual(found: Scanned) -> None:
    labels = [region.label for region in found.of("contraction")]
    assert sum("Gelu" in label or "Erf" in label for label in labels) == LAYERS
    assert all("Add" in label for label in labels)
    assert sum(len(region.inputs) == 4 for region in found.of("contraction")) == 2 * LAYERS  # x, weight, bias, residual


def test_projections_are_read_in_their_own_layout(found: Scanned) -> None:
    for region in found.of("attention"):
        assert [len(tensor.shape) for tensor in region.spec.inputs[:3]] == [3, 3, 3]
        assert [len(tensor.shape) for tensor in outputs_of(region.spec)] == [3]


def test_specs_mean_what_the_nodes_compute(found: Scanned) -> None:
    ids, types = np.arange(12).reshape(2, 6) % 50, np.zeros((2, 6), np.int64)
    mask = np.ones((2, 6), np.int64)
    mask[0, 2] = mask[1, 4:] = 0
    check_regions(found, {"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
