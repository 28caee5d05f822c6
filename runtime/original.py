"""The model that a fused one is compared with: what it gives in ONNX Runtime, and what it would give without rounding.

In: a model, inputs. Out: its outputs as ONNX Runtime computes them without optimisations, the same in double precision
(`truth`), and how far roundings alone move them (`moved`, `drift`). Where ONNX Runtime lacks an operator, its
definition takes its place; where there are no kernels, the model is evaluated and rounded after every node instead.

A result that jumps (a number of a bucket, the larger of two, an index) is in double precision what the original says
where rounding decided it: a position of T5 on the edge of two buckets is on either side of it by the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper, inliner
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplementedByRuntime

from runtime import ort_values
from runtime.compare import UNIT_ROUNDOFF, Truth, drift_of, is_rounding
from runtime.oracle import (
    Evaluation,
    Mode,
    OracleError,
    evaluate,
    has_half,
    jumps,
    permits,
    without_licences,
)
from runtime.schema_functions import in_pieces

Array = npt.NDArray[Any]

HALF_BYTES = 2  # of a 16-bit float
NUDGE = 1e-6  # relative: a few roundings of float32
LOAD_ERRORS = (NotImplementedByRuntime, Fail, InvalidGraph)  # of an operator that ONNX Runtime lacks, or a bad graph
QUIET = 4  # ONNX Runtime's log level "fatal": sizes that do not fit are expected here, and reported by us


@dataclass(frozen=True)
class Original:
    """What a fused model is compared with: the original in ONNX Runtime, or evaluated where that has no kernels."""

    model: onnx.ModelProto
    folder: Path
    session: ort.InferenceSession | None
    refusal: str = ""  # what ONNX Runtime said of the model as it is; it is `in_pieces` then, where that runs

    @staticmethod
    def of(model: onnx.ModelProto, source: str | bytes, folder: Path) -> "Original":
        """The model in `source` (a path, or bytes), whose external weights are in `folder`."""
        exact = without_licences(model)  # `model` keeps them for those who ask what they allow
        try:
            return Original(model, folder, session_of(exact or source, folder))
        except LOAD_ERRORS as error:
            refusal = str(error).splitlines()[0]
        try:
            pieces = in_pieces(model)
            exact = without_licences(pieces) or pieces.SerializeToString()
            return Original(pieces, folder, session_of(exact, folder), refusal)
        except (*LOAD_ERRORS, RuntimeError, ValueError):
            return Original(model, folder, None, refusal)

    def run(self, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs `names`; evaluated ones are rounded to the type of every node's result on the way."""
        if self.session is not None:
            return ort_values.run(self.session, names, feeds)
        try:
            values = evaluate(self.model, self.folder, feeds, names, mode=Mode.ROUNDED).values
        except OracleError as error:
            raise OracleError(f"{error}; ONNX Runtime does not load the model: {self.refusal}") from error
        types = {output.name: output.type.tensor_type.elem_type for output in self.model.graph.output}
        return [values[name].astype(helper.tensor_dtype_to_np_dtype(types[name])) for name in names]

    def truth(
        self,
        feeds: Mapping[str, Array],
        expected: Mapping[str, Array],
        *,
        plausible: bool = True,
        narrow: bool = False,
        decided: Mapping[str, Array] | None = None,
    ) -> tuple[dict[str, Truth], str | None]:
        """The outputs `expected` in double precision; without them, the reason.

        `plausible`: results that are further from `expected` than rounding explains are none. `narrow`: `rounded` is
        with operands in bfloat16. Where products permit it, it is with left operands in bytes in any case. Values that
        are `decided` (see `decisions`) are not computed.
        """
        try:
            found = self._truth(feeds, expected, decided or {}, narrow=narrow)
            doubt = self._doubt(feeds, expected, found, plausible=plausible)
        except OracleError as error:
            return {}, str(error)
        return ({}, doubt) if doubt else (found, None)

    def _truth(
        self, feeds: Mapping[str, Array], expected: Mapping[str, Array], decided: Mapping[str, Array], *, narrow: bool
    ) -> dict[str, Truth]:
        """`truth` with the values `decided` as they are given, whether it is plausible or not."""

        def values(mode: Mode) -> Evaluation:
            return evaluate(self.model, self.folder, feeds, tuple(expected), mode=mode, decided=decided)

        exact = values(Mode.RANGE)
        half = has_half(self.model)
        real = values(Mode.UNBOUNDED).values if exact.overflowed else {}
        unbounded = real if any(kind.itemsize == HALF_BYTES for kind in exact.overflowed) else {}
        rounded: Mapping[str, Array] = {}
        if narrow:
            rounded = values(Mode.OPERANDS).values
        elif not half and permits(self.model):
            rounded = values(Mode.BYTES).values
        elif half and self.session is None:
            rounded = {name: _wide(value) for name, value in expected.items()}
        elif half:
            rounded = values(Mode.ROUNDED).values
        return {
            name: Truth(exact.values[name], exact.longest, rounded.get(name), unbounded.get(name), real.get(name))
            for name in expected
        }

    def _doubt(
        self, feeds: Mapping[str, Array], expected: Mapping[str, Array], found: Mapping[str, Truth], *, plausible: bool
    ) -> str | None:
        """Why `found` is not the computation that gave `expected`; None where it may well be."""
        for name, value in expected.items():
            truth = found[name]
            if truth.value.shape != value.shape:
                shape = truth.value.shape
                return f"output {name!r} has shape {shape} in onnx.reference, {value.shape} in ONNX Runtime"
            known = [t for t in (truth.value, truth.unbounded, truth.rounded) if t is not None]
            if (
                plausible
                and not any(is_rounding(value, t) for t in known)
                and not is_rounding(value, truth.value, step=self._step(feeds, name, truth.value))
            ):
                return f"onnx.reference and ONNX Runtime disagree on output {name!r} by more than rounding"
        return None

    def decisions(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """What the model decided: results that jump, as ONNX Runtime has them; none where it does not run the model."""
        if self.session is None:
            return {}
        model = onnx.ModelProto()
        model.CopyFrom(inliner.inline_local_functions(self.model) if self.model.functions else self.model)
        have = {output.name for output in model.graph.output}
        names = [name for node in model.graph.node for name in jumps(node)]
        if not names:
            return {}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
        try:
            session = session_of(without_licences(model) or model.SerializeToString(), self.folder)
        except LOAD_ERRORS:  # a function may be what ONNX Runtime has kernels for, and its body not
            return {}
        return dict(zip(names, ort_values.run(session, names, feeds), strict=True))

    def _step(self, feeds: Mapping[str, Array], name: str, exact: Array) -> float:
        """How far the coarse Sigmoid of ONNX Runtime may move most elements of an output, however small these are."""
        model = inliner.inline_local_functions(self.model) if self.model.functions else self.model
        if not any(node.op_type == "Sigmoid" for node in model.graph.node):
            return 0.0
        moved = self._evaluation(feeds, {name: exact}, Mode.STEPPED).values[name]
        return float(np.median(np.abs(np.where(np.isfinite(moved) & np.isfinite(exact), moved - exact, 0.0))))

    def defines(self, feeds: Mapping[str, Array], names: Sequence[str]) -> bool:
        """Whether the standard gives the outputs a meaning: ONNX Runtime also takes some shapes that do not fit."""
        try:
            self._evaluation(feeds, dict.fromkeys(names, np.empty(0)), Mode.RANGE)
        except OracleError:
            return False
        return True

    def moved(self, feeds: Mapping[str, Array], names: Sequence[str], seed: int) -> dict[str, Array]:
        """The outputs `names` on float inputs that are moved by up to one rounding, rounded like `Truth.rounded`."""
        rng = np.random.default_rng(seed)
        moved: dict[str, Array] = {}
        for name, value in feeds.items():
            unit = UNIT_ROUNDOFF.get(value.dtype)
            factor = 1.0 if unit is None else 1 + 2 * unit * rng.uniform(-1, 1, value.shape)
            moved[name] = value if unit is None else np.asarray(value.astype(np.float64) * factor, value.dtype)
        if has_half(self.model):
            return dict(evaluate(self.model, self.folder, moved, names, mode=Mode.ROUNDED).values)
        return dict(zip(names, self.run(names, moved), strict=True))

    def drift(self, feeds: Mapping[str, Array], expected: Mapping[str, Array]) -> tuple[dict[str, float], str | None]:
        """How far rounding alone moves each output of a model that quantises; without that, the reason.

        The larger of two samples: the model in double precision, and on float inputs that are moved by NUDGE.
        """
        truth, reason = self.truth(feeds, expected, plausible=False)
        found = {name: drift_of(value, truth[name].value) for name, value in expected.items() if name in truth}
        rng = np.random.default_rng(0)
        nudged = {
            name: np.asarray(value * (1 + NUDGE * rng.uniform(-1, 1, value.shape)), value.dtype)
            if value.dtype == np.float32
            else value
            for name, value in feeds.items()
        }
        if any(nudged[name] is not value for name, value in feeds.items()):
            for name, value in zip(expected, self.run(list(expected), nudged), strict=True):
                found[name] = max(found.get(name, 0.0), drift_of(expected[name], value))
        return found, None if found else reason

    def _evaluation(self, feeds: Mapping[str, Array], expected: Mapping[str, Array], mode: Mode) -> Evaluation:
        return evaluate(self.model, self.folder, feeds, tuple(expected), mode=mode)


def session_of(source: str | bytes, folder: Path) -> ort.InferenceSession:
    """The model in `source` (a path, or bytes), whose external weights are in `folder`, without optimisations."""
    options = quiet_options()
    if isinstance(source, bytes):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def quiet_options() -> ort.SessionOptions:
    """Settings without optimisations; what fails is raised and not logged."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = QUIET
    return options


def _wide(value: Array) -> Array:
    return value.astype(np.float64) if value.dtype in UNIT_ROUNDOFF else value
