"""Kernels as Python callables: `jit` and `compile`, over numpy arrays and whatever offers DLPack.

    function ─ scripted ─ trace ─ PASSES ─ infer ─ lower ─ emit_c ─ link ─► JitKernel

Three ways to write one, all TileLang's: a function that returns a `T.prim_func` (its arguments are Python values), a
function whose parameters are annotated `T.Tensor(…)`, and one that declares its tensors in its body (`T.const`,
`A: T.Tensor(…)`, `T.empty`). A compiled kernel is kept by the function, its Python arguments and what its tensors fix.
"""

import functools
import hashlib
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any

import numpy as np

from tilecore.arguments import as_array, bind, check_written, like, size
from tilecore.call import KernelError, Native, load_native, poisoned
from tilecore.compile import check_limits, plan_of
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Sym, const, symbols
from tilecore.contract.spec import Tensor
from tilecore.emit_c import FAILED, emit_c
from tilecore.emit_host import Signature
from tilecore.extents import complete_extents, open_extents
from tilecore.infer import Plan, describe_plan
from tilecore.ir import Assert, Buffer, Program, statements, updated_tensors
from tilecore.lower import lower
from tilecore.printer import print_program
from tilecore.profile import detect_profile, detect_target
from tilecore.script import PrimFunc, scripted
from tilecore.toolchain import Toolchain, find_toolchain, own_cache
from tilecore.trace import AUTO, trace_all
from tilecore.tracer import Eager, Handle, SignatureKnownError, TensorType
from tilecore.value import LARGEST, described

NAME = "KERNEL_NAME"
ASSERTING = Lock()  # a failed assertion's number stands in its library, which all calls of equal kernels share


@dataclass(frozen=True)
class Step:
    """One `T.Kernel` of a function, compiled."""

    program: Program
    plan: Plan
    name: str
    sources: Mapping[str, str]  # C text by target
    native: Native

    @functools.cached_property
    def growing(self) -> tuple[Buffer, ...]:
        """Tiles whose size the call decides."""
        return tuple(tile for tile in self.program.buffers if any(symbols(dim) for dim in tile.shape))

    @property
    def asserts(self) -> tuple[Assert, ...]:
        """Assertions in the order of their numbers."""
        return tuple(stmt for stmt in statements(self.plan.program.body) if isinstance(stmt, Assert))


@dataclass(frozen=True)
class JitKernel:
    """A compiled kernel. Call it with its parameters in order, those that it makes itself (`returned`) left out."""

    name: str
    parameters: tuple[str, ...]
    returned: tuple[str, ...]
    workspaces: tuple[str, ...]  # made for a call and given up after it
    steps: tuple[Step, ...]
    config: Mapping[str, Any]  # Python arguments and tile extents that it was traced with
    threads: int

    @property
    def source(self) -> str:
        """The C text of every step."""
        return "\n".join(text for step in self.steps for text in step.sources.values())

    def get_kernel_source(self) -> str:
        """`source`, by the name that TileLang gives it."""
        return self.source

    def explain(self) -> str:
        """What was generated and decided: configuration, tile programs and plans."""
        lines = [f"kernel {self.name}({', '.join(self.parameters)}) -> {', '.join(self.returned) or 'in place'}"]
        lines += [f"config {name} = {value}" for name, value in self.config.items()]
        for step in self.steps:
            lines += ["", f"step {step.name}", print_program(step.program), describe_plan(step.plan)]
        return "\n".join(lines).rstrip() + "\n"

    @property
    def written(self) -> frozenset[str]:
        """The tensors that a call writes, by name."""
        return frozenset(tensor.name for step in self.steps for tensor in step.program.outputs)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of every step, by name."""
        groups = ((*step.program.inputs, *step.program.outputs) for step in self.steps)
        return {tensor.name: tensor for group in groups for tensor in group}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The returned tensors, one or a tuple; None when all are written in place.

        KernelError for an argument that does not fit, or an assertion of the kernel that does not hold.
        """
        wanted = [name for name in self.parameters if name not in self.returned]
        arguments += tuple(named.pop(name) for name in wanted[len(arguments) :] if name in named)
        if len(arguments) != len(wanted) or named:
            more = f" and {', '.join(named)}" if named else ""
            raise KernelError(
                f"{self.name} takes {len(wanted)} arguments ({', '.join(wanted)}), got {len(arguments)}{more}"
            )
        given = dict(zip(wanted, arguments, strict=True))
        tensors = self.tensors
        scalars = {name: value for name, value in given.items() if name in tensors and _is_extent(tensors[name], name)}
        arrays = {
            name: _array(tensors[name], value)
            for name, value in given.items()
            if name in tensors and name not in scalars
        }
        values = bind(list(tensors.values()), arrays, {name: _whole(name, value) for name, value in scalars.items()})
        written = {tensor.name: tensor for step in self.steps for tensor in step.program.outputs}
        for name, tensor in written.items():
            if name in arrays:
                check_written(tensor, arrays[name], arrays)
        for name in (*self.returned, *self.workspaces):
            arrays[name] = self._fresh(tensors[name], values)
        for step in self.steps:
            self._run(step, arrays, values)
        foreign = next((value for value in arguments if not isinstance(value, np.ndarray) and has_memory(value)), None)
        results = [arrays[name] if foreign is None else like(foreign, arrays[name]) for name in self.returned]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _fresh(self, tensor: Tensor, values: Mapping[str, int]) -> np.ndarray:
        shape = tuple(size(dim, values, f"dim {axis} of {tensor.name}") for axis, dim in enumerate(tensor.shape))
        if any(tensor in updated_tensors(step.program) for step in self.steps):
            return np.zeros(shape, tensor.dtype.row.numpy)
        return poisoned(shape, tensor.dtype.row.numpy)

    def _run(self, step: Step, arrays: Mapping[str, np.ndarray], values: Mapping[str, int]) -> None:
        if not step.asserts:
            self._do_tasks(step, arrays, values)
            return
        with ASSERTING:
            failed = step.native.cell(FAILED)
            failed.value = 0
            self._do_tasks(step, arrays, values)
            number = failed.value
        if number:
            stmt = step.asserts[number - 1]
            message = f"an assertion of {self.name} does not hold: {stmt.message}"
            raise KernelError(stmt.span.render(message) if stmt.span else message)

    def _do_tasks(self, step: Step, arrays: Mapping[str, np.ndarray], values: Mapping[str, int]) -> None:
        program = step.program
        shapes = [
            arrays[tensor.name].shape if tensor.name in arrays else tuple(size(d, values, str(d)) for d in tensor.shape)
            for tensor in program.inputs
        ]
        for tile in step.growing:  # counted without wrapping around, as what C adds up would
            extents = [size(dim, values, tile.name) for dim in tile.shape]
            if math.prod(extents) * tile.dtype.row.bytes > LARGEST:
                raise KernelError(f"{self.name}: no memory holds {tile.name}, a tile of {extents}: use smaller ones")
        symbols_ = step.native.bind(shapes)
        inputs = [arrays[tensor.name].ctypes.data if tensor.name in arrays else None for tensor in program.inputs]
        outputs = [arrays[tensor.name].ctypes.data for tensor in program.outputs]
        tasks, group = step.native.tasks(symbols_)
        chunk = step.plan.tasks or max(1, -(-tasks // max(1, group) // (4 * self.threads))) * max(1, group)
        pieces = [(begin, min(begin + chunk, tasks)) for begin in range(0, tasks, chunk)]

        queue = iter(pieces)  # next() of a list's iterator is one step: no two threads take one piece

        def work() -> None:
            run = step.native.worker(symbols_, inputs, outputs)
            for begin, end in queue:
                run(begin, end)

        if self.threads == 1 or len(pieces) < 2:
            work()
        else:
            pool = _pool(self.threads, os.getpid())
            for done in [pool.submit(work) for _ in range(min(self.threads, len(pieces)))]:
                done.result()


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of all kernels in a process: one that was forked has none of its parent's."""
    return ThreadPoolExecutor(threads)


def _is_extent(tensor: Tensor, name: str) -> bool:
    """Whether a parameter is a whole number, which a tensor of that many elements stands for."""
    return tensor.shape == (Sym(name),)


def _whole(name: str, value: Any, *, least: int = 0) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise KernelError(f"{name} is {value!r}: expected a whole number of at least {least}")
    return int(value)


def _array(tensor: Tensor, value: Any) -> np.ndarray:
    if isinstance(value, int | float | np.generic) and tensor.shape in ((), (const(1),)):
        return np.full([1] * len(tensor.shape), value, tensor.dtype.row.numpy)
    return as_array(tensor.name, value)


def has_memory(value: Any) -> bool:
    """Whether a value is an array, of whatever library."""
    return hasattr(value, "__dlpack__")


# ---- compiling


@dataclass(frozen=True)
class Settings:
    """How kernels are built and run."""

    out_idx: tuple[int, ...] | None = None
    threads: int = 0  # 0: one per processor that this process may use
    given_cache: Path | None = None
    compiler: str | None = None

    @property
    def cache(self) -> Path:
        """The folder where objects are kept, and what was measured."""
        return own_cache() if self.given_cache is None else self.given_cache

    @property
    def toolchain(self) -> Toolchain:
        """The C compiler and its cache."""
        return find_toolchain(self.cache, self.compiler)


def build(
    function: Callable[..., Any],
    settings: Settings,
    *,
    operands: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    solved: Mapping[str, int] | None = None,
) -> JitKernel:
    """The kernel of a scripted function; `solved` are extents that `T.const` names, where it declares its tensors.

    Extents that neither `operands` nor `config` give are completed.
    """
    eager = None if solved is None else Eager(solved)
    opened = [name for name in open_extents(function) if name not in (operands or {})]
    unknown = [name for name in config or {} if name not in opened and eager is None]
    if unknown:
        known = f"parameters of {function.__name__} that are T.auto: {', '.join(opened) or 'none'}"
        raise KernelError(f"config has {', '.join(unknown)}; {known}")
    extents = {name: _whole(name, value, least=1) for name, value in (config or {}).items() if name in opened}
    why = ""
    if opened:
        extents, why = complete_extents(
            function, extents, detect_profile(settings.threads), operands=operands or {}, solved=solved
        )
    traced = trace_all(function, operands=operands, extents=extents, eager=eager)
    programs, result = traced.programs, traced.result
    names = [name for name in inspect.signature(function).parameters if name not in (operands or {})]
    tensors = {tensor.name for program in programs for tensor in (*program.inputs, *program.outputs)}
    parameters = tuple(name for name in names if name in tensors or _is_parameter(function, name))
    if eager is not None:
        parameters = tuple(eager.declared)
        returned = _returned(result, eager, function.__name__)
        parameters += returned
    else:
        returned = tuple(_picked(parameters, settings.out_idx))
    target = detect_target()
    written = {tensor.name for program in programs for tensor in program.outputs}
    for idle in (tensor for tensor in returned if tensor not in written):
        raise KernelError(f"{function.__name__} returns {idle}, which nothing in it writes")
    steps = tuple(compile_program(program, settings) for program in programs)
    threads = settings.threads or len(os.sched_getaffinity(0))
    shown = {**(config or {}), **extents, "target": target.name} | ({"why": why} if why else {})
    workspaces = tuple(tensor.name for tensor in traced.workspaces)
    return JitKernel(function.__name__, parameters, returned, workspaces, steps, shown, threads)


def _is_parameter(function: Callable[..., Any], name: str) -> bool:
    annotation = inspect.signature(function).parameters[name].annotation
    return isinstance(annotation, TensorType | DType)


def _picked(parameters: tuple[str, ...], out_idx: tuple[int, ...] | None) -> list[str]:
    found: list[str] = []
    for position in out_idx or ():
        if not -len(parameters) <= position < len(parameters):
            raise KernelError(
                f"out_idx has {position}; there are {len(parameters)} parameters: {', '.join(parameters)}"
            )
        found.append(parameters[position])
    return found


def _returned(result: Any, eager: Eager, name: str) -> tuple[str, ...]:
    handles = () if result is None else result if isinstance(result, tuple | list) else (result,)
    found: list[str] = []
    for handle in handles:
        if not isinstance(handle, Handle) or all(handle is not made for made in eager.made):
            raise KernelError(f"{name} returns {described(handle)}: a kernel returns what T.empty made")
        found.append(handle.source.name)
    for made in eager.made:
        if made.source.name not in found:
            advice = "return it, or use T.alloc_global for what one T.Kernel hands to the next"
            raise KernelError(f"{name} makes {made.source.name} by T.empty and does not return it: {advice}")
    return tuple(found)


def compile_program(program: Program, settings: Settings) -> Step:
    """One traced program, built and loaded."""
    target = detect_target()
    check_limits((*program.inputs, *program.outputs))
    plan = plan_of(program, target)
    text = emit_c(lower(plan), Signature(NAME, program.inputs, program.outputs, const(0)), target)
    name = f"Jit_{program.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    sources = {target.name: text.replace(NAME, name)}
    emitted = _Emitted(name, sources)
    return Step(program, plan, name, sources, load_native(emitted, target, settings.toolchain))


@dataclass(frozen=True)
class _Emitted:
    name: str
    sources: Mapping[str, str]


# ---- functions


def compile(
    function: PrimFunc | Callable[..., Any],
    out_idx: Sequence[int] | int | None = None,
    *,
    config: Mapping[str, int] | None = None,
    threads: int = 0,
    cache: Path | str | None = None,
    compiler: str | None = None,
    **hints: Any,
) -> JitKernel:
    """The kernel of a `T.prim_func`, or of a function whose parameters are annotated.

    `out_idx` are the positions of tensors that a call makes and returns; without it the caller passes all. `config`
    gives extents for parameters that are `T.auto`. `threads` run a call, all processors by default. `hints` (`target`,
    `pass_configs`, …) are for GPUs. TileError for a wrong kernel, KernelError for a wrong call, BuildError when there
    is no C compiler.
    """
    settings = Settings(_positions(out_idx), threads, None if cache is None else Path(cache), compiler)
    return build(_function(function), settings, config=config)


def _function(function: PrimFunc | Callable[..., Any]) -> Callable[..., Any]:
    return function.function if isinstance(function, PrimFunc) else scripted(function)


def _positions(out_idx: Sequence[int] | int | None) -> tuple[int, ...] | None:
    return None if out_idx is None else (out_idx,) if isinstance(out_idx, int) else tuple(out_idx)


class Jit:
    """A function under `@jit`: calling it compiles, once per what its text depends on, and runs."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        functools.update_wrapper(self, function)
        self.original = function
        self.settings = settings
        self.is_factory = _names(function.__code__, "prim_func")
        self.function = function if self.is_factory else scripted(function)
        self.kernels: dict[Any, JitKernel] = {}
        annotations = [p.annotation for p in inspect.signature(function, eval_str=True).parameters.values()]
        self.is_annotated = any(isinstance(annotation, TensorType) for annotation in annotations)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """A factory gives its kernel; any other function runs."""
        if self.is_factory:
            return self.compile(*arguments, **named)
        if self.is_annotated:
            return self.compile()(*arguments, **named)
        bound = inspect.signature(self.original).bind(*arguments, **named)
        bound.apply_defaults()
        kernel = self._declaring(dict(bound.arguments))
        return kernel(*(bound.arguments[name] for name in kernel.parameters if name not in kernel.returned))

    def compile(self, *arguments: Any, **named: Any) -> JitKernel:
        """The kernel for these Python arguments; extents that `T.const` names are given by name."""
        if self.is_factory:
            bound = inspect.signature(self.original).bind(*arguments, **named)
            bound.apply_defaults()
            key = key_of(bound.arguments)
            if key not in self.kernels:
                opened = ", ".join(name for name, value in bound.arguments.items() if value is AUTO)
                if opened:
                    raise KernelError(
                        f"{opened} of {self.original.__name__} is T.auto: give a number, or make it a parameter of the"
                        " T.prim_func"
                    )
                made = self.original(*arguments, **named)
                if not isinstance(made, PrimFunc):
                    raise KernelError(f"{self.original.__name__} returned {made!r}: expected a T.prim_func")
                self.kernels[key] = build_prim(made, self.settings, bound.arguments)
            return self.kernels[key]
        if self.is_annotated:
            key = key_of(named)
            if key not in self.kernels:
                self.kernels[key] = build(self.function, self.settings, config=named)
            return self.kernels[key]
        parameters = inspect.signature(self.original).parameters
        bound = inspect.signature(self.original).bind_partial(
            *arguments, **{name: value for name, value in named.items() if name in parameters}
        )
        bound.apply_defaults()
        constants = {name: value for name, value in named.items() if name not in parameters}
        return self._declaring(dict(bound.arguments), constants)

    def get_kernel_source(self, *arguments: Any, **named: Any) -> str:
        """The C text of the kernel for these arguments: `compile(…).source`, by the name that TileLang gives it."""
        return self.compile(*arguments, **named).source

    def _declaring(self, given: dict[str, Any], constants: Mapping[str, int] | None = None) -> JitKernel:
        """The kernel of a function that declares its tensors; extents come from `constants` or arrays of `given`."""
        python = {name: value for name, value in given.items() if not has_memory(value)}
        shapes = {name: tuple(value.shape) for name, value in given.items() if has_memory(value)}
        key = key_of({**python, "shapes": tuple(shapes.items()), "constants": tuple((constants or {}).items())})
        if key in self.kernels:
            return self.kernels[key]
        signature = inspect.signature(self.function)
        probe = Eager()
        left = [name for name, value in python.items() if value is AUTO]
        python = {name: value for name, value in python.items() if value is not AUTO}
        missing = [name for name in signature.parameters if name not in (*python, *left)]
        operands = {**python, **dict.fromkeys(missing)}
        try:
            trace_all(self.function, operands=operands, extents=dict.fromkeys(left, 1), eager=probe)
        except SignatureKnownError:
            pass
        else:
            raise KernelError(f"{self.original.__name__} declares no tensor before T.Kernel")
        solved = dict(constants or {})
        for name, kind in probe.declared.items():
            _solve(name, kind, shapes.get(name), solved)
        absent = [name for name in probe.named if name not in solved]
        if absent:
            raise KernelError(
                f"{self.original.__name__} needs {', '.join(absent)}: pass arrays, or name=… to compile()"
            )
        unknown = [name for name in missing if name not in probe.declared]
        if unknown:
            raise KernelError(f"{self.original.__name__} needs {', '.join(unknown)}")
        self.kernels[key] = build(
            self.function, self.settings, operands=operands, config={**python, **solved}, solved=solved
        )
        return self.kernels[key]


def _names(code: CodeType, name: str) -> bool:
    """Whether a function, or one inside it, mentions a global or an attribute of this name."""
    return name in code.co_names or any(_names(each, name) for each in code.co_consts if isinstance(each, CodeType))


def build_prim(made: PrimFunc, settings: Settings, config: Mapping[str, Any]) -> JitKernel:
    """The kernel that a factory returned."""
    kernel = build(made.function, settings)
    return replace(kernel, config={**config, **kernel.config})


def _solve(name: str, kind: TensorType, shape: tuple[int, ...] | None, solved: dict[str, int]) -> None:
    """Values of the symbols that are whole dims of a declared tensor."""
    if shape is None or len(shape) != len(kind.shape):
        return
    for dim, found in zip(kind.shape, shape, strict=True):
        if isinstance(dim, Sym):
            solved.setdefault(dim.name, int(found))


def key_of(arguments: Mapping[str, Any]) -> Any:
    """What tells calls with different Python arguments apart."""
    return tuple((name, _identity(value)) for name, value in arguments.items())


def _identity(value: Any) -> Any:
    """Something hashable that differs where `value` does: 1, 1.0 and True do, as do 0.0 and -0.0."""
    match value:
        case float() | np.floating():
            return type(value), float(value).hex()
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case tuple() | list():
            return type(value), tuple(map(_identity, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case dict():
            return dict, tuple((_identity(name), _identity(item)) for name, item in value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case _:
            return type(value), value if value.__hash__ else repr(value)


def jit(
    function: Callable[..., Any] | None = None,
    *,
    out_idx: Sequence[int] | int | None = None,
    threads: int = 0,
    cache: Path | str | None = None,
    compiler: str | None = None,
    **hints: Any,
) -> Any:
    """Decorate a kernel, or a function that makes one, so that calling it compiles and runs it; see `compile`."""
    settings = Settings(_positions(out_idx), threads, None if cache is None else Path(cache), compiler)
    if function is None:
        return lambda decorated: Jit(decorated, settings)
    return Jit(function, settings)
