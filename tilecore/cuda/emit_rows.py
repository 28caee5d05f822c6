"""Row plans as CUDA C++: one block of threads per few rows, fetch, compute in registers, store.

Comes in: a `RowPlan`. Goes out: text that needs `tile_sm80.cuh` and nothing else, the same bytes for the same plan.
"""

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import NEUTRAL
from tilecore.contract.expr import Expr, Load, const, loads, substitute, variables
from tilecore.contract.spec import Place, Tensor
from tilecore.cuda.errors import CudaError
from tilecore.cuda.joins import REDUCTIONS
from tilecore.cuda.row_plan import RUN, WORD, Fetch, RowPlan, canonical, run_of
from tilecore.cuda.values import HALVES, STORAGE, Values, dim, held, literal, pointer, stored
from tilecore.ir import Buffer, Fill, Parallel, Reduce, Stmt, Store

CACHED = 1 << 25  # bytes of a tensor of which the next kernel finds something in the cache
LOOP = "TILE_UNROLL for (int x = 0; x < {count}; x++) {{"


def emit_rows(plan: RowPlan, name: str) -> str:
    """The kernel as text, with entry point `name`."""
    return "\n".join(_Rows(plan).text(name))


class _Rows:
    """Writes one plan."""

    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        (task,) = plan.program.grid
        self.names: dict[Expr, str] = {symbol: dim(symbol) for symbol in plan.symbols}
        self.names |= {task: task.name, plan.row: "row"}
        self.fetched = {fetch.load: fetch for fetch in plan.fetches}
        self.reductions = 0
        self.exact = plan.chunks * plan.lanes == plan.runs
        self.count = plan.chunks * plan.vector

    def text(self, name: str) -> list[str]:
        """The lines of the file."""
        plan = self.plan
        written = set(plan.program.outputs)
        parameters = [
            f"{'' if tensor in written else 'const '}{STORAGE[tensor.dtype]}* __restrict__ {pointer(tensor)}"
            for tensor in plan.pointers
        ]
        parameters += [f"int {dim(symbol)}" for symbol in plan.symbols]
        body = self._body()
        scratch = (
            [f"__shared__ __align__(16) float scratch[{32 * self.reductions}];"]
            if self.reductions and plan.lanes > 32
            else []
        )
        return [
            f"// {plan.program.name}: {plan.rows} rows a block, {plan.lanes} threads a row, {plan.chunks} runs of "
            f"{plan.vector} columns each",
            '#include "tile_sm80.cuh"',
            "",
            f'extern "C" __global__ void __launch_bounds__({plan.threads}) {name}({", ".join(parameters)}) {{',
            *("  " + line for line in (*scratch, *body)),
            "}",
            "",
        ]

    def _body(self) -> list[str]:
        plan = self.plan
        (task,) = plan.program.grid
        values = self._values()
        total = values.text(plan.row.extent or const(0))
        large = f"(i64)({total}) * {plan.columns * plan.width} > {CACHED}ll"
        lines = [
            f"const int {task.name} = blockIdx.x, lane = threadIdx.x % {plan.lanes};",
            f"const int row_at = {task.name} * {plan.rows} + threadIdx.x / {plan.lanes};",
            *values.lines,
            f"const int row = {'row_at' if plan.rows == 1 else f'min(row_at, {total} - 1)'};",
            f"const bool once = {large if plan.once else 'false'};",
        ]
        for buffer in plan.program.buffers:
            size = f"[{self.count}]" if len(buffer.shape) == 2 else ""
            lines.append(f"{held(buffer.dtype)} {buffer.name}{size};")
        lines.append("grid_wait();")
        for position, stmt in enumerate(plan.program.body):
            for fetch in plan.fetches:
                lines += self._fetch(fetch) if fetch.at == position else []
            if stmt.span is not None:
                lines.append(f"// {stmt.span.file.rsplit('/', 1)[-1]}:{stmt.span.line}")
            lines += self._statement(stmt, total)
        return lines

    def _values(self, more: dict[Expr, str] | None = None) -> Values:
        return Values({**self.names, **(more or {})}, self._element)

    def _element(self, load: Load) -> str | None:
        if isinstance(load.source, Buffer):
            return f"{load.source.name}[x]" if len(load.source.shape) == 2 else load.source.name
        fetch = self.fetched.get(load)
        return None if fetch is None else f"element_{load.dtype}({fetch.name}, x)"

    def _words(self, dtype: DType) -> int:
        return self.plan.vector * dtype.row.bytes // WORD

    def _fetch(self, fetch: Fetch) -> list[str]:
        plan, tensor = self.plan, fetch.load.source
        assert isinstance(tensor, Tensor)
        words = self._words(tensor.dtype)
        values = self._values({RUN: "run"})
        at = values.wide(fetch.start)
        get = f"fetch_run<{words}>({fetch.name} + c * {words}, {pointer(tensor)} + {at}{', once' * fetch.once});"
        ways = [
            " && ".join(f"{'' if holds else '!'}({values.text(condition)})" for condition, holds in path)
            for path in fetch.paths
        ]
        run = "c * {lanes} + lane" if self.exact else "min(c * {lanes} + lane, {last})"
        body = [f"const int run = {run.format(lanes=plan.lanes, last=plan.runs - 1)};", *values.lines]
        body += (
            [f"if ({' || '.join(ways)}) {get}", f"else clear_run<{words}>({fetch.name} + c * {words});"]
            if ways
            else [get]
        )
        return [
            f"u32 {fetch.name}[{plan.chunks * words}];",
            f"TILE_UNROLL for (int c = 0; c < {plan.chunks}; c++) {{",
            *("  " + line for line in body),
            "}",
        ]

    def _statement(self, stmt: Stmt, total: str) -> list[str]:
        match stmt:
            case Parallel():
                return [line for store in stmt.body for line in self._store(stmt, store, total)]
            case Reduce():
                return self._reduce(stmt)
            case Fill():
                value = self._values().text(stmt.value)
                if len(stmt.dst.shape) == 1:
                    return [f"{stmt.dst.name} = {value};"]
                return [LOOP.format(count=self.count), f"  {stmt.dst.name}[x] = {value};", "}"]
            case _:
                raise CudaError(f"{type(stmt).__name__} has no CUDA form in a program over rows")

    def _store(self, stmt: Parallel, store: Store, total: str) -> list[str]:
        self._check_own(stmt, store)
        if store.guard is not None or store.update:
            raise CudaError(f"a store to {store.target.name} that joins or is guarded has no CUDA form yet")
        value = canonical(self.plan, stmt, store.value)
        if isinstance(store.target, Buffer):
            values, head = self._columns(value)
            text = values.text(value)
            if len(stmt.axes) == 1:
                return [*values.lines, f"{store.target.name} = {text};"]
            return [
                LOOP.format(count=self.count), *("  " + line for line in (*head, *values.lines)),
                f"  {store.target.name}[x] = {text};", "}",
            ]  # fmt: skip
        place = store.target
        moved = dict[Expr, Expr](zip(place.axes, (canonical(self.plan, stmt, at) for at in store.index), strict=True))
        index = tuple(substitute(position, moved) for position in place.index)
        if len(stmt.axes) == 1:
            values = self._values()
            text, at = values.text(value), values.offset(place.tensor, index)
            write = f"{pointer(place.tensor)}[{at}] = {stored(place.dtype, text)};"
            return ["{", *("  " + line for line in values.lines), f"  if (lane == 0 && row_at < {total}) {write}", "}"]
        return self._store_columns(place, index, value, total)

    def _check_own(self, stmt: Parallel, store: Store) -> None:
        """Tiles are read and written at their own element."""
        accesses = [(load.source, load.index) for load in loads(store.value) if isinstance(load.source, Buffer)]
        if isinstance(store.target, Buffer):
            accesses.append((store.target, store.index))
        for buffer, index in accesses:
            if index != stmt.axes[: len(index)]:
                raise CudaError(
                    f"{buffer.name} is indexed by {', '.join(map(str, index))}: row tiles by their own axes"
                )

    def _columns(self, value: Expr) -> tuple[Values, list[str]]:
        """What writes `value` of element x, and the lines that say which column that is."""
        plan = self.plan
        values = self._values({plan.column: "column"})
        if plan.column not in variables(value):
            return values, []
        run = f"x / {plan.vector} * {plan.lanes} + lane"
        run = run if self.exact else f"min({run}, {plan.runs - 1})"
        return values, [f"const int column = ({run}) * {plan.vector} + x % {plan.vector};"]

    def _store_columns(self, place: Place, index: tuple[Expr, ...], value: Expr, total: str) -> list[str]:
        plan, tensor = self.plan, place.tensor
        own = f"row_at < {total}" + ("" if self.exact else f" && c * {plan.lanes} + lane < {plan.runs}")
        own = own if plan.rows > 1 or not self.exact else "true"
        start = run_of(plan, tensor, index)
        values, head = self._columns(value)
        text = values.text(value)
        vector = plan.vector
        lines = [f"TILE_UNROLL for (int c = 0; c < {plan.chunks}; c++) {{", f"  float v[{vector}];"]
        lines += [f"  TILE_UNROLL for (int y = 0; y < {vector}; y++) {{", f"    const int x = c * {vector} + y;"]
        lines += [*("    " + line for line in (*head, *values.lines)), f"    v[y] = {text};", "  }"]
        if start is not None and place.dtype.is_float:
            places = self._values({RUN: "run"})
            at = places.wide(start)
            words = self._words(tensor.dtype)
            half = place.dtype in HALVES
            word = f"pair_{place.dtype}(v[2 * y], v[2 * y + 1])" if half else "__float_as_uint(v[y])"
            lines += [
                f"  u32 packed[{words}];",
                f"  TILE_UNROLL for (int y = 0; y < {words}; y++) packed[y] = {word};",
                f"  const int run = c * {plan.lanes} + lane;",
                *("  " + line for line in places.lines),
                f"  if ({own}) store_run<{words}>({pointer(tensor)} + {at}, packed, once);",
                "}",
            ]
            return lines
        places = self._values({plan.column: "to_column"})
        at = places.offset(tensor, index)
        return [
            *lines,
            f"  TILE_UNROLL for (int y = 0; y < {vector}; y++) {{",
            f"    const int to_column = (c * {plan.lanes} + lane) * {vector} + y;",
            *("    " + line for line in places.lines),
            f"    if ({own}) {pointer(tensor)}[{at}] = {stored(place.dtype, 'v[y]')};",
            "  }",
            "}",
        ]

    def _reduce(self, stmt: Reduce) -> list[str]:
        plan, source, target = self.plan, stmt.src, stmt.dst
        if stmt.axis != 1 or len(source.shape) != 2 or source.dtype is not DType.F32:
            raise CudaError(f"a reduction of {source.name} ({source.dtype}): f32 over the columns alone")
        kind = REDUCTIONS[stmt.kind]
        neutral = literal(const(float(NEUTRAL[stmt.kind]), DType.F32))
        guard = "" if self.exact else f"if (x / {plan.vector} * {plan.lanes} + lane < {plan.runs}) "
        spot = f"scratch + {32 * self.reductions}" if plan.lanes > 32 else "nullptr"
        self.reductions += 1
        joined = "all" if stmt.clear else f"{kind}::join({target.name}, all)"
        return [
            "{",
            f"  float all = {neutral};",
            "  " + LOOP.format(count=self.count),
            f"    {guard}all = {kind}::join(all, {source.name}[x]);",
            "  }",
            f"  all = reduce_lanes<{kind}, {plan.lanes}>(all, {spot});",
            f"  {target.name} = {joined};",
            "}",
        ]
