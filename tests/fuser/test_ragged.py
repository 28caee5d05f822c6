"""Attention over tokens alone: what it computes, however a model hides padding, and what stays padded and why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from region_oracle import Scanned, check_regions

from fuser.find import find
from fuser.load import load
from fuser.unpad import ROWS, unpad
from models import blocks
from models.graph import GraphWriter
from tilecore.contract.expr import Op, loads, walk
from tilecore.contract.spec import AttentionSpec

Array = np.ndarray[Any, Any]
HEADS, WIDTH = 2, 4
HIDDEN = HEADS * WIDTH
MASKS = {
    "lengths": [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]],
    "holes": [[0, 0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]],
    "a sequence without tokens": [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 1]],
    "no tokens": [[0, 0, 0], [0, 0, 0]],
    "one token": [[1]],
}


class Encoder:
    """One layer: projections, attention in pieces of which a test gives some, a projection."""

    def __init__(self, mask_type: type = np.int64, opset: int = 17) -> None:
        self.g = GraphWriter(opset)
        self.x = self.g.input("x", np.float32, ("batch", "seq", HIDDEN))
        self.mask = self.g.input("attention_mask", mask_type, ("batch", "seq"))

    def projected(self) -> str:
        return blocks.linear(self.g, self.x, (HIDDEN, HIDDEN))

    def heads(self, value: str, *, keys: bool = False) -> str:
        shaped = self.g.op("Reshape", value, self.g.constant([0, 0, HEADS, WIDTH]))
        return self.g.op("Transpose", shaped, perm=[0, 2, 3, 1] if keys else [0, 2, 1, 3])

    def scores(self) -> str:
        product = self.g.op("MatMul", self.heads(self.projected()), self.heads(self.projected(), keys=True))
        return self.g.op("Mul", product, self.g.constant(np.float32(WIDTH**-0.5)))

    def wide(self, mask: str | None = None) -> str:
        """The mask [batch, 1, 1, seq]."""
        return self.g.op("Unsqueeze", mask or self.mask, self.g.constant([1, 2]))

    def lowest(self, low: float = -1e9) -> str:
        """0 at tokens, `low` at padding."""
        shown = self.g.op("Cast", self.wide(), to=onnx.TensorProto.FLOAT)
        return self.g.op(
            "Mul", self.g.op("Sub", self.g.constant(np.float32(1)), shown), self.g.constant(np.float32(low))
        )

    def order(self, op: str = "LessOrEqual") -> str:
        """[seq, seq]: whether a key stands before a query."""
        length = self.g.op("Squeeze", self.g.op("Shape", self.x, start=1, end=2), self.g.constant([0]))
        places = self.g.op("Range", self.g.constant(0), length, self.g.constant(1))
        return self.g.op(op, places, self.g.op("Unsqueeze", places, self.g.constant([1])))

    def bias(self) -> str:
        """[1, heads, seq, seq] out of a table, by the distance of the places."""
        g = self.g
        length = g.op("Squeeze", g.op("Shape", self.x, start=1, end=2), g.constant([0]))
        places = g.op("Range", g.constant(0), length, g.constant(1))
        distance = g.op("Sub", places, g.op("Unsqueeze", places, g.constant([1])))
        bucket = g.op("Add", g.op("Max", g.op("Min", distance, g.constant(4)), g.constant(-4)), g.constant(4))
        found = g.op("Gather", g.normal((9, HEADS), std=1.0), bucket)
        return g.op("Unsqueeze", g.op("Transpose", found, perm=[2, 0, 1]), g.constant([0]))

    def attended(self, scores: str, *, weights: Callable[[str], str] = lambda shares: shares) -> str:
        shares = weights(self.g.op("Softmax", scores, axis=-1))
        return self.g.op("MatMul", shares, self.heads(self.projected()))

    def merged(self, heads: str) -> str:
        joined = self.g.op("Transpose", heads, perm=[0, 2, 1, 3])
        return self.g.op("Reshape", joined, self.g.constant([0, 0, HIDDEN]))

    def finish(self, value: str, *others: tuple[str, tuple[int | str, ...]]) -> onnx.ModelProto:
        out = blocks.linear(self.g, value, (HIDDEN, HIDDEN))
        self.g.output(out, np.float32, ("batch", "seq", HIDDEN))
        for name, dims in others:
            self.g.output(name, np.float32, dims)
        return self.g.finish()


def added() -> onnx.ModelProto:
    e = Encoder()
    return e.finish(e.merged(e.attended(e.g.op("Add", e.scores(), e.lowest()))))


def added_floats() -> onnx.ModelProto:
    e = Encoder(np.float32)
    low = e.g.op("Mul", e.g.op("Sub", e.g.constant(np.float32(1)), e.wide()), e.g.constant(np.float32(-1e4)))
    return e.finish(e.merged(e.attended(e.g.op("Add", e.scores(), low))))


def chosen() -> onnx.ModelProto:
    e = Encoder(np.bool_)
    shown = e.g.op("Where", e.wide(), e.scores(), e.g.constant(np.float32(-np.inf)))
    return e.finish(e.merged(e.attended(shown)))


def compared() -> onnx.ModelProto:
    e = Encoder()
    hidden = e.g.op("Equal", e.wide(), e.g.constant(0))
    shown = e.g.op("Where", hidden, e.g.constant(np.finfo(np.float32).min), e.scores())
    return e.finish(e.merged(e.attended(shown)))


def causal() -> onnx.ModelProto:
    """One mask of both kinds, made once."""
    e = Encoder(np.bool_)
    sees = e.g.op("And", e.wide(), e.order())
    low = e.g.op("Where", sees, e.g.constant(np.float32(0)), e.g.constant(np.finfo(np.float32).min))
    return e.finish(e.merged(e.attended(e.g.op("Add", e.scores(), low))))


def biased() -> onnx.ModelProto:
    """A bias by relative place, which the mask is added to once for all layers."""
    e = Encoder()
    bias = e.g.op("Add", e.bias(), e.lowest())
    first = e.merged(e.attended(e.g.op("Add", e.scores(), bias)))
    e.x = blocks.linear(e.g, first, (HIDDEN, HIDDEN))
    return e.finish(e.merged(e.attended(e.g.op("Add", e.scores(), bias))))


def masked_twice(mask_type: type = np.int64) -> onnx.ModelProto:
    """Queries and keys are masked, and weights again after the softmax."""
    e = Encoder(mask_type)
    pairs = e.g.op("Mul", e.wide(), e.g.op("Unsqueeze", e.mask, e.g.constant([1, 3])))
    seen = e.g.op("Cast", pairs, to=onnx.TensorProto.BOOL)
    shown = e.g.op("Where", seen, e.scores(), e.g.constant(np.finfo(np.float32).min))
    return e.finish(
        e.merged(e.attended(shown, weights=lambda shares: e.g.op("Where", seen, shares, e.g.constant(np.float32(0)))))
    )


def near() -> onnx.ModelProto:
    """A window by place: holes count."""
    e = Encoder()
    length = e.g.op("Squeeze", e.g.op("Shape", e.x, start=1, end=2), e.g.constant([0]))
    places = e.g.op("Range", e.g.constant(0), length, e.g.constant(1))
    distance = e.g.op("Abs", e.g.op("Sub", places, e.g.op("Unsqueeze", places, e.g.constant([1]))))
    inside = e.g.op("Where", e.g.op("Less", distance, e.g.constant(3)), e.scores(), e.g.constant(np.float32(-1e9)))
    return e.finish(e.merged(e.attended(e.g.op("Add", inside, e.lowest()))))


def heads_in_the_batch() -> onnx.ModelProto:
    """[batch · heads, seq, width], as older exports have it."""
    e = Encoder()
    g = e.g

    def flat(value: str) -> str:
        turned = g.op("Transpose", g.op("Reshape", value, g.constant([0, 0, HEADS, WIDTH])), perm=[0, 2, 1, 3])
        whole = g.op("Concat", g.constant([-1]), g.op("Shape", e.x, start=1, end=2), g.constant([WIDTH]), axis=0)
        return g.op("Reshape", turned, whole)

    keys = g.op("Transpose", flat(e.projected()), perm=[0, 2, 1])
    product = g.op("MatMul", flat(e.projected()), keys)
    dims = [g.op("Shape", e.x, start=axis, end=axis + 1) for axis in (0, 1)]
    apart = g.op("Reshape", product, g.op("Concat", dims[0], g.constant([HEADS]), dims[1], dims[1], axis=0))
    joined = g.op("Reshape", g.op("Add", apart, e.lowest()), g.op("Concat", g.constant([-1]), dims[1], dims[1], axis=0))
    out = g.op("MatMul", g.op("Softmax", joined, axis=-1), flat(e.projected()))
    heads = g.op("Reshape", out, g.op("Concat", dims[0], g.constant([HEADS]), dims[1], g.constant([WIDTH]), axis=0))
    return e.finish(e.merged(heads))


def turned() -> onnx.ModelProto:
    """Queries and keys are multiplied by what depends on their place."""
    e = Encoder()
    table = e.g.input("table", np.float32, (1, 1, "seq", WIDTH))
    query = e.g.op("Mul", e.heads(e.projected()), table)
    key = e.g.op("Transpose", e.g.op("Mul", e.heads(e.projected()), table), perm=[0, 1, 3, 2])
    return e.finish(e.merged(e.attended(e.g.op("Add", e.g.op("MatMul", query, key), e.lowest()))))


def operator() -> onnx.ModelProto:
    """ONNX's own operator, with a mask of bools."""
    e = Encoder(np.bool_, opset=23)
    q, k, v = (e.projected() for _ in range(3))
    out = e.g.op("Attention", q, k, v, e.wide(), q_num_heads=HEADS, kv_num_heads=HEADS)
    return e.finish(out)


SPELLINGS = {
    make.__name__: make
    for make in (
        added, added_floats, chosen, compared, causal, biased, masked_twice, near, heads_in_the_batch, turned, operator,
    )
}  # fmt: skip


def unpadded(model: onnx.ModelProto, folder: Path) -> Scanned:
    path = folder / "model.onnx"
    onnx.save(model, path)
    loaded = load(path)
    unpad(loaded, "attention_mask")
    found = find(loaded)
    return Scanned(found.model, found.shapes, found.regions, found.misses)


def feeds_for(model: onnx.ModelProto, mask: Array, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    feeds = {"x": rng.standard_normal((*mask.shape, HIDDEN)).astype(np.float32)}
    if "table" in kinds:
        feeds["table"] = rng.standard_normal((1, 1, mask.shape[1], WIDTH)).astype(np.float32)
    return feeds | {"attention_mask": mask.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds["attention_mask"]))}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_ragged_and_right(spelling: str, tmp_path: Path) -> None:
    """Every region against the graph, in float64: rows of tokens in, rows of tokens out, for masks with holes too."""
    model = SPELLINGS[spelling]()
    found = unpadded(model, tmp_path)
    attentions = found.of("attention")
    assert len(attentions) == (2 if spelling == "biased" else 1)
    for region in attentions:
        assert "ragged" in region.label, region.label
        assert isinstance(region.spec, AttentionSpec)
        assert (region.spec.weight is None) == (spelling != "masked_twice")  # products of elements may be 0
        for view in (region.spec.q, region.spec.k, region.spec.v):
            assert not any("ScatterND" in load.source.name for load in loads(view.value))
    for mask in MASKS.values():
        check_regions(found, feeds_for(model, np.array(mask)))


@pytest.mark.parametrize(("mask_type", "large"), [(np.int64, 2**32), (np.int32, 2**16)])
def test_a_product_of_two_elements_that_wraps_to_0_hides_the_pair(mask_type: type, large: int, tmp_path: Path) -> None:
    """Neither token is padding, but what the graph multiplies of them is 0."""
    model = masked_twice(mask_type)
    found = unpadded(model, tmp_path)
    (region,) = found.of("attention")
    assert "ragged" in region.label
    check_regions(found, feeds_for(model, np.array([[large, 1, 0, large, 2], [1, large, 1, 1, 0]])))


def test_order_is_told_by_tokens_and_distance_by_places(tmp_path: Path) -> None:
    """A causal mask clips the keys of a token; the window of `near` and a bias look their places up."""
    (by_order,) = unpadded(SPELLINGS["causal"](), tmp_path).of("attention")
    assert isinstance(by_order.spec, AttentionSpec)
    assert not any(load.source.name == ROWS for load in loads(by_order.spec.score))
    assert any(isinstance(part, Op) and part.name == "le" for part in walk(by_order.spec.score))
    (by_distance,) = unpadded(SPELLINGS["near"](), tmp_path).of("attention")
    assert isinstance(by_distance.spec, AttentionSpec)
    assert any(load.source.name == ROWS for load in loads(by_distance.spec.score))


def unmasked() -> onnx.ModelProto:
    e = Encoder()
    return e.finish(e.merged(e.attended(e.scores())))


def hardly_masked() -> onnx.ModelProto:
    e = Encoder()
    return e.finish(e.merged(e.attended(e.g.op("Add", e.scores(), e.lowest(-2.0)))))


def by_queries() -> onnx.ModelProto:
    """The mask hides whole rows, not keys."""
    e = Encoder()
    rows = e.g.op("Cast", e.g.op("Unsqueeze", e.mask, e.g.constant([1, 3])), to=onnx.TensorProto.BOOL)
    shown = e.g.op("Where", rows, e.scores(), e.g.constant(np.float32(-1e9)))
    return e.finish(e.merged(e.attended(shown)))


def by_a_neighbour() -> onnx.ModelProto:
    """The mask of the next key."""
    e = Encoder()
    g = e.g
    ends = g.op("Concat", g.op("Slice", e.mask, g.constant([1]), g.constant([2**31]), g.constant([1])),
                g.op("Slice", e.mask, g.constant([0]), g.constant([1]), g.constant([1])), axis=1)  # fmt: skip
    shown = g.op(
        "Where", g.op("Cast", e.wide(ends), to=onnx.TensorProto.BOOL), e.scores(), g.constant(np.float32(-1e9))
    )
    return e.finish(e.merged(e.attended(shown)))


def read_padded() -> onnx.ModelProto:
    e = Encoder()
    heads = e.attended(e.g.op("Add", e.scores(), e.lowest()))
    most = e.g.op("ReduceMax", heads, axes=[2], keepdims=0)
    return e.finish(e.merged(heads), (most, ("batch", HEADS, WIDTH)))


def kept_weights() -> onnx.ModelProto:
    e = Encoder()
    kept: list[str] = []

    def keep(shares: str) -> str:
        kept.append(shares)
        return shares

    heads = e.attended(e.g.op("Add", e.scores(), e.lowest()), weights=keep)
    return e.finish(e.merged(heads), (kept[0], ("batch", HEADS, "seq", "seq")))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unmasked, "nothing shows that 'attention_mask' hides its keys"),
        (hardly_masked, "nothing shows that 'attention_mask' hides its keys"),
        (by_queries, "nothing shows that 'attention_mask' hides its keys"),
        (by_a_neighbour, "nothing shows that 'attention_mask' hides its keys"),
        (read_padded, "is read as a padded tensor"),
        (kept_weights, "its scores or probabilities are read by something else"),
    ],
)
def test_what_stays_padded_says_why_and_is_right(
    make: Callable[[], onnx.ModelProto], reason: str, tmp_path: Path
) -> None:
    model = make()
    found = unpadded(model, tmp_path)
    (region,) = found.of("attention")
    assert reason in region.label
    assert "ragged" not in region.label
    check_regions(found, feeds_for(model, np.array(MASKS["holes"])))


def test_models_with_padding_are_not_ragged(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(added(), path)
    (region,) = [region for region in find(load(path)).regions if region.kind == "attention"]
    assert region.label == "attention, masked"
    assert not any("tilefuse" in (node.name or "") for node in ir.load(path).graph)
