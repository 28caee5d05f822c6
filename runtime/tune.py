"""Tuning: measures the best candidates of recommendation for every kernel of a model, and remembers what it found.

Comes in: a model. Goes out: a row per distinct kernel, with what was recommended and what measured best. `optimize`
takes the best from then on, on the same kind of machine. One process measures at a time: others wait for it. A Python
file with kernels under `tilecore.autotune` does as well: calls of these take the best from then on.
"""

import fcntl
import runpy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuser.load import LoadError
from runtime.compile import CompileError, fuse
from runtime.machine import machine_profile
from runtime.options import Options
from runtime.tuned import TunedStore, config_text, parse_config, shape_class, tuned_store
from tilecore.call import KernelError
from tilecore.compile import prepare
from tilecore.contract.spec import Spec
from tilecore.errors import TileError
from tilecore.profile import HardwareProfile
from tilecore.recommend import nominal_sizes, rank
from tilecore.search import time_configs
from tilecore.toolchain import BuildError, Toolchain, find_toolchain
from tilecore.tuned import Tuned

TOP = 5
SIZES = (128, 512)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """One distinct kernel: microseconds of the recommended and of the best configuration, by shape class."""

    kind: str
    label: str
    times: int  # regions of the model that it is for
    recommended: Mapping[str, int]
    best: Mapping[str, int]
    microseconds: Mapping[str, tuple[float, float]]

    def to_json(self) -> dict[str, object]:
        """The fields."""
        return {
            "kind": self.kind, "label": self.label, "times": self.times, "recommended": dict(self.recommended),
            "best": dict(self.best), "microseconds": {c: list(pair) for c, pair in self.microseconds.items()},
        }  # fmt: skip


def tune(
    model: Path, *, options: Options, progress: Progress, top: int = TOP, sizes: Sequence[int] = SIZES
) -> tuple[TunedKernel, ...]:
    """Measure the `top` candidates of every kernel of `model` and keep the times.

    Symbolic dims have each of `sizes` in turn (a batch stays 1). CompileError when the model cannot be read or there is
    no compiler.
    """
    try:
        progress("finding regions")
        fused = fuse(model, options, lambda stage: None, {}, frozenset())
        profile = machine_profile(options)
        toolchain = find_toolchain(options.cache / "objects", options.compiler)
        store = tuned_store(options, profile.cores)
        groups: dict[Spec, list[tuple[str, str]]] = {}
        for part in fused.parts:
            groups.setdefault(prepare(part.region.spec)[0], []).append((part.region.kind, part.region.label))
        found: list[TunedKernel] = []
        for number, (spec, regions) in enumerate(groups.items(), 1):
            kind, label = regions[0]
            progress(f"kernel {number} of {len(groups)}: {kind} {label}")
            found.append(_tune_spec(spec, kind, label, len(regions), store, profile, toolchain, top, sizes))
    except (LoadError, BuildError, OSError) as error:
        raise CompileError(str(error)) from error
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TunedFunction:
    """One kernel of a Python file: its name, the fastest configuration, microseconds of all, or why there are none."""

    name: str
    best: Mapping[str, object]
    microseconds: Mapping[str, float]
    problem: str = ""

    def to_json(self) -> dict[str, object]:
        """The fields."""
        return {
            "name": self.name, "best": dict(self.best), "microseconds": dict(self.microseconds),
            "problem": self.problem,
        }  # fmt: skip


def tune_functions(path: Path, dims: Mapping[str, int], *, progress: Progress) -> tuple[TunedFunction, ...]:
    """Measure every kernel under `tilecore.autotune` that the Python file at `path` defines, in its order.

    `dims` has sizes of symbolic dims and values of parameters by name; kernels take those that they have. The file is
    run. CompileError when it cannot be, or has no such kernel.
    """
    try:
        names = runpy.run_path(str(path))
    except (OSError, ImportError, SyntaxError, TileError) as error:
        raise CompileError(f"{path}: {error}") from error
    functions = {name: value for name, value in names.items() if isinstance(value, Tuned)}
    if not functions:
        raise CompileError(f"{path} has no kernel under tilecore.autotune")
    found: list[TunedFunction] = []
    for name, function in functions.items():
        progress(f"kernel {name}")
        try:
            choice = function.best((), function.takes(dims))
            found.append(TunedFunction(name, choice.config, choice.microseconds))
        except (TileError, KernelError, BuildError) as error:
            found.append(TunedFunction(name, {}, {}, str(error)))
    return tuple(found)


def _tune_spec(
    spec: Spec, kind: str, label: str, times: int, store: TunedStore, profile: HardwareProfile, toolchain: Toolchain,
    top: int, sizes: Sequence[int],
) -> TunedKernel:  # fmt: skip
    fitting = [candidate.config for candidate in rank(spec, profile, profile.target) if not candidate.rejected]
    configs = fitting[:top]
    points = list({shape_class(nominal_sizes(spec, size)): nominal_sizes(spec, size) for size in sizes}.items())
    with _alone(store.folder):
        timed = time_configs(
            spec, configs, [point for _, point in points],
            profile=profile, toolchain=toolchain, threads=store.threads,
        )  # fmt: skip
        for column, (name, _) in enumerate(points):
            store.add(spec, name, {config_text(row.config): row.seconds[column] * 1e6 for row in timed})
        best = store.best(spec) or configs[0]
    by_config = {config_text(row.config): row for row in timed}
    chosen = by_config.get(config_text(best), timed[0])
    pairs = {
        name: (timed[0].seconds[column] * 1e6, chosen.seconds[column] * 1e6) for column, (name, _) in enumerate(points)
    }
    return TunedKernel(kind, label, times, configs[0], parse_config(config_text(best)), pairs)


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the lock of this machine's measurements: two at once would disturb each other and lose records."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
