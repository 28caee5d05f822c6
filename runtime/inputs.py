"""Inputs for any ONNX model: drawn at random to suit how the model uses them, or read from a .npz file.

In: a model (weights need not be loaded). Out: arrays by input name, of the declared dtypes and dims.
Invariant: the same model, sizes and seed give the same arrays.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, inliner, numpy_helper

from fuser.dim_names import parse
from runtime.lengths import length_range
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Sym, walk

Array = npt.NDArray[Any]
Dim = int | str
Role = Literal["mask", "additive mask", "positions", "ids", "flag", "values"]

SMALL_SIZES = ((3, (17, 7, 11, 13, 19, 23)), (2, (9, 5, 7, 3, 11, 13)), (2, (803, 401, 411, 421)))
LAST_SIZES = ((3, (1, 9, 11, 13, 15)), (1, (7, 5, 9, 11, 13)))  # one new entry, or one row
LARGE_SIZES = ((1, (131, 37, 29, 41)), (1, (67, 21, 15, 23)), (1, (13, 9, 15, 21)), (1, (1605, 501, 511, 521)))
LARGE_SCALES = (30.0, 8.0, 2.0)  # of inputs: large against 1, far from the overflow of float16 after a projection
SUMMANDS = 5  # lengths of a model that are tried as sums of each other
LARGEST_FIXED_SIZE = 4096  # of a dim, and of batch times length: keeps wrong guesses from filling the memory
FIXED_BATCHES, FIXED_LENGTHS = 6, 24  # how many guesses to make for each
SMALL_ROW = 4096
BATCH_NAMES = ("B", "N", "b", "n")
DEFAULT_ID_LIMIT = 4  # for integers that index no table we can see: small enough for any use as an id or a count
MASKED = -10000.0  # an additive mask's value at a hidden key: finite in every float type
PASSES_VALUES = frozenset(
    ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose", "Slice", "Expand", "Flatten", "Concat", "Tile")
)
READS_MASK = frozenset(("Cast", "Sub", "Where", "Equal", "Not", "And", "Or", "Greater", "Less", "ReduceSum", "CumSum"))
KEEPS_TABLE = frozenset(("Identity", "Cast", "DequantizeLinear"))


class InputError(Exception):
    """Inputs that do not suit the model; the message says what was found and what was expected."""


@dataclass(frozen=True)
class Input:
    """One graph input. `dims` has numbers and symbols; a nameless dim is called after its place."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class SizeChoices:
    """Sizes of a model's symbols in the order to try them: some below one tile, some above, and the traced ones."""

    small: tuple[dict[str, int], ...]
    large: tuple[dict[str, int], ...]
    fixed: tuple[dict[str, int], ...]


def read(model: onnx.ModelProto) -> tuple[Input, ...]:
    """The inputs that a caller must give: graph inputs without an initializer. Raises InputError on non-tensors."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs: list[Input] = []
    for value in model.graph.input:
        if value.name in constants:
            continue
        if not value.type.HasField("tensor_type"):
            kind = value.type.WhichOneof("value")
            raise InputError(f"input {value.name!r} is a {kind}, only tensors can be made; give them with --inputs")
        tensor = value.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else _name(dim, f"{value.name}[{axis}]")
            for axis, dim in enumerate(tensor.shape.dim)
        )
        inputs.append(Input(value.name, dtype, dims))
    return tuple(inputs)


def _name(dim: onnx.TensorShapeProto.Dimension, own: str) -> str:
    """The symbol of a dim without a number; some exporters write "?" (or -1) for each dim that they do not know."""
    return own if dim.dim_param in ("", "?") else dim.dim_param


def symbols(model: onnx.ModelProto) -> tuple[str, ...]:
    """The symbols that sizes must be given for, in order of appearance; "past + seq" counts as past and seq."""
    names = (name for entry in read(model) for dim in entry.dims if isinstance(dim, str) for name in _terms(dim))
    return tuple(dict.fromkeys(names))


def size_choices(model: onnx.ModelProto) -> SizeChoices:
    """Sizes to try for the model's symbols; without symbols the only choice is no size.

    Sizes are odd where they can be, and differ between symbols. Then come equal sizes for all but the batch, for models
    that name one dim twice, sizes of which one is the sum of two others, for those that do not say so, and few rows.
    """
    names = symbols(model)
    if not names:
        return SizeChoices(({},), (), ())
    batches = _batches(model)

    def apart(rungs: Sequence[tuple[int, tuple[int, ...]]]) -> list[dict[str, int]]:
        return [assign_sizes(model, batch, sizes) for batch, sizes in rungs]

    def alike(rungs: Sequence[tuple[int, tuple[int, ...]]]) -> list[dict[str, int]]:
        return [{name: batch if name in batches else sizes[0] for name in names} for batch, sizes in rungs]

    def choices(rungs: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[dict[str, int], ...]:
        same = [dict.fromkeys(names, rungs[0][1][0])]
        sums = _with_sums(apart(rungs), batches, limit=SUMMANDS)
        sums += [choice for base in (alike(rungs), same) for choice in _with_sums(base, batches, limit=len(names))]
        every = (*apart(rungs), *alike(rungs), *sums, *same, *apart(LAST_SIZES), *alike(LAST_SIZES))
        return tuple({tuple(choice.items()): choice for choice in every}.values())

    return SizeChoices(choices(SMALL_SIZES), choices(LARGE_SIZES), _fixed_choices(model, names, batches))


def assign_sizes(model: onnx.ModelProto, batch: int, sizes: Sequence[int]) -> dict[str, int]:
    """`batch` for the batch, `sizes` for the other symbols in order; a total length is past and present together."""
    batches = _batches(model)
    chosen = dict.fromkeys(symbols(model), batch)
    others = [name for name in chosen if name not in batches]
    supply = itertools.chain(sizes, itertools.count(sizes[-1] + 2, 2))
    totals = [name for name in others if "total" in name.lower()]
    pasts = [name for name in others if "past" in name.lower() and name not in totals]
    presents = [name for name in others if name not in pasts and name not in totals]
    for name in (*presents, *pasts):
        chosen[name] = next(supply)
    for name in totals:
        chosen[name] = chosen[pasts[0]] + chosen[presents[0]] if pasts and presents else next(supply)
    return chosen


def _with_sums(choices: Sequence[Mapping[str, int]], batches: set[str], *, limit: int) -> list[dict[str, int]]:
    """The first choice with one length as the sum of two others, such as all keys: those of the past and the new ones.

    None where more than `limit` lengths would have to be tried against each other.
    """
    found: list[dict[str, int]] = []
    for choice in choices[:1]:
        lengths = [name for name in choice if name not in batches]
        for total in reversed(lengths if len(lengths) <= limit else []):
            parts = itertools.combinations([name for name in lengths if name != total], 2)
            found += [{**choice, total: choice[a] + choice[b]} for a, b in parts]
    return [dict(items) for items in dict.fromkeys(tuple(choice.items()) for choice in found)]


def _fixed_choices(model: onnx.ModelProto, names: Sequence[str], batches: set[str]) -> tuple[dict[str, int], ...]:
    """Sizes that the graph's own constants mention, for models whose symbols only fit the size they were traced at."""
    tensors = [*model.graph.initializer]
    tensors += [
        a.t for node in model.graph.node if node.op_type == "Constant" for a in node.attribute if a.HasField("t")
    ]
    found: dict[int, int] = {}
    for tensor in tensors:
        sizes = list(tensor.dims)
        if (
            tensor.data_type == onnx.TensorProto.INT64
            and len(sizes) == 1
            and sizes[0] <= 8
            and not tensor.external_data
        ):
            sizes = numpy_helper.to_array(tensor).tolist()
        for size in sizes:
            if 1 < size <= LARGEST_FIXED_SIZE:
                found[size] = found.get(size, 0) + 1
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if 1 < dim.dim_value <= LARGEST_FIXED_SIZE:
                found[dim.dim_value] = found.get(dim.dim_value, 0) + 1
    sizes = sorted(found)
    rows = sizes[:FIXED_BATCHES] if batches else [1]
    lengths = sizes[:FIXED_LENGTHS] if len(batches) < len(names) else [1]
    pairs = ((row, length) for row in rows for length in lengths if row * length <= LARGEST_FIXED_SIZE)
    return tuple({name: row if name in batches else length for name in names} for row, length in pairs)


def flag_choices(model: onnx.ModelProto) -> tuple[bool | None, ...]:
    """What to set flags (bool inputs of one element, such as `use_cache_branch`) to; only None when there are none."""
    flags = (entry.dtype == np.bool_ and all(dim == 1 for dim in entry.dims) for entry in read(model))
    return (False, True) if any(flags) else (None,)


def generate(
    model: onnx.ModelProto,
    *,
    sizes: Mapping[str, int],
    seed: int,
    scale: float = 1.0,
    masks: bool = True,
    flag: bool | None = None,
) -> dict[str, Array]:
    """Random inputs at the given sizes; flags are `flag`, or drawn when it is None.

    Float values are normal with standard deviation `scale`; ids stay inside the smallest table they index; masks have
    a hole, right padding and (with three or more rows) a row that hides everything, or are all ones if not `masks`.
    Raises InputError when a size is missing or a dtype cannot be made.
    """
    random = np.random.default_rng(seed)
    uses = _Uses.of((inliner.inline_local_functions(model) if model.functions else model).graph)
    feeds: dict[str, Array] = {}
    shapes = {entry.name: tuple(_size(dim, sizes, entry.name) for dim in entry.dims) for entry in read(model)}
    for entry in read(model):
        shape = shapes[entry.name]
        lengths = uses.length_range(entry.name, shapes) if entry.dtype.kind == "i" else None
        role = _role(entry, uses)
        if lengths is not None:
            value = np.asarray(random.integers(lengths[0], lengths[1] + 1, shape) if masks else lengths[1])
            value = np.broadcast_to(value, shape).copy()
            value.reshape(-1)[:1] = lengths[1]
        elif role in ("mask", "additive mask"):
            visible = _mask(shape) if masks else np.ones(shape, bool)
            value = np.where(visible, 0.0, MASKED) if role == "additive mask" else visible
        elif role == "positions":
            value = np.broadcast_to(np.arange(shape[-1]) if shape else np.zeros((), int), shape)
        elif role == "ids":
            value = random.integers(0, uses.table_rows(entry.name) or DEFAULT_ID_LIMIT, shape)
        elif role == "flag":
            value = random.integers(0, 2, shape) if flag is None else np.full(shape, flag)
        else:
            value = random.standard_normal(shape) * scale
        feeds[entry.name] = np.ascontiguousarray(value.astype(entry.dtype)).reshape(shape)
    return feeds


def generate_large(
    model: onnx.ModelProto,
    run: Callable[[Mapping[str, Array]], Sequence[Array]],
    *,
    sizes: Mapping[str, int],
    seed: int,
    flag: bool | None = None,
) -> tuple[float, dict[str, Array]] | None:
    """Inputs as large as the model takes without overflow, and their scale; None where it takes nothing above 1.

    Results that are infinite or NaN say little about a fused model. `run` gives the outputs of the model.
    """
    plain: list[Array] | None = None
    for scale in LARGE_SCALES:
        feeds = generate(model, sizes=sizes, seed=seed, scale=scale, flag=flag)
        found = _finite(run(feeds))
        if not all(part.all() for part in found):
            plain = plain or _finite(run(generate(model, sizes=sizes, seed=seed, flag=flag)))
        if plain is None or all(map(np.array_equal, found, plain)):
            return scale, feeds
    return None


def _finite(outputs: Sequence[Array]) -> list[Array]:
    return [np.isfinite(value) if value.dtype.kind == "f" else np.ones(value.shape, bool) for value in outputs]


def first_fitting(
    model: onnx.ModelProto,
    run: Callable[[Mapping[str, Array]], object],
    choices: Iterable[Mapping[str, int]],
    *,
    seed: int,
    masks: bool = True,
    flag: bool | None = None,
) -> tuple[Mapping[str, int] | None, str]:
    """The first sizes whose generated inputs `run` takes without raising, or None and what it said last."""
    reason = ""
    for sizes in choices:
        try:
            run(generate(model, sizes=sizes, seed=seed, masks=masks, flag=flag))
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base but Exception
            reason = f"{describe(sizes)}: {error}"
        else:
            return sizes, ""
    return None, reason


def describe(sizes: Mapping[str, int]) -> str:
    """The sizes in words."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the model's fixed sizes"


def load(path: Path, model: onnx.ModelProto) -> dict[str, Array]:
    """Inputs from a .npz file, checked against the model. Raises InputError on names, dtypes, ranks or fixed dims."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found: dict[str, Array] = {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable .npz file: {error}") from error
    return check(found, model)


def check(feeds: Mapping[str, Array], model: onnx.ModelProto) -> dict[str, Array]:
    """The same inputs if they suit the model, else InputError."""
    entries = {entry.name: entry for entry in read(model)}
    missing = [name for name in entries if name not in feeds]
    unknown = [name for name in feeds if name not in entries]
    if missing or unknown:
        wanted = ", ".join(f"{entry.name} {entry.dtype}{list(entry.dims)}" for entry in entries.values())
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(unknown)}"] * bool(unknown)
        raise InputError(f"inputs do not match the model: {'; '.join(parts)}; expected {wanted}")
    checked: dict[str, Array] = {}
    for name, entry in entries.items():
        value = feeds[name]
        if value.dtype.kind == "V" and value.dtype.itemsize == entry.dtype.itemsize and value.dtype != entry.dtype:
            value = value.view(entry.dtype)  # .npz files keep the bits of types that numpy lacks, and not their names
        if value.dtype != entry.dtype:
            raise InputError(f"input {name!r} has dtype {value.dtype}, expected {entry.dtype}")
        fits = len(value.shape) == len(entry.dims) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(entry.dims, value.shape, strict=True)
        )
        if not fits:
            raise InputError(f"input {name!r} has shape {list(value.shape)}, expected {list(entry.dims)}")
        checked[name] = value
    return checked


# --- sizes -----------------------------------------------------------------------------------------------------------


def _terms(dim: str) -> tuple[str, ...]:
    """Symbols of a dim such as "past + seq"; a name that is no arithmetic is one symbol."""
    expr = parse(dim)
    if expr is None:
        return (dim,)
    return tuple(dict.fromkeys(node.name for node in walk(expr) if isinstance(node, Sym)))


def _size(dim: Dim, sizes: Mapping[str, int], name: str) -> int:
    if isinstance(dim, int):
        return dim
    missing = [term for term in _terms(dim) if term not in sizes]
    if missing:
        raise InputError(f"input {name!r} needs a size for {missing[0]!r}; given: {', '.join(sizes) or 'none'}")
    expr = parse(dim)
    size = sizes[dim] if expr is None else int(Evaluator({}, sizes)(expr))
    if size < 0:
        raise InputError(f"input {name!r} has a dim {dim!r}, which is {size} for {describe(sizes)}")
    return size


def _batches(model: onnx.ModelProto) -> set[str]:
    """Symbols that count independent rows: called so, or only ever the first dim.

    The only symbol of a model is a length all the same if a row is small, so that more rows than a tile are tried.
    """
    axes: dict[str, set[int]] = {}
    row = 0
    for entry in read(model):
        row += math.prod(dim for dim in entry.dims if isinstance(dim, int))
        for axis, dim in enumerate(entry.dims):
            for name in _terms(dim) if isinstance(dim, str) else ():
                axes.setdefault(name, set()).add(axis)
    if len(axes) == 1 and row <= SMALL_ROW:
        return set()
    return {name for name, found in axes.items() if "batch" in name.lower() or name in BATCH_NAMES or found == {0}}


# --- use -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Uses:
    """Who reads and who makes each value of a graph, in its bodies too, and the dims of its weights."""

    readers: Mapping[str, Sequence[onnx.NodeProto]]
    makers: Mapping[str, onnx.NodeProto]
    weights: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(graph: onnx.GraphProto) -> "_Uses":
        readers: dict[str, list[onnx.NodeProto]] = {}
        makers: dict[str, onnx.NodeProto] = {}
        weights: dict[str, tuple[int, ...]] = {}
        graphs = [graph]
        for inner in graphs:  # grows by the bodies found
            weights |= {tensor.name: tuple(tensor.dims) for tensor in inner.initializer}
            for node in inner.node:
                graphs += [body for a in node.attribute for body in ((a.g, *a.graphs) if a.HasField("g") else a.graphs)]
                for name in node.input:
                    readers.setdefault(name, []).append(node)
                for name in node.output:
                    makers[name] = node
        return _Uses(readers, makers, weights)

    def reached(self, name: str) -> Iterable[tuple[str, onnx.NodeProto]]:
        """Nodes that read the input's values, through operators that only move them, with the name they read."""
        queue, seen = [name], {name}
        while queue:
            current = queue.pop()
            for node in self.readers.get(current, ()):
                yield current, node
                if node.op_type in PASSES_VALUES:
                    queue.extend(output for output in node.output if output not in seen)
                    seen.update(node.output)

    def table_rows(self, name: str) -> int | None:
        """Rows of the smallest known table that the input indexes."""
        rows: list[int] = []
        for value, node in self.reached(name):
            if node.op_type == "Gather" and node.input[1] == value:
                dims = self._table(node.input[0])
                axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
                rows += [dims[axis]] if dims else []
        return min(rows, default=None)

    def _table(self, name: str) -> tuple[int, ...] | None:
        while name not in self.weights and name in self.makers and self.makers[name].op_type in KEEPS_TABLE:
            name = self.makers[name].input[0]
        if name in self.weights:
            return self.weights[name]
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant" and maker.attribute[0].HasField("t"):
            return tuple(maker.attribute[0].t.dims)
        return None

    def length_range(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        """What the input may hold where an operator reads it as lengths or places; `shapes` are those of inputs."""
        found = (length_range(node, value, shapes) for value, node in self.reached(name))
        return next((limits for limits in found if limits is not None), None)

    def operators(self, name: str) -> set[str]:
        """Types of the operators that the input's values reach."""
        return {node.op_type for _, node in self.reached(name)}


def _role(entry: Input, uses: _Uses) -> Role:
    name = entry.name.lower()
    integer = np.issubdtype(entry.dtype, np.integer)
    if entry.dtype == np.bool_:
        return "mask" if "mask" in name or len(entry.dims) > 1 else "flag"
    if entry.dtype.kind in "OUS":
        raise InputError(f"input {entry.name!r} holds strings, which cannot be made up; give it with --inputs")
    if "mask" in name:
        added = not integer and "Add" in uses.operators(entry.name) and "Sub" not in uses.operators(entry.name)
        return "additive mask" if added else "mask"
    if not integer:
        return "values"
    if "position" in name:
        return "positions"
    indexed = uses.table_rows(entry.name) is not None
    if not indexed and len(entry.dims) > 1 and uses.operators(entry.name) & READS_MASK:
        return "mask"
    return "ids"


def _mask(shape: tuple[int, ...]) -> Array:
    """True where visible: the first row has a hole, the last one padding at its end, one row hides everything."""
    visible = np.ones(shape, bool)
    if not shape or shape[-1] < 4:
        return visible
    keys = shape[-1]
    rows = visible.reshape(-1, keys) if len(shape) < 3 else visible.reshape(shape[0], -1, keys)
    rows[0, ..., 1] = False
    rows[-1, ..., keys - keys // 3 :] = False
    if len(shape) > 2 and shape[-2] > 2:
        visible[..., 1, :] = False
    elif rows.shape[0] > 2:
        rows[1] = False
    return visible
