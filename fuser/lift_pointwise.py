"""Element rules of operators that compute each element from the elements at the same (broadcast) place.

Comes in: an `Element`. Goes out: a scalar expression with ONNX's meaning: integer division truncates, `Mod` follows the
divisor's sign unless `fmod`, NaN and infinities go through as IEEE has them.
"""

import math
from collections.abc import Callable
from functools import reduce

import ml_dtypes
import numpy as np

from fuser.element import Element
from fuser.quantized import dequantize, quantize, quantized_pair, quantized_unary
from tilecore.contract.dtype import from_onnx
from tilecore.contract.expr import Const, Expr, apply, binary, cast, const, nonnegative, select, unary

Rule = Callable[[Element], Expr]


def _unary(name: str) -> Rule:
    return lambda e: unary(name, e.broadcast(0))


def _binary(name: str) -> Rule:
    def rule(e: Element) -> Expr:
        return binary(name, e.broadcast(0), e.broadcast(1))

    return rule


def _nary(name: str) -> Rule:
    def rule(e: Element) -> Expr:
        parts = [e.broadcast(i) for i in range(len(e.node.inputs))]
        return reduce(lambda a, b: binary(name, a, b), parts)

    return rule


def _of(function: Callable[[Expr], Expr]) -> Rule:
    """A function of one element, computed in the element's type."""
    return lambda e: function(e.broadcast(0))


def _number(value: float, like: Expr) -> Const:
    return const(like.dtype.row.numpy.type(value).item(), like.dtype)


def _rounding_only_floats(name: str) -> Rule:
    """Floor, Ceil and Round leave integers alone."""
    return _of(lambda x: unary(name, x) if x.dtype.is_float else x)


def _divide(e: Element) -> Expr:
    left, right = e.broadcast(0), e.broadcast(1)
    if left.dtype.is_float:
        return binary("div", left, right)
    if nonnegative(left) and nonnegative(right):
        return binary("floordiv", left, right)
    size = binary("floordiv", unary("abs", left), unary("abs", right))
    zero = _number(0, left)
    return select(apply("ne", binary("lt", left, zero), binary("lt", right, zero)), unary("neg", size), size)


def _mod(e: Element) -> Expr:
    left, right = e.broadcast(0), e.broadcast(1)
    if left.dtype.is_float:
        raise e.error("the float remainder has no exact rule")
    if not e.attribute("fmod", 0):
        return binary("mod", left, right)
    size = binary("mod", unary("abs", left), unary("abs", right))
    return select(binary("lt", left, _number(0, left)), unary("neg", size), size)


def _pow(e: Element) -> Expr:
    base, exponent = e.broadcast(0), e.broadcast(1)
    if isinstance(exponent, Const) and exponent.value in (1, 2, 3):
        return reduce(lambda a, b: binary("mul", a, b), [base] * int(exponent.value))
    if not base.dtype.is_float:
        raise e.error("an integer power other than 1, 2 and 3 has no rule")
    return binary("pow", base, cast(exponent, base.dtype))


def _cast(e: Element) -> Expr:
    code = e.attribute("to")
    try:
        return cast(e.broadcast(0), from_onnx(int(code)))
    except KeyError:
        raise e.error(f"the compiler has no type {code}") from None


def _cast_like(e: Element) -> Expr:
    return cast(e.broadcast(0), e.dtype(1))


def _where(e: Element) -> Expr:
    return select(e.broadcast(0), e.broadcast(1), e.broadcast(2))


def _clip(e: Element) -> Expr:
    """A bound that is left out is the lowest or the largest finite number, so that no float stays infinite."""
    value = e.broadcast(0)
    for position, (name, key) in enumerate((("max", "min"), ("min", "max")), 1):
        given = e.attribute(key) if e.opset < 11 else None
        if e.opset >= 11 and e.has(position):
            value = binary(name, value, e.broadcast(position))
        elif given is not None:
            value = binary(name, value, _number(float(given), value))
        elif value.dtype.is_float:
            value = binary(name, value, _number(float(getattr(ml_dtypes.finfo(value.dtype.row.numpy), key)), value))
    return value


def _is_nan(e: Element) -> Expr:
    value = e.broadcast(0)
    return unary("isnan", value) if value.dtype.is_float else const(False)


def _is_inf(e: Element) -> Expr:
    value = e.broadcast(0)
    result = unary("isinf", value)
    if not e.attribute("detect_negative", 1):
        result = apply("and", result, binary("gt", value, _number(0, value)))
    if not e.attribute("detect_positive", 1):
        result = apply("and", result, binary("lt", value, _number(0, value)))
    return result


def _gelu_exact(x: Expr) -> Expr:
    return x * 0.5 * (unary("erf", x * _number(math.sqrt(0.5), x)) + 1.0)


def _gelu_tanh(x: Expr) -> Expr:
    inner = _number(math.sqrt(2 / math.pi), x) * (x + x * x * x * 0.044715)
    return x * 0.5 * (unary("tanh", inner) + 1.0)


def _gelu(e: Element) -> Expr:
    exact = e.attribute("approximate", "none") == "none"
    return (_gelu_exact if exact else _gelu_tanh)(e.broadcast(0))


def _with_bias(function: Callable[[Expr], Expr]) -> Rule:
    def rule(e: Element) -> Expr:
        value = e.broadcast(0)
        return function(value + e.broadcast(1) if e.has(1) else value)

    return rule


def _swish(default: float) -> Rule:
    def rule(e: Element) -> Expr:
        x = e.broadcast(0)
        return x * unary("sigmoid", x * e.number("alpha", default))

    return rule


def _positive(x: Expr) -> Expr:
    return binary("gt", x, _number(0, x))


def _leaky(e: Element) -> Expr:
    x = e.broadcast(0)
    return select(binary("lt", x, _number(0, x)), x * e.number("alpha", 0.01), x)


def _prelu(e: Element) -> Expr:
    x = e.broadcast(0)
    return select(binary("lt", x, _number(0, x)), x * e.broadcast(1), x)


def _elu(e: Element) -> Expr:
    x = e.broadcast(0)
    return select(binary("lt", x, _number(0, x)), (unary("exp", x) - 1.0) * e.number("alpha", 1.0), x)


def _selu(e: Element) -> Expr:
    x = e.broadcast(0)
    alpha, gamma = e.number("alpha", 1.67326319), e.number("gamma", 1.05070102)
    return select(_positive(x), x, unary("exp", x) * alpha - alpha) * gamma


def _celu(e: Element) -> Expr:
    x, alpha = e.broadcast(0), e.number("alpha", 1.0)
    negative = (unary("exp", x / alpha) - 1.0) * alpha
    return binary("max", x, _number(0, x)) + binary("min", negative, _number(0, x))


def _hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    return binary("max", binary("min", x * alpha + beta, _number(1, x)), _number(0, x))


def _hard_sigmoid_rule(e: Element) -> Expr:
    return _hard_sigmoid(e.broadcast(0), e.number("alpha", 0.2), e.number("beta", 0.5))


def _softplus(x: Expr) -> Expr:
    return binary("max", x, _number(0, x)) + unary("log", unary("exp", -unary("abs", x)) + 1.0)


def _thresholded_relu(e: Element) -> Expr:
    x = e.broadcast(0)
    return select(binary("gt", x, _number(e.number("alpha", 1.0), x)), x, _number(0, x))


def _shrink(e: Element) -> Expr:
    x, bias, lambd = e.broadcast(0), e.number("bias", 0.0), e.number("lambd", 0.5)
    high = select(binary("gt", x, _number(lambd, x)), x - bias, _number(0, x))
    return select(binary("lt", x, _number(-lambd, x)), x + bias, high)


def _mean(e: Element) -> Expr:
    return _nary("add")(e) / float(len(e.node.inputs))


def _batch_norm(e: Element) -> Expr:
    if e.attribute("training_mode", 0) or e.output:
        raise e.error("training mode changes the running statistics")
    x = e.read(0, e.index)
    scale, bias, mean, variance = (e.read(i, (e.index[1],)) for i in (1, 2, 3, 4))
    return (x - mean) / unary("sqrt", variance + e.number("epsilon", 1e-5)) * scale + bias


POINTWISE: dict[str, Rule] = {
    **{
        name: _unary(op)
        for name, op in {
            "Abs": "abs",
            "Cos": "cos",
            "Erf": "erf",
            "Exp": "exp",
            "Log": "log",
            "Neg": "neg",
            "Not": "not",
            "Sigmoid": "sigmoid",
            "Sign": "sign",
            "Sin": "sin",
            "Sqrt": "sqrt",
            "Tanh": "tanh",
        }.items()
    },
    **{name: _rounding_only_floats(name.lower()) for name in ("Floor", "Ceil", "Round")},
    **{
        name: _binary(op)
        for name, op in {
            "Add": "add",
            "Sub": "sub",
            "Mul": "mul",
            "And": "and",
            "Or": "or",
            "Xor": "ne",
            "Equal": "eq",
            "Less": "lt",
            "LessOrEqual": "le",
            "Greater": "gt",
            "GreaterOrEqual": "ge",
        }.items()
    },
    "Sum": _nary("add"),
    "Max": _nary("max"),
    "Min": _nary("min"),
    "Mean": _mean,
    "Div": _divide,
    "Mod": _mod,
    "Pow": _pow,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Where": _where,
    "Clip": _clip,
    "IsNaN": _is_nan,
    "IsInf": _is_inf,
    "Reciprocal": _of(lambda x: _number(1, x) / x),
    "Relu": _of(lambda x: binary("max", x, _number(0, x))),
    "Gelu": _gelu,
    "Swish": _swish(1.0),
    "HardSwish": _of(lambda x: x * _hard_sigmoid(x, float(np.float32(1 / 6)), 0.5)),
    "HardSigmoid": _hard_sigmoid_rule,
    "LeakyRelu": _leaky,
    "PRelu": _prelu,
    "Elu": _elu,
    "Selu": _selu,
    "Celu": _celu,
    "Softplus": _of(_softplus),
    "Softsign": _of(lambda x: x / (unary("abs", x) + 1.0)),
    "Mish": _of(lambda x: x * unary("tanh", _softplus(x))),
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": _shrink,
    "BatchNormalization": _batch_norm,
    "DequantizeLinear": dequantize,
    "QuantizeLinear": quantize,
}

CONTRIB: dict[str, Rule] = {  # domain com.microsoft
    "Gelu": _of(_gelu_exact),
    "FastGelu": _with_bias(_gelu_tanh),
    "BiasGelu": _with_bias(_gelu_exact),
    "QuickGelu": _swish(1.702),
    "QLinearAdd": quantized_pair("add"),
    "QLinearMul": quantized_pair("mul"),
    "QLinearSigmoid": quantized_unary(lambda e, x: unary("sigmoid", x)),
    "QLinearLeakyRelu": quantized_unary(
        lambda e, x: select(binary("lt", x, _number(0, x)), x * e.number("alpha", 0.01), x)
    ),
    "DequantizeLinear": dequantize,
    "QuantizeLinear": quantize,
}

# Rough cost of one element, in multiplications; what is not named costs 1.
COSTS: dict[str, int] = {
    **dict.fromkeys(("Erf", "Exp", "Log", "Tanh", "Sigmoid", "Sin", "Cos", "Pow", "Softplus", "Elu", "Selu"), 10),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Swish", "Mish", "Celu"), 14),
    **dict.fromkeys(("Mod", "QuantizeLinear"), 6),
    **dict.fromkeys(("QLinearAdd", "QLinearMul", "QLinearLeakyRelu", "QLinearSigmoid"), 14),
    "DequantizeLinear": 2,
    **dict.fromkeys(("Div", "Sqrt", "Reciprocal"), 3),
}
