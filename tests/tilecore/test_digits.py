"""Vector loops taken apart into two digits: which loops are, and that the same elements are stored."""

import numpy as np
import pytest

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Expr, Load, Sym, Var, const, walk
from tilecore.digits import in_digits
from tilecore.loops import Loop, LoopStmt, Memory, Put, VectorLoop

SOURCE = Memory("x", DType.F32, const(4096), "input", 0)
TARGET = Memory("a", DType.F32, const(4096), "scratch")


def loop_of(points: Expr, *digits: int) -> VectorLoop:
    """Stores x at what a convolution's row reads: the last digit steps by 100, those before by 1."""
    column = Var("k", extent=points)
    rest, place, step = column, const(0), 100
    for size in digits:
        rest, place, step = rest // size, place + rest % size * step, 1
    put = Put(TARGET, column, Load(SOURCE, (place + rest,)))
    return VectorLoop(column, points, (put,))


def stored(stmt: LoopStmt) -> dict[int, int]:
    """Where every element of the target comes from."""
    env: dict[Var, np.ndarray] = {}
    while isinstance(stmt, Loop | VectorLoop):
        stop = int(Evaluator({}, {})(stmt.stop, {}).flat[0])
        outer = len(next(iter(env.values()), [0]))
        env = {var: np.repeat(values, stop) for var, values in env.items()}
        env[stmt.var] = np.tile(np.arange(stop), outer)
        if isinstance(stmt, VectorLoop):
            break
        (stmt,) = stmt.body
    assert isinstance(stmt, VectorLoop)
    (put,) = stmt.body
    assert isinstance(put, Put)
    assert isinstance(put.value, Load)
    where, source = (Evaluator({}, {})(value, env) for value in (put.offset, put.value.index[0]))
    return dict(zip(where.tolist(), source.tolist(), strict=True))


def divides(stmt: LoopStmt) -> bool:
    """Whether vectors divide."""
    inner = stmt.body[0] if isinstance(stmt, Loop) else stmt
    assert isinstance(inner, VectorLoop)
    values = (value for part in inner.body if isinstance(part, Put) for value in (part.value, part.offset))
    moved = (part for value in values for part in walk(value) if inner.var in walk(part))
    return any(getattr(part, "name", "") in ("floordiv", "mod") for part in moved)


@pytest.mark.parametrize(
    ("points", "digits"), [(1536, (512,)), (240, (80,)), (768, (16, 16)), (120, (40,)), (96, (48,))]
)
def test_rows_of_two_digits_are_walked_without_a_division(points: int, digits: tuple[int, ...]) -> None:
    loop = loop_of(const(points), *digits)
    made = in_digits(loop)
    assert isinstance(made, Loop)
    assert not divides(made)
    assert stored(made) == stored(loop)


@pytest.mark.parametrize(("points", "digits"), [(96, (3,)), (100, (64,)), (64, ()), (64, (64,))])
def test_others_stay_as_they_are(points: int, digits: tuple[int, ...]) -> None:
    loop = loop_of(const(points), *digits)
    assert in_digits(loop) is loop


def test_a_loop_of_a_length_that_is_not_known_stays() -> None:
    loop = loop_of(Sym("length"), 32)
    assert in_digits(loop) is loop
