"""The scalar operations: one row each, with arity, result type and numpy meaning.

The numpy function *is* the definition: the interpreter runs it, and every backend must agree with it up to rounding.
Integer `div` does not exist: `floordiv` and `mod` round toward minus infinity, as numpy and Python do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


@dataclass(frozen=True, slots=True)
class OpRow:
    """One scalar operation. `result` is "same" (as its last argument), "bool" or "cast" (given by the node)."""

    arity: int
    result: str
    numpy: Callable[..., Any]


def _shift(shift: Callable[..., Any]) -> Callable[..., Any]:
    """A shift by its count modulo the type's bits, so that every count means something."""
    return lambda x, count: shift(x, count & (8 * np.asarray(x).dtype.itemsize - 1))


OPS: dict[str, OpRow] = {
    "add": OpRow(2, "same", np.add),
    "sub": OpRow(2, "same", np.subtract),
    "mul": OpRow(2, "same", np.multiply),
    "div": OpRow(2, "same", np.divide),
    "floordiv": OpRow(2, "same", np.floor_divide),
    "mod": OpRow(2, "same", np.mod),
    "pow": OpRow(2, "same", np.power),
    "min": OpRow(2, "same", np.minimum),  # NaN if either is NaN
    "max": OpRow(2, "same", np.maximum),  # NaN if either is NaN
    "neg": OpRow(1, "same", np.negative),
    "abs": OpRow(1, "same", np.abs),
    "sign": OpRow(1, "same", np.sign),
    "floor": OpRow(1, "same", np.floor),
    "ceil": OpRow(1, "same", np.ceil),
    "round": OpRow(1, "same", np.rint),  # half to even
    "sqrt": OpRow(1, "same", np.sqrt),
    "rsqrt": OpRow(1, "same", lambda x: 1 / np.sqrt(x)),
    "exp": OpRow(1, "same", np.exp),
    "exp_below": OpRow(1, "same", np.exp),  # of numbers that are not above 0, but for rounding
    "exp2": OpRow(1, "same", np.exp2),
    "log": OpRow(1, "same", np.log),
    "log2": OpRow(1, "same", np.log2),
    "sin": OpRow(1, "same", np.sin),
    "cos": OpRow(1, "same", np.cos),
    "tanh": OpRow(1, "same", np.tanh),
    "erf": OpRow(1, "same", lambda x: _erf(x).astype(np.asarray(x).dtype)),
    "sigmoid": OpRow(1, "same", _sigmoid),
    "lt": OpRow(2, "bool", np.less),
    "le": OpRow(2, "bool", np.less_equal),
    "gt": OpRow(2, "bool", np.greater),
    "ge": OpRow(2, "bool", np.greater_equal),
    "eq": OpRow(2, "bool", np.equal),
    "ne": OpRow(2, "bool", np.not_equal),
    "isnan": OpRow(1, "bool", np.isnan),
    "isinf": OpRow(1, "bool", np.isinf),
    "and": OpRow(2, "bool", np.logical_and),
    "or": OpRow(2, "bool", np.logical_or),
    "not": OpRow(1, "bool", np.logical_not),
    "bitand": OpRow(2, "same", np.bitwise_and),  # of integers, as the next five
    "bitor": OpRow(2, "same", np.bitwise_or),
    "bitxor": OpRow(2, "same", np.bitwise_xor),
    "bitnot": OpRow(1, "same", np.invert),
    "shl": OpRow(2, "same", _shift(np.left_shift)),
    "shr": OpRow(2, "same", _shift(np.right_shift)),  # of signed integers, with copies of the sign
    "select": OpRow(3, "same", np.where),  # (condition, value if true, value if false)
    "cast": OpRow(1, "cast", lambda x: x),
    "reinterpret": OpRow(1, "cast", lambda x: x),  # the same bits as the node's type, which is as wide
}
