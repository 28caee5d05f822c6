"""The engine against an oracle that runs every context by itself from the start, without caches and without company."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from generating_models import Listener, answer_alone, last_logits, open_session, start_engine, tensors

from models import decoder
from runtime.compile import optimize
from runtime.options import Options
from runtime.server.errors import ExhaustedError, InvalidRequestError, TimedOutError
from runtime.server.generation.decoder import NotADecoderError, recognise
from runtime.server.generation.sampling import Sampling
from runtime.server.generation.streams import Sequence
from runtime.server.settings import Generation
from runtime.session import load

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"style": "llama"},
    "gpt2": {"style": "gpt2"},
    "llama_without_positions": {"style": "llama", "positions": False},
    "gpt2_without_positions": {"style": "gpt2", "positions": False},
    "gpt2_without_mask": {"style": "gpt2", "positions": False, "mask": False},
}
TOGETHER = {"llama", "gpt2"}
"""Models whose streams of different lengths may run together."""


@pytest.fixture(scope="module")
def sessions() -> dict[str, ort.InferenceSession]:
    return {name: open_session(decoder.model(**options)) for name, options in KINDS.items()}


def wait_until(true: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def prompts(count: int, *, longest: int = 20) -> list[list[int]]:
    choice = random.Random(count)
    return [[choice.randrange(100) for _ in range(choice.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("name", list(KINDS))
def test_streams_together_answer_as_each_by_itself(sessions: dict[str, ort.InferenceSession], name: str) -> None:
    """Greedy and sampled streams of different lengths, which begin and end at different times."""
    session = sessions[name]
    engine = start_engine(session, weight_bytes=2**20, prefill=16)
    assert engine.abilities.padding == (name in TOGETHER)
    assert engine.abilities.rows
    listener = Listener(engine)
    jobs = {}
    for at, prompt in enumerate(prompts(12)):
        sampling = Sampling(0.8, top_k=20, top_p=0.9, seed=at) if at % 2 else Sampling()
        job = listener.submit(prompt, 3 + at % 5 * 4, sampling=sampling, logits=True)
        jobs[job] = (prompt, sampling)
        if at == 5:
            listener.take()
    listener.take_all(*jobs)
    for job, (prompt, sampling) in jobs.items():
        assert listener.tokens[job] == answer_alone(session, prompt, job.max_tokens, sampling)
        assert listener.ends[job] == "length"
        context = prompt.copy()
        for token, logits in zip(listener.tokens[job], listener.logits[job], strict=True):
            np.testing.assert_allclose(logits, last_logits(session, context), rtol=1e-4, atol=1e-4)
            context.append(token)
    totals = engine.counters.totals()
    assert totals.tokens == sum(len(tokens) for tokens in listener.tokens.values())
    assert totals.prompt_tokens == sum(len(prompt) for prompt, _ in jobs.values())
    if name in TOGETHER:
        assert totals.step_rows > 3 * totals.steps  # they did run together
    assert engine.reserved_bytes == 0


def test_an_unchanged_group_copies_no_caches(sessions: dict[str, ort.InferenceSession]) -> None:
    engine = start_engine(sessions["gpt2"], weight_bytes=2**20)
    listener = Listener(engine)
    listener.take_all(listener.submit([1, 2, 3], 30))
    assert engine.counters.totals().copied_bytes == 0


def test_a_sequence_goes_on_where_it_was(sessions: dict[str, ort.InferenceSession]) -> None:
    """Three turns, with others between, have the answers of one context that grows."""
    session = sessions["llama"]
    engine = start_engine(session, weight_bytes=2**20)
    listener = Listener(engine)
    sequence, context = Sequence(), []
    others = [listener.submit(prompt, 40) for prompt in prompts(3)]
    for turn in ([5, 6, 7], [8], []):
        job = listener.submit(turn, 6, sequence=sequence, keep=True)
        listener.take_all(job)
        context += turn
        assert listener.tokens[job] == answer_alone(session, context, 6)
        context += listener.tokens[job]
        assert sequence.tokens == len(context)
    listener.take_all(*others)
    assert engine.kept == 1
    assert engine.reserved_bytes == len(context) * engine.decoder.token_bytes
    engine.let_go(sequence)
    assert engine.reserved_bytes == engine.kept == 0
    with pytest.raises(InvalidRequestError, match="the sequence is over"):
        listener.submit([1], 1, sequence=sequence)


def test_stop_tokens_end_an_answer(sessions: dict[str, ort.InferenceSession]) -> None:
    session = sessions["gpt2"]
    listener = Listener(start_engine(session))
    whole = answer_alone(session, [4, 2], 12)
    stop = whole[5]
    job = listener.submit([4, 2], 12, stops=frozenset({stop}))
    listener.take_all(job)
    assert listener.tokens[job] == whole[: whole.index(stop) + 1]
    assert listener.ends[job] == "stop"


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(sessions: dict[str, ort.InferenceSession]) -> None:
    session = sessions["gpt2"]
    engine = start_engine(session, weight_bytes=2**20, prefill=8)
    listener = Listener(engine)
    quick = listener.submit([1], 60)
    while len(listener.tokens[quick]) < 5:
        listener.take()
    prompt = prompts(1, longest=1)[0] * 120
    slow = listener.submit(prompt, 3)
    before = None
    while slow not in listener.ends:
        event = listener.take()
        if event.job is slow and before is None:
            before = len(listener.tokens[quick])
    assert before is not None
    assert before >= 5 + 10  # a step between any two of its 15 pieces, but for what was under way
    listener.take_all(quick)
    assert listener.tokens[slow] == answer_alone(session, prompt, 3)
    assert listener.tokens[quick] == answer_alone(session, [1], 60)


def test_a_cancelled_job_is_gone_at_the_next_step(sessions: dict[str, ort.InferenceSession]) -> None:
    session = sessions["llama"]
    engine = start_engine(session, weight_bytes=2**20)
    listener = Listener(engine)
    ended = threading.Event()
    kept = listener.submit([1, 2], 100)
    victim = listener.submit([3, 4, 5], 100, sequence=Sequence(ended=ended.set))
    while not listener.tokens[victim]:
        listener.take()
    engine.cancel(victim)
    wait_until(ended.is_set)
    assert victim.sequence.place is None
    assert engine.reserved_bytes == 102 * engine.decoder.token_bytes
    listener.take_all(kept)
    assert listener.tokens[kept] == answer_alone(session, [1, 2], 100)
    assert len(listener.tokens[victim]) < 100
    assert engine.reserved_bytes == engine.active == 0


class Cancelling(frozenset[int]):
    """Stop tokens; looking whether a token is among them does something else first."""

    act: Any = None

    def __contains__(self, token: object) -> bool:
        self.act()
        return True


def test_a_job_that_is_cancelled_as_it_finishes_is_not_kept(sessions: dict[str, ort.InferenceSession]) -> None:
    engine = start_engine(sessions["llama"])
    listener = Listener(engine)
    stops, ended = Cancelling(), threading.Event()
    job = listener.job([1], 5, sequence=Sequence(ended=ended.set), keep=True, stops=stops)

    def end_call() -> None:
        engine.cancel(job)
        engine.let_go(job.sequence)

    stops.act = end_call
    engine.submit(job)
    wait_until(ended.is_set)
    assert engine.kept == engine.reserved_bytes == 0


def cast_caches(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """The model with caches of another element type, which it computes with in float32."""
    for value in (*model.graph.input, *model.graph.output):
        if not value.name.startswith(("past", "present")):
            continue
        value.type.tensor_type.elem_type = kind
        name, inner = value.name, f"{value.name}.f32"
        outwards = name.startswith("present")
        for node in model.graph.node:
            node.input[:] = [inner if one == name else one for one in node.input]
            node.output[:] = [inner if one == name else one for one in node.output]
        ends = (inner, name, kind) if outwards else (name, inner, onnx.TensorProto.FLOAT)
        cast = onnx.helper.make_node("Cast", [ends[0]], [ends[1]], to=ends[2])
        model.graph.node.insert(len(model.graph.node) if outwards else 0, cast)
    return model


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE])
def test_caches_of_other_types(kind: int) -> None:
    """Alone and together, streams have the same logits; those of double are the float32 model's."""
    model = cast_caches(decoder.model(style="gpt2"), kind)
    engine = start_engine(open_session(model), weight_bytes=2**20)
    assert engine.abilities.rows
    assert engine.abilities.padding
    asked = prompts(5)
    alone = []
    for prompt in asked:
        listener = Listener(engine)
        job = listener.submit(prompt, 8, logits=True)
        listener.take_all(job)
        alone.append(listener.logits[job][0])
    listener = Listener(engine)
    jobs = [listener.submit(prompt, 8, logits=True) for prompt in asked]
    listener.take_all(*jobs)
    for job, expected in zip(jobs, alone, strict=True):
        np.testing.assert_allclose(listener.logits[job][0], expected, rtol=1e-3, atol=1e-3)
    if kind == onnx.TensorProto.DOUBLE:
        plain = open_session(decoder.model(style="gpt2"))
        for job, prompt in zip(jobs, asked, strict=True):
            assert listener.tokens[job] == answer_alone(plain, prompt, 8)


@pytest.mark.cpu
def test_a_fused_decoder_generates_what_the_plain_one_does(tmp_path: Path) -> None:
    path = decoder.build(tmp_path / "decoder.onnx", size=decoder.Size(layers=1))
    options = Options(cache=tmp_path / "cache")
    report = optimize(path, tmp_path / "fused.onnx", options=options, progress=lambda stage: None, verify=False)
    assert any(region.kind == "attention" for region in report.regions)
    fused, plain = load(tmp_path / "fused.onnx", threads=1), open_session(onnx.load(path))
    engine = start_engine(fused, weight_bytes=2**20, prefill=16)
    assert engine.abilities.padding
    listener = Listener(engine)
    jobs = {listener.submit(prompt, 10): prompt for prompt in prompts(8)}
    listener.take_all(*jobs)
    for job, prompt in jobs.items():
        assert listener.tokens[job] == answer_alone(plain, prompt, 10)


def test_a_slow_client_pauses_only_its_own_stream(sessions: dict[str, ort.InferenceSession]) -> None:
    session = sessions["gpt2"]
    engine = start_engine(session, weight_bytes=2**20)
    listener = Listener(engine)
    backlog = 1000
    slow = listener.submit([9, 9], 20, backlog=lambda: backlog)
    quick = listener.submit([7], 30)
    listener.take_all(quick)
    assert len(listener.tokens[slow]) == 1  # that of its prompt
    backlog = 0
    listener.take_all(slow)
    for job, prompt in ((slow, [9, 9]), (quick, [7])):
        assert listener.tokens[job] == answer_alone(session, prompt, job.max_tokens)


def test_caches_stay_within_their_bytes(sessions: dict[str, ort.InferenceSession]) -> None:
    """Room for two answers: ten wait for their turn; one that never fits is refused at once."""
    session = sessions["llama"]
    engine = start_engine(session, weight_bytes=2**20, cache_bytes=2 * 40 * 256)
    assert engine.decoder.token_bytes == 256
    listener = Listener(engine)
    most = 0
    jobs = [listener.submit([at], 39) for at in range(10)]
    with pytest.raises(ExhaustedError, match="a context of 81 tokens takes 20736 bytes"):
        listener.submit([1], 80)
    while not all(job in listener.ends for job in jobs):
        listener.take()
        most = max(most, engine.active)
        assert engine.reserved_bytes <= 2 * 40 * 256
    assert most <= 2
    for at, job in enumerate(jobs):
        assert listener.tokens[job] == answer_alone(session, [at], 39)
    assert engine.counters.totals().step_rows > engine.counters.totals().steps


def test_who_waits_is_answered_in_order_or_told(sessions: dict[str, ort.InferenceSession]) -> None:
    engine = start_engine(sessions["llama"], streams=1, waiting=3)
    listener = Listener(engine)
    first = listener.submit([1], 200)
    listener.take()
    others = [listener.submit([at], 2) for at in (2, 3)]
    late = listener.submit([4], 2, timeout=0.001)
    with pytest.raises(ExhaustedError, match="3 streams wait already"):
        listener.submit([5], 2)
    listener.take_all(late, first, *others)
    assert isinstance(listener.ends[late], TimedOutError)
    assert list(listener.ends)[-3:] == [first, *others]


def test_sequences_that_wait_for_each_others_room_are_told(sessions: dict[str, ort.InferenceSession]) -> None:
    """Two kept contexts fill the caches, and both want more."""
    engine = start_engine(sessions["llama"], cache_bytes=100 * 256)
    listener = Listener(engine)
    sequences = [Sequence(), Sequence()]
    for sequence in sequences:
        listener.take_all(listener.submit([1] * 40, 5, sequence=sequence, keep=True))
    jobs = [listener.submit([2] * 10, 10, sequence=sequence, keep=True) for sequence in sequences]
    listener.take_all(jobs[0])
    assert isinstance(listener.ends[jobs[0]], ExhaustedError)
    engine.let_go(sequences[0])
    listener.take_all(jobs[1])
    assert len(listener.tokens[jobs[1]]) == 10


def test_only_the_culprit_of_a_run_fails(sessions: dict[str, ort.InferenceSession]) -> None:
    """A context that outgrows the model's table of positions ends with an error; those beside it go on."""
    session = open_session(decoder.model(style="gpt2", size=decoder.Size(positions=32)))
    engine = start_engine(session, weight_bytes=2**20)
    listener = Listener(engine)
    jobs = [listener.submit([at] * length, 20) for at, length in ((1, 2), (2, 20), (3, 5))]
    listener.take_all(*jobs)
    assert isinstance(listener.ends[jobs[1]], InvalidRequestError)
    assert "the context is too long" in str(listener.ends[jobs[1]])
    assert listener.tokens[jobs[1]] == answer_alone(session, [2] * 20, 13)
    for job, prompt in ((jobs[0], [1] * 2), (jobs[2], [3] * 5)):
        assert listener.tokens[job] == answer_alone(session, prompt, 20)
    assert engine.reserved_bytes == 0


def test_logits_that_are_not_numbers_end_their_stream() -> None:
    model = decoder.model(style="gpt2")
    words = next(one for one in model.graph.initializer if one.name == "words")
    table = onnx.numpy_helper.to_array(words).copy()
    table[99] = np.nan
    words.CopyFrom(onnx.numpy_helper.from_array(table, "words"))
    engine = start_engine(open_session(model), weight_bytes=2**20)
    listener = Listener(engine)
    jobs = [listener.submit([99, 1], 5), listener.submit([1, 2], 5)]
    listener.take_all(*jobs)
    assert "no token can be chosen" in str(listener.ends[jobs[0]])
    assert listener.ends[jobs[1]] in ("length", "stop")


def test_a_model_whose_rows_change_each_other_runs_them_one_by_one() -> None:
    """A share of the largest logit of the run is added to all, as a scale of dynamic quantisation would come in."""
    model = decoder.model(style="gpt2")
    for node in model.graph.node:
        if "logits" in node.output:
            node.output[0] = "raw"
    model.graph.node.extend(
        [
            onnx.helper.make_node("ReduceMax", ["raw"], ["most"], keepdims=0),
            onnx.helper.make_node("Mul", ["most", "share"], ["added"]),
            onnx.helper.make_node("Add", ["raw", "added"], ["logits"]),
        ]
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.05, dtype=np.float32), "share"))
    session = open_session(model)
    engine = start_engine(session)
    assert not engine.abilities.rows
    assert not engine.abilities.pieces
    assert not engine.abilities.padding
    listener = Listener(engine)
    jobs = {listener.submit(prompt, 6): prompt for prompt in prompts(4)}
    listener.take_all(*jobs)
    for job, prompt in jobs.items():
        assert listener.tokens[job] == answer_alone(session, prompt, 6)


def test_retiring_keeps_nothing_and_answers_what_was_taken(sessions: dict[str, ort.InferenceSession]) -> None:
    engine = start_engine(sessions["llama"])
    listener = Listener(engine)
    idle, ended = Sequence(), threading.Event()
    listener.take_all(listener.submit([1], 2, sequence=idle, keep=True))
    idle.ended = ended.set
    running = listener.submit([2], 50, sequence=Sequence(), keep=True)
    listener.take()
    engine.retire()
    assert ended.is_set()
    listener.take_all(running)
    assert len(listener.tokens[running]) == 50
    wait_until(lambda: engine.reserved_bytes == 0)
    assert running.sequence.gone


def test_what_happens_at_random_leaves_every_answer_right(sessions: dict[str, ort.InferenceSession]) -> None:
    """Many threads submit, continue and cancel; every answer is that of its context alone, and all room comes back."""
    session = sessions["llama"]
    engine = start_engine(session, weight_bytes=3000, streams=6, cache_bytes=400 * 256, prefill=8)
    faults: list[str] = []

    def client(seed: int) -> None:
        choice = random.Random(seed)
        listener = Listener(engine)
        for _ in range(4):
            sequence, context = Sequence(), []
            for turn in range(choice.randint(1, 3)):
                prompt = [choice.randrange(100) for _ in range(choice.randint(1, 12))]
                sampling = Sampling(0.9, seed=choice.randrange(1000)) if choice.random() < 0.5 else Sampling()
                job = listener.submit(prompt, choice.randint(1, 12), sequence=sequence, keep=True, sampling=sampling)
                if choice.random() < 0.2:
                    time.sleep(choice.random() * 0.01)
                    engine.cancel(job)
                    break
                listener.take_all(job)
                context += prompt
                expected = answer_alone(session, context, job.max_tokens, sampling)
                if listener.tokens[job] != expected:
                    faults.append(f"{seed} {turn}: {listener.tokens[job]} instead of {expected}, {listener.ends[job]}")
                context += listener.tokens[job]
            engine.let_go(sequence)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    wait_until(lambda: not engine.active)
    wait_until(lambda: engine.reserved_bytes == 0)


# --- recognising -----------------------------------------------------------------------------------------------------


def renamed(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def described(model: onnx.ModelProto, **settings: Any) -> Any:
    session = open_session(model)
    return recognise(tensors(session.get_inputs()), tensors(session.get_outputs()), Generation(**settings))


def test_caches_are_paired_by_layer_and_part_or_by_order() -> None:
    for past, present in (
        ("past_key_values.{}.{}", "present.{}.{}"),
        ("past_{}_{}", "present_{}_{}"),
        ("past_key_values_{}_{}", "present_key_values_{}_{}"),
        ("cache_in_{}_{}", "cache_out_{}_{}"),
    ):
        names: dict[str, str] = {}
        for layer in range(2):
            for part in ("key", "value"):
                names[f"past_key_values.{layer}.{part}"] = past.format(layer, part)
                names[f"present.{layer}.{part}"] = present.format(layer, part)
        model = renamed(decoder.model(), names)
        outputs = list(model.graph.output)
        del model.graph.output[:]
        model.graph.output.extend(outputs[::-1])
        found = described(model)
        assert {(cache.past, cache.present) for cache in found.caches} == {
            (names[old], names[old.replace("past_key_values", "present")]) for old in names if old.startswith("past")
        }
    by_order = renamed(decoder.model(), {"present.0.key": "a", "present.0.value": "b", "present.1.key": "c"})
    assert [cache.present for cache in described(by_order).caches] == ["a", "b", "c", "present.1.value"]


def test_other_names_can_be_set() -> None:
    names = {"input_ids": "tokens", "attention_mask": "seen", "position_ids": "places", "logits": "scores"}
    session = open_session(renamed(decoder.model(), names))
    with pytest.raises(NotADecoderError, match="no input 'input_ids'"):
        start_engine(session)
    chosen: dict[str, Any] = dict(names)
    engine = start_engine(session, **chosen)
    assert engine.abilities.padding


def test_what_is_no_decoder_is_refused_with_the_reason() -> None:
    swapped = renamed(decoder.model(), {"present.0.key": "present.0.value", "present.0.value": "present.0.key"})
    session = open_session(swapped)
    with pytest.raises(NotADecoderError, match="its cache does not continue a prompt"):
        start_engine(session)
    merged = decoder.model()
    merged.graph.input.append(onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1]))
    with pytest.raises(NotADecoderError, match="merged decoder") as caught:
        described(merged)
    assert caught.value.likely
    crossed = decoder.model()
    states = onnx.helper.make_tensor_value_info("encoder_attention_mask", onnx.TensorProto.INT64, ["batch", "n"])
    crossed.graph.input.append(states)
    with pytest.raises(NotADecoderError, match="inputs encoder_attention_mask have no part"):
        described(crossed)
    with pytest.raises(NotADecoderError, match="no output 'logits'"):
        described(renamed(decoder.model(), {"logits": "hidden"}))
    plain = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "graph",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4, "m", 2])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 19)],
        ir_version=9,
    )
    with pytest.raises(NotADecoderError, match="it has no caches") as caught:
        described(plain)
    assert not caught.value.likely
