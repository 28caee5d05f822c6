"""What `verify` needs to judge a model without its padding: the original with hidden padding, and fair masks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from fuser.unpad import MASK_KEY, hide_padding

Array = npt.NDArray[Any]


def padding_mask(fused: onnx.ModelProto) -> str | None:
    """The mask by which a fused model leaves out padding; None when it does not."""
    return next((entry.value for entry in fused.metadata_props if entry.key == MASK_KEY), None)


def hidden_padding(original: onnx.ModelProto, mask: str) -> onnx.ModelProto:
    """The original with outputs [batch, length, …] that are zero where `mask` is; weights stay where they are."""
    model = ir.from_proto(original)
    hide_padding(model, mask)
    return ir.to_proto(model)


def with_first_token(feeds: Mapping[str, Array], mask: str | None) -> dict[str, Array]:
    """The same inputs, every sequence with a first token: what pooling takes from an empty one has no meaning."""
    if mask is None:
        return dict(feeds)
    shown = feeds[mask].copy()
    shown[:, 0] = np.ones((), shown.dtype)
    return {**feeds, mask: shown}
