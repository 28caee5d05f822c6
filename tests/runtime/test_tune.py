"""Tuning and machine profiles between runs: what is kept, what is used, and what is said of broken files."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from models import quantized, regions
from models.graph import write
from runtime.compile import fuse, optimize
from runtime.machine import ProfileError, machine_profile, save_profile, saved_path
from runtime.options import Options
from runtime.tune import tune
from runtime.tuned import TunedError, config_text, parse_config, shape_class, tuned_store
from tilecore.compile import prepare
from tilecore.contract.spec import Spec
from tilecore.profile import PROFILES, HardwareProfile, detect_profile, profile_named
from tilecore.recommend import recommend
from tilecore.target import target_named

V4 = target_named("x86-64-v4")


def quiet(stage: str) -> None:
    """No progress."""


@pytest.fixture
def options(tmp_path: Path, object_cache: Path) -> Options:
    """A cache of records of its own, with the objects that all tests share."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "objects").symlink_to(object_cache)
    object_cache.mkdir(parents=True, exist_ok=True)
    return Options(cache=cache, fuse_all=True, target=detect_profile().target.name)


def linear(folder: Path) -> Path:
    return write(regions.linear(depth=32, columns=48), folder / "linear.onnx")


def spec_of(model: Path, options: Options) -> Spec:
    return fuse(model, options, quiet, {}, frozenset()).parts[0].region.spec


def test_the_saved_profile_is_used_and_the_environment_comes_first(options: Options) -> None:
    assert machine_profile(options) == detect_profile()
    measured = replace(detect_profile(), l2_bytes=7.0)
    save_profile(measured, options)
    assert machine_profile(options) == measured
    assert machine_profile(replace(options, profile="zen4")) == profile_named("zen4")


def test_a_machine_has_as_many_cores_as_there_are_threads(options: Options) -> None:
    cores = detect_profile().cores
    assert machine_profile(replace(options, threads=1)) == replace(detect_profile(), cores=1)
    assert machine_profile(replace(options, threads=cores + 7)).cores == cores, "there are no more of them"
    assert machine_profile(replace(options, threads=16, profile="zen4")) == replace(profile_named("zen4"), cores=16)
    save_profile(replace(detect_profile(), l2_bytes=7.0), options)
    assert machine_profile(replace(options, threads=1)) == replace(detect_profile(), l2_bytes=7.0, cores=1)


def test_kernels_are_chosen_for_the_threads_that_will_run(tmp_path: Path, options: Options) -> None:
    """Predictions of regions, too: both ask the same machine."""
    model, chosen = write(regions.linear(depth=768, columns=768), tmp_path / "linear.onnx"), set[str]()
    for threads in (1, 16):
        own = replace(options, threads=threads, profile="zen4", target="x86-64-v4", fuse_all=False)
        (part,) = fuse(model, own, quiet, {}, frozenset()).parts
        wanted = recommend(prepare(part.region.spec)[0], replace(profile_named("zen4"), cores=threads), V4)
        assert part.kernel.config == wanted.config
        chosen.add(f"{config_text(wanted.config)} {part.region.predicted}")
    assert len(chosen) == 2


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_row_of_the_table_recommends(profile: HardwareProfile, tmp_path: Path, options: Options) -> None:
    spec = prepare(spec_of(linear(tmp_path), options))[0]
    named = machine_profile(replace(options, profile=profile.name))
    assert recommend(spec, named, named.target).config.keys() == {"block_m", "block_n", "block_k"}


def test_profiles_that_cannot_be_used_say_what_to_do(options: Options) -> None:
    for name in ("z80", "h100"):
        with pytest.raises(ProfileError, match=f"TILEFUSE_PROFILE: unknown profile '{name}'.*--target cuda"):
            machine_profile(replace(options, profile=name))
    saved_path(options).parent.mkdir()
    saved_path(options).write_text("{}")
    with pytest.raises(ProfileError, match="measure again with `tilefuse profile`"):
        machine_profile(options)


def test_the_best_configuration_is_best_over_all_sizes(tmp_path: Path, options: Options) -> None:
    spec, store = spec_of(linear(tmp_path), options), tuned_store(options, 2)
    assert store.best(spec) is None
    store.add(spec, "m=128", {"block_m=8": 10.0, "block_m=16": 11.0, "block_m=32": 40.0})
    assert store.best(spec) == {"block_m": 8}
    store.add(spec, "m=512", {"block_m=8": 90.0, "block_m=16": 50.0})
    assert store.best(spec) == {"block_m": 16}
    assert tuned_store(options, 1).best(spec) is None
    store.path(spec).write_text('{"microseconds": 3}')
    with pytest.raises(TunedError, match="delete it and tune again"):
        store.best(spec)


def test_text_of_configurations_and_classes() -> None:
    config = {"block_n": 64, "block_m": 8}
    assert config_text(config) == "block_m=8 block_n=64"
    assert parse_config(config_text(config)) == config
    assert shape_class({"seq": 129, "batch": 1}) == "batch=1,seq=256"
    assert shape_class({}) == "static"


@pytest.mark.parametrize("what", ["machine_key", "compiler_fingerprint"])
def test_another_machine_or_compiler_has_records_of_its_own(
    what: str, tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(linear(tmp_path), options)
    tuned_store(options, 2).add(spec, "m=128", {"block_m=8": 10.0})
    wider = spec_of(write(regions.linear(depth=32, columns=64), tmp_path / "wider.onnx"), options)
    assert tuned_store(options, 2).best(wider) is None
    monkeypatch.setattr(f"runtime.tuned.{what}", lambda: "b" * 64)
    assert tuned_store(options, 2).best(spec) is None


def tune_for(model: Path, options: Options, size: int) -> None:
    tune(model, options=options, progress=quiet, top=3, sizes=(size,))


@pytest.mark.cpu
def test_two_processes_may_tune_at_once(tmp_path: Path, options: Options) -> None:
    """Both measure one kernel, at sizes of their own, and neither loses what the other has found."""
    model, sizes = linear(tmp_path), (8, 16, 32, 64)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for job in [pool.submit(tune_for, model, options, size) for size in sizes]:
            job.result()
    times = tuned_store(options, machine_profile(options).cores).times(spec_of(model, options))
    assert set(times) == {f"batch=1,seq={size}" for size in sizes}
    assert [len(row) for row in times.values()] == [3] * len(sizes)


@pytest.mark.cpu
def test_numbers_without_axes_are_inputs_as_they_are(tmp_path: Path, options: Options) -> None:
    """Scales and zero points are read when kernels run."""
    model = write(quantized.linear(depth=32, columns=16), tmp_path / "levels.onnx")
    found = tune(model, options=options, progress=quiet, top=1, sizes=(8,))
    assert any(kernel.kind == "contraction" for kernel in found)


@pytest.mark.cpu
def test_optimize_takes_what_tuning_found(tmp_path: Path, options: Options) -> None:
    model = linear(tmp_path)
    (kernel,) = tune(model, options=options, progress=quiet, top=2, sizes=(16, 40))
    store = tuned_store(options, machine_profile(options).cores)
    spec = spec_of(model, options)
    assert set(store.times(spec)) == {"batch=1,seq=16", "batch=1,seq=64"}
    assert all(time > 0 for row in store.times(spec).values() for time in row.values())
    assert kernel.best == store.best(spec)
    assert set(kernel.microseconds) == set(store.times(spec))

    odd = {"block_m": 6, "block_n": 16, "block_k": 8}  # that recommendation would not think of
    for name in store.times(spec):
        store.add(spec, name, {config_text(odd): 1.0})
    report = optimize(model, tmp_path / "out.onnx", options=options, progress=quiet)
    assert report.regions[0].kernel == "matmul(block_k=8, block_m=6, block_n=16)"
    assert not report.faults


@pytest.mark.cpu
def test_what_was_tuned_for_one_thread_is_for_one_thread(tmp_path: Path, options: Options) -> None:
    model, one, many = linear(tmp_path), replace(options, threads=1), replace(options, profile="zen4", threads=3)
    tune(model, options=one, progress=quiet, top=2, sizes=(16,))
    spec = spec_of(model, options)
    assert tuned_store(options, 1).best(spec) is not None
    assert tuned_store(options, 3).best(spec) is None
    odd = {"block_m": 6, "block_n": 16, "block_k": 8}
    for name in tuned_store(options, 1).times(spec):
        tuned_store(options, 1).add(spec, name, {config_text(odd): 1.0})
    (part,) = fuse(model, one, quiet, {}, frozenset()).parts
    assert part.kernel.config == odd
    (part,) = fuse(model, many, quiet, {}, frozenset()).parts
    assert part.kernel.config != odd
