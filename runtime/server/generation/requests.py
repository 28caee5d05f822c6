"""Requests for tokens on the wire, and the answers.

In: a `ModelInferRequest` to a model that generates. Out: a `Wanted`, or an `InvalidRequestError` that names the first
thing that is wrong; from a token, a `ModelInferResponse`. Invariant: a parameter that is not acted on is refused, as
leaving it out would change the answer.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from proto import open_inference_pb2 as pb
from runtime.server.dataplane import LONGEST_ID, MOST_PARAMETERS, shown
from runtime.server.errors import InvalidRequestError
from runtime.server.generation.blocks import Tokens
from runtime.server.generation.sampling import Sampling
from runtime.server.generation.streams import Produced
from runtime.server.settings import Generation
from runtime.wire import BY_WIRE, WireError, check_shape, decode_contents, decode_raw, encode_contents, encode_raw

PROMPT, STOPS = "input_ids", "stop_token_ids"
TOKENS, LOGITS = "token_ids", "logits"
FINAL, REASON, SEED = "triton_final_response", "finish_reason", "seed"
MOST_STOPS = 1024
_INT64 = BY_WIRE["INT64"]
_IGNORED = ("triton_enable_empty_final_response", "priority")
"""What clients of Triton send and means nothing here: the last token is marked, and there are no levels."""


@dataclass(frozen=True)
class Wanted:
    """What a request asks for."""

    prompt: Tokens
    max_tokens: int | None
    """None: as many as the model's settings say."""
    sampling: Sampling
    stops: frozenset[int]
    tokens: bool
    logits: bool
    """Which outputs the answers have."""
    typed: bool
    """Answer with typed contents."""
    sequence: int | str | None
    start: bool
    end: bool
    timeout: float | None
    """Seconds."""


def read_request(request: pb.ModelInferRequest, settings: Generation, *, vocabulary: int, byte_limit: int) -> Wanted:
    """What the request asks for.

    Raises:
        InvalidRequestError: it is wrong, and why.
    """
    if len(request.id) > LONGEST_ID:
        raise InvalidRequestError(f"the id has {len(request.id)} characters, at most {LONGEST_ID} are accepted")
    if len(request.parameters) > MOST_PARAMETERS:
        raise InvalidRequestError(f"{len(request.parameters)} parameters are more than the {MOST_PARAMETERS} accepted")
    if strange := sorted(request.parameters.keys() - _READERS.keys() - set(_IGNORED)):
        raise InvalidRequestError(
            f"parameter {shown(strange[0])} is not known; a request for tokens may have {', '.join(_READERS)}"
        )
    given = {key: _READERS[key](key, sent) for key, sent in request.parameters.items() if key in _READERS}
    tensors = _read_tensors(request, byte_limit)
    stops = [*given.get(STOPS, ()), *(int(token) for token in tensors.get(STOPS, ()))]
    prompt = tensors.get(PROMPT)
    if prompt is None:
        raise InvalidRequestError(f"input {PROMPT!r} is missing: the tokens of the prompt, INT64 [1, n]")
    for token in (*prompt.tolist(), *stops):
        if not 0 <= token < vocabulary:
            raise InvalidRequestError(f"token {token} is none of the model's: they are 0 to {vocabulary - 1}")
    if len(stops) > MOST_STOPS:
        raise InvalidRequestError(f"{len(stops)} stop tokens are more than the {MOST_STOPS} accepted")
    outputs = _read_outputs(request)
    if "sequence_id" not in given and (given.get("sequence_start") or given.get("sequence_end")):
        raise InvalidRequestError("sequence_start or sequence_end is given without sequence_id")
    ends = () if given.get("ignore_eos") else settings.eos_token_ids
    return Wanted(
        prompt=prompt,
        max_tokens=given.get("max_tokens"),
        sampling=Sampling(
            given.get("temperature", 0.0),
            given.get("top_k", 0),
            given.get("top_p", 1.0),
            given[SEED] if SEED in given else secrets.randbits(63),
        ),
        stops=frozenset((*stops, *ends)),
        tokens=TOKENS in outputs,
        logits=LOGITS in outputs,
        typed=bool(request.inputs) and not request.raw_input_contents,
        sequence=given.get("sequence_id"),
        start=given.get("sequence_start", False),
        end=given.get("sequence_end", False),
        timeout=given["timeout"] / 1e6 if given.get("timeout") else None,
    )


def token_message(name: str, version: int, request_id: str, wanted: Wanted, event: Produced) -> pb.ModelInferResponse:
    """The response that carries one token."""
    response = pb.ModelInferResponse(model_name=name, model_version=str(version), id=request_id)
    parameters = response.parameters
    parameters[FINAL].bool_param = bool(event.reason)
    if event.reason:
        parameters[REASON].string_param = event.reason
        if wanted.sampling.temperature:
            parameters[SEED].uint64_param = wanted.sampling.seed
    arrays = {TOKENS: np.array([[event.token]])} if wanted.tokens else {}
    if event.logits is not None:
        arrays[LOGITS] = event.logits[None]
    for output, array in arrays.items():
        datatype = "FP32" if output == LOGITS else "INT64"
        entry = response.outputs.add(name=output, datatype=datatype, shape=array.shape)
        if wanted.typed:
            entry.contents.CopyFrom(encode_contents(array))
        else:
            response.raw_output_contents.append(encode_raw(array))
    return response


def _read_tensors(request: pb.ModelInferRequest, byte_limit: int) -> dict[str, Tokens]:
    """The request's inputs by name, each as a vector."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"raw_input_contents holds {len(raw)} tensors, but the request lists {len(request.inputs)} inputs"
        )
    found: dict[str, Tokens] = {}
    for index, sent in enumerate(request.inputs):
        name = sent.name
        if name not in (PROMPT, STOPS):
            raise InvalidRequestError(f"unknown input {shown(name)}; a request for tokens has {PROMPT} and {STOPS}")
        if name in found:
            raise InvalidRequestError(f"input {name!r} is given twice")
        if sent.parameters:
            raise InvalidRequestError(f"input {name!r} has parameters, which have no meaning here: send the data")
        if sent.datatype == "BYTES":
            raise InvalidRequestError(f"input {name!r} is text, which is not tokenised here: send tokens as INT64")
        if sent.datatype != "INT64":
            raise InvalidRequestError(f"input {name!r} is {shown(sent.datatype)}, but must be INT64")
        if raw and sent.HasField("contents"):
            raise InvalidRequestError(f"input {name!r} has contents, but raw_input_contents is used as well")
        shape = tuple(sent.shape)
        if not (len(shape) == 2 and shape[0] == 1) and not (name == STOPS and len(shape) == 1):
            raise InvalidRequestError(f"input {name!r} has shape {list(shape)}, but it must be [1, n]")
        try:
            count = check_shape(shape, itemsize=8, limit=byte_limit)
            array = (
                decode_raw(raw[index], datatype=_INT64, shape=shape, count=count)
                if raw
                else decode_contents(sent.contents, datatype=_INT64, shape=shape, count=count)
            )
        except WireError as error:
            raise InvalidRequestError(f"input {name!r}: {error}") from error
        found[name] = array.astype(np.int64).reshape(-1)
    return found


def _read_outputs(request: pb.ModelInferRequest) -> list[str]:
    names = [output.name for output in request.outputs] or [TOKENS]
    for name in names:
        if name not in (TOKENS, LOGITS):
            raise InvalidRequestError(f"unknown output {shown(name)}; answers have {TOKENS} and {LOGITS}")
        if names.count(name) > 1:
            raise InvalidRequestError(f"output {name!r} is asked for twice")
    if any(output.parameters for output in request.outputs):
        raise InvalidRequestError("outputs have parameters, which have no meaning here")
    return names


# --- parameters ------------------------------------------------------------------------------------------------------

_Sent = pb.InferParameter


def _number(key: str, sent: _Sent) -> float:
    """A number, or its text: Triton's Python client sends no fractions."""
    kind = sent.WhichOneof("parameter_choice")
    try:
        value = float("nan" if kind in (None, "bool_param") else getattr(sent, kind))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequestError(f"parameter {key!r} must be a finite number, or its text")
    return value


def _whole(least: int, most: int) -> Callable[[str, _Sent], int]:
    def read(key: str, sent: _Sent) -> int:
        kind = sent.WhichOneof("parameter_choice")
        value = sent.uint64_param if kind == "uint64_param" else sent.int64_param
        if kind not in ("int64_param", "uint64_param") or not least <= value <= most:
            raise InvalidRequestError(f"parameter {key!r} must be a whole number from {least} to {most}")
        return value

    return read


def _flag(key: str, sent: _Sent) -> bool:
    if sent.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidRequestError(f"parameter {key!r} must be true or false")
    return sent.bool_param


def _temperature(key: str, sent: _Sent) -> float:
    value = _number(key, sent)
    if value != 0 and not 1e-3 <= value <= 1e3:
        raise InvalidRequestError(f"parameter {key!r} is {value:g}, but it must be 0, or 0.001 to 1000")
    return value


def _top_p(key: str, sent: _Sent) -> float:
    value = _number(key, sent)
    if not 0 < value <= 1:
        raise InvalidRequestError(f"parameter {key!r} is {value:g}, but it must be above 0 and at most 1")
    return value


def _stops(key: str, sent: _Sent) -> tuple[int, ...]:
    """Tokens with commas between, or one."""
    kind = sent.WhichOneof("parameter_choice")
    if kind == "int64_param":
        return (sent.int64_param,)
    parts = [part.strip() for part in sent.string_param.split(",")] if sent.string_param else []
    if kind != "string_param" or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise InvalidRequestError(f"parameter {key!r} must be tokens with commas between, such as '1,2'")
    return tuple(map(int, parts))


def _sequence_id(key: str, sent: _Sent) -> int | str:
    kind = sent.WhichOneof("parameter_choice")
    value = getattr(sent, kind) if kind in ("int64_param", "uint64_param", "string_param") else 0
    if not value or (isinstance(value, str) and len(value) > LONGEST_ID):
        raise InvalidRequestError(
            f"parameter {key!r} must be a whole number besides 0, or text of 1 to {LONGEST_ID} characters"
        )
    return value


_READERS: dict[str, Callable[[str, _Sent], Any]] = {
    "max_tokens": _whole(1, 2**31 - 1),
    "temperature": _temperature,
    "top_k": _whole(0, 2**31 - 1),
    "top_p": _top_p,
    SEED: _whole(0, 2**64 - 1),
    STOPS: _stops,
    "ignore_eos": _flag,
    "sequence_id": _sequence_id,
    "sequence_start": _flag,
    "sequence_end": _flag,
    "timeout": _whole(0, 2**63 - 1),
}
