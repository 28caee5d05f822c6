"""Models in 16-bit floats from file to result: fused whole, whether ONNX Runtime can run them by itself or not."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplementedByRuntime

from models.attention import SPELLINGS
from models.half import in_half
from runtime import inputs, ort_values
from runtime.session import DOMAIN, load
from runtime.verify import verify
from tilefuse import optimize

pytestmark = pytest.mark.cpu
ENTRY = next(entry for entry in SPELLINGS if entry.name == "bert_lowest")


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An original and its fused model, which `optimize` has verified."""
    folder = tmp_path_factory.mktemp(str(request.param))
    original, fused = folder / "original.onnx", folder / "fused.onnx"
    onnx.save(in_half(ENTRY.build(dynamic=True), str(request.param)), original)
    optimize(original, fused)
    return original, fused


def feeds_for(original: Path) -> dict[str, np.ndarray]:
    model = onnx.load(original)
    return inputs.generate(model, sizes=ENTRY.sizes[0], seed=3)


def test_the_whole_block_is_fused(pair: tuple[Path, Path]) -> None:
    domains = {node.op_type: node.domain for node in onnx.load(pair[1]).graph.node}
    assert "MatMul" not in domains
    assert "Softmax" not in domains
    assert DOMAIN in domains.values()


def test_custom_ops_and_the_provider_agree(pair: tuple[Path, Path]) -> None:
    original, fused = pair
    feeds = feeds_for(original)
    one, other = (ort_values.run(load(fused, provider=provider), ["y"], feeds)[0] for provider in (False, True))
    assert one.dtype == feeds["x"].dtype
    assert one.tobytes() == other.tobytes()


def test_bfloat16_runs_where_onnx_runtime_alone_refuses(pair: tuple[Path, Path]) -> None:
    original, fused = pair
    if "bfloat16" not in original.parent.name:
        pytest.skip("ONNX Runtime runs float16 by itself")
    with pytest.raises(NotImplementedByRuntime):
        ort.InferenceSession(str(original), providers=["CPUExecutionProvider"])
    (y,) = ort_values.run(load(fused), ["y"], feeds_for(original))
    assert np.isfinite(y.astype(np.float32)).all()


def test_a_small_change_of_one_weight_is_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    original, fused = pair
    model = onnx.load(original)
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    array = numpy_helper.to_array(weight).copy()
    array[0] *= 3
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    changed = tmp_path / "changed.onnx"
    onnx.save(model, changed)
    verdict = verify(changed, fused)
    assert not verdict.ok
    assert "elements are off" in (verdict.mismatch or "")
    assert verdict.regions == ()  # every kernel does what its body says
