"""What a call of a kernel has room for is refused in Python, with the numbers that the C headers have."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import KernelError, TileError
from tilecore import language as T
from tilecore.compile import MAX_INPUTS, MAX_OUTPUTS, MAX_RANK, MAX_SYMBOLS, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, const
from tilecore.contract.spec import Place, Result, RowSpec, Tensor
from tilecore.emit_expr import EmitError
from tilecore.profile import detect_profile

ROOT = Path(__file__).parents[2]


def sum_of(count: int) -> RowSpec:
    """y[r, c] = the sum of `count` inputs."""
    rows = Sym("n")
    row, column = Var("r", extent=rows), Var("c", extent=const(4))
    inputs = tuple(Tensor(f"x{i}", DType.F32, (rows, const(4))) for i in range(count))
    total: Expr = const(0.0)
    for tensor in inputs:
        total = total + Load(tensor, (row, column))
    place = Place(Tensor("y", DType.F32, (rows, const(4))), (row, column), (row, column))
    return RowSpec(inputs, row, column, (), (Result(place, total),))


def test_inputs_beyond_those_of_a_call_are_refused() -> None:
    profile = detect_profile()
    kernel = compile_spec(sum_of(MAX_INPUTS), label="Sum", profile=profile, targets=(profile.target,))
    assert len(kernel.spec.inputs) == MAX_INPUTS
    with pytest.raises(EmitError, match=f"{MAX_INPUTS + 1} inputs: a call of a kernel has room for {MAX_INPUTS}"):
        compile_spec(sum_of(MAX_INPUTS + 1), label="Sum", profile=profile, targets=(profile.target,))


@pytest.mark.parametrize(
    ("name", "header", "limit"),
    [
        ("TILE_MAX_INPUTS", "runtime/csrc/kernel_call.h", MAX_INPUTS),
        ("TILE_MAX_OUTPUTS", "runtime/csrc/kernel_call.h", MAX_OUTPUTS),
        ("TILE_MAX_SYMBOLS", "tilecore/csrc/tile_kernel.h", MAX_SYMBOLS),
        ("TILE_MAX_RANK", "tilecore/csrc/tile_kernel.h", MAX_RANK),
    ],
)
def test_the_limits_are_those_of_the_hosts(name: str, header: str, limit: int) -> None:
    found = re.search(rf"#define {name} (\d+)", (ROOT / header).read_text())
    assert found is not None
    assert int(found[1]) == limit


WHERE = {
    "a tile": lambda n: T.clear(T.alloc_shared((n, n), T.int8)),
    "a tensor": lambda n: T.Tensor((n, n), T.int8),
    "a grid": lambda n: T.Kernel(n, n).__enter__(),
}


@pytest.mark.parametrize("what", WHERE)
@pytest.mark.parametrize("size", [2**31, 2**62, 2**63, 2**80])
def test_what_no_memory_holds_is_refused_where_it_stands(what: str, size: int) -> None:
    """Bytes beyond 64 bits wrapped around to a few: the kernel wrote past its scratch."""
    make: Callable[[int], Any] = WHERE[what]

    def kernel(C: T.Tensor((4,), "int8")) -> None:  # type: ignore[valid-type]
        if what == "a grid":
            make(size)
        with T.Kernel(1) as _:
            make(size)
            T.clear(C)

    with pytest.raises(TileError) as caught:
        tilecore.compile(T.prim_func(kernel), out_idx=0)
    text = str(caught.value)
    assert f"an extent of {size}" in text or f"{what} of [{size}, {size}] is {size * size} bytes" in text
    assert "instead:" in text
    assert "^^^" in text


def test_a_negative_dim_is_refused() -> None:
    with pytest.raises(TileError, match="a tensor with a dim of -1"):
        T.Tensor((4, -1), "float32")


def test_a_tile_that_a_call_makes_too_large_is_refused(object_cache: Path) -> None:
    n = T.dynamic("n")

    @T.prim_func
    def kernel(X: T.Tensor((n,), "int8"), C: T.Tensor((n,), "int8")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            tile = T.alloc_shared((n, n, n), "int8")
            T.clear(tile)
            for i in T.Parallel(n):
                C[i] = X[i] + tile[i, i, i]

    compiled = tilecore.compile(kernel, out_idx=1, cache=object_cache)
    np.testing.assert_array_equal(compiled(np.array([5, 6], np.int8)), [5, 6])
    with pytest.raises(KernelError, match=r"no memory holds tile, a tile of \[4194304, 4194304, 4194304\]"):
        compiled(np.zeros(1 << 22, np.int8))  # 2**66 bytes, of which 64 bits hold 0
