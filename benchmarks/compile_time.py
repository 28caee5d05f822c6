"""How long BERT-base's kernels take to compile: python -m benchmarks.compile_time [--quick] [--json FILE]

Out: two rows, `{"case", "unit", "ours", "peers", "floor", "error"}`, in seconds: from specs to a linked library in an
empty cache, and again from what is then in the cache. Neither finding regions nor checking is in it. `--quick` has two
layers: equal layers share their kernels, so it takes as long.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from whole_models import Row

from fuser.find import find
from fuser.load import load
from fuser.region import Region
from models import bert
from runtime import native
from runtime.cost import machine_cost
from runtime.kernels import kernel_writer
from runtime.machine import machine_profile
from runtime.options import Options
from tilecore.canonical import canonical
from tilecore.compile import Kernel
from tilecore.link import Objects, link_kernels
from tilecore.profile import HardwareProfile
from tilecore.target import targets_for
from tilecore.toolchain import find_toolchain

FORM = "BERT-base, {regions} regions, {kernels} kernels for {targets} instruction sets, {how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    options = Options.from_environment()
    profile = machine_profile(options)
    size = replace(bert.BASE, layers=2) if arguments.quick else bert.BASE
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as folder:
        bert.build(Path(folder) / "bert.onnx", size=size)
        found = find(load(Path(folder) / "bert.onnx"), machine_cost(profile, profile.target, fuse_all=False))
        for how in ("empty cache", "from the cache"):
            start = time.perf_counter()
            kernels, targets = build(found.regions, profile, options, Path(folder) / "cache")
            taken = time.perf_counter() - start
            name = FORM.format(regions=len(found.regions), kernels=kernels, targets=targets, how=how)
            rows.append(Row(name, "s", taken, {}, 0.0, 0.0))
            print(f"{name}: {taken:.2f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def build(regions: Sequence[Region], profile: HardwareProfile, options: Options, cache: Path) -> tuple[int, int]:
    """Compile and link; (distinct kernels, instruction sets)."""
    targets = targets_for("x86_64" if "x86" in profile.target.name else "aarch64")
    writer = kernel_writer(replace(options, cache=cache), profile, targets, dump=None, cubins=False)
    distinct = {canonical(region.spec): region.kind for region in regions}
    named: dict[str, Kernel] = {}
    with Objects(lambda: find_toolchain(cache / "objects")) as objects:
        for spec, kind in distinct.items():
            kernel = writer.write(kind, spec)
            if isinstance(kernel, Kernel):
                named[kernel.name] = kernel
                objects.start_kernel(kernel, targets)
        link_kernels(list(named.values()), targets, objects, host=native.shim_sources())
    return len(named), len(targets)


if __name__ == "__main__":
    main()
