"""Biases and masks of scores by tensor copies: what a loop reads of memory element by element becomes a tile beside it.

Comes in: a program whose parallel loops load tensors. Goes out: the same one, in which every such load in the loop over
tiles that walks a rectangle of a 16-bit tensor, or a run of one row of flags or floats, reads a tile that is copied
just before. What copies cannot bring (rows of other than a multiple of 16 bytes, other strides) is read as before.
"""

from collections.abc import Iterator
from dataclasses import replace

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Const, Expr, Load, Var, const, loads, rewrite, substitute, variables
from tilecore.contract.spec import Tensor, View
from tilecore.cuda.roles import LINE_BYTES, MAX_BOX, MAX_RANK, SWIZZLE
from tilecore.cuda.values import HALVES
from tilecore.graph import split_affine
from tilecore.ir import Buffer, Copy, For, Gemm, Parallel, Program, Stmt, Tile, statements

PITCH = 16  # bytes of which rows of a tensor that is copied are a multiple


def stage_elements(program: Program) -> Program:
    """`program` with tiles of what its loop of products reads beside them."""
    stager = _Stager(program)
    body = tuple(
        stager.loop(stmt) if isinstance(stmt, For) and any(isinstance(one, Gemm) for one in stmt.body) else stmt
        for stmt in program.body
    )
    return replace(program, body=body, buffers=(*program.buffers, *stager.buffers))


class _Stager:
    """What a walk over one program adds to it."""

    def __init__(self, program: Program) -> None:
        self.taken = {buffer.name for buffer in program.buffers}
        self.bound = set(program.grid)
        self.buffers: list[Buffer] = []

    def loop(self, loop: For) -> For:
        """The loop with its copies."""
        body: list[Stmt] = []
        for stmt in loop.body:
            if isinstance(stmt, Parallel) and len(stmt.axes) == 2:
                copies, stmt = self._staged(stmt, {*self.bound, loop.var})
                body += copies
            body.append(stmt)
        return replace(loop, body=tuple(body))

    def _staged(self, stmt: Parallel, known: set[Var]) -> tuple[list[Copy], Parallel]:
        copies: list[Copy] = []
        read: dict[Expr, Expr] = {}
        for load in dict.fromkeys(load for store in stmt.body for load in loads(store.value)):
            axes = _walked(load, stmt, known)
            if axes is None:
                continue
            copy = self._copy(load, axes, stmt)
            copies.append(copy)
            assert isinstance(copy.dst.source, Buffer)
            read[load] = Load(copy.dst.source, axes, load.span)
        if not read:
            return [], stmt
        return copies, replace(
            stmt, body=tuple(replace(store, value=rewrite(store.value, read.get)) for store in stmt.body)
        )

    def _copy(self, load: Load, axes: tuple[Var, ...], stmt: Parallel) -> Copy:
        tensor = load.source
        assert isinstance(tensor, Tensor)
        name = f"{tensor.name}_tile"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        shape = tuple(axis.extent for axis in axes if axis.extent is not None)
        buffer = Buffer(name, tensor.dtype, shape, "shared", stmt.span)
        self.buffers.append(buffer)
        dims = tuple(Var(f"{name}_{dim}", extent=extent) for dim, extent in enumerate(tensor.shape))
        view = View(name, dims, Load(tensor, dims))
        start: dict[Expr, Expr] = {axis: const(0) for axis in stmt.axes}
        origin = tuple(substitute(position, start) for position in load.index)
        extents = tuple(
            next((axis.extent for axis in axes if axis in variables(position) and axis.extent is not None), const(1))
            for position in load.index
        )
        zero = tuple(const(0) for _ in shape)
        return Copy(Tile(view, origin, extents), Tile(buffer, zero, shape), stmt.span)


def _walked(load: Load, stmt: Parallel, known: set[Var]) -> tuple[Var, ...] | None:
    """The loop's axes that a load walks, one dim each and the columns along the last one; None for other loads."""
    tensor, (rows, columns) = load.source, stmt.axes
    if not isinstance(tensor, Tensor) or not len(tensor.shape) <= MAX_RANK or not _copied(tensor):
        return None
    walked = [[axis for axis in stmt.axes if axis in variables(position)] for position in load.index]
    axes = (rows, columns) if any(rows in own for own in walked) else (columns,)
    if walked[-1] != [columns] or sorted(map(len, walked)) != [0] * (len(walked) - len(axes)) + [1] * len(axes):
        return None
    for position, own in zip(load.index, walked, strict=True):
        if own:
            coefficient, rest = split_affine(position, own[0])
            if rest is None or coefficient != const(1):
                return None
        if loads(position) or not set(variables(position)) <= known | set(stmt.axes):
            return None
    return axes if _fits(tensor.dtype, axes) else None


def _copied(tensor: Tensor) -> bool:
    """Whether tensor copies can bring its rows, whatever array it is."""
    size, last = tensor.dtype.row.bytes, tensor.shape[-1]
    return len(tensor.shape) == 1 or (isinstance(last, Const) and int(last.value) * size % PITCH == 0)


def _fits(dtype: DType, axes: tuple[Var, ...]) -> bool:
    extents = [axis.extent for axis in axes]
    if not all(isinstance(extent, Const) and int(extent.value) <= MAX_BOX for extent in extents):
        return False
    *_, columns = (int(extent.value) for extent in extents if isinstance(extent, Const))
    size = columns * dtype.row.bytes
    if len(axes) == 2:
        return dtype in HALVES and size % SWIZZLE == 0
    if dtype is DType.BOOL:
        return size == LINE_BYTES  # four of each thread of a warp
    return dtype in (*HALVES, DType.F32) and size % LINE_BYTES == 0


def elements_beside(loop: For) -> Iterator[Copy]:
    """Copies in a loop of what is no operand of its products."""
    operands = {buffer for stmt in statements(loop.body) if isinstance(stmt, Gemm) for buffer in (stmt.a, stmt.b)}
    for stmt in loop.body:
        if isinstance(stmt, Copy) and isinstance(stmt.src.source, View) and stmt.dst.source not in operands:
            yield stmt
