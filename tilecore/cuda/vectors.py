"""Runs of elements that one instruction moves: is an offset consecutive along a variable, and a condition the same?

Comes in: integer expressions in which a column is `vector` · q + v. Goes out: what holds for every v in [0, `vector`).
"""

from tilecore.contract.expr import Expr, Load, Op, Var, const, polynomial, rewrite
from tilecore.contract.spec import Tensor
from tilecore.graph import split_affine

STEP = Var("step")  # v


def flat_offset(tensor: Tensor, index: tuple[Expr, ...]) -> Expr:
    """The position of an element in a dense tensor."""
    total: Expr = const(0)
    for position, extent in zip(index, tensor.shape, strict=True):
        total = total * extent + position
    return total


def run_start(offset: Expr, vector: int) -> Expr | None:
    """Where a run of `vector` elements starts when `offset` is that plus STEP and it is aligned; else None."""
    factor, rest = split_affine(_apart(offset, vector), STEP)
    return rest if factor == const(1) and rest is not None and multiple(rest, vector) else None


def uniform(condition: Expr, vector: int) -> bool:
    """Whether a condition on positions holds for all of a run or for none of it."""
    if not isinstance(condition, Op):
        return True
    if condition.name in ("and", "or", "not"):
        return all(uniform(part, vector) for part in condition.args)
    if condition.name in ("lt", "le", "gt", "ge") and condition.args[0].dtype.is_int:
        low, high = condition.args if condition.name in ("lt", "le") else condition.args[::-1]
        factor, rest = split_affine(_apart(high - low, vector), STEP)
        if rest is None or not multiple(rest, vector):
            return factor == const(0) and rest is not None
        # rest − v > 0 and rest + v ≥ 0 depend on rest alone, a multiple of the run's length
        strict = condition.name in ("lt", "gt")
        return factor == const(0) or factor == const(-1 if strict else 1)
    return STEP not in _atoms(condition)


def _atoms(expr: Expr) -> set[Expr]:
    found: set[Expr] = set()

    def note(node: Expr) -> None:
        found.add(node)

    rewrite(expr, note)
    return found


def _apart(expr: Expr, vector: int) -> Expr:
    """`expr` with quotients and remainders by multiples of `vector` taken of the run's start."""

    def change(node: Expr) -> Expr | None:
        if not (isinstance(node, Op) and node.name in ("floordiv", "mod") and multiple(node.args[1], vector)):
            return None
        factor, rest = split_affine(node.args[0], STEP)
        if factor != const(1) or rest is None or not multiple(rest, vector):
            return None
        return rest // node.args[1] if node.name == "floordiv" else rest % node.args[1] + STEP

    return rewrite(expr, change)


def multiple(expr: Expr, vector: int) -> bool:
    """Whether an integer is a multiple of `vector`, term by term."""
    return all(
        amount % vector == 0 or any(_atom_multiple(atom, vector) for atom in term)
        for term, amount in polynomial(expr).items()
    )


def _atom_multiple(atom: Expr, vector: int) -> bool:
    return isinstance(atom, Op) and atom.name in ("mod", "min", "max") and all(multiple(x, vector) for x in atom.args)


def reads_memory(expr: Expr) -> bool:
    """Whether a tensor is read anywhere in it."""
    return any(isinstance(node, Load) and isinstance(node.source, Tensor) for node in _atoms(expr))
