"""The middle of a random attention: products, scale, bias, mask, soft-cap, softmax, sink and guards.

Comes in: Q, K and V as `models.attention_sides` makes them. Goes out: the probabilities and the context
[batch, heads, seq, width].
"""

import math
from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from models.attention_sides import LONGEST, Sides
from models.graph import Extent, GraphWriter

WINDOW = 3
CAP = 5.0
BUCKETS = 8
GUARD = -50.0  # what Max and Clip raise scores to


class Scores:
    """Writes what stands between Q, K and V and the context."""

    def __init__(self, g: GraphWriter, options: Mapping[str, str], sides: Sides) -> None:
        self.g = g
        self.options = options
        self.sides = sides
        self.lowest = float(np.finfo(np.dtype(options["dtype"])).min)
        self.shown = ""

    def attend(self, query: str, key: str, value: str) -> tuple[str, str]:
        """The probabilities and the context."""
        key, value = self.sides.repeated(key), self.sides.repeated(value)
        scores = self._scaled(query, key)
        if self.options["cap"] == "tanh":
            cap = self.sides.number(CAP)
            scores = self.g.op("Mul", self.g.op("Tanh", self.g.op("Div", scores, cap)), cap)
        scores = self._masked(self._biased(scores))
        self.shown = scores = self._guarded(scores)
        weights = self._softmax(scores)
        if self.options["guard"] == "isnan":
            weights = self.g.op("Where", self.g.op("IsNaN", weights), self.sides.number(0.0), weights)
        return weights, self._product(weights, value, turned=False)

    # --- products and scale -------------------------------------------------------------------------------------------

    def _product(self, left: str, right: str, *, turned: bool) -> str:
        """left · right, or left · rightᵀ when `turned`: [batch, heads, rows, …]."""
        g, kind = self.g, self.options["product"]
        if kind == "einsum":
            return g.op("Einsum", left, right, equation="bhqd,bhkd->bhqk" if turned else "bhqk,bhkd->bhqd")
        if kind == "einsum rows":
            right = g.op("Transpose", right, perm=[0, 2, 1, 3])
            if not turned:
                return g.op("Einsum", left, right, equation="bhqk,bkhd->bhqd")
            left = g.op("Transpose", left, perm=[0, 2, 1, 3])
            return g.op("Einsum", left, right, equation="bqhd,bkhd->bhqk")
        if kind == "bmm":
            return self._bmm(left, right, turned=turned)
        if self.options["grouping"] == "five axes":
            return self._five(left, right, turned=turned)
        return g.op("MatMul", left, g.op("Transpose", right, perm=[0, 1, 3, 2]) if turned else right)

    def _bmm(self, left: str, right: str, *, turned: bool) -> str:
        g, sides = self.g, self.sides
        inner, outer = (sides.width, sides.columns) if turned else (sides.columns, sides.width)
        rows = g.op("Reshape", left, g.shape(-1, sides.rows, inner))
        columns = g.op("Reshape", right, g.shape(-1, sides.columns, sides.width))
        made = g.op("MatMul", rows, g.op("Transpose", columns, perm=[0, 2, 1]) if turned else columns)
        return g.op("Reshape", made, g.shape(sides.batch, sides.heads, sides.rows, outer))

    def _five(self, left: str, right: str, *, turned: bool) -> str:
        g, sides = self.g, self.sides
        inner, outer = (sides.width, sides.columns) if turned else (sides.columns, sides.width)
        grouped = g.op("Reshape", left, g.shape(sides.batch, sides.key_heads, sides.group, sides.rows, inner))
        wide = g.op("Unsqueeze", right, g.constant([2]))
        made = g.op("MatMul", grouped, g.op("Transpose", wide, perm=[0, 1, 2, 4, 3]) if turned else wide)
        return g.op("Reshape", made, g.shape(sides.batch, sides.heads, sides.rows, outer))

    def _scaled(self, query: str, key: str) -> str:
        g, number = self.g, self.sides.number
        scale = 1 / math.sqrt(self.sides.width)
        match self.options["scale"]:
            case "divided":
                return g.op("Div", self._raw(query, key), number(math.sqrt(self.sides.width)))
            case "query":
                return self._raw(g.op("Mul", query, number(scale)), key)
            case "both":
                return self._raw(*(g.op("Mul", value, number(math.sqrt(scale))) for value in (query, key)))
            case "computed":
                last = g.op("Slice", g.op("Shape", query), g.constant([-1]), g.constant([np.iinfo(np.int64).max]))
                root = g.op("Sqrt", g.op("Cast", last, to=self.sides.element))
                return g.op("Div", self._raw(query, key), root)
            case "learned":
                gain = g.normal((self.sides.heads, 1, 1), std=0.1, mean=scale, dtype=self.sides.dtype)
                return g.op("Mul", self._raw(query, key), gain)
            case "none":
                return self._raw(query, key)
            case _:
                return g.op("Mul", self._raw(query, key), number(scale))

    def _raw(self, query: str, key: str) -> str:
        """The products, hidden before the scale when the mix says so."""
        scores = self._product(query, key, turned=True)
        if self.options["mask"] != "where before scale":
            return scores
        hidden = self.g.op("Not", self._widened(self._mask(np.bool_)))
        return self.g.op("Where", hidden, self.sides.number(-math.inf), scores)

    # --- bias and mask ------------------------------------------------------------------------------------------------

    def _biased(self, scores: str) -> str:
        g, sides = self.g, self.sides
        match self.options["bias"]:
            case "alibi":
                slopes = (2.0 ** -np.arange(1, sides.heads + 1)).reshape(-1, 1, 1)
                distance = g.op("Cast", self._range(sides.columns), to=sides.element)
                return g.op("Add", scores, g.op("Mul", g.constant(slopes, sides.dtype), distance))
            case "table":
                table = np.random.default_rng(0).standard_normal((1, sides.heads, LONGEST, LONGEST))
                cut = self._cut(g.constant(table, sides.dtype))
                return g.op("Add", scores, cut)
            case "buckets":
                distance = g.op("Sub", self._range(sides.columns), self._query_positions())
                near = g.op("Min", g.op("Abs", distance), g.constant(BUCKETS - 1))
                right = g.op("Cast", g.op("Greater", distance, g.constant(0)), to=TensorProto.INT64)
                bucket = g.op("Add", near, g.op("Mul", right, g.constant(BUCKETS)))
                weight = g.normal((2 * BUCKETS, sides.heads), std=1.0, dtype=sides.dtype)
                made = g.op("Transpose", g.op("Gather", weight, bucket, axis=0), perm=[2, 0, 1])
                return g.op("Add", scores, g.op("Unsqueeze", made, g.constant([0])))
            case _:
                return scores

    def _masked(self, scores: str) -> str:
        g, number = self.g, self.sides.number
        match self.options["mask"]:
            case "added":
                return g.op("Add", scores, self._padding(-10000.0))
            case "lowest":
                return g.op("Add", scores, self._padding(self.lowest))
            case "infinite":
                visible = g.op("Cast", self._widened(self._mask(np.int64)), to=TensorProto.BOOL)
                return g.op("Add", scores, g.op("Where", visible, number(0.0), number(-math.inf)))
            case "where":
                return g.op("Where", self._widened(self._mask(np.bool_)), scores, number(-math.inf))
            case "full":
                visible = g.input("mask", np.bool_, ("batch", 1, "seq", self._key_dim))
                return g.op("Where", visible, scores, number(self.lowest))
            case "added input":
                added = g.input("score_bias", self.sides.dtype, ("batch", 1, "seq", self._key_dim))
                return g.op("Add", scores, added)
            case "none" | "where before scale":
                return scores
            case _:
                return self._ordered(scores)

    def _ordered(self, scores: str) -> str:
        """Masks that compare the position of the query with that of the key."""
        g, sides, number = self.g, self.sides, self.sides.number
        if self.options["mask"] == "causal constant":
            full = np.triu(np.full((LONGEST, LONGEST), self.lowest), 1)[None, None]
            return g.op("Add", scores, self._cut(g.constant(full, sides.dtype)))
        if self.options["mask"] == "causal trilu":
            square = g.op("Expand", number(-math.inf), g.shape(sides.rows, sides.columns))
            first = g.constant(1) if sides.past == 0 else g.op("Add", self._scalar(sides.past), g.constant(1))
            return g.op("Add", scores, g.op("Trilu", square, first, upper=1))
        keys = self._range(sides.columns)
        queries = self._query_positions() if self.options["mask"] != "top left" else self._column(sides.rows)
        visible = g.op("LessOrEqual", keys, queries)
        if self.options["mask"] == "window":
            near = g.op("Greater", keys, g.op("Sub", queries, g.constant(WINDOW)))
            visible = g.op("And", visible, near)
        return g.op("Where", visible, scores, number(-math.inf))

    @property
    def _key_dim(self) -> str:
        return "seq" if self.options["past"] == "none" else "past + seq"

    def _mask(self, dtype: type[np.generic]) -> str:
        return self.g.input("mask", dtype, ("batch", self._key_dim))

    def _widened(self, mask: str) -> str:
        return self.g.op("Unsqueeze", mask, self.g.constant([1, 2]))

    def _padding(self, hidden: float) -> str:
        g, number = self.g, self.sides.number
        visible = g.op("Cast", self._widened(self._mask(np.int64)), to=self.sides.element)
        return g.op("Mul", g.op("Sub", number(1.0), visible), number(hidden))

    def _scalar(self, extent: Extent) -> str:
        return extent if isinstance(extent, str) else self.g.constant(extent)

    def _range(self, extent: Extent) -> str:
        return self.g.op("Range", self.g.constant(0), self._scalar(extent), self.g.constant(1))

    def _column(self, extent: Extent) -> str:
        return self.g.op("Unsqueeze", self._range(extent), self.g.constant([1]))

    def _query_positions(self) -> str:
        column = self._column(self.sides.rows)
        return column if self.sides.past == 0 else self.g.op("Add", column, self._scalar(self.sides.past))

    def _cut(self, table: str) -> str:
        """Rows [past, past + seq) and columns [0, past + seq) of a table [1, heads or 1, LONGEST, LONGEST]."""
        g, sides = self.g, self.sides
        zero, end = g.constant([0]), g.vector(sides.columns)
        begin = zero if sides.past == 0 else g.vector(sides.past)
        rows = g.op("Slice", table, begin, end, g.constant([2]), g.constant([1]))
        return g.op("Slice", rows, zero, end, g.constant([3]), g.constant([1]))

    # --- softmax ------------------------------------------------------------------------------------------------------

    def _guarded(self, scores: str) -> str:
        match self.options["guard"]:
            case "max":
                return self.g.op("Max", scores, self.sides.number(GUARD))
            case "clip":
                return self.g.op("Clip", scores, self.sides.number(GUARD), self.sides.number(-GUARD))
            case _:
                return scores

    def _softmax(self, scores: str) -> str:
        g, sides = self.g, self.sides
        if self.options["sink"] == "none":
            return self._normalised(scores)
        sink = g.normal((1, sides.heads, 1, 1), std=1.0, dtype=sides.dtype)
        column = g.op("Expand", sink, g.shape(sides.batch, sides.heads, sides.rows, 1))
        weights = self._normalised(g.op("Concat", scores, column, axis=-1))
        return g.op("Slice", weights, g.constant([0]), g.constant([-1]), g.constant([-1]))

    def _normalised(self, scores: str) -> str:
        g = self.g
        match self.options["softmax"]:
            case "pieces":
                powers = g.op("Exp", g.op("Sub", scores, self.sides.reduce("ReduceMax", scores)))
                return g.op("Div", powers, self.sides.reduce("ReduceSum", powers))
            case "cast":
                wide = g.op("Softmax", g.op("Cast", scores, to=TensorProto.FLOAT), axis=-1)
                return g.op("Cast", wide, to=self.sides.element)
            case "log":
                return g.op("Exp", g.op("LogSoftmax", scores, axis=-1))
            case _:
                return g.op("Softmax", scores, axis=-1)
