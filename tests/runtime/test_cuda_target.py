"""`--target cuda` from file to library, without a card: kernels of both kinds, what is refused, results on the CPU."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

import tilefuse
from models import blocks
from models.graph import GraphWriter
from models.half import in_half
from runtime import compile as compiler
from runtime import inputs, ort_values
from runtime.options import Options
from runtime.session import LoadError, load
from runtime.verify import verify
from tilecore.cuda.errors import CudaError

pytestmark = pytest.mark.cpu
HEADS, WIDTH = 2, 64


def block() -> onnx.ModelProto:
    """Attention of two heads with a projection, a normalisation, and a softmax over an axis of unknown length."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("batch", "seq", HEADS * WIDTH))
    extents = g.extent(x, 0, "batch"), g.extent(x, 1, "seq")

    def heads(order: tuple[int, ...]) -> str:
        made = blocks.linear(g, x, (HEADS * WIDTH, HEADS * WIDTH))
        return g.op("Transpose", g.op("Reshape", made, g.shape(*extents, HEADS, WIDTH)), perm=order)

    q, k, v = heads((0, 2, 1, 3)), heads((0, 2, 3, 1)), heads((0, 2, 1, 3))
    scores = g.op("Mul", g.op("MatMul", q, k), g.constant(np.float32(WIDTH**-0.5)))
    mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
    flat = g.op("Reshape", mixed, g.shape(*extents, HEADS * WIDTH))
    made = blocks.linear(g, flat, (HEADS * WIDTH, HEADS * WIDTH))
    g.op("Identity", blocks.layer_norm(g, g.op("Add", made, x), HEADS * WIDTH), out="y")
    g.output("y", np.float32, ("batch", "seq", HEADS * WIDTH))
    g.op("Softmax", g.op("Transpose", x, perm=(0, 2, 1)), axis=-1, out="z")
    g.output("z", np.float32, ("batch", HEADS * WIDTH, "seq"))
    return g.finish()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "original.onnx"
    onnx.save(in_half(block(), "float16"), path)
    return path


@pytest.fixture(scope="module")
def made(original: Path) -> tuple[Path, tilefuse.Report]:
    fused = original.with_name("fused.onnx")
    return fused, tilefuse.optimize(original, fused, target="cuda")


def test_regions_say_that_they_have_kernels_for_cards(made: tuple[Path, tilefuse.Report]) -> None:
    report = made[1]
    assert report.faults == ()
    assert {region.kind for region in report.regions} == {"contraction", "attention", "row"}
    assert {region.target for region in report.regions} == {"cuda"}
    assert {entry["target"] for entry in report.to_json()["regions"]} == {"cuda"}


def test_what_has_no_kernel_is_left_to_onnx_runtime(made: tuple[Path, tilefuse.Report]) -> None:
    fused, report = made
    (miss,) = [miss for miss in report.misses if miss.op == "Softmax"]
    assert miss.reason == (
        "no kernel for NVIDIA cards: rows of seq columns: CUDA keeps rows in registers and must know their width"
    )
    assert "Softmax" in {node.op_type for node in onnx.load(fused).graph.node}


def test_the_same_library_runs_on_the_processor(original: Path, made: tuple[Path, tilefuse.Report]) -> None:
    assert verify(original, made[0]).ok
    feeds = inputs.generate(onnx.load(original), sizes={"batch": 2, "seq": 9}, seed=1)
    one, other = (ort_values.run(load(made[0], provider=provider), ["y"], feeds)[0] for provider in (False, True))
    assert one.tobytes() == other.tobytes()


def test_weights_stay_as_they_lie(original: Path, made: tuple[Path, tilefuse.Report]) -> None:
    before, after = ({w.name: w for w in onnx.load(path).graph.initializer} for path in (original, made[0]))
    large = [name for name, weight in before.items() if len(weight.dims) == 2]
    assert large
    assert all(after[name] == before[name] for name in large)


def test_a_card_needs_an_onnxruntime_with_cuda(made: tuple[Path, tilefuse.Report]) -> None:
    with pytest.raises(LoadError, match=r"needs an onnxruntime with CUDAExecutionProvider, found .*onnxruntime-gpu"):
        load(made[0], cuda=True)
    with pytest.raises(ValueError, match="ask for one of them"):
        load(made[0], cuda=True, provider=True)


def test_a_library_without_kernels_for_cards_is_refused_there(original: Path, tmp_path: Path) -> None:
    tilefuse.optimize(original, tmp_path / "cpu.onnx", verify=False)
    with pytest.raises(LoadError, match="has no kernels for NVIDIA cards"):
        load(tmp_path / "cpu.onnx", cuda=True)


def test_products_of_32_bits_are_left_to_onnx_runtime(tmp_path: Path) -> None:
    onnx.save(block(), tmp_path / "wide.onnx")
    report = tilefuse.explain(tmp_path / "wide.onnx", target="cuda")
    assert {region.kind for region in report.regions} == {"row"}
    reasons = {miss.reason for miss in report.misses if miss.op == "MatMul"}
    assert reasons == {
        "no kernel for NVIDIA cards: operands of f32: products are of one 16-bit float type, f16 or bf16"
    }


@pytest.mark.parametrize("target", ["cuda", "cuda-sm80"])
def test_operands_of_an_fp32_model_are_rounded_when_asked_for(target: tilefuse.Target, tmp_path: Path) -> None:
    onnx.save(block(), tmp_path / "wide.onnx")
    fused = tmp_path / "fused.onnx"
    report = tilefuse.optimize(tmp_path / "wide.onnx", fused, target=target, precision="bf16")
    assert report.faults == ()
    assert [(miss.op, "known" in miss.reason or "know" in miss.reason) for miss in report.misses] == [("Softmax", True)]
    assert {(region.kind, region.target) for region in report.regions} == {
        (kind, "cuda") for kind in ("contraction", "attention", "row")
    }
    before, after = (onnx.load(path).graph.initializer for path in (tmp_path / "wide.onnx", fused))
    wide = [onnx.numpy_helper.to_array(one) for one in before if len(one.dims) == 2]
    stored = [onnx.numpy_helper.to_array(one) for one in after if one.data_type == onnx.TensorProto.BFLOAT16]
    assert len(wide) == len(stored) == 4
    for one, other in zip(wide, stored, strict=True):  # as they lie, rounded
        assert one.astype(ml_dtypes.bfloat16).tobytes() == other.tobytes()


def test_a_model_is_told_what_ampere_has_no_kernel_for(tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("rows", 96))
    heads = g.op("Transpose", g.op("Reshape", x, g.constant(np.array([1, -1, 1, 96]))), perm=(0, 2, 1, 3))
    scores = g.op("MatMul", heads, g.op("Transpose", heads, perm=(0, 1, 3, 2)))
    g.op("MatMul", g.op("Softmax", scores, axis=-1), heads, out="y")
    g.output("y", np.float32, (1, 1, "rows", 96))
    onnx.save(in_half(g.finish(), "float16"), tmp_path / "wide.onnx")
    report = tilefuse.explain(tmp_path / "wide.onnx", target="cuda-sm80")
    assert "no kernel for NVIDIA cards: heads of 96 elements: attention for sm_80 has 64 and 128" in {
        miss.reason for miss in report.misses
    }


def test_without_nvrtc_nothing_is_begun(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CudaError("NVRTC was not found: pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(compiler, "load_nvrtc", missing)
    options = Options(cache=tmp_path, target="cuda")
    with pytest.raises(compiler.CompileError, match=r"NVRTC was not found.*tilefuse\[cuda\]"):
        compiler.optimize(original, tmp_path / "out.onnx", options=options, progress=lambda stage: None)
