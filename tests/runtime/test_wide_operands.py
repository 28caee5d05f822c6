"""`--precision bf16` leaves operands in float32 where few rows would round what lies in memory, and says so."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from rich.console import Console

from models import decoder, regions
from models.graph import GraphWriter, write
from runtime.cli.tables import print_report
from runtime.compile import optimize
from runtime.options import Options
from runtime.report import Report
from runtime.session import load
from runtime.verify import verify

pytestmark = pytest.mark.cpu
OPTIONS = replace(Options.from_environment(), precision="bf16", fuse_all=True)
PAST = 37
Feeds = dict[str, np.ndarray]


def fused(original: Path, **options: str) -> tuple[Path, Report]:
    path = original.with_suffix(f".{len(options)}.onnx")
    report = optimize(original, path, options=replace(OPTIONS, **options), progress=lambda stage: None)
    return path, report


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def printed(report: Report) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        print_report(console, report)
    return capture.get()


def test_decoding_over_a_cache_is_that_in_float32(tmp_path: Path) -> None:
    original = write(regions.decode(heads=8, kv_heads=2, size=32), tmp_path / "decode.onnx")
    path, report = fused(original)
    wide, _ = fused(original, precision="f32")
    said = "float32, as few rows (4) use each element: rounding it would cost more than it saves"
    assert [region.operands for region in report.regions] == [said]
    assert f"operands of 1 regions: {said}" in printed(report)
    feeds = {"q": normal(2, 8, 1, 32), "k": normal(2, 2, PAST, 32), "v": normal(2, 2, PAST, 32)}
    for got, want in zip(load(path).run(None, feeds), load(wide).run(None, feeds), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("groups", [1, 16])
def test_heads_of_which_many_share_a_cache_round_it(groups: int, tmp_path: Path) -> None:
    original = write(regions.decode(heads=16, kv_heads=16 // groups, size=32), tmp_path / "decode.onnx")
    _, report = fused(original)
    (region,) = report.regions
    assert region.operands.startswith("bfloat16" if groups == 16 else "float32, as few rows (1)")
    assert ("operands of" in printed(report)) == (groups == 1)
    assert verify(original, Path(report.output or "")).ok


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_decoder_rounds_prompts_and_not_single_tokens(style: decoder.Style, tmp_path: Path) -> None:
    original = decoder.build(tmp_path / "decoder.onnx", style=style)
    path, report = fused(original)
    attentions = {region.operands for region in report.regions if region.kind == "attention"}
    assert attentions == {"bfloat16, but float32 with one query: rounding would cost more than it saves"}
    assert {region.operands for region in report.regions if region.kind == "contraction"} == {"bfloat16"}
    assert {region.operands for region in report.regions if region.kind == "row"} == {""}
    sessions = load(path), ort.InferenceSession(str(path)), ort.InferenceSession(str(original))
    for tokens in (1, 5):
        feeds = decoder_feeds(sessions[2], tokens)
        ours, body, exact = (np.asarray(session.run(None, feeds)[0]) for session in sessions)
        size, costs = np.sqrt(np.square(exact).mean()), np.abs(body - exact).max()
        assert costs > 1e-3 * size, "weights are rounded in either case"
        assert np.abs(ours - body).max() < (1e-5 * size if tokens == 1 else 2 * costs)
    assert verify(original, path).ok


def decoder_feeds(session: ort.InferenceSession, tokens: int) -> Feeds:
    feeds: Feeds = {}
    sizes = {"batch": 2, "seq": tokens, "past": PAST, "past + seq": PAST + tokens}
    for one in session.get_inputs():
        shape = [sizes[dim] if isinstance(dim, str) else int(dim or 0) for dim in one.shape]
        match one.name:
            case "attention_mask":
                feeds[one.name] = np.ones(shape, np.int64)
            case "position_ids":
                feeds[one.name] = np.broadcast_to(np.arange(PAST, PAST + tokens), shape).copy()
            case "input_ids":
                feeds[one.name] = np.arange(2 * tokens).reshape(shape)
            case _:
                feeds[one.name] = normal(*shape)
    return feeds


@pytest.mark.parametrize("given_out", [False, True])
def test_keys_that_the_model_computes_lie_rounded_where_nothing_else_needs_them(
    given_out: bool, tmp_path: Path
) -> None:
    """One query over keys and values that are products of a given memory, or that are results of the model, too."""
    g = GraphWriter(17)
    q, memory = g.input("q", np.float32, ("batch", 1, 64)), g.input("memory", np.float32, ("batch", "keys", 48))
    k, v = (g.op("MatMul", memory, g.normal((48, 64), std=0.2)) for _ in range(2))
    if given_out:
        for name, value in (("key", k), ("value", v)):
            g.op("Identity", value, out=name)
            g.output(name, np.float32, ("batch", "keys", 64))
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), g.constant(0.125))
    g.op("MatMul", g.op("Softmax", scores, axis=-1), v, out="y")
    g.output("y", np.float32, ("batch", 1, 64))
    original = write(g.finish(), tmp_path / "memory.onnx")
    path, report = fused(original)
    (operands,) = {region.operands for region in report.regions if region.kind == "attention"}
    assert operands.startswith("float32" if given_out else "bfloat16")
    assert not report.faults
    assert verify(original, path).ok
