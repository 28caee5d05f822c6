"""CUDA attention and products off the common path, on a card against float64: sinks, windows, masked rows, NaN, inf."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_arrays import arrays, error, launch
from cuda_specs import BF16, F16, F32, AttentionForm, ProductForm, attention_spec, product_spec, tensor

from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const, select
from tilecore.contract.spec import AttentionSpec, Place, Product, Result, View
from tilecore.cuda.compile import compile_cuda
from tilecore.cuda.launch import Launcher

pytestmark = pytest.mark.gpu
LENGTH = 320
SPEC = attention_spec(AttentionForm(2, 4, LENGTH, LENGTH, 64))
B, H, QUERY, KEY = SPEC.score_axes
NEAR, WINDOW = 5, 40


def masked(condition: Expr) -> AttentionSpec:
    return replace(SPEC, score=select(condition, SPEC.score, const(-math.inf, F32)))


def weights(found: dict[str, Any], torch: Any, mask: Any = None, sink: Any = None) -> Any:
    scores = found["q"].double() @ found["k"].double().transpose(-1, -2) * 0.125
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(2, 4, LENGTH, 1)], -1)
    return torch.softmax(scores, -1)[..., :LENGTH]


def check(result: Any, expected: Any) -> None:
    """NaN where NaN is expected and nowhere else, and a small error elsewhere."""
    assert bool((result.isnan() == expected.isnan()).all())
    finite = expected.isfinite()
    assert not bool(finite.any()) or error(result[finite], expected[finite]) < 4e-3


@pytest.mark.parametrize("guard", [False, True])
def test_rows_without_a_key_are_nan_or_zero_under_the_guard(guard: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = replace(masked(binary("le", KEY, QUERY - NEAR)), nan_guard=guard)
    found = launch(spec, tmp_path, torch, arrays(spec, torch, {}))
    at = torch.arange(LENGTH, device="cuda")
    expected = weights(found, torch, at[None] <= at[:, None] - NEAR) @ found["v"].double()
    assert int(expected[0, 0, :, 0].isnan().sum()) == NEAR
    check(found["o"], torch.nan_to_num(expected, 0.0) if guard else expected)


def test_a_window_reads_its_keys_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = masked(binary("and", binary("le", KEY, QUERY), binary("gt", KEY, QUERY - WINDOW)))
    found = launch(spec, tmp_path, torch, arrays(spec, torch, {}))
    at = torch.arange(LENGTH, device="cuda")
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - WINDOW)
    check(found["o"], weights(found, torch, mask) @ found["v"].double())


def test_nan_and_infinity_reach_the_rows_that_they_reach_in_softmax(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = arrays(SPEC, torch, {})
    found["q"][0, 1, 7, 3] = math.nan
    found["k"][1, 2, 9, 0] = math.inf
    launch(SPEC, tmp_path, torch, found)
    check(found["o"], weights(found, torch) @ found["v"].double())


@pytest.mark.parametrize("split", [1, 4])
def test_a_sink_takes_its_share_once(split: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    logits = tensor("sink", F32, 4)
    spec = replace(SPEC, inputs=(*SPEC.inputs, logits), sink=View("sink", (B, H, QUERY), Load(logits, (H,))))
    found = launch(spec, tmp_path, torch, arrays(spec, torch, {}), block_m=64, block_n=64, split=split)
    check(found["o"], weights(found, torch, sink=found["sink"]) @ found["v"].double())


def test_parts_without_a_key_leave_the_others_as_they_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = masked(binary("le", KEY, QUERY - NEAR))
    found = launch(spec, tmp_path, torch, arrays(spec, torch, {}), block_m=64, block_n=64, split=8)
    at = torch.arange(LENGTH, device="cuda")
    check(found["o"], weights(found, torch, at[None] <= at[:, None] - NEAR) @ found["v"].double())


DECODE = AttentionForm(1, 32, 1, 8193, 128, F16, groups=4)


def decoded(found: dict[str, Any], torch: Any, mask: Any = None) -> Any:
    keys, values = (found[name].double().repeat_interleave(4, 1) for name in ("k", "v"))
    scores = found["q"].double() @ keys.mT * 128**-0.5
    return torch.softmax(scores if mask is None else scores.masked_fill(~mask[:, None, None], -math.inf), -1) @ values


@pytest.mark.parametrize("kept", [(0, 0), (0, 128), (2176, 2300), (3999, 4000), (0, 4000)])
def test_parts_of_the_keys_may_have_none_that_counts(kept: tuple[int, int], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = attention_spec(AttentionForm(2, 8, 1, 4000, 128, F16, groups=4, program="kept"))
    found = arrays(spec, torch, {})
    at = torch.arange(4000, device="cuda")
    found["flags"] = ((at >= kept[0]) & (at < kept[1])).expand(2, 4000).contiguous()
    launch(spec, tmp_path, torch, found)
    check(found["o"], decoded(found, torch, found["flags"]))


def test_batches_of_other_sizes_leave_the_counters_of_each_other_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = attention_spec(AttentionForm(Sym("B"), 8, 1, 3000, 128, F16, groups=4))
    kernel = compile_cuda(spec, label="Kernel", cache_directory=tmp_path)
    assert kernel.plan.workspace is not None
    run = Launcher(kernel)
    given = {batch: arrays(spec, torch, {"B": batch}) for batch in (1, 2, 3, 9)}
    for batch in (9, 1, 3, 9, 2, 1, 9, 3, 2, 9):
        found = given[batch]
        found["o"].fill_(math.nan)
        run(found, stream=torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        check(found["o"], decoded(found, torch))


def test_tasks_apart_give_the_same_bits_on_streams_and_in_graphs_beside_each_other(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = attention_spec(DECODE)
    kernel = compile_cuda(spec, label="Kernel", cache_directory=tmp_path)
    assert kernel.plan.workspace is not None
    run = Launcher(kernel)
    streams, sets = [torch.cuda.Stream() for _ in range(3)], [arrays(spec, torch, {}) for _ in range(3)]
    for found in sets:
        run(found, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    first = [found["o"].clone() for found in sets]
    graphs: list[Any] = []
    for found in sets:
        check(found["o"], decoded(found, torch))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            run(found, stream=torch.cuda.current_stream().cuda_stream)
    for replayed in (False, True):
        for found in sets:
            found["o"].fill_(math.nan)
        torch.cuda.synchronize()
        for _ in range(50):
            for found, stream, graph in zip(sets, streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay() if replayed else run(found, stream=stream.cuda_stream)
        torch.cuda.synchronize()
        assert all(bool((found["o"] == one).all()) for found, one in zip(sets, first, strict=True))


@pytest.mark.parametrize("split", [1, 4])
def test_two_results_of_one_product(split: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = product_spec(ProductForm(300, 512, 512, program="bias"))
    g, m, n = spec.outputs[0].place.axes
    double = Result(Place(tensor("y2", F32, 300, 512), (g, m, n), (m, n)), spec.acc * 2.0)
    spec = replace(spec, outputs=(*spec.outputs, double))
    extents = {"block_m": 128, "block_n": 128, "block_k": 64, "split": split}
    found = launch(spec, tmp_path, torch, arrays(spec, torch, {}), stages=4, **extents)
    product = found["x"].double() @ found["w"].double().T
    check(found["y"], product + found["bias"].double())
    assert error(found["y2"], 2 * product) < 1e-5


def test_siblings_share_their_left_operand(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = product_spec(ProductForm(300, 512, 512))
    other, second = tensor("up", BF16, 512, 512), Var("second", F32)
    _, k, n = spec.b.axes
    spec = replace(
        spec,
        inputs=(*spec.inputs, other),
        siblings=(Product(View("right2", spec.b.axes, Load(other, (n, k))), second),),
        outputs=(Result(spec.outputs[0].place, cast(spec.acc * second, BF16)),),
    )
    found = launch(spec, tmp_path, torch, arrays(spec, torch, {}))
    left = found["x"].double()
    check(found["y"], (left @ found["w"].double().T) * (left @ found["up"].double().T))
