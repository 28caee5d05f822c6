"""Models that normalise before each block, with random weights, in the spelling of PyTorch's TorchScript exporter
(opset 17, scaled dot product attention): ViT, Whisper's encoder, GPT-2 without a cache.

`vit`: pixel_values, float32 [batch, 3, image, image], to last_hidden_state [batch, 1 + patches, hidden]: patches by
Conv, a class token, learned positions. `whisper`: input_features, float32 [batch, mels, frames], to last_hidden_state
[batch, ceil(frames / 2), hidden]: two Conv with GELU, queries scaled before they are split into heads, keys without a
bias. `gpt2`: input_ids and attention_mask, int64 [batch, seq], to logits [batch, seq, vocab]: Q, K and V from one Gemm
over flattened rows, a causal mask by index arithmetic, GELU by tanh, the head tied to the words.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from models import bert, blocks
from models.graph import Extent, GraphWriter, write

Style = Literal["vit", "whisper", "gpt2"]
EPSILON: dict[Style, float] = {"vit": 1e-12, "whisper": 1e-5, "gpt2": 1e-5}


@dataclass(frozen=True)
class Size:
    """Extents of a model; the defaults are small enough for tests."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    vocab: int = 100
    """Of GPT-2."""
    positions: int = 64
    """Of GPT-2; the others have as many as their input gives."""
    image: int = 32
    """Rows and columns of ViT's images."""
    patch: int = 8
    mels: int = 10
    frames: int = 30
    """Of Whisper, before the second convolution halves them."""

    @property
    def width(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads

    def seq(self, style: Style) -> int | None:
        """How many rows the blocks see for each of the batch; None where the input says."""
        return {"vit": 1 + (self.image // self.patch) ** 2, "whisper": -(-self.frames // 2), "gpt2": None}[style]


SIZES: dict[Style, Size] = {
    "vit": Size(layers=12, hidden=768, heads=12, image=224, patch=16),
    "whisper": Size(layers=6, hidden=512, heads=8, mels=80, frames=3000),
    "gpt2": Size(layers=12, hidden=768, heads=12, vocab=50257, positions=1024),
}
"""ViT-base, Whisper-base and GPT-2."""


def build(path: Path, style: Style, *, size: Size | None = None, seed: int = 0) -> Path:
    """Writes the model to `path` and returns the path."""
    return write(model(style, size=size, seed=seed), path)


def model(style: Style, *, size: Size | None = None, seed: int = 0) -> onnx.ModelProto:
    """The model. Raises ValueError if heads do not divide hidden."""
    size = size or Size()
    if size.hidden % size.heads:
        raise ValueError(f"hidden must be a multiple of heads, found hidden={size.hidden}, heads={size.heads}")
    return _Model(style, size, seed).model()


class _Model:
    def __init__(self, style: Style, size: Size, seed: int) -> None:
        self._style: Style = style
        self._size = size
        self._g = GraphWriter(17, seed=seed, constants="nodes")
        self._allowed = ""
        self._words = ""

    def model(self) -> onnx.ModelProto:
        g, size = self._g, self._size
        with g.scope("embeddings"):
            x = {"vit": self._patches, "whisper": self._sounds, "gpt2": self._tokens}[self._style]()
        for layer in range(size.layers):
            with g.scope(f"layer.{layer}"):
                x = g.op("Add", self._attention(self._norm(x)), x)
                x = g.op("Add", self._feed_forward(self._norm(x)), x)
        if self._style == "gpt2":
            g.op("MatMul", self._norm(x), g.op("Transpose", self._words, perm=[1, 0]), out="logits")
            g.output("logits", np.float32, ("batch", "seq", size.vocab))
        else:
            self._norm(x, out="last_hidden_state")
            g.output("last_hidden_state", np.float32, ("batch", size.seq(self._style), size.hidden))
        return g.finish()

    # --- what comes before the blocks

    def _patches(self) -> str:
        g, size = self._g, self._size
        pixels = g.input("pixel_values", np.float32, ("batch", 3, size.image, size.image))
        area = 3 * size.patch**2
        weight = g.normal((size.hidden, 3, size.patch, size.patch), std=1 / math.sqrt(area))
        bias = g.normal((size.hidden,), std=0.1, name="bias")
        image = g.op("Conv", pixels, weight, bias, strides=[size.patch] * 2, kernel_shape=[size.patch] * 2)
        flat = g.op("Reshape", image, g.shape(g.extent(image, 0, "batch"), size.hidden, -1), allowzero=0)
        rows = g.op("Transpose", flat, perm=[0, 2, 1])
        token = g.normal((1, 1, size.hidden), std=1.0, name="class_token")
        first = g.op("Expand", token, g.shape(g.extent(pixels, 0, "batch"), 1, size.hidden))
        return g.op("Add", g.op("Concat", first, rows, axis=1), self._places(1 + (size.image // size.patch) ** 2))

    def _sounds(self) -> str:
        g, size = self._g, self._size
        x = g.input("input_features", np.float32, ("batch", size.mels, size.frames))
        for channels, stride in ((size.mels, 1), (size.hidden, 2)):
            weight = g.normal((size.hidden, channels, 3), std=1 / math.sqrt(3 * channels))
            bias = g.normal((size.hidden,), std=0.1, name="bias")
            x = blocks.gelu(g, g.op("Conv", x, weight, bias, strides=[stride], kernel_shape=[3], pads=[1, 1]))
        return g.op("Add", g.op("Transpose", x, perm=[0, 2, 1]), self._places(-(-size.frames // 2)))

    def _tokens(self) -> str:
        g, size = self._g, self._size
        ids, mask = (g.input(name, np.int64, ("batch", "seq")) for name in ("input_ids", "attention_mask"))
        seq = g.extent(ids, 1, "seq")
        self._words = g.normal((size.vocab, size.hidden), std=0.2, name="words")
        limit = seq if isinstance(seq, str) else g.constant(seq)
        numbers = g.op("Range", g.constant(0), limit, g.constant(1))
        places = g.normal((size.positions, size.hidden), std=0.1, name="places")
        x = g.op(
            "Add", g.op("Gather", self._words, ids), g.op("Gather", places, g.op("Unsqueeze", numbers, g.constant([0])))
        )
        self._allowed = bert.torchscript_mask(g, mask, x, g.extent(x, 0, "batch"), seq, causal=True)
        return x

    def _places(self, count: int) -> str:
        return self._g.normal((1, count, self._size.hidden), std=0.5, name="positions")

    # --- the blocks

    def _norm(self, x: str, *, out: str | None = None) -> str:
        return blocks.layer_norm(self._g, x, self._size.hidden, epsilon=EPSILON[self._style], out=out)

    def _attention(self, x: str) -> str:
        g, size = self._g, self._size
        batch, seq = g.extent(x, 0, "batch"), g.extent(x, 1, self._size.seq(self._style) or "seq")

        def split(value: str) -> str:
            shape = g.shape(batch, seq, size.heads, size.width)
            return g.op("Transpose", g.op("Reshape", value, shape, allowzero=0), perm=[0, 2, 1, 3])

        query, key, value = (split(part) for part in self._projected(x))
        context = self._weighted(query, key, value)
        rows = g.op("Transpose", context, perm=[0, 2, 1, 3])
        joined = g.op("Reshape", rows, g.shape(batch, seq, size.hidden), allowzero=0)
        return self._linear(joined, (size.hidden, size.hidden))

    def _projected(self, x: str) -> tuple[str, ...]:
        g, hidden = self._g, self._size.hidden
        if self._style == "gpt2":
            together = self._linear(x, (hidden, 3 * hidden))
            return g.ops("Split", together, g.constant([hidden] * 3), outs=(None,) * 3, axis=2)
        query, key, value = (
            blocks.linear(g, x, (hidden, hidden), bias=name != "key" or self._style == "vit")
            for name in ("query", "key", "value")
        )
        if self._style == "whisper":
            query = g.op("Mul", query, g.constant(1 / math.sqrt(self._size.width)))
        return query, key, value

    def _weighted(self, query: str, key: str, value: str) -> str:
        """Softmax(Q Kᵀ / √d) V, with √√d on either side; Whisper has scaled its queries before."""
        g = self._g
        root = 1.0 if self._style == "whisper" else self._size.width**-0.25
        turned = g.op("Transpose", key, perm=[0, 1, 3, 2])
        scores = g.op("MatMul", g.op("Mul", query, g.constant(root)), g.op("Mul", turned, g.constant(root)))
        if not self._allowed:
            return g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
        bias = g.op("Where", self._allowed, g.constant([0.0]), g.constant([-math.inf]))
        weights = g.op("Softmax", g.op("Add", scores, bias), axis=-1)
        return g.op("MatMul", g.op("Where", g.op("IsNaN", weights), g.constant([0.0]), weights), value)

    def _feed_forward(self, x: str) -> str:
        g, hidden = self._g, self._size.hidden
        wide = self._linear(x, (hidden, 4 * hidden))
        active = blocks.gelu_tanh(g, wide) if self._style == "gpt2" else blocks.gelu(g, wide)
        return self._linear(active, (4 * hidden, hidden))

    def _linear(self, x: str, sizes: tuple[int, int]) -> str:
        """x W + b; GPT-2 flattens the rows for a Gemm and restores them."""
        g = self._g
        if self._style != "gpt2":
            return blocks.linear(g, x, sizes)
        leading: tuple[Extent, Extent] = (g.extent(x, 0, "batch"), g.extent(x, 1, "seq"))
        flat = g.op("Reshape", x, g.shape(-1, sizes[0]), allowzero=0)
        weight = g.normal(sizes, std=1 / math.sqrt(sizes[0]))
        product = g.op("Gemm", flat, weight, g.normal((sizes[1],), std=0.1, name="bias"))
        return g.op("Reshape", product, g.shape(*leading, sizes[1]), allowzero=0)
