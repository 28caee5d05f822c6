"""Configurations of kernels of one's own, chosen by measuring and remembered: `tilecore.autotune`.

Comes in: a `jit` function and its configurations, those that are given or the best candidates for what its text leaves
open (`T.auto`). Goes out: the fastest. It is kept in memory, and in the cache's folder `tuned`, by the program (its C
text, which holds the version of the compiler), the kind of machine, the threads and the class of sizes, each rounded up
to a power of two. One process measures at a time; files appear whole.
"""

import fcntl
import functools
import hashlib
import inspect
import json
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilecore.arguments import as_array, size
from tilecore.call import KernelError
from tilecore.contract.expr import symbols
from tilecore.emit_expr import EmitError
from tilecore.errors import TileError
from tilecore.extents import open_extents, rank_extents
from tilecore.infer import InferenceError
from tilecore.jitted import Jit, JitKernel, has_memory, key_of
from tilecore.profile import detect_profile, machine_key
from tilecore.records import write_json
from tilecore.toolchain import BuildError

REFUSED = (TileError, InferenceError, EmitError, BuildError)
TOP = 5
Config = Mapping[str, Any]


def autotune(
    configs: Sequence[Config] | None = None, *, warmup: int = 1, rep: int = 3, top: int = TOP, **hints: Any
) -> Callable[[Jit], "Tuned"]:
    """Decorate a `jit` function: parameters of `configs` that a call leaves out are chosen by measuring.

    Without `configs`, the first `top` candidates for parameters that are `T.auto` are. Each configuration is compiled
    and run on random inputs, or on the call's, `warmup` and `rep` times; the one with the least median wins and is
    kept, for later processes too. One that is refused is passed over; when all are, the error lists why.
    """
    return lambda function: Tuned(function, tuple(configs or ()), max(1, warmup), max(1, rep), top)


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration, and microseconds of all that were measured, by their text."""

    config: Config
    microseconds: Mapping[str, float]
    remembered: bool  # read from the cache


@dataclass
class Tuned:
    """A `jit` function whose configuration is measured."""

    function: Jit
    given: tuple[Config, ...]
    warmup: int
    rep: int
    top: int = TOP
    chosen: dict[Any, Choice] = field(default_factory=dict[Any, Choice])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As the function itself, with the best configuration."""
        config = self.best(arguments, named).config
        if self.function.is_annotated:
            return self.function.compile(**config)(*arguments, **named)
        return self.function(*arguments, **{**config, **named})

    def compile(self, *arguments: Any, **named: Any) -> JitKernel:
        """As the function's own `compile`, with the best configuration."""
        return self.function.compile(*arguments, **{**self.best(arguments, named).config, **named})

    @functools.cached_property
    def configs(self) -> tuple[Config, ...]:
        """What there is to choose from. KernelError where only the arrays of a call would tell."""
        opened = open_extents(self.function.function)
        if self.given or not opened:
            return self.given
        if not self.function.is_annotated:
            where = f"{', '.join(opened)} of {self.function.original.__name__}"
            raise KernelError(
                f"autotune has no configs for {where}, whose parameters are not annotated as tensors:"
                " give autotune(configs=[…])"
            )
        return tuple(rank_extents(self.function.function, detect_profile(self.function.settings.threads))[: self.top])

    def takes(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Those of `dims` that this kernel has: parameters of a function that makes it, or symbols of its tensors."""
        if not self.function.is_factory:
            return dict(dims)
        names = inspect.signature(self.function.original).parameters
        return {name: value for name, value in dims.items() if name in names}

    def best(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Choice:
        """What to use for these arguments: measured once, nothing when the call gives all that is tuned."""
        if not any(self._open(arguments, named)) and not self.function.is_annotated:
            return Choice({}, {}, remembered=False)
        python = {name: value for name, value in named.items() if not has_memory(value)}
        shapes = tuple((tuple(v.shape), str(v.dtype)) if has_memory(v) else v for v in arguments)
        key = key_of({**python, "arguments": shapes})
        if key not in self.chosen:
            self.chosen[key] = self._remembered(arguments, named)
        return self.chosen[key]

    def _open(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> list[Config]:
        """The configurations without what the call gives, by name or by position; each once."""
        positional = list(inspect.signature(self.function.original).parameters)[: len(arguments)]
        given, found = {*named, *positional}, dict[str, Config]()
        for config in self.configs:
            rest = {name: value for name, value in config.items() if name not in given}
            found[config_text(rest)] = rest
        return list(found.values())

    def _remembered(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Choice:
        """From the cache, or measured and kept there."""
        kernels = self._kernels(arguments, named)
        given = [value for value in (*arguments, *named.values()) if has_memory(value)]
        made = given or random_arguments(kernels[0][1], named)
        folder = self.function.settings.cache / "tuned"
        path = folder / f"{_record_key(kernels, made)}.json"
        known, remembered = _read(path), True
        if known is None:
            with _alone(folder):
                known = _read(path)
                if known is None:
                    known, remembered = self._measured(kernels, made, arguments if given else (), named), False
                    with suppress(OSError):  # a cache that cannot be written costs time the next time
                        write_json(path, {"microseconds": dict(known)})
        by_text = {config_text(config): config for config, _ in kernels}
        return Choice(by_text[min(known, key=known.__getitem__)], known, remembered)

    def _kernels(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> list[tuple[Config, JitKernel]]:
        """Every configuration that is not refused, with its kernel. KernelError when all are."""
        found: list[tuple[Config, JitKernel]] = []
        refused: list[str] = []
        for config in self._open(arguments, named):
            try:
                if self.function.is_annotated:
                    found.append((config, self.function.compile(**config)))
                else:
                    found.append((config, self.function.compile(*arguments, **{**config, **named})))
            except REFUSED as error:
                refused.append(f"{dict(config)}: {error}")
        if not found:
            raise KernelError("every configuration was refused:\n" + "\n".join(refused))
        return found

    def _measured(
        self, kernels: Sequence[tuple[Config, JitKernel]], made: Sequence[Any], arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> dict[str, float]:  # fmt: skip
        """Microseconds of each configuration, on the call's arrays, or on those that were `made` where it has none."""
        times: dict[str, float] = {}
        for config, kernel in kernels:
            own, by_name = self._own(kernel, arguments, named)
            if not any(has_memory(value) for value in (*arguments, *named.values())):
                call = functools.partial(kernel, *made)
            elif self.function.is_annotated:
                call = functools.partial(kernel, *own, **by_name)
            else:
                call = functools.partial(self.function, *own, **{**config, **by_name})
            times[config_text(config)] = median_time(call, self.warmup, self.rep) * 1e6
        return times

    def _own(
        self, kernel: JitKernel, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call, copies in the place of what it writes: the caller's arrays are left alone."""
        taken = [name for name in kernel.parameters if name not in kernel.returned]
        places = taken if self.function.is_annotated else list(inspect.signature(self.function.original).parameters)

        def own(name: str, value: Any) -> Any:
            return as_array(name, value).copy() if name in kernel.written and has_memory(value) else value

        positional = [own(name, value) for name, value in zip(places, arguments, strict=False)]
        return positional, {name: own(name, value) for name, value in named.items()}


def config_text(config: Config) -> str:
    """A configuration as the key of a record."""
    return " ".join(f"{name}={value}" for name, value in sorted(config.items()))


def median_time(call: Callable[[], Any], warmup: int, rep: int) -> float:
    """Seconds of a call."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    for _ in range(rep):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def random_arguments(kernel: JitKernel, dims: Mapping[str, Any] | None = None) -> list[np.ndarray]:
    """Inputs of a kernel whose dims are known or in `dims`: floats around 0, small whole numbers."""
    random = np.random.default_rng(0)
    values = {name: int(value) for name, value in (dims or {}).items() if isinstance(value, int)}
    found: list[np.ndarray] = []
    for name in (name for name in kernel.parameters if name not in kernel.returned):
        tensor = kernel.tensors[name]
        unknown = sorted({symbol.name for dim in tensor.shape for symbol in symbols(dim)} - set(values))
        if unknown:
            raise KernelError(f"{tensor} has dims that are not known: give {', '.join(unknown)}, or call with arrays")
        shape = tuple(size(dim, values, name) for dim in tensor.shape)
        drawn = random.standard_normal(shape) if tensor.dtype.is_float else random.integers(0, 2, shape)
        found.append(drawn.astype(tensor.dtype.row.numpy))
    return found


def _record_key(kernels: Sequence[tuple[Config, JitKernel]], given: Sequence[Any]) -> str:
    """By configurations, programs, whose names are hashes of their C text, machine, threads and class of sizes."""
    sizes = [(str(value.dtype), *(1 << (int(dim) - 1).bit_length() for dim in value.shape)) for value in given]
    programs = [(config_text(config), [step.name for step in kernel.steps]) for config, kernel in kernels]
    parts = (machine_key(), kernels[0][1].threads, programs, sizes)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, float] | None:
    """What a record holds; None when there is none. KernelError when it is broken."""
    if not path.exists():
        return None
    try:
        return {str(text): float(value) for text, value in json.loads(path.read_text())["microseconds"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise KernelError(f"{path} is not a record of tuning ({error!r}); delete it and tune again") from error


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the lock of measurements, as two at once would disturb each other; none where nothing can be written."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((folder / "lock").open("w")), fcntl.LOCK_EX)
        yield
