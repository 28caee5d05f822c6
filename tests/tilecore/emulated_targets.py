"""Targets with AVX-512 and AMX where there is AVX2 alone: `avx512_emulator.h` has their instructions."""

import hashlib
import platform
from dataclasses import replace
from pathlib import Path

from tilecore.profile import detect_targets
from tilecore.target import Target, target_named

HEADER = Path(__file__).with_name("avx512_emulator.h")
DIGEST = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]  # objects are kept by their flags


def emulated(name: str) -> Target:
    """The row `name`, compiled for AVX2."""
    row = target_named(name)
    amx = ("-DEMULATED_AMX",) if row.amx else ()
    flags = ("-O1", "-march=x86-64-v3", "-include", str(HEADER), f"-DEMULATOR_{DIGEST}", *amx)
    return replace(row, flags=flags, supported="1")


def emulated_targets() -> tuple[Target, ...]:
    """Those that this machine can emulate and cannot run itself."""
    own = {target.name for target in detect_targets()}
    if platform.machine() != "x86_64" or "x86-64-v3" not in own:
        return ()
    return tuple(emulated(name) for name in ("x86-64-v4-amx", "x86-64-v4") if name not in own)
