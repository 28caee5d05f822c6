"""Whether a program changes in steps with a float: there the last place of a quotient may decide which."""

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Op, walk
from tilecore.emit_expr import COMPARE
from tilecore.loops import Fold, Let, LoopProgram, Put, loop_statements

STEPS = {"round", "floor", "ceil", "floordiv", "mod", "reinterpret"}  # operations of floats that change in steps


def jumps(program: LoopProgram) -> bool:
    """Whether something in `program` does."""
    parts = [part for part in loop_statements(program.body) if isinstance(part, Put | Let | Fold)]
    return any(isinstance(node, Op) and _is_step(node) for part in parts for node in walk(part.value))


def _is_step(op: Op) -> bool:
    if not _is_float(op.args[0]):
        return False
    if op.name in COMPARE:
        return any(isinstance(part, Op) and part.name == "div" for part in walk(op))
    return op.name in STEPS or (op.name == "cast" and not _is_float(op))


def _is_float(value: Expr) -> bool:
    return not value.dtype.is_int and value.dtype is not DType.BOOL
