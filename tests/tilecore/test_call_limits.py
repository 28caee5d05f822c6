"""What a call of a kernel has room for is refused in Python, with the numbers that the C headers have."""

import re
from pathlib import Path

import pytest

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
