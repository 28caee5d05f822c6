"""Definitions of the com.microsoft operators of image models that ONNX Runtime has for GPUs only, and of FusedGemm.

GroupNorm and SkipGroupNorm take pixels by rows, columns and channels. Sources: the operators' schema texts and, for
what these leave open (the order of bias, residual and activation), the kernels. Sums are in float32.
"""

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from fuser.expand.writer import Form, FormError

WITHOUT_KERNEL = frozenset({"BiasAdd", "BiasSplitGelu", "GroupNorm", "SkipGroupNorm"})  # on a CPU
ACTIVATIONS: Mapping[str, str] = {"Relu": "", "Sigmoid": "", "Tanh": "", "Softplus": "", "LeakyRelu": "alpha"}


def group_norm(form: Form, key: str) -> ir.Function:
    """X [n, h, w, c] (or [n, c, h, w] where `channels_last` is 0), gamma [c], beta [c]."""
    return form.function(key, [_group_norm(form, form.input(0))])


def skip_group_norm(form: Form, key: str) -> ir.Function:
    """X, gamma, beta, skip (like X, [n, 1, 1, c] or [n, c]), bias [c]; the normalised sum, and the sum."""
    skip = form.input(3)
    if form.rank(3) == 2:
        skip = form.unsqueeze(skip, 1, 2)
    total = form.op("Add", form.input(0), skip)
    if form.has(4):
        total = form.op("Add", total, form.input(4))
    return form.function(key, [_group_norm(form, total), form.op("Identity", total) if form.gives(1) else None])


def bias_split_gelu(form: Form, key: str) -> ir.Function:
    """X [n, s, 2d], bias [2d]: the left half of X + bias times the GELU of the right one."""
    width = form.size(0, -1)
    if width % 2:
        raise FormError(f"its last dim is {width}; two halves need an even one")
    total = form.op("Add", form.input(0), form.input(1))
    left, right = form.split(total, (width // 2, width // 2), 2)
    kind = form.dtype(0)
    erf = form.op("Erf", form.op("Mul", right, form.number(math.sqrt(0.5), kind)))
    weight = form.op("Mul", form.op("Add", erf, form.number(1, kind)), form.number(0.5, kind))
    return form.function(key, [form.op("Mul", left, form.op("Mul", right, weight))])


def bias_add(form: Form, key: str) -> ir.Function:
    """X [n, s, c], bias [c], skip like X: their sum."""
    total = form.op("Add", form.op("Add", form.input(0), form.input(1)), form.input(2))
    return form.function(key, [total])


def fused_gemm(form: Form, key: str) -> ir.Function:
    """A, B, C of Gemm; `activation` follows."""
    named = {name: form.attribute(name) for name in ("alpha", "beta", "transA", "transB")}
    given = {name: value for name, value in named.items() if value is not None}
    inputs = [form.input(i) for i in range(3) if form.has(i)]
    result = form.op("Gemm", *inputs, **given)
    activation = form.attribute("activation", "")
    if activation not in ("", *ACTIVATIONS):
        raise FormError(f"its activation is {activation!r}; {', '.join(ACTIVATIONS)} are supported")
    if activation:
        parameter = ACTIVATIONS[activation]
        value = form.attribute("activation_alpha") if parameter else None
        result = form.op(activation, result, **({} if value is None else {parameter: value}))
    return form.function(key, [result])


def _group_norm(form: Form, value: ir.Value) -> ir.Value:
    """`value`, of input 0's shape, normalised over the pixels and channels of each group."""
    if form.rank(0) != 4:
        raise FormError(f"its input has {form.rank(0)} dims; images have 4")
    last = bool(form.attribute("channels_last", 1))
    groups, channels = int(form.attribute("groups")), form.size(0, 3 if last else 1)
    if channels % groups:
        raise FormError(f"{channels} channels are not divisible into {groups} groups")
    kind, wide = form.dtype(0), ir.DataType.FLOAT
    x = form.cast(value, wide)
    x = form.op("Transpose", x, perm=(0, 3, 1, 2)) if last else x
    parts = form.reshape(x, 0, groups, -1)
    centred = form.op("Sub", parts, form.mean(parts, 2))
    variance = form.mean(form.op("Mul", centred, centred), 2)
    epsilon = form.constant(np.array(form.attribute("epsilon", 1e-5), np.float32))
    normal = form.op("Div", centred, form.op("Sqrt", form.op("Add", variance, epsilon)))
    normal = form.op("Reshape", normal, form.op("Shape", x))
    scale, shift = (form.unsqueeze(form.cast(form.input(i), wide), 1, 2) for i in (1, 2))
    result = form.op("Add", form.op("Mul", normal, scale), shift)
    if form.attribute("activation", 0):
        result = form.op("Mul", result, form.op("Sigmoid", result))
    result = form.op("Transpose", result, perm=(0, 2, 3, 1)) if last else result
    return form.cast(result, kind)
