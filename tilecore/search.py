"""Measured search: the time of each configuration of a spec's kernel, on this machine.

Comes in: a spec, configurations, a size for every symbol. Goes out: seconds of each. All candidates are built into one
library and take turns, so that what disturbs the machine disturbs them alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecore.call import Call, CompiledKernel, load_kernels
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
    first = next(iter(loaded.values())).kernel
    inputs = make_inputs(first, sizes)
    calls: dict[str, Call] = {name: kernel.prepare(*inputs, threads=threads) for name, kernel in loaded.items()}
    best = {name: kernel.time_call(calls[name], threads=threads, rounds=1) for name, kernel in loaded.items()}
    for _ in range(turns):
        for name, kernel in loaded.items():
            rounds = int(min(max(TURN_SECONDS / max(best[name], 1e-7), 1), MOST_ROUNDS))
            best[name] = min(best[name], kernel.time_call(calls[name], threads=threads, rounds=rounds))
    return best


def make_inputs(kernel: Kernel, sizes: Sizes) -> list[np.ndarray]:
    """Arrays for a kernel: small random floats, zeros for integers, which are positions in any table, and true."""
    rng = np.random.default_rng(0)
    return [_array(tensor, sizes, rng) for tensor in kernel.spec.inputs]


def _array(tensor: Tensor, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(int(Evaluator({}, sizes)(dim)) for dim in tensor.shape)
    kind = tensor.dtype.row.numpy
    if tensor.dtype.is_float:
        return (rng.standard_normal(shape, dtype=np.float32) * 0.25).astype(kind)
    return np.ones(shape, kind) if tensor.dtype is DType.BOOL else np.zeros(shape, kind)
