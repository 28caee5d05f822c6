"""Tile inference for Hopper: what each buffer of a tile program becomes, by propagation on the tile graph.

Comes in: a concrete program. Goes out: `Roles`. Products demand first: their operands lie in swizzled shared memory
and come by tensor copies, their results are fragments of one warpgroup's 64 rows. Axis classes carry that along edges:
a tile over the rows and columns of a product is a fragment of the same shape, a vector over its rows two registers per
thread, a fragment that a product multiplies by is packed in registers. Results too wide for the registers of one
warpgroup are shared by the columns between two, which then multiply by a tile that both write to shared memory. The
rows of the last product are the kernel's: 64 rows of another axis (the steps of a chunk, where the last product updates
a state) are shared by the columns between all warpgroups in the same way. A tile that another one holds already is not
copied again. What no rule reaches is a conflict, by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, const, loads, substitute
from tilecore.contract.spec import Place, Tensor, View
from tilecore.cuda.decoding import Decoding, decoding_of, is_plain
from tilecore.cuda.errors import CudaError
from tilecore.cuda.values import EIGHTHS, HALVES
from tilecore.graph import TileGraph, build_graph, depth_axes, gemm_axes, split_affine, tile_axes
from tilecore.ir import Buffer, Copy, For, Gemm, Parallel, Program, statements

GROUP_ROWS = 64  # rows of a product that one warpgroup has
SWIZZLE = 128  # bytes of the contiguous axis in one chunk
CHUNK = 64  # halves in one
STEP_BYTES = 32  # of the depth that one product instruction takes
WARP_COLUMNS = 32  # of a product by levels, up to which warps of their own are faster than warpgroups
DECODED = 64  # elements of the depth that are decoded while the products of as many run
OPERANDS = (*HALVES, *EIGHTHS)  # types that tensor copies bring for products
WIDEST = 256  # columns of a product of one warpgroup
MAX_BOX = 256  # elements of a tensor copy along any axis
MAX_RANK = 5  # of a tensor map
LINE_BYTES = 128  # of which a line's size and address are multiples


@dataclass(frozen=True, slots=True)
class Staged:
    """A tile in shared memory that tensor copies bring: [chunks of `contiguous`][rows of the other axis][128 bytes].

    Chunks are swizzled. A tile of one axis is a *line*, plain elements in order. The levels of a `decoding` come as the
    bytes that hold them, of a tensor told as rows of bytes; their chunks may be of 32 or 64 bytes.
    """

    buffer: Buffer
    tensor: Tensor
    contiguous: int  # axis of the tile that is contiguous in memory
    dims: tuple[int, ...]  # dim of the tensor that each axis of the tile walks
    origin: tuple[Expr, ...]  # of the tile, per dim of the tensor
    decoding: Decoding | None = None

    @property
    def line(self) -> bool:
        """Whether it has one axis."""
        return len(self.dims) == 1

    @property
    def row_bytes(self) -> int:
        """Bytes of the tile along its contiguous axis."""
        bits = self.buffer.dtype.bits if self.decoding is None else self.decoding.bits
        return extents(self.buffer)[self.contiguous] * bits // 8

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one row of a chunk, which are the span of its swizzle as well."""
        return self.row_bytes if self.line else min(SWIZZLE, self.row_bytes)

    @property
    def chunk(self) -> int:
        """Elements of the tensor in one row of a chunk."""
        return self.chunk_bytes // self.tensor.dtype.row.bytes

    @property
    def chunk_rows(self) -> int:
        """Rows of one chunk."""
        return 1 if self.line else extents(self.buffer)[1 - self.contiguous]

    @property
    def chunks(self) -> int:
        """Tensor copies that bring the tile."""
        return self.row_bytes // self.chunk_bytes

    @property
    def bytes(self) -> int:
        """Size of the tile."""
        return self.row_bytes * self.chunk_rows

    @property
    def shape(self) -> tuple[int, int] | None:
        """The tensor as rows of bytes, where that is how it is copied."""
        return None if self.decoding is None else (self.decoding.rows, self.decoding.pitch)

    @property
    def box(self) -> tuple[int, ...]:
        """Elements of one tensor copy, per dim of the tensor."""
        box = [1] * len(self.origin)
        box[self.dims[self.contiguous]] = self.chunk
        if not self.line:
            box[self.dims[1 - self.contiguous]] = self.chunk_rows
        return tuple(box)


@dataclass(frozen=True, slots=True)
class Roles:
    """What inference decided, by buffer name. `consumers` warpgroups share a tile: every 64 rows of it (times `strips`)
    belong to `parts` of them, and each of those has its part of the columns.
    """

    program: Program
    graph: TileGraph
    staged: Mapping[str, Staged]
    held: Mapping[str, str]  # staged tiles that are the first columns of another one: its name
    fragments: Mapping[str, int]  # floats of a thread: columns / 2, of its part, times strips
    shared: Mapping[str, int]  # fragments over other rows than the kernel's: how many warpgroups share their columns
    exchanged: tuple[str, ...]  # operands that warpgroups write to shared memory for each other
    packed: Mapping[str, int]  # register operands: words of a thread, columns / 4, times strips
    statistics: tuple[str, ...]
    lines: tuple[str, ...]  # of a chunk's steps, which every warp computes for itself
    consumers: int
    parts: int
    rows_class: int
    strips: int = 1  # of 16 rows that a warp has, one after the other

    @property
    def block_rows(self) -> int:
        """Rows of a tile."""
        return self.consumers // self.parts * GROUP_ROWS * self.strips

    def holder(self, buffer: Buffer) -> Buffer:
        """The tile whose shared memory an operand lies in, often its own."""
        return self.staged[self.held.get(buffer.name, buffer.name)].buffer

    def parts_of(self, name: str) -> int:
        """How many warpgroups share the columns of a fragment."""
        return self.shared.get(name, self.parts)

    def sharing(self, row: Var) -> int | None:
        """How many warpgroups share the columns of what has `row` for its rows; None for an axis that is no row."""
        own = self.graph.classes[row]
        if own == self.rows_class:
            return self.parts
        return next((parts for name, parts in self.shared.items() if self.graph.classes[name, 0] == own), None)

    @property
    def decoded(self) -> Staged | None:
        """The left operand that is decoded from levels on its way to the products."""
        return next((tile for tile in self.staged.values() if tile.decoding is not None), None)

    @property
    def by_warps(self) -> bool:
        """Whether warps multiply by themselves: few columns of a right operand that lies along the depth, and levels
        of which the quarter that a thread reads in one piece is of one run.
        """
        return self.decoded is not None and _by_warps(self.program, self.staged, self.decoded)

    @property
    def short_sums(self) -> tuple[str, ...]:
        """Results of products of 8 bits, which cards sum with few bits: parts of the depth have sums of their own."""
        gemms = (stmt for stmt in statements(self.program.body) if isinstance(stmt, Gemm))
        return tuple(dict.fromkeys(gemm.c.name for gemm in gemms if gemm.a.dtype in EIGHTHS))

    @property
    def registers(self) -> int:
        """Registers of a consumer thread that tiles take."""
        short = sum(self.fragments[name] for name in self.short_sums)
        return sum(self.fragments.values()) + short + sum(self.packed.values()) + 2 * self.strips * len(self.statistics)


def infer_roles(program: Program, *, strips: int = 1) -> Roles:
    """The roles of a concrete program's buffers; warps have `strips` of 16 rows. CudaError where one has none."""
    graph = build_graph(program)
    gemms = [stmt for stmt in statements(program.body) if isinstance(stmt, Gemm)]
    if not gemms:
        raise CudaError(f"{program.name} has no product: CUDA kernels are made of tile programs with T.gemm yet")
    rows_class = graph.classes[gemm_axes(gemms[-1])[0][0]]
    block_rows = extents(gemms[-1].c)[0]
    if block_rows % (GROUP_ROWS * strips) or not 1 <= block_rows // GROUP_ROWS // strips <= 3:
        one, two, three = (GROUP_ROWS * strips * groups for groups in (1, 2, 3))
        raise CudaError(f"tiles of {block_rows} rows: {one}, {two} or {three} are what warpgroups can share")
    parts = 2 if block_rows == GROUP_ROWS and any(extents(gemm.c)[1] > WIDEST for gemm in gemms) else 1
    consumers = block_rows // GROUP_ROWS // strips * parts
    fills = {copy.dst.source.name: copy for copy in _loads(program)}
    alone = _rows_alone(gemms)
    staged: dict[str, Staged] = {}
    fragments: dict[str, int] = {}
    packed: dict[str, int] = {}
    shared: dict[str, int] = {}
    exchanged: list[str] = []
    statistics: list[str] = []
    lines: list[str] = []
    left, right = {gemm.a.name for gemm in gemms}, {gemm.b.name for gemm in gemms}
    others = {gemm.c.name for gemm in gemms if graph.classes[gemm_axes(gemm)[0][0]] != rows_class}
    for buffer in program.buffers:
        shape = extents(buffer)
        on_rows = graph.classes[buffer.name, 0] == rows_class
        if buffer.name in fills:
            staged[buffer.name] = _staged(buffer, fills[buffer.name], alone)
        elif buffer.name in others and buffer.dtype is DType.F32:
            fragments[buffer.name] = _shared(buffer, consumers)
            shared[buffer.name] = consumers
        elif buffer.name in right and len(shape) == 2 and buffer.dtype in HALVES:
            exchanged.append(_checked_right(buffer).name)
        elif buffer.name in left and on_rows:
            words = _checked(buffer, shape[1] // 4, parts) * strips
            exchanged.append(buffer.name) if parts > 1 else packed.update({buffer.name: words})
        elif len(shape) == 2 and on_rows and buffer.dtype is DType.F32:
            fragments[buffer.name] = _checked(buffer, shape[1] // 2, parts) * strips
        elif len(shape) == 1 and buffer.scope == "shared" and buffer.dtype is DType.F32:
            lines.append(_checked_line(buffer).name)
        elif len(shape) == 1 and on_rows and buffer.dtype is DType.F32:
            statistics.append(buffer.name)
        else:
            raise CudaError(f"buffer {buffer.name} ({buffer.dtype}{list(shape)}) is no operand, product or row value")
    for gemm in gemms:
        _check_product(gemm, staged, fragments, (*packed, *exchanged), shared.get(gemm.c.name, parts))
    for tile in staged.values():
        if tile.decoding is not None:
            depth = DECODED if _by_warps(program, staged, tile) else extents(tile.buffer)[1]
            packed[tile.buffer.name] = depth // 4
    held = _held(program, staged) if parts > 1 else {}
    return Roles(
        program, graph, staged, held, fragments, shared, tuple(exchanged), packed, tuple(statistics), tuple(lines),
        consumers, parts, rows_class, strips,
    )  # fmt: skip


def _by_warps(program: Program, staged: Mapping[str, Staged], tile: Staged) -> bool:
    gemms = (stmt for stmt in statements(program.body) if isinstance(stmt, Gemm) and stmt.a == tile.buffer)
    gemm = next(gemms, None)
    if gemm is None or tile.decoding is None or gemm.b.name not in staged:
        return False
    few = extents(gemm.c)[1] <= WARP_COLUMNS and tile.decoding.run >= DECODED
    return few and staged[gemm.b.name].contiguous == depth_axes(gemm)[1][1]


def has_products(program: Program) -> bool:
    """Whether a program multiplies tiles anywhere."""
    return any(isinstance(stmt, Gemm) for stmt in statements(program.body))


def extents(buffer: Buffer) -> tuple[int, ...]:
    """The shape of a concrete buffer."""
    return tuple(number(dim, f"an extent of {buffer.name}") for dim in buffer.shape)


def number(expr: Expr, what: str) -> int:
    """The value of a constant. CudaError when it is none."""
    if not isinstance(expr, Const):
        raise CudaError(f"{what} is {expr}, which is not known when the kernel is built")
    return int(expr.value)


def _loads(program: Program) -> Iterator[Copy]:
    for stmt in statements(program.body):
        if isinstance(stmt, Copy) and isinstance(stmt.src.source, View) and isinstance(stmt.dst.source, Buffer):
            yield stmt


def _rows_alone(gemms: list[Gemm]) -> set[tuple[str, int]]:
    """Rows of left operands that matter to their own results only: no product sums over them or has them as columns."""
    used = {axis for gemm in gemms for axis in (*depth_axes(gemm), gemm_axes(gemm)[1][0])}
    return {gemm_axes(gemm)[0][0] for gemm in gemms} - used


def _held(program: Program, staged: Mapping[str, Staged]) -> dict[str, str]:
    """Tiles that are the first columns of one copied just before, in the same body."""
    found: dict[str, str] = {}
    bodies = [program.body, *(stmt.body for stmt in statements(program.body) if isinstance(stmt, For))]
    for body in bodies:
        names = [stmt.dst.source.name for stmt in body if isinstance(stmt, Copy) and stmt.dst.source.name in staged]
        for position, name in enumerate(names):
            holder = next((one for one in names[:position] if one not in found and _holds(staged, one, name)), None)
            if holder is not None:
                found[name] = holder
    return found


def _holds(staged: Mapping[str, Staged], one: str, other: str) -> bool:
    large, small = staged[one], staged[other]
    same = (large.tensor, large.contiguous, large.dims, large.origin, large.chunk_rows)
    return same == (small.tensor, small.contiguous, small.dims, small.origin, small.chunk_rows) and (
        small.chunks <= large.chunks
    )


def _checked(buffer: Buffer, words: int, parts: int) -> int:
    columns, step = extents(buffer)[1], (8 if words * 2 == extents(buffer)[1] and parts == 1 else 16) * parts
    if columns % step or not step <= columns <= WIDEST * parts:
        raise CudaError(
            f"buffer {buffer.name} has {columns} columns: fragments of {parts} warpgroups have {step} to "
            f"{WIDEST * parts}, in steps of {step}"
        )
    return words // parts


def _shared(buffer: Buffer, consumers: int) -> int:
    rows, columns = extents(buffer)
    step = 16 * consumers
    if rows != GROUP_ROWS or columns % step or columns > WIDEST:
        raise CudaError(
            f"the product in {buffer.name} has other rows than the last one and is {rows} x {columns}: "
            f"{consumers} warpgroups share {GROUP_ROWS} rows and a multiple of {step} columns up to {WIDEST}"
        )
    return columns // 2 // consumers


def _checked_line(buffer: Buffer) -> Buffer:
    (length,) = extents(buffer)
    if length != CHUNK:
        raise CudaError(f"line {buffer.name} has {length} elements and is computed here: such lines have {CHUNK}")
    return buffer


def _checked_right(buffer: Buffer) -> Buffer:
    """A right operand that is computed: its rows are summed over."""
    rows, columns = extents(buffer)
    if rows != GROUP_ROWS or columns % CHUNK or columns > WIDEST:
        raise CudaError(
            f"the right operand {buffer.name} is computed here and is {rows} x {columns}: such operands have "
            f"{GROUP_ROWS} rows and a multiple of {CHUNK} columns up to {WIDEST}"
        )
    return buffer


def _staged(buffer: Buffer, copy: Copy, alone: set[tuple[str, int]]) -> Staged:
    view = copy.src.source
    assert isinstance(view, View)
    shape = extents(buffer)
    if len(shape) == 2 and buffer.dtype in HALVES and not is_plain(view):
        return _levels(buffer, copy, view)
    kinds = OPERANDS if len(shape) == 2 else (*HALVES, DType.F32, DType.BOOL)
    if buffer.dtype not in kinds or not isinstance(view.value, Load) or not isinstance(view.value.source, Tensor):
        raise CudaError(
            f"operand {view.name} is {view.value}: tensor copies bring {', '.join(map(str, kinds))} tensors as they "
            "are; compute such a prologue in a kernel of its own"
        )
    tensor = view.value.source
    if tensor.dtype is not buffer.dtype:
        raise CudaError(f"operand {view.name} is {tensor.dtype} but its tile {buffer.dtype}; a tensor copy cannot cast")
    if not len(shape) <= len(tensor.shape) <= MAX_RANK:
        raise CudaError(f"{tensor.name} has {len(tensor.shape)} dims; tensor copies read {len(shape)} to {MAX_RANK}")
    dims, origin = _rectangle(view, tensor, copy, alone)
    inner_axis = next((inner for inner, dim in enumerate(dims) if dim == len(tensor.shape) - 1), None)
    if inner_axis is None:
        raise CudaError(f"no axis of {view.name} is the last of {tensor.name}: tensor copies need one to be contiguous")
    if len(shape) == 1:
        if shape[0] > MAX_BOX or shape[0] * buffer.dtype.row.bytes % LINE_BYTES:
            raise CudaError(
                f"tile {buffer.name} has {shape[0]} elements of {buffer.dtype}: lines have up to {MAX_BOX}, and a "
                f"multiple of {LINE_BYTES} bytes"
            )
    elif shape[inner_axis] * buffer.dtype.row.bytes % SWIZZLE or not _boxes(shape[1 - inner_axis]):
        raise CudaError(
            f"tile {buffer.name} is {shape[0]} x {shape[1]}: along its contiguous axis it needs a multiple of "
            f"{SWIZZLE // buffer.dtype.row.bytes} elements, along the other a multiple of 8 up to {MAX_BOX}"
        )
    return Staged(buffer, tensor, inner_axis, dims, origin)


def _boxes(rows: int) -> bool:
    return rows % 8 == 0 and rows <= MAX_BOX


def _levels(buffer: Buffer, copy: Copy, view: View) -> Staged:
    """The bytes that hold levels of a computed left operand. Zeros beyond the depth meet zeros of the other side."""
    found = decoding_of(view)
    rows, depth = extents(buffer)
    if (buffer.scope, tile_axes(copy.src, copy.dst)) != ("shared", ((1, 0), (2, 1))):
        raise CudaError(f"{view.name} is decoded into {buffer.name}: rows and the depth as they come are supported")
    if depth % DECODED or rows > MAX_BOX or depth * found.bits // 8 % STEP_BYTES:
        raise CudaError(f"tile {buffer.name} is {rows} x {depth}: levels are decoded in steps of {DECODED}")
    _, row, k = copy.src.origin
    return Staged(buffer, found.tensor, 1, (0, 1), (row, k * found.bits // const(8)), found)


def read_beside(tile: Staged) -> tuple[Tensor, ...]:
    """Tensors that decoding a tile reads element by element, such as scales."""
    assert tile.decoding is not None
    found = (load.source for load in loads(tile.decoding.value))
    return tuple(dict.fromkeys(source for source in found if isinstance(source, Tensor)))


def _rectangle(
    view: View, tensor: Tensor, copy: Copy, alone: set[tuple[str, int]]
) -> tuple[tuple[int, ...], tuple[Expr, ...]]:
    """(dims of the tensor that the tile's axes walk, its origin per dim)."""
    assert isinstance(view.value, Load)
    assert isinstance(copy.dst.source, Buffer)
    buffer = copy.dst.source
    steps = tuple(Var(f"step_{axis}") for axis in range(len(buffer.shape)))
    moved: dict[Expr, Expr] = dict(zip(view.axes, copy.src.origin, strict=True))
    axes: dict[int, int] = {}
    for outer, inner in tile_axes(copy.src, copy.dst):
        moved[view.axes[outer]] = copy.src.origin[outer] + steps[inner]
        axes[inner] = outer
    dims: dict[int, int] = {}
    origin: list[Expr] = []
    for dim, position in enumerate(view.value.index):
        rest = substitute(position, moved)
        for inner, step in enumerate(steps):
            coefficient, other = split_affine(rest, step)
            if other is None or coefficient not in (const(0), const(1)):
                raise CudaError(f"dim {dim} of {tensor.name} is read at {position}: tensor copies take whole runs")
            if coefficient == const(1):
                if inner in dims:
                    raise CudaError(f"{tensor.name} is read along a diagonal: one dim per axis of {view.name}")
                dims[inner] = dim
                if (buffer.name, inner) not in alone:
                    _check_clip(view, axes[inner], dim, buffer, inner)
            rest = other
        origin.append(rest)
    if set(dims) != set(range(len(steps))) or len(set(dims.values())) < len(dims):
        raise CudaError(f"{view.name} is no rectangle of {tensor.name}: each axis of a tile walks a dim of its own")
    return tuple(dims[inner] for inner in range(len(steps))), tuple(origin)


def _check_clip(view: View, axis: int, dim: int, buffer: Buffer, inner: int) -> None:
    """Beyond the view a tile must read zeros: either it ends where the tensor does, or tiles divide it."""
    assert isinstance(view.value, Load)
    extent, block = view.shape[axis], extents(buffer)[inner]
    if view.value.index[dim] == view.axes[axis] and view.value.source.shape[dim] == extent:
        return
    if not isinstance(extent, Const) or int(extent.value) % block:
        raise CudaError(
            f"axis {axis} of {view.name} ({extent} elements) is a part of dim {dim} of {view.value.source.name} and "
            f"not a multiple of the tile's {block}: its last tile would read what stands behind it"
        )


def _check_product(gemm: Gemm, staged: Mapping[str, Staged], fragments: Mapping[str, int],
                   computed: tuple[str, ...], parts: int) -> None:  # fmt: skip
    if gemm.c.name not in fragments:
        raise CudaError(f"the product in {gemm.c.name} is {gemm.c.dtype}; warpgroups sum in f32")
    depth = depth_axes(gemm)
    if gemm.b.name in computed:
        if depth[1][1] != 0 or gemm.b.name == gemm.a.name:
            raise CudaError(
                f"{gemm.b.name} is computed in the kernel and multiplied transposed; its rows are the depth"
            )
    elif gemm.b.name not in staged:
        raise CudaError(f"the right operand {gemm.b.name} is neither copied from memory nor a tile of 16-bit floats")
    if gemm.a.name not in staged and gemm.a.name not in computed:
        raise CudaError(f"the left operand {gemm.a.name} is neither copied from memory nor a fragment")
    if gemm.a.dtype is not gemm.b.dtype:
        raise CudaError(f"{gemm.a.name} is {gemm.a.dtype} and {gemm.b.name} is {gemm.b.dtype}; products take one type")
    deep, step = extents(gemm.a)[depth[0][1]], STEP_BYTES // gemm.a.dtype.row.bytes
    if deep % step:
        raise CudaError(f"the depth of {gemm.a.name} is {deep}; products go {step} deep")
    for operand, axis in zip((gemm.a, gemm.b), depth, strict=True):
        tile = staged.get(operand.name)
        if operand.dtype in EIGHTHS and (tile is None or tile.contiguous != axis[1]):
            raise CudaError(f"{operand.name} is {operand.dtype}: products of 8 bits take operands that are contiguous "
                            "along the depth; store it transposed")  # fmt: skip
    if gemm.b.name in staged and staged[gemm.b.name].decoding is not None:
        raise CudaError(f"the right operand {gemm.b.name} is decoded; that is done in registers, for left ones")
    if parts > 1 and gemm.a.name in computed and deep % CHUNK:
        raise CudaError(f"{gemm.a.name} is shared by warpgroups: its depth must be a multiple of {CHUNK}")
    if gemm.b.name in computed:
        return
    right = staged[gemm.b.name]
    if right.contiguous != depth[1][1] and extents(gemm.c)[1] % (CHUNK * parts):
        raise CudaError(f"{gemm.b.name} is contiguous along columns, which must then be a multiple of {CHUNK * parts}")


def stored_rectangle(stmt: Parallel) -> tuple[Place, tuple[int, int], tuple[Expr, ...]] | None:
    """(place, tensor dims of rows and columns, origin) where the statement stores one plain rectangle of a tensor."""
    if len(stmt.body) != 1 or len(stmt.axes) != 2 or not isinstance(stmt.body[0].target, Place):
        return None
    place = stmt.body[0].target
    moved = dict[Expr, Expr](zip(place.axes, stmt.body[0].index, strict=True))
    dims: dict[int, int] = {}
    origin: list[Expr] = []
    for dim, position in enumerate(place.index):
        rest = substitute(position, moved)
        for inner, var in enumerate(stmt.axes):
            coefficient, other = split_affine(rest, var)
            if other is None or coefficient not in (const(0), const(1)):
                return None
            if coefficient == const(1):
                if inner in dims:
                    return None
                dims[inner] = dim
            rest = other
        origin.append(rest)
    if set(dims) != {0, 1} or dims[0] == dims[1]:
        return None
    return place, (dims[0], dims[1]), tuple(origin)
