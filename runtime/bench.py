"""Times a fused model against its original, in turns in one process.

In: both models, inputs (given or generated), threads, seconds. Out: a `BenchResult` of medians and their ratio.
The original runs as a user would run it, with ONNX Runtime's default optimisations. The sessions take turns that are
long enough to get into their stride, after a pause in which the other session's threads stop spinning; the first run
of a turn is not counted.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime as ort

from runtime import inputs as model_inputs
from runtime import ort_values
from runtime.session import load
from tilecore.aligned import aligned

Array = npt.NDArray[Any]

TURN_SECONDS = 0.3  # runs soon after the pause are slower on either side; a turn is long against that
PAUSE_SECONDS = 0.02  # the other session's threads spin for a while after its last run
MINIMUM_TURNS = 3
WARM_UP_SECONDS = 0.3
TYPICAL_SIZES = (1, (128, 64, 32, 16))  # batch, and the other symbols in order


@dataclass(frozen=True)
class Timing:
    """Run times of one model, in milliseconds."""

    median_ms: float
    min_ms: float
    runs: int

    def to_json(self) -> dict[str, object]:
        """Keys `median_ms`, `min_ms` and `runs`."""
        return {"median_ms": self.median_ms, "min_ms": self.min_ms, "runs": self.runs}


@dataclass(frozen=True)
class BenchResult:
    """Both timings; `ratio` is the original's median over the fused model's: above 1 the fused one is faster."""

    fused: Timing
    original: Timing
    threads: int | None
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def ratio(self) -> float:
        """How many times as fast as the original the fused model is."""
        return self.original.median_ms / self.fused.median_ms

    def to_json(self) -> dict[str, object]:
        """Keys `fused` and `original` (see `Timing`), `ratio`, `threads` (null: one per core) and input `shapes`."""
        return {
            "fused": self.fused.to_json(),
            "original": self.original.to_json(),
            "ratio": self.ratio,
            "threads": self.threads,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }

    def __str__(self) -> str:
        return (
            f"fused {self.fused.median_ms:.3g} ms, original {self.original.median_ms:.3g} ms, "
            f"{self.ratio:.2f} times as fast (medians of {self.fused.runs} and {self.original.runs} runs)"
        )


def bench(
    fused: Path,
    original: Path,
    *,
    inputs: Mapping[str, Array] | None = None,
    threads: int | None = 2,
    seconds: float = 10.0,
) -> BenchResult:
    """Times both for about `seconds` in all, on `threads` threads each (None: one per core).

    Generated inputs have batch 1 and 128 for the next symbol where the model takes that, and masks without holes.
    Raises FileNotFoundError if a file is missing, InputError if inputs do not suit the model, ValueError if `seconds`
    is not positive.
    """
    if not original.is_file():
        raise FileNotFoundError(f"{original}: no such model")
    if seconds <= 0:
        raise ValueError(f"seconds is {seconds}, expected more than 0")
    sessions = (load(fused, threads=threads), default_session(original, threads))
    feeds = _feeds(onnx.load(str(original), load_external_data=False), sessions[1], inputs)
    bound = [bound_run(session, feeds) for session in sessions]
    for run in bound:
        warm_up(run)
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    turns = 0
    while turns < MINIMUM_TURNS or time.perf_counter() < end:
        for run, taken in zip(bound, times, strict=True):
            taken += turn(run)
        turns += 1
    first, second = (Timing(statistics.median(taken), min(taken), len(taken)) for taken in times)
    return BenchResult(first, second, threads, {name: value.shape for name, value in feeds.items()})


def _feeds(
    model: onnx.ModelProto, session: ort.InferenceSession, inputs: Mapping[str, Array] | None
) -> dict[str, Array]:
    """The given inputs, or inputs of a typical size, or of the first size that the original takes."""
    if inputs is not None:
        return model_inputs.check(inputs, model)
    names = [output.name for output in session.get_outputs()]
    typical = model_inputs.assign_sizes(model, *TYPICAL_SIZES)
    choices = model_inputs.size_choices(model)
    sizes, reason = model_inputs.first_fitting(
        model,
        lambda feeds: ort_values.run(session, names, feeds),
        (typical, *choices.large, *choices.small, *choices.fixed),
        seed=0,
        masks=False,
    )
    if sizes is None:
        raise model_inputs.InputError(f"no generated inputs fit the original model; give some with --inputs: {reason}")
    return model_inputs.generate(model, sizes=sizes, seed=0, masks=False)


def feeds_for(original: Path, inputs: Mapping[str, Array] | None, threads: int | None) -> dict[str, Array]:
    """The given inputs, or inputs of a typical size, or of the first size that the model takes. Raises InputError."""
    model = onnx.load(str(original), load_external_data=False)
    return _feeds(model, default_session(original, threads), inputs)


def default_session(path: Path, threads: int | None) -> ort.InferenceSession:
    """The model as a user would run it."""
    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def bound_run(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> Callable[[], None]:
    """One run of the session, without the copies of inputs and outputs that only Python's plain `run` makes.

    Inputs begin at a cache line, as those do that a node gets from another one.
    """
    binding = session.io_binding()
    values = {name: ort_values.to_ort(aligned(value)) for name, value in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    return lambda held=values: session.run_with_iobinding(binding)  # `held`: the binding has addresses only


def warm_up(run: Callable[[], object]) -> None:
    """Runs until allocations and packing have settled: two times at least."""
    end = time.perf_counter() + WARM_UP_SECONDS
    run()
    run()
    while time.perf_counter() < end:
        run()


def turn(run: Callable[[], object]) -> list[float]:
    """Milliseconds of each counted run of one turn; at least one."""
    time.sleep(PAUSE_SECONDS)
    run()
    taken: list[float] = []
    end = time.perf_counter() + TURN_SECONDS
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken
