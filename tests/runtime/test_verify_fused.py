"""`verify` and `blame` on hand-written kernels: what is right passes, each kind of wrong is found and named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import verify_models
from onnx import numpy_helper, parser

from models import recurrences
from models.graph import GraphWriter, write
from runtime.compile import CompileError, optimize
from runtime.inputs import InputError
from runtime.options import Options
from runtime.verify import blame, verify

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verify_models.build_library(tmp_path_factory.mktemp("library") / "verify.so")


def test_right_kernels_pass_at_two_sizes_and_scaled(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Gelu_right", "Linear_right"])
    verdict = verify(original, fused)
    assert verdict.ok, verdict
    assert verdict.mismatch is None
    assert verdict.unmeasured is None
    assert verdict.cases == ("n=17", "n=131", "n=17, scaled by 30")
    (output,) = verdict.outputs
    assert 0 < output.max_rel < 1e-6
    assert verdict.to_json()["ok"] is True


@pytest.mark.parametrize(
    ("ops", "wrong"),
    [
        (["Linear_right", "Gelu_tanh", "Linear_right"], "node_1"),
        (["Gelu_right", "Linear_short"], "node_1"),
        (["Linear_short", "Gelu_right", "Linear_right"], "node_0"),
        (["Linear_right", "Root_zero", "Linear_right"], "node_1"),
    ],
    ids=["another function", "tail", "tail, early", "lost NaN"],
)
def test_wrong_kernel_fails_and_is_named_alone(tmp_path: Path, library: Path, ops: list[str], wrong: str) -> None:
    original, fused = verify_models.write(tmp_path, library, ops)
    verdict = verify(original, fused)
    assert not verdict.ok
    assert verdict.mismatch is not None
    assert verdict.mismatch.startswith("output 'y' at n=")
    assert [region.node for region in verdict.regions] == [wrong]
    assert verdict.regions[0].op == ops[int(wrong[-1])]


def test_nan_passes_where_the_original_has_it(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Root_right", "Linear_right"])
    assert verify(original, fused).ok


def test_wrong_graph_around_right_kernels_blames_no_region(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Gelu_right"])
    model = onnx.load(str(original))
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Neg", ["before"], ["y"]))
    onnx.save(model, str(original))
    verdict = verify(original, fused)
    assert not verdict.ok
    assert verdict.regions == ()


def test_given_inputs_are_the_only_case(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Root_zero"])
    x = np.zeros((4, 8), np.float32)
    verdict = verify(original, fused, inputs={"x": x})
    assert verdict.ok, "zeros do not show the lost NaN"
    assert verdict.cases == ("the given inputs",)
    assert blame(fused, {"x": x}) == ([], None)
    assert [region.node for region in blame(fused, {"x": x - 1 + np.eye(4, 8, dtype=np.float32)})[0]] == ["node_1"]


def test_external_weights_stay_in_their_files(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right", "Gelu_tanh"], external=True)
    verdict = verify(original, fused)
    assert [region.node for region in verdict.regions] == ["node_1"]


def test_renamed_output_is_a_failing_verdict(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right"])
    model = onnx.load(str(fused))
    model.graph.node[0].output[0] = model.graph.output[0].name = "z"
    onnx.save(model, str(fused))
    verdict = verify(original, fused)
    assert not verdict.ok
    assert verdict.mismatch == ("the fused model's outputs are [('z', 'FLOAT')], the original's [('y', 'FLOAT')]")


def test_inputs_that_do_not_suit_are_refused(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right"])
    with pytest.raises(InputError, match=r"input 'x' has dtype float64, expected float32"):
        verify(original, fused, inputs={"x": np.zeros((4, 8))})


def test_missing_files_are_named(tmp_path: Path, library: Path) -> None:
    original, fused = verify_models.write(tmp_path, library, ["Linear_right"])
    with pytest.raises(FileNotFoundError, match=r"nothing\.onnx"):
        verify(tmp_path / "nothing.onnx", fused)
    (tmp_path / "fused.so").unlink()
    with pytest.raises(FileNotFoundError, match=r"fused\.so"):
        verify(original, fused)


def test_a_model_that_onnxruntime_refuses_is_the_original_s_fault(tmp_path: Path) -> None:
    """No passing file is named, and nothing is left."""
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = NoSuchOperator(x) }'
    original = write(parser.parse_model(text), tmp_path / "odd.onnx")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CompileError, match=r"does not load the original: .*NoSuchOperator.*--no-verify") as caught:
        optimize(original, tmp_path / "out.onnx", options=Options.from_environment(), progress=lambda stage: None)
    assert ".out." not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_sizes_that_only_onnxruntime_takes_are_not_compared(tmp_path: Path) -> None:
    """Past the end of a table, a slice is empty; ONNX Runtime then leaves it out of a Concat along another axis."""
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]>
        sliced (float[1, 4] x, float[past, 4] cache) => (float[1, 8] y) <int64[1] axis = {0}, int64[1] one = {1}> {
            past = Shape<start: int = 0, end: int = 1>(cache)
            end = Add(past, one)
            rows = Slice(table, past, end, axis)
            turned = Mul(x, rows)
            joined = Concat<axis: int = 1>(turned, x)
            y = Tanh(joined)
        }""")
    table = np.linspace(-1, 1, 256, dtype=np.float32).reshape(64, 4)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    source, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    report = optimize(source, output, options=Options.from_environment(), progress=lambda _: None)
    assert not report.faults
    cases = verify(source, output).cases
    assert cases[0] == "past=17"
    assert cases[1].startswith("past=131 (not compared: shapes do not fit")


def gated(bias: float) -> onnx.ModelProto:
    """Three times the gate of x, moved and then scaled by what x is on average: tiny for a low bias."""
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("n", 32))
    y = g.op("Add", g.op("MatMul", x, g.normal((32, 24), std=0.05)), g.constant(np.float32(bias)))
    g.op("Transpose", g.op("Mul", g.op("Sigmoid", y), g.constant(np.float32(3))), perm=[1, 0], out="y")
    g.output("y", np.float32, [None] * 2)
    return g.finish()


def test_a_coarse_sigmoid_of_onnxruntime_is_no_fault_of_ours(tmp_path: Path) -> None:
    """Below -18 it gives 0: what comes after it is 0 too, and ours is not. Another bias is a fault all the same."""
    paths = {}
    for bias in (-22.0, -15.0):
        model, fused = write(gated(bias), tmp_path / f"{bias}.onnx"), tmp_path / f"{bias}.fused.onnx"
        report = optimize(
            model, fused, options=replace(Options.from_environment(), fuse_all=True), progress=lambda _: None
        )
        assert report.regions
        assert not report.faults
        paths[bias] = (model, fused)
    assert verify(*paths[-22.0]).ok
    assert not verify(paths[-22.0][0], paths[-15.0][1]).ok
    assert not verify(paths[-15.0][0], paths[-22.0][1]).ok


@pytest.mark.parametrize("growth", ["gate = Exp(gt)", "power = Softplus(gt)\n gate = Exp(power)"], ids=["any", "grows"])
def test_a_state_that_overflows_is_no_fault(growth: str, tmp_path: Path) -> None:
    """Its sums of infinities are infinite in one order and NaN in another; what is a number is compared as ever."""
    model = parser.parse_model(recurrences.SCAN_GATED.replace("gate = Sigmoid(gt)", growth))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 2, 1, 1]), "one5"))
    path, output = write(model, tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    report = optimize(path, output, options=Options.from_environment(), progress=lambda _: None)
    assert "scan" in [region.kind for region in report.regions]
    assert verify(path, output).ok
