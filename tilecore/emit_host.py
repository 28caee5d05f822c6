"""The host's side of a generated kernel: its `tile_kernel` table and the functions that size and check a call.

The symbols of a call are read off the input shapes; every other dim is checked against the signature, so that a wrong
shape is an error with both numbers, never a read past the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tilecore.contract.expr import Const, Expr, Op, Sym, binary, const, rewrite, select
from tilecore.contract.spec import Lookup, Tensor, extent_of
from tilecore.loops import LoopProgram, Memory, Once, loop_statements
from tilecore.target import Target

ALIGN = 64  # bytes
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


@dataclass(frozen=True, slots=True)
class Signature:
    """What a host sees of a kernel: name, tensors, and the cost of a call in nanoseconds of one core."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    work: Expr
    requires: tuple[Expr, ...] = ()  # at least 0 in every valid call
    lookups: tuple[Lookup, ...] = ()


def symbol_order(inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
    """The symbols of a signature in the order of the `symbols` array: as the input shapes bring them."""
    return tuple(dict.fromkeys(dim.name for tensor in inputs for dim in tensor.shape if isinstance(dim, Sym)))


def aligned(size: Expr) -> Expr:
    """`size` rounded up to the alignment of scratch."""
    return (size + (ALIGN - 1)) // ALIGN * ALIGN


def scratch_bytes(memory: Memory) -> Expr:
    """Bytes of a scratch memory, padded to the alignment."""
    return aligned(memory.size * memory.dtype.row.bytes)


def flags(program: LoopProgram) -> list[Once]:
    """The statements that run once per change of the slower grid axes; one of each name: forms of a body share them."""
    onces = (stmt for stmt in loop_statements(program.body) if isinstance(stmt, Once))
    return list({stmt.name: stmt for stmt in onces}.values())


def group_of(program: LoopProgram) -> Expr:
    """How many tasks in a row find the same kept copies."""
    sizes = [const(1) if size == const(0) else size for size in map(extent_of, program.grid)]  # 0: there is no task
    if program.steady:
        return select(binary("eq", sizes[0], const(1)), sizes[1], const(1))
    return binary("mul", sizes[0], const(program.sharing))


def size_text(expr: Expr, names: Mapping[str, str]) -> str:
    """C text of an integer expression of symbols."""
    match expr:
        case Const():
            return f"INT64_C({expr.value})"
        case Sym():
            return names[expr.name]
        case Op(name="add" | "mul", args=(left, right)):
            sign = "+" if expr.name == "add" else "*"
            return f"({size_text(left, names)} {sign} {size_text(right, names)})"
        case Op(name="select", args=(condition, yes, no)):
            return f"({size_text(condition, names)} ? {size_text(yes, names)} : {size_text(no, names)})"
        case Op(name="lt" | "le" | "gt" | "ge" | "eq" | "ne", args=(left, right)):
            return f"({size_text(left, names)} {COMPARE[expr.name]} {size_text(right, names)})"
        case Op(name="and" | "or", args=(left, right)):
            return f"({size_text(left, names)} {'&' if expr.name == 'and' else '|'} {size_text(right, names)})"
        case Op():
            return f"{expr.name}_i64({', '.join(size_text(arg, names) for arg in expr.args)})"
        case _:
            raise ValueError(f"{expr} is not an expression of dims")


def symbol_lines(names: Mapping[str, str]) -> list[str]:
    """C that gives the symbols of a call their names."""
    return [f"    const int64_t {name} = symbols[{i}]; (void){name};" for i, name in enumerate(names.values())]


@dataclass(frozen=True, slots=True)
class Special:
    """A program for calls whose dims fulfil `condition`."""

    condition: Expr
    program: LoopProgram


def dispatch(special: Special, names: Mapping[str, str]) -> list[str]:
    """`run`, which is `run_special` where the condition holds and `run_general` elsewhere."""
    arguments = "symbols, inputs, outputs, scratch, copied, begin, end"
    return [
        "static void run(const int64_t* symbols, const void* const* inputs, void* const* outputs,",
        "                void* scratch, int64_t* copied, int64_t begin, int64_t end) {",
        *symbol_lines(names),
        f"    ({size_text(special.condition, names)} ? run_special : run_general)({arguments});",
        "}",
    ]


def _sizes(program: LoopProgram) -> tuple[Expr, Expr, Expr]:
    """Tasks of a call, how many in a row share copies, and bytes of scratch."""
    tasks = _product([extent_of(axis) for axis in program.grid])
    group = group_of(program) if flags(program) else const(1)
    memories = [scratch_bytes(memory) for memory in program.memories if memory.kind == "scratch"]
    return tasks, group, _sum([*memories, *(aligned(once.count) for once in flags(program))])


def descriptor(
    program: LoopProgram, signature: Signature, names: Mapping[str, str], target: Target, special: Special | None
) -> list[str]:
    """Everything after `run` and `check`: bind, shape, tasks, scratch, work and the table."""
    symbols = symbol_lines(names)
    tasks, group, total = _sizes(program)
    if special:
        both = zip(_sizes(special.program), (tasks, group, total), strict=True)
        tasks, group, total = (select(special.condition, one, other) for one, other in both)
    return [
        _bind(signature, names),
        *_size_function("int64_t", "tasks", tasks, symbols, names),
        *_size_function("int64_t", "group", group, symbols, names),
        *_size_function("size_t", "scratch", total, symbols, names),
        *_size_function("int64_t", "work", signature.work, symbols, names),
        _shape(signature, symbols, names),
        *_tables(signature),
        f"const tile_kernel {kernel_symbol(signature.name, target.name)} = {{",
        f'    "{signature.name}", {len(signature.inputs)}, {len(signature.outputs)}, input_types, tile_outputs,',
        f"    bind, shape, tasks, group, scratch_size, work, run, {'check' if signature.lookups else 'NULL'},",
        "};",
    ]


def kernel_symbol(name: str, target: str) -> str:
    """The C name of a kernel's table for the instruction set called `target`."""
    return f"tile_kernel_{name}_{target.replace('-', '_')}"


def _size_function(kind: str, name: str, value: Expr, symbols: list[str], names: Mapping[str, str]) -> list[str]:
    function = "scratch_size" if name == "scratch" else name
    return [
        f"static {kind} {function}(const int64_t* symbols) {{",
        "    (void)symbols;",
        *symbols,
        f"    return ({kind})({size_text(value, names)});",
        "}",
    ]


def _bind(signature: Signature, names: Mapping[str, str]) -> str:
    lines = [
        "static int32_t bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,",
        "                    size_t error_size) {",
        "    (void)shapes; (void)ranks; (void)symbols; (void)error; (void)error_size;",
    ]
    bound: dict[str, str] = {}
    checks: list[str] = []
    for i, tensor in enumerate(signature.inputs):
        lines.append(f"    TILE_CHECK_RANK({i}, {len(tensor.shape)})")
        for axis, dim in enumerate(tensor.shape):
            if isinstance(dim, Sym) and dim.name not in bound:
                bound[dim.name] = names[dim.name]
                position = list(names).index(dim.name)
                lines.append(f"    const int64_t {names[dim.name]} = symbols[{position}] = shapes[{i}][{axis}];")
            else:
                checks.append(f"    TILE_CHECK_DIM({i}, {axis}, {size_text(dim, names)})")
    lines += [f"    (void){name};" for name in bound.values()]
    for expr in signature.requires:
        text, macro = _quoted(expr), "TILE_CHECK_NOT_NEGATIVE"
        if isinstance(expr, Op) and expr.name == "select" and expr.args[1:] == (const(0), const(-1)):
            text, macro = _quoted(expr.args[0]), "TILE_CHECK_HOLDS"
        checks.append(f'    {macro}({size_text(expr, names)}, "{text}")')
    return "\n".join([*lines, *checks, "    return 0;", "}"])


def _quoted(expr: Expr) -> str:
    """The expression for a message in C: names of dims that are no identifiers stand in quotes."""

    def named(node: Expr) -> Expr | None:
        return Sym(f"'{node.name}'") if isinstance(node, Sym) and not node.name.isidentifier() else None

    text = str(rewrite(expr, named)).replace("\\", "").replace('"', "")
    return "".join(character if character.isprintable() else "?" for character in text)


def _shape(signature: Signature, symbols: list[str], names: Mapping[str, str]) -> str:
    lines = [
        "static void shape(const int64_t* symbols, int32_t output, int64_t* dims) {",
        "    (void)symbols;" if any(tensor.shape for tensor in signature.outputs) else "    (void)symbols; (void)dims;",
        *symbols,
        "    switch (output) {",
    ]
    for i, tensor in enumerate(signature.outputs):
        writes = " ".join(f"dims[{axis}] = {size_text(dim, names)};" for axis, dim in enumerate(tensor.shape))
        lines.append(f"    case {i}: {writes} break;")
    return "\n".join([*lines, "    default: break;", "    }", "}"])


def _tables(signature: Signature) -> list[str]:
    types = ", ".join(str(tensor.dtype.row.onnx) for tensor in signature.inputs) or "0"
    lines = [f"static const int32_t input_types[] = {{{types}}};"]
    rows: list[str] = []
    for i, tensor in enumerate(signature.outputs):
        dims = ", ".join(_dim_row(dim, signature.inputs) for dim in tensor.shape)
        if tensor.shape:
            lines.append(f"static const tile_dim dims_{i}[] = {{{dims}}};")
        rows.append(f"{{{tensor.dtype.row.onnx}, {len(tensor.shape)}, {f'dims_{i}' if tensor.shape else 'NULL'}}}")
    return [*lines, f"static const tile_output tile_outputs[] = {{{', '.join(rows) or '{0, 0, NULL}'}}};"]


def _dim_row(dim: Expr, inputs: tuple[Tensor, ...]) -> str:
    if isinstance(dim, Const):
        return f"{{TILE_DIM_CONST, 0, 0, {dim.value}}}"
    for i, tensor in enumerate(inputs):
        if dim in tensor.shape:
            return f"{{TILE_DIM_INPUT, {i}, {tensor.shape.index(dim)}, 0}}"
    return "{TILE_DIM_COMPUTED, 0, 0, 0}"


def _product(factors: list[Expr]) -> Expr:
    total: Expr = const(1)
    for factor in factors:
        total = binary("mul", total, factor)
    return total


def _sum(terms: list[Expr]) -> Expr:
    total: Expr = const(0)
    for term in terms:
        total = binary("add", total, term)
    return total
