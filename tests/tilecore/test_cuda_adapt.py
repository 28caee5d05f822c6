"""Regions as a card runs them: the numpy meaning of what is launched, one after the other, is that of the region."""

import re
from dataclasses import replace

import numpy as np
import pytest
from card_specs import F16, flat_product, masked_attention, packed_attention, rotated_attention
from cuda_specs import BF16, AttentionForm, LevelForm, ProductForm, attention_spec, level_spec, product_spec

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator, evaluate
from tilecore.contract.expr import Const, Expr, Load, Op, Sym, cast, loads, rewrite, walk
from tilecore.contract.reshape import single_query
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Spec, Tensor, outputs_of, views_of
from tilecore.cuda.adapt import SIZES, Adapted, adaptations
from tilecore.cuda.compile import candidates, write
from tilecore.cuda.profile import H100
from tilecore.cuda.region import refusal


def packed_weights() -> ContractionSpec:
    """A product by packed constants as graphs have it: unpacked to f32."""
    spec = level_spec(LevelForm(Sym("M"), 16, 64, group=32, dtype=F16))
    x, *constants = spec.inputs
    moved = {one: replace(one, constant=True) for one in constants}

    def change(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.source in moved:
            return Load(moved[node.source], node.index)  # type: ignore[index]
        return None

    assert isinstance(spec.b.value, Op)
    right = replace(spec.b, value=rewrite(spec.b.value.args[0], change))
    return replace(spec, inputs=(x, *moved.values()), b=right, a=replace(spec.a, value=cast(spec.a.value, DType.F32)))


SYMBOLS = {"B": 3, "S": 5, "M": 7}
SPECS: dict[str, Spec] = {
    "rotated": rotated_attention(),
    "packed": packed_attention(),
    "masked": masked_attention(),
    "flat": flat_product(),
    "siblings": flat_product(siblings=3, scaled=True),
    "packed weights": packed_weights(),
    "plain product": product_spec(ProductForm(Sym("M"), 16, 24)),
    "decode": attention_spec(AttentionForm(2, 8, 1, 9, 64, groups=4)),
}


def size(extent: Expr) -> int:
    return int(extent.value) if isinstance(extent, Const) else int(Evaluator({}, SYMBOLS)(extent))


def shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(size(extent) for extent in tensor.shape)


def run(adapted: Adapted, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The region's outputs, flat."""
    memory = {name: array.reshape(-1) for name, array in feeds.items()}
    for spec in (*adapted.before, adapted.spec):
        arrays = {
            tensor.name: np.zeros(shape(tensor), np.uint8) if tensor.name == SIZES
            else memory[tensor.name].reshape(shape(tensor))
            for tensor in spec.inputs
        }  # fmt: skip
        memory |= {name: array.reshape(-1) for name, array in evaluate(spec, arrays).items()}
    return {tensor.name: memory[tensor.name] for tensor in outputs_of(adapted.spec)}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_adaptation_means_the_region(spec: Spec) -> None:
    random = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for tensor in spec.inputs:
        if tensor.dtype is DType.U8:
            feeds[tensor.name] = random.integers(0, 256, shape(tensor)).astype(np.uint8)
            continue
        values = random.standard_normal(shape(tensor))
        feeds[tensor.name] = values > 0 if tensor.dtype is DType.BOOL else np.round(values * 64) / 64
    expected = evaluate(spec, feeds)
    found = list(adaptations(spec))
    assert found
    for adapted in found:
        for name, array in run(adapted, feeds).items():
            np.testing.assert_allclose(array, expected[name].reshape(-1), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_region_has_a_kernel(spec: Spec) -> None:
    assert refusal(spec) is None


def operands(adapted: Adapted) -> list[Expr]:
    spec = adapted.spec
    assert isinstance(spec, AttentionSpec | ContractionSpec)
    return [view.value for view in views_of(spec)]


def test_what_is_plain_is_read_in_place() -> None:
    for name in ("masked", "flat", "siblings", "plain product", "decode"):
        first = next(adaptations(SPECS[name]))
        assert not first.before
        assert all(isinstance(value, Load) and value.dtype in (F16, BF16) for value in operands(first))


def test_shared_heads_are_computed_once() -> None:
    first = next(adaptations(SPECS["rotated"]))
    assert [str(tensor) for tensor in first.scratch] == ["t0: f16[2, 4, S, 64]", "t1: f16[2, 2, S, 64]"]
    assert isinstance(operands(first)[2], Load)  # values lie as they are


def test_rows_of_all_batches_are_one_dim() -> None:
    first = next(adaptations(SPECS["flat"]))
    assert [str(tensor) for tensor in first.spec.inputs][:2] == ["x0: f16[(B * S), 128]", "x1: f16[128, 64]"]
    assert [str(tensor) for tensor in outputs_of(first.spec)] == ["y0: f16[(B * S), 64]"]
    assert not any(isinstance(node, Op) and node.name in ("floordiv", "mod") for node in walk(operands(first)[0]))


def test_a_factor_of_operands_moves_behind_the_sum() -> None:
    first = next(adaptations(SPECS["siblings"]))
    assert isinstance(first.spec, ContractionSpec)
    assert all("0.25" in str(result.value) for result in first.spec.outputs)


@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_every_slot_that_is_waited_for_is_freed(siblings: int) -> None:
    adapted = next(adaptations(flat_product(siblings=siblings)))
    for choice in candidates(adapted.spec, H100):
        text = write(adapted.spec, choice, label="Kernel").text
        waited, freed = (set(re.findall(rf"barrier_{verb}\((empty_\w+)", text)) for verb in ("wait", "arrive"))
        assert len(waited) == siblings
        assert waited == freed


def test_wide_and_packed_operands_are_refused_by_name() -> None:
    plain = SPECS["plain product"]
    assert isinstance(plain, ContractionSpec)
    wide = {tensor: replace(tensor, dtype=DType.F32) for tensor in plain.inputs}
    a, b = (
        replace(view, value=Load(wide[load.source], load.index))  # type: ignore[index]
        for view in (plain.a, plain.b) for load in loads(view.value)
    )  # fmt: skip
    said = refusal(replace(plain, inputs=tuple(wide.values()), a=a, b=b))
    assert said == "operands of f32: products are of one 16-bit float type, f16 or bf16"
    bytes_ = Tensor("w", DType.I8, plain.inputs[1].shape, constant=True)
    (load,) = loads(plain.b.value)
    unpacked = replace(plain.b, value=cast(Load(bytes_, load.index), DType.F32) * 0.5)
    said = refusal(replace(plain, inputs=(plain.inputs[0], bytes_), b=unpacked))
    assert said is not None
    assert said.endswith("bits in rows of a multiple of 16 bytes beside plain 16-bit activations")


def test_rows_that_tensor_copies_cannot_step_over_are_refused() -> None:
    said = refusal(product_spec(ProductForm(64, 64, Sym("M"))))
    assert said is not None
    assert "has rows of M elements: tensor copies need rows that are a multiple of 8" in said


def test_a_single_query_at_run_time_is_told_as_one() -> None:
    form = AttentionForm(2, 8, Sym("S"), Sym("K"), 128, groups=4, program="bias")
    found = single_query(attention_spec(form))
    assert found is not None
    dim, one = found
    assert dim == Sym("S")
    assert one == attention_spec(replace(form, queries=1))
    choice = candidates(one, H100)[0]
    assert choice.spec is not None  # heads that share keys are the queries of a tile
    assert choice.config["block_m"] == 64


def test_queries_that_are_as_many_as_the_keys_or_known_are_left() -> None:
    for queries, keys in ((Sym("S"), Sym("S")), (7, Sym("K"))):
        assert single_query(attention_spec(AttentionForm(2, 8, queries, keys, 64))) is None
