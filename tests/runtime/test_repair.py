"""A region whose kernel is wrong is found, left out, reported and written down; the rest stays fused."""

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models import bert
from runtime import compile as compiler
from runtime import kernels
from runtime.compare import OutputError
from runtime.options import Options
from runtime.repair import Key, RepairError, repair
from runtime.report import Report
from runtime.repro import save_arrays
from runtime.session import load
from runtime.verify import FusedError, RegionError, Verdict, verify
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.spec import AttentionSpec, Spec
from tilecore.recommend import NoConfigurationError

ALL: tuple[Key, ...] = tuple((f"value_{number}",) for number in range(9))
FEEDS = {"x": np.ones(3, np.float32)}


@dataclass(frozen=True)
class Pretended:
    """A build of the regions ALL but `without`, of which `wrong` are wrong, seen by blame or not, or do not run."""

    without: frozenset[Key]
    wrong: frozenset[Key]
    blamed: bool = False
    runs: bool = True
    hopeless: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(key for key in ALL if key not in self.without)

    def check(self) -> Verdict:
        found = [key for key in self.keys if key in self.wrong]
        if not found and not self.hopeless:
            return Verdict(True, (), ())
        if not self.runs:
            raise FusedError("it stops", FEEDS)
        errors = [RegionError("node", "op", tuple(OutputError(name, 1, 1, 0, "off") for name in key)) for key in found]
        return Verdict(False, (), (), "off", tuple(errors) if self.blamed else (), feeds=FEEDS)

    def around(self, key: Key, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        assert key in self.without
        assert not set(self.keys) & self.wrong, "the values around a region come from a build that is right"
        return dict(feeds), {name: np.zeros(1) for name in key}


@pytest.mark.parametrize("traits", [{"blamed": True}, {"blamed": False}, {"runs": False}], ids=str)
@pytest.mark.parametrize("wrong", [(), (0,), (8,), (3, 4), (0, 5, 8)], ids=str)
def test_exactly_the_wrong_regions_are_left_out(traits: dict[str, bool], wrong: tuple[int, ...]) -> None:
    bad = frozenset(ALL[number] for number in wrong)
    built, suspects = repair(lambda without: Pretended(without, bad, **traits))
    assert built.without == bad
    assert {suspect.key for suspect in suspects} == bad
    if not traits.get("blamed"):
        assert all(suspect.inputs == FEEDS and suspect.expected for suspect in suspects)


def test_a_fault_of_no_region_is_not_hidden() -> None:
    with pytest.raises(RepairError, match="also with no region fused"):
        repair(lambda without: Pretended(without, frozenset(), hopeless=True))


# -- with real kernels ------------------------------------------------------------------------------------------------


def _spoilt(spec: Spec) -> Spec:
    """Attention whose result is a hundredth too large."""
    if not isinstance(spec, AttentionSpec):
        return spec
    return replace(spec, outputs=tuple(replace(out, value=out.value * 1.01) for out in spec.outputs))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair")
    return bert.build(folder / "bert.onnx", exporter="torchscript", size=bert.Size(layers=1))


def own_kernels(folder: Path, objects: Path) -> Options:
    """A cache that shares nothing but objects with other tests: a faulty compiler's kernels stay in `folder`."""
    objects.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "objects").symlink_to(objects)
    return Options(cache=folder / "cache")


@pytest.fixture(scope="module")
def repaired(original: Path, object_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Optimised by a compiler that gets attention wrong."""

    def faulty(spec: Spec, **named: Any) -> Kernel:
        return compile_spec(_spoilt(spec), **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_spec", faulty)
        return compiler.optimize(
            original,
            original.with_name("fused.onnx"),
            options=own_kernels(tmp_path_factory.mktemp("faulty"), object_cache),
            progress=lambda stage: None,
            repros=original.with_name("repros"),
        )


@pytest.mark.cpu
def test_the_wrong_region_is_left_out_and_the_rest_verifies(original: Path, repaired: Report) -> None:
    (fault,) = repaired.faults
    assert fault.kind == "attention"
    assert "expected" in fault.problem
    assert "attention" not in repaired.kinds
    assert repaired.kinds["contraction"] == 4
    assert repaired.coverage.flops < 1
    assert repaired.output is not None
    verdict = verify(original, Path(repaired.output))
    assert verdict.ok, verdict.mismatch
    left = {path.name for path in original.parent.iterdir()}
    assert left == {"bert.onnx", "fused.onnx", "fused.so", "repros"}


@pytest.mark.cpu
def test_the_repro_shows_the_fault_by_itself(repaired: Report, tmp_path: Path) -> None:
    where = repaired.faults[0].repro
    assert where is not None
    arrays = {name: np.load(Path(where) / f"{name}.npz") for name in ("inputs", "expected", "actual")}
    model = Path(where) / "model.onnx"
    onnx.checker.check_model(onnx.load(model), full_check=True)
    assert {node.domain for node in onnx.load(model).graph.node} == {""}
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (name,) = [output.name for output in session.get_outputs()]
    result = np.asarray(session.run([name], dict(arrays["inputs"]))[0])
    np.testing.assert_allclose(result, arrays["expected"][name], atol=1e-5)
    wrong = arrays["expected"][name] * 1.01
    np.testing.assert_allclose(arrays["actual"][name], wrong, atol=1e-5)
    report = compiler.optimize(
        model, tmp_path / "again.onnx", options=Options.from_environment(), progress=lambda stage: None
    )
    assert report.kinds == {"attention": 1}, "alone it is the same region, and a sound compiler gets it right"


@pytest.mark.cpu
def test_a_fused_model_is_left_as_it_is(repaired: Report, tmp_path: Path) -> None:
    """Regions that were left out as faulty are not looked for again either: the library is the one it was."""
    assert repaired.output is not None
    once, twice = Path(repaired.output), tmp_path / "twice.onnx"
    report = compiler.optimize(once, twice, options=Options.from_environment(), progress=lambda stage: None)
    before, after = onnx.load(once), onnx.load(twice)
    assert report.fused_before == sum(node.domain == "tilefuse" for node in before.graph.node) > 0
    assert (report.kinds, report.misses, report.nodes_before) == ({}, (), report.nodes_after)
    assert after == before
    assert twice.with_suffix(".so").read_bytes() == once.with_suffix(".so").read_bytes()
    load(twice)


@pytest.mark.cpu
def test_a_fused_model_needs_its_own_library(repaired: Report, tmp_path: Path) -> None:
    assert repaired.output is not None
    shutil.copy(repaired.output, tmp_path / "fused.onnx")

    def again() -> None:
        compiler.optimize(
            tmp_path / "fused.onnx",
            tmp_path / "twice.onnx",
            options=Options.from_environment(),
            progress=lambda stage: None,
        )

    with pytest.raises(compiler.CompileError, match=r"fused already, but its library .*fused\.so is missing"):
        again()
    (tmp_path / "fused.so").write_bytes(b"another")
    with pytest.raises(compiler.CompileError, match="not what was written"):
        again()
    assert not (tmp_path / "twice.onnx").exists()


def _one_layer(folder: Path, objects: Path) -> Report:
    """A small model, optimised with a repro of each fault, and found right."""
    model = bert.build(folder / "bert.onnx", exporter="torchscript", size=bert.Size(layers=1))
    options = own_kernels(folder, objects)
    report = compiler.optimize(
        model, folder / "fused.onnx", options=options, progress=lambda stage: None, repros=folder / "repros"
    )
    verdict = verify(model, folder / "fused.onnx")
    assert verdict.ok, verdict.mismatch
    return report


@pytest.mark.cpu
def test_a_kernel_that_the_compiler_refuses_costs_its_region_only(
    tmp_path: Path, object_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(spec: Spec, **named: Any) -> Kernel:
        kernel = compile_spec(spec, **named)
        spoilt = {target: f"{text}\nnonsense;\n" for target, text in kernel.sources.items()}
        return replace(kernel, sources=spoilt) if isinstance(spec, AttentionSpec) else kernel

    monkeypatch.setattr(kernels, "compile_spec", faulty)
    report = _one_layer(tmp_path, object_cache)
    (fault,) = report.faults
    assert fault.kind == "attention"
    assert "nonsense" in fault.problem
    assert fault.repro is not None
    assert {path.suffix for path in Path(fault.repro).iterdir()} == {".onnx", ".c", ".txt"}
    assert set(report.kinds) == {"contraction", "row"}


@pytest.mark.cpu
def test_a_region_without_a_configuration_is_a_miss(
    tmp_path: Path, object_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(spec: Spec, **named: Any) -> Kernel:
        if isinstance(spec, AttentionSpec):
            raise NoConfigurationError("no configuration fits: all are too large")
        return compile_spec(spec, **named)

    monkeypatch.setattr(kernels, "compile_spec", faulty)
    report = _one_layer(tmp_path, object_cache)
    assert not report.faults
    assert [m.reason for m in report.misses if m.kind == "attention"] == ["no configuration fits: all are too large"]


def test_archives_hold_any_name_and_type(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a.npz", {"file": np.arange(3), "a/b": np.ones(2, np.float16)})
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
    with np.load(tmp_path / "a.npz") as found:
        assert found["file"].tolist() == [0, 1, 2]
        assert found["a/b"].dtype == np.float16
