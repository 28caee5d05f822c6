"""Generated kernels under sanitizers, under an emulator, and with every warning an error."""

import shutil
from pathlib import Path

import pytest
from standalone import PLAIN, ZIG, build, check_program, compiled

from tilecore.profile import detect_target
from tilecore.target import target_named

pytestmark = pytest.mark.cpu
QEMU = next((path for path in map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64")) if path), None)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: zig's sanitizers come without their library")
def test_no_kernel_touches_memory_that_it_does_not_own(tmp_path: Path) -> None:
    target = detect_target()
    kernels = compiled(target)
    flags = (*PLAIN, "-Wno-aggressive-loop-optimizations", *target.flags, *SANITIZERS)
    check_program(tmp_path, kernels, [str(build(tmp_path, kernels, target, ("gcc",), flags))])


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_kernels_of_any_x86_processor_build_without_a_warning(name: str, tmp_path: Path) -> None:
    target = target_named(name)
    build(tmp_path, compiled(target), target, ("gcc",), (*PLAIN, *target.flags, "-O0"))


@pytest.mark.timeout(600)
@pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64-static, of the package qemu-user-static")
def test_kernels_for_neon_run_on_an_emulated_processor(tmp_path: Path) -> None:
    target = target_named("aarch64")
    kernels = compiled(target)
    flags = (*PLAIN, *target.flags, "-O1", "-target", "aarch64-linux-musl", "-static")
    program = build(tmp_path, kernels, target, ZIG, flags)
    assert QEMU is not None
    check_program(tmp_path, kernels, [QEMU, str(program)])
