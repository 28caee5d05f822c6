"""Expressions as C text: scalars, and vectors of TILE_LANES points of one loop variable.

A value is given a name in the outermost scope where all it depends on is known, so that nothing is computed more often
than needed; loads of scratch memory, which statements change, stay where they are used.
"""

import math
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilecore.contract.dtype import DType
from tilecore.contract.expr import (
    Const,
    Expr,
    Load,
    Op,
    Sym,
    Var,
    binary,
    const,
    loads,
    select,
    unary,
    variables,
    walk,
)
from tilecore.emit_host import COMPARE
from tilecore.gelu import gelu_of
from tilecore.graph import split_affine
from tilecore.loops import Memory

NARROW = {DType.I16: "int16_t", DType.I8: "int8_t", DType.U8: "uint8_t"}  # held as i32 in registers
HALF = {DType.F16: "uint16_t", DType.BF16: "uint16_t"}  # bits in memory, f32 in registers
SCALAR = {DType.F64: "double", DType.I64: "int64_t", **dict.fromkeys((DType.F32, *HALF), "float"),
          **dict.fromkeys((DType.I32, DType.BOOL, *NARROW), "int32_t")}  # fmt: skip
VECTOR = {DType.F64: "f64v", DType.I64: "i64v", **dict.fromkeys((DType.F32, *HALF), "f32v"),
          **dict.fromkeys((DType.I32, DType.BOOL, *NARROW), "i32v")}  # fmt: skip
ELEMENT = {**SCALAR, DType.BOOL: "uint8_t", **NARROW, **HALF}
# Operations that may leave the range of a narrow integer
WRAPPING = frozenset(("add", "sub", "mul", "neg", "abs", "pow", "floordiv", "shl", "bitnot"))
CHOOSING = {"select", "min", "max", "neg", "abs", "sign", "floor", "ceil", "round"}  # give what 16-bit floats can hold
BITS = {"bitand": "&", "bitor": "|", "bitxor": "^"}
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
UNSIGNED = {DType.I32: ("uint32_t", "u32v"), DType.I64: ("uint64_t", "u64v")}  # scalars and vectors
LIBM = {"sqrt", "floor", "ceil", "sin", "cos", "exp", "exp2", "log", "log2", "tanh", "erf", "pow"}
POLYNOMIAL = 15  # instructions of exp, tanh, erf and the like
TURNED = 2 * POLYNOMIAL  # of sin and cos, which are two of these
ONE_BY_ONE = 240  # instructions in the time that libm takes for the lanes of a vector
LEAST, SCALE = 2.0**-126, 2.0**64  # the smallest normal float; what brings the reciprocals of smaller ones into range
SCALAR_F32 = {  # `name_f32_s`
    "exp", "exp_below", "exp2", "log", "log2", "tanh", "erf", "sigmoid", "min", "max", "sign", "rsqrt",
}  # fmt: skip


class EmitError(ValueError):
    """A program that this backend has no code for; says which operation and element type."""


@dataclass
class Scope:
    """One block of C: its lines, the names given in it, and the variables it defines."""

    lines: list[str] = field(default_factory=list)
    names: dict[tuple[str, Expr], str] = field(default_factory=dict)
    variables: dict[Var, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lanes:
    """The vector loop that is being printed: its variable and the mask of a partial last vector, if this is one."""

    var: Var
    tail: str | None = None
    bound: frozenset[Var] = frozenset()  # names with one value per point

    def varies(self, expr: Expr) -> bool:
        """Whether `expr` differs from point to point."""
        return not variables(expr).isdisjoint({self.var, *self.bound})


class Expressions:
    """Prints expressions into a stack of scopes."""

    def __init__(self, symbols: Mapping[str, str], *, exact: bool = False) -> None:
        self.symbols = symbols  # symbol → C name
        self.exact = exact  # quotients are rounded once, as something in the program jumps where they differ
        self.scopes: list[Scope] = [Scope()]
        self.counter = 0

    # ---- names and scopes

    def fresh(self, prefix: str) -> str:
        """A name not used before."""
        self.counter += 1
        return f"{prefix}{self.counter}"

    def line(self, text: str) -> None:
        """Append a line to the innermost scope."""
        self.scopes[-1].lines.append(text)

    @contextmanager
    def within(self, header: str, bound: Mapping[Var, str]) -> Generator[None]:
        """A block of C; what its lines need from around it is printed before the header. `bound`: what it defines."""
        self.scopes.append(Scope(variables=dict(bound)))
        yield
        lines = self.scopes.pop().lines
        self.line(f"{header} {{")
        self.scopes[-1].lines.extend(f"    {line}" for line in lines)
        self.line("}")

    def lookup(self, var: Var) -> str:
        """The C name of a variable in scope."""
        for scope in reversed(self.scopes):
            if var in scope.variables:
                return scope.variables[var]
        raise EmitError(f"variable {var.name} is used outside its loop")

    def _depth(self, expr: Expr) -> int:
        """The outermost scope in which `expr` may be computed."""
        if any(isinstance(load.source, Memory) and load.source.kind == "scratch" for load in loads(expr)):
            return len(self.scopes) - 1
        depth = 0
        for var in variables(expr):
            depth = max(depth, next(i for i in reversed(range(len(self.scopes))) if var in self.scopes[i].variables))
        return depth

    def _named(self, kind: str, expr: Expr, c_type: str, text: str, depth: int) -> str:
        name = self.fresh("v" if kind == "vector" else "t")
        self.scopes[depth].lines.append(f"const {c_type} {name} = {text};")
        self.scopes[depth].names[kind, expr] = name
        return name

    def _known(self, kind: str, expr: Expr) -> str | None:
        for scope in reversed(self.scopes):
            if (kind, expr) in scope.names:
                return scope.names[kind, expr]
        return None

    def forget(self, memories: set[Memory]) -> None:
        """Drop the names of values that were read from `memories`, which have just changed."""
        for scope in self.scopes:
            stale = [key for key in scope.names if any(load.source in memories for load in loads(key[1]))]
            for key in stale:
                del scope.names[key]

    # ---- scalars

    def scalar(self, expr: Expr) -> str:
        """C text of a scalar: a literal or a name."""
        match expr:
            case Const():
                return literal(expr)
            case Sym():
                return self.symbols[expr.name]
            case Var():
                return self.lookup(expr)
            case _:
                pass
        known = self._known("scalar", expr)
        if known:
            return known
        depth = self._depth(expr)
        text = self._scalar_text(expr)
        return self._named("scalar", expr, SCALAR[self._type(expr)], text, depth)

    def _type(self, expr: Expr) -> DType:
        if expr.dtype not in SCALAR:
            raise EmitError(f"scalar programs of {expr.dtype} are not supported on the CPU: cast to f32 around them")
        return expr.dtype

    def _scalar_text(self, expr: Expr) -> str:
        if isinstance(expr, Load):
            assert isinstance(expr.source, Memory)
            text = f"{memory_name(expr.source)}[{self.scalar(expr.index[0])}]"
            if expr.dtype in HALF:
                return f"value_{expr.dtype}_s({text})"
            return f"({text} != 0)" if expr.dtype is DType.BOOL else text
        assert isinstance(expr, Op)
        if expr.name == "select":
            condition = self.scalar(expr.args[0])
            yes, no = (self._scalar_text(a) if isinstance(a, Load) else self.scalar(a) for a in expr.args[1:])
            return f"{condition} ? {yes} : {no}"
        args = [self.scalar(arg) for arg in expr.args]
        text = self._scalar_op(expr, args)
        if _rounds(expr):
            return f"round_{expr.dtype}_s({text})"
        return f"({NARROW[expr.dtype]})({text})" if expr.dtype in NARROW and expr.name in WRAPPING else text

    def _scalar_op(self, op: Op, args: list[str]) -> str:
        name, source = op.name, held(self._type(op.args[0]))
        if _wraps(op):
            return _wrapped(op, args, SCALAR[op.dtype], UNSIGNED[op.dtype][0])
        if name in INFIX:
            return f"{args[0]} {INFIX[name]} {args[1]}"
        if name in COMPARE:
            return f"{args[0]} {COMPARE[name]} {args[1]}"
        if name in ("and", "or"):
            return f"{args[0]} {'&' if name == 'and' else '|'} {args[1]}"
        if name == "not":
            return f"!{args[0]}"
        if name == "neg":
            return f"-{args[0]}"
        if name == "isnan":
            return f"{args[0]} != {args[0]}"
        if name == "isinf":
            return f"isinf({args[0]}) != 0"
        if name in BITS:
            return f"{args[0]} {BITS[name]} {args[1]}"
        if name == "bitnot":
            return f"~{args[0]}"
        if name in ("shl", "shr"):
            count = f"({args[1]} & {8 * op.dtype.row.bytes - 1})"
            kind = SCALAR[op.dtype]
            return f"{args[0]} >> {count}" if name == "shr" else f"({kind})((u{kind}){args[0]} << {count})"
        if name == "reinterpret":
            return f"{as_bits(op.args[0].dtype, op.dtype)}_s({args[0]})"
        if name == "cast":
            if op.dtype is DType.BOOL:
                return f"{args[0]} != 0"
            if source is DType.F64 and op.dtype in HALF:
                return f"odd_f32_s({args[0]})"
            return f"({NARROW.get(op.dtype, '')})({SCALAR[op.dtype]}){args[0]}".removeprefix("()")
        if (shifted := _power_of_two(op, args[0])) is not None:
            return shifted
        if source.is_int:
            return f"{name}_i64({', '.join(args)})"
        if source is DType.F32 and name in SCALAR_F32:
            return f"{name}_f32_s({', '.join(args)})"
        suffix = "f" if source is DType.F32 else ""
        if name in LIBM:
            return f"{name}{suffix}({', '.join(args)})"
        if name in ("abs", "round"):
            return f"{'fabs' if name == 'abs' else 'rint'}{suffix}({args[0]})"
        return f"scalar_{name}({', '.join(args)})"

    # ---- vectors

    def vector(self, expr: Expr, lanes: Lanes) -> str:
        """C text of the values of `expr` at TILE_LANES consecutive values of the loop variable."""
        if not lanes.varies(expr):
            return self._splat(expr)
        known = self._known("vector", expr)
        if known:
            return known
        text = self._vector_text(expr, lanes)
        return self._named("vector", expr, VECTOR[self._type(expr)], text, len(self.scopes) - 1)

    def _splat(self, expr: Expr) -> str:
        if isinstance(expr, Const):
            return f"splat_{held(self._type(expr))}({literal(expr)})"
        known = self._known("vector", expr)
        if known:
            return known
        text = f"splat_{held(self._type(expr))}({self.scalar(expr)})"
        return self._named("vector", expr, VECTOR[expr.dtype], text, self._depth(expr))

    def _vector_text(self, expr: Expr, lanes: Lanes) -> str:
        match expr:
            case Var():
                return self.lookup(expr) if expr in lanes.bound else f"splat_i64({self.lookup(expr)}) + iota_i64()"
            case Load():
                return self._vector_load(expr, lanes, None)
            case Op(name="select") if (chosen := _smaller_or_larger(expr)) is not None:
                verb, args = chosen
                return f"{verb}_raw({', '.join(self.vector(arg, lanes) for arg in args)})"
            case Op(name="select", args=(condition, Load() as load, no)) if lanes.varies(load):
                mask = self.vector(condition, lanes)
                masked = self._vector_load(load, lanes, mask)
                if isinstance(no, Const) and no.value == 0:
                    return masked
                return f"select_{held(expr.dtype)}({mask}, {masked}, {self.vector(no, lanes)})"
            case Op(name="lt" | "le" | "gt" | "ge", args=(left, _)) if left.dtype is DType.I64:
                counted = self._lane_count(expr, lanes)
                if counted:
                    return counted
            case _:
                pass
        assert isinstance(expr, Op)
        text = self._vector_op(expr, lanes)
        if _rounds(expr):
            return f"round_{expr.dtype}({text})"
        return f"narrow_{expr.dtype}({text})" if expr.dtype in NARROW and expr.name in WRAPPING else text

    def _lane_count(self, op: Op, lanes: Lanes) -> str | None:
        """An index comparison as a number of leading lanes: no vectors of 64-bit integers."""
        left, right = op.args if op.name in ("lt", "le") else op.args[::-1]
        slack = right - left - (1 if op.name in ("lt", "gt") else 0)  # holds where slack ≥ 0
        factor, rest = split_affine(slack, lanes.var)
        if rest is None or lanes.varies(rest) or factor not in (const(1), const(-1)):
            return None
        first = self.lookup(lanes.var)
        if factor == const(-1):
            return f"lanes_below({self.scalar(rest + 1)} - {first})"
        return f"lanes_from({self.scalar(-rest)} - {first})"

    def _vector_load(self, load: Load, lanes: Lanes, mask: str | None) -> str:
        memory = load.source
        assert isinstance(memory, Memory)
        step, rest = split_affine(load.index[0], lanes.var)
        rest = None if rest is None or lanes.varies(rest) else rest
        element = str(self._type(load))
        if rest is not None and step == const(1):
            address = f"{memory_name(memory)} + {self._sum(rest, lanes)}"
            if lanes.tail and memory.kind != "scratch":
                mask = f"({mask} & {lanes.tail})" if mask else lanes.tail
            return f"load_masked_{element}({address}, {mask})" if mask else f"load_{element}({address})"
        if lanes.tail:
            mask = f"({mask} & {lanes.tail})" if mask else lanes.tail
        at = self.vector(load.index[0], lanes)
        return f"gather_{element}({memory_name(memory)}, {at}, {mask or 'splat_bool(1)'})"

    def _sum(self, rest: Expr, lanes: Lanes) -> str:
        first = self.lookup(lanes.var)
        return first if rest == const(0) else f"{self.scalar(rest)} + {first}"

    def _vector_op(self, op: Op, lanes: Lanes) -> str:
        name, source = op.name, held(self._type(op.args[0]))
        if name == "pow" and op.args[1] == const(2.0, op.dtype):
            base = self.vector(op.args[0], lanes)
            return f"{base} * {base}"
        if name == "div" and op.dtype is DType.F32 and not self.exact and not lanes.varies(op.args[1]):
            scaled, reciprocal = by_reciprocal(*op.args)
            return f"{self.vector(scaled, lanes)} * {self.vector(reciprocal, lanes)}"
        gelu = None if self.exact or name != "mul" or op.dtype is not DType.F32 else gelu_of(op)
        if gelu is not None:
            text = f"gelu_f32({self.vector(gelu.argument, lanes)})"
            return text if gelu.factor == const(1.0, DType.F32) else f"{self.vector(gelu.factor, lanes)} * {text}"
        args = [self.vector(arg, lanes) for arg in op.args if _power_of_two(op, "") is None or arg is op.args[0]]
        if _wraps(op):
            return _wrapped(op, args, VECTOR[op.dtype], UNSIGNED[op.dtype][1])
        if name in INFIX:
            return f"{args[0]} {INFIX[name]} {args[1]}"
        if name in COMPARE:
            test = f"({args[0]} {COMPARE[name]} {args[1]})"
            return f"narrow_mask({test})" if source in (DType.I64, DType.F64) else test
        if name in ("and", "or"):
            return f"{args[0]} {'&' if name == 'and' else '|'} {args[1]}"
        if name == "not":
            return f"~{args[0]}"
        if name == "neg":
            return f"-{args[0]}"
        if name == "isnan":
            return f"narrow_mask({args[0]} != {args[0]})" if source is DType.F64 else f"({args[0]} != {args[0]})"
        if name == "isinf":
            test = f"(abs_{source}({args[0]}) == INFINITY)"
            return f"narrow_mask{test}" if source is DType.F64 else test
        if name in BITS:
            return f"{args[0]} {BITS[name]} {args[1]}"
        if name == "bitnot":
            return f"~{args[0]}"
        if name in ("shl", "shr"):
            return f"{args[0]} {'<<' if name == 'shl' else '>>'} ({args[1]} & {8 * op.dtype.row.bytes - 1})"
        if name == "reinterpret":
            return f"{as_bits(op.args[0].dtype, op.dtype)}({args[0]})"
        if name == "select":
            return f"select_{held(op.dtype)}({', '.join(args)})"
        if name == "cast":
            return self._vector_cast(source, op.dtype, args[0])
        if name in ("min", "max") and source is DType.F32 and isinstance(op.args[1], Const):
            return f"{name}_raw({args[1]}, {args[0]})"  # a NaN in the second operand goes through
        if (shifted := _power_of_two(op, args[0])) is not None:
            return shifted
        suffix = {DType.I64: "i64v", DType.I32: "i32v"}.get(held(source), str(source))
        return f"{name}_{suffix}({', '.join(args)})"

    def _vector_cast(self, source: DType, target: DType, text: str) -> str:
        if target is DType.BOOL:
            test = f"({text} != 0)"
            return f"narrow_mask({test})" if source in (DType.I64, DType.F64) else test
        if source is DType.BOOL:
            one, zero = (f"splat_{held(target)}({value})" for value in (1, 0))
            return f"select_{held(target)}({text}, {one}, {zero})"
        if source is DType.F64 and target in HALF:
            return f"odd_f32({text})"
        if VECTOR[source] != VECTOR[target]:
            text = f"__builtin_convertvector({text}, {VECTOR[target]})"
        return f"narrow_{target}({text})" if target in NARROW else text


def _wraps(op: Op) -> bool:
    """Whether a sum, product or negation of data may leave its type: it wraps around, which C's signed ones do not."""
    return op.name in ("add", "sub", "mul", "neg") and (
        op.dtype is DType.I32 or (op.dtype is DType.I64 and bool(loads(op)))
    )


def _wrapped(op: Op, args: list[str], signed: str, unsigned: str) -> str:
    terms = [f"({unsigned}){arg}" for arg in args]
    return f"({signed})({f' {INFIX[op.name]} '.join(terms) if len(terms) > 1 else f'-{terms[0]}'})"


def by_reciprocal(dividend: Expr, divisor: Expr) -> tuple[Expr, Expr]:
    """Two factors whose product is `dividend` / `divisor` (f32) up to roundings: one division serves many dividends.

    The reciprocal of a divisor that is too small is no float, and of one that is too large not a precise one: both
    sides are scaled by a power of two there. A quotient that this could change is infinite, or 0, in any case.
    """
    if isinstance(divisor, Const) and LEAST <= abs(divisor.value) <= 1 / LEAST:
        return dividend, const(1 / divisor.value, DType.F32)
    size = unary("abs", divisor)
    large = select(binary("gt", size, const(1 / LEAST, DType.F32)), const(1 / SCALE, DType.F32), 1.0)
    scale = select(binary("lt", size, const(LEAST, DType.F32)), const(SCALE, DType.F32), large)
    return dividend * scale, binary("div", const(1.0, DType.F32), divisor * scale)


def _smaller_or_larger(op: Op) -> tuple[str, tuple[Expr, Expr]] | None:
    """A choice between the two sides of its own comparison, as an instruction makes it, and the operands in the order
    in which that lets the same one of them through where the comparison fails, as it does for a NaN."""
    test, yes, no = op.args
    if not isinstance(test, Op) or test.name not in ("lt", "gt") or op.dtype is not DType.F32:
        return None
    if {yes, no} != set(test.args) or yes == no:
        return None
    smaller = (test.name == "lt") == (yes == test.args[0])
    return "min" if smaller else "max", (yes, no)


def _power_of_two(op: Op, value: str) -> str | None:
    """Division with rounding down, or its remainder, by a power of two: a shift or a mask, also of negative numbers."""
    divisor = op.args[-1]
    if op.name not in ("floordiv", "mod") or not isinstance(divisor, Const) or int(divisor.value).bit_count() != 1:
        return None
    if divisor.value < 1:
        return None
    exponent = int(divisor.value).bit_length() - 1
    return f"({value} >> {exponent})" if op.name == "floordiv" else f"({value} & {(1 << exponent) - 1})"


def as_bits(source: DType, target: DType) -> str:
    """The verb that takes the bits of one type as another's."""
    return f"bits_{source}_as_{target}"


def held(dtype: DType) -> DType:
    """The type that values of `dtype` are computed in: narrow integers are i32 in registers, 16-bit floats f32."""
    return DType.I32 if dtype in NARROW else DType.F32 if dtype in HALF else dtype


def _rounds(op: Op) -> bool:
    """Whether the f32 that an operation of 16-bit floats is computed in must be rounded to their type."""
    exact = op.name in CHOOSING or (op.name == "cast" and op.args[0].dtype in (op.dtype, DType.BOOL))
    return op.dtype in HALF and not exact


def unrounded(value: Expr) -> Expr:
    """What to hand to a store, which rounds: the f32 below a cast to a 16-bit float."""
    match value:
        case Op(name="cast", args=(wide,)) if value.dtype in HALF and wide.dtype is DType.F32:
            return wide
        case _:
            return value


def memory_name(memory: Memory) -> str:
    """The C name of a memory: inputs and outputs by position, scratch by its buffer."""
    if memory.kind == "scratch":
        return "s_" + re.sub(r"\W", "_", memory.name)
    return f"{memory.kind}{memory.position}"


def literal(value: Const) -> str:
    """The C literal of a constant, exact to the bit."""
    if value.dtype is DType.BOOL:
        return "1" if value.value else "0"
    if value.value == -(2**63):  # there is no literal of 2**63 to negate
        return "INT64_MIN"
    if value.dtype.is_int:
        return f"INT64_C({value.value})" if abs(int(value.value)) >= 2**31 else str(value.value)
    number = float(value.value)
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    return f"{number.hex()}{'f' if held(value.dtype) is DType.F32 else ''}"


def instruction_count(expr: Expr) -> int:
    """Vector instructions, roughly: one per operation, a polynomial's for a transcendental function."""
    return sum(instructions_of(node) for node in walk(expr) if isinstance(node, Op))


def instructions_of(operation: Op) -> int:
    """Vector instructions of one operation, its operands apart."""
    exact = {"min", "max", "sign", "sqrt", "floor", "ceil", "rsqrt"}
    if (operation.name in (LIBM | {"sigmoid"}) - exact and operation.dtype is DType.F64) or operation.name == "pow":
        return ONE_BY_ONE
    if operation.name in ("sin", "cos"):
        return TURNED
    return POLYNOMIAL if operation.name in SCALAR_F32 - {"min", "max", "sign"} else 1


def operation_count(expr: Expr) -> int:
    """Operations in an expression, each distinct one once."""
    return sum(isinstance(node, Op) for node in walk(expr))
