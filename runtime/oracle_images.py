"""What com.microsoft's operators of image models mean, for the oracle: ONNX Runtime has them for GPUs only.

In: arrays in double precision. Out: the same. Written from the operators' schema texts, apart from the definitions that
the fuser has.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx.reference.op_run import OpRun

Array = npt.NDArray[Any]


class GroupNorm(OpRun):
    """Normalises the pixels and channels of each group of channels."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, gamma: Array, beta: Array, **settings: Any) -> tuple[Array]:
        return (_group_norm(x, gamma, beta, settings),)


class SkipGroupNorm(OpRun):
    """The same of a sum, which is the second result."""

    op_domain = "com.microsoft"

    def _run(
        self, x: Array, gamma: Array, beta: Array, skip: Array, bias: Array | None = None, **settings: Any
    ) -> tuple[Array, Array]:
        total = x + (skip[:, None, None, :] if skip.ndim == 2 else skip) + (0.0 if bias is None else bias)
        return _group_norm(total, gamma, beta, settings), total


class BiasSplitGelu(OpRun):
    """The left half of x + bias times the GELU of the right one."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, bias: Array) -> tuple[Array]:
        left, right = np.split(x + bias, 2, axis=-1)
        flat = [0.5 * value * math.erfc(-value / math.sqrt(2)) for value in right.ravel().tolist()]
        return (left * np.array(flat, x.dtype).reshape(right.shape),)


class BiasAdd(OpRun):
    """x + bias + skip."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, bias: Array, skip: Array) -> tuple[Array]:
        return (x + bias + skip,)


IMAGE_OPS: tuple[type[OpRun], ...] = (GroupNorm, SkipGroupNorm, BiasSplitGelu, BiasAdd)


def _group_norm(x: Array, gamma: Array, beta: Array, settings: dict[str, Any]) -> Array:
    last = settings.get("channels_last", 1)
    image = x if last else np.moveaxis(x, 1, -1)
    groups = int(settings["groups"])
    parts = image.reshape(*image.shape[:3], groups, -1)
    axes = (1, 2, 4)
    normal = (parts - parts.mean(axes, keepdims=True)) / np.sqrt(
        parts.var(axes, keepdims=True) + settings.get("epsilon", 1e-5)
    )
    result = normal.reshape(image.shape) * gamma + beta
    if settings.get("activation"):
        result = result / (1 + np.exp(-result))
    return result if last else np.moveaxis(result, -1, 1)
