"""Kernels kept between runs: what is used again, what is written anew, and what a broken cache does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuser.find import find
from fuser.load import load
from models import regions
from models.graph import write
from runtime import kernels
from runtime.kernels import KernelWriter, kernel_writer
from runtime.options import Options
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.spec import Spec
from tilecore.profile import detect_profile, profile_named


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    model = load(write(regions.linear(depth=32, columns=48), tmp_path / "linear.onnx"))
    return find(model).regions[0].spec


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """The specs that reached the compiler."""
    seen: list[Spec] = []

    def compile_and_note(spec: Spec, **named: Any) -> Kernel:
        seen.append(spec)
        return compile_spec(spec, **named)

    monkeypatch.setattr(kernels, "compile_spec", compile_and_note)
    return seen


def writer(tmp_path: Path, profile: str = "zen3") -> KernelWriter:
    found = profile_named(profile)
    return kernel_writer(Options(cache=tmp_path / "cache"), found, (found.target,), dump=None, cubins=False)


def test_a_kept_kernel_is_the_one_that_was_compiled(tmp_path: Path, spec: Spec, compiled: list[Spec]) -> None:
    first = writer(tmp_path).write("contraction", spec)
    assert isinstance(first, Kernel)
    assert writer(tmp_path).write("contraction", spec) == first
    assert len(compiled) == 1


def test_everything_that_a_kernel_depends_on_tells_kept_ones_apart(
    tmp_path: Path, spec: Spec, compiled: list[Spec]
) -> None:
    first = writer(tmp_path).write("contraction", spec)
    assert isinstance(first, Kernel)
    writer(tmp_path, "avx2-desktop").write("contraction", spec)
    tuned = writer(tmp_path)
    config = dict(first.config) | {"block_n": first.config["block_n"] * 2}
    tuned.tuned.add(spec, "static", {" ".join(f"{k}={v}" for k, v in sorted(config.items())): 1.0})
    second = tuned.write("contraction", spec)
    assert isinstance(second, Kernel)
    assert second.config == config
    renamed = writer(tmp_path).write("row", spec)
    assert isinstance(renamed, Kernel)
    assert renamed.name.startswith("FusedRow_")
    assert len(compiled) == 4


@pytest.mark.parametrize("damage", ["cut", "edited", "empty"])
def test_a_damaged_file_is_written_again(tmp_path: Path, spec: Spec, compiled: list[Spec], damage: str) -> None:
    first = writer(tmp_path).write("contraction", spec)
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    text = path.read_text()
    fields = json.loads(text)
    fields["sources"] = {target: f"{source}// other\n" for target, source in fields["sources"].items()}
    path.write_text({"cut": text[: len(text) // 2], "edited": json.dumps(fields), "empty": "{}"}[damage])
    assert writer(tmp_path).write("contraction", spec) == first
    assert path.read_text() == text
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, spec: Spec, compiled: list[Spec]) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    kernel = replace(writer(tmp_path), kept=tmp_path / "cache" / "kernels").write("contraction", spec)
    assert isinstance(kernel, Kernel)
    assert len(compiled) == 1


def test_who_asks_for_the_stages_gets_them_from_a_full_cache(tmp_path: Path, spec: Spec) -> None:
    writer(tmp_path).write("contraction", spec)
    stages: dict[str, str] = {}
    profile = detect_profile()
    kernel_writer(
        Options(cache=tmp_path / "cache"), profile, (profile.target,), dump=stages.__setitem__, cubins=False
    ).write("contraction", spec)
    assert any(name.startswith("30_program") for name in stages)
