"""Expressions as CUDA C++: scalar programs over fragment elements, indices and tensors in device memory.

Comes in: an `Expr` and what its variables and loads are called. Goes out: text, with shared parts in local variables.
Halves are held as float and rounded after every operation that gives one, bytes as int and wrapped so. Positions are
32-bit, as extents are; integers of 64 bits that data brings have all of them, and offsets, too.
"""

import math
from collections.abc import Callable, Mapping

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Op, Sym, Var, const, loads, polynomial
from tilecore.contract.spec import Tensor
from tilecore.cuda.errors import CudaError

STORAGE = {
    DType.F32: "float", DType.F16: "u16", DType.BF16: "u16", DType.I64: "i64", DType.I32: "int",
    DType.I8: "signed char", DType.U8: "u8", DType.BOOL: "u8",
}  # fmt: skip
HALVES = (DType.F16, DType.BF16)
EIGHTHS = (DType.F8E4M3, DType.F8E5M2)  # floats that products read and nothing else does
INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
         "and": "&&", "or": "||"}  # fmt: skip
FLOAT_CALLS = {
    "exp": "tile_exp", "exp2": "tile_exp2", "sigmoid": "tile_sigmoid", "tanh": "tile_tanh", "max": "tile_max",
    "min": "tile_min", "sign": "tile_sign", "abs": "fabsf", "floor": "floorf", "ceil": "ceilf", "round": "rintf",
    "sqrt": "sqrtf", "rsqrt": "rsqrtf", "log": "logf", "log2": "log2f", "sin": "sinf", "cos": "cosf", "erf": "erff",
    "pow": "powf",
}  # fmt: skip
INTEGER_CALLS = {"max": "max", "min": "min", "abs": "tile_abs", "floordiv": "tile_floordiv", "mod": "tile_mod"}
NARROW = {DType.I8: "signed char", DType.U8: "u8", DType.I16: "short"}  # held as int
Names = Mapping[Expr, str]
RESERVED = frozenset({
    "again", "again_at", "ahead", "base", "before", "before_phase", "chunk", "coming", "const", "consumers", "early",
    "first", "first_chunk", "float", "found", "free_slot", "group_row", "head", "held", "int", "joined", "judged",
    "lane", "last", "left", "once", "own", "own_column", "own_row", "pair", "paired", "part", "parts", "pass",
    "phase", "rise", "room", "row", "row_slot", "shared", "slot", "spot", "staged", "staging", "strip", "task",
    "thread", "tiles", "turn", "unit", "unit_column", "unit_row", "warp", "warp_row", "warpgroup", "workspace",
    "written", "x", "y",
})  # fmt: skip  # what generated kernels call things of their own


class Values:
    """Writes expressions; `lines` collects the local variables that the text handed out leans on."""

    def __init__(self, names: Names, element: Callable[[Load], str | None], prefix: str = "t_") -> None:
        self.names = names
        self.element = element
        self.prefix = prefix
        self.lines: list[str] = []
        self.known: dict[Expr, str] = {}

    def text(self, expr: Expr, *, guarded: bool = False) -> str:
        """`expr` as text. A `guarded` part may be out of bounds and is evaluated in place only."""
        if expr in self.names:
            return self.names[expr]
        if expr in self.known:
            return self.known[expr]
        match expr:
            case Const():
                return literal(expr)
            case Sym() | Var():
                raise CudaError(f"{expr.name} has no value here: it is bound by no grid, loop or parallel axis")
            case Load():
                written = self._load(expr, guarded)
            case Op():
                written = self._op(expr, guarded)
        if guarded or expr.dtype is DType.I64:
            return written
        name = f"{self.prefix}{len(self.known)}"
        self.lines.append(f"const {held(expr.dtype)} {name} = {written};")
        self.known[expr] = name
        return name

    def _load(self, load: Load, guarded: bool) -> str:
        own = self.element(load)
        if own is not None:
            return own
        if not isinstance(load.source, Tensor):
            raise CudaError(f"{load.source.name} is read element by element; copy it to a tile first")
        return read(load.source, self.offset(load.source, load.index, guarded=guarded))

    def offset(self, tensor: Tensor, index: tuple[Expr, ...], *, guarded: bool = False) -> str:
        """The position of an element in a dense tensor."""
        total = ""
        for position, extent in zip(index, tensor.shape, strict=True):
            place = self.text(position, guarded=guarded)
            total = f"({total} * ({self.text(extent)}) + ({place}))" if total else f"(i64)({place})"
        return total or "0"

    def wide(self, expr: Expr) -> str:
        """An offset in 64 bits: products of terms, each a 32-bit number."""
        terms: list[str] = []
        for monomial, amount in polynomial(expr).items():
            factors = [f"(i64)({self.text(atom)})" for atom in monomial]
            terms.append(" * ".join([*factors, f"{amount}ll"] if amount != 1 or not factors else factors))
        return " + ".join(terms) or "0"

    def _op(self, op: Op, guarded: bool) -> str:
        if op.name == "select":
            return self._select(op, guarded)
        if op.name == "exp2" and op.dtype is DType.F32:
            fused = self._scaled_difference(op.args[0], guarded)
            if fused is not None:
                return f"tile_exp2({fused})"
        if op.name == "add" and op.dtype is DType.F32:
            one, other = op.args if isinstance(op.args[1], Const) else op.args[::-1]
            if isinstance(one, Op) and one.name == "tanh" and isinstance(other, Const) and other.value == 1:
                return f"tile_tanh_above({self.text(one.args[0], guarded=guarded)})"
        args = [self.text(arg, guarded=guarded) for arg in op.args]
        if op.name == "div" and op.dtype is DType.F32 and isinstance(op.args[1], Load) and len(op.args[1].index) == 1:
            return f"({args[0]} * (1.0f / {args[1]}))"  # the reciprocal of a row's value is computed once
        if op.dtype is DType.I64 and op.name != "cast" and brings_data(op):
            args = [f"(i64)({arg})" for arg in args]
        text = _operation(op, args)
        if op.dtype in HALVES:
            return rounded(op.dtype, text)
        return f"(int)({NARROW[op.dtype]})({text})" if op.dtype in NARROW else text

    def _select(self, op: Op, guarded: bool) -> str:
        sides = [self.text(arg, guarded=guarded or any(_memory(load) for load in loads(arg))) for arg in op.args[1:]]
        return f"({self.text(op.args[0], guarded=guarded)} ? {sides[0]} : {sides[1]})"

    def _scaled_difference(self, expr: Expr, guarded: bool) -> str | None:
        """(x · u − r) · c in one multiply-add, r · c being the same for a whole row."""
        match expr:
            case Op(name="mul", args=(Op(name="sub", args=(x, r)), Const(value=c))):
                factor = c
                if isinstance(x, Op) and x.name == "mul" and isinstance(x.args[1], Const):
                    x, factor = x.args[0], c * x.args[1].value
                row, own, times = (self.text(r, guarded=guarded), *(literal(const(n, DType.F32)) for n in (c, factor)))
                if factor == c > 1:  # products of the largest floats
                    own = times = f"row_factor({row}, {own})"
                return f"fmaf({self.text(x, guarded=guarded)}, {times}, -({row} * {own}))"
            case _:
                return None


def brings_data(expr: Expr) -> bool:
    """Whether an integer is more than arithmetic of positions and extents, which 32 bits hold."""
    if isinstance(expr, Op):
        return expr.name == "cast" or any(arg.dtype is DType.I64 and brings_data(arg) for arg in expr.args)
    return isinstance(expr, Load)


def _memory(load: Load) -> bool:
    return isinstance(load.source, Tensor)


def _operation(op: Op, args: list[str]) -> str:
    source = op.args[0].dtype
    if op.name == "cast":
        return _cast(source, op.dtype, args[0])
    if op.name == "isnan":
        return f"({args[0]} != {args[0]})"
    if op.name == "isinf":
        return f"(fabsf({args[0]}) == TILE_INF)"
    if op.name == "not":
        return f"(!{args[0]})"
    if op.name == "neg":
        return f"(-{args[0]})"
    if op.name == "div" and op.dtype.is_float:
        return f"({args[0]} / {args[1]})"
    if op.name in INFIX:
        return f"({args[0]} {INFIX[op.name]} {args[1]})"
    calls = FLOAT_CALLS if op.dtype.is_float else INTEGER_CALLS
    if op.name not in calls:
        raise CudaError(f"{op.name} of {source} has no CUDA form yet")
    return f"{calls[op.name]}({', '.join(args)})"


def _cast(source: DType, target: DType, text: str) -> str:
    if target is DType.BOOL:
        return f"({text} != 0)"
    if target in EIGHTHS:
        raise CudaError(f"a cast to {target} has no CUDA form yet: {target} tensors are operands of products")
    if target in HALVES:
        return text if source is target else f"(float)({text})"
    if source.is_float and target in NARROW:
        raise CudaError(f"a cast of {source} to {target} has no CUDA form yet")
    return f"({held(target)})({text})"


def held(dtype: DType) -> str:
    """The type of a local variable for a value of `dtype`."""
    if dtype.is_float:
        if dtype is DType.F64:
            raise CudaError("f64 has no CUDA form: cast to f32")
        return "float"
    return {DType.BOOL: "bool", DType.I64: "i64"}.get(dtype, "int")


def rounded(dtype: DType, text: str) -> str:
    """A float as the nearest value of a half type."""
    label = str(dtype)
    return f"from_{label}(to_{label}({text}))"


def pointer(tensor: Tensor) -> str:
    """The parameter that points to a tensor; its name is no variable's of a kernel."""
    return f"{tensor.name}_data"


def dim(symbol: Sym) -> str:
    """The parameter that holds an extent."""
    return f"dim_{symbol.name}"


def read(tensor: Tensor, offset: str) -> str:
    """The element of a tensor at an offset, as it is held."""
    if tensor.dtype not in STORAGE:
        raise CudaError(f"{tensor.name} is {tensor.dtype}, which CUDA kernels do not read")
    text = f"{pointer(tensor)}[{offset}]"
    if tensor.dtype in HALVES:
        return f"from_{tensor.dtype}({text})"
    return f"(int)({text})" if tensor.dtype in NARROW else f"({text} != 0)" if tensor.dtype is DType.BOOL else text


def stored(dtype: DType, text: str) -> str:
    """A held value as it is stored."""
    return f"to_{dtype}({text})" if dtype in HALVES else text


def unrounded(value: Expr, dtype: DType) -> Expr:
    """`value` before the rounding that packing or storing does itself."""
    if isinstance(value, Op) and value.name == "cast" and value.dtype is dtype and value.args[0].dtype is DType.F32:
        return value.args[0]
    return value


def literal(value: Const) -> str:
    """A constant."""
    if value.dtype is DType.BOOL:
        return "true" if value.value else "false"
    if not value.dtype.is_float:
        if value.value == -(2**63):  # there is no literal of 2**63 to negate
            return "(-9223372036854775807ll - 1)"
        return f"{value.value}" if abs(value.value) < 2**31 else f"{value.value}ll"
    number = float(value.value)
    if math.isnan(number):
        return "TILE_NAN"
    if math.isinf(number):
        return "TILE_INF" if number > 0 else "(-TILE_INF)"
    return f"{number!r}f" if number >= 0 else f"({number!r}f)"
