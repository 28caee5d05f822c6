"""Arguments, output and exit status of the commands; what they call is replaced where it would compile or measure."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fuser.coverage import Coverage
from runtime.bench import BenchResult, Timing
from runtime.cli import app, main
from runtime.compare import OutputError
from runtime.report import FaultReport, MissReport, RegionReport, Report
from runtime.tune import TunedKernel
from runtime.verify import RegionError, Verdict
from tilecore.measure import Measured, Rate
from tilecore.profile import profile_named

Run = Callable[..., "Outcome"]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(exit_.value.code if isinstance(exit_.value.code, int) else 0, captured.out, captured.err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", value[:1], value[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


class Recorder:
    """Stands for a function: keeps the arguments of its last call and answers with a fixed result."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.arguments, self.named = arguments, named
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], Recorder]:
    def install(name: str, result: object) -> Recorder:
        recorder = Recorder(result)
        monkeypatch.setattr(app, name, recorder)
        return recorder

    return install


REPORT = Report(
    input="in.onnx",
    output="out.onnx",
    library="out.so",
    nodes_before=40,
    nodes_after=5,
    regions=(
        RegionReport(
            kind="attention",
            label="layer 0",
            nodes=("MatMul_1", "Softmax_2"),
            inputs=("q", "k"),
            outputs=("o",),
            op="FusedAttention_12345678",
            kernel="attention_12345678",
        ),
    ),
    misses=(
        MissReport(
            kind="row",
            node="Cumsum_9",
            reason="CumSum is not a reduction",
            op="CumSum",
            reached="the anchor",
            failed="CumSum Cumsum_9",
            advice="use a product with a triangle",
        ),
    ),
    seconds=1.5,
    coverage=Coverage(30, 10, 900, 100, ("Transpose turn_1",)),
    faults=(FaultReport("row", "Add + Exp", ("Add_1", "Exp_2"), ("e",), "'e': is off", "repro/row-e"),),
)
KEYS = [
    *("input", "output", "library", "nodes_before", "nodes_after", "regions", "misses", "seconds"),
    *("coverage", "kinds", "faults", "fused_before"),
]
GOOD = Verdict(True, (OutputError("y", 1e-7, 2e-7, 1e-5, None),), ("n=17",))
WRONG = OutputError("y", 0.5, 0.25, 1e-5, "element 3 is 0.5 off")
BAD = Verdict(False, (WRONG,), ("n=17",), "output 'y' at n=17: off", (RegionError("node_1", "FusedRow_1", (WRONG,)),))
TIMES = BenchResult(Timing(1.0, 0.9, 50), Timing(2.0, 1.9, 40), 2, {"x": (1, 128)})


def test_optimize_passes_its_arguments_and_prints_json(run: Run, replace: Any, model: Path, tmp_path: Path) -> None:
    called = replace("optimize", REPORT)
    outcome = run("optimize", model, "-o", tmp_path / "out.onnx", "--json")
    assert outcome.status == 0
    assert called.arguments == (model, tmp_path / "out.onnx")
    assert called.named["verify"] is True
    answer = json.loads(outcome.out)
    assert sorted(answer) == sorted(KEYS)
    assert answer["regions"][0]["op"] == "FusedAttention_12345678"
    assert answer["misses"][0] == {
        "kind": "row",
        "node": "Cumsum_9",
        "reason": "CumSum is not a reduction",
        "op": "CumSum",
        "reached": "the anchor",
        "failed": "CumSum Cumsum_9",
        "advice": "use a product with a triangle",
        "body": "",
    }
    assert answer["kinds"] == {"attention": 1}
    assert answer["coverage"] == {
        "nodes_fused": 30,
        "nodes_left": 10,
        "flops_fused": 900,
        "flops_left": 100,
        "movers": ["Transpose turn_1"],
        "nodes": 0.75,
        "flops": 0.9,
    }
    assert answer["faults"][0]["repro"] == "repro/row-e"
    assert outcome.err.count("BUG") == 1  # loud, and not in the JSON


def test_optimize_can_skip_the_check_and_prints_a_table(run: Run, replace: Any, model: Path) -> None:
    called = replace("optimize", REPORT)
    outcome = run("optimize", model, "-o", "out.onnx", "--no-verify")
    assert outcome.status == 0
    assert called.named["verify"] is False
    for text in (
        *("attention", "layer 0", "FusedAttention_12345678", "CumSum is not a reduction", "40 nodes became 5"),
        *("90.0% of the floating-point", "75.0% of the nodes (30 of 40)", "Transpose turn_1", "BUG IN TILEFUSE"),
        *("use a product with a triangle", "repro/row-e"),
    ):
        assert text in outcome.out
    assert called.named["repros"] is None
    run("optimize", model, "-o", "out.onnx", "--save-repro", "repro")
    assert called.named["repros"] == Path("repro")


def test_a_fused_model_is_said_to_be_fused(run: Run, replace: Any, model: Path) -> None:
    again = dataclasses.replace(REPORT, regions=(), misses=(), faults=(), fused_before=3)
    for command in (("optimize", model, "-o", "out.onnx"), ("explain", model)):
        replace(command[0], again)
        outcome = run(*command)
        assert outcome.status == 0
        assert "nothing to fuse: already fused (3 nodes with kernels)" in outcome.out


def test_optimize_checks_on_given_inputs(run: Run, replace: Any, model: Path, tmp_path: Path) -> None:
    called = replace("optimize", REPORT)
    assert run("optimize", model, "-o", "out.onnx").status == 0
    assert called.named["inputs"] is None
    np.savez(tmp_path / "inputs.npz", x=np.arange(3, dtype=np.float32))
    assert run("optimize", model, "-o", "out.onnx", "--inputs", tmp_path / "inputs.npz").status == 0
    assert called.named["inputs"]["x"].tolist() == [0, 1, 2]


def test_explain_writes_nothing(run: Run, replace: Any, model: Path) -> None:
    replace("explain", REPORT)
    outcome = run("explain", model, "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["nodes_before"] == 40
    assert "not fused" in run("explain", model).out
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.onnx"]


@pytest.mark.parametrize(("verdict", "status"), [(GOOD, 0), (BAD, 1)])
def test_verify_exits_by_its_verdict(run: Run, replace: Any, model: Path, verdict: Verdict, status: int) -> None:
    called = replace("verify", verdict)
    outcome = run("verify", model, model, "--json")
    assert outcome.status == status
    answer = json.loads(outcome.out)
    assert answer["ok"] is verdict.ok
    assert answer["outputs"][0]["name"] == "y"
    assert called.named["inputs"] is None
    table = run("verify", model, model)
    assert table.status == status
    assert ("FusedRow_1" in table.out) is not verdict.ok


def test_verify_reads_inputs(run: Run, replace: Any, model: Path, tmp_path: Path) -> None:
    called = replace("verify", GOOD)
    np.savez(tmp_path / "inputs.npz", x=np.arange(3, dtype=np.float32))
    assert run("verify", model, model, "--inputs", tmp_path / "inputs.npz").status == 0
    assert called.named["inputs"]["x"].tolist() == [0, 1, 2]
    np.savez(tmp_path / "inputs.npz", z=np.arange(3, dtype=np.float32))
    outcome = run("verify", model, model, "--inputs", tmp_path / "inputs.npz")
    assert outcome.status == 1
    assert "missing x; unknown z" in outcome.err


def test_bench_passes_its_arguments(run: Run, replace: Any, model: Path) -> None:
    called = replace("bench", TIMES)
    outcome = run("bench", model, "--against", model, "--threads", 2, "--seconds", 0.5, "--json")
    assert outcome.status == 0
    assert called.arguments == (model, model)
    assert called.named == {"inputs": None, "threads": 2, "seconds": 0.5}
    assert json.loads(outcome.out)["ratio"] == 2.0
    assert "2.00 times as fast" in run("bench", model, "--against", model).out


def test_profile_prints_the_table_of_machines(run: Run) -> None:
    table = json.loads(run("profile", "--table", "--json").out)
    assert table["zen4"]["target"] == "x86-64-v4"
    for name in ("zen4", "zen5", "sapphire-rapids", "graviton3", "avx2-desktop", "h100", "a100"):
        assert name in run("profile", "--table").out
        assert name in json.loads(run("profile", "--table", "--json").out)


def test_profile_measures_and_keeps(run: Run, replace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFUSE_CACHE", str(tmp_path))
    rates = (Rate("scalar clock", "Hz", 3e9, 2.5e9), Rate("bf16 products", "/s", 0.0, 0.0))
    replace("measure_profile", Measured(profile_named("zen3"), rates, caches_known=False))
    outcome = run("profile")
    assert outcome.status == 0
    for text in ("3.00 GHz", "2.50 GHz", "none", "L2 512 KiB", "assumed"):
        assert text in outcome.out
    found = json.loads(run("profile", "--json").out)
    assert found["rates"]["scalar clock"] == {"alone": 3e9, "together": 2.5e9}
    assert json.loads(Path(found["file"]).read_text()) == found["profile"] == profile_named("zen3").to_json()


def test_tune_passes_its_arguments(run: Run, replace: Any, model: Path) -> None:
    kernel = TunedKernel("row", "Relu", 3, {"block_m": 8}, {"block_m": 16}, {"n=128": (20.0, 15.5)})
    recorder = replace("tune", (kernel,))
    outcome = run("tune", model, "--top", "3", "--size", "64", "--size", "96")
    assert recorder.named["top"] == 3
    assert recorder.named["sizes"] == [64, 96]
    for text in ("Relu", "n=128", "20.0", "15.5", "block_m=16"):
        assert text in outcome.out
    found = json.loads(run("tune", model, "--json").out)
    assert recorder.named["sizes"] == (128, 512)
    assert recorder.named["options"].threads is None
    assert found["kernels"][0]["microseconds"] == {"n=128": [20.0, 15.5]}


@pytest.mark.parametrize("command", ["optimize", "explain", "tune"])
def test_threads_of_the_sessions_come_before_the_environments(
    command: str, run: Run, replace: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = replace(command, () if command == "tune" else REPORT)
    output = ("-o", model.with_name("out.onnx")) if command == "optimize" else ()
    monkeypatch.setenv("TILEFUSE_THREADS", "3")
    for given, threads in ((), 3), (("--threads", "1"), 1):
        assert run(command, model, *output, *given).status == 0
        assert recorder.named["options"].threads == threads
    assert "Invalid value for '--threads'" in run(command, model, *output, "--threads", "0").err


KERNELS = """
import tilecore
import tilecore.language as T

@tilecore.autotune(configs=[{"block": 4}, {"block": 8}])
@tilecore.jit(out_idx=1, cache=CACHE)
def copied(n, block=1):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block)) as b:
            for i in T.Parallel(block):
                B[b * block + i] = A[b * block + i]
    return kernel
"""


@pytest.mark.cpu
def test_tune_measures_kernels_of_a_python_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS.replace("CACHE", f"__import__('pathlib').Path({str(tmp_path)!r})"))
    found = json.loads(run("tune", path, "--dim", "n=37", "--json").out)["kernels"]
    assert [(one["name"], sorted(one["microseconds"])) for one in found] == [("copied", ["block=4", "block=8"])]
    assert "block=8" in run("tune", path, "--dim", "n=37").out
    path.write_text("answer = 42\n")
    outcome = run("tune", path)
    assert outcome.status == 1
    assert "has no kernel under tilecore.autotune" in outcome.err
    assert "expected NAME=SIZE" in run("tune", path, "--dim", "n").err
    assert "--threads is for models" in run("tune", path, "--threads", "1").err


def test_a_missing_or_broken_model_is_one_line(run: Run, tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\xff" * 50)
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    for path, reason in (
        (tmp_path / "none.onnx", "no such file"),
        (broken, "cut short (50 bytes)"),
        (empty, "no graph"),
        (tmp_path, "a folder, not a model file"),
    ):
        for command in (
            ("optimize", path, "-o", tmp_path / "out.onnx"),
            ("explain", path, "--json"),
            ("verify", path, model),
            ("verify", model, path),
            ("bench", path, "--against", model),
        ):
            outcome = run(*command)
            assert outcome.status == 1, command
            assert outcome.out == ""
            lines = outcome.err.splitlines()
            assert lines[-1].startswith(f"error: {path}: ")
            assert reason in lines[-1]
            assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_in_one_line(
    number: signal.Signals, run: Run, replace: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the way out is cleaned up, and the handlers of the caller are there again."""
    own, before, cleaned = signal.getsignal(number), signal.default_int_handler, list[bool]()
    signal.signal(number, before)  # whoever started the tests may have had them ignore it

    def interrupted(*_: Any, **named: Any) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except Exception:  # noqa: BLE001 - as broad as those on the way
            pytest.fail("a signal was taken for a fault")
        finally:
            cleaned.append(True)

    monkeypatch.setattr(app, "optimize", interrupted)
    try:
        outcome = run("optimize", model, "-o", model.with_name("out.onnx"))
        after = signal.getsignal(number)
    finally:
        signal.signal(number, own)
    assert (outcome.status, outcome.out) == (128 + number, "")
    assert outcome.err.splitlines()[-1] == f"stopped by {number.name}"
    assert cleaned == [True]
    assert after is before


@pytest.mark.parametrize("signals", [(), (signal.SIGINT,)])
def test_a_signal_that_is_ignored_stays_ignored(signals: tuple[int, ...], run: Run, replace: Any, model: Path) -> None:
    """A shell has what it starts in the background ignore SIGINT."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in signals]
    seen = []
    replace("explain", REPORT)
    try:
        assert run("explain", model).status == 0
        seen = [signal.getsignal(number) for number in signals]
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert seen == [signal.SIG_IGN] * len(signals)


def test_an_error_is_one_line_and_debug_shows_where(
    run: Run, replace: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace("explain", ValueError("the first line\n  and the second"))
    outcome = run("explain", model)
    assert (outcome.status, outcome.err) == (1, "error: the first line and the second\n")
    monkeypatch.setenv("TILEFUSE_DEBUG", "1")
    with pytest.raises(ValueError, match="the first line"):
        main(["explain", str(model)])
    monkeypatch.setenv("TILEFUSE_DEBUG", "yes")
    outcome = run("explain", model)
    assert outcome.status == 1
    assert "TILEFUSE_DEBUG is 'yes'" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("optimize",),
        ("optimize", "in.onnx"),
        ("optimize", "in.onnx", "-o", "out.onnx", "--what"),
        ("verify", "a.onnx"),
        ("bench", "a.onnx"),
        ("bench", "a.onnx", "--against", "b.onnx", "--threads", "0"),
        ("bench", "a.onnx", "--against", "b.onnx", "--threads", "two"),
        ("serve",),
        ("serve", "models", "--port", "70000"),
        ("infer", "localhost:8001"),
        ("generate", "localhost:8001", "model"),
        ("generate", "localhost:8001", "model", "one"),
    ],
)
def test_wrong_usage_exits_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert "Usage: tilefuse" in outcome.err


def test_every_command_has_help(run: Run) -> None:
    outcome = run("--help")
    assert outcome.status == 0
    for command in ("optimize", "explain", "verify", "bench", "serve", "infer", "generate", "demo"):
        assert command in outcome.out
        assert run(command, "--help").status == 0


def test_infer_without_a_server_is_one_line(run: Run) -> None:
    outcome = run("infer", "127.0.0.1:1", "model")
    assert outcome.status == 1
    assert outcome.err.startswith("error: no server answers at 127.0.0.1:1")
    assert len(outcome.err.splitlines()) == 1


def test_the_module_is_the_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "runtime.cli", "explain", "nowhere.onnx"], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == "error: nowhere.onnx: there is no such file\n"
