"""Tracing: a kernel, an ordinary Python function, is run once with symbolic values and leaves a `Program`.

Comes in: the function, its operands (logical views and places, or tensors) and, for `T.auto` parameters, numbers or
nothing. Goes out: a verified `Program` in which every statement has the span of the author's text. Names of buffers and
variables are those the author assigned to, made unique.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Sym, const, loads, walk
from tilecore.contract.spec import Place, Tensor, View, tensor_view
from tilecore.errors import TileError
from tilecore.ir import For, If, Parallel, Program, Stmt, Store, While
from tilecore.span import Span
from tilecore.tracer import Eager, Handle, Part, TensorType, Tracer, tensor_handle, tracing
from tilecore.value import Value
from tilecore.verify import verify

SECOND, ONE = "a second T.Kernel in one kernel", "one T.Kernel per function; trace two functions"


class Auto:
    """The type of `T.auto`: a tile extent left to recommendation."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "T.auto"


AUTO = Auto()


@dataclass(frozen=True, slots=True)
class Traced:
    """A function's programs, one per `T.Kernel`, what it returned, and the tensors that it made for itself."""

    programs: tuple[Program, ...]
    result: Any
    workspaces: tuple[Tensor, ...]


def trace(
    kernel: Callable[..., None],
    *,
    inputs: tuple[Tensor, ...] = (),
    operands: Mapping[str, Any] | None = None,
    extents: Mapping[str, int] | None = None,
    reserved: frozenset[str] = frozenset(),
    debug: bool = False,
) -> Program:
    """The program of `kernel`.

    `operands` gives parameters by name: a View, Place or Tensor, a tuple of them, or any object of the library's own
    (a score, an epilogue), passed as it is; parameters annotated `T.Tensor(…)` need none. `inputs` are the physical
    tensors that views load from. `extents` gives a number for every `T.auto` parameter; None leaves them symbolic.
    Buffers and variables get other names than those `reserved`. TileError for a wrong kernel; `debug` keeps the front
    end's own frames in its traceback.
    """
    try:
        first, *more = _trace(kernel, inputs, dict(operands or {}), extents, None, reserved).programs
        if more:
            raise TileError(SECOND, more[0].span, instead=f"tilecore.jit for a function of several; {ONE}")
        return first
    except TileError as error:
        if debug:
            raise
        raise error.with_traceback(None) from None


def trace_all(
    kernel: Callable[..., Any],
    *,
    operands: Mapping[str, Any] | None = None,
    extents: Mapping[str, int] | None = None,
    eager: Eager | None = None,
) -> Traced:
    """The programs of `kernel`, one per `T.Kernel`, to be run in order.

    With `eager` the body declares its tensors; `SignatureKnownError` when its constants are not known yet.
    """
    try:
        return _trace(kernel, (), dict(operands or {}), extents, eager)
    except TileError as error:
        raise error.with_traceback(None) from None


def _trace(
    kernel: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    operands: dict[str, Any],
    extents: Mapping[str, int] | None,
    eager: Eager | None,
    reserved: frozenset[str] = frozenset(),
) -> Traced:
    code = kernel.__code__
    span = Span(code.co_filename, code.co_firstlineno, 0, code.co_firstlineno, 0)
    arguments, tunables, phantoms = _arguments(kernel, span, operands, extents)
    inputs = (*inputs, *phantoms)
    handles = [handle for argument in arguments.values() for handle in _handles(argument)]
    tensors = list(inputs)
    for handle in handles:
        if handle.place is not None:
            tensors.append(handle.place.tensor)
    taken = {handle.source.name for handle in handles} | {tensor.name for tensor in tensors}
    taken |= {sym.name for tensor in tensors for dim in tensor.shape for sym in walk(dim) if isinstance(sym, Sym)}
    for tunable in tunables:
        if tunable.name in taken:
            raise TileError(f"{tunable.name} is T.auto, and a tensor or a dynamic extent has that name", span)
    tracer = Tracer(kernel.__name__, span, taken | reserved | {tunable.name for tunable in tunables}, eager=eager)
    tracer.places.update(
        {handle.source: handle.place for handle in handles if isinstance(handle.source, View) and handle.place}
    )
    with tracing(tracer):
        result = kernel(**arguments)
    if tracer.broken is not None:
        raise tracer.broken
    if not tracer.parts:
        raise TileError(f"{kernel.__name__} has no grid", span, instead="`with T.Kernel(…) as …:` around its body")
    handles += tracer.handles
    programs = tuple(
        _program(tracer, part, inputs, handles, tunables, part.span if number else span)
        for number, part in enumerate(tracer.parts)
    )
    for program in programs:
        verify(program)
    return Traced(programs, result, tuple(tracer.workspaces))


def _arguments(
    kernel: Callable[..., None], span: Span, operands: dict[str, Any], extents: Mapping[str, int] | None
) -> tuple[dict[str, Any], tuple[Sym, ...], list[Tensor]]:
    arguments: dict[str, Any] = {}
    tunables: list[Sym] = []
    phantoms: list[Tensor] = []
    numbers = dict(extents or {})
    for name, parameter in inspect.signature(kernel, eval_str=True).parameters.items():
        if name in operands:
            arguments[name] = _wrapped(operands.pop(name))
        elif isinstance(parameter.annotation, TensorType):
            arguments[name] = tensor_handle(name, parameter.annotation)
        elif isinstance(parameter.annotation, DType):
            arguments[name], phantom = _scalar(name, parameter.annotation)
            phantoms.append(phantom)
        elif name in numbers:
            arguments[name] = int(numbers.pop(name))
        elif isinstance(parameter.default, Auto):
            if extents is not None:
                raise TileError(f"no extent for {name}, which is T.auto", span, instead=f'extents={{"{name}": 64, …}}')
            tunables.append(Sym(name))
            arguments[name] = Value(Sym(name))
        elif parameter.default is parameter.empty:
            raise TileError(
                f"no operand for the parameter {name} of {kernel.__name__}",
                span,
                instead=f'operands={{"{name}": …}}, or the annotation {name}: T.Tensor(shape, dtype)',
            )
    unknown = ", ".join(sorted([*operands, *numbers]))
    if unknown:
        raise TileError(f"{kernel.__name__} has no parameter {unknown}", span)
    return arguments, tuple(tunables), phantoms


def _scalar(name: str, dtype: DType) -> tuple[Value, Tensor]:
    """A scalar parameter. A whole number is a dim, which a tensor of that many elements brings: it may be an extent."""
    if dtype.is_int:
        return Value(Sym(name)), Tensor(name, DType.U8, (Sym(name),))
    tensor = Tensor(name, dtype, (const(1),))
    return Value(Load(tensor, (const(0),))), tensor


def _wrapped(operand: Any) -> Any:
    match operand:
        case View() | Place():
            return Handle(operand)
        case Tensor():
            view = tensor_view(operand)
            return Handle(view, Place(operand, view.axes, view.axes))
        case tuple():
            return tuple(_wrapped(part) for part in operand)
        case _:
            return operand


def _handles(argument: Any) -> Iterator[Handle]:
    if isinstance(argument, Handle):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _handles(part)


def _program(
    tracer: Tracer,
    part: Part,
    inputs: tuple[Tensor, ...],
    handles: list[Handle],
    tunables: tuple[Sym, ...],
    span: Span,
) -> Program:
    """A tensor operand that is written is an output, any other an input."""
    written = {place.tensor for place in _written(part.body)}
    places: list[Place] = []
    views: list[View] = []
    tensors = list(inputs)
    for handle in handles:
        if isinstance(handle.source, Place):
            places.append(handle.source)
        elif handle.place is not None and handle.place.tensor in written:
            places.append(handle.place)
        elif isinstance(handle.source, View):
            views.append(handle.source)
            for load in loads(handle.source.value):
                if isinstance(load.source, Tensor) and load.source not in tensors:
                    tensors.append(load.source)
    return Program(
        name=tracer.kernel,
        inputs=tuple(tensors),
        outputs=tuple(dict.fromkeys(place.tensor for place in places)),
        views=tuple(views),
        places=tuple(dict.fromkeys(places)),
        grid=part.grid,
        buffers=part.buffers,
        body=part.body,
        tunables=tunables,
        threads=part.threads,
        span=span,
        annotations=part.annotations,
    )


def _written(body: tuple[Stmt, ...]) -> set[Place]:
    found: set[Place] = set()
    for stmt in body:
        match stmt:
            case Parallel() | For() | While():
                found |= _written(stmt.body)
            case If():
                found |= _written(stmt.then) | _written(stmt.otherwise)
            case Store() if isinstance(stmt.target, Place):
                found.add(stmt.target)
            case _:
                target = getattr(getattr(stmt, "dst", None), "source", None)
                if isinstance(target, Place):
                    found.add(target)
    return found
