"""Measured search: the time of each configuration of a spec's kernel, on this machine.

Comes in: a spec, configurations, a size for every symbol. Goes out: seconds of each. All candidates are built into one
library and take turns, so that what disturbs the machine disturbs them alike, and are compared within turns.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecore.aligned import aligned
from tilecore.call import Call, CompiledKernel, load_kernels, pointers_to
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.spec import Spec, Tensor
from tilecore.profile import HardwareProfile
from tilecore.target import Target
from tilecore.toolchain import Toolchain

TURNS = 12
TURN_SECONDS = 2e-3  # of one candidate's turn: several calls of a short kernel
MOST_ROUNDS = 64
LEAST_SECONDS = 1e-9  # of a call that has nothing to do
Config = Mapping[str, int]
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Timed:
    """One configuration and its seconds, by the sizes in the order that they were asked for."""

    config: Config
    seconds: tuple[float, ...]


def time_configs(
    spec: Spec, configs: Sequence[Config], sizes: Sequence[Sizes], *,
    profile: HardwareProfile, toolchain: Toolchain, threads: int, turns: int = TURNS,
) -> list[Timed]:  # fmt: skip
    """The seconds of every configuration, for the profile's instruction set, in the order of `configs`.

    BuildError when a kernel does not build; KernelError when sizes do not fit the spec.
    """
    kernels = [make_kernel(spec, config, profile) for config in configs]
    return time_kernels(kernels, sizes, target=profile.target, toolchain=toolchain, threads=threads, turns=turns)


def make_kernel(spec: Spec, config: Config, profile: HardwareProfile) -> Kernel:
    """The kernel of one configuration, for the profile's instruction set."""
    return compile_spec(spec, label="Timed", profile=profile, targets=(profile.target,), config=config)


def time_kernels(
    kernels: Sequence[Kernel], sizes: Sequence[Sizes], *,
    target: Target, toolchain: Toolchain, threads: int, turns: int = TURNS,
) -> list[Timed]:  # fmt: skip
    """The seconds of kernels that take the same inputs, in their order."""
    distinct = {kernel.name: kernel for kernel in kernels}
    loaded = {c.kernel.name: c for c in load_kernels([distinct[name] for name in sorted(distinct)], target, toolchain)}
    columns = [_take_turns(loaded, size, threads, turns) for size in sizes]
    return [Timed(kernel.config, tuple(column[kernel.name] for column in columns)) for kernel in kernels]


def _take_turns(loaded: Mapping[str, CompiledKernel], sizes: Sizes, threads: int, turns: int) -> dict[str, float]:
    inputs = make_inputs(next(iter(loaded.values())).kernel, sizes)
    calls = _in_one_place([kernel.prepare(*inputs, threads=threads) for kernel in loaded.values()])
    turn = dict(zip(loaded, calls, strict=True))
    first = {name: kernel.time_call(turn[name], threads=threads, rounds=1) for name, kernel in loaded.items()}
    rounds = {name: int(min(max(TURN_SECONDS / max(taken, 1e-7), 1), MOST_ROUNDS)) for name, taken in first.items()}
    order, rng = list(loaded.items()), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in loaded}
    for _ in range(turns):
        rng.shuffle(order)
        for name, kernel in order:
            taken[name].append(kernel.time_call(turn[name], threads=threads, rounds=rounds[name]))
    return dict(zip(loaded, _typical(np.array([taken[name] for name in loaded])), strict=True))


def _typical(taken: np.ndarray) -> list[float]:
    """Seconds of each kernel (a row) by what it took in each turn (a column), on the machine at its best.

    A machine that is slower for seconds on end makes all kernels of a turn slower: the median of what a kernel takes
    beside the others of the same turn tells it from them, where its least time would tell who had the luckiest turn.
    """
    level = np.exp(np.log(np.maximum(taken, LEAST_SECONDS)).mean(axis=0))
    return [float(median) for median in np.median(taken / level, axis=1) * level.min()]


def _in_one_place(calls: Sequence[Call]) -> list[Call]:
    """The calls with one memory for their results, which begin at cache lines, and one for their tiles.

    Which sets of a cache pages fall into is luck: with memory of its own, each kernel has a luck of its own, which made
    equal kernels differ by 5 %.
    """
    results = tuple(map(aligned, calls[0].results))
    outputs, tiles = pointers_to(results), max(calls, key=lambda call: call.scratch.size)
    return [replace(call, outputs=outputs, results=results, scratch=tiles.scratch) for call in calls]


def make_inputs(kernel: Kernel, sizes: Sizes) -> list[np.ndarray]:
    """Arrays for a kernel: small random floats, zeros for integers, which are positions in any table, and true.

    They begin at cache lines.
    """
    rng = np.random.default_rng(0)
    return [aligned(_array(tensor, sizes, rng)) for tensor in kernel.spec.inputs]


def _array(tensor: Tensor, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(int(Evaluator({}, sizes)(dim)) for dim in tensor.shape)
    kind = tensor.dtype.row.numpy
    if tensor.dtype.is_float:
        return (rng.standard_normal(shape, dtype=np.float32) * 0.25).astype(kind)
    return np.ones(shape, kind) if tensor.dtype is DType.BOOL else np.zeros(shape, kind)
