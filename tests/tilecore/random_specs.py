"""Random regions: products, attention, rows, packed levels and recurrences, of any width, layout and type.

Programs are bounded and smooth but for choices between exact values, so that f32 and float64 agree to rounding. What a
region may be is wider than what a backend has a kernel for: it has to say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from chunked_forms import LinearForm, linear_spec
from cuda_specs import (
    BF16,
    F8,
    F16,
    F32,
    AttentionForm,
    Dim,
    LatentForm,
    LevelForm,
    attention_spec,
    axis,
    latent_spec,
    level_spec,
    tensor,
)

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Sym, Var, apply, binary, cast, const, select, unary
from tilecore.contract.spec import (
    AttentionSpec,
    ContractionSpec,
    Place,
    Product,
    Result,
    RowSpec,
    ScanSpec,
    Spec,
    Step,
    Tensor,
    View,
)

Rng = np.random.Generator
T = TypeVar("T")
HALVES = (F16, BF16)
EXTENTS = (1, 2, 7, 8, 15, 16, 31, 33, 64, 65, 100, 128, 129, 200, 257, 300, 333)
HUGE = (1 << 20, (1 << 31) - 1, 1 << 33)
WIDTHS = (1, 3, 8, 17, 24, 64, 100, 128, 131, 256, 500, 777, 1000, 1024, 2048, 4100, 6144, 16384, 20001)
JOINTS = (1, 5, 8, 16, 17, 32, 40, 64, 96, 100)
HEADS = (8, 16, 40, 72, 80, 96, 160, 192, 256, 512, *((64, 128) * 15))
DATA = (F32, F16, BF16, DType.I64, DType.I32, DType.I8, DType.U8, DType.BOOL)
SMOOTH: dict[str, Callable[[Expr], Expr]] = {
    "tanh": lambda x: unary("tanh", x),
    "sigmoid": lambda x: unary("sigmoid", x),
    "abs": lambda x: unary("abs", x),
    "erf": lambda x: unary("erf", x),
    "neg": lambda x: unary("neg", x),
    "sin": lambda x: unary("sin", x),
    "cos": lambda x: unary("cos", x),
    "exp": lambda x: unary("exp", binary("min", x, 0.0)),
    "exp2": lambda x: unary("exp2", binary("min", x, 0.0)),
    "log": lambda x: unary("log", unary("abs", x) + 1.0),
    "log2": lambda x: unary("log2", unary("abs", x) + 1.5),
    "sqrt": lambda x: unary("sqrt", unary("abs", x) + 0.25),
    "rsqrt": lambda x: unary("rsqrt", unary("abs", x) + 1.0),
    "half": lambda x: cast(cast(x, F16), F32),
}


@dataclass(frozen=True)
class RandomSpec:
    """A region and what its symbols are when it runs; `kind` says how it was made."""

    seed: int
    kind: str
    spec: Spec
    sizes: dict[str, int]


def random_spec(seed: int, *, huge: bool = False, operands: Sequence[DType] = HALVES) -> RandomSpec:
    """The region of `seed`; with `huge`, extents may be such that no card holds its tensors.

    `operands` has the types of what products, attention and recurrences multiply, as a rule.
    """
    rng = np.random.default_rng(seed)
    makers = {
        "product": _product, "attention": _attention, "rows": _rows, "levels": _levels, "latent": _latent,
        "linear": _linear,
    }  # fmt: skip
    kind = str(rng.choice(list(makers), p=(0.3, 0.3, 0.25, 0.06, 0.03, 0.06)))
    draw = Draw(rng, huge, list(operands))
    return RandomSpec(seed, kind, makers[kind](draw), draw.sizes)


@dataclass
class Draw:
    """Random numbers, and the symbols that were given out."""

    rng: Rng
    huge: bool
    operands: list[DType]

    def __post_init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def one(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        """True as often as `share`."""
        return bool(self.rng.random() < share)

    def extent(self, name: str, options: tuple[int, ...] = EXTENTS, *, symbolic: float = 0.2) -> Dim:
        """A number, or the symbol `name` for one."""
        number = self.one(HUGE) if self.huge and self.chance(0.2) else self.one(options)
        if self.chance(symbolic):
            self.sizes[name] = number
            return Sym(name)
        return number


@dataclass
class Mixer:
    """Random programs over `axes` (f32 and bool); loads make `inputs` longer."""

    draw: Draw
    axes: tuple[Var, ...]
    floats: list[Expr]
    inputs: list[Tensor]
    data: tuple[DType, ...] = DATA

    def load(self) -> Expr:
        """An element of a new tensor over some of the axes, maybe in another order."""
        draw = self.draw
        chosen = [one for one in self.axes if draw.chance(0.6)] or [self.axes[-1]]
        if draw.chance(0.15):
            chosen = [chosen[index] for index in draw.rng.permutation(len(chosen))]
        dtype = draw.one(self.data)
        index: list[Expr] = list(chosen)
        shape: list[Dim] = [one.extent for one in chosen if one.extent is not None]
        if draw.chance(0.15) and isinstance(chosen[-1].extent, Const):  # a part of a wider tensor
            index[-1], shape[-1] = index[-1] + 3, shape[-1] + 8  # type: ignore[operator]
        self.inputs.append(tensor(f"in{len(self.inputs)}", dtype, *shape))
        return Load(self.inputs[-1], tuple(index))

    def exact(self) -> Expr:
        """An f32 that is exact: an element, or a position."""
        if self.draw.chance(0.2):
            return cast(self.draw.one(self.axes) % 64, F32) * 0.0625
        found = self.load()
        if found.dtype.is_int and self.draw.chance(0.4):
            found = self.integer(found)
        if found.dtype is DType.I64:  # which data may make as large as they are
            found = found % 61
        return cast(found, F32) if found.dtype is DType.BOOL or not found.dtype.is_int else cast(found, F32) * 2.0**-6

    def integer(self, value: Expr) -> Expr:
        """A program of integers, which wrap as their type does."""
        amount = const(self.draw.one([3, 7, 100]), value.dtype)
        name = self.draw.one(["add", "sub", "mul", "min", "max", "floordiv", "mod", "abs"])
        if name == "abs":
            value = binary("max", value, const(-127 if value.dtype is DType.I8 else -1000, value.dtype)) \
                if value.dtype is not DType.U8 else value  # fmt: skip
            return unary("abs", value)
        made = binary(name, value, amount)
        return cast(made, self.draw.one([made.dtype, DType.I32, DType.U8]))

    def truth(self) -> Expr:
        """A bool of exact values."""
        draw = self.draw
        match int(draw.rng.integers(7)):
            case 0:
                return cast(self.load(), DType.BOOL)
            case 5:  # as parts that are joined
                return binary(draw.one(["lt", "le", "gt", "ge"]), draw.one(self.axes), draw.one(JOINTS))
            case 1:
                return binary(
                    draw.one(["lt", "le", "gt", "ge"]), draw.one(self.axes), draw.one(self.axes) + draw.one([-5, 0, 3])
                )
            case 2:
                return unary("not", self.truth())
            case 3:
                return binary(draw.one(["and", "or"]), self.truth(), self.truth())
            case 4:
                return unary(draw.one(["isnan", "isinf"]), self.exact())
            case _:
                return binary(draw.one(["lt", "ge", "eq", "ne"]), self.exact(), draw.one([0.0, 0.5]))

    def program(self, level: int = 0) -> Expr:
        """A random f32."""
        draw = self.draw
        if level >= 3 or draw.chance(0.25):
            return draw.one(self.floats) if draw.chance(0.6) else self.exact()
        match int(draw.rng.integers(8)):
            case 0:
                return select(self.truth(), self.program(level + 1), self.program(level + 1))
            case 1:
                return binary(draw.one(["min", "max"]), self.program(level + 1), self.program(level + 1))
            case 2:
                return self.program(level + 1) / (unary("abs", self.program(level + 1)) + 1.0)
            case 3:
                return unary("tanh", self.program(level + 1)) * self.program(level + 1)
            case 4:
                return self.program(level + 1) + self.program(level + 1)
            case 5:
                return self.program(level + 1) * draw.one([0.5, -0.25, 1.5])
            case _:
                return SMOOTH[draw.one(list(SMOOTH))](self.program(level + 1))


def _operand(draw: Draw, name: str, dtype: DType, axes: tuple[Var, Var, Var]) -> tuple[Tensor, Expr]:
    """A tensor of a product, its dims in any order, and its element at (batch, row, column)."""
    batch, row, column = axes
    orders = [(row, column), (column, row), (batch, row, column), (batch, column, row), (row, batch, column)]
    chosen = draw.one(orders[:3] if draw.chance(0.7) else orders)
    index: list[Expr] = list(chosen)
    shape: list[Dim] = [one.extent for one in chosen if one.extent is not None]
    if draw.chance(0.15) and isinstance(chosen[-1].extent, Const):
        offset = draw.one([8, 16, 64, 5])
        index[-1], shape[-1] = index[-1] + offset, shape[-1] + 2 * offset  # type: ignore[operator]
    made = tensor(name, dtype, *shape)
    element: Expr = Load(made, tuple(index))
    if draw.chance(0.3) and dtype.is_float:
        element = cast(element, F32)
        if draw.chance(0.5):
            element = element * draw.one([0.125, -2.0])
        if draw.chance(0.2):
            element = unary("tanh", element)
    return made, element


def _result(draw: Draw, name: str, axes: tuple[Var, ...], value: Expr) -> Result:
    dtype = draw.one([F16, BF16, F32])
    order = axes if draw.chance(0.8) else tuple(axes[index] for index in draw.rng.permutation(len(axes)))
    shape = [one.extent for one in order if one.extent is not None]
    return Result(Place(tensor(name, dtype, *shape), axes, order), cast(value, dtype))


def _product(draw: Draw) -> ContractionSpec:
    g = axis("g", draw.one([1, 1, 1, 2, 3]))
    m, n, k = (axis(name, draw.extent(name.upper())) for name in "mnk")
    dtype = draw.one([F16, F16, BF16, BF16, BF16, F32, F8, DType.I8]) if draw.chance(0.3) else draw.one(draw.operands)
    a, left = _operand(draw, "a", dtype, (g, m, k))
    inputs, products = [a], list[Product]()
    for number in range(draw.one([1, 1, 1, 1, 2, 3])):
        b, right = _operand(draw, f"b{number}", dtype, (g, k, n))
        if draw.chance(0.5):
            b = replace(b, constant=True)
            right = _with_source(right, b)
        inputs.append(b)
        acc = Var(f"acc{number}", DType.I32 if dtype is DType.I8 else F32)
        products.append(Product(View(f"right{number}", (g, k, n), right), acc))
    floats: list[Expr] = [one.acc if one.acc.dtype is F32 else cast(one.acc, F32) for one in products]
    mixer = Mixer(draw, (g, m, n), floats, inputs)
    results: list[Result] = []
    for number in range(draw.one([1, 1, 1, 2])):
        total = floats[0]
        for one in floats[1:]:
            total = total + one
        value = total if draw.chance(0.4) else total + mixer.program() * 0.5
        results.append(_result(draw, f"y{number}", (g, m, n), value))
    return ContractionSpec(tuple(inputs), View("left", (g, m, k), left), products[0].b, products[0].acc,
                           tuple(results), siblings=tuple(products[1:]))  # fmt: skip


def _with_source(expr: Expr, new: Tensor) -> Expr:
    """`expr`, whose only loads are of one tensor, with loads of another."""
    if isinstance(expr, Load):
        return Load(new, expr.index)
    args: tuple[Expr, ...] = getattr(expr, "args", ())
    if not args:
        return expr
    if expr.name == "cast":  # type: ignore[union-attr]
        return cast(_with_source(args[0], new), expr.dtype)
    return apply(expr.name, *(_with_source(arg, new) for arg in args))  # type: ignore[union-attr]


def _attention(draw: Draw) -> AttentionSpec:
    heads, groups = draw.one([(1, 1), (2, 1), (3, 1), (4, 2), (8, 8), (8, 2), (6, 3)])
    queries = draw.extent("S", (1, 1, 4, 8, 33, 64, 100, 129, 200, 300))
    keys = queries if draw.chance(0.4) else draw.extent("K", (1, 7, 64, 65, 128, 200, 331, 520, 1000))
    causal, width = draw.chance(0.3), draw.one(list(HEADS))
    programs = ["none", "none", "cap", "sharp", "slope", "bias", "kept", "hidden", "key bias"]
    form = AttentionForm(draw.one([1, 2, 3]), heads, queries, keys, width, draw.one(draw.operands), groups, causal,
                         draw.one(programs))  # fmt: skip
    spec = attention_spec(form)
    inputs = list(spec.inputs)
    b, h, i, j = spec.score_axes
    if draw.chance(0.25):
        inputs.append(tensor("sink", draw.one([F32, form.dtype]), heads))
        spec = replace(spec, sink=View("sink", (b, h, i), cast(Load(inputs[-1], (h,)), F32)))
    if draw.chance(0.3):
        mixer = Mixer(draw, (b, h, i, j), [spec.raw * width**-0.5], inputs)
        if draw.chance(0.5):
            spec = replace(spec, score=select(mixer.truth(), spec.score, -np.inf))
        else:
            spec = replace(spec, score=spec.score + mixer.program() * 0.5)
        inputs = mixer.inputs
    if draw.chance(0.15):
        spec = replace(spec, score=select(binary("lt", i - j, 70), spec.score, -np.inf))
    if draw.chance(0.3):
        place = spec.outputs[0].place
        mixer = Mixer(draw, place.axes, [spec.acc], inputs)
        value = spec.acc * 1.0 if draw.chance(0.5) else spec.acc + mixer.program() * 0.5
        spec = replace(spec, outputs=(_result(draw, "o", place.axes, value),))
        inputs = mixer.inputs
    if draw.chance(0.2):
        spec = replace(spec, q=replace(spec.q, value=cast(spec.q.value, F32) * 0.5))
    return replace(spec, inputs=tuple(inputs), nan_guard=draw.chance(0.1))


def _rows(draw: Draw) -> RowSpec:
    row, column = axis("r", draw.extent("R")), axis("c", draw.extent("C", WIDTHS, symbolic=0.04))
    mixer = Mixer(draw, (row, column), [], [])
    x = tensor("x", draw.one([F32, F16, BF16]), row.extent, column.extent)  # type: ignore[arg-type]
    mixer.inputs.append(x)
    mixer.floats.append(cast(Load(x, (row, column)), F32))
    steps: list[Step] = []
    for number in range(draw.one([0, 1, 2, 2, 3, 4])):
        kind = draw.one(["tile", "sum", "sum", "max", "min"])
        value = mixer.program()
        steps.append(Step(Var(f"s{number}", F32), kind, value))
        kept: Expr = steps[-1].var
        mixer.floats.append(unary("tanh", kept * 0.05) if kind == "sum" else kept)
    results = [_result(draw, "y0", (row, column), mixer.floats[-1] + mixer.program())]
    if draw.chance(0.25):
        results.append(_result(draw, "y1", (row, column), mixer.program()))
    reductions = [one for one in steps if one.kind != "tile"]
    if reductions and draw.chance(0.3):
        results.append(_result(draw, "y2", (row,), draw.one(reductions).var * 1.0))
    if draw.chance(0.3):
        value = mixer.truth() if draw.chance(0.5) else mixer.integer(cast(mixer.load(), DType.I32))
        place = Place(tensor("y3", value.dtype, row.extent, column.extent), (row, column), (row, column))  # type: ignore[arg-type]
        results.append(Result(place, value))
    return RowSpec(tuple(mixer.inputs), row, column, tuple(steps), tuple(results))


def _levels(draw: Draw) -> ContractionSpec:
    rows = draw.extent("M", (1, 2, 7, 16, 33, 64, 100, 200))
    depth = draw.one([64, 128, 256, 384, 512, 520, 1000])
    bits, group = draw.one([2, 4, 4, 4, 8]), draw.one([16, 32, 64, 128, 128, depth])
    return level_spec(LevelForm(rows, draw.one([8, 64, 100, 129, 264]), depth, bits, group, draw.one(draw.operands),
                                draw.one(["middle", "packed", "bytes"]), draw.one([None, F32, F16]),
                                signed=bits == 8 and draw.chance(0.3)))  # fmt: skip


def _latent(draw: Draw) -> AttentionSpec:
    batch, heads, keys = draw.one([1, 2, 3]), draw.one([1, 16, 100, 128]), draw.extent("S")
    widths = draw.one([256, 384, 512, 512]), draw.one([0, 64, 128])
    return latent_spec(LatentForm(batch, heads, keys, *widths, draw.one(draw.operands)))


def _linear(draw: Draw) -> ScanSpec:
    sides = (64, 128, 64, 128, 256, 32, 100)
    batch, heads, steps = draw.one([1, 2]), draw.one([1, 2, 3]), draw.extent("S")
    widths, dtype = (draw.one(sides), draw.one(sides)), draw.one(draw.operands)
    switches = draw.chance(0.5), draw.chance(0.4), draw.chance(0.4), draw.chance(0.1)
    decay, weighted, scale = draw.one(["", "exp", "sigmoid", "constant"]), draw.chance(0.3), draw.one([1.0, 0.125])
    return linear_spec(LinearForm(batch, heads, steps, *widths, dtype, *switches, decay, weighted, scale))
