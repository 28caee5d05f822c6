"""`break` and `continue` in loops of the program: flags that keep what is left from running.

Comes in: the syntax of a loop, from `script`, and its iterations. Goes out: the same loop, where an `if` on a symbolic
value may end it. `if c: …; continue` becomes the other side of the `if`. Any other exit sets a flag, a cell of the
task: what follows it, and every later turn, stand under an `if` on the flag. A loop of Python's own is left as ever.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, const
from tilecore.errors import TileError, user_span
from tilecore.ir import Buffer, Fill
from tilecore.tracer import Scope, Tracer, active
from tilecore.value import Value, lift, operate

Loops = ast.For | ast.While
ELSEWHERE = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
HERE = (const(0),)


class PythonIf(ast.If):
    """An `if` that Python decides, always: `script` leaves it as it is."""


@dataclass
class Flag:
    """A bool of the task that a loop sets."""

    buffer: Buffer
    tracer: Tracer

    def read(self) -> Value:
        """What it is now."""
        version = self.tracer.versions[self.buffer.name]
        return Value(Load(self.buffer, HERE), frozenset({(self.buffer.name, version)}))


@dataclass
class Loop:
    """One loop while it is traced; `leaves` and `skips` say whether its text has a `break`, or needs a flag to skip."""

    leaves: bool
    skips: bool
    traced: bool = False  # runs in the program, not in Python
    left: Flag | None = None
    skipped: Flag | None = None
    begin: tuple[Scope, int] | None = None  # where the loop starts
    depth: int = 0
    tracer: Tracer | None = field(init=False)

    def __post_init__(self) -> None:
        self.tracer = active()
        if self.tracer is not None and self.tracer.scopes:
            self.begin = (self.tracer.scopes[-1], len(self.tracer.scopes[-1].body))
            self.depth = len(self.tracer.scopes)

    def around(self, items: Iterable[Any]) -> Iterator[Any]:
        """The turns of a `for`."""
        for item in items:
            if self.tracer is not None and not self.traced and len(self.tracer.scopes) > self.depth:
                self.enter()
            self.turn()
            yield item

    def enter(self) -> None:
        """The loop is one of the program: what leaves it has to be known where its body begins."""
        self.traced = True
        if self.leaves:
            self.left = self._flag("left")

    def turn(self) -> None:
        """A turn begins. Points of T.Parallel have no flag: `skip` refuses them."""
        if self.tracer is not None and self.tracer.scopes and self.tracer.scopes[-1].elementwise:
            return
        if self.traced and self.skips and self.skipped is None:
            self.skipped = self._flag("skipped")
        if self.skipped is not None:
            self._set(self.skipped, value=False)

    def leave(self) -> bool:
        """`break`: whether Python is to do it."""
        if not self._is_symbolic("break"):
            return True
        if self.left is None:
            self.left = self._flag("left")
        self._set(self.left, value=True)
        return False

    def skip(self) -> bool:
        """`continue`: whether Python is to do it."""
        if not self._is_symbolic("continue"):
            return True
        if self.skipped is None:
            self.skipped = self._flag("skipped")
        self._set(self.skipped, value=True)
        return False

    def going(self) -> Any:
        """Whether this turn runs from here on."""
        found: Any = True
        for flag in (self.left, self.skipped):
            if flag is not None:
                here = operate("not", flag.read())
                found = here if found is True else operate("and", found, here)
        return found

    def _is_symbolic(self, word: str) -> bool:
        tracer = self.tracer
        if tracer is None or not (self.traced or len(tracer.scopes) > self.depth):
            return False
        if tracer.scopes[-1].elementwise:
            _fail(
                f"a {word} inside T.Parallel, whose points run at once",
                "`if` around the rest of the body; `if c: continue` alone may stand in the body of T.Parallel itself",
            )
        return True

    def _flag(self, name: str) -> Flag:
        """A flag that is false where the loop starts."""
        assert self.tracer is not None
        assert self.begin is not None
        (scope, place), span = self.begin, user_span()
        buffer = Buffer(self.tracer.unique(name), DType.BOOL, (const(1),), "fragment", span)
        self.tracer.buffers.append(buffer)
        self.tracer.versions[buffer.name] = self.tracer.tick()
        scope.body.insert(place, Fill(buffer, const(False), span))
        return Flag(buffer, self.tracer)

    def _set(self, flag: Flag, *, value: bool) -> None:
        assert self.tracer is not None
        self.tracer.store(flag.buffer, HERE, lift(value), ())


# ---- the syntax


def exits(body: list[ast.stmt]) -> list[ast.Break | ast.Continue]:
    """The `break` and `continue` of the loop that `body` is of."""
    found: list[ast.Break | ast.Continue] = []
    for stmt in body:
        match stmt:
            case ast.Break() | ast.Continue():
                found.append(stmt)
            case ast.For() | ast.While():
                found += exits(stmt.orelse)
            case _ if not isinstance(stmt, ELSEWHERE):
                for block in _blocks(stmt):
                    found += exits(block)
            case _:
                pass
    return found


def named_breaks(definition: ast.FunctionDef) -> None:
    """`T.loop_break()` as the `break` that it is."""
    for node in ast.walk(definition):
        for block in _blocks(node) + ([node.body] if isinstance(node, ast.For | ast.While) else []):
            for place, stmt in enumerate(block):
                match stmt:
                    case ast.Expr(value=ast.Call(func=ast.Attribute(attr="loop_break"))):
                        block[place] = ast.copy_location(ast.Break(), stmt)
                    case _:
                        pass


def settle(body: list[ast.stmt], own: str, *, last: bool = True) -> list[ast.stmt]:
    """`body` of the loop `own` with its exits in terms of `Loop`; `last` where nothing of the turn follows `body`."""
    done: list[ast.stmt] = []
    for place, stmt in enumerate(body):
        rest = body[place + 1 :]
        if isinstance(stmt, ast.Break | ast.Continue):
            call = _method(own, "leave" if isinstance(stmt, ast.Break) else "skip", stmt)
            word = ast.copy_location(ast.Break() if isinstance(stmt, ast.Break) else ast.Continue(), stmt)
            return [*done, ast.copy_location(PythonIf(call, [word], []), stmt)]  # what follows is never reached
        if not _holds_exit(stmt):
            done.append(stmt)
            continue
        turned = _turned(stmt, rest) if last else None
        if turned is not None:
            return [*done, *settle([turned], own)]
        for block in _blocks(stmt):
            block[:] = settle(block, own, last=last and not rest)
        done.append(stmt)
        if rest:
            test = _method(own, "going", rest[0])
            done.append(ast.copy_location(ast.If(test, settle(rest, own, last=last), []), rest[0]))
        return done
    return done


def needs_flag(body: list[ast.stmt]) -> bool:
    """Whether a settled body has a `continue` that a flag stands for."""
    nodes = (node for stmt in body for node in ast.walk(stmt))
    return any(isinstance(node, ast.Attribute) and node.attr == "skip" for node in nodes)


def _turned(stmt: ast.stmt, rest: list[ast.stmt]) -> ast.If | None:
    """`if c: …; continue` before `rest` as `if c: … else: rest`; None where it is anything else."""
    if not isinstance(stmt, ast.If):
        return None
    for ends, other in ((stmt.body, stmt.orelse), (stmt.orelse, stmt.body)):
        if ends and isinstance(ends[-1], ast.Continue) and not exits(ends[:-1]):
            shorter = ends[:-1] or [ast.copy_location(ast.Pass(), ends[-1])]
            longer = [*other, *rest]
            sides = (shorter, longer) if ends is stmt.body else (longer, shorter)
            return ast.copy_location(ast.If(stmt.test, *sides), stmt)
    return None


def _holds_exit(stmt: ast.stmt) -> bool:
    return bool(exits([stmt]))


def _blocks(stmt: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements in a statement."""
    match stmt:
        case ast.For() | ast.While():
            return [stmt.orelse]
        case ast.If():
            return [stmt.body, stmt.orelse]
        case ast.With():
            return [stmt.body]
        case ast.Try():
            return [stmt.body, *(handler.body for handler in stmt.handlers), stmt.orelse, stmt.finalbody]
        case _:
            return []


def _method(own: str, name: str, like: ast.AST) -> ast.expr:
    call = ast.Call(ast.Attribute(ast.Name(own, ast.Load()), name, ast.Load()), [], [])
    for part in ast.walk(call):
        ast.copy_location(part, like)
    return call


def _fail(message: str, instead: str) -> NoReturn:
    raise TileError(message, user_span(), instead=instead)
