"""How much of onnx's own backend node tests fuses: python -m benchmarks.coverage [--quick] [--json FILE] [--only WORD]

In: the cases of the installed onnx wheel (`onnx.backend.test.case.node`), as the operator itself ("op") and decomposed
into standard operators (the `_expanded` twins). Each is optimised, run in a stock ONNX Runtime session and compared
with the wheel's own data at the wheel's tolerance. Out: one line per family and form, and the reason of every case that
is not fused or not right. "fused" means one region that computes and nothing else that does: views, copies (in regions
of their own, or not) and shape arithmetic may stay. "loaded" means that ONNX Runtime opens the case, as it is or as we
wrote it.

--json writes `{"case", "unit", "ours", "peers": {name: value}, "floor", "error"}`: percent of the loaded cases that are
fused and right; the peer is ONNX Runtime's own optimiser at its highest level; `floor` is 100, what can be reached;
`error` is the largest difference to the wheel's data, relative to the largest element of the output,
among the cases that are right.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from whole_models import Row

from fuser.cuts import is_plumbing
from fuser.lift import is_generator, is_view
from fuser.shapes import infer
from runtime import ort_values
from runtime.compile import CompileError, optimize
from runtime.options import Options
from runtime.session import DOMAIN, load

Array = npt.NDArray[Any]

FAMILIES = {  # by the name of the operator
    "Attention": r"test_attention_.*",
    "FlexAttention": r"test_flexattention.*",
    "LinearAttention": r"test_linear_attention_.*",
    "LayerNormalization": r"test_layer_normalization_.*",
    "RMSNormalization": r"test_rms_normalization_.*",
    "RotaryEmbedding": r"test_rotary_embedding.*",
    "Gelu": r"test_gelu_.*",
    "Swish": r"test_swish.*",
    "SwiGLU": r"test_swiglu.*",
    "GroupNormalization": r"test_group_normalization_.*",
    "Softmax": r"test_softmax_.*",
    "LogSoftmax": r"test_logsoftmax_.*",
}
FORMS = ("twin", "op")
QUICK = 4  # cases of each family and form
SEED = 20
SPACING = 2.0**-6  # two roundings to bfloat16: the wheel rounds after every node, and its tolerance is below one
COPIES = frozenset({"Identity", "Cast", "CastLike"})  # besides views; a cast counts only where it changes nothing
WRITERS = frozenset({"ScatterND", "ScatterElements", "TensorScatter"})  # they place elements, as a cache update does


@dataclass(frozen=True)
class Case:
    """One test of the wheel: the model with its inputs and outputs."""

    name: str
    family: str
    form: str
    model: onnx.ModelProto
    feeds: tuple[Array, ...]
    wanted: tuple[Array, ...]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What became of a case: the regions' kinds, the computing nodes that are `left` outside, the misses."""

    case: Case
    loaded: bool
    regions: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    problem: str = ""
    error: float = float("inf")
    peer: bool | None = None  # None: not asked

    @property
    def fused(self) -> bool:
        """Whether one region covers all that the case computes."""
        return len(self.regions) == 1 and not self.left

    @property
    def right(self) -> bool:
        """Whether every output equals the wheel's."""
        return not self.problem


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} cases of each family and form, drawn by a seed")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append", help="these families only")
    parser.add_argument("--form", choices=FORMS, help="this form only")
    parser.add_argument("--no-peer", action="store_true", help="do not ask ONNX Runtime's optimiser")
    arguments = parser.parse_args()
    cases = [case for case in wheel_cases(tuple(arguments.family or FAMILIES)) if arguments.only in case.name]
    cases = [case for case in cases if arguments.form in (None, case.form)]
    groups = {
        (family, form): [case for case in cases if (case.family, case.form) == (family, form)]
        for family in FAMILIES
        for form in FORMS
    }
    rows: list[Row] = []
    options = Options.from_environment()
    print(f"{'family':20} {'form':5} {'cases':>6} {'loaded':>7} {'fused':>6} {'right':>6} {'onnxruntime':>12}")
    with tempfile.TemporaryDirectory(prefix="tilefuse-coverage-") as folder:
        for (family, form), group in groups.items():
            if arguments.quick:
                group = random.Random(SEED).sample(group, min(QUICK, len(group)))
            if not group:
                continue
            outcomes = [measure(case, Path(folder), options) for case in group]
            if not arguments.no_peer:
                outcomes = [replace(outcome, peer=fused_by_peer(outcome.case, Path(folder))) for outcome in outcomes]
            print(table_line(family, form, outcomes), flush=True)
            for line in explanations(outcomes):
                print(line, flush=True)
            rows.append(row_of(family, form, outcomes))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if not rows:
        sys.exit("no case has that name")


def wheel_cases(families: Sequence[str]) -> Iterator[Case]:
    """The wheel's cases of the families, in its order; those of a model with tensors for inputs and outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the wheel makes its data with numpy, overflows included
        tests = collect_testcases(None)
    for test in tests:
        family = next((name for name in families if re.fullmatch(FAMILIES[name], test.name)), None)
        if family is None or test.model is None or not test.data_sets:
            continue
        twin = "_expanded" in test.name
        if not twin and [node.op_type for node in test.model.graph.node] != [family]:
            continue
        inputs, outputs = test.data_sets[0]
        yield Case(
            test.name.removeprefix("test_"),
            family,
            "twin" if twin else "op",
            test.model,
            tuple(map(array_of, inputs)),
            tuple(map(array_of, outputs)),
            test.rtol,
            test.atol,
        )


def array_of(value: Any) -> Array:
    """A tensor of the wheel, which has them as arrays or as protobufs."""
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def measure(case: Case, folder: Path, options: Options) -> Outcome:
    """Optimise, run and compare one case."""
    original, fused = folder / "case.onnx", folder / "case.fused.onnx"
    onnx.save(case.model, original)
    loaded = opens(original)
    try:
        report = optimize(original, fused, options=options, progress=lambda stage: None, verify=False)
    except CompileError as error:
        return Outcome(case, loaded, problem=f"not optimised: {str(error).splitlines()[0]}")
    regions = tuple(computing_regions(fused, {region.op: region.kind for region in report.regions}))
    reasons = tuple(dict.fromkeys(f"{miss.kind}: {miss.reason}" for miss in report.misses))
    outcome = Outcome(case, loaded, regions, tuple(computing(fused)), reasons)
    try:
        results = run(fused, case)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base but Exception
        return replace(outcome, problem=f"does not run: {str(error).splitlines()[0]}")
    if not loaded:
        outcome = replace(outcome, loaded=True)
    worst = max((relative_error(got, want) for got, want in zip(results, case.wanted, strict=True)), default=0.0)
    return replace(outcome, error=worst, problem=difference(case, results))


def opens(path: Path) -> bool:
    """Whether a stock session opens the model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - ONNX Runtime's exceptions share no base but Exception
        return False
    return True


def run(path: Path, case: Case) -> list[Array]:
    """The fused model's outputs, with its kernels where it has any."""
    inputs, outputs = ([value.name for value in side] for side in (case.model.graph.input, case.model.graph.output))
    return ort_values.run(load(path), outputs, dict(zip(inputs, case.feeds, strict=True)))


def difference(case: Case, results: Sequence[Array]) -> str:
    """The first output that is not the wheel's; empty when all are."""
    for value, got, want in zip(case.model.graph.output, results, case.wanted, strict=True):
        if got.shape != want.shape:
            return f"{value.name} has shape {got.shape}, expected {want.shape}"
        if str(got.dtype) != str(want.dtype):
            return f"{value.name} is {got.dtype}, expected {want.dtype}"
        left, right = got.astype(np.float64), want.astype(np.float64)
        rtol = max(case.rtol, SPACING) if str(want.dtype) == "bfloat16" else case.rtol
        if not np.allclose(left, right, rtol=rtol, atol=case.atol, equal_nan=True):
            worst = np.nanmax(np.abs(left - right)) if np.isfinite(left - right).any() else float("nan")
            return f"{value.name} differs by up to {worst:.2e}"
    return ""


def relative_error(got: Array, want: Array) -> float:
    """The largest difference, relative to the largest finite element; infinite where the two are not finite alike."""
    if got.shape != want.shape:
        return float("inf")
    left, right = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(right)
    if not np.array_equal(finite, np.isfinite(left)) or not np.array_equal(
        left[~finite], right[~finite], equal_nan=True
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.max(np.abs(left[finite] - right[finite])) / max(np.max(np.abs(right[finite])), 1e-30))


def computing(path: Path) -> Iterator[str]:
    """The operators outside of fused nodes that compute: not views, copies, cache writes or shape arithmetic."""
    model = ir.load(path)
    shapes = infer(model)
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN or is_view(node) or is_generator(node) or is_plumbing(node, shapes):
            continue
        source = node.inputs[0] if node.inputs else None
        if node.op_type in COPIES and source and shapes.dtype(source) == shapes.dtype(node.outputs[0]):
            continue
        if node.op_type not in WRITERS:
            yield node.op_type


def computing_regions(path: Path, kinds: Mapping[str, str]) -> Iterator[str]:
    """The kinds of the fused nodes whose bodies do more than move elements; `kinds` are by operator."""
    model = onnx.load(path, load_external_data=False)
    bodies = {function.name: function.node for function in model.functions}
    for node in model.graph.node:
        if node.domain == DOMAIN and not all(moves(inner) for inner in bodies[node.op_type]):
            yield kinds[node.op_type]


def moves(node: onnx.NodeProto) -> bool:
    """Whether a node of a function body only moves elements, or says where to."""
    return is_view(ir.Node(node.domain, node.op_type, ())) or node.op_type in ("Shape", "Constant", "Identity")


def fused_by_peer(case: Case, folder: Path) -> bool:
    """Whether ONNX Runtime's optimiser makes one computing node of a twin. An operator is one to begin with."""
    if case.form == "op":
        return opens(folder_file(case, folder))
    original, optimised = folder_file(case, folder), folder / "peer.onnx"
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(optimised)
    try:
        ort.InferenceSession(str(original), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - ONNX Runtime's exceptions share no base but Exception
        return False
    left = [node for node in onnx.load(optimised).graph.node if node.op_type not in ("Constant", "Identity")]
    return sum(not is_view(ir.Node(node.domain, node.op_type, ())) for node in left) == 1


def folder_file(case: Case, folder: Path) -> Path:
    """The case as a file."""
    path = folder / "case.onnx"
    onnx.save(case.model, path)
    return path


def asked(outcomes: Sequence[Outcome]) -> bool:
    """Whether the peer was tried on every case."""
    return all(outcome.peer is not None for outcome in outcomes)


def table_line(family: str, form: str, outcomes: Sequence[Outcome]) -> str:
    """The counts of one family and form."""
    loaded = [outcome for outcome in outcomes if outcome.loaded]
    fused = sum(outcome.fused for outcome in loaded)
    right = sum(outcome.right for outcome in loaded)
    peer = sum(map(bool, (outcome.peer for outcome in loaded))) if asked(loaded) else "-"
    return f"{family:20} {form:5} {len(outcomes):6} {len(loaded):7} {fused:6} {right:6} {peer:12}"


def explanations(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line per case that was not fused or is not right, with what stands in the way."""
    for outcome in outcomes:
        if outcome.loaded and outcome.fused and outcome.right:
            continue
        state = "wrong" if outcome.loaded and not outcome.right else "unfused" if outcome.loaded else "not loaded"
        parts = [outcome.problem] if outcome.problem else []
        if outcome.loaded and not outcome.fused:
            parts.append(f"regions: {counted(outcome.regions) or 'none'}")
            parts += [f"left: {counted(outcome.left)}"] if outcome.left else []
            parts += outcome.reasons
        yield f"    {state}: {outcome.case.name}: {'; '.join(parts)}"


def counted(names: Sequence[str]) -> str:
    """Names with how often each occurs."""
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in Counter(names).items())


def row_of(family: str, form: str, outcomes: Sequence[Outcome]) -> Row:
    """The row of the JSON list."""
    loaded = [outcome for outcome in outcomes if outcome.loaded]
    count = max(len(loaded), 1)
    good = sum(outcome.fused and outcome.right for outcome in loaded)
    peer = 100.0 * sum(map(bool, (outcome.peer for outcome in loaded))) / count
    peers = {"onnxruntime": peer} if asked(loaded) else {}
    error = max((outcome.error for outcome in loaded if outcome.right), default=0.0)
    return Row(f"{family}, {form}", "% fused and right", 100.0 * good / count, peers, 100.0, error)


if __name__ == "__main__":
    main()
