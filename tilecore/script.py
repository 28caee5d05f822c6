"""Python's own control flow in kernels: `if`, `while`, `and`, `or`, `not`, `a if c else b`, `a < b < c`, `range`;
`break` and `continue` are in `exits`.

Comes in: a function written for `T.prim_func` or `jit`. Goes out: the same function with each of these as a call of
`Hooks`, which does what Python does for Python values and appends to the traced program for symbolic ones. Positions
are kept, so that errors show the author's text.

A name that a branch on a symbolic value assigns is undecided after it: the branch was traced, not taken. Names from
`T.alloc_var` are cells: assigning one stores, reading one loads. `A: T.Tensor(…)` inside a kernel declares a parameter.
"""

import ast
import builtins
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from tilecore.control import Else, If, While, assert_, serial
from tilecore.errors import TileError, user_span
from tilecore.exits import Loop, exits, named_breaks, needs_flag, settle
from tilecore.span import Span
from tilecore.tracer import current
from tilecore.value import Value, choose, operate

HOOKS = "__tile__"  # a free variable of rewritten functions
TILES = frozenset({"alloc_shared", "alloc_fragment", "alloc_local", "alloc_reducer", "alloc_global", "empty"})


class Undecided:
    """What a name holds after branches on a symbolic value that assign it: any use is an error."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"({self.name}, which an `if` on a symbolic value assigned: use T.if_then_else or T.alloc_var)"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise TileError(
            f"{self.name} was assigned by an `if` on a symbolic value: what it holds is not known here",
            user_span(),
            instead=f"{self.name} = T.if_then_else(condition, a, b), or {self.name} = T.alloc_var(dtype)",
        )


@dataclass
class Branch:
    """One `if`: of a Python value, taken or not; of a symbolic one, both sides traced one after the other."""

    condition: Any
    saved: Mapping[str, Any]
    symbolic: bool = field(init=False)

    def __post_init__(self) -> None:
        self.symbolic = isinstance(self.condition, Value)

    def then(self) -> "Side":
        """The first side."""
        return Side(If(self.condition), taken=True) if self.symbolic else Side(None, taken=bool(self.condition))

    def otherwise(self) -> "Side":
        """The other side."""
        return Side(Else(), taken=True) if self.symbolic else Side(None, taken=not self.condition)

    def before(self, name: str) -> Any:
        """What `name` held before the `if`."""
        return self.saved.get(name, Undecided(name))

    def after(self, name: str) -> Any:
        """What `name` holds after the `if`."""
        return Undecided(name)


@dataclass
class Side:
    """A `with` around one side; gives whether to run it."""

    statement: If | Else | None
    taken: bool

    def __enter__(self) -> bool:
        if self.statement is not None:
            self.statement.__enter__()
        return self.taken

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.statement is not None:
            self.statement.__exit__(kind, error, trace)


class Hooks:
    """What rewritten functions call."""

    @staticmethod
    def branch(condition: Any, names: Mapping[str, Any]) -> Branch:
        """The start of an `if`."""
        return Branch(condition, dict(names))

    @staticmethod
    def loop(leaves: bool, skips: bool) -> Loop:
        """The start of a loop with a `break` or a `continue`."""
        return Loop(leaves, skips)

    @staticmethod
    def turns(condition: Callable[[], Any], loop: Loop | None = None, endless: bool = False) -> Iterator[None]:
        """The turns of a `while`: Python's own, or the one that is traced, as an `endless` one with a `break` is."""
        first = condition()
        if isinstance(first, Value) or (endless and loop is not None and loop.begin is not None):
            if loop is not None:
                loop.enter()
                first = loop.going() if endless else _joined("and", (lambda: first, loop.going))
            with While(first):
                if loop is not None:
                    loop.turn()
                yield
            return
        while first:
            yield
            first = condition()

    @staticmethod
    def both(*parts: Callable[[], Any]) -> Any:
        """`a and b`."""
        return _joined("and", parts)

    @staticmethod
    def either(*parts: Callable[[], Any]) -> Any:
        """`a or b`."""
        return _joined("or", parts)

    @staticmethod
    def negation(value: Any) -> Any:
        """`not a`."""
        return operate("not", value) if isinstance(value, Value) else not value

    @staticmethod
    def choice(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """`a if condition else b`."""
        if isinstance(condition, Value):
            return choose(condition, yes(), no())
        return yes() if condition else no()

    @staticmethod
    def check(condition: Any, message: Callable[[], Any]) -> None:
        """`assert condition, message`."""
        if isinstance(condition, Value):
            assert_(condition, str(message()))
        elif not condition:
            raise AssertionError(message())

    @staticmethod
    def range(*bounds: Any) -> Any:
        """`range(…)`: a loop in the program where a bound is symbolic."""
        if any(isinstance(bound, Value) for bound in bounds):
            return serial(*bounds)
        return builtins.range(*bounds)

    @staticmethod
    def min(*values: Any, **options: Any) -> Any:
        """`min(a, b)`."""
        return _extreme("min", builtins.min, values, options)

    @staticmethod
    def max(*values: Any, **options: Any) -> Any:
        """`max(a, b)`."""
        return _extreme("max", builtins.max, values, options)

    @staticmethod
    def declare(name: str, value: Any, annotation: Any) -> Any:
        """`A: T.Tensor(…)` inside a kernel."""
        return current("a tensor annotation").declare(name, value, annotation)


def _joined(name: str, parts: tuple[Callable[[], Any], ...]) -> Any:
    result: Any = name == "and"
    for part in parts:
        found = part()
        if isinstance(result, Value) or isinstance(found, Value):
            if isinstance(result, Value) or bool(result) is not (name == "and"):
                found = operate(name, _truth(result), _truth(found))
            result = found
            continue
        result = found
        if bool(found) is not (name == "and"):
            return found
    return result


def _truth(value: Any) -> Any:
    """A Python number among symbolic bools counts as its truth."""
    return value if isinstance(value, Value) else bool(value)


def _extreme(name: str, plain: Callable[..., Any], values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options or not any(isinstance(value, Value) for value in values):
        return plain(*values, **options)
    result = values[0]
    for value in values[1:]:
        result = operate(name, result, value)
    return result


# ---- the rewriting


def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its control flow in terms of `Hooks`. TileError when Python does not know its source."""
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise TileError(
            f"the source of {function.__name__} is not known, and kernels are rewritten before they are traced",
            Span(code.co_filename, code.co_firstlineno, 0, code.co_firstlineno, 0),
            instead="a kernel in a file; tilecore.trace.trace for a function without Python control flow",
        ) from None
    module = ast.parse("if True:\n" + "".join(lines)) if lines[0][:1].isspace() else ast.parse("".join(lines))
    block = module.body[0]
    offset = first - 2 if isinstance(block, ast.If) else first - 1
    definition = block.body[0] if isinstance(block, ast.If) else block
    if not isinstance(definition, ast.FunctionDef):
        raise TileError(f"{function.__name__} is not a function written with def")
    ast.increment_lineno(definition, offset)
    definition.decorator_list = []
    _strip(definition.args)
    definition.returns = None
    named_breaks(definition)
    cells = _cells(definition)
    _check_kept(definition, cells, code.co_filename)
    rewritten = _Rewriter(cells, _parameters(definition)).visit(definition)
    free = [name for name in code.co_freevars if name != HOOKS]  # a function inside a rewritten one has it already
    inner = _compiled(rewritten, [*free, HOOKS], code.co_filename)
    known = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    known[HOOKS] = types.CellType(Hooks)
    closure = tuple(known[name] for name in inner.co_freevars)
    result = types.FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    result.__annotations__ = dict(function.__annotations__)
    return result


def _strip(arguments: ast.arguments) -> None:
    """Defaults and annotations have been evaluated already."""
    arguments.defaults = []
    arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None


def _parameters(definition: ast.FunctionDef) -> frozenset[str]:
    arguments = definition.args
    return frozenset(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _cells(definition: ast.FunctionDef) -> frozenset[str]:
    """Names that `T.alloc_var` gives."""
    found: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found |= _allocated(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            found |= _allocated(node.target, node.value)
    return frozenset(found)


def _check_kept(definition: ast.FunctionDef, cells: frozenset[str], filename: str) -> None:
    """TileError for a name that is a cell in one place and a tile in another."""
    for node in ast.walk(definition):
        if not isinstance(node, ast.Assign):
            continue
        both = cells & set[str]().union(*(_allocated(target, node.value, TILES) for target in node.targets))
        if both:
            raise TileError(
                f"{min(both)} is a tile here and a T.alloc_var elsewhere in this function",
                Span(filename, node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0),
                instead="a name of its own for each",
            )


def _allocated(target: ast.expr, value: ast.expr, by: frozenset[str] = frozenset({"alloc_var"})) -> set[str]:
    """The names of `target` that hold what one of the functions `by` made, one by one or a tuple of them."""
    if isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            pairs = zip(target.elts, value.elts, strict=True)
            return set[str]().union(*(_allocated(element, one, by) for element, one in pairs))
        if isinstance(value, ast.ListComp | ast.GeneratorExp):
            return set[str]().union(*(_allocated(element, value.elt, by) for element in target.elts))
    made = isinstance(value, ast.Call) and _called(value) in by
    return {target.id} if made and isinstance(target, ast.Name) else set()


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def _compiled(definition: ast.FunctionDef, free: list[str], filename: str) -> types.CodeType:
    """The code of `definition` with the names `free` as free variables."""
    outer = ast.FunctionDef(
        name="outer",
        args=ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, []),
        body=[definition],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module([outer], []))
    try:
        made = compile(module, filename, "exec")
    except SyntaxError as error:  # Python nests 20 loops and `with` at most, and each `if` here is a `with`
        line, column = error.lineno or definition.lineno, (error.offset or 1) - 1
        nested = "nested" in error.msg
        raise TileError(
            f"{error.msg} in {definition.name}" + (", where every `if` counts as one" if nested else ""),
            Span(filename, line, column, error.end_lineno or line, (error.end_offset or column + 2) - 1),
            instead="a T.macro for the inner blocks, or one condition joined by `and`" if nested else "",
        ) from None
    around = next(c for c in made.co_consts if isinstance(c, types.CodeType))
    return next(c for c in around.co_consts if isinstance(c, types.CodeType) and c.co_name == definition.name)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, cells: frozenset[str], parameters: frozenset[str]) -> None:
        self.cells = cells
        self.parameters = parameters
        self.count = 0

    def visit_If(self, node: ast.If) -> Any:
        """`if`: both sides under a `with`, names put back between them."""
        self.count += 1
        own = f"__branch{self.count}"
        names = sorted((_assigned(node.body) | _assigned(node.orelse)) - self.cells)
        test = self.visit(node.test)
        start = _assign(own, _call("branch", test, ast.Call(ast.Name("locals", ast.Load()), [], [])))
        parts: list[ast.stmt] = [start, _side(own, "then", [self.visit(s) for s in node.body])]
        if node.orelse:
            parts += _when_symbolic(own, "before", names)
            parts.append(_side(own, "otherwise", [self.visit(s) for s in node.orelse]))
        parts += _when_symbolic(own, "after", names)
        return [_located(part, node) for part in _flat(parts)]

    def visit_While(self, node: ast.While) -> Any:
        """`while`: the condition as a function, asked before every turn."""
        if node.orelse:
            return self.generic_visit(node)
        endless = ast.Constant(isinstance(node.test, ast.Constant) and node.test.value is True)
        own, start, body = self._with_exits(node.body)
        more = [ast.Name(own, ast.Load()), endless] if own else []
        turns = _call("turns", _lambda(self.visit(node.test)), *more)
        return [*start, _located(ast.For(ast.Name("__turn", ast.Store()), turns, body, []), node)]

    def visit_For(self, node: ast.For) -> Any:
        """`for` with a `break` or a `continue`."""
        if node.orelse or not exits(node.body):
            return self.generic_visit(node)
        own, start, body = self._with_exits(node.body)
        around = ast.Attribute(ast.Name(own, ast.Load()), "around", ast.Load())
        items = ast.Call(around, [self.visit(node.iter)], [])
        return [*start, _located(ast.For(self.visit(node.target), items, body, []), node)]

    def _with_exits(self, body: list[ast.stmt]) -> tuple[str, list[ast.stmt], list[ast.stmt]]:
        """The name of what knows a loop's exits, its making and the loop's body; no name where there are no exits."""
        found = exits(body)
        if not found:
            return "", [], _flat([self.visit(stmt) for stmt in body])
        self.count += 1
        own, leaves = f"__loop{self.count}", any(isinstance(exit, ast.Break) for exit in found)
        settled = settle(body, own)
        start = _assign(own, _call("loop", ast.Constant(leaves), ast.Constant(needs_flag(settled))))
        if leaves:
            going = ast.Call(ast.Attribute(ast.Name(own, ast.Load()), "going", ast.Load()), [], [])
            settled = [_located(ast.If(going, settled, []), body[0])]
        return own, [_located(start, body[0])], _flat([self.visit(stmt) for stmt in settled])

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """`and` and `or`."""
        hook = "both" if isinstance(node.op, ast.And) else "either"
        return _located(_call(hook, *(_lambda(self.visit(value)) for value in node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        """`not`."""
        self.generic_visit(node)
        return _located(_call("negation", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        """`a < b < c`."""
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        values = [node.left, *node.comparators]
        pairs = [ast.Compare(a, [op], [b]) for a, op, b in zip(values, node.ops, values[1:], strict=False)]
        return _located(_call("both", *(_lambda(_located(pair, node)) for pair in pairs)), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """`a if c else b`."""
        self.generic_visit(node)
        return _located(_call("choice", node.test, _lambda(node.body), _lambda(node.orelse)), node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        """`assert`."""
        self.generic_visit(node)
        message = node.msg or ast.Constant("assertion")
        return _located(ast.Expr(_call("check", node.test, _lambda(message))), node)

    def visit_Call(self, node: ast.Call) -> Any:
        """`range`, `min` and `max` of Python."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("range", "min", "max"):
            node.func = _located(ast.Attribute(ast.Name(HOOKS, ast.Load()), node.func.id, ast.Load()), node.func)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """`A: T.Tensor(…)`, and `n: T.int32 = …`."""
        if node.value is not None:
            target, value = self._target(node.target, node.value), self.visit(node.value)
            return _located(ast.Assign([target], value), node)
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name) or node.target.id not in self.parameters:
            return node
        name = node.target.id
        value = _call("declare", ast.Constant(name), ast.Name(name, ast.Load()), node.annotation)
        return _located(_assign(name, value), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Assigning to a cell stores; its allocation does not."""
        node.targets = [self._target(target, node.value) for target in node.targets]
        node.value = self.visit(node.value)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        """`(n := …)`, which binds a name and cannot store to a cell."""
        node.value = self.visit(node.value)
        return node

    def _target(self, target: Any, value: ast.expr) -> Any:
        """What is assigned: names that receive a cell stay names."""
        if not _allocated(target, value):
            return self.visit(target)
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            target.elts = list(map(self._target, target.elts, value.elts))
        return target

    def visit_Name(self, node: ast.Name) -> Any:
        """A cell is its element."""
        if node.id not in self.cells:
            return node
        element = ast.Subscript(ast.Name(node.id, ast.Load()), ast.Constant(0), node.ctx)
        return _located(element, node)


def _assigned(body: list[ast.stmt]) -> set[str]:
    """Names that statements bind, those inside functions and comprehensions apart."""
    found: set[str] = set()
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        todo.extend(ast.iter_child_nodes(node))
    return found


def _side(own: str, which: str, body: list[Any]) -> ast.stmt:
    """`with own.which() as taken: if taken: body`."""
    taken = f"{own}_taken"
    side = ast.Call(ast.Attribute(ast.Name(own, ast.Load()), which, ast.Load()), [], [])
    inner = ast.If(ast.Name(taken, ast.Load()), _flat(body), [])
    return ast.With([ast.withitem(side, ast.Name(taken, ast.Store()))], [inner])


def _when_symbolic(own: str, which: str, names: list[str]) -> list[ast.stmt]:
    if not names:
        return []
    branch = ast.Name(own, ast.Load())
    values = [
        _assign(name, ast.Call(ast.Attribute(branch, which, ast.Load()), [ast.Constant(name)], [])) for name in names
    ]
    return [ast.If(ast.Attribute(branch, "symbolic", ast.Load()), list(values), [])]


def _flat(parts: list[Any]) -> list[ast.stmt]:
    return [stmt for part in parts for stmt in (part if isinstance(part, list) else [part])]


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _call(hook: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(HOOKS, ast.Load()), hook, ast.Load()), list(arguments), [])


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


def _located(node: Any, like: ast.AST) -> Any:
    """`node` and what was made for it, at the place of `like`."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt | ast.arg | ast.keyword) and not hasattr(part, "lineno"):
            ast.copy_location(part, like)
    return node


@dataclass(frozen=True)
class PrimFunc:
    """A kernel marked by `T.prim_func`: `function` as it is traced, `original` as it was written."""

    function: Callable[..., Any]
    original: Callable[..., Any]

    @classmethod
    def of(cls, original: Callable[..., Any]) -> Self:
        """The kernel of a function."""
        return cls(scripted(original), original)
