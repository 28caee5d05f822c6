"""What stands in a tile past its live elements, according to the meaning of the program.

A copy fills with 0 what lies outside its source; an elementwise statement computes something from that. Where the
result is a known constant (a mask put −inf there, exp2 made 0 of it), a reduction for which it is neutral may skip
it.
"""

import math
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Var, const, rewrite, substitute
from tilecore.graph import Axis, TileGraph, buffers_of, depth_axes
from tilecore.ir import Buffer, Copy, CumSum, Fill, For, Gemm, If, Parallel, Reduce, Stmt, Store, While

NEUTRAL = {"sum": 0.0, "max": -math.inf, "fmax": -math.inf, "min": math.inf, "prod": 1.0}
Pad = float | None  # the constant, or None when it is not known


@dataclass(frozen=True, slots=True)
class Beyond:
    """A tile graph with the bound of each class that is cut: elements i ≥ bound are past the live ones.

    `outside`: a view ends at the bound of its class, so that copies of that view put 0 past it (one of a larger view
    puts data there).
    """

    graph: TileGraph
    bounds: dict[int, Expr]
    outside: bool = True

    def class_of(self, axis: Axis) -> int | None:
        """The class of an axis if it is cut."""
        index = self.graph.classes[axis]
        return index if index in self.bounds else None

    def zeroed(self, copy: Copy, axis: Axis) -> bool:
        """Whether `copy` puts 0 past the bound of a cut axis: where its own view ends."""
        index = self.class_of(axis)
        if not self.outside or index is None:
            return False
        return any(
            bound.stmt is copy and bound.axis == axis and bound.limit == self.bounds[index]
            for bound in self.graph.bounds
        )


def padding(beyond: Beyond) -> dict[tuple[Stmt, str, int], Pad]:
    """For every Reduce and Gemm, the pad of each buffer axis it reads: (statement, buffer, axis) → constant or None."""
    seen: dict[tuple[Stmt, str, int], Pad] = {}
    _block(beyond.graph.program.body, {}, beyond, seen)
    return seen


State = dict[tuple[str, int], Pad]


def _block(body: tuple[Stmt, ...], state: State, beyond: Beyond, seen: dict[tuple[Stmt, str, int], Pad]) -> State:
    """The state after `body`; a loop's is that which no further turn changes, a branch's what both sides agree on."""
    for stmt in body:
        match stmt:
            case For() | While():
                while True:
                    after = _agreed(state, _block(stmt.body, dict(state), beyond, seen))
                    if after == state:
                        break
                    state = after
            case If():
                then = _block(stmt.then, dict(state), beyond, seen)
                state = _agreed(then, _block(stmt.otherwise, dict(state), beyond, seen))
            case _:
                if isinstance(stmt, Reduce | Gemm):
                    for buffer in buffers_of(stmt)[0]:
                        for axis in range(len(buffer.shape)):
                            key, pad = (stmt, buffer.name, axis), state.get((buffer.name, axis))
                            seen[key] = pad if seen.get(key, pad) == pad else None
                _step(stmt, state, beyond)
    return state


def _agreed(left: State, right: State) -> State:
    """What is known in both; a tile that only one has written is not read before it is written again."""
    return {key: pad if right[key] == pad else None for key, pad in left.items() if key in right}


def not_neutral(beyond: Beyond) -> set[int]:
    """Classes of `beyond` over which some reduction sees more than neutral elements past the live ones.

    A product leaves out 0 · x there for any x, as it does for whole tiles that a loop never visits.
    """
    pads = padding(beyond)
    bad: set[int] = set()
    for node in beyond.graph.nodes:
        stmt = node.stmt
        if isinstance(stmt, Reduce):
            index = beyond.class_of((stmt.src.name, stmt.axis))
            if index is not None and pads[stmt, stmt.src.name, stmt.axis] != NEUTRAL.get(stmt.kind):
                bad.add(index)
        if isinstance(stmt, CumSum):
            index = beyond.class_of((stmt.src.name, stmt.axis))
            bad |= set() if index is None else {index}
        if isinstance(stmt, Gemm):
            (a, a_axis), (b, b_axis) = depth_axes(stmt)
            index = beyond.class_of((a, a_axis))
            zero = [pads[stmt, a, a_axis] == 0, pads[stmt, b, b_axis] == 0]
            if index is not None and not (all(zero) if beyond.outside else any(zero)):
                bad.add(index)
    return bad


def _step(stmt: Stmt, state: dict[tuple[str, int], Pad], beyond: Beyond) -> None:
    match stmt:
        case Copy() if isinstance(stmt.dst.source, Buffer):
            whole = stmt.dst.shape == stmt.dst.source.shape
            for axis in range(len(stmt.dst.source.shape)):
                key = (stmt.dst.source.name, axis)
                state[key] = 0.0 if whole and beyond.zeroed(stmt, key) else None
        case Fill():
            value = float(stmt.value.value) if isinstance(stmt.value, Const) else None
            for axis in range(len(stmt.dst.shape)):
                state[stmt.dst.name, axis] = value
        case Gemm() | Reduce() | CumSum():
            target = stmt.c if isinstance(stmt, Gemm) else stmt.dst
            for axis in range(len(target.shape)):
                state[target.name, axis] = None
        case Parallel():
            for store in stmt.body:
                if isinstance(store.target, Buffer):
                    _store(store, store.target, stmt, state, beyond)
        case Store() if isinstance(stmt.target, Buffer):
            state.update({(stmt.target.name, axis): None for axis in range(len(stmt.index))})
        case _:
            return


def _store(store: Store, target: Buffer, around: Parallel, state: dict[tuple[str, int], Pad], beyond: Beyond) -> None:
    new: dict[tuple[str, int], Pad] = {}
    whole = _is_whole(store, target, around)
    for axis, index in enumerate(store.index):
        pad: Pad = None
        if isinstance(index, Var) and index in around.axes and store.guard is None:
            own = beyond.class_of(index)
            pad = None if own is None else _value_beyond(store.value, index, beyond.bounds[own], state)
        new[target.name, axis] = pad if whole or state.get((target.name, axis)) == pad else None
    state.update(new)


def _is_whole(store: Store, target: Buffer, around: Parallel) -> bool:
    """Whether every element of `target` is stored; what is not remains as it was."""
    walked = [entry for entry in dict.fromkeys(store.index) if isinstance(entry, Var) and entry in around.axes]
    return [axis.extent for axis in walked] == list(target.shape)


def _value_beyond(value: Expr, var: Var, bound: Expr, state: dict[tuple[str, int], Pad]) -> Pad:
    """The constant that `value` is for every `var` ≥ `bound`, or None."""

    def known(node: Expr) -> Expr | None:
        if isinstance(node, Load) and var in node.index:
            if isinstance(node.source, Buffer):
                pad = state.get((node.source.name, node.index.index(var)))
                return Var(f"{node}", node.dtype) if pad is None else const(pad, node.dtype)
            return None
        return None

    past = bound + Var("past", extent=var.extent)
    result = rewrite(substitute(rewrite(value, known), {var: past}), _fold_infinite)
    return float(result.value) if isinstance(result, Const) else None


def _fold_infinite(node: Expr) -> Expr | None:
    """−inf − x and c · −inf are −inf: a program that subtracts −inf here makes NaN of live elements too."""
    if not isinstance(node, Op) or node.dtype is not DType.F32:
        return None
    infinite = const(-math.inf, node.dtype)
    if node.name in ("add", "sub") and node.args[0] == infinite:
        return infinite
    if node.name == "mul" and infinite in node.args:
        other = node.args[1] if node.args[0] == infinite else node.args[0]
        return infinite if isinstance(other, Const) and other.value > 0 else None
    return None
