"""Models with a recurrence over a time axis, one per way of spelling it: Scan, Loop, CumSum, sums over all of time."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser

Feeds = dict[str, np.ndarray]

SCAN_GATED = """
<ir_version: 10, opset_import: ["" : 21]>
gated (float[batch, seq, 4, 6] q, float[batch, seq, 2, 6] k, float[batch, seq, 2, 9] v, float[batch, seq, 2] g,
       float[batch, 2, 6, 9] past) => (float[batch, seq, 36] y, float[batch, 2, 6, 9] present)
<int64[4] turn = {0, 2, 1, 3}, int64[1] last = {-1}, int64[1] row = {-2}, int64[1] two = {2},
 int64[3] flat = {0, 0, -1}, int64[5] shared = {0, 2, 2, 6, 9}, int64[4] heads = {0, 4, 6, 9}>
{
  present, out = Scan <num_scan_inputs = 4, scan_input_axes = [1, 1, 1, 1], scan_output_axes = [1], body = step (
      float[batch, 2, 6, 9] S, float[batch, 4, 6] qt, float[batch, 2, 6] kt, float[batch, 2, 9] vt, float[batch, 2] gt)
      => (float[batch, 2, 6, 9] S2, float[batch, 4, 9] yt) {
    gate = Sigmoid(gt)
    gate1 = Unsqueeze(gate, last)
    gate2 = Unsqueeze(gate1, last)
    kept = Mul(S, gate2)
    kc = Unsqueeze(kt, last)
    vr = Unsqueeze(vt, row)
    outer = MatMul(kc, vr)
    S2 = Add(kept, outer)
    S3 = Unsqueeze(S2, two)
    S4 = Expand(S3, one5)
    S5 = Reshape(S4, heads)
    qr = Unsqueeze(qt, row)
    read = MatMul(qr, S5)
    yt = Squeeze(read, row)
  }> (past, q, k, v, g)
  y = Reshape(out, flat)
}
"""

SCAN_BACKWARDS = """
<ir_version: 10, opset_import: ["" : 21]>
backwards (float[seq, batch, 12] x, float[batch, 12] first) => (float[seq, batch, 12] y, float[batch, 12] z)
<float[1] scale = {0.5}>
{
  z, y = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1], body = step (
      float[batch, 12] h, float[batch, 12] xt) => (float[batch, 12] h2, float[batch, 12] yt) {
    decayed = Mul(h, scale)
    h2 = Add(decayed, xt)
    yt = Tanh(h)
  }> (first, x)
}
"""

SCAN_RECURRENT = """
<ir_version: 10, opset_import: ["" : 21]>
recurrent (float[seq, batch, 5] x, float[batch, 8] first) => (float[seq, batch, 8] y)
{
  last, hidden = Scan <num_scan_inputs = 1, body = step (float[batch, 8] h, float[batch, 5] xt)
      => (float[batch, 8] h2, float[batch, 8] yt) {
    a = MatMul(h, weight)
    b = MatMul(xt, into)
    c = Add(a, b)
    h2 = Tanh(c)
    yt = Identity(h2)
  }> (first, x)
  y = Relu(hidden)
}
"""

LOOP_SELECTIVE = """
<ir_version: 10, opset_import: ["" : 21]>
selective (float[batch, seq, 16] x, float[batch, seq, 16] dt, float[batch, seq, 4] b, float[batch, seq, 4] c)
    => (float[seq, batch, 16] y)
<int64[1] last = {-1}, int64[1] row = {-2}, bool go = {1}, int64 one = {1}, int64[2] tail = {16, 4},
 int64[1] zero = {0}>
{
  shape = Shape(x)
  seq = Gather(shape, one)
  n = Gather(shape, zero)
  wide = Concat <axis = 0> (n, tail)
  first = ConstantOfShape(wide)
  h_last, y = Loop <body = step (int64 i, bool on, float[batch, 16, 4] h) => (bool on2, float[batch, 16, 4] h2,
      float[batch, 16] yt) {
    on2 = Identity(on)
    xt = Gather <axis = 1> (x, i)
    raw = Gather <axis = 1> (dt, i)
    dtt = Softplus(raw)
    bt = Gather <axis = 1> (b, i)
    ct = Gather <axis = 1> (c, i)
    d1 = Unsqueeze(dtt, last)
    da = Mul(d1, A)
    decay = Exp(da)
    kept = Mul(decay, h)
    b1 = Unsqueeze(bt, row)
    x1 = Unsqueeze(xt, last)
    db = Mul(d1, b1)
    new = Mul(db, x1)
    h2 = Add(kept, new)
    c1 = Unsqueeze(ct, last)
    read = MatMul(h2, c1)
    yt = Squeeze(read, last)
  }> (seq, go, first)
}
"""

LOOP_EARLY = """
<ir_version: 10, opset_import: ["" : 21]>
early (float[batch, 16] x) => (float[batch, 16] y)
<int64 count = {7}, bool go = {1}, float limit = {40.0}>
{
  y = Loop <body = step (int64 i, bool on, float[batch, 16] h) => (bool on2, float[batch, 16] h2) {
    h2 = Add(h, x)
    top = ReduceMax <keepdims = 0> (h2)
    on2 = Less(top, limit)
  }> (count, go, x)
}
"""


LINEAR_ATTENTION = """
<ir_version: 10, opset_import: ["" : 21]>
linear (float[batch, seq, 32] q, float[batch, keys, 32] k, float[batch, keys, 32] v) => (float[batch, seq, 32] y)
<int64[4] split = {0, 0, 2, 16}, int64[3] flat = {0, 0, 32}, float one = {1.0}, int64[1] two = {2},
 int64[1] last = {-1}>
{
  q0 = Reshape(q, split)
  k0 = Reshape(k, split)
  v0 = Reshape(v, split)
  q1 = Transpose <perm = [0, 2, 1, 3]> (q0)
  k1 = Transpose <perm = [0, 2, 1, 3]> (k0)
  v1 = Transpose <perm = [0, 2, 1, 3]> (v0)
  q2 = Elu(q1)
  k2 = Elu(k1)
  phi_q = Add(q2, one)
  phi_k = Add(k2, one)
  turned = Transpose <perm = [0, 1, 3, 2]> (phi_k)
  kv = MatMul(turned, v1)
  total = ReduceSum <keepdims = 0> (phi_k, two)
  column = Unsqueeze(total, last)
  norm = MatMul(phi_q, column)
  read = MatMul(phi_q, kv)
  out = Div(read, norm)
  back = Transpose <perm = [0, 2, 1, 3]> (out)
  y = Reshape(back, flat)
}
"""

LINEAR_EINSUM = """
<ir_version: 10, opset_import: ["" : 21]>
einsum (float[batch, seq, 2, 16] q, float[batch, keys, 2, 16] k, float[batch, keys, 2, 24] v)
    => (float[batch, seq, 2, 24] y)
<int64[1] one = {1}, int64[1] last = {-1}, float tiny = {1e-4}>
{
  phi_q = Exp(q)
  phi_k = Exp(k)
  kv = Einsum <equation = "nshd,nshm->nhmd"> (phi_k, v)
  total = ReduceSum <keepdims = 1> (phi_k, one)
  shares = Mul(phi_q, total)
  norm = ReduceSum <keepdims = 1> (shares, last)
  safe = Add(norm, tiny)
  inverse = Reciprocal(safe)
  read = Einsum <equation = "nlhd,nhmd->nlhm"> (phi_q, kv)
  y = Mul(inverse, read)
}
"""

CAUSAL_CUMSUM = """
<ir_version: 10, opset_import: ["" : 21]>
causal (float[batch, 2, seq, 8] q, float[batch, 2, seq, 8] k, float[batch, 2, seq, 16] v)
    => (float[batch, 2, seq, 16] y)
<int64 two = {2}, int64[1] last = {-1}, int64[1] row = {-2}, float one = {1.0}>
{
  q1 = Elu(q)
  k1 = Elu(k)
  phi_q = Add(q1, one)
  phi_k = Add(k1, one)
  kc = Unsqueeze(phi_k, last)
  vr = Unsqueeze(v, row)
  outer = MatMul(kc, vr)
  kv = CumSum(outer, two)
  total = CumSum(phi_k, two)
  qr = Unsqueeze(phi_q, row)
  read = MatMul(qr, kv)
  num = Squeeze(read, row)
  shares = Mul(phi_q, total)
  norm = ReduceSum <keepdims = 1> (shares, last)
  y = Div(num, norm)
}
"""

CAUSAL_EINSUM = """
<ir_version: 10, opset_import: ["" : 21]>
causal (float[batch, 2, seq, 8] q, float[batch, 2, seq, 8] k, float[batch, 2, seq, 16] v)
    => (float[batch, 2, seq, 16] y)
<int64 two = {2}>
{
  outer = Einsum <equation = "bhnd,bhne->bhnde"> (k, v)
  kv = CumSum(outer, two)
  y = Einsum <equation = "bhnd,bhnde->bhne"> (q, kv)
}
"""

CUMULATIVE = """
<ir_version: 10, opset_import: ["" : 21]>
cumulative (float[batch, seq, 12] x) => (float[batch, seq, 12] y)
<int64 axis = {-2}, float half = {0.5}>
{
  sums = CumSum <exclusive = 1, reverse = 1> (x, axis)
  y = Mul(sums, half)
}
"""


BOTH_WAYS = """
<ir_version: 10, opset_import: ["" : 21]>
both (float[batch, seq, 12] x) => (float[batch, seq, 12] y)
<int64 axis = {1}>
{
  before = CumSum (x, axis)
  after = CumSum <exclusive = 1, reverse = 1> (x, axis)
  y = Mul(before, after)
}
"""


def _model(text: str, weights: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for name, array in (weights or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def recurrence_models(seed: int = 0) -> dict[str, onnx.ModelProto]:
    """Every spelling by name."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    five = {"one5": np.array([1, 1, 2, 1, 1], np.int64)}
    return {
        "scan-gated": _model(SCAN_GATED, five),
        "scan-backwards": _model(SCAN_BACKWARDS),
        "scan-recurrent": _model(SCAN_RECURRENT, {"weight": normal(8, 8) / 3, "into": normal(5, 8)}),
        "loop-selective": _model(LOOP_SELECTIVE, {"A": -np.abs(normal(16, 4))}),
        "linear-attention": _model(LINEAR_ATTENTION),
        "linear-einsum": _model(LINEAR_EINSUM),
        "causal-cumsum": _model(CAUSAL_CUMSUM),
        "causal-einsum": _model(CAUSAL_EINSUM),
        "cumulative": _model(CUMULATIVE),
    }


def early_exit_model() -> onnx.ModelProto:
    """A loop whose condition is computed: no recurrence of a known length."""
    return _model(LOOP_EARLY)


def recurrence_feeds(model: onnx.ModelProto, seed: int, *, batch: int = 2, seq: int = 5, keys: int = 6) -> Feeds:
    """Inputs for a model of this module; gates and step widths keep states bounded."""
    rng = np.random.default_rng(seed)
    feeds: Feeds = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        sizes = [{"batch": batch, "seq": seq, "keys": keys}.get(dim.dim_param, dim.dim_value) for dim in dims]
        array = rng.standard_normal(sizes).astype(np.float32)
        feeds[value.name] = -np.abs(array) if value.name == "g" else np.abs(array) if value.name == "dt" else array
    return feeds


def both_ways_model() -> onnx.ModelProto:
    """What a sum so far and a sum from here on make together: no step knows both."""
    return _model(BOTH_WAYS)
