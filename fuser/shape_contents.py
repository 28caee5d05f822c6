"""Contents of small integer, bool and float tensors: the shape plumbing, followed symbolically.

Comes in: a `Call` whose output shapes are known where they can be. Goes out: one content per output, None where it is
not known. Integers of every width are i64 expressions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fuser.dims import INFINITE, ZERO, Dims, dim, integer, product
from fuser.shape_call import CONTENT_LIMIT, Call, Content
from fuser.shape_rules import shape_window, slice_bounds
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Op, apply, cast, const

Contents = Sequence[Content | None]
Rule = Callable[[Call], Contents]


def array_of(items: Sequence[Expr], shape: tuple[int, ...] | None = None) -> Content:
    """An object array of expressions; 1-D unless a shape is given."""
    content = np.empty(len(items), object)
    content[:] = list(items)
    return content if shape is None else content.reshape(shape)


def elementwise(combine: Callable[[Dims, Sequence[Expr]], Expr | None]) -> Rule:
    """The rule of an operator that works element by element, with broadcasting."""

    def rule(call: Call) -> Contents:
        parts = [call.content(index) for index in range(len(call.node.inputs))]
        if any(part is None for part in parts):
            return [None]
        try:
            arrays = np.broadcast_arrays(*[part for part in parts if part is not None])
        except ValueError:
            return [None]  # the model is wrong; it is not for this rule to say so
        if arrays[0].size > CONTENT_LIMIT:
            return [None]
        results: list[Expr] = []
        for items in zip(*(array.flat for array in arrays), strict=True):
            result = combine(call.dims, items)
            if result is None:
                return [None]
            results.append(result)
        return [array_of(results, arrays[0].shape)]

    return rule


def is_float(*items: Expr) -> bool:
    """True when the elements are floats."""
    return items[0].dtype.is_float


def arithmetic(name: str) -> Callable[[Dims, Sequence[Expr]], Expr | None]:
    """add, sub or mul."""

    def combine(_: Dims, items: Sequence[Expr]) -> Expr | None:
        total = items[0]
        for item in items[1:]:
            if item.dtype is not total.dtype:
                return None
            total = apply(name, total, item)
        return total

    return combine


def divide(dims: Dims, items: Sequence[Expr]) -> Expr | None:
    """Div: truncating for integers, which is flooring where neither side is negative."""
    a, b = items
    if is_float(a):
        return apply("div", a, b)
    x, y = integer(a), integer(b)
    if x is not None and y:
        return dim(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1))
    if y == 0 or not (dims.nonnegative(a) and dims.nonnegative(b)):
        return None
    return dims.floor(a, b)


def modulo(dims: Dims, items: Sequence[Expr]) -> Expr | None:
    """Mod of integers: the sign of the divisor without `fmod`; both agree where neither side is negative."""
    a, b = items
    if is_float(a) or not (dims.nonnegative(a) and dims.nonnegative(b)) or b == ZERO:
        return None
    return dims.remainder(a, b)


def extreme(name: str) -> Callable[[Dims, Sequence[Expr]], Expr | None]:
    """Min or Max of integers."""

    def combine(dims: Dims, items: Sequence[Expr]) -> Expr | None:
        best = items[0]
        for item in items[1:]:
            if is_float(item):
                best = apply(name, best, item)
            else:
                best = dims.minimum(best, item) if name == "min" else dims.maximum(best, item)
        return best

    return combine


def comparison(name: str) -> Callable[[Dims, Sequence[Expr]], Expr | None]:
    """Equal, Less and kin; of bools only Equal."""

    def combine(dims: Dims, items: Sequence[Expr]) -> Expr | None:
        a, b = items
        if a.dtype is DType.I64:
            return dims.compare(name, a, b)
        return apply(name, a, b) if isinstance(a, Const) and isinstance(b, Const) else None

    return combine


def logical(name: str) -> Callable[[Dims, Sequence[Expr]], Expr | None]:
    """And, Or and Not."""

    def combine(_: Dims, items: Sequence[Expr]) -> Expr | None:
        return apply(name, *items)

    return combine


def choose(_: Dims, items: Sequence[Expr]) -> Expr | None:
    """Where."""
    condition, yes, no = items
    if isinstance(condition, Const):
        return yes if condition.value else no
    if yes == no:
        return yes
    return Op("select", (condition, yes, no), yes.dtype) if yes.dtype is no.dtype else None


def negate(_: Dims, items: Sequence[Expr]) -> Expr | None:
    """Neg."""
    return apply("neg", items[0])


def magnitude(dims: Dims, items: Sequence[Expr]) -> Expr | None:
    """Abs."""
    x = items[0]
    if is_float(x):
        return apply("abs", x)
    return x if dims.nonnegative(x) else -x if dims.nonnegative(-x) else None


def rounded(name: str) -> Callable[[Dims, Sequence[Expr]], Expr | None]:
    """Floor, Ceil and Round: exact on an integer made a float; floor and ceil of its quotient by a whole number too."""

    def combine(dims: Dims, items: Sequence[Expr]) -> Expr | None:
        x = items[0]
        whole = whole_of(x)
        if whole is not None:
            return cast(whole, x.dtype)
        if name in ("floor", "ceil") and isinstance(x, Op) and x.name == "div" and isinstance(x.args[1], Const):
            top, bottom = whole_of(x.args[0]), x.args[1].value
            if top is not None and bottom >= 1 and bottom == int(bottom) and dims.nonnegative(top):
                count = dim(int(bottom))
                return cast(dims.floor(top, count) if name == "floor" else dims.ceiling(top, count), x.dtype)
        return apply(name, x)

    return combine


def whole_of(expr: Expr) -> Expr | None:
    """The integer that a float expression is the plain conversion of. Dims are below 2^24, so that it is exact."""
    if isinstance(expr, Op) and expr.name == "cast" and expr.args[0].dtype is DType.I64 and expr.dtype.is_float:
        return expr.args[0]
    return None


def float_function(name: str) -> Callable[[Dims, Sequence[Expr]], Expr | None]:
    """Sqrt and kin: of floats only."""

    def combine(_: Dims, items: Sequence[Expr]) -> Expr | None:
        return apply(name, *items) if is_float(*items) else None

    return combine


def convert(call: Call) -> Contents:
    """Cast between integers, floats and bool."""
    content, dtype = call.content(0), call.known.dtypes.get(call.node.outputs[0])
    target = TYPES.get(str(dtype))
    if content is None or target is None:
        return [None]
    if target is DType.I64 and any(isinstance(item, Const) and not np.isfinite(item.value) for item in content.flat):
        return [None]
    return [array_of([converted(item, target) for item in content.flat], content.shape)]


TYPES: Mapping[str, DType] = {
    "INT64": DType.I64,
    "INT32": DType.I64,  # shapes fit
    "FLOAT": DType.F32,
    "DOUBLE": DType.F64,
    "FLOAT16": DType.F16,
    "BOOL": DType.BOOL,
}


def converted(item: Expr, target: DType) -> Expr:
    """One element of a Cast."""
    whole = whole_of(item)
    if target is DType.I64 and whole is not None:
        return whole
    if item.dtype is DType.BOOL and target is DType.I64 and isinstance(item, Const):
        return dim(int(item.value))
    return cast(item, target)


# -- views of small tensors -------------------------------------------------------------------------------------------


def viewed(change: Callable[[Call, Content], Any]) -> Rule:
    """The rule of an operator that moves the elements of its first input."""

    def rule(call: Call) -> Contents:
        content = call.content(0)
        if content is None:
            return [None]
        result = change(call, content)
        return [None if result is None or np.size(result) > CONTENT_LIMIT else np.asarray(result, object)]

    return rule


def into_output_shape(call: Call, content: Content) -> Any:
    """Reshape, Squeeze, Unsqueeze, Flatten: the output shape says it all."""
    shape = static_output(call)
    return None if shape is None else content.reshape(shape)


def static_output(call: Call) -> tuple[int, ...] | None:
    """The output's shape when it is static."""
    shape = call.known.shapes.get(call.node.outputs[0])
    sizes = None if shape is None else [integer(size) for size in shape]
    return None if sizes is None or None in sizes else tuple(size for size in sizes if size is not None)


def expanded(call: Call, content: Content) -> Any:
    """Expand."""
    shape = static_output(call)
    if shape is None or np.prod(shape, dtype=np.int64) > CONTENT_LIMIT:
        return None
    return np.broadcast_to(content, shape).copy()


def tiled(call: Call, content: Content) -> Any:
    """Tile."""
    repeats, shape = call.ints_in(1), static_output(call)
    if repeats is None or shape is None or np.prod(shape, dtype=np.int64) > CONTENT_LIMIT:
        return None
    return np.tile(content, repeats)


def transposed(call: Call, content: Content) -> Any:
    """Transpose."""
    return content.transpose(call.integers("perm"))


def gathered(call: Call, content: Content) -> Any:
    """Gather with constant indices."""
    indices = call.content(1)
    if indices is None or any(integer(item) is None for item in indices.flat):
        return None
    positions = np.asarray([integer(item) for item in indices.flat], np.int64).reshape(indices.shape)
    axis = call.integer("axis")
    if positions.size and (positions.max() >= content.shape[axis] or positions.min() < -content.shape[axis]):
        return None
    return np.take(content, positions, axis=axis)


def sliced(call: Call, content: Content) -> Any:
    """Slice with constant bounds."""
    bounds = slice_bounds(call)
    if bounds is None:
        return None
    window = [slice(None)] * content.ndim
    for start, end, axis, step in zip(*bounds, strict=True):
        first, last = integer(start), integer(end)
        if first is None or last is None:
            return None
        to_the_start = step < 0 and last <= -INFINITE
        window[axis % content.ndim] = slice(first, None if to_the_start else last, step)
    return content[tuple(window)]


def reduced(name: str) -> Rule:
    """ReduceProd, ReduceSum, ReduceMax and ReduceMin over all of a vector."""

    def change(call: Call, content: Content) -> Any:
        shape = static_output(call)
        if content.ndim != 1 or shape is None or content.size == 0 or np.prod(shape, dtype=np.int64) != 1:
            return None
        items = list(content)
        if any(item.dtype is not DType.I64 for item in items):
            return None
        total: Expr = product(items) if name == "prod" else items[0]
        for item in items[1:] if name != "prod" else ():
            total = {"sum": lambda a, b: a + b, "max": call.dims.maximum, "min": call.dims.minimum}[name](total, item)
        return array_of([total], shape)

    return viewed(change)


def summed_up(call: Call, content: Content) -> Any:
    """CumSum of a vector, plain."""
    if content.ndim != 1 or call.integer("exclusive") or call.integer("reverse") or not is_integral(content):
        return None
    totals: list[Expr] = []
    for item in content:
        totals.append(item if not totals else totals[-1] + item)
    return array_of(totals)


def is_integral(content: Content) -> bool:
    """True when all elements are integers."""
    return all(item.dtype is DType.I64 for item in content.flat)


def joined(call: Call) -> Contents:
    """Concat."""
    parts = [call.content(index) for index in range(len(call.node.inputs))]
    if any(part is None for part in parts):
        return [None]
    result = np.concatenate([part for part in parts if part is not None], axis=call.integer("axis"))
    return [result if result.size <= CONTENT_LIMIT else None]


def parted(call: Call) -> Contents:
    """Split into parts of static sizes."""
    content = call.content(0)
    shapes = [call.known.shapes.get(output) for output in call.node.outputs]
    axis = call.integer("axis")
    sizes = [None if shape is None else integer(shape[axis]) for shape in shapes]
    if content is None or None in sizes:
        return [None] * len(sizes)
    ends = np.cumsum([size for size in sizes if size is not None])[:-1]
    return list(np.split(content, ends.tolist(), axis=axis))


def dims_of(call: Call) -> Contents:
    """Shape."""
    shape = call.shape(0)
    return [None if shape is None else array_of(shape[shape_window(call, len(shape))])]


def count_of(call: Call) -> Contents:
    """Size."""
    shape = call.shape(0)
    return [None if shape is None else array_of([product(shape)], ())]


def filled(call: Call) -> Contents:
    """ConstantOfShape of a small static shape."""
    shape, value = static_output(call), call.attribute("value")
    if shape is None or np.prod(shape, dtype=np.int64) > CONTENT_LIMIT:
        return [None]
    array = np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()
    if array.dtype.kind not in "biu":
        return [None]
    item = const(bool(array.item())) if array.dtype.kind == "b" else dim(int(array.item()))
    return [array_of([item] * int(np.prod(shape, dtype=np.int64)), shape)]


def counted(call: Call) -> Contents:
    """Range of a static, small length."""
    shape, start, delta = static_output(call), call.dims_in(0), call.dims_in(2)
    if shape is None or shape[0] > CONTENT_LIMIT or not start or not delta:
        return [None]
    return [array_of([start[0] + delta[0] * step for step in range(shape[0])])]


def scattered(call: Call) -> Contents:
    """ScatterND and ScatterElements into a vector, with constant indices."""
    content, indices, updates = call.content(0), call.ints_in(1), call.content(2)
    if content is None or content.ndim != 1 or indices is None or updates is None:
        return [None]
    if call.string("reduction", "none") != "none" or updates.size != len(indices):
        return [None]
    result = content.copy()
    for index, item in zip(indices, updates.flat, strict=True):
        result[index] = item
    return [result]


RULES: Mapping[str, Rule] = {
    "Abs": elementwise(magnitude),
    "Add": elementwise(arithmetic("add")),
    "And": elementwise(logical("and")),
    "Cast": convert,
    "Ceil": elementwise(rounded("ceil")),
    "Concat": joined,
    "ConstantOfShape": filled,
    "CumSum": viewed(summed_up),
    "Div": elementwise(divide),
    "Equal": elementwise(comparison("eq")),
    "Expand": viewed(expanded),
    "Flatten": viewed(into_output_shape),
    "Floor": elementwise(rounded("floor")),
    "Gather": viewed(gathered),
    "Greater": elementwise(comparison("gt")),
    "GreaterOrEqual": elementwise(comparison("ge")),
    "Identity": viewed(into_output_shape),
    "Less": elementwise(comparison("lt")),
    "LessOrEqual": elementwise(comparison("le")),
    "Max": elementwise(extreme("max")),
    "Min": elementwise(extreme("min")),
    "Mod": elementwise(modulo),
    "Mul": elementwise(arithmetic("mul")),
    "Neg": elementwise(negate),
    "Not": elementwise(logical("not")),
    "Or": elementwise(logical("or")),
    "Pow": elementwise(float_function("pow")),
    "Range": counted,
    "ReduceMax": reduced("max"),
    "ReduceMin": reduced("min"),
    "ReduceProd": reduced("prod"),
    "ReduceSum": reduced("sum"),
    "Reshape": viewed(into_output_shape),
    "Round": elementwise(rounded("round")),
    "ScatterElements": scattered,
    "ScatterND": scattered,
    "Shape": dims_of,
    "Size": count_of,
    "Slice": viewed(sliced),
    "Split": parted,
    "Sqrt": elementwise(float_function("sqrt")),
    "Squeeze": viewed(into_output_shape),
    "Sub": elementwise(arithmetic("sub")),
    "Tile": viewed(tiled),
    "Transpose": viewed(transposed),
    "Unsqueeze": viewed(into_output_shape),
    "Where": elementwise(choose),
}
