"""Layers as exporters spell them: a writer and value names in, the name of the layer's result out.

Weights are drawn with a standard deviation of 1/sqrt(fan in), so that activations stay near 1 and attention scores
spread enough for a wrong score to show.
"""

import math

import numpy as np
import numpy.typing as npt

from models.graph import GraphWriter


def linear(
    g: GraphWriter, x: str, sizes: tuple[int, int], *, bias: bool = True, dtype: npt.DTypeLike = np.float32
) -> str:
    """x W + b for x [..., sizes[0]]: MatMul, then Add with the bias first as the TorchScript exporter writes it."""
    product = g.op("MatMul", x, g.normal(sizes, std=1 / math.sqrt(sizes[0]), dtype=dtype))
    if not bias:
        return product
    return g.op("Add", g.normal((sizes[1],), std=0.1, dtype=dtype, name="bias"), product)


def gemm(g: GraphWriter, x: str, sizes: tuple[int, int]) -> str:
    """The same for a matrix x, as one Gemm with a transposed weight."""
    weight = g.normal(sizes[::-1], std=1 / math.sqrt(sizes[0]))
    return g.op("Gemm", x, weight, g.normal((sizes[1],), std=0.1, name="bias"), transB=1)


def layer_norm(
    g: GraphWriter,
    x: str,
    width: int,
    *,
    epsilon: float = 1e-5,
    out: str | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> str:
    """LayerNormalization over the last axis: the operator from opset 17 on, its nine nodes before."""
    gamma = g.normal((width,), std=0.1, mean=1.0, dtype=dtype, name="gamma")
    beta = g.normal((width,), std=0.1, dtype=dtype, name="beta")
    if g.opset >= 17:
        return g.op("LayerNormalization", x, gamma, beta, axis=-1, epsilon=epsilon, out=out)
    mean = g.op("ReduceMean", x, axes=[-1])
    centred = g.op("Sub", x, mean)
    variance = g.op("ReduceMean", g.op("Pow", centred, g.constant(2.0)), axes=[-1])
    deviation = g.op("Sqrt", g.op("Add", variance, g.constant(epsilon)))
    scaled = g.op("Mul", g.op("Div", centred, deviation), gamma)
    return g.op("Add", scaled, beta, out=out)


def rms_norm(g: GraphWriter, x: str, width: int, *, epsilon: float = 1e-6) -> str:
    """x / rms(x) * gamma over the last axis, in the six nodes that T5 and Llama exports have (opset below 18)."""
    square = g.op("Pow", x, g.constant(2.0))
    mean = g.op("ReduceMean", square, axes=[-1])
    root = g.op("Sqrt", g.op("Add", mean, g.constant(epsilon)))
    gamma = g.normal((width,), std=0.1, mean=1.0, name="gamma")
    return g.op("Mul", gamma, g.op("Div", x, root))


def gelu(g: GraphWriter, x: str) -> str:
    """Exact GELU: the operator from opset 20 on, Div-Erf-Add-Mul-Mul before."""
    if g.opset >= 20:
        return g.op("Gelu", x)
    error = g.op("Erf", g.op("Div", x, g.constant(math.sqrt(2.0))))
    return g.op("Mul", g.op("Mul", x, g.op("Add", error, g.constant(1.0))), g.constant(0.5))


def gelu_tanh(g: GraphWriter, x: str) -> str:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in the eight nodes of GPT-2's exports."""
    half = g.op("Mul", x, g.constant(0.5))
    cube = g.op("Mul", g.op("Pow", x, g.constant(3.0)), g.constant(0.044715))
    inner = g.op("Mul", g.op("Add", x, cube), g.constant(math.sqrt(2 / math.pi)))
    return g.op("Mul", half, g.op("Add", g.op("Tanh", inner), g.constant(1.0)))
