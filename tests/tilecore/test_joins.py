"""Tasks that share a result: a split changes nothing but rounding; wrong joins are refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_specs import AttentionForm, ProductForm, attention_spec, product_spec
from kernel_texts import program_of

from tilecore import language as T
from tilecore.contract.expr import Const, Var, const
from tilecore.contract.reshape import heads_as_queries, turned
from tilecore.contract.spec import Spec
from tilecore.cuda.errors import CudaError
from tilecore.cuda.joins import plan_split
from tilecore.cuda.overlap import overlap_of
from tilecore.cuda.partial import partial_sums
from tilecore.cuda.profile import H100
from tilecore.cuda.recommend import choices
from tilecore.cuda.roles import infer_roles
from tilecore.errors import TileError
from tilecore.infer import infer
from tilecore.interpret import interpret
from tilecore.ir import For, If, Join, Program
from tilecore.language import Handle
from tilecore.library import kernel_for
from tilecore.lower import lower
from tilecore.printer import print_program
from tilecore.target import target_named
from tilecore.trace import trace
from tilecore.verify import verify


def traced(spec: Spec, **extents: int) -> Program:
    function, operands = kernel_for(spec)
    return trace(function, inputs=spec.inputs, operands=operands, extents=extents)


def inputs(spec: Spec) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {t.name: rng.standard_normal([int(d.value) for d in t.shape if isinstance(d, Const)]) for t in spec.inputs}


@pytest.mark.parametrize("split", [2, 3, 8])
def test_tasks_that_share_a_sum_give_what_one_task_gives(split: int) -> None:
    spec = product_spec(ProductForm(20, 40, 200, program="bias"))
    extents = {"block_m": 16, "block_n": 16, "block_k": 32}
    whole, parts = (interpret(traced(spec, **extents, split=n), inputs(spec))["y"] for n in (1, split))
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


@pytest.mark.parametrize("split", [2, 3, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_tasks_that_share_the_keys_give_what_one_task_gives(split: int, causal: bool) -> None:
    spec = attention_spec(AttentionForm(1, 2, 20, 90, 16, causal=causal))
    whole, parts = (interpret(traced(spec, block_m=16, block_n=16, split=n), inputs(spec))["o"] for n in (1, split))
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


def test_a_split_of_one_is_no_split() -> None:
    program = traced(product_spec(ProductForm(20, 40, 200)), block_m=16, block_n=16, block_k=32, split=1)
    assert len(program.grid) == 3
    assert not any(isinstance(stmt, Join) for stmt in program.body)
    split = traced(product_spec(ProductForm(20, 40, 200)), block_m=16, block_n=16, block_k=32, split=4)
    assert "join c = sum over s" in print_program(split)


def test_turned_products_and_folded_heads_are_the_same_region() -> None:
    product = product_spec(ProductForm(5, 40, 64, program="gelu"))
    other = turned(product)
    assert other is not None
    extents = {"block_m": 16, "block_n": 16, "block_k": 32}
    values = [interpret(traced(one, **extents), inputs(product))["y"] for one in (product, other)]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-12)
    heads = attention_spec(AttentionForm(2, 8, 1, 50, 16, groups=4, program="slope"))
    folded = heads_as_queries(heads)
    assert folded is not None
    assert folded.q.shape == (const(2), const(2), const(4), const(16))
    values = [interpret(traced(one, block_m=16, block_n=16), inputs(heads))["o"] for one in (heads, folded)]
    np.testing.assert_allclose(values[1], values[0], rtol=1e-12)


def test_heads_that_share_nothing_or_have_more_queries_stay_as_they_are() -> None:
    assert heads_as_queries(attention_spec(AttentionForm(2, 8, 1, 50, 16))) is None
    assert heads_as_queries(attention_spec(AttentionForm(2, 8, 2, 50, 16, groups=4))) is None


def decode(batch: int, keys: int) -> Spec:
    return attention_spec(AttentionForm(batch, 32, 1, keys, 128, groups=4))


def test_few_rows_are_turned_and_short_caches_are_not_split() -> None:
    first = next(choices(product_spec(ProductForm(16, 4096, 4096)), H100))
    assert (first.config["block_m"], first.config["block_n"]) == (64, 16)
    splits = {
        (batch, keys): next(choices(attention_spec(AttentionForm(batch, 32, 1, keys, 128, groups=4)), H100)).config[
            "split"
        ]
        for batch, keys in ((1, 8192), (2, 8192), (3, 8200), (4, 8192), (16, 8192), (1, 256), (1, 513))
    }
    expected = {(1, 8192): 16, (2, 8192): 8, (3, 8200): 5, (4, 8192): 4, (16, 8192): 1, (1, 256): 1, (1, 513): 2}
    assert splits == expected


def test_tasks_that_run_apart_leave_what_the_joins_need() -> None:
    attention = attention_spec(AttentionForm(1, 2, 64, 512, 64))
    program = traced(attention, block_m=64, block_n=64, split=4)
    split = plan_split(infer_roles(program), apart=True)
    assert {buffer.name for buffer, _ in split.state} == {"top", "rescale", "total", "o1"}
    assert (split.tasks, split.cluster, split.apart) == (4, 1, True)
    assert plan_split(infer_roles(program)).cluster == 4
    bounded = traced(attention_spec(AttentionForm(1, 2, 64, 512, 64, program="cap")), block_m=64, block_n=64, split=4)
    assert {buffer.name for buffer, _ in plan_split(infer_roles(bounded), apart=True).state} == {"total", "o1"}


@pytest.mark.parametrize("place", ["between", "after"])
def test_tasks_that_run_apart_do_nothing_but_share_a_result(place: str) -> None:
    program = traced(attention_spec(AttentionForm(1, 2, 64, 512, 64)), block_m=64, block_n=64, split=4)
    (last,) = (stmt for stmt in program.body if isinstance(stmt, If))
    joins = [at for at, stmt in enumerate(program.body) if isinstance(stmt, Join)]
    at = joins[1] if place == "between" else joins[-1] + 1
    body = (*program.body[:at], *last.then, *program.body[at:])
    message = "comes between joins: tasks that run apart" if place == "between" else "follows joins: what tasks"
    with pytest.raises(CudaError, match=message):
        plan_split(infer_roles(replace(program, body=body)), apart=True)


def test_a_split_has_a_limit() -> None:
    program = traced(attention_spec(AttentionForm(1, 2, 64, 512, 64)), block_m=64, block_n=64, split=17)
    with pytest.raises(CudaError, match="a split into 17 tasks: a cluster has at most 16"):
        plan_split(infer_roles(program))
    assert plan_split(infer_roles(program), apart=True).tasks == 17


def test_attention_comes_apart_into_scores_softmax_and_sums() -> None:
    program = traced(attention_spec(AttentionForm(1, 2, 64, 128, 64)), block_m=64, block_n=64)
    (loop,) = (stmt for stmt in program.body if isinstance(stmt, For))
    parts = overlap_of(loop)
    assert parts is not None
    assert (parts.scores.c.name, parts.sums.c.name) == ("s", "o1")
    assert len(parts.late) == 2  # bringing sums to the new maximum, and packing weights
    assert partial_sums(loop, ("top", "total", "rescale")) == ("total",)
    assert overlap_of(replace(loop, body=(*loop.body, loop.body[0]))) is None


def test_a_join_stands_on_the_level_of_the_kernel() -> None:
    def kernel(D: Handle, F: Handle) -> None:
        with T.Kernel(4, split=2) as (m, s):
            t = T.alloc_fragment((8,), T.float32)
            T.fill(t, 1.0)
            with T.If(m > 0):
                T.join(t, "sum")
            with T.If(s == 0):
                for j in T.Parallel(8):
                    F[m, j] = t[j]

    with pytest.raises(TileError, match=r"t is joined inside a loop or T.If, where tasks need not meet"):
        program_of(kernel)


def test_joins_name_a_kind_and_an_axis_of_the_grid() -> None:
    program = traced(product_spec(ProductForm(20, 40, 200)), block_m=16, block_n=16, block_k=32, split=2)
    (join,) = (stmt for stmt in program.body if isinstance(stmt, Join))
    for wrong, message in (
        (replace(join, kind="mean"), "a join of kind 'mean'"),
        (replace(join, axis=Var("other", extent=const(2))), "other is no axis of the grid of matmul"),
    ):
        body = tuple(wrong if stmt is join else stmt for stmt in program.body)
        with pytest.raises(TileError, match=message):
            verify(replace(program, body=body))


def test_a_processor_has_no_tasks_that_meet() -> None:
    program = traced(
        product_spec(ProductForm(20, 40, 200, dtype=T.float32)), block_m=16, block_n=16, block_k=32, split=2
    )
    with pytest.raises(ValueError, match=r"T.join of c: tasks of a split meet on a GPU; a CPU kernel has a split of 1"):
        lower(infer(program, target_named("x86-64-v3")))
