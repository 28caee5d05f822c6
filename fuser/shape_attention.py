"""Output shapes of attention operators: ONNX opset 23 and newer, and ONNX Runtime's `com.microsoft` operators.

Comes in: a `Call`. Goes out: a shape per output. Operators that are not here fall back to what the file records.
"""

from collections.abc import Mapping

from fuser.dims import ONE, Shape, dim, product
from fuser.shape_call import Call, Result
from fuser.shape_rules import Rule, gemm, layer_normalization, matmul, matmul_shape, same
from fuser.shape_spatial import convolution
from tilecore.contract.expr import Expr


def attention(call: Call) -> Result:
    """ONNX Attention, 3-D [b, s, heads·d] and 4-D [b, heads, s, d]."""
    q, k, v = (call.shape(index) for index in range(3))
    if q is None or k is None or v is None:
        return [None] * len(call.node.outputs)
    if len(q) == 4:
        heads, kv_heads = q[1], k[1]
        queries, keys, width, v_width = q[2], k[2], k[3], v[3]
        result: Shape = (q[0], heads, queries, v_width)
    else:
        heads, kv_heads = dim(call.integer("q_num_heads", 1)), dim(call.integer("kv_num_heads", 1))
        width, v_width = call.dims.divide(k[2], kv_heads), call.dims.divide(v[2], kv_heads)
        queries, keys = q[1], k[1]
        result = (q[0], queries, heads * v_width)
    past = call.shape(4)
    total = keys if past is None else past[2] + keys
    if call.has(4) and past is None:
        total = call.fresh("total")
    presents: Result = [(q[0], kv_heads, total, width), (q[0], kv_heads, total, v_width)]
    return [result, *presents, (q[0], heads, queries, total)][: len(call.node.outputs)]


def linear_attention(call: Call) -> Result:
    """ONNX LinearAttention, packed [b, s, heads·d]; the state is [b, heads, d_k, d_v]."""
    q, v, state = call.shape(0), call.shape(2), call.shape(3)
    heads, kv_heads = call.integer("q_num_heads"), call.integer("kv_num_heads")
    k = call.shape(1)
    if q is None or k is None or v is None or not heads or not kv_heads:
        return [None, state]
    width, v_width = call.dims.divide(k[2], dim(kv_heads)), call.dims.divide(v[2], dim(kv_heads))
    return [(q[0], q[1], v_width * heads), state or (q[0], dim(kv_heads), width, v_width)]


def skip_normalization(call: Call) -> Result:
    """SkipLayerNormalization and SkipSimplified…: result, mean, inverse deviation, sum."""
    x = call.shape(0)
    if x is None:
        return [None] * len(call.node.outputs)
    statistics = (*x[:-1], ONE)
    return [x, statistics, statistics, x][: len(call.node.outputs)]


def embedding_normalization(call: Call) -> Result:
    """EmbedLayerNormalization: [b, s, hidden], mask index [b], embedding sum."""
    ids, table = call.shape(0), call.shape(2)
    if ids is None or table is None:
        return [None] * len(call.node.outputs)
    result = (*ids, table[1])
    return [result, (ids[0],), result][: len(call.node.outputs)]


def fused_attention(call: Call) -> Result:
    """com.microsoft Attention: one packed projection inside the operator, past [2, b, heads, p, d]."""
    x, bias, weight, past = call.shape(0), call.shape(2), call.shape(1), call.shape(4)
    heads = call.integer("num_heads", 1)
    sizes = call.integers("qkv_hidden_sizes")
    packed = bias[0] if bias else weight[1] if weight else None
    if x is None or (packed is None and sizes is None):
        return [None] * len(call.node.outputs)
    hidden: Expr = dim(sizes[2]) if sizes else call.dims.divide(packed or ONE, dim(3))
    width = call.dims.divide(hidden, dim(heads))
    total = call.fresh("total") if call.has(4) and past is None else x[1] + past[3] if past else x[1]
    return [(x[0], x[1], hidden), (dim(2), x[0], dim(heads), total, width)][: len(call.node.outputs)]


def multi_head_attention(call: Call) -> Result:
    """com.microsoft MultiHeadAttention: separate, packed KV [b, s, h, 2, d] or packed QKV [b, s, h, 3, d]."""
    q, k, v, past = call.shape(0), call.shape(1), call.shape(2), call.shape(6)
    heads = dim(call.integer("num_heads", 1))
    count = len(call.node.outputs)
    if q is None or (call.has(1) and k is None) or (call.has(2) and v is None):
        return [None] * count
    if k is None:  # packed QKV
        if len(q) != 5:
            return [None] * count
        queries, keys, hidden = q[1], q[1], q[2] * q[4]
    elif v is None:  # packed KV
        queries, keys, hidden = q[1], k[1], k[2] * k[4]
    elif len(v) == 4:  # past key and value given whole: [b, heads, s, d]
        queries, keys, hidden = q[1], k[2], v[1] * v[3]
    else:
        queries, keys, hidden = q[1], k[1], v[2]
    width = call.dims.divide(q[2], heads) if len(q) == 3 else q[4]
    total = call.fresh("total") if call.has(6) and past is None else keys + past[2] if past else keys
    return [
        (q[0], queries, hidden),
        (q[0], heads, total, width),
        (q[0], heads, total, call.dims.divide(hidden, heads)),
        (q[0], heads, queries, total),
    ][:count]


def grouped_query_attention(call: Call) -> Result:
    """com.microsoft GroupQueryAttention: present caches may be shared buffers, so their length stays open."""
    q, k, past = call.shape(0), call.shape(1), call.shape(3)
    heads, kv_heads = call.integer("num_heads", 1), call.integer("kv_num_heads", 1)
    count = len(call.node.outputs)
    if q is None or (call.has(1) and k is None):
        return [None] * count
    width = call.dims.divide(q[2], dim(heads if k is not None else heads + 2 * kv_heads))
    total = call.fresh("total") if call.has(3) or past is not None else q[1]
    present = (q[0], dim(kv_heads), total, width)
    return [(q[0], q[1], width * heads), present, present][:count]


def fused_matmul(call: Call) -> Result:
    """FusedMatMul: MatMul with either side's last two axes swapped."""
    a, b = call.shape(0), call.shape(1)
    if a is None or b is None or call.integer("transBatchA") or call.integer("transBatchB"):
        return [None]
    a = (*a[:-2], a[-1], a[-2]) if call.integer("transA") and len(a) > 1 else a
    b = (*b[:-2], b[-1], b[-2]) if call.integer("transB") and len(b) > 1 else b
    return [matmul_shape(call.dims, a, b)]


def matmul_n_bits(call: Call) -> Result:
    """MatMulNBits and kin: K and N are attributes."""
    a, n = call.shape(0), call.attribute("N")
    if a is None or n is None:
        return [None]
    call.dims.must_equal(a[-1], dim(call.integer("K")))
    return [(*a[:-1], dim(n.as_int()))]


def gather_block_quantized(call: Call) -> Result:
    """GatherBlockQuantized: as Gather; two 4-bit values share a byte of uint8 data."""
    data, indices = call.shape(0), call.shape(1)
    if data is None or indices is None:
        return [None]
    axis = call.integer("gather_axis") % len(data)
    packed = call.dtype(0) is not None and str(call.dtype(0)) == "UINT8" and call.integer("bits", 4) == 4
    last = (data[-1] * 2,) if packed else data[-1:]
    whole = (*data[:-1], *last)
    return [(*whole[:axis], *indices, *whole[axis + 1 :])]


def quantized_pair(call: Call) -> Result:
    """QLinearAdd and QLinearMul: broadcasting of inputs 0 and 3."""
    a, b = call.shape(0), call.shape(3)
    return [None if a is None or b is None else call.dims.broadcast_shapes(a, b)]


def quantized_gemm(call: Call) -> Result:
    """QGemm: as Gemm, the right side at input 3."""
    a, b = call.shape(0), call.shape(3)
    if a is None or b is None:
        return [None]
    rows = a[1] if call.integer("transA") else a[0]
    return [(rows, b[0] if call.integer("transB") else b[1])]


def bias_split(call: Call) -> Result:
    """BiasSplitGelu: half of the last axis."""
    x = call.shape(0)
    return [None if x is None else (*x[:-1], call.dims.divide(x[-1], dim(2)))]


def relative_bias(call: Call) -> Result:
    """RelativePositionBias: [1, heads, queries, keys]."""
    table, queries, keys = call.shape(0), call.dims_in(1), call.dims_in(2)
    if table is None or queries is None or keys is None:
        return [None]
    return [(ONE, table[1], product(queries), product(keys))]


STANDARD: Mapping[str, Rule] = {
    "Attention": attention,
    "LinearAttention": linear_attention,
    "SimplifiedLayerNormalization": layer_normalization,  # ONNX Runtime puts it in the standard domain
}

CONTRIB_SAME = (
    "BiasAdd BiasDropout BiasGelu BiasSoftmax DequantizeLinear FastGelu Gelu GroupNorm MoE QLinearLeakyRelu "
    "QLinearSigmoid QLinearSoftmax QMoE QuantizeLinear QuickGelu RotaryEmbedding Trilu"
)
CONTRIB: Mapping[str, Rule] = {
    **dict.fromkeys(CONTRIB_SAME.split(), same),
    "Attention": fused_attention,
    "BiasSplitGelu": bias_split,
    "DecoderMaskedMultiHeadAttention": multi_head_attention,
    "DynamicQuantizeMatMul": matmul,
    "EmbedLayerNormalization": embedding_normalization,
    "FusedConv": convolution,
    "FusedGemm": gemm,
    "FusedMatMul": fused_matmul,
    "GatherBlockQuantized": gather_block_quantized,
    "GroupQueryAttention": grouped_query_attention,
    "LayerNormalization": layer_normalization,
    "MatMulBnb4": matmul_n_bits,
    "MatMulFpQ4": matmul_n_bits,
    "MatMulIntegerToFloat": matmul,
    "MatMulNBits": matmul_n_bits,
    "MultiHeadAttention": multi_head_attention,
    "QGemm": quantized_gemm,
    "QLinearAdd": quantized_pair,
    "QLinearMul": quantized_pair,
    "RelativePositionBias": relative_bias,
    "SimplifiedLayerNormalization": layer_normalization,
    "SkipLayerNormalization": skip_normalization,
    "SkipSimplifiedLayerNormalization": skip_normalization,
    "TransposeMatMul": fused_matmul,
}
