"""Times each region of a fused model by itself: its kernel against its function body, on the model's own values.

In: the fused model with its library, inputs (given or generated), threads, seconds per region. Out: a `RegionTiming`
for every distinct region, with what the cost model predicted when it was fused. The body runs as a model of its own
under ONNX Runtime's default optimisations; the inputs of both are what the fused model computes for them.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from runtime import ort_values
from runtime.bench import Array, bound_run, default_session, feeds_for, turn, warm_up
from runtime.session import load

DOMAIN = "tilefuse"
PREDICTED = "tilefuse.predicted"
LABEL = "tilefuse.label"


@dataclass(frozen=True)
class RegionTiming:
    """Medians of one region in microseconds; `times` nodes of the model are this region with these shapes.

    Predictions are for batch 1 and 128 for every other symbolic dim; None for models fused without them.
    """

    op: str
    label: str
    times: int
    fused_us: float
    unfused_us: float
    predicted_fused_us: float | None
    predicted_unfused_us: float | None

    @property
    def ratio(self) -> float:
        """How many times as fast as its nodes the kernel is."""
        return self.unfused_us / self.fused_us

    def to_json(self) -> dict[str, object]:
        """The fields and `ratio`."""
        return {
            "op": self.op, "label": self.label, "times": self.times,
            "fused_us": self.fused_us, "unfused_us": self.unfused_us, "ratio": self.ratio,
            "predicted_fused_us": self.predicted_fused_us, "predicted_unfused_us": self.predicted_unfused_us,
        }  # fmt: skip


@dataclass(frozen=True)
class _Values:
    """Inputs of regions, and their dims as ONNX Runtime knows them when it loads the model: a number, or a name."""

    arrays: Mapping[str, Array]
    dims: Mapping[str, tuple[int | str, ...]]


def read_timings(path: Path) -> dict[str, tuple[float, float]]:
    """Seconds by operator, fused and unfused, from the JSON of `bench --per-region --json`.

    ValueError when the file is something else, OSError as it comes. Of an operator with several shapes the first one's.
    """
    found: dict[str, tuple[float, float]] = {}
    try:
        for entry in json.loads(path.read_text())["regions"]:
            found.setdefault(str(entry["op"]), (float(entry["fused_us"]) * 1e-6, float(entry["unfused_us"]) * 1e-6))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected what `tilefuse bench --per-region --json` prints ({error})") from error
    return found


def bench_regions(
    fused: Path,
    original: Path,
    *,
    inputs: Mapping[str, Array] | None = None,
    threads: int | None = 2,
    seconds: float = 0.5,
) -> tuple[RegionTiming, ...]:
    """Times every distinct region for about `seconds`, in the order of the model.

    Regions are distinct when their operators or the shapes of their inputs differ. Raises FileNotFoundError if a file
    is missing, InputError if inputs do not suit the model, ValueError if `seconds` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"seconds is {seconds}, expected more than 0")
    model = onnx.load(str(fused))
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    feeds = feeds_for(original, inputs, threads)
    values = _values(model, fused, nodes, feeds, threads)
    shapes = {name: value.shape for name, value in values.arrays.items()}
    groups: dict[tuple[str, tuple[tuple[int, ...], ...]], list[onnx.NodeProto]] = {}
    for node in nodes:
        groups.setdefault((node.op_type, tuple(shapes[name] for name in node.input if name)), []).append(node)
    return tuple(_time(model, fused, group, values, threads, seconds) for group in groups.values())


def _values(
    model: onnx.ModelProto,
    fused: Path,
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, Array],
    threads: int | None,
) -> "_Values":
    """What the fused model computes for every input of the regions; initializers as they are."""
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer} | dict(feeds)
    wanted = sorted({name for node in nodes for name in node.input if name} - set(known))
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    outputs = {value.name for value in model.graph.output}
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in outputs)
    with tempfile.TemporaryDirectory() as folder:
        session = _session(probe, fused.with_suffix(".so"), Path(folder), threads)
        found = ort_values.run(session, wanted, dict(feeds)) if wanted else []
    arrays = known | dict(zip(wanted, found, strict=True))
    dims = {
        value.name: tuple(dim or f"{value.name}_{axis}" for axis, dim in enumerate(value.shape))
        for value in (*session.get_inputs(), *session.get_outputs())
    }
    return _Values(arrays, dims)


def _session(model: onnx.ModelProto, library: Path, folder: Path, threads: int | None) -> ort.InferenceSession:
    path = folder / "part.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="part.data")
    shutil.copyfile(library, path.with_suffix(".so"))
    return load(path, threads=threads)


def _time(
    model: onnx.ModelProto,
    fused: Path,
    group: Sequence[onnx.NodeProto],
    values: _Values,
    threads: int | None,
    seconds: float,
) -> RegionTiming:
    node = group[0]
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    feeds = {name: values.arrays[name] for name in node.input if name and name not in constants}
    part = _part(
        model, node, feeds, values.dims, [constants[name] for name in dict.fromkeys(node.input) if name in constants]
    )
    with tempfile.TemporaryDirectory() as folder:
        kernel = _session(part, fused.with_suffix(".so"), Path(folder), threads)
        body = default_session(Path(folder) / "part.onnx", threads)
        runs = [bound_run(session, feeds) for session in (kernel, body)]
        for run in runs:
            warm_up(run)
        taken: tuple[list[float], list[float]] = ([], [])
        end = time.perf_counter() + seconds
        while not taken[0] or time.perf_counter() < end:
            for run, times in zip(runs, taken, strict=True):
                times += turn(run)
    notes = {entry.key: entry.value for entry in node.metadata_props}
    predicted = [float(part) * 1e6 for part in notes.get(PREDICTED, "").split()] or [None, None]
    fused_us, unfused_us = (statistics.median(times) * 1e3 for times in taken)
    return RegionTiming(
        node.op_type, notes.get(LABEL, ""), len(group), fused_us, unfused_us, predicted[0], predicted[1]
    )


def _part(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    feeds: Mapping[str, Array],
    dims: Mapping[str, tuple[int | str, ...]],
    weights: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    """A model of one fused node: its weights as initializers, everything else as inputs.

    Dims are numbers only where the model fixes them: ONNX Runtime would compute what hangs on dims alone, such as a
    mask by position, when it loads the model, and not when that runs.
    """
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), dims[name])
        for name, value in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "region", inputs, outputs, initializer=weights)
    functions = [function for function in model.functions if function.name == node.op_type]
    return helper.make_model(graph, opset_imports=model.opset_import, functions=functions, ir_version=model.ir_version)
