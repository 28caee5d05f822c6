"""Small models, each of one region, over the range of shapes where fusing it may win or lose: what `cost.py` measures.

Every case has numbers for dims. Kinds: "row" (pointwise work, normalisations, joined halves, reductions), "contraction"
(dense, gated, batched, quantised, packed weights), "attention" (plain, masked, causal, one query) and "scan".
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from models.graph import GraphWriter

OPSET = 21
F32 = np.float32


@dataclass(frozen=True)
class CostCase:
    """One model: its kind, a name that says its shape, and how to build it."""

    kind: str
    name: str
    build: Callable[[], onnx.ModelProto]


def cost_cases() -> Iterator[CostCase]:
    """All cases, in the order of kinds."""
    yield from _rows()
    yield from _contractions()
    yield from _attentions()
    yield from _scans()


ROW_SHAPES = ((1, 64), (4, 64), (8, 8), (16, 256), (1, 4096), (64, 768), (128, 768), (512, 768), (512, 3072))
AWKWARD_SHAPES = ((20000, 3), (3, 20000), (2000, 17), (1, 200000))


def _rows() -> Iterator[CostCase]:
    for build in (
        _add_relu,
        _gelu,
        _silu,
        _gated,
        _softmax,
        _masked_softmax,
        _layer_norm,
        _skip_norm,
        _rms_norm,
        _rotate,
        _cast,
    ):
        for shape in (*ROW_SHAPES, *AWKWARD_SHAPES):
            if build is _rotate and (shape[1] % 2 or shape[0] == 3):
                continue
            name = f"{build.__name__.strip('_')} {shape[0]}×{shape[1]}"
            yield CostCase("row", name, lambda build=build, shape=shape: build(*shape))
    for build in (_turned_add, _sum_rows):
        for shape in ((1, 8, 12, 64), (1, 128, 12, 64), (8, 64, 32, 16)):
            name = f"{build.__name__.strip('_')} {'×'.join(map(str, shape))}"
            yield CostCase("row", name, lambda build=build, shape=shape: build(*shape))


def _finish(g: GraphWriter, y: str, dims: tuple[int, ...], dtype: type = F32) -> onnx.ModelProto:
    g.output(y, dtype, dims)
    return g.finish()


def _add_relu(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x, z = (g.input(name, F32, (rows, columns)) for name in "xz")
    return _finish(g, g.op("Relu", g.op("Add", x, z)), (rows, columns))


def _gelu(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.op("Add", g.input("x", F32, (rows, columns)), g.normal((columns,), std=1))
    inner = g.op("Erf", g.op("Div", x, g.constant(math.sqrt(2))))
    half = g.op("Mul", x, g.op("Add", inner, g.constant(1.0)))
    return _finish(g, g.op("Mul", half, g.constant(0.5)), (rows, columns))


def _silu(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", F32, (rows, columns))
    return _finish(g, g.op("Mul", x, g.op("Sigmoid", x)), (rows, columns))


def _gated(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x, z, m = (g.input(name, F32, (rows, columns)) for name in "xzm")
    y = g.op("Mul", g.op("Tanh", g.op("Sub", x, m)), g.op("Exp", g.op("Neg", g.op("Mul", z, z))))
    return _finish(g, y, (rows, columns))


def _softmax(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    return _finish(g, g.op("Softmax", g.input("x", F32, (rows, columns)), axis=-1), (rows, columns))


def _masked_softmax(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.op("Mul", g.input("x", F32, (rows, columns)), g.constant(0.125))
    x = g.op("Where", g.input("m", np.bool_, (1, columns)), x, g.constant(-1e9))
    return _finish(g, g.op("Softmax", x, axis=-1), (rows, columns))


def _layer_norm(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    gamma, beta = (g.normal((columns,), std=0.1, mean=mean) for mean in (1.0, 0.0))
    y = g.op("LayerNormalization", g.input("x", F32, (rows, columns)), gamma, beta, axis=-1)
    return _finish(g, y, (rows, columns))


def _skip_norm(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x, z = (g.input(name, F32, (rows, columns)) for name in "xz")
    gamma, beta = (g.normal((columns,), std=0.1, mean=mean) for mean in (1.0, 0.0))
    y = g.op("LayerNormalization", g.op("Add", x, z), gamma, beta, axis=-1)
    return _finish(g, y, (rows, columns))


def _rms_norm(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", F32, (rows, columns))
    mean = g.op("ReduceMean", g.op("Mul", x, x), g.constant([-1]), keepdims=1)
    y = g.op("Mul", g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.constant(1e-6)))), g.normal((columns,), std=1))
    return _finish(g, y, (rows, columns))


def _rotate(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x, cos, sin = (g.input(name, F32, (rows, columns)) for name in ("x", "cos", "sin"))
    half = columns // 2
    first = g.op("Slice", x, g.constant([0]), g.constant([half]), g.constant([-1]))
    second = g.op("Slice", x, g.constant([half]), g.constant([columns]), g.constant([-1]))
    turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
    return _finish(g, g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin)), (rows, columns))


def _cast(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.op("Cast", g.input("x", np.int64, (rows, columns)), to=onnx.TensorProto.FLOAT)
    return _finish(g, g.op("Mul", g.op("Sub", g.constant(1.0), x), g.constant(-1e4)), (rows, columns))


def _turned_add(batch: int, seq: int, heads: int, size: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.op("Add", g.input("x", F32, (batch, seq, heads, size)), g.normal((size,), std=1))
    return _finish(g, g.op("Transpose", x, perm=[0, 2, 1, 3]), (batch, heads, seq, size))


def _sum_rows(batch: int, seq: int, heads: int, size: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.op("Abs", g.input("x", F32, (batch, seq, heads, size)))
    return _finish(g, g.op("ReduceSum", x, g.constant([-1]), keepdims=0), (batch, seq, heads))


DENSE = (
    (1, 8, 8), (1, 64, 64), (4, 16, 16), (16, 64, 64), (128, 64, 64), (1, 768, 768), (4, 768, 768), (16, 768, 768),
    (128, 768, 768), (1, 768, 3072), (128, 768, 3072), (128, 3072, 768), (512, 768, 768), (1, 2048, 2048),
    (1, 4096, 1024), (1, 384, 8192), (1, 1024, 3072), (1, 2048, 8000), (8, 768, 5120), (8, 768, 3072), (512, 768, 2),
    (128, 768, 1), (1, 768, 2), (4096, 64, 1), (4096, 16, 4), (20000, 3, 8), (20000, 8, 3), (2048, 4, 64),
    (64, 4096, 8), (8, 768, 5000), (1, 384, 8000), (3, 100, 100), (7, 33, 65),
)  # fmt: skip


def _contractions() -> Iterator[CostCase]:
    for m, k, n in DENSE:
        for ending in ("bias", "gelu", "residual"):
            name = f"{ending} {m}×{k}×{n}"
            yield CostCase("contraction", name, lambda s=(m, k, n), e=ending: _dense(*s, ending=e))
    for batch, m, k, n in (
        (12, 128, 64, 128),
        (12, 1, 64, 128),
        (64, 8, 8, 8),
        (2, 512, 64, 512),
        (1000, 4, 4, 4),
        (96, 49, 32, 49),
    ):
        for turned in (False, True):
            name = f"{'q·kᵀ' if turned else 'a·b'} {batch}×{m}×{k}×{n}"
            yield CostCase("contraction", name, lambda s=(batch, m, k, n), t=turned: _batched(*s, turned=t))
    for m, k, n in ((1, 64, 172), (1, 768, 2048), (128, 768, 2048), (16, 256, 256)):
        yield CostCase("contraction", f"gated {m}×{k}×{n}", lambda s=(m, k, n): _gate_up(*s))
        yield CostCase("contraction", f"three {m}×{k}×{n}", lambda s=(m, k, n): _three(*s))
    for m, k, n in ((1, 768, 768), (16, 768, 768), (128, 768, 768), (128, 768, 3072), (8, 64, 64)):
        yield CostCase("contraction", f"qdq {m}×{k}×{n}", lambda s=(m, k, n): _qdq(*s))
        yield CostCase("contraction", f"integer {m}×{k}×{n}", lambda s=(m, k, n): _integer(*s))
    for m, k, n in ((1, 1024, 1024), (1, 2048, 2048), (16, 1024, 1024), (128, 1024, 1024)):
        for level in (0, 4):
            yield CostCase("contraction", f"nbits{level} {m}×{k}×{n}", lambda s=(m, k, n), a=level: _nbits(*s, level=a))
    for side, k, n in ((7, 64, 64), (16, 128, 256), (56, 64, 64), (112, 16, 96)):
        yield CostCase("contraction", f"conv {side}²×{k}×{n}", lambda s=(side, k, n): _conv(*s))


def _dense(m: int, k: int, n: int, *, ending: str) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", F32, (1, m, k))
    y = g.op("Add", g.op("MatMul", x, g.normal((k, n), std=k**-0.5)), g.normal((n,), std=1))
    if ending == "gelu":
        inner = g.op("Erf", g.op("Div", y, g.constant(math.sqrt(2))))
        y = g.op("Mul", g.op("Mul", y, g.op("Add", inner, g.constant(1.0))), g.constant(0.5))
    if ending == "residual":
        y = g.op("Add", y, g.input("skip", F32, (1, m, n)))
    return _finish(g, y, (1, m, n))


def _batched(batch: int, m: int, k: int, n: int, *, turned: bool) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    a = g.input("a", F32, (batch, m, k))
    b = g.input("b", F32, (batch, n, k) if turned else (batch, k, n))
    b = g.op("Transpose", b, perm=[0, 2, 1]) if turned else b
    return _finish(g, g.op("Mul", g.op("MatMul", a, b), g.constant(0.125)), (batch, m, n))


def _gate_up(m: int, k: int, n: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", F32, (1, m, k))
    gate, up = (g.op("MatMul", x, g.normal((k, n), std=k**-0.5)) for _ in range(2))
    return _finish(g, g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up), (1, m, n))


def _three(m: int, k: int, n: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", F32, (1, m, k))
    for _ in range(3):
        g.output(g.op("Add", g.op("MatMul", x, g.normal((k, n), std=k**-0.5)), g.normal((n,), std=1)), F32, (1, m, n))
    return g.finish()


def _qdq(m: int, k: int, n: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", np.uint8, (m, k))
    scale, zero = g.constant(0.05), g.constant(128, np.uint8)
    weight = g.initializer(np.random.default_rng(0).integers(-127, 128, (k, n)).astype(np.int8))
    w = g.op("DequantizeLinear", weight, g.constant(0.01), g.constant(0, np.int8))
    y = g.op("MatMul", g.op("DequantizeLinear", x, scale, zero), w)
    y = g.op("QuantizeLinear", g.op("Add", y, g.normal((n,), std=1)), g.constant(0.2), zero)
    return _finish(g, y, (m, n), np.uint8)


def _integer(m: int, k: int, n: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", np.uint8, (m, k))
    weight = g.initializer(np.random.default_rng(0).integers(-127, 128, (k, n)).astype(np.int8))
    total = g.op("MatMulInteger", x, weight, g.constant(128, np.uint8))
    y = g.op("Mul", g.op("Cast", total, to=onnx.TensorProto.FLOAT), g.constant(0.0005))
    return _finish(g, g.op("Add", y, g.normal((n,), std=1)), (m, n))


def _nbits(m: int, k: int, n: int, *, level: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    source, block = np.random.default_rng(0), 32
    x = g.input("x", F32, (1, m, k))
    packed = g.initializer(source.integers(0, 256, (n, k // block, block // 2)).astype(np.uint8))
    scales = g.initializer(source.random((n * (k // block),), dtype=F32) * F32(0.01))
    y = g.op(
        "MatMulNBits",
        x,
        packed,
        scales,
        domain="com.microsoft",
        K=k,
        N=n,
        bits=4,
        block_size=block,
        accuracy_level=level,
    )
    model = _finish(g, y, (1, m, n))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model


def _conv(side: int, k: int, n: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.input("x", F32, (1, k, side, side))
    y = g.op("Conv", x, g.normal((n, k, 1, 1), std=k**-0.5), g.normal((n,), std=1))
    return _finish(g, g.op("Relu", y), (1, n, side, side))


ATTENTIONS = (  # batch, heads, queries, keys, size
    (1, 1, 4, 4, 8), (1, 2, 16, 16, 16), (1, 12, 8, 8, 64), (1, 12, 32, 32, 64), (1, 12, 128, 128, 64),
    (1, 12, 384, 384, 64), (8, 12, 32, 32, 64), (64, 3, 49, 49, 32), (1, 8, 1, 16, 64), (1, 12, 1, 128, 64),
    (1, 32, 1, 1024, 128), (1, 8, 128, 77, 40), (4, 1, 128, 512, 64), (1, 1, 512, 512, 512), (256, 4, 4, 4, 16),
)  # fmt: skip


def _attentions() -> Iterator[CostCase]:
    for shape in ATTENTIONS:
        for variant in ("plain", "masked", "causal", "flat"):
            if variant == "causal" and shape[2] == 1:
                continue
            name = f"{variant} {'×'.join(map(str, shape))}"
            yield CostCase("attention", name, lambda s=shape, v=variant: _attention(*s, variant=v))


def _attention(batch: int, heads: int, queries: int, keys: int, size: int, *, variant: str) -> onnx.ModelProto:
    """`flat` has heads beside each other, [batch, seq, heads · size], as projections give them; others [b, h, s, d]."""
    g = GraphWriter(OPSET)
    flat = variant == "flat"

    def given(name: str, seq: int) -> str:
        if not flat:
            return g.input(name, F32, (batch, heads, seq, size))
        x = g.op("Reshape", g.input(name, F32, (batch, seq, heads * size)), g.constant([batch, seq, heads, size]))
        return g.op("Transpose", x, perm=[0, 2, 1, 3])

    q, k, v = given("q", queries), given("k", keys), given("v", keys)
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(size**-0.5))
    if variant == "masked":
        scores = g.op("Add", scores, g.input("mask", F32, (batch, 1, 1, keys)))
    if variant == "causal":
        seen = np.tril(np.ones((queries, keys), bool), keys - queries)[None, None]
        scores = g.op("Where", g.initializer(seen), scores, g.constant(-math.inf))
    y = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    if not flat:
        return _finish(g, y, (batch, heads, queries, size))
    y = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.constant([batch, queries, heads * size]))
    return _finish(g, y, (batch, queries, heads * size))


def _scans() -> Iterator[CostCase]:
    for rows, columns in ((1, 64), (16, 64), (128, 768), (1024, 16), (16, 20000)):
        yield CostCase("scan", f"cumsum {rows}×{columns}", lambda s=(rows, columns): _cumsum(*s))
    for shape in ((1, 1, 8, 8, 8), (1, 8, 128, 64, 64), (1, 8, 512, 64, 64), (2, 4, 1, 64, 64)):
        yield CostCase("scan", f"linear {'×'.join(map(str, shape))}", lambda s=shape: _linear_attention(*s))
    for seq, batch, width in ((8, 1, 16), (64, 1, 256), (128, 8, 64)):
        yield CostCase("scan", f"decay {seq}×{batch}×{width}", lambda s=(seq, batch, width): _decay(*s))


def _cumsum(rows: int, columns: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    x = g.op("Abs", g.input("x", F32, (rows, columns)))
    return _finish(g, g.op("CumSum", x, g.constant(0)), (rows, columns))


def _linear_attention(batch: int, heads: int, seq: int, size: int, width: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    q, k = (g.op("Relu", g.input(name, F32, (batch, heads, seq, size))) for name in "qk")
    v = g.input("v", F32, (batch, heads, seq, width))
    state = g.op("MatMul", g.op("Transpose", k, perm=[0, 1, 3, 2]), v)
    return _finish(g, g.op("MatMul", q, state), (batch, heads, seq, width))


def _decay(seq: int, batch: int, width: int) -> onnx.ModelProto:
    g = GraphWriter(OPSET)
    first = g.input("first", F32, (batch, width))
    x = g.input("x", F32, (seq, batch, width))

    def step() -> None:
        h, xt = g.input("h", F32, (batch, width)), g.input("xt", F32, (batch, width))
        kept = g.op("Add", g.op("Mul", h, g.constant(0.9)), xt)
        g.output(kept, F32, (batch, width))
        g.output(g.op("Tanh", kept), F32, (batch, width))

    last, y = g.ops("Scan", first, x, outs=(None, None), num_scan_inputs=1, body=g.body("step", step))
    g.output(last, F32, (batch, width))
    return _finish(g, y, (seq, batch, width))
