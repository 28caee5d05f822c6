"""The CUDA backend without a card: roles, refusals and text; with NVRTC, cubins for sm_90a and their resources."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_specs import (
    BF16,
    F16,
    F32,
    AttentionForm,
    LatentForm,
    LevelForm,
    ProductForm,
    attention_spec,
    latent_spec,
    level_spec,
    product_spec,
    tensor,
)

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Load, Sym, Var, cast, const
from tilecore.contract.reshape import heads_as_queries
from tilecore.contract.spec import TOP, TOTAL, Place, Result, Spec, Step, View
from tilecore.cuda.array import DeviceArray
from tilecore.cuda.compile import CudaSource, candidates, compile_cuda, generate
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.nvrtc import load_nvrtc, read_report
from tilecore.cuda.profile import H100
from tilecore.cuda.recommend import choices
from tilecore.cuda.scales import keep_scale, unscaled
from tilecore.interpret import interpret
from tilecore.library import kernel_for
from tilecore.trace import trace

PLAIN = ProductForm(1000, 1016, 1032)
HEADS = AttentionForm(1, 2, 300, 300, 128)


def first(spec: Spec, **extents: int) -> CudaSource:
    """The text of the first candidate, or of one with other extents."""
    (choice, *_) = candidates(spec, H100, config=extents or None)
    return generate(spec, choice, label="Kernel")


def plan_of(source: CudaSource) -> KernelPlan:
    """Of a kernel that is made of products."""
    assert isinstance(source.plan, KernelPlan)
    return source.plan


def test_the_text_of_a_kernel_is_the_same_every_time() -> None:
    assert first(product_spec(PLAIN)).text == first(product_spec(PLAIN)).text


def test_a_product_gets_a_ring_of_both_operands_and_a_staged_store() -> None:
    plan = plan_of(first(product_spec(ProductForm(4096, 4096, 4096)), block_m=128, block_n=256, block_k=64))
    assert [[tile.buffer.name for tile in ring.tiles] for ring in plan.rings] == [["a", "b"]]
    assert plan.roles.fragments == {"c": 128}
    assert (plan.roles.consumers, plan.producer_threads, plan.threads) == (2, 32, 288)
    assert not plan.balanced
    assert plan.grouped
    assert len(plan.staged_stores) == 1
    assert plan.maps[-1].box == (64, 64)


def test_a_right_operand_of_either_order_comes_without_a_transpose() -> None:
    sides = {rows: first(product_spec(replace(PLAIN, right_rows=rows))) for rows in (False, True)}
    assert {rows: plan_of(source).roles.staged["b"].contiguous for rows, source in sides.items()} == {False: 0, True: 1}
    assert "depth_minor(tile_b" in sides[True].text
    assert "depth_minor(tile_b" not in sides[False].text


@pytest.mark.parametrize(("columns", "output", "staged"), [(1016, BF16, 1), (1001, BF16, 0), (1016, F32, 0)])
def test_stores_are_staged_only_where_tensor_copies_clip_them_exactly(
    columns: int, output: object, staged: int
) -> None:
    form = replace(PLAIN, columns=columns, output=output)  # type: ignore[arg-type]
    assert len(plan_of(first(product_spec(form))).staged_stores) == staged


def test_attention_keeps_weights_in_registers_and_scores_unscaled() -> None:
    source = first(attention_spec(HEADS))
    assert plan_of(source).roles.packed == {"p": 32}
    assert [ring.slots for ring in plan_of(source).rings] == [2, 2, 2]  # the next tile's queries come early
    assert plan_of(source).turns
    assert plan_of(source).role_registers == (240, 24)
    assert "s[x] = t1;" not in source.text
    assert "fmaf(" in source.text


def test_values_that_are_columns_of_the_keys_are_not_fetched_again() -> None:
    source = first(latent_spec(LatentForm(64, 128, 8192)))
    plan = plan_of(source)
    assert plan.roles.held == {"v": "k"}
    assert [[tile.buffer.name for tile in ring.tiles] for ring in plan.rings][1:] == [["k"]]
    assert source.text.count("&map_k,") == 576 // 64
    assert "map_v" not in source.text


def test_values_from_elsewhere_in_the_keys_are_a_tile_of_their_own() -> None:
    spec = latent_spec(LatentForm(64, 128, 8192))
    b, _, j, e = spec.v.axes
    moved = replace(spec, v=replace(spec.v, value=Load(spec.inputs[1], (b, j, e + 64))))
    with pytest.raises(CudaError, match=r"k: 73728 bytes x 2; v: 65536 bytes x 2"):
        first(moved)


def test_two_warpgroups_share_the_columns_of_wide_values_and_meet_over_rows() -> None:
    source = first(latent_spec(LatentForm(64, 128, 8192)))
    roles = plan_of(source).roles
    assert (roles.consumers, roles.parts, roles.block_rows) == (2, 2, 64)
    assert roles.fragments == {"s": 64 // 2 // 2, "o1": 512 // 2 // 2}
    assert roles.exchanged == ("p",)
    assert source.text.count("join_groups<Fmax, 2>") == 1
    assert source.text.count("join_groups<Sum, 2>") == 1  # once, after the loop


def test_keys_of_a_last_tile_are_masked_by_the_columns_that_a_warpgroup_has() -> None:
    text = first(latent_spec(LatentForm(3, 128, 1001))).text
    assert re.search(r"const int (j\d*) = own_column \+ \(x >> 2\) \* 8 \+ \(x & 1\) \+ warpgroup \* 32;", text)
    assert re.search(r"\bj\d* \+ \(n \* 64\)\) < 1001", text)


@pytest.mark.parametrize("form", [LatentForm(2, 6, 70, 64, 64), LatentForm(1, 16, 33, 128, 64)])
def test_heads_over_one_cache_become_queries_of_one_tile(form: LatentForm) -> None:
    spec = latent_spec(form)
    shared = heads_as_queries(spec)
    assert shared is not None
    function, operands = kernel_for(shared)
    program = trace(function, inputs=spec.inputs, operands=operands, extents={"block_m": 64, "block_n": 64})
    rng = np.random.default_rng(0)
    q, c = (rng.standard_normal([Evaluator({}, {})(dim) for dim in tensor.shape]) for tensor in spec.inputs)
    q, c = (array.astype(np.float16) for array in (q, c))
    scores = np.einsum("bhd,bkd->bhk", q[:, :, 0].astype(float), c.astype(float))
    weights = np.exp(scores * (form.latent // 4 + form.rotary) ** -0.5)
    expected = np.einsum("bhk,bke->bhe", weights / weights.sum(-1, keepdims=True), c[..., : form.latent].astype(float))
    result = interpret(program, {"q": q, "c": c})["o"][:, :, 0]
    assert np.linalg.norm(result - expected) < 1e-3 * np.linalg.norm(expected)


def test_heads_that_share_one_head_of_keys_are_the_queries_of_one_tile() -> None:
    spec = attention_spec(AttentionForm(2, 8, 1, 40, 64, F16, groups=8))
    shared = heads_as_queries(spec)
    assert shared is not None
    assert [str(extent) for extent in shared.q.shape[:3]] == ["2", "1", "8"]
    function, operands = kernel_for(shared)
    program = trace(function, inputs=spec.inputs, operands=operands, extents={"block_m": 64, "block_n": 64})
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 8 if name == "q" else 1, 1 if name == "q" else 40, 64)) for name in "qkv"}
    arrays = {name: array.astype(np.float16) for name, array in arrays.items()}
    q, k, v = (arrays[name].astype(float) for name in "qkv")
    weights = np.exp(q @ k.swapaxes(-1, -2) / 8)
    expected = weights / weights.sum(-1, keepdims=True) @ v
    result = interpret(program, arrays)["o"]
    assert np.linalg.norm(result - expected) < 1e-3 * np.linalg.norm(expected)


def test_causal_tiles_stop_at_the_diagonal_and_long_ones_go_with_short_ones() -> None:
    causal, full = (first(attention_spec(replace(HEADS, causal=causal))) for causal in (True, False))
    assert "mixed_tile" in causal.text
    assert plan_of(causal).balanced
    assert "mixed_tile" not in full.text
    assert not plan_of(full).balanced
    assert "no element of the warpgroup is masked" in causal.text


@pytest.mark.parametrize("program", ["none", "slope", "cap"])
@pytest.mark.parametrize("causal", [False, True])
def test_keeping_the_scale_out_of_scores_changes_no_result(program: str, causal: bool) -> None:
    spec = attention_spec(AttentionForm(1, 2, 70, 90, 64, causal=causal, program=program))
    function, operands = kernel_for(spec)
    plain = trace(function, inputs=spec.inputs, operands=operands, extents={"block_m": 64, "block_n": 64})
    moved = keep_scale(plain)
    assert (moved != plain) is (program == "none")
    rng = np.random.default_rng(0)
    arrays = {
        tensor.name: rng.standard_normal([Evaluator({}, {})(dim) for dim in tensor.shape]) for tensor in spec.inputs
    }
    results = [interpret(program, arrays)["o"] for program in (plain, moved)]
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-6 * np.abs(results[0]).max())


def test_masks_test_the_key_itself_and_not_where_memory_is_read() -> None:
    """Reads behind the last key are clipped to it; the key must be masked all the same."""
    text = first(attention_spec(AttentionForm(1, 2, 300, 331, 64, program="bias"))).text
    assert re.search(r"\bj \+ \(n \* \d+\)\) < 331", text)
    assert "j_in" in text
    assert not re.search(r"j_in \+ \(n \* \d+\)\) < 331", text)


@pytest.mark.parametrize(
    ("form", "slots"),
    [
        (AttentionForm(1, 2, 512, 512, 64, program="bias"), 2),
        (AttentionForm(1, 2, 512, 512, 128, program="bias"), 1),  # two do not fit
        (AttentionForm(2, 2, 512, 528, 128, program="kept"), 2),
        (AttentionForm(2, 2, 512, 520, 128, program="key bias"), 2),
        (AttentionForm(1, 2, 512, 331, 64, program="bias"), 0),  # rows of 662 bytes, which no tensor copy brings
        (AttentionForm(2, 2, 512, 520, 64, program="hidden"), 0),  # of 520 bytes
    ],
)
def test_what_scores_take_on_comes_in_tiles_beside_them(form: AttentionForm, slots: int) -> None:
    source = first(attention_spec(form))
    plan = plan_of(source)
    name = "flags" if form.program in ("kept", "hidden") else "bias"
    found = [ring for ring in plan.rings if ring.tiles[0].tensor.name == name]
    assert [ring.slots for ring in found] == [slots] * (slots > 0)
    assert (f"{name}_data" in source.text) is (slots == 0)
    assert not plan.grouped  # heads share what lies beside scores, and tiles stay in their order
    if slots == 1:  # the number of the others' slot tells its phase
        assert "barrier_wait(full_bias_tile + 8 * 0, slot);" in source.text
        assert "barrier_wait(empty_bias_tile + 8 * 0, slot ^ 1);" in source.text


def test_tiles_beside_scores_that_have_no_room_are_left_out_and_that_is_said() -> None:
    spec = attention_spec(AttentionForm(1, 2, 512, 512, 128, program="bias"))
    (choice, *_) = candidates(spec, H100)
    staged, plain = (
        generate(spec, choice, label="Kernel", profile=replace(H100, shared_bytes=room)) for room in (232448, 210000)
    )
    assert "bias_data" in plain.text
    assert "bias_data" not in staged.text
    assert staged.why.endswith("; bias_tile by tensor copies")
    assert re.search(
        r"; read by element, since with bias_tile: \d+ bytes of shared memory, .* bias_tile: 32768 bytes", plain.why
    )


def test_factors_are_those_of_float32_alone() -> None:
    for dtype in (F32, F16, DType.I32):
        element = Load(tensor("x", dtype, 4), (Var("i"),))
        value = element * const(6, dtype) / const(2, dtype)
        assert unscaled(value) == ((element, 3.0) if dtype is F32 else (value, 1.0))


def test_tiles_beside_scores_are_in_registers_before_those_are_done() -> None:
    text = first(attention_spec(AttentionForm(1, 2, 512, 512, 128, program="bias"))).text
    fetched = [place.start() for place in re.finditer("fetch_fragment", text)]
    waits = [place.start() for place in re.finditer("products_wait", text)]
    assert len(fetched) == 2
    assert fetched[0] < waits[0] < fetched[1] < waits[1]


@pytest.mark.parametrize(("program", "vote"), [("kept", "flags_are<1>"), ("hidden", "flags_are<0>")])
def test_masks_of_keys_are_one_vote_where_they_hold_for_a_tile(program: str, vote: str) -> None:
    text = first(attention_spec(AttentionForm(2, 2, 512, 528, 128, program=program, causal=True))).text
    assert re.search(rf"if \(.*>= 0 && {vote}\(tile_flags_tile \+ slot \* 128\)\)", text)


def test_bounded_scores_need_no_maximum() -> None:
    capped = AttentionForm(1, 2, 300, 300, 128, program="cap")
    for form, bounded in (
        (capped, True),
        (replace(capped, dtype=F16), False),
        (replace(capped, program="none"), False),
    ):
        text = first(attention_spec(form)).text
        assert ("reduce_columns<Fmax>" in text) is not bounded
        assert ("all_within(s, 169.7" in text) is (form.program == "cap")  # half of the cap, over the scale


def test_a_maximum_rises_seldom_and_tiles_are_computed_again_where_that_fails() -> None:
    text = first(attention_spec(AttentionForm(1, 2, 300, 300, 128))).text
    assert "const bool rise = pass != 0 || must_rise(top, total, 1000000000.0f);" in text
    assert text.count("if (rise) {") == 2  # the maximum with what follows it, and the outputs so far
    assert text.count("reduce_columns<Fmax>(s, top, false);") == 2  # of the first tile as well
    assert text.count("if (pass != 0 && (line_word(again_at) >> ") == 2  # of the producer as well
    assert text.count("mark_unless_finite(again_at, ") == 2
    assert "must_rise(top, total, 30000.0f)" in first(attention_spec(AttentionForm(1, 2, 300, 300, 128, F16))).text


@pytest.mark.parametrize("known", [TOP, TOTAL])
def test_a_maximum_that_somebody_wants_to_know_always_rises(known: Var) -> None:
    spec = attention_spec(AttentionForm(1, 2, 300, 300, 128))
    place = spec.outputs[0].place
    other = Place(replace(place.tensor, name="known"), place.axes, place.index)
    spec = replace(spec, outputs=(*spec.outputs, Result(other, cast(known, BF16))))
    assert "must_rise" not in first(spec).text


def test_a_bias_that_slopes_is_one_number_of_a_thread_and_constants() -> None:
    text = first(attention_spec(AttentionForm(1, 2, 512, 512, 128, program="slope"))).text
    assert text.count("float slope_0;") == 2
    assert "(slope_0 + 0.0625f * (float)(-1 * ((x >> 1 & 1) * 8) + 1 * ((x >> 2) * 8 + (x & 1))))" in text


def test_the_scale_stays_out_of_scores_with_a_sink() -> None:
    spec = attention_spec(HEADS)
    b, h, i, _ = spec.score_axes
    sink = tensor("sink", F32, 2)
    spec = replace(spec, inputs=(*spec.inputs, sink), sink=View("sink", (b, h, i), Load(sink, (h,))))
    function, operands = kernel_for(spec)
    plain = trace(function, inputs=spec.inputs, operands=operands, extents={"block_m": 64, "block_n": 64})
    moved = keep_scale(plain)
    assert moved != plain
    rng = np.random.default_rng(0)
    arrays = {
        tensor.name: rng.standard_normal([Evaluator({}, {})(dim) for dim in tensor.shape]) for tensor in spec.inputs
    }
    q, k, v = (arrays[name] for name in "qkv")
    weights = np.exp(q @ k.swapaxes(-1, -2) * 128**-0.5)
    expected = weights @ v / (weights.sum(-1, keepdims=True) + np.exp(arrays["sink"])[:, None, None])
    for program in (plain, moved):
        found = interpret(program, arrays)["o"]
        assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)


def test_too_much_shared_memory_lists_the_buffers() -> None:
    spec = product_spec(ProductForm(4096, 4096, 4096))
    (choice, *_) = candidates(spec, H100, stages=6)
    with pytest.raises(
        CudaError, match=r"328800 bytes of shared memory.*a: 16384 bytes x 6; b: 32768 bytes x 6"
    ) as error:
        generate(spec, choice, label="Kernel")
    assert "take fewer stages or smaller tiles" in str(error.value)


def test_what_attention_does_per_key_besides_is_refused_by_name() -> None:
    spec = attention_spec(HEADS)
    scores = tensor("scores", F32, 1, 2, 300, 300)
    kept = Result(Place(scores, spec.score_axes, spec.score_axes), spec.raw)
    row_maximum = Step(Var("top", F32), "max", spec.raw)
    for changed, reason in (
        (replace(spec, outputs=(*spec.outputs, kept)), r"scores as outputs \(scores\)"),
        (replace(spec, reductions=(row_maximum,)), "reductions over the keys"),
        (replace(spec, weight=spec.probability * 2.0), "a program of the probabilities"),
    ):
        with pytest.raises(CudaError, match=reason):
            first(changed)


def test_an_operand_that_is_computed_is_refused_by_name() -> None:
    spec = product_spec(PLAIN)
    left = replace(spec.a, value=cast(cast(spec.a.value, F32) * 2.0, BF16))
    with pytest.raises(CudaError, match=r"operand A is .*tensor copies bring f16 or bf16 tensors as they are"):
        first(replace(spec, a=left))


def test_a_part_of_a_tensor_whose_last_tile_reads_beyond_it_is_refused() -> None:
    spec = product_spec(replace(PLAIN, depth=100))
    wide = product_spec(replace(PLAIN, depth=200))
    (g, m, k), load = spec.a.axes, wide.a.value
    assert isinstance(load, Load)
    part = replace(spec.a, value=Load(load.source, (m, k + 20)))
    with pytest.raises(CudaError, match="is a part of dim 1 of x and not a multiple of the tile's 64"):
        first(replace(spec, a=part, inputs=(wide.inputs[0], spec.inputs[1])))
    assert g.extent is not None


def test_arrays_without_elements_are_dense_whatever_their_strides() -> None:
    assert DeviceArray(0, 0, F32, (0, 4), (0, 0)).dense
    assert not DeviceArray(0, 0, F32, (2, 4), (8, 1)).dense


def test_extents_that_32_bits_do_not_count_are_refused() -> None:
    for form in (ProductForm(1 << 31, 64, 64), ProductForm(64, 64, 1 << 33)):
        with pytest.raises(CudaError, match="kernels count in 32 bits"):
            first(product_spec(form))
    deep = level_spec(LevelForm(4, 8, 1 << 26, group=1 << 26))
    with pytest.raises(CudaError, match="is 67108864 deep: weights that are decoded are looked at up to 16777216"):
        first(deep)


def test_integers_beside_scores_are_no_positions() -> None:
    """What is converted to a float may be arithmetic of narrower integers, which has no slope."""
    spec = attention_spec(HEADS)
    steps = tensor("steps", DType.I8, 300)
    value = cast(Load(steps, (spec.score_axes[3],)) * 3 + 1, F32)
    spec = replace(spec, inputs=(*spec.inputs, steps), score=spec.score + value)
    text = first(spec).text
    assert "steps_data" in text
    assert "slope_" not in text


def test_tiles_that_warpgroups_cannot_share_are_refused() -> None:
    with pytest.raises(CudaError, match="tiles of 96 rows: 64, 128 or 192"):
        first(product_spec(PLAIN), block_m=96, block_n=128, block_k=64)


def test_heads_of_another_width_are_refused() -> None:
    with pytest.raises(CudaError, match="heads of 80 elements: CUDA attention has 64, 128 and values of more than 256"):
        list(choices(attention_spec(replace(HEADS, width=80)), H100))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized", "serialised"),
        ("ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored", "register roles"),
        ("    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads", "spilled"),
    ],
)
def test_what_the_assembler_complains_of_is_an_error(line: str, message: str) -> None:
    good = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info : Used 168 registers"
    assert read_report(good).registers == 168
    with pytest.raises(CudaError, match=message):
        read_report(f"{line}\n{good}")


def _no_nvrtc() -> bool:
    try:
        load_nvrtc()
    except CudaError:
        return True
    return False


CASES: dict[str, Callable[[], Spec]] = {
    "product": lambda: product_spec(ProductForm(Sym("M"), 4096, 4096)),
    "guarded": lambda: product_spec(ProductForm(129, 1001, Sym("K"), F16, right_rows=True, program="bias")),
    "gelu": lambda: product_spec(ProductForm(4096, 4096, 512, program="gelu")),
    "attention": lambda: attention_spec(AttentionForm(2, 4, Sym("S"), Sym("S"), 128, causal=True)),
    "narrow": lambda: attention_spec(AttentionForm(2, 4, 4096, 4096, 64, F16, program="slope")),
}


@pytest.mark.cpu
@pytest.mark.skipif(_no_nvrtc(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("case", CASES)
def test_kernels_build_for_hopper_without_a_card(case: str, tmp_path: Path) -> None:
    kernel = compile_cuda(CASES[case](), label="Kernel", cache_directory=tmp_path)
    again = compile_cuda(CASES[case](), label="Kernel", cache_directory=tmp_path)
    assert kernel.cubin.image == again.cubin.image
    assert kernel.cubin.image[:4] == b"\x7fELF"
    assert kernel.name.encode() in kernel.cubin.image
    assert kernel.cubin.report.spills == 0
    assert 0 < kernel.cubin.report.registers <= 168
    assert kernel.plan.shared_bytes <= H100.shared_bytes


@pytest.mark.parametrize(("output", "steps"), [(BF16, 8), (F16, 4), (F32, 4)])
def test_sums_of_8_bit_products_are_as_long_as_the_rounding_of_results_covers(output: DType, steps: int) -> None:
    text = first(product_spec(ProductForm(256, 256, 4096, DType.F8E4M3, output=output))).text
    assert f"% {steps} == {steps - 1}" in text
    assert f"(last - first) % {steps} != 0" in text
