"""Finds attention: a contraction one of whose operands is a softmax, over the contracted axis, of another contraction.

Comes in: the second contraction. Goes out: a draft of the region, or a refusal that says how far the search got.
Nothing is matched but the two sums and the softmax: all that lies between and around them is inlined as expressions.
"""

from dataclasses import dataclass, replace

import onnx_ir as ir

from fuser.beside import KeyReductions, Tap, absorbed, check_tap, key_reductions, taps_of, without_f64
from fuser.cuts import NOTHING, Cuts, data_inputs, trail
from fuser.dots import Dot, axes_of, dot_of, is_dot
from fuser.element import ONE, ZERO, At, Index, LiftError, flatten, joined, shape_of, stage, unflatten
from fuser.exponentials import ADVICE as DIVIDE
from fuser.exponentials import SUMS, RowReductions, either, finished, of_shares, row_reductions, unless_empty
from fuser.growth import Growth, grow
from fuser.lift import Leaf, rule_of
from fuser.lower import Draft, result
from fuser.quantized import fits_sum, levels, scaled
from fuser.region import name_of
from fuser.softmax import Site
from fuser.visibility import by_position
from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Var,
    apply,
    cast,
    const,
    loads,
    select,
    substitute,
    variables,
    walk,
)
from tilecore.contract.spec import PROBABILITY, TOP, AttentionSpec, Result, Tensor, View, extent_of

RAW = Var("raw", DType.F32)
INTEGER_RAW = Var("raw", DType.I32)
ACC = Var("acc", DType.F32)
KIND = "attention"
ONE_FLOAT = const(1.0)
NO_NODES: frozenset[ir.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class Weights:
    """How the probabilities enter the second sum: with a NaN guard, then `finish`ed as the sum `ACC` itself may be.

    `finish` multiplies by a factor or gives 0 for whole rows; no key changes it. `program` is any other program of the
    probability `PROBABILITY`, then with neither.
    """

    guard: bool
    finish: Expr
    program: Expr | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """What else the region computes: reductions over the keys, and scores or probabilities that others read."""

    reductions: KeyReductions
    taps: tuple[Tap, ...] = ()
    rows: RowReductions | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One attention in the axes of the second contraction's output (`o`), its key `k` and the head width `d`."""

    second: Dot
    first: Dot
    site: Site
    o: Index
    key: Var
    width: Var
    q: Expr
    k: Expr
    v: Expr
    total: Expr
    score: Expr
    sink: Expr | None
    weights: Weights
    beside: Beside


def find(second: Dot, dots: dict[ir.Value, Dot], cuts: Cuts) -> Draft | None:
    """The attention that ends in `second`; None when no softmax feeds it, LiftError when one cannot be fused."""
    o = axes_of(shape_of(second.out, cuts.shapes), "o")
    if second.depth == ONE or second.integer:
        return None
    key = Var("k", extent=second.depth)
    sides = tuple(zip((second.left, second.right), second.locate(o, key), strict=True))
    refusals: list[LiftError] = []
    for (weights, where), (values, place) in (sides, sides[::-1]):
        try:
            found = _weighted(weights, dots, cuts, key)
            if found is None:
                continue
            site, through, rows = found
            with stage(f"its weights come from the softmax {name_of(site.node)!r}", node=site.node):
                users = _makers_of(trail(site.input, frozenset(dots))[0]) | site.nodes
                beside = key_reductions(cuts, weights, through, users, key)
                inside = absorbed(cuts, beside.through, users | beside.nodes)
                bound = beside.leaf if rows is None else either(rows.leaf, beside.leaf)
                reader = cuts.reader("side", anchors=frozenset((site.output,)), through=inside, bound=bound)
                probability = reader.at(weights, where)
                v = cuts.reader("operand").at(values, place)
                read = Read(site, through, inside, probability, reader.at, beside, rows)
                return _between(second, read, dots, cuts, (o, key, v))
        except LiftError as error:
            refusals.append(error)
    if refusals:
        raise joined(refusals)
    return None


def _weighted(
    weights: ir.Value, dots: dict[ir.Value, Dot], cuts: Cuts, key: Var
) -> tuple[Site, frozenset[ir.Value], RowReductions | None] | None:
    """The softmax that `weights` are made of, what lies between, and the sums where it is one by exponentials."""
    through, reached = trail(weights, frozenset(cuts.sites))
    found: list[tuple[Site, frozenset[ir.Value], RowReductions | None]]
    found = [(cuts.sites[value], through, None) for value in reached]
    if not found and cuts.exponentials:
        through, reached = trail(weights, frozenset(cuts.exponentials))
        for site in (cuts.exponentials[value] for value in reached):
            anchors = frozenset(trail(site.input, frozenset(dots))[1])
            rows = row_reductions(cuts, site, anchors, key) if anchors else None
            found += [] if rows is None else [(site, through, rows)]
    if len(found) > 1:
        raise LiftError(
            f"it mixes the probabilities of {len(found)} softmaxes",
            node=found[0][0].node,
            advice="multiply each softmax with its own values and add the results",
        )
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Read:
    """The weights of the second sum as read: `through` lies between them and the softmax, `inside` beside that too."""

    site: Site
    through: frozenset[ir.Value]
    inside: frozenset[ir.Value]
    probability: Expr
    at: At
    reductions: KeyReductions
    rows: RowReductions | None

    @property
    def leaf(self) -> Leaf:
        """What gives elements of reductions over the keys."""
        return self.reductions.leaf if self.rows is None else either(self.rows.element, self.reductions.leaf)

    @property
    def own(self) -> frozenset[ir.Node]:
        """The reductions over the keys."""
        return self.reductions.nodes | (NO_NODES if self.rows is None else frozenset(self.rows.nodes.values()))

    def aside(self, value: ir.Value, index: Index) -> Expr | None:
        """The element of a value that is computed inside beside the weights."""
        if value not in self.inside:
            return self.leaf(value, index)
        found = self.at(value, index)
        return found if self.rows is None else self.rows.resolved(found)


def _between(second: Dot, read: Read, dots: dict[ir.Value, Dot], cuts: Cuts, parts: tuple[Index, Var, Expr]) -> Draft:
    o, key, v = parts
    site = read.site
    load = _only(read.probability, cuts, site.output, "the probabilities are read at more than one key")
    if read.rows is not None:
        site = replace(site, axes=tuple(i for i, index in enumerate(load.index) if key in variables(index)))
    position, rows = _softmax_index(load, site, key, cuts)
    shape = shape_of(site.input, cuts.shapes)
    total = shape[position]
    _, reached = trail(site.input, frozenset(dots))
    if not reached:
        if _is_made_outside(site.input, cuts):
            raise LiftError(
                "the scores are computed outside of the body that this is in",
                advice="compute the scores in the body too: regions do not cross the border of If, Loop and Scan",
            )
        raise LiftError(
            "the scores do not come from a contraction",
            advice="nothing to do if the weights are no attention; else keep only pointwise work and changes of layout "
            "between the product of queries and keys and the softmax",
        )
    problems: list[LiftError] = []
    for anchor in reached:
        through = trail(site.input, frozenset({anchor}))[0]
        through |= NOTHING if read.rows is None else read.rows.through - {anchor}
        inner = core_of(dots[anchor], second, site) | _makers_of(read.through | through) | read.own
        inside = absorbed(cuts, through, inner)
        bound = None if read.rows is None else read.rows.leaf
        reader = cuts.reader("side", anchors=frozenset({anchor}), through=inside, bound=bound)
        try:
            first = dots[anchor]
            with stage(f"its scores come from {first.node.op_type} {name_of(first.node)!r}", node=first.node):
                score = reader.at(site.input, (*rows[:position], load.index[position], *rows[position + 1 :]))
                factor = ONE_FLOAT
                if read.rows is not None:
                    read.rows.at = reader.at
                    score, factor = read.rows.settle(score)
                sizes = (total, second.depth, load.index[position], key)
                sink = _sink(reader.at, site, (position, rows), sizes, anchor)
                shares = _share_taps(read, load, inner, cuts, factor)
                weights = weights_of(read.probability, load, key, simple=not shares)
                if read.rows is not None:
                    weights = _raised(weights, read, load, key, factor)
                found = _scores(second, first, site, cuts, (o, key, score, sink, v, weights, read.reductions))
                scores = _score_taps(found, score, through - {site.output}, inner, cuts, (reader.at, inside))
                beside = Beside(read.reductions, (*scores, *shares), read.rows)
                return _draft(replace(found, beside=beside), cuts)
        except LiftError as error:
            problems.append(error)
    raise joined(problems)


def _is_made_outside(value: ir.Value, cuts: Cuts) -> bool:
    """Whether views and pointwise work make a value of what a graph around this one computes."""
    node = cuts.remains.producer(value)
    if node is None or rule_of(node) is None:
        return cuts.is_outer(value)
    return any(_is_made_outside(source, cuts) for source in data_inputs(node))


def _only(expr: Expr, cuts: Cuts, value: ir.Value, problem: str) -> Load:
    found = [load for load in loads(expr) if load.source is cuts.tensors.get(value)]
    if len(found) != 1:
        raise LiftError(problem if found else f"{value.name!r} does not take part")
    return found[0]


def _makers_of(values: frozenset[ir.Value]) -> frozenset[ir.Node]:
    return frozenset(node for value in values if (node := value.producer()) is not None)


def _share_taps(read: Read, load: Load, inner: frozenset[ir.Node], cuts: Cuts, factor: Expr) -> list[Tap]:
    """The probabilities, and what is made of them on their way to the second sum, where something else reads it.

    With exponentials in their place, these are p · `factor`.
    """
    start = (read.site.output, load.index, cast(PROBABILITY * factor, load.dtype))
    return taps_of(cuts, start, read.through, inner, read.aside)


def weights_of(expr: Expr, load: Load, key: Var, *, simple: bool = True) -> Weights:
    """Reads a program of the probability `load`: itself, guarded against NaN, or finished without the key.

    Any other program, or any at all unless `simple`, needs the normalised probability itself, which takes a second pass
    over the keys.
    """
    found = _simple_weights(expr, load, key) if simple else None
    if found is not None:
        return found
    if not load.dtype.is_float or not expr.dtype.is_float:
        raise LiftError(
            f"after the softmax the probabilities p go through {_sketch(expr, load)}, which is no real number"
        )
    program = without_f64(cast(substitute(expr, {load: cast(PROBABILITY, load.dtype)}), DType.F32))
    return Weights(False, ACC, None if program == PROBABILITY else program)


def _raised(weights: Weights, read: Read, load: Load, key: Var, factor: Expr) -> Weights:
    """The weights of exponentials, which are p · `factor`, as those of p."""
    assert read.rows is not None
    program = weights.program
    logarithm = any(isinstance(part, Op) and part.name == "log" for part in walk(factor))
    if weights.guard or (logarithm and TOP in variables(factor)):  # exponentials are NaN or infinite where p is not
        weights = weights_of(read.probability, load, key, simple=False)
        program = weights.program or PROBABILITY
    finish = read.rows.resolved(weights.finish)
    if program is None:
        finish = unless_empty(of_shares(finish, ACC, factor), extent_of(key))
    else:
        program = of_shares(read.rows.resolved(program), PROBABILITY, factor)
    # rows of −inf alone have exponentials of 0, not NaN, until something divides by their sum
    return Weights(TOP in variables(factor), finish, program)


def _simple_weights(expr: Expr, load: Load, key: Var) -> Weights | None:
    if expr == load:
        return Weights(False, ACC)
    if isinstance(expr, Op):
        if expr.name == "cast" and expr.dtype.is_float and expr.args[0].dtype.is_float:
            return _simple_weights(expr.args[0], load, key)
        if expr.name == "select":
            inner = _guarded(expr)
            if inner is not None and _simple_weights(inner, load, key) == Weights(False, ACC):
                return Weights(True, ACC)
            return _without_rows(expr, load, key)
        if expr.name in ("mul", "div"):
            left, right = expr.args
            if expr.name == "mul" and load in loads(right):
                left, right = right, left
            if load not in loads(right) and key not in variables(right):
                inner = _simple_weights(left, load, key)
                if inner is None:
                    return None
                factor = cast(right, DType.F32)
                return Weights(inner.guard, apply(expr.name, inner.finish, factor))
    return None


def _without_rows(expr: Op, load: Load, key: Var) -> Weights | None:
    """Weights that are 0 in whole rows, by a condition that no key changes."""
    condition, *branches = expr.args
    if load in loads(condition) or key in variables(condition):
        return None
    for zero, other in (branches, branches[::-1]):
        if isinstance(zero, Const) and zero.value == 0:
            inner = _simple_weights(other, load, key)
            if inner is None:
                return None
            nothing = const(0.0)
            pair = (nothing, inner.finish) if zero is branches[0] else (inner.finish, nothing)
            return Weights(inner.guard, select(condition, *pair))
    return None


def _guarded(expr: Op) -> Expr | None:
    """x of `select(isnan(x), 0, x)` or of its mirror image."""
    condition, yes, no = expr.args
    if isinstance(condition, Op) and condition.name == "not":
        condition, yes, no = condition.args[0], no, yes
    if isinstance(condition, Op) and condition.name == "isnan" and isinstance(yes, Const) and yes.value == 0:
        return no if condition.args[0] in (no, _uncast(no)) or _uncast(condition.args[0]) == _uncast(no) else None
    return None


def _uncast(expr: Expr) -> Expr:
    while isinstance(expr, Op) and expr.name == "cast":
        expr = expr.args[0]
    return expr


def _sketch(expr: Expr, load: Load) -> str:
    text = str(substitute(expr, {load: Var("p", load.dtype)}))
    return text if len(text) < 120 else f"{text[:117]}…"


def _softmax_index(load: Load, site: Site, key: Var, cuts: Cuts) -> tuple[int, Index]:
    """The axis of the softmax that is the key, and the probabilities' index. LiftError when it is not the key alone."""
    shape = shape_of(site.output, cuts.shapes)
    axes = [axis for axis in site.axes if shape[axis] != ONE]
    if len(axes) != 1:
        raise LiftError(
            f"the softmax sums over {len(axes)} axes, {', '.join(map(str, site.axes))} of {site.output.name!r}",
            advice="reshape the scores so that the keys are one axis, or set the softmax's axis",
        )
    axis = axes[0]
    for position, index in enumerate(load.index):
        if (key in variables(index)) != (position == axis):
            raise LiftError(f"the softmax sums over axis {axis}, the contraction over axis {position} or none of it")
    return axis, load.index


def _sink(
    at: At, site: Site, place: tuple[int, Index], sizes: tuple[Expr, Expr, Expr, Var], anchor: ir.Value
) -> Expr | None:
    """The extra logit, when the softmax is one longer than the contracted axis. LiftError for any other difference."""
    position, rows = place
    total, keys, here, key = sizes
    shift = here - key
    if shift == ZERO and total == keys:
        return None
    if total != keys + 1 or shift not in (ZERO, ONE):
        raise LiftError(f"the softmax sums over {total} keys, the contraction over {keys}")
    extra = keys if shift == ZERO else ZERO
    expr = at(site.input, (*rows[:position], extra, *rows[position + 1 :]))
    if any(load.source.name == anchor.name for load in loads(expr)):
        raise LiftError("the extra logit depends on the scores")
    return expr


def _scores(
    second: Dot,
    first: Dot,
    site: Site,
    cuts: Cuts,
    parts: tuple[Index, Var, Expr, Expr | None, Expr, Weights, KeyReductions],
) -> Found:
    o, key, score, sink, v, weights, reductions = parts
    load = _only(score, cuts, first.out, "each score is made of more than one dot product")
    width = Var("d", extent=first.depth)
    reader = cuts.reader("operand")
    sides = tuple(
        reader.at(value, where)
        for value, where in zip((first.left, first.right), first.locate(load.index, width), strict=True)
    )
    with_key = [key in variables(side) for side in sides]
    if with_key == [True, True]:
        raise LiftError("both operands of the score contraction depend on the key")
    if with_key == [False, False]:
        raise LiftError("no operand of the score contraction depends on the key")
    q, k = sides if with_key[1] else sides[::-1]
    total: Expr = RAW
    wholes = levels(q, width), levels(k, width)
    if wholes[0] is not None and wholes[1] is not None and fits_sum(wholes[0], wholes[1], first.depth):
        total, q, k = scaled(INTEGER_RAW, wholes[0], wholes[1]), wholes[0].value, wholes[1].value
    plain = first.finish(total, load.index, cuts.reader("side").at)
    score = cast(substitute(score, {load: plain}), DType.F32)
    if any(side.dtype is DType.F64 for side in (q, k, v)):
        raise LiftError(
            "f64 attention would be computed in f32",
            advice="convert the model to float32 where that is accurate enough",
        )
    return Found(second, first, site, o, key, width, q, k, v, total, score, sink, weights, Beside(reductions))


def _score_taps(
    found: Found,
    score: Expr,
    through: frozenset[ir.Value],
    inner: frozenset[ir.Node],
    cuts: Cuts,
    beside: tuple[At, frozenset[ir.Value]],
) -> list[Tap]:
    """The scores, in whatever stage something else reads them; none where they are better computed again."""
    load = _only(score, cuts, found.first.out, "each score is made of more than one dot product")
    at, inside = beside
    start = (found.first.out, load.index, found.first.finish(found.total, load.index, cuts.reader("side").at))
    taps = taps_of(cuts, start, through, inner, lambda value, index: at(value, index) if value in inside else None)
    axes = axes_for(found)
    try:
        for tap in taps:
            check_tap(tap, axes.per_key(found.key), cuts)
    except LiftError:  # it stays outside, and the scores are computed twice
        return []
    return taps


@dataclass(frozen=True, slots=True)
class Axes:
    """The logical axes and what each axis of the second contraction's output is in them."""

    b: Var
    h: Var
    q: Var
    e: Var
    renamed: dict[Expr, Expr]
    column: Var | None

    def per_key(self, key: Var) -> frozenset[Var]:
        """The axes of the second contraction's output that scores have, and the key."""
        return frozenset(axis for axis in self.renamed if isinstance(axis, Var) and axis != self.column) | {key}


def axes_for(found: Found) -> Axes:
    """Sort the output's axes into batch, head, query and value columns."""
    axes = [axis for axis in found.o if isinstance(axis, Var)]
    in_values = variables(found.v)
    in_keys = variables(found.k)
    in_rows = variables(found.q) | variables(found.score) | in_keys
    columns = [axis for axis in axes if axis in in_values and axis not in in_rows]
    queries = [axis for axis in axes if axis in variables(found.q) and axis not in in_values and axis not in in_keys]
    column = columns[-1] if columns else None
    query = queries[-1] if queries else None
    batch = [axis for axis in axes if axis not in (column, query)]
    renamed: dict[Expr, Expr] = {}

    def named(name: str, old: Var | None) -> Var:
        new = Var(name, extent=const(1) if old is None else old.extent)
        if old is not None:
            renamed[old] = new
        return new

    q, e = named("q", query), named("e", column)
    h = named("h", batch.pop() if len(batch) > 1 else None)
    extents = tuple(axis.extent for axis in batch if axis.extent is not None)
    b = Var("b", extent=flatten(tuple(extent - 1 for extent in extents), extents) + 1)
    renamed.update(zip(batch, unflatten(b, extents), strict=True))
    return Axes(b, h, q, e, renamed, column)


def _draft(found: Found, cuts: Cuts) -> Draft:
    axes = axes_for(found)
    b, h, q, e = axes.b, axes.h, axes.q, axes.e
    where = tuple(substitute(index, axes.renamed) for index in found.o)
    value = found.second.finish(substitute(found.weights.finish, axes.renamed), where, cuts.reader("side").at)
    rows = None if found.beside.rows is None else found.beside.rows.moved(axes.renamed)
    growth = Growth(
        cuts,
        {found.second.out: where},
        {found.second.out: value},
        [found.second.node],
        aside=None if rows is None else rows.element,
    )
    extent = grow(growth)
    if not extent.results:
        raise LiftError("nothing reads the result")
    core = core_of(found.first, found.second, found.site) | found.beside.reductions.nodes
    if rows is not None:
        core |= frozenset(rows.used)
        _check_divided(found, rows, growth, extent.results)
    in_axes = {name: substitute(expr, axes.renamed) for name, expr in
               (("q", found.q), ("k", found.k), ("v", found.v), ("score", found.score))}  # fmt: skip
    in_axes["score"] = by_position(in_axes["score"], found.key)
    views = {
        "q": View("q", (b, h, q, found.width), in_axes["q"]),
        "k": View("k", (b, h, found.key, found.width), in_axes["k"]),
        "v": View("v", (b, h, found.key, e), in_axes["v"]),
    }
    sink = None
    if found.sink is not None:
        sink = View("sink", (b, h, q), cast(substitute(found.sink, axes.renamed), DType.F32))
    results = tuple(
        result(cuts, out, (b, h, q, e), growth.where[out], finished(growth.value[out])) for out in extent.results
    )
    results += _tap_results(found, axes, cuts)
    weight = None if found.weights.program is None else substitute(found.weights.program, axes.renamed)
    steps = tuple(
        replace(step, value=substitute(step.value, axes.renamed)) for step in found.beside.reductions.steps.values()
    )
    raw = RAW if views["q"].dtype.is_float else INTEGER_RAW

    def spec(inputs: tuple[Tensor, ...]) -> AttentionSpec:
        return AttentionSpec(
            inputs, views["q"], views["k"], views["v"], raw, (b, h, q, found.key), in_axes["score"], ACC, results,
            nan_guard=found.weights.guard, sink=sink, weight=weight, reductions=steps,
        )  # fmt: skip

    programs: list[Expr] = [*(view.value for view in views.values()), in_axes["score"], b, h, q, e, found.key]
    programs += [sink.value] if sink is not None else []
    programs += [weight] if weight is not None else []
    programs += [step.value for step in steps]
    for made in results:
        programs += [made.value, *made.place.index]
    label = _label(found, in_axes["score"], q)
    outputs = (*extent.results, *(tap.value for tap in found.beside.taps))
    return Draft(KIND, label, core | frozenset(extent.nodes), outputs, tuple(programs), spec)


def _check_divided(found: Found, rows: RowReductions, growth: Growth, results: tuple[ir.Value, ...]) -> None:
    """LiftError where no sum of the exponentials takes part in what is made of them: the region would be no softmax."""
    sums = frozenset(value for value, node in rows.nodes.items() if node.op_type in SUMS)
    ends = (found.second.left, found.second.right, *results)
    if not any(trail(value, sums)[1] for value in ends):
        node, error = next(iter(growth.refused.items()), (None, "nothing does"))
        raise LiftError(f"its result is not divided by the sum of its exponentials: {error}", node=node, advice=DIVIDE)


def _tap_results(found: Found, axes: Axes, cuts: Cuts) -> tuple[Result, ...]:
    """The scores and probabilities that others read, as results over (b, h, q, k)."""
    made: list[Result] = []
    for tap in found.beside.taps:
        check_tap(tap, axes.per_key(found.key), cuts)
        where = tuple(substitute(index, axes.renamed) for index in tap.index)
        program = substitute(tap.program, axes.renamed)
        made.append(result(cuts, tap.value, (axes.b, axes.h, axes.q, found.key), where, program))
    return tuple(made)


def core_of(first: Dot, second: Dot, site: Site) -> frozenset[ir.Node]:
    """The nodes without an element rule: the two contractions and the softmax with its pieces."""
    return site.nodes | {first.node, second.node}


def _label(found: Found, score: Expr, query: Var) -> str:
    """What the report calls it."""
    tests = [node for node in walk(score) if isinstance(node, Op) and node.name in ("lt", "le", "gt", "ge")]
    by_index = any({query, found.key} <= variables(test) and not loads(test) for test in tests)
    traits = {
        "by position": by_index,
        "masked": bool(loads(score)),
        "sink": found.sink is not None,
        "exponentials": found.beside.rows is not None,
        "NaN guard": found.weights.guard and found.beside.rows is None,
        "weights kept": bool(found.beside.taps),
    }
    return ", ".join([KIND, *(name for name, present in traits.items() if present)])


def dots_of(nodes: tuple[ir.Node, ...], cuts: Cuts) -> tuple[dict[ir.Value, Dot], dict[ir.Node, LiftError]]:
    """Every contraction by its output, and why others are none."""
    found: dict[ir.Value, Dot] = {}
    refused: dict[ir.Node, LiftError] = {}
    for node in nodes:
        if not is_dot(node):
            continue
        try:
            dot = dot_of(node, cuts.shapes)
            found[dot.out] = dot
        except LiftError as error:
            refused[node] = error
    return found, refused
