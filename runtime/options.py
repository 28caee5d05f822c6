"""The settings that come from the environment, read once.

In: the process environment. Out: a frozen `Options`, passed down explicitly.
Invariant: no other module reads a `TILEFUSE_*` variable, but for where kernels of one's own are kept
(`tilecore.toolchain.own_cache`), which has to be the same folder.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilecore.toolchain import BrokenToolchainError, own_cache

CARDS = ("cuda", "cuda-sm80")  # NVIDIA cards: Hopper (sm_90a), and Ampere and Ada (sm_80)


class OptionsError(Exception):
    """A `TILEFUSE_*` variable holds something that cannot be used; the message says which and what it expects."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one run. The defaults are those of an empty environment, but for `cache`."""

    cache: Path
    """Where compiled objects and models that the server optimised are kept (`TILEFUSE_CACHE`)."""
    dump: Path | None = None
    """Folder that receives one numbered file per compiler stage (`TILEFUSE_DUMP`)."""
    use: Path | None = None
    """An edited stage file to build instead of the generated one (`TILEFUSE_USE`)."""
    debug: bool = False
    """Show tracebacks and our own frames in errors (`TILEFUSE_DEBUG=1`)."""
    compiler: str | None = None
    """The C compiler to call (`TILEFUSE_CC`); None looks for one."""
    threads: int | None = None
    """Threads that models run on, and that kernels are made for (`TILEFUSE_THREADS`, or the command line); None leaves
    it to ONNX Runtime, which takes one per core."""
    fuse_all: bool = False
    """Fuse regions for which no gain is predicted, too; a choice of the command line, not of the environment."""
    unpad: str | None = None
    """The mask by which padding is left out of the computation; a choice of the command line and of served models."""
    precision: str = "f32"
    """What operands of contractions are rounded to: f32 or bf16; a choice of the command line, too."""
    target: str = "cpu"
    """What to generate code for (`TILEFUSE_TARGET`): cpu, an instruction set of it, or one of `CARDS` for both."""
    profile: str | None = None
    """A row of the table of machines to make kernels for (`TILEFUSE_PROFILE`); None is this machine."""

    @property
    def cuda(self) -> bool:
        """Whether to make kernels for NVIDIA cards, too."""
        return self.target in CARDS

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "Options":
        """Read every setting. Unset and empty variables mean the default.

        Raises:
            OptionsError: a variable has a value that is not of its kind.
        """
        read = {name: value for name, value in environment.items() if value}
        return Options(
            cache=_cache_folder(read),
            dump=Path(read["TILEFUSE_DUMP"]) if "TILEFUSE_DUMP" in read else None,
            use=Path(read["TILEFUSE_USE"]) if "TILEFUSE_USE" in read else None,
            debug=_switch(read, "TILEFUSE_DEBUG"),
            compiler=read.get("TILEFUSE_CC"),
            threads=_positive(read, "TILEFUSE_THREADS"),
            target=read.get("TILEFUSE_TARGET", "cpu"),
            profile=read.get("TILEFUSE_PROFILE"),
        )


def _cache_folder(environment: Mapping[str, str]) -> Path:
    try:
        return own_cache(environment)
    except BrokenToolchainError as error:
        raise OptionsError(str(error)) from error


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("0", "1"):
        raise OptionsError(f"{name} is {value!r}, but it must be 0 or 1")
    return value == "1"


def _positive(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) == 0:
        raise OptionsError(f"{name} is {value!r}, but it must be a whole number above 0")
    return int(value)
