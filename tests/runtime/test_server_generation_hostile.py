"""Requests for tokens that are wrong: each gets its reason, none disturbs the others of its stream."""

from collections.abc import Generator
from typing import Any

import pytest
from generating_models import answer_alone, open_session
from served_models import plain_loader, running
from token_streams import MODEL, Stream, request_for, save_repository, token_of

from proto import open_inference_pb2 as pb
from runtime.server.generation.requests import MOST_STOPS


def changed(**fields: Any) -> pb.ModelInferRequest:
    request = request_for([1, 2])
    for name, value in fields.items():
        setattr(request.inputs[0], name, value) if name != "shape" else request.inputs[0].shape.__setitem__(
            slice(None), value
        )
    return request


def twice() -> pb.ModelInferRequest:
    request = request_for([1])
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])
    return request


def with_output(*names: str) -> pb.ModelInferRequest:
    request = request_for([1])
    for name in names:
        request.outputs.add(name=name)
    return request


def with_id(text: str) -> pb.ModelInferRequest:
    request = request_for([1])
    request.id = text
    return request


HOSTILE: dict[str, tuple[pb.ModelInferRequest, str]] = {
    "a negative token": (request_for([1, -1]), "token -1 is none of the model's: they are 0 to 99"),
    "a token beyond the vocabulary": (request_for([100]), "token 100 is none"),
    "the largest number as token": (request_for([2**63 - 1]), "is none of the model's"),
    "a negative stop token": (request_for([1], stop_token_ids=-4), "token -4 is none"),
    "a stop token beyond the vocabulary": (request_for([1], stop_token_ids="3,100"), "token 100 is none"),
    "stop tokens that are no numbers": (request_for([1], stop_token_ids="1;2"), "must be tokens with commas"),
    "stop tokens of other digits": (request_for([1], stop_token_ids="²"), "must be tokens with commas"),
    "endless digits": (request_for([1], stop_token_ids="9" * 5000), "must be tokens with commas"),
    "too many stop tokens": (
        request_for([1], stop_token_ids=",".join(["1"] * (MOST_STOPS + 1))),
        "more than the 1024 accepted",
    ),
    "stop tokens as a flag": (request_for([1], stop_token_ids=True), "must be tokens with commas"),
    "NaN as temperature": (request_for([1], temperature=float("nan")), "'temperature' must be a finite number"),
    "infinity as temperature": (request_for([1], temperature=float("inf")), "must be a finite number"),
    "NaN in words": (request_for([1], temperature="nan"), "must be a finite number"),
    "no number as temperature": (request_for([1], temperature="warm"), "must be a finite number"),
    "a flag as temperature": (request_for([1], temperature=True), "must be a finite number"),
    "a negative temperature": (request_for([1], temperature=-1.0), "it must be 0, or 0.001 to 1000"),
    "a temperature near 0": (request_for([1], temperature=1e-300), "it must be 0, or 0.001 to 1000"),
    "top_p above 1": (request_for([1], top_p=1.5), "above 0 and at most 1"),
    "top_p of 0": (request_for([1], top_p=0.0), "above 0 and at most 1"),
    "a negative top_k": (request_for([1], top_k=-1), "whole number from 0"),
    "top_k with a fraction": (request_for([1], top_k=2.5), "whole number from 0"),
    "no tokens wanted": (request_for([1], max_tokens=0), "whole number from 1"),
    "more tokens than fit": (request_for([1], max_tokens=200), "there is room for 199"),
    "a negative seed": (request_for([1], seed=-1), "whole number from 0"),
    "a seed in words": (request_for([1], seed="1"), "whole number from 0"),
    "ignore_eos as a number": (request_for([1], ignore_eos=1), "must be true or false"),
    "a parameter nobody knows": (request_for([1], repetition_penalty=1.2), "'repetition_penalty' is not known"),
    "an empty prompt": (request_for([]), "the prompt has no tokens"),
    "a prompt that is too long": (request_for([1] * 200), "served with at most 200"),
    "two rows": (request_for([[1, 2], [3, 4]]), "it must be [1, n]"),
    "a vector": (changed(shape=[2]), "it must be [1, n]"),
    "a negative extent": (changed(shape=[1, -2]), "dim -2"),
    "an extent of 2**62": (changed(shape=[1, 2**62]), "each must be between"),
    "bytes that do not fit": (changed(shape=[1, 3]), "takes 24 bytes, but 16 were sent"),
    "text": (changed(datatype="BYTES"), "is text, which is not tokenised here"),
    "another type": (changed(datatype="FP32"), "must be INT64"),
    "no type": (changed(datatype=""), "must be INT64"),
    "an unknown input": (changed(name="attention_mask"), "unknown input 'attention_mask'"),
    "no input": (pb.ModelInferRequest(model_name="llama"), "input 'input_ids' is missing"),
    "an input that is given twice": (twice(), "is given twice"),
    "an unknown output": (with_output("hidden"), "unknown output 'hidden'"),
    "an output twice": (with_output("logits", "logits"), "is asked for twice"),
    "a long id": (with_id("x" * 2000), "characters, at most 1024"),
    "a sequence without id": (request_for([1], sequence_start=True), "without sequence_id"),
    "a sequence of id 0": (request_for([1], sequence_id=0, sequence_start=True), "besides 0"),
    "a sequence with a flag as id": (request_for([1], sequence_id=True), "besides 0"),
    "a sequence with a long id": (request_for([1], sequence_id="x" * 2000), "1 to 1024 characters"),
    "an unknown sequence": (request_for([1], sequence_id=99), "sequence '99' is not known"),
    "a version that is not there": (
        pb.ModelInferRequest(model_name="llama", model_version="../1"),
        "has no version '../1'",
    ),
}


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stream]:
    root = save_repository(tmp_path_factory.mktemp("repository"), eos=99)
    with running(root, plain_loader(tmp_path_factory.mktemp("cache"))) as (_, stub):
        opened = Stream(stub)
        yield opened
        opened.end()


def test_hostile_requests_are_refused_and_others_go_on(stream: Stream) -> None:
    """All on one stream, beside an answer that is under way and comes out right."""
    stream.send(request_for([1, 2, 3], max_tokens=60, id="good", ignore_eos=True))
    tokens, errors = [], {}
    for name, (request, _) in HOSTILE.items():
        sent = pb.ModelInferRequest.FromString(request.SerializeToString())
        sent.id = sent.id or name
        stream.send(sent)
    for message in stream.call:
        if message.error_message:
            errors[message.infer_response.id[:100]] = message.error_message
        else:
            tokens.append(token_of(message.infer_response))
        if len(tokens) == 60 and len(errors) == len(HOSTILE):
            break
    for name, (request, reason) in HOSTILE.items():
        error = errors[(request.id or name)[:100]]
        status = "NOT_FOUND" if "version" in reason else "INVALID_ARGUMENT"
        assert error.startswith(f"[{status}] "), (name, error)
        assert reason in error, (name, error)
        assert len(error) < 600
    assert tokens == answer_alone(open_session(MODEL), [1, 2, 3], 60)
    assert stream.ask([1, 2, 3]) == tokens[:5]
