"""The sides of a random attention: from the model's inputs to Q, K and V with heads, and from the context to y.

Comes in: a writer and one option per feature (`models.attention_mix`). Goes out: [batch, heads, seq, width] values;
K and V have fewer heads when the mix groups them.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from models.graph import Extent, GraphWriter

HIDDEN = 12
EPSILON = 1e-5
BASE = 100.0  # of the rotary frequencies
LONGEST = 64  # positions that rotary tables hold
NEW_SPLIT = 18  # the opset from which Reduce* take their axes as an input


class Sides:
    """Writes projections, head layouts, norms, rotations and caches."""

    def __init__(self, g: GraphWriter, options: Mapping[str, str]) -> None:
        self.g = g
        self.options = options
        self.dtype: npt.DTypeLike = np.dtype(options["dtype"])
        self.element = TensorProto.FLOAT16 if options["dtype"] == "float16" else TensorProto.FLOAT
        self.width = int(options["width"])
        grouping = options["grouping"]
        self.group = 1 if grouping == "none" else int(options["group"])
        self.key_heads = 1 if grouping == "broadcast" else int(options["heads"])
        self.heads = self.key_heads * self.group
        self.swapped = options["order"] == "sequence first"
        self.shown_key = self.shown_value = ""
        self.rows: Extent = 1
        self.columns: Extent = 1
        self.past: Extent = 0
        self.batch: Extent = 1

    def number(self, value: float) -> str:
        """A constant of the model's float type."""
        return self.g.constant(value, self.dtype)

    def reduce(self, kind: str, value: str) -> str:
        """A reduction over the last axis, kept: axes are an attribute or an input, by opset."""
        if self.g.opset >= NEW_SPLIT or kind == "ReduceSum":
            return self.g.op(kind, value, self.g.constant([-1]), keepdims=1)
        return self.g.op(kind, value, axes=[-1], keepdims=1)

    def operands(self) -> tuple[str, str, str]:
        """Q, K and V, and what is known of their extents."""
        query, key, value = self._heads()
        query, key = self._normed(query), self._normed(key)
        cached = self.options["past"] != "none"
        dims = ("batch", self.key_heads, "past", self.width)
        if cached:
            past_key = self.g.input("past_key", self.dtype, dims)
            past_value = self.g.input("past_value", self.dtype, dims)
            self.past = self.g.extent(past_key, 2, "past")
            query, key = self._rotated(query), self._rotated(key)
            key = self.g.op("Concat", past_key, key, axis=2)
            value = self.g.op("Concat", past_value, value, axis=2)
            self.columns = self.g.extent(key, 2, "past + seq")
        else:
            query, key = self._rotated(query), self._rotated(key)
            self.columns = self.rows
        self.shown_key, self.shown_value = key, value
        return self._left(query), key, value

    def joined(self, context: str) -> str:
        """[batch, heads, seq, width] as [batch, seq, heads * width] in the order of the inputs."""
        turned = self.g.op("Transpose", context, perm=[2, 0, 1, 3] if self.swapped else [0, 2, 1, 3])
        return self.g.op("Reshape", turned, self.g.constant([0, 0, self.heads * self.width]))

    def repeated(self, value: str) -> str:
        """K or V with as many heads as Q, unless the product broadcasts them."""
        g = self.g
        if self.options["grouping"] == "expand":
            wide = g.op("Unsqueeze", value, g.constant([2]))
            shape = g.shape(self.batch, self.key_heads, self.group, self.columns, self.width)
            flat = g.shape(self.batch, self.heads, self.columns, self.width)
            return g.op("Reshape", g.op("Expand", wide, shape), flat)
        if self.options["grouping"] == "gather":
            index = np.repeat(np.arange(self.key_heads), self.group)
            return g.op("Gather", value, g.constant(index), axis=1)
        return value

    def _heads(self) -> tuple[str, str, str]:
        g = self.g
        widths = [count * self.width for count in (self.heads, self.key_heads, self.key_heads)]
        counts = (self.heads, self.key_heads, self.key_heads)
        dims = ("seq", "batch") if self.swapped else ("batch", "seq")
        if self.options["projection"] == "inputs":
            parts = [g.input(n, self.dtype, (*dims, w)) for n, w in zip(("q", "k", "v"), widths, strict=True)]
            self._measure(parts[0])
            return self._split_all(parts, counts)
        x = g.input("x", self.dtype, (*dims, HIDDEN))
        self._measure(x)
        if self.options["projection"] == "einsum":
            return self._einsum(x, counts)
        packing = self.options["packing"]
        if packing == "apart":
            return self._split_all([self._projected(x, width) for width in widths], counts)
        packed = self._projected(x, sum(widths))
        if packing == "gather":
            five = g.op("Reshape", packed, g.constant([0, 0, 3, self.heads, self.width]))
            turned = g.op("Transpose", five, perm=[2, 1, 3, 0, 4] if self.swapped else [2, 0, 3, 1, 4])
            return self._three([g.op("Gather", turned, g.constant(i), axis=0) for i in range(3)])
        ends = np.cumsum(widths).tolist()
        if packing == "split":
            parts = list(g.ops("Split", packed, g.constant(widths), outs=(None,) * 3, axis=2))
        else:
            starts = [0, *ends[:-1]]
            parts = [
                g.op("Slice", packed, g.constant([start]), g.constant([end]), g.constant([-1]))
                for start, end in zip(starts, ends, strict=True)
            ]
        return self._split_all(parts, counts)

    def _measure(self, x: str) -> None:
        batch, seq = (1, 0) if self.swapped else (0, 1)
        self.batch, self.rows = self.g.extent(x, batch, "batch"), self.g.extent(x, seq, "seq")

    def _split_all(self, parts: list[str], counts: tuple[int, int, int]) -> tuple[str, str, str]:
        perm = [1, 2, 0, 3] if self.swapped else [0, 2, 1, 3]
        return self._three(
            [
                self.g.op(
                    "Transpose", self.g.op("Reshape", part, self.g.constant([0, 0, count, self.width])), perm=perm
                )
                for part, count in zip(parts, counts, strict=True)
            ]
        )

    def _three(self, parts: list[str]) -> tuple[str, str, str]:
        return parts[0], parts[1], parts[2]

    def _einsum(self, x: str, counts: tuple[int, int, int]) -> tuple[str, str, str]:
        equation = "sbe,ehd->bhsd" if self.swapped else "bse,ehd->bhsd"
        weights = [self.g.normal((HIDDEN, count, self.width), std=0.3, dtype=self.dtype) for count in counts]
        return self._three([self.g.op("Einsum", x, weight, equation=equation) for weight in weights])

    def _projected(self, x: str, width: int) -> str:
        g, kind = self.g, self.options["projection"]
        if kind == "gemm":
            weight = g.normal((width, HIDDEN), std=0.3, dtype=self.dtype)
            bias = g.normal((width,), std=0.1, dtype=self.dtype)
            rows = g.op("Gemm", g.op("Reshape", x, g.constant([-1, HIDDEN])), weight, bias, transB=1)
            first, second = (self.rows, self.batch) if self.swapped else (self.batch, self.rows)
            return g.op("Reshape", rows, g.shape(first, second, width))
        if kind == "conv":
            weight = g.normal((width, HIDDEN, 1, 1), std=0.3, dtype=self.dtype)
            columns = g.op("Unsqueeze", g.op("Transpose", x, perm=[0, 2, 1]), g.constant([3]))
            made = g.op("Squeeze", g.op("Conv", columns, weight, kernel_shape=[1, 1]), g.constant([3]))
            return g.op("Transpose", made, perm=[0, 2, 1])
        made = g.op("MatMul", x, g.normal((HIDDEN, width), std=0.3, dtype=self.dtype))
        return g.op("Add", made, g.normal((width,), std=0.1, dtype=self.dtype)) if kind == "biased" else made

    def _normed(self, value: str) -> str:
        g, kind = self.g, self.options["norm"]
        if kind == "rms":
            mean = self.reduce("ReduceMean", g.op("Pow", value, self.number(2.0)))
            root = g.op("Sqrt", g.op("Add", mean, self.number(EPSILON)))
            gain = g.normal((self.width,), std=0.1, mean=1.0, dtype=self.dtype)
            return g.op("Mul", g.op("Div", value, root), gain)
        if kind == "unit":
            length = g.op("Max", self.reduce("ReduceL2", value), self.number(EPSILON))
            return g.op("Div", value, length)
        return value

    def _rotated(self, value: str) -> str:
        g, kind = self.g, self.options["rope"]
        if kind == "none":
            return value
        turned = self.width // 2 // 2 * 2 if kind == "partial" and self.width // 2 > 1 else self.width
        if turned == self.width:
            return self._turn(value, turned, interleaved=kind == "interleaved")
        last = g.constant([-1])
        head = g.op("Slice", value, g.constant([0]), g.constant([turned]), last)
        tail = g.op("Slice", value, g.constant([turned]), g.constant([self.width]), last)
        return g.op("Concat", self._turn(head, turned, interleaved=False), tail, axis=-1)

    def _turn(self, value: str, width: int, *, interleaved: bool) -> str:
        g = self.g
        frequencies = BASE ** (-np.arange(width // 2) * 2 / width)
        angles = np.arange(LONGEST)[:, None] * frequencies
        angles = np.repeat(angles, 2, 1) if interleaved else np.concatenate([angles, angles], 1)
        tables = [self._rows_of(table.astype(self.dtype)) for table in (np.cos(angles), np.sin(angles))]
        last = g.constant([-1])
        if interleaved:
            ends = g.constant([width])
            even = g.op("Slice", value, g.constant([0]), ends, last, g.constant([2]))
            odd = g.op("Slice", value, g.constant([1]), ends, last, g.constant([2]))
            pair = [g.op("Unsqueeze", part, last) for part in (g.op("Neg", odd), even)]
            shape = g.op("Shape", value)
            other = g.op("Reshape", g.op("Concat", *pair, axis=-1), shape)
        else:
            half = g.constant([width // 2])
            first = g.op("Slice", value, g.constant([0]), half, last)
            second = g.op("Slice", value, half, g.constant([np.iinfo(np.int64).max]), last)
            other = g.op("Concat", g.op("Neg", second), first, axis=-1)
        return g.op("Add", g.op("Mul", value, tables[0]), g.op("Mul", other, tables[1]))

    def _rows_of(self, table: npt.NDArray[np.generic]) -> str:
        """Rows [past, past + seq) of a table."""
        g = self.g
        ends = g.constant([0])
        begin = ends if self.past == 0 else g.vector(self.past)
        return g.op("Slice", g.constant(table), begin, g.op("Add", begin, g.vector(self.rows)), g.constant([0]))

    def _left(self, value: str) -> str:
        """What exporters leave behind."""
        g = self.g
        match self.options["leftover"]:
            case "identity":
                return g.op("Identity", value)
            case "times one":
                return g.op("Mul", value, self.number(1.0))
            case "transposed twice":
                return g.op("Transpose", g.op("Transpose", value, perm=[0, 2, 3, 1]), perm=[0, 3, 1, 2])
            case "cast pair":
                return g.op("Cast", g.op("Cast", value, to=TensorProto.FLOAT), to=self.element)
            case _:
                return value
