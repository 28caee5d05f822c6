"""The C function that looks at the indices that a call brings, before anything is computed.

Comes in: the lookups of a signature, and the C names of its symbols. Goes out: a kernel's `check`, which evaluates
every position as the model's own operator would, and names the first that is out of range.
"""

from collections.abc import Mapping

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Op, Sym, Var
from tilecore.contract.spec import Tensor, extent_of
from tilecore.emit_expr import ELEMENT
from tilecore.emit_host import COMPARE, Signature, size_text, symbol_lines


def _index_text(expr: Expr, names: Mapping[str, str], axes: Mapping[Var, str], inputs: tuple[Tensor, ...]) -> str:
    """C text of an i64 that integer inputs bring; conditions guard what they choose between, as in Python."""

    def text(node: Expr) -> str:
        return _index_text(node, names, axes, inputs)

    match expr:
        case Var():
            return axes[expr]
        case Load(source=Tensor() as source, index=index):
            flat = "0"
            for position, dim in zip(index, source.shape, strict=True):
                flat = f"(({flat}) * {size_text(dim, names)} + {text(position)})"
            return f"(int64_t)((const {ELEMENT[source.dtype]}*)inputs[{inputs.index(source)}])[{flat}]"
        case Op(name="cast", args=(value,), dtype=DType.I64):
            return text(value)
        case Op(name="not", args=(value,)):
            return f"!{text(value)}"
        case Op(args=args) if expr.name in (*COMPARE, "add", "mul", "and", "or", "select"):
            parts = [Sym(f"part{i}") for i in range(len(args))]
            return size_text(Op(expr.name, tuple(parts), expr.dtype), {f"part{i}": text(a) for i, a in enumerate(args)})
        case Op():
            return f"{expr.name}_i64({', '.join(map(text, expr.args))})"
        case _:
            return size_text(expr, names)


def emit_lookups(signature: Signature, names: Mapping[str, str]) -> list[str]:
    """The kernel's `check`; nothing without lookups."""
    if not signature.lookups:
        return []
    lines = [
        "static int32_t check(const int64_t* symbols, const void* const* inputs, char* error, size_t error_size) {",
        "    (void)symbols;",
        *symbol_lines(names),
    ]
    for lookup in signature.lookups:
        axes = {axis: f"at{i}" for i, axis in enumerate(lookup.axes)}
        lines += [
            f"    for (int64_t {axes[axis]} = 0; {axes[axis]} < {size_text(extent_of(axis), names)}; {axes[axis]}++)"
            for axis in lookup.axes
        ]
        position = _index_text(lookup.position, names, axes, signature.inputs)
        lines.append(f"    TILE_CHECK_INDEX({position}, {size_text(lookup.size, names)})")
    return ["\n".join([*lines, "    return 0;", "}"])]
