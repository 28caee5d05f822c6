"""Names of dims that are arithmetic: "past + seq", "2*n", "floor(seq/2)", as exporters write them.

Comes in: the name of a dim. Goes out: an expression over the symbols in it, or None. Names are claims of whoever made
the model: what is read here is a hint, never a fact (see `Dims.broadcast`).
"""

import ast
import re

from fuser.dims import Dims, Facts
from tilecore.contract.expr import Expr, Sym, const

LONGEST = 200  # characters: nested deeper than Python's parser likes needs more
DASHED = re.compile(r"\S-[^\W\d]")  # "batch-size" is a name
PLAIN = Dims(Facts())


def parse(name: str) -> Expr | None:
    """The expression that `name` is, for every value of its symbols ≥ 0; None for any other text and for plain names.

    Known are identifiers, integers, `+ - *`, `//` and `%` by a positive integer, `floor(a / b)`, `min` and `max`.
    """
    if len(name) > LONGEST or name.isidentifier() or DASHED.search(name):
        return None
    try:
        tree = ast.parse(name.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return _expression(tree)


def _expression(tree: ast.expr) -> Expr | None:
    match tree:
        case ast.Name(id=name):
            return Sym(name)
        case ast.Constant(value=int(value)) if type(value) is int:
            return const(value)
        case ast.BinOp(left=left, op=operator, right=right):
            return _binary(operator, _expression(left), _expression(right))
        case ast.Call(func=ast.Name(id="floor" | "Floor"), args=[ast.BinOp(left=left, op=ast.Div(), right=right)]):
            return _binary(ast.FloorDiv(), _expression(left), _expression(right))
        case ast.Call(func=ast.Name(id="min" | "Min" | "max" | "Max" as which), args=[first, second], keywords=[]):
            a, b = _expression(first), _expression(second)
            if a is None or b is None:
                return None
            return PLAIN.minimum(a, b) if which.lower() == "min" else PLAIN.maximum(a, b)
        case _:
            return None


def _binary(operator: ast.operator, left: Expr | None, right: Expr | None) -> Expr | None:
    if left is None or right is None:
        return None
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv() if PLAIN.nonnegative(right - 1):
            return PLAIN.floor(left, right)
        case ast.Mod() if PLAIN.nonnegative(right - 1):
            return PLAIN.remainder(left, right)
        case _:
            return None
