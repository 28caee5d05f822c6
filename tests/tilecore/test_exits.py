"""`break` and `continue` in kernels: random texts of nested loops, run by Python itself and as programs.

The one text is a kernel for the tile language, and a function for Python, whose `T` then is a few plain functions.
"""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import TileError
from tilecore import language as T

pytestmark = pytest.mark.cpu
COUNT = 24
PLAIN = SimpleNamespace(
    Tensor=lambda *_: None, Kernel=lambda *_: nullcontext(0), alloc_var=lambda _, init: init, serial=range,
    prim_func=lambda function: function, int32="int32",
)  # fmt: skip


class Writer:
    """Writes one function. Cells hold numbers below 97; a `while` counts its turns."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.counters = 0

    def text(self) -> str:
        """The whole module."""
        body = self.block(0, [])
        cells = [f"{name} = T.alloc_var('int32', init={place})" for place, name in enumerate("abc")]
        cells += [f"w{number} = T.alloc_var('int32', init=0)" for number in range(self.counters)]
        lines = [*cells, *body, *(f"S[{place}] = {name}" for place, name in enumerate("abc"))]
        head = ["@T.prim_func", f"def kernel(X: T.Tensor(({COUNT},), T.int32), S: T.Tensor((3,), T.int32)):"]
        return "\n".join([*head, "    with T.Kernel(1) as _:", *(f"        {line}" for line in lines)]) + "\n"

    def block(self, depth: int, loops: list[str]) -> list[str]:
        """One statement or more, inside the loops over these variables."""
        kinds = [self.assign, self.assign, self.branch, *([self.loop, self.turns] if depth < 3 else [])]
        kinds += [self.leave] * 2 if loops else []
        count = int(self.rng.integers(1, 4)) + (depth == 0)
        return [line for _ in range(count) for line in kinds[int(self.rng.integers(len(kinds)))](depth, loops)]

    def cell(self) -> str:
        return str(self.rng.choice(["a", "b", "c"]))

    def test(self) -> str:
        return f"{self.cell()} % {self.rng.integers(2, 5)} == {self.rng.integers(2)}"

    def assign(self, depth: int, loops: list[str]) -> list[str]:
        places = [name for name in loops if name.startswith("i")] or ["3"]
        place = str(self.rng.choice(places))
        return [f"{self.cell()} = ({self.cell()} * 3 + X[{place}] + {self.rng.integers(9)}) % 97"]

    def branch(self, depth: int, loops: list[str]) -> list[str]:
        if depth > 4:
            return self.assign(depth, loops)
        found = [f"if {self.test()}:", *self.indented(self.block(depth + 1, loops))]
        if self.rng.random() < 0.4:
            found += ["else:", *self.indented(self.block(depth + 1, loops))]
        return found

    def loop(self, depth: int, loops: list[str]) -> list[str]:
        maker, name = str(self.rng.choice(["T.serial", "range"])), f"i{depth}"
        return [
            f"for {name} in {maker}({self.rng.integers(1, 6)}):",
            *self.indented(self.block(depth + 1, [*loops, name])),
        ]

    def turns(self, depth: int, loops: list[str]) -> list[str]:
        name, most = f"w{self.counters}", self.rng.integers(1, 6)
        self.counters += 1
        count = [f"{name} = {name} + 1"]
        if self.rng.random() < 0.5:
            head, first = "while True:", [f"if {name} >= {most}:", "    break"]
        else:
            head, first = f"while {name} < {most}:", []
        return [f"{name} = 0", head, *self.indented([*first, *count, *self.block(depth + 1, [*loops, name])])]

    def leave(self, depth: int, loops: list[str]) -> list[str]:
        word = str(self.rng.choice(["break", "continue"]))
        before = self.assign(depth, loops) if self.rng.random() < 0.4 else []
        return [f"if {self.test()}:", *self.indented([*before, word])]

    @staticmethod
    def indented(lines: list[str]) -> list[str]:
        return [f"    {line}" for line in lines]


def loaded(path: Path, language: Any) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    module.__dict__["T"] = language
    spec.loader.exec_module(module)
    return module.__dict__["kernel"]


@pytest.mark.parametrize("seed", range(40))
def test_exits_are_where_python_has_them(seed: int, tmp_path: Path, object_cache: Path) -> None:
    path = tmp_path / f"text_{seed}.py"
    path.write_text(Writer(seed).text())
    x, wanted = np.random.default_rng(seed).integers(0, 50, COUNT).astype(np.int32), np.zeros(3, np.int32)
    loaded(path, PLAIN)(x.tolist(), wanted)
    found = tilecore.compile(loaded(path, T), out_idx=1, cache=object_cache, threads=1)(x)
    np.testing.assert_array_equal(found, wanted, path.read_text())


def test_points_that_are_left_out(object_cache: Path) -> None:
    @T.prim_func
    def kernel(X: T.Tensor((COUNT,), "int32"), Y: T.Tensor((COUNT,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(COUNT):
                if X[i] < 5:
                    Y[i] = 0
                    continue
                Y[i] = X[i] * 2

    x = np.arange(COUNT, dtype=np.int32)
    found = tilecore.compile(kernel, out_idx=1, cache=object_cache)(x)
    np.testing.assert_array_equal(found, np.where(x < 5, 0, 2 * x))


def test_points_with_an_exit_that_python_leaves_out(object_cache: Path) -> None:
    @T.prim_func
    def kernel(Y: T.Tensor((COUNT,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(COUNT):
                if i < 5:
                    if COUNT < 0:
                        continue
                    Y[i] = 1
                Y[i] = 2

    np.testing.assert_array_equal(tilecore.compile(kernel, out_idx=0, cache=object_cache)(), np.full(COUNT, 2))


def test_rows_until_one_is_too_large(object_cache: Path) -> None:
    """Statements on whole tiles stand behind the exit."""

    @T.prim_func
    def kernel(X: T.Tensor((8, 20), "float32"), Y: T.Tensor((20,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            row, total = T.alloc_fragment((1, 20), "float32"), T.alloc_fragment((20,), "float32")
            top = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for i in T.Pipelined(8):
                T.copy(X[i, 0], row)
                T.reduce_max(row, top, dim=1)
                if top[0] > 2.0:
                    break
                for j in T.Parallel(20):
                    total[j] += row[0, j]
            T.copy(total, Y)

    compiled = tilecore.compile(kernel, out_idx=1, cache=object_cache)
    for seed in range(5):
        x = np.random.default_rng(seed).standard_normal((8, 20)).astype(np.float32)
        first = next((place for place, row in enumerate(x) if row.max() > 2), 8)
        np.testing.assert_allclose(compiled(x), x[:first].astype(np.float64).sum(0), rtol=1e-5, atol=1e-6)


def test_a_break_by_name(object_cache: Path) -> None:
    @T.prim_func
    def kernel(X: T.Tensor((COUNT,), "int32"), Y: T.Tensor((1,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            count = T.alloc_var("int32", init=0)
            for i in T.serial(COUNT):
                if X[i] == 7:
                    T.loop_break()  # type: ignore[attr-defined]
                count = count + 1
            Y[0] = count

    assert tilecore.compile(kernel, out_idx=1, cache=object_cache)(np.arange(COUNT, dtype=np.int32)) == [7]


def test_more_blocks_than_python_nests_are_refused_with_their_place(tmp_path: Path) -> None:
    tests = [f"{'    ' * (place + 2)}if X[{place}] > 0:" for place in range(21)]
    head = [f"def kernel(X: T.Tensor(({COUNT},), T.int32), S: T.Tensor((1,), T.int32)):", "    with T.Kernel(1) as _:"]
    path = tmp_path / "deep.py"
    path.write_text("\n".join(["@T.prim_func", *head, *tests, f"{'    ' * 23}S[0] = 1"]) + "\n")
    with pytest.raises(
        TileError, match=r"deep.py:\d+.*too many statically nested blocks in kernel, where every `if`"
    ) as caught:
        loaded(path, T)
    assert "a T.macro for the inner blocks" in str(caught.value)


def test_a_break_inside_parallel_points_is_refused() -> None:
    @T.prim_func
    def kernel(X: T.Tensor((COUNT,), "int32"), Y: T.Tensor((COUNT,), "int32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(COUNT):
                for _j in T.serial(3):
                    if X[i] < 5:
                        break
                    Y[i] = X[i]

    with pytest.raises(TileError) as caught:
        tilecore.compile(kernel, out_idx=1)
    text = str(caught.value)
    assert "a break inside T.Parallel, whose points run at once" in text
    assert "|                         ^^^^^" in text
    assert "`if c: continue` alone may stand in the body of T.Parallel itself" in text
