"""The newcomer's tour: one small BERT from its file to an answer over gRPC. Read it from top to bottom.

Each test is one arrow of `runtime/compile.py` or one thing that a user does with the result, and says what comes out.
"""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import tilefuse
from fuser.load import load
from fuser.region import Region
from fuser.scan import scan
from fuser.shapes import infer
from models import bert
from runtime.kernels import LABELS
from tilecore.call import load_kernel
from tilecore.compile import compile_spec
from tilecore.contract.evaluate import evaluate
from tilecore.contract.spec import AttentionSpec
from tilecore.profile import detect_profile
from tilecore.toolchain import find_toolchain

pytestmark = pytest.mark.cpu

Array = np.ndarray[Any, Any]
OUTPUT = "last_hidden_state"  # ends in a LayerNorm, so its elements are around 1
TOLERANCE = 2e-5  # absolute: float32 rounding of one layer; a wrong mask or bias is off by 1e-2 and more


def assert_same(actual: Any, expected: Array) -> None:
    """Equal to rounding."""
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tour")


@pytest.fixture(scope="module")
def original(folder: Path) -> Path:
    """An encoder of one layer in the spelling of PyTorch's TorchScript exporter; batch and length are symbolic."""
    return bert.build(folder / "bert.onnx", exporter="torchscript", size=bert.Size(layers=1))


@pytest.fixture(scope="module")
def feeds() -> dict[str, Array]:
    """Three sentences of up to 21 tokens; 21 divides by no tile, and the shorter sentences leave holes in the mask."""
    random = np.random.default_rng(0)
    lengths = np.array([21, 13, 2])
    return {
        "input_ids": random.integers(0, bert.Size().vocab, (3, 21)),
        "attention_mask": (np.arange(21) < lengths[:, None]).astype(np.int64),
        "token_type_ids": np.zeros((3, 21), dtype=np.int64),
    }


@pytest.fixture(scope="module")
def expected(original: Path, feeds: dict[str, Array]) -> Array:
    """What the original computes in plain ONNX Runtime, its own optimisations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(original), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run([OUTPUT], feeds)[0])


def test_0_the_model_is_ordinary_onnx_and_says_attention_nowhere(original: Path) -> None:
    graph = onnx.load(original).graph
    operators = Counter(node.op_type for node in graph.node if node.op_type != "Constant")
    assert "Attention" not in operators
    assert operators["MatMul"] == 8  # q, k, v, scores, context, dense, wide, narrow
    assert operators.total() > 100


@pytest.fixture(scope="module")
def regions(original: Path) -> tuple[Region, ...]:
    """file → graph → symbolic shapes → regions."""
    model = load(original)  # functions inlined, constants folded
    shapes = infer(model)  # symbolic: batch and seq stay names
    found, misses = scan(model, shapes)
    assert misses == ()  # what is not fused is always reported, with the node and the reason
    return found


def test_1_every_piece_of_work_falls_into_a_region(regions: tuple[Region, ...]) -> None:
    kinds = [region.kind for region in regions]
    # Query, key and value are one contraction, because they read the same rows.
    assert kinds == ["row", "contraction", "attention", "contraction", "row", *["contraction"] * 2, "row"]
    attention = regions[2]
    operators = Counter(node.op_type for node in attention.nodes)
    assert operators["MatMul"] == 2  # around the softmax; everything else between and beside them came along
    assert {"Softmax", "Transpose", "Reshape", "Where", "IsNaN"} <= operators.keys()


def test_2_a_region_becomes_a_spec(regions: tuple[Region, ...]) -> None:
    """A spec has no nodes: views say where elements come from, expressions what happens to them."""
    spec = regions[2].spec
    assert isinstance(spec, AttentionSpec)
    heads, width = bert.Size().heads, bert.Size().head_width
    assert [str(extent) for extent in spec.q.shape] == ["batch", str(heads), "seq", str(width)]
    assert len(spec.inputs) == 4  # the three projections as they lie, and the mask: no transposed copies
    assert spec.nan_guard  # this exporter turns rows without any key into zeros


def test_3_a_spec_becomes_a_tile_program_and_that_becomes_c(regions: tuple[Region, ...], object_cache: Path) -> None:
    spec, profile = regions[2].spec, detect_profile()
    stages: dict[str, str] = {}
    kernel = compile_spec(
        spec, label=LABELS["attention"], profile=profile, targets=(profile.target,), dump=stages.__setitem__
    )
    program = stages[f"30_program_{kernel.name}.txt"]
    assert "gemm s = q · kᵀ" in program
    assert kernel.config.keys() == {"block_m", "block_n"}  # chosen by recommendation for this machine's caches
    assert "static void run(" in kernel.sources[profile.target.name]

    # The kernel alone, on numpy arrays, against the definition of its spec.
    random = np.random.default_rng(1)
    hidden = bert.Size().hidden
    q, k, v = (random.standard_normal((2, 9, hidden)).astype(np.float32) for _ in range(3))
    mask = np.array([[True] * 9, [True] * 4 + [False] * 5])
    compiled = load_kernel(kernel, profile.target, find_toolchain(object_cache))
    (out,) = compiled(q, k, v, mask)
    arrays = dict(zip((tensor.name for tensor in spec.inputs), (q, k, v, mask), strict=True))
    (want,) = evaluate(spec, arrays).values()
    assert_same(out, want)


@pytest.fixture(scope="module")
def fused(original: Path, folder: Path) -> Path:
    """The whole path in one call. It also verifies; here that is a step of its own, below."""
    path = folder / "models" / "bert" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    report = tilefuse.optimize(original, path, verify=False)
    assert report.nodes_before > 100
    assert report.nodes_after < 15
    assert Counter(region.kind for region in report.regions) == {"attention": 1, "contraction": 4, "row": 3}
    return path


def test_4_the_fused_model_is_still_onnx(fused: Path) -> None:
    model = onnx.load(fused)
    onnx.checker.check_model(model, full_check=True)
    operators = Counter(node.op_type for node in model.graph.node)
    assert not {"Transpose", "Reshape", "MatMul", "Softmax"} & operators.keys()
    ours = {node.op_type for node in model.graph.node if node.domain == "tilefuse"}
    assert {function.name for function in model.functions} == ours  # each operator carries its original body
    assert fused.with_suffix(".so").is_file()  # and the library has its kernel


def test_5_verify_finds_the_two_models_equal(original: Path, fused: Path) -> None:
    verdict = tilefuse.verify(original, fused)
    assert verdict.ok, verdict.mismatch
    assert len(verdict.cases) > 1  # several sizes, with holes in the mask


def test_6_stock_onnxruntime_runs_it_with_the_library(fused: Path, feeds: dict[str, Array], expected: Array) -> None:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(fused.with_suffix(".so")))
    session = ort.InferenceSession(str(fused), options, providers=["CPUExecutionProvider"])
    assert_same(session.run([OUTPUT], feeds)[0], expected)


def test_7_and_without_it_through_the_bodies(fused: Path, feeds: dict[str, Array], expected: Array) -> None:
    session = ort.InferenceSession(str(fused), providers=["CPUExecutionProvider"])
    assert_same(session.run([OUTPUT], feeds)[0], expected)


@pytest.fixture(scope="module")
def address(fused: Path) -> Generator[str]:
    """`tilefuse serve` in a process of its own, on a free port."""
    repository = fused.parents[2]
    command = [sys.executable, "-m", "runtime.cli", "serve", str(repository), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": _search_path()}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    found = None
    log: list[str] = []
    try:
        for line in server.stderr:
            log.append(line)
            found = found or re.search(r"listening on (\S+:\d+)", line)
            if found and line.rstrip().endswith("ready"):
                break
        assert found, f"the server did not start:\n{''.join(log)}"
        yield found[1]
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait(60) == 0  # it answered what was in flight and went
    finally:
        server.kill()


def _search_path() -> str:
    """Where this process found the packages: the server must run the same ones."""
    return os.pathsep.join(filter(None, sys.path))


def test_8_a_client_gets_the_same_answer_over_grpc(address: str, feeds: dict[str, Array], expected: Array) -> None:
    with tilefuse.connect(address) as client:
        answer = client.infer("bert", feeds)
    assert_same(answer[OUTPUT], expected)
