"""Checks that a fused model computes what the original does, and names the region that does not.

In: the two model files (the fused one with its library beside it) and inputs, given or generated. Out: a `Verdict`.
The original runs without any of ONNX Runtime's optimisations, because these miscompile some graphs. Where ONNX Runtime
lacks an operator (FlexAttention), its definition takes its place; where there are no kernels (bfloat16), the original
is evaluated in double precision and rounded after every node instead.
Inputs are tried at two sizes of every symbolic dim, with masks that have holes and hide whole rows, flags on and off,
and scaled up, as far as the original does not overflow.

Where the fused model leaves out padding, the original's is hidden: it is compared at the tokens.

Where a model rounds to levels inside, one flipped level changes all that follows: such models are judged region by
region, each against its own body on the same inputs, and their outputs by how far rounding moves the original's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from runtime import inputs as model_inputs
from runtime import ort_values
from runtime.body_calls import Call, calls_in_bodies, needs_of, nodes_with_kernels
from runtime.compare import (
    UNIT_ROUNDOFF,
    OutputCost,
    OutputError,
    Truth,
    compare,
    compare_region,
    compare_signal,
    cost_of,
    interface_change,
)
from runtime.oracle import OracleError, all_nodes, has_half, permits
from runtime.original import LOAD_ERRORS, Original, quiet_options
from runtime.session import DOMAIN, load
from runtime.unpadded import hidden_padding, padding_mask, with_first_token

Array = npt.NDArray[Any]

PRECISION, BF16 = "tilefuse.precision", "bf16"  # in the metadata of models whose operands were rounded on demand
NO_MEANING = "not compared: shapes do not fit by the ONNX standard, though ONNX Runtime takes them"
MOVES = 4  # samples of what a rounding of the inputs does
QUANTIZING = frozenset(
    """DynamicQuantizeLinear QuantizeLinear QLinearConv QLinearMatMul QLinearAdd QLinearMul QLinearSigmoid QGemm
    QLinearLeakyRelu QLinearSoftmax MatMulInteger ConvInteger MatMulIntegerToFloat DynamicQuantizeMatMul
    QAttention""".split()  # noqa: SIM905
)


class VerifyError(Exception):
    """The models could not be compared at all; the message says why."""


class FusedError(VerifyError):
    """The fused model fails on inputs, `feeds`, that the original accepts."""

    def __init__(self, message: str, feeds: Mapping[str, Array]) -> None:
        super().__init__(message)
        self.feeds = feeds


@dataclass(frozen=True)
class RegionError:
    """A fused node whose kernel disagrees with its function body on the same inputs.

    `inputs`, `expected` (the body's) and `actual` (the kernel's) have the values by name; weights are left out.
    """

    node: str
    op: str
    outputs: tuple[OutputError, ...]
    inputs: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False, compare=False)
    expected: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False, compare=False)
    actual: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False, compare=False)

    def to_json(self) -> dict[str, object]:
        """Keys `node`, `op` and `outputs`."""
        return {"node": self.node, "op": self.op, "outputs": [output.to_json() for output in self.outputs]}


@dataclass(frozen=True)
class Verdict:
    """The outcome: `outputs` holds the worst case of each output, `cases` says what was run.

    `mismatch` describes the first wrong output, `feeds` the inputs that show it, `regions` the fused nodes found wrong
    when there is one. `unmeasured` says why the original's own rounding error is not known (a fixed allowance was used
    then), else it is None. `costs` are of the floating-point outputs of a model whose operands are rounded (to
    bfloat16, or to bytes where it permits that), at the worst of the cases that were not scaled up.
    """

    ok: bool
    outputs: tuple[OutputError, ...]
    cases: tuple[str, ...]
    mismatch: str | None = None
    regions: tuple[RegionError, ...] = ()
    unmeasured: str | None = None
    feeds: Mapping[str, Array] | None = field(default=None, repr=False, compare=False)
    costs: tuple[OutputCost, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Keys `ok`, `outputs` (see `OutputError`), `cases`, `mismatch`, `regions`, `unmeasured` and `costs`."""
        return {
            "ok": self.ok,
            "outputs": [output.to_json() for output in self.outputs],
            "cases": list(self.cases),
            "mismatch": self.mismatch,
            "regions": [region.to_json() for region in self.regions],
            "unmeasured": self.unmeasured,
            "costs": [asdict(cost) for cost in self.costs],
        }


@dataclass(frozen=True)
class _Case:
    """Inputs to run, and the words for them."""

    label: str
    feeds: Mapping[str, Array]
    scaled: bool = False


def verify(original: Path, fused: Path, *, inputs: Mapping[str, Array] | None = None, seed: int = 0) -> Verdict:
    """Compares the models on `inputs`, or on generated ones.

    Raises FileNotFoundError if a file is missing, LoadError if the library does not fit, InputError if inputs do not
    suit the model, VerifyError if the original does not run at any size tried or the fused model fails where it runs.
    """
    if not original.is_file():
        raise FileNotFoundError(f"{original}: no such model")
    model = onnx.load(str(original), load_external_data=False)
    fused_model = onnx.load(str(fused), load_external_data=False)
    mask = padding_mask(fused_model)
    reference = _reference(original, model, mask)
    session = _fused_session(fused, reference)
    changed = interface_change(model, fused_model)
    if changed:
        return Verdict(False, (), (), mismatch=changed)
    quantized, narrow, costly = quantizes(model), is_narrow(fused_model), is_narrow(fused_model) or permits(model)
    costs: dict[str, OutputCost] = {}
    given = _cases(model, reference, session, inputs, seed)
    cases = (replace(case, feeds=with_first_token(case.feeds, mask)) for case in given)
    names = [output.name for output in model.graph.output]
    worst: dict[str, OutputError] = {}
    labels: list[str] = []
    unmeasured: str | None = None
    measured = False  # whether double precision could be had for some case: then it knows all operators
    for case in cases:
        labels.append(case.label)
        doubtful = measured and inputs is None
        expected = _run(lambda feeds: reference.run(names, feeds), names, case, "the original model")
        try:
            actual = _run(lambda feeds: ort_values.run(session, names, feeds), names, case, "the fused model")
        except VerifyError as error:
            if doubtful and not reference.defines(case.feeds, names):
                labels[-1] = f"{case.label} ({NO_MEANING})"
                continue
            raise FusedError(str(error), case.feeds) from error
        accused: list[RegionError] = []
        if quantized or costly:
            accused, unmeasured = _accused(fused, case.feeds, unmeasured, distinct=not quantized)
        if costly and not case.scaled:
            costs = _dearer(costs, expected, actual)
        found, reason, off = _outputs(reference, case.feeds, expected, actual, quantized=quantized, narrow=narrow)
        if off and doubtful and not reference.defines(case.feeds, names):
            labels[-1] = f"{case.label} ({NO_MEANING})"
            continue
        measured = measured or (reason is None and not quantized)
        unmeasured = unmeasured or reason
        worst |= {output.name: _worse(worst.get(output.name), output) for output in found}
        wrong = next((output for output in found if output.fault), None)
        if wrong or accused:
            mismatch = _mismatch(case, wrong or next(output for output in accused[0].outputs if output.fault))
            regions = tuple(accused or blame(fused, case.feeds)[0])
            return Verdict(False, tuple(worst.values()), tuple(labels), mismatch, regions, unmeasured, case.feeds)
    return Verdict(True, tuple(worst.values()), tuple(labels), unmeasured=unmeasured, costs=tuple(costs.values()))


def _outputs(
    original: Original,
    feeds: Mapping[str, Array],
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    *,
    quantized: bool,
    narrow: bool,
) -> tuple[list[OutputError], str | None, bool]:
    """Every output judged, why the original's error could not be measured, and whether something is off without it."""

    def signals(own: Mapping[str, float]) -> list[OutputError]:
        return [compare_signal(name, expected[name], actual[name], own=own.get(name)) for name in expected]

    if quantized:
        own, reason = original.drift(feeds, expected)
        return signals(own), reason, False
    found, reason = _judged(original, feeds, expected, actual, narrow=narrow)
    if reason is None:
        return found, None, False
    off = any(output.fault for output in found)
    return signals({}) if narrow else found, reason, off  # nor is known what the rounding that was asked for does


def _mismatch(case: _Case, output: OutputError) -> str:
    return f"output {output.name!r} at {case.label}: {output.fault}"


def is_narrow(fused: onnx.ModelProto) -> bool:
    """Whether operands of the fused model were rounded to bfloat16 on demand."""
    return any(entry.key == PRECISION and entry.value == BF16 for entry in fused.metadata_props)


def _dearer(
    costs: Mapping[str, OutputCost], expected: Mapping[str, Array], actual: Mapping[str, Array]
) -> dict[str, OutputCost]:
    """`costs`, or those of these outputs where they are higher."""
    made = (cost_of(name, value, actual[name]) for name, value in expected.items() if value.dtype in UNIT_ROUNDOFF)
    return {cost.name: max(cost, costs.get(cost.name, cost), key=lambda each: each.drift) for cost in made}


def _accused(
    fused: Path, feeds: Mapping[str, Array], unmeasured: str | None, *, distinct: bool
) -> tuple[list[RegionError], str | None]:
    accused, unseen = blame(fused, feeds, distinct=distinct)
    return accused, unmeasured or unseen


def _fused_session(fused: Path, reference: Original) -> ort.InferenceSession:
    """The fused model; VerifyError, with what ONNX Runtime says of the original, when it takes neither."""
    try:
        return load(fused)
    except LOAD_ERRORS as error:
        which = "the original" if reference.refusal else "the fused model"
        said = reference.refusal or str(error).splitlines()[0]
        raise VerifyError(f"ONNX Runtime does not load {which}: {said}") from error


def _reference(original: Path, model: onnx.ModelProto, mask: str | None) -> Original:
    """The original in the file; its padding is hidden if the fused model leaves it out by `mask`."""
    if mask is None:
        return Original.of(model, str(original), original.parent)
    hidden = hidden_padding(model, mask)
    return Original.of(hidden, hidden.SerializeToString(), original.parent)


def quantizes(model: onnx.ModelProto) -> bool:
    """Whether some node of the model, of its functions or subgraphs rounds values to levels or sums bytes."""
    return any(node.op_type in QUANTIZING for node in all_nodes(model))


def blame(
    fused: Path, feeds: Mapping[str, Array], *, distinct: bool = False
) -> tuple[list[RegionError], str | None]:  # fmt: skip
    """The fused nodes whose kernels disagree with their function bodies on the values that `feeds` lead to.

    Every node is judged on the values that the kernels before it gave, so that one wrong node does not accuse those
    after it; nodes in the bodies of If, Loop and Scan by their first calls. The second result says why these could not
    be seen, None when they were. `distinct`: only the first node of every kernel. Raises what `verify` raises.
    """
    model = onnx.load(str(fused), load_external_data=False)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes, outer = [node for node in model.graph.node if node.domain == DOMAIN], nodes_with_kernels(model)
    if distinct:
        nodes = list({node.op_type: node for node in reversed(nodes)}.values())
    inner = {name for node in outer for name in needs_of(node)}
    wanted = {name for node in nodes for name in (*node.input, *node.output) if name}
    wanted |= inner & {name for node in model.graph.node for name in node.output}
    shown = sorted(wanted - weights.keys() - feeds.keys())
    values = {**expose(fused, shown, feeds), **feeds}

    def constants(names: Iterable[str]) -> dict[str, Array]:
        return {name: numpy_helper.to_array(weights[name], str(fused.parent)) for name in names if name in weights}

    calls: list[Call] = []
    unseen: str | None = None
    try:
        calls = calls_in_bodies(model, fused.with_suffix(".so"), values | constants(inner)) if outer else []
    except OracleError as error:
        unseen = f"kernels in bodies of If, Loop and Scan are judged by the model's outputs alone: {error}"
    errors: list[RegionError] = []
    bodies = {function.name: function for function in model.functions if function.domain == DOMAIN}
    for call in chain((Call(node, values | constants(node.input)) for node in nodes), calls):
        body = bodies.get(call.node.op_type)
        rounds = body is not None and any(inner.op_type in QUANTIZING for inner in body.node)
        error = _judge_node(model, call.node, call.values, rounds=rounds)
        if any(output.fault for output in error.outputs):
            errors.append(error)
    return errors, unseen


def _judge_node(
    model: onnx.ModelProto, node: onnx.NodeProto, values: Mapping[str, Array], *, rounds: bool
) -> RegionError:
    """Runs the body of one fused node and compares its outputs with those in `values`; `rounds`: to levels, inside."""
    feeds = {name: values[name] for name in node.input if name}
    names = [name for name in node.output if name]
    body = _body(model, node, values)
    original = Original.of(body, body.SerializeToString(), Path())
    expected = dict(zip(names, original.run(names, feeds), strict=True))
    outputs, _ = _judged(original, feeds, expected, values, rounds=rounds)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {name: value for name, value in feeds.items() if name not in weights}
    actual = {name: values[name] for name in names}
    return RegionError(node.name, node.op_type, tuple(outputs), inputs=inputs, expected=expected, actual=actual)


def _judged(
    original: Original,
    feeds: Mapping[str, Array],
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    *,
    rounds: bool = False,
    narrow: bool = False,
) -> tuple[list[OutputError], str | None]:
    """Every output of `expected` against `actual`, and why the original's error could not be measured, if so.

    `rounds`: to levels, inside; `narrow`: operands to bfloat16, in `actual` alone. Only where something looks wrong is
    it asked what a rounding of the inputs does.
    """
    judge = compare_region if rounds else compare

    def judged(truth: Mapping[str, Truth], before: Sequence[OutputError] = ()) -> list[OutputError]:
        """Every output by `truth`, or as `before` where that found no fault."""
        right = {output.name: output for output in before if output.fault is None}
        return [
            right.get(name) or judge(name, expected[name], actual[name], truth=truth.get(name)) for name in expected
        ]

    truth, reason = original.truth(feeds, expected, plausible=not rounds, narrow=narrow)
    found = judged(truth)
    if any(output.fault for output in found):
        decided = original.decisions(feeds)
        if decided:
            truth, reason = original.truth(feeds, expected, plausible=not rounds, narrow=narrow, decided=decided)
            found = judged(truth, found)
    if not truth or not any(output.fault for output in found):
        return found, reason
    runs = [original.moved(feeds, list(expected), seed) for seed in range(MOVES)]
    truth = {
        name: replace(value, others=tuple(run[name] for run in runs if run[name].shape == value.value.shape))
        for name, value in truth.items()
    }
    return judged(truth, found), reason


def _body(model: onnx.ModelProto, node: onnx.NodeProto, values: Mapping[str, Array]) -> onnx.ModelProto:
    """A model of `node` alone, which runs its function body where no library is registered."""

    def describe(name: str) -> onnx.ValueInfoProto:
        value = values[name]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    read = [describe(name) for name in dict.fromkeys(node.input) if name]
    written = [describe(name) for name in node.output if name]
    return helper.make_model(
        helper.make_graph([node], "region", read, written),
        opset_imports=model.opset_import,
        functions=model.functions,
        ir_version=model.ir_version,
    )


def expose(fused: Path, names: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Runs the fused model with inner values as outputs; its weights stay where they are."""
    if not names:
        return {}
    exposed = onnx.load(str(fused), load_external_data=False)
    have = {output.name for output in exposed.graph.output}
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = quiet_options()
    options.register_custom_ops_library(str(fused.resolve().with_suffix(".so")))
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(fused.resolve().parent)
    )
    session = ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, ort_values.run(session, names, feeds), strict=True))


def _cases(
    model: onnx.ModelProto,
    reference: Original,
    fused: ort.InferenceSession,
    inputs: Mapping[str, Array] | None,
    seed: int,
) -> Iterator[_Case]:
    if inputs is not None:
        yield _Case("the given inputs", model_inputs.check(inputs, model))
        return
    choices = model_inputs.size_choices(model)
    names = [output.name for output in model.graph.output]
    trial = reference.run if reference.session else partial(ort_values.run, fused)  # evaluating it is slow
    found: list[tuple[Mapping[str, int], bool | None]] = []
    failure = ""
    for ladder in (choices.small, choices.large, choices.fixed):
        if ladder is choices.fixed and found:
            break
        for flag in model_inputs.flag_choices(model):
            sizes, reason = model_inputs.first_fitting(
                model, lambda feeds: trial(names, feeds), ladder, seed=seed, flag=flag
            )
            failure = reason or failure
            if sizes is not None:
                found.append((sizes, flag))
    if not found:
        raise VerifyError(
            f"no inputs could be generated that the original model accepts; give some with --inputs. At the last "
            f"of the sizes tried, ONNX Runtime said: {failure}"
        )
    for number, (sizes, flag) in enumerate(found):
        yield _Case(_describe(sizes, flag), model_inputs.generate(model, sizes=sizes, seed=seed + number, flag=flag))
    floats = any(entry.dtype in UNIT_ROUNDOFF for entry in model_inputs.read(model))
    if floats:
        sizes, flag = found[0]
        if reference.session is None or has_half(model):  # overflow of 16 bits is told apart, see `Truth.unbounded`
            scale = model_inputs.LARGE_SCALES[0]
            large = scale, model_inputs.generate(model, sizes=sizes, seed=seed + len(found), scale=scale, flag=flag)
        else:
            large = model_inputs.generate_large(
                model, partial(reference.run, names), sizes=sizes, seed=seed + len(found), flag=flag
            )
        if large is not None:
            yield _Case(f"{_describe(sizes, flag)}, scaled by {large[0]:g}", large[1], scaled=True)


def _describe(sizes: Mapping[str, int], flag: bool | None) -> str:
    return model_inputs.describe(sizes) + ("" if flag is None else f", flags {str(flag).lower()}")


def _run(
    run: Callable[[Mapping[str, Array]], list[Array]], names: Sequence[str], case: _Case, what: str
) -> dict[str, Array]:
    try:
        values = run(case.feeds)
    except Exception as error:
        raise VerifyError(f"{what} fails at {case.label}: {error}") from error
    return dict(zip(names, values, strict=True))


def _worse(a: OutputError | None, b: OutputError) -> OutputError:
    """Of two cases of one output the one to show: a fault before none, then the larger relative error."""
    if a is None or (b.fault and not a.fault):
        return b
    return a if a.fault or a.max_rel >= b.max_rel else b
