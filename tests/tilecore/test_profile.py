"""Hardware profiles: the table, JSON, and what measuring this machine finds."""

from dataclasses import replace
from pathlib import Path

import pytest

import tilecore.profile as profile_module
from tilecore.measure import measure_profile
from tilecore.profile import PROFILES, HardwareProfile, count_cores, detect_profile, machine_key, profile_named
from tilecore.target import target_named
from tilecore.toolchain import find_toolchain


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_json_gives_the_profile_back(profile: HardwareProfile) -> None:
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert profile_named(profile.name) == profile


def test_json_that_is_no_profile_is_refused() -> None:
    fields = profile_named("zen3").to_json()
    with pytest.raises(ValueError, match="not a positive number: l2"):
        HardwareProfile.from_json({**fields, "l2": 0})
    with pytest.raises(ValueError, match="not a positive number: clock"):
        HardwareProfile.from_json({**fields, "clock": "fast"})
    with pytest.raises(ValueError, match="unknown target 'x87'"):
        HardwareProfile.from_json({**fields, "target": "x87"})
    with pytest.raises(TypeError):
        HardwareProfile.from_json({**fields, "l4": 1})


def test_unknown_machines_are_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown profile 'z80'; there are zen4, zen5, zen3, sapphire-rapids"):
        profile_named("z80")


@pytest.mark.parametrize(
    ("vendor", "family", "target", "name"),
    [
        ("AuthenticAMD", "25", "x86-64-v4", "zen4"),
        ("AuthenticAMD", "26", "x86-64-v4", "zen5"),
        ("AuthenticAMD", "26", "x86-64-v3", "zen3"),
        ("AuthenticAMD", "25", "x86-64-v3", "zen3"),
        ("GenuineIntel", "6", "x86-64-v4", "sapphire-rapids"),
        ("GenuineIntel", "6", "x86-64-v3", "avx2-desktop"),
        ("", "", "x86-64-v4", "zen4"),
        ("", "", "aarch64", "graviton3"),
    ],
)
def test_a_processor_has_the_row_that_it_is_most_like(
    monkeypatch: pytest.MonkeyPatch, vendor: str, family: str, target: str, name: str
) -> None:
    lines = {"vendor_id": vendor, "cpu family": family}
    monkeypatch.setattr(profile_module, "_cpu_line", lambda field: lines.get(field, ""))
    monkeypatch.setattr(profile_module, "detect_target", lambda: target_named(target))
    found, row = detect_profile(), profile_named(name)
    assert (found.clock, found.l1_bytes, found.kept) == (row.clock, row.l1_bytes, row.kept)


def test_a_machine_has_one_key_and_at_least_a_core() -> None:
    assert machine_key() == machine_key()
    assert len(machine_key()) == 12
    assert count_cores() >= 1


@pytest.mark.parametrize(("cores", "sharing", "caches"), [(1, 0, 1), (16, 0, 1), (1, 1, 1), (3, 1, 3), (9, 8, 2)])
def test_results_are_kept_in_the_last_caches_of_the_cores_at_work(cores: int, sharing: int, caches: int) -> None:
    profile = replace(profile_named("zen5"), cores=cores, l3=1000, l3_cores=sharing, kept=0.5)
    assert profile.kept_bytes == 500 * caches
    assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("flags", "listed", "cores"), [("avx2", "0-1,4-5", 2), ("avx2", None, 0), ("hypervisor", "0-5", 1)]
)
def test_who_shares_a_last_cache_is_asked_where_the_system_knows(
    flags: str, listed: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads 0 and 4, and 1 and 5, are of one core each."""
    for thread in range(6):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{thread % 4}\n")
    (tmp_path / "cpu0" / "cache" / "index3").mkdir(parents=True)
    files = {"level": "3", "type": "Unified", "size": "32768K"} | ({"shared_cpu_list": listed} if listed else {})
    for name, text in files.items():
        (tmp_path / "cpu0" / "cache" / "index3" / name).write_text(f"{text}\n")
    lines = {"vendor_id": "AuthenticAMD", "cpu family": "26", "flags": flags}
    monkeypatch.setattr(profile_module, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(profile_module, "_cpu_line", lambda field: lines.get(field, ""))
    monkeypatch.setattr(profile_module, "detect_target", lambda: target_named("x86-64-v4"))
    assert detect_profile().l3_cores == cores


@pytest.mark.cpu
def test_measuring_finds_rates_that_a_processor_can_have(object_cache: Path) -> None:
    """Bounds that every processor of the last ten years keeps, with room for a busy machine."""
    stages: list[str] = []
    measured = measure_profile(find_toolchain(object_cache), progress=stages.append)
    profile = measured.profile
    assert stages[0] == "scalar clock, pass 1 of 3"
    assert 0.5e9 < profile.clock < 8e9
    assert 0.2 < profile.fma_per_cycle <= 4.5
    assert 4 < profile.l1_bytes <= 260
    assert profile.dram_bytes < profile.l1_bytes
    assert profile.target == detect_profile().target
    assert measured.rate("L2 copies").alone > 0
    exponentials = measured.rate("exponentials").alone / profile.clock / profile.target.lanes
    assert 0.02 < exponentials < 0.5  # vectors a cycle: eleven instructions each, of which at most four start at once
    assert replace(profile, name="x") == replace(HardwareProfile.from_json(profile.to_json()), name="x")
