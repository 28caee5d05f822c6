"""Element types of node outputs.

Comes in: a `Call`. Goes out: an `ir.DataType` per output, None where the operator is not known.
"""

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from fuser.shape_call import Call

Types = Sequence[ir.DataType | None]
Rule = Callable[[Call], Types]
BOOL, INT64, FLOAT, UINT8 = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.UINT8


def like(index: int) -> Rule:
    """Every output has the type of one input."""
    return lambda call: [call.dtype(index)] * len(call.node.outputs)


def always(*types: ir.DataType) -> Rule:
    """Fixed types."""
    return lambda _: types


def first_then(index: int, *types: ir.DataType) -> Rule:
    """The first output has the type of an input, the others fixed types."""
    return lambda call: [call.dtype(index), *types]


def attribute(name: str, fallback: Callable[[Call], ir.DataType | None]) -> Rule:
    """The type that an attribute names, else a fallback."""

    def rule(call: Call) -> Types:
        code = call.integer(name)
        return [ir.DataType(code) if code else fallback(call)]

    return rule


def constant(call: Call) -> Types:
    """Constant and ConstantOfShape: the type of the `value` tensor (or of the attribute in its place)."""
    tensor = call.attribute("value")
    if tensor is not None:
        return [tensor.as_tensor().dtype]
    if call.node.op_type == "ConstantOfShape" or call.attribute("value_float") or call.attribute("value_floats"):
        return [FLOAT]
    whole = call.attribute("value_int") or call.attribute("value_ints")
    return [INT64 if whole else ir.DataType.STRING]


def normalization(call: Call) -> Types:
    """LayerNormalization: statistics in the stash type (float unless told otherwise)."""
    stash = ir.DataType(call.integer("stash_type", 1))
    return [call.dtype(0), stash, stash][: len(call.node.outputs)]


def quantized(call: Call) -> Types:
    """QuantizeLinear: its zero point's type, else `output_dtype`, else uint8."""
    code = call.integer("output_dtype")
    return [call.dtype(2) if call.has(2) else ir.DataType(code) if code else UINT8]


def skip_normalization(call: Call) -> Types:
    """SkipLayerNormalization: statistics are float."""
    return [call.dtype(0), FLOAT, FLOAT, call.dtype(0)][: len(call.node.outputs)]


def embedding(call: Call) -> Types:
    """EmbedLayerNormalization: the table's type; the mask index is int32."""
    return [call.dtype(2), ir.DataType.INT32, call.dtype(2)][: len(call.node.outputs)]


COMPARISONS = "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor"

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(COMPARISONS.split(), always(BOOL)),
    "ArgMax": always(INT64),
    "ArgMin": always(INT64),
    "Cast": attribute("to", lambda _: None),
    "CastLike": like(1),
    "Constant": constant,
    "ConstantOfShape": constant,
    "ConvInteger": always(ir.DataType.INT32),
    "DequantizeLinear": attribute("output_dtype", lambda call: call.dtype(1)),
    "Dropout": first_then(0, BOOL),
    "DynamicQuantizeLinear": always(UINT8, FLOAT, UINT8),
    "EmbedLayerNormalization": embedding,
    "EyeLike": attribute("dtype", lambda call: call.dtype(0)),
    "LayerNormalization": normalization,
    "MatMulInteger": always(ir.DataType.INT32),
    "MatMulIntegerToFloat": like(2),
    "MaxPool": first_then(0, INT64),
    "NonZero": always(INT64),
    "OneHot": like(2),
    "QLinearConv": like(7),
    "QLinearMatMul": like(7),
    "QuantizeLinear": quantized,
    "RandomNormal": attribute("dtype", lambda _: FLOAT),
    "RandomNormalLike": attribute("dtype", lambda call: call.dtype(0)),
    "RandomUniform": attribute("dtype", lambda _: FLOAT),
    "RandomUniformLike": attribute("dtype", lambda call: call.dtype(0)),
    "Shape": always(INT64),
    "Size": always(INT64),
    "SkipLayerNormalization": skip_normalization,
    "SkipSimplifiedLayerNormalization": skip_normalization,
    "TopK": first_then(0, INT64),
    "Where": like(1),
    "GatherBlockQuantized": like(2),
}
