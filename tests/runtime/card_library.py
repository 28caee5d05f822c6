"""Libraries of single regions with their kernels for NVIDIA cards, and what to expect of them."""

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from runtime import native
from tilecore.canonical import canonical
from tilecore.compile import HEADERS, compile_spec
from tilecore.contract.spec import Spec
from tilecore.cuda.profile import H100, GpuProfile
from tilecore.cuda.region import CudaRegion, compile_region
from tilecore.link import Objects, link_kernels
from tilecore.profile import detect_profile
from tilecore.target import targets_for
from tilecore.toolchain import Source, find_toolchain


@dataclass(frozen=True)
class Made:
    """A library of one op, and what is in it for cards."""

    path: Path
    op: str
    region: CudaRegion


def make_library(spec: Spec, cache: Path, *, card: GpuProfile = H100) -> Made:
    """The library of one region, as `optimize` builds it."""
    target = targets_for(platform.machine())[-1]
    profile = replace(detect_profile(), target=target)
    host = compile_spec(canonical(spec, constants=False), label="Region", profile=profile, targets=(target,))
    region = compile_region(canonical(spec), label="Region", cache_directory=cache / "cubins", profile=card)
    sources = (*native.shim_sources(), Source(region.source, include=(HEADERS,)))
    with Objects(lambda: find_toolchain(cache / "objects")) as objects:
        path = link_kernels([host], (target,), objects, cards={host.name: region.symbol}, host=sources)
    return Made(path, host.name, region)
