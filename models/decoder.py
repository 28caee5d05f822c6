"""Language models with a cache and random weights, as exporters write decoders: GPT-2 and Llama, small.

In: input_ids [batch, seq], attention_mask [batch, past + seq], position_ids [batch, seq], all int64, and for each layer
past_key_values.N.key and .value, float32 [batch, key heads, past, width]. Out: logits, float32 [batch, seq, vocab], and
present.N.key and .value, which are the past with the new positions behind it. Without `mask` and `positions` the graph
has no such inputs: then every position counts, and the first new one has the number `past`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from models import blocks
from models.graph import GraphWriter, write

Style = Literal["gpt2", "llama"]
LOWEST = float(np.finfo(np.float32).min)
END = 2**62


@dataclass(frozen=True)
class Size:
    """Extents of a decoder; the defaults are small enough for tests."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    key_heads: int = 2
    """Of the Llama style; GPT-2 has one per head."""
    vocab: int = 100
    positions: int = 256

    @property
    def width(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads


def build(path: Path, *, style: Style = "llama", size: Size | None = None, seed: int = 0) -> Path:
    """Writes the model to `path` and returns the path."""
    return write(model(style=style, size=size, seed=seed), path)


def model(
    *, style: Style = "llama", size: Size | None = None, seed: int = 0, mask: bool = True, positions: bool = True
) -> onnx.ModelProto:
    """The decoder; `mask` and `positions` say whether it has these inputs."""
    return _Decoder(style, size or Size(), seed, mask=mask, positions=positions).model()


class _Decoder:
    def __init__(self, style: Style, size: Size, seed: int, *, mask: bool, positions: bool) -> None:
        self._g = g = GraphWriter(17, seed=seed)
        self._size = size
        self._llama = style == "llama"
        self._key_heads = size.key_heads if self._llama else size.heads
        self._ids = g.input("input_ids", np.int64, ("batch", "seq"))
        self._mask = g.input("attention_mask", np.int64, ("batch", "past + seq")) if mask else ""
        self._given_positions = g.input("position_ids", np.int64, ("batch", "seq")) if positions else ""

    def model(self) -> onnx.ModelProto:
        g, size = self._g, self._size
        dims = ("batch", self._key_heads, "past", size.width)
        pasts = [
            [g.input(f"past_key_values.{layer}.{part}", np.float32, dims) for part in ("key", "value")]
            for layer in range(size.layers)
        ]
        seq, past = (g.op("Gather", g.op("Shape", x), g.constant(n)) for x, n in ((self._ids, 1), (pasts[0][0], 2)))
        self._total = g.op("Add", past, seq)
        numbers = g.op("Range", past, self._total, g.constant(1))
        bias = self._bias(numbers)
        positions = self._given_positions or g.op("Unsqueeze", numbers, g.constant([0]))
        x = g.op("Gather", g.normal((size.vocab, size.hidden), std=1.0, name="words"), self._ids)
        if self._llama:
            turns = self._turns(positions)
        else:
            places = g.normal((size.positions, size.hidden), std=0.7, name="places")
            x, turns = g.op("Add", x, g.op("Gather", places, positions)), None
        for layer in range(size.layers):
            with g.scope(f"layers.{layer}"):
                x = g.op("Add", x, self._attend(self._norm(x), pasts[layer], bias, turns, layer))
                x = g.op("Add", x, self._feed_forward(self._norm(x)))
        head = g.normal((size.hidden, size.vocab), std=3 / math.sqrt(size.hidden), name="head")
        g.op("MatMul", self._norm(x), head, out="logits")
        g.output("logits", np.float32, ("batch", "seq", size.vocab))
        for layer in range(size.layers):
            for part in ("key", "value"):
                g.output(f"present.{layer}.{part}", np.float32, ("batch", self._key_heads, "past + seq", size.width))
        return g.finish()

    def _norm(self, x: str) -> str:
        hidden = self._size.hidden
        return blocks.rms_norm(self._g, x, hidden) if self._llama else blocks.layer_norm(self._g, x, hidden)

    def _bias(self, numbers: str) -> str:
        """0 where a query sees a key, the lowest float elsewhere: [batch or 1, 1, seq, past + seq]."""
        g = self._g
        columns = g.op("Range", g.constant(0), self._total, g.constant(1))
        seen = g.op("LessOrEqual", columns, g.op("Unsqueeze", numbers, g.constant([1])))
        seen = g.op("Unsqueeze", seen, g.constant([0, 1]))
        if self._mask:
            counts = g.op("Unsqueeze", g.op("Cast", self._mask, to=onnx.TensorProto.BOOL), g.constant([1, 2]))
            seen = g.op("And", seen, counts)
        return g.op("Where", seen, g.constant(0.0), g.constant(LOWEST))

    def _turns(self, positions: str) -> tuple[str, str]:
        """Cosine and sine of the rotary angles, [batch, 1, seq, width]."""
        g, half = self._g, self._size.width // 2
        rates = 1 / 1000.0 ** (np.arange(half, dtype=np.float32) / half)
        numbers = g.op("Unsqueeze", g.op("Cast", positions, to=onnx.TensorProto.FLOAT), g.constant([1, 3]))
        angles = g.op("Mul", numbers, g.constant(rates))
        wide = g.op("Concat", angles, angles, axis=-1)
        return g.op("Cos", wide), g.op("Sin", wide)

    def _turned(self, x: str, turns: tuple[str, str]) -> str:
        g, half = self._g, self._size.width // 2
        first = g.op("Slice", x, g.constant([0]), g.constant([half]), g.constant([3]))
        second = g.op("Slice", x, g.constant([half]), g.constant([END]), g.constant([3]))
        swapped = g.op("Concat", g.op("Neg", second), first, axis=-1)
        return g.op("Add", g.op("Mul", x, turns[0]), g.op("Mul", swapped, turns[1]))

    def _attend(self, x: str, past: list[str], bias: str, turns: tuple[str, str] | None, layer: int) -> str:
        g, size = self._g, self._size
        width, key_heads = size.width, self._key_heads

        def project(heads: int) -> str:
            flat = blocks.linear(g, x, (size.hidden, heads * width), bias=not self._llama)
            return g.op("Transpose", g.op("Reshape", flat, g.constant([0, 0, heads, width])), perm=[0, 2, 1, 3])

        query, key, value = project(size.heads), project(key_heads), project(key_heads)
        if turns is not None:
            query, key = self._turned(query, turns), self._turned(key, turns)
        key = g.op("Concat", past[0], key, axis=2, out=f"present.{layer}.key")
        value = g.op("Concat", past[1], value, axis=2, out=f"present.{layer}.value")
        key, value = self._repeated(key), self._repeated(value)
        products = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = g.op("Add", g.op("Mul", products, g.constant(1 / math.sqrt(width))), bias)
        rows = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        context = g.op("Reshape", rows, g.constant([0, 0, size.hidden]))
        return blocks.linear(g, context, (size.hidden, size.hidden), bias=not self._llama)

    def _repeated(self, x: str) -> str:
        """Each head of keys or values once per head of queries."""
        g, size = self._g, self._size
        times = size.heads // self._key_heads
        if times == 1:
            return x
        batch = g.extent(x, 0, "batch")
        shape = g.shape(batch, self._key_heads, times, self._total, size.width)
        spread = g.op("Expand", g.op("Unsqueeze", x, g.constant([2])), shape)
        return g.op("Reshape", spread, g.shape(batch, size.heads, self._total, size.width))

    def _feed_forward(self, x: str) -> str:
        g, hidden = self._g, self._size.hidden
        if not self._llama:
            wide = blocks.gelu(g, blocks.linear(g, x, (hidden, 4 * hidden)))
            return blocks.linear(g, wide, (4 * hidden, hidden))
        gate, up = (blocks.linear(g, x, (hidden, 3 * hidden), bias=False) for _ in range(2))
        gated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return blocks.linear(g, gated, (3 * hidden, hidden), bias=False)
