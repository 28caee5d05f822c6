"""MatMulNBits: its packed weights stay packed, and what a region computes is (level − zero point) · scale, exactly.

The oracle unpacks the same bytes in numpy and multiplies in double precision.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from fuser.packing import packing
from fuser.scan import scan
from fuser.shapes import infer
from tilecore.canonical import canonical
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.spec import ContractionSpec
from tilecore.pack import pack_constants
from tilecore.profile import profile_named
from tilecore.recommend import rank

N = 24


@dataclass(frozen=True)
class Weights:
    """How weights are stored: bits and block size, kind of zero points, flat or square scales, type of A and scales."""

    depth: int = 96
    bits: int = 4
    block: int = 32
    zeros: str = ""
    flat: bool = False
    bias: bool = False
    half: bool = False


FORMS = {
    "4 bits": Weights(),
    "4 bits, zero points": Weights(zeros="packed", bias=True),
    "odd number of blocks, flat": Weights(depth=80, block=16, zeros="packed", flat=True),
    "a part of a block": Weights(depth=70, block=32, zeros="packed"),
    "float zero points": Weights(depth=128, block=64, zeros="float"),
    "8 bits": Weights(bits=8, block=16),
    "8 bits, zero points": Weights(bits=8, block=32, zeros="packed", bias=True),
    "half": Weights(depth=128, block=128, zeros="packed", bias=True, half=True),
}


def stored(form: Weights) -> dict[str, np.ndarray]:
    """The node's constants."""
    rng = np.random.default_rng(form.depth)
    kind = np.float16 if form.half else np.float32
    blocks = -(-form.depth // form.block)
    made = {
        "B": rng.integers(0, 256, (N, blocks, form.block * form.bits // 8)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.03, (N, blocks)).astype(kind),
    }
    if form.zeros == "packed":
        made["zeros"] = rng.integers(0, 256, (N, -(-blocks * form.bits // 8))).astype(np.uint8)
    if form.zeros == "float":
        made["zeros"] = rng.uniform(0, 15, (N, blocks)).astype(kind)
    if form.bias:
        made["bias"] = rng.standard_normal(N).astype(kind)
    if form.flat:
        made |= {name: made[name].reshape(-1) for name in ("scales", "zeros") if name in made}
    return made


def model_of(form: Weights, **attributes: int) -> onnx.ModelProto:
    constants = stored(form)
    inputs = ["A", "B", "scales", *(name if name in constants else "" for name in ("zeros", "groups", "bias"))]
    kind = TensorProto.FLOAT16 if form.half else TensorProto.FLOAT
    given: dict[str, Any] = {"K": form.depth, "N": N, "bits": form.bits, "block_size": form.block} | attributes
    node = helper.make_node("MatMulNBits", inputs, ["Y"], name="product", domain="com.microsoft", **given)
    graph = helper.make_graph(
        [node],
        "packed",
        [helper.make_tensor_value_info("A", kind, ["S", form.depth])],
        [helper.make_tensor_value_info("Y", kind, ["S", N])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def unpacked(array: np.ndarray, bits: int) -> np.ndarray:
    return np.stack([array >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1).reshape(len(array), -1)


def weight_of(form: Weights) -> np.ndarray:
    """The weight [K, N] in double precision."""
    constants = stored(form)
    blocks = -(-form.depth // form.block)
    levels = unpacked(constants["B"].reshape(N, -1), form.bits).astype(np.float64)
    zeros = np.full((N, blocks), 2.0 ** (form.bits - 1))
    if form.zeros == "packed":
        zeros = unpacked(constants["zeros"].reshape(N, -1), form.bits)[:, :blocks].astype(np.float64)
    if form.zeros == "float":
        zeros = constants["zeros"].astype(np.float64)
    scales = constants["scales"].astype(np.float64).reshape(N, blocks)
    spread = [np.repeat(part, form.block, 1) for part in (zeros, scales)]
    return ((levels - spread[0]) * spread[1])[:, : form.depth].T


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_packed_weights_are_read_as_they_are_stored(form: Weights) -> None:
    model = ir.from_proto(model_of(form, accuracy_level=4))
    (region,), misses = scan(model, infer(model))
    assert isinstance(region.spec, ContractionSpec)
    assert not misses
    assert DType.U8 in {tensor.dtype for tensor in region.spec.inputs}
    kind = np.float16 if form.half else np.float32
    left = np.random.default_rng(1).standard_normal((5, form.depth)).astype(kind)
    constants = stored(form) | {"A": left}
    expected = left.astype(np.float64) @ weight_of(form) + constants.get("bias", np.zeros(N)).astype(np.float64)
    bound = (np.abs(left.astype(np.float64)) @ np.abs(weight_of(form))).max() * (1e-3 if form.half else 1e-6)

    computed = evaluate(region.spec, {tensor.name: constants[tensor.name] for tensor in region.spec.inputs})["Y"]
    np.testing.assert_allclose(computed.astype(np.float64), expected, rtol=0, atol=bound)

    packed, positions = pack_constants(canonical(region.spec))
    names = {region.spec.inputs[position].name for position in positions}
    assert {"B", "scales"} <= names or form.depth == form.block
    arrays: dict[str, np.ndarray] = {}
    for position, (tensor, value) in enumerate(zip(packed.inputs, region.inputs, strict=True)):
        if position in positions:
            assert value.const_value is not None
            panels = packing(region, position).packed(value.const_value, "panels").numpy()
            assert panels.dtype == constants[value.name or ""].dtype
            arrays[tensor.name] = panels
        else:
            arrays[tensor.name] = constants[value.name or ""]
    np.testing.assert_array_equal(evaluate(packed, arrays)["y0"], computed)


def test_unpacked_weights_stay_in_the_cache() -> None:
    model = ir.from_proto(model_of(Weights(depth=4096)))
    (region,), _ = scan(model, infer(model))
    profile = profile_named("zen3")
    ranked = rank(pack_constants(canonical(region.spec))[0], profile, profile.target)
    depths = {candidate.config["block_k"] for candidate in ranked if not candidate.rejected}
    assert depths
    assert max(depths) < 4096
    assert any("unpacked weights" in candidate.rejected for candidate in ranked)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [({"bits": 2}, "2 bits"), ({"weight_prepacked": 1}, "prepacked"), ({"N": 23}, "weights of")],
)
def test_other_forms_are_missed(attributes: dict[str, int], reason: str) -> None:
    model = ir.from_proto(model_of(FORMS["4 bits"], **attributes))
    regions, (miss,) = scan(model, infer(model))
    assert not regions
    assert reason in miss.reason


def test_group_indices_are_missed() -> None:
    proto = model_of(FORMS["4 bits"])
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(96, np.int32), "groups"))
    proto.graph.node[0].input[4:] = ["groups"]
    model = ir.from_proto(proto)
    regions, (miss,) = scan(model, infer(model))
    assert not regions
    assert "g_idx" in miss.reason
