"""The numpy interpreter of tile programs: the oracle of compiled code and the debugger of kernel authors.

Comes in: a concrete program (no tunables) and its input arrays. Goes out: its outputs. Nothing here is fast. Fresh
tile buffers and outputs hold a poison (NaN, or the smallest integer), so that an
element read before it is written shows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import REDUCE, Evaluator
from tilecore.contract.expr import Expr, Sym, Var
from tilecore.contract.spec import Place, View
from tilecore.expand import neutral
from tilecore.ir import (
    Assert,
    Buffer,
    Copy,
    CumSum,
    Fill,
    For,
    Gemm,
    If,
    Join,
    Parallel,
    Print,
    Program,
    Reduce,
    Stmt,
    Store,
    Tile,
    While,
    updated_tensors,
)

Env = Mapping[Var, Any]
JOIN: dict[str, Any] = {
    "sum": np.add, "max": np.maximum, "fmax": np.maximum, "min": np.minimum, "prod": np.multiply,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
}  # fmt: skip
UPDATE: dict[str, Any] = {"add": np.add, "max": np.maximum, "min": np.minimum}


def interpret(program: Program, arrays: Mapping[str, Any], *, wide: bool = True) -> dict[str, np.ndarray]:
    """Every output of `program`, by name, for the inputs `arrays`. `wide` computes every float type in float64.

    An output that the program updates starts from `arrays`, or from 0.

    ValueError for a program that still has tunables, a missing input, or inputs whose shapes do not agree.
    """
    if program.tunables:
        raise ValueError(f"{program.name} has tunables {', '.join(map(str, program.tunables))}: trace it with extents")
    symbols = _bind(program, arrays)
    shapes = Evaluator({}, symbols)
    outputs = {}
    updated = updated_tensors(program)
    for tensor in program.outputs:
        shape = tuple(int(shapes(dim)) for dim in tensor.shape)
        fresh = _poisoned(shape, tensor.dtype, Evaluator({}, symbols, wide=wide))
        if tensor in updated:
            fresh = np.array(arrays.get(tensor.name, np.zeros(shape)), fresh.dtype)
        outputs[tensor.name] = fresh
    sizes = [int(shapes(axis.extent)) for axis in program.grid if axis.extent is not None]
    joined = {stmt.axis for stmt in program.body if isinstance(stmt, Join)}
    apart = [1 if axis in joined else size for axis, size in zip(program.grid, sizes, strict=True)]
    shared = [size if axis in joined else 1 for axis, size in zip(program.grid, sizes, strict=True)]
    for start in np.ndindex(*apart):
        _run_together(program, shapes, [np.add(start, step) for step in np.ndindex(*shared)], arrays, outputs, wide)
    return outputs


def _run_together(program: Program, shapes: Evaluator, points: list[Any], arrays: Mapping[str, Any],
                  outputs: dict[str, np.ndarray], wide: bool) -> None:  # fmt: skip
    """Tasks that meet at joins."""
    tasks: list[_Task] = []
    for _ in points:
        tiles: dict[str, Any] = {}
        evaluator = Evaluator(arrays, shapes.symbols, wide=wide, tiles=tiles)
        for buffer in program.buffers:
            shape = tuple(int(shapes(dim)) for dim in buffer.shape)
            tiles[buffer.name] = _poisoned(shape, buffer.dtype, evaluator)
        tasks.append(_Task(evaluator, tiles, outputs))
    with np.errstate(all="ignore"):
        running = [
            task.block(program.body, dict(zip(program.grid, map(np.int64, point), strict=True)))
            for task, point in zip(tasks, points, strict=True)
        ]
        while met := [stmt for stmt in (next(task, None) for task in running) if stmt is not None]:
            name = met[0].buffer.name
            value = REDUCE[met[0].kind](np.stack([task.tiles[name] for task in tasks]), axis=0)
            for task in tasks:
                task.tiles[name][...] = value


def _bind(program: Program, arrays: Mapping[str, Any]) -> dict[str, int]:
    values: dict[str, int] = {}
    for tensor in program.inputs:
        if tensor.name not in arrays:
            raise ValueError(f"no array for the input {tensor}")
        shape = np.shape(arrays[tensor.name])
        if len(shape) != len(tensor.shape):
            raise ValueError(f"{tensor} is given with shape {shape}")
        for dim, size in zip(tensor.shape, shape, strict=True):
            if isinstance(dim, Sym):
                values.setdefault(dim.name, size)
    run = Evaluator({}, values)
    for tensor in program.inputs:
        expected = tuple(int(run(dim)) for dim in tensor.shape)
        if expected != np.shape(arrays[tensor.name]):
            raise ValueError(f"{tensor} should be {expected} here, and is {np.shape(arrays[tensor.name])}")
    return values


def _poisoned(shape: tuple[int, ...], dtype: DType, run: Evaluator) -> np.ndarray:
    kind = run.numpy_type(dtype)
    poison = np.nan if dtype.is_float else False if dtype is DType.BOOL else np.iinfo(kind).min
    return np.full(shape, poison, kind)


@dataclass(frozen=True, slots=True)
class _Task:
    """One point of the grid: its buffers, and the outputs that all tasks share."""

    run: Evaluator
    tiles: dict[str, Any]
    outputs: dict[str, np.ndarray]

    def block(self, body: tuple[Stmt, ...], env: Env) -> Iterator[Join]:
        """Run `body` in order, up to each join, which whoever runs the tasks carries out."""
        for stmt in body:
            yield from self._statement(stmt, env)

    def _statement(self, stmt: Stmt, env: Env) -> Iterator[Join]:
        match stmt:
            case Join():
                yield stmt
            case Copy():
                self._copy(stmt, env)
            case Fill():
                self.tiles[stmt.dst.name][...] = self.run(stmt.value, env)
            case Gemm():
                self._gemm(stmt)
            case Reduce():
                self._reduce(stmt)
            case CumSum():
                self._cumsum(stmt)
            case Store():
                self._store(stmt, env, ())
            case Parallel():
                sizes = [self._number(axis.extent, env) for axis in stmt.axes]
                grid = np.meshgrid(*map(np.arange, sizes), indexing="ij", sparse=True)
                for store in stmt.body:
                    self._store(store, {**env, **dict(zip(stmt.axes, grid, strict=True))}, tuple(sizes))
            case For():
                for value in range(self._number(stmt.start, env), self._number(stmt.var.extent, env)):
                    yield from self.block(stmt.body, {**env, stmt.var: np.int64(value)})
            case While():
                while bool(self.run(stmt.condition, env)):
                    yield from self.block(stmt.body, env)
            case Print():
                if isinstance(stmt.values, Buffer):
                    found = [self.tiles[stmt.values.name]]
                else:
                    found = [self.run(value, env) for value in stmt.values]
                print(stmt.message, *found)
            case Assert():
                if not bool(self.run(stmt.condition, env)):
                    raise AssertionError(stmt.span.render(stmt.message) if stmt.span else stmt.message)
            case If():
                yield from self.block(stmt.then if bool(self.run(stmt.condition, env)) else stmt.otherwise, env)

    def _number(self, expr: Expr | None, env: Env) -> int:
        if expr is None:
            raise ValueError("a loop variable without an extent")
        return int(self.run(expr, env))

    def _copy(self, stmt: Copy, env: Env) -> None:
        index, shape = self._indices(stmt.src, env)
        source = stmt.src.source
        if isinstance(source, View):
            value = np.broadcast_to(self.run.read(source, _grids(index)), shape)
        else:
            value = self.tiles[source.name][tuple(_grids(index))]
        index, shape = self._indices(stmt.dst, env)
        self._write(stmt.dst.source, _grids(index), np.reshape(value, shape))

    def _indices(self, tile: Tile, env: Env) -> tuple[list[Any], tuple[int, ...]]:
        """One range of positions per axis of the tile's source."""
        starts = [self._number(start, env) for start in tile.origin]
        shape = tuple(self._number(size, env) for size in tile.shape)
        return [np.arange(start, start + size) for start, size in zip(starts, shape, strict=True)], shape

    def _gemm(self, stmt: Gemm) -> None:
        a, b, c = (self.tiles[tile.name] for tile in (stmt.a, stmt.b, stmt.c))
        left = (a.T if stmt.transpose_a else a).astype(c.dtype)
        right = (b.T if stmt.transpose_b else b).astype(c.dtype)
        product = np.matmul(left, right)
        self.tiles[stmt.c.name] = product if stmt.clear else c + product

    def _reduce(self, stmt: Reduce) -> None:
        src, dst = self.tiles[stmt.src.name], self.tiles[stmt.dst.name]
        if not src.shape[stmt.axis]:
            value = np.full(dst.shape, neutral(stmt.kind, stmt.src.dtype))
        elif stmt.kind in REDUCE:
            value = REDUCE[stmt.kind](src, axis=stmt.axis).reshape(dst.shape)
        else:
            value = JOIN[stmt.kind].reduce(src, axis=stmt.axis).reshape(dst.shape)
        dst[...] = value if stmt.clear else JOIN[stmt.kind](dst, value)

    def _cumsum(self, stmt: CumSum) -> None:
        way = slice(None, None, -1) if stmt.reverse else slice(None)
        values = np.moveaxis(self.tiles[stmt.src.name], stmt.axis, -1)[..., way]
        sums = np.cumsum(values, axis=-1, dtype=values.dtype)[..., way]
        self.tiles[stmt.dst.name][...] = np.moveaxis(sums, -1, stmt.axis)

    def _store(self, stmt: Store, env: Env, sizes: tuple[int, ...]) -> None:
        index = [np.broadcast_to(self.run(entry, env), sizes) for entry in stmt.index]
        value = np.broadcast_to(self.run(stmt.value, env), sizes)
        if stmt.guard is None:
            self._write(stmt.target, index, value, update=stmt.update)
            return
        here = np.broadcast_to(self.run(stmt.guard, env), sizes)
        self._write(stmt.target, [entry[here] for entry in index], value[here], update=stmt.update)

    def _write(self, target: Buffer | View | Place, index: list[Any], value: Any, *, update: str = "") -> None:
        """Element writes; those outside the logical extents of a place are dropped."""
        if isinstance(target, Place):
            keep = np.ones(np.shape(value), bool)
            env = dict(zip(target.axes, index, strict=True))
            for entry, dim in zip(index, target.shape, strict=True):
                keep = keep & (entry >= 0) & (entry < self.run(dim, env))
            axes = {
                axis: np.broadcast_to(entry, keep.shape)[keep] for axis, entry in zip(target.axes, index, strict=True)
            }
            where = tuple(np.broadcast_to(self.run(entry, axes), (int(keep.sum()),)) for entry in target.index)
            array = self.outputs[target.name]
            if not where:  # a tensor of no axes has one element
                array, where = array.reshape(1), (np.zeros(int(keep.sum()), np.int64),)
            if update:
                UPDATE[update].at(array, where, value[keep].astype(array.dtype))
            else:
                array[where] = value[keep].astype(array.dtype)
        else:
            array = self.tiles[target.name]
            array[tuple(index)] = np.asarray(value).astype(array.dtype)


def _grids(ranges: list[Any]) -> list[Any]:
    return list(np.meshgrid(*ranges, indexing="ij", sparse=True))
