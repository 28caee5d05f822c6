"""One entry of a catalogue of small test graphs: how to write it, at which sizes, and random inputs for it.

Invariant: an entry's static graph is its symbolic graph at `sizes[0]`, with the same weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from models.graph import GraphWriter

Sizes = Mapping[str, int]

ENCODER_SIZES: tuple[Sizes, Sizes] = ({"batch": 3, "seq": 7}, {"batch": 2, "seq": 10})
SEED = 1


@dataclass(frozen=True)
class Entry:
    """A graph of the catalogue.

    `sizes` are two choices for its symbols; {} twice for a graph without symbols. `hides_rows` says whether a mask that
    hides every key of a row is worth trying (the row's result is then NaN, uniform or zero, as the graph is written).
    """

    name: str
    summary: str
    write: Callable[[GraphWriter], None]
    sizes: tuple[Sizes, Sizes] = ENCODER_SIZES
    opset: int = 17
    hides_rows: bool = True

    def build(self, *, dynamic: bool) -> onnx.ModelProto:
        """The model with symbolic dims, or with the dims of `sizes[0]`."""
        g = GraphWriter(self.opset, seed=SEED, sizes=None if dynamic else self.sizes[0])
        self.write(g)
        return g.finish(self.name)

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Random inputs: normal values, 0 or 1 for `mask` with holes, 0 or -10000 for `score_bias`."""
        random = np.random.default_rng(seed)
        known = GraphWriter(self.opset, sizes=sizes)
        feeds: dict[str, npt.NDArray[Any]] = {}
        for value in self.build(dynamic=True).graph.input:
            tensor = value.type.tensor_type
            dims = (known.dim(dim.dim_param or dim.dim_value) for dim in tensor.shape.dim)
            shape = tuple(int(dim) for dim in dims)
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            if value.name == "mask":
                feeds[value.name] = self._mask(shape).astype(dtype)
            elif value.name == "score_bias":
                feeds[value.name] = np.where(self._mask(shape), 0.0, -10000.0).astype(dtype)
            else:
                feeds[value.name] = random.standard_normal(shape).astype(dtype)
        return feeds

    def _mask(self, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """True where a key is visible: a hole, left and right padding, and a row that hides everything."""
        visible = np.ones(shape, bool)
        visible[0, ..., 2] = False
        visible[-1, ..., :1] = False
        visible[-1, ..., -2:] = False
        if self.hides_rows and shape[0] > 2:
            visible[1] = False
        return visible
