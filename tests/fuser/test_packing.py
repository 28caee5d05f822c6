"""Packed weights: the panels hold the kernel's matrix, and what cannot be packed is refused with a reason."""

import numpy as np
import onnx_ir as ir
import pytest

from fuser.packing import PackingError, packing
from fuser.region import Region
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, const
from tilecore.contract.panel import unpack
from tilecore.contract.spec import ContractionSpec, Place, Result, Tensor, View

K, N = 12, 20


def region(shape: tuple[int, ...], index: list[str], *, columns: int = N, constant: bool = True) -> Region:
    """A contraction whose right side is a constant of `shape`, read at `index` (Python expressions over k and n)."""
    b = Var("b", extent=const(1))
    m, k, n = Var("m", extent=Sym("rows")), Var("k", extent=const(K)), Var("n", extent=const(columns))
    x = Tensor("x", DType.F32, (Sym("rows"), const(K)))
    w = Tensor("w", DType.F32, tuple(map(const, shape)), constant=constant)
    y = Tensor("y", DType.F32, (Sym("rows"), const(columns)))
    where = tuple(expression(text, k, n) for text in index)
    acc = Var("acc", DType.F32)
    spec = ContractionSpec(
        inputs=(x, w),
        a=View("a", (b, m, k), Load(x, (m, k))),
        b=View("b", (b, k, n), Load(w, where)),
        acc=acc,
        outputs=(Result(Place(y, (b, m, n), (m, n)), acc),),
    )
    values = [ir.Value(name="x"), ir.Value(name="w")]
    if constant:
        values[1].const_value = ir.tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), name="w")
    return Region("contraction", "test", (), tuple(values), (), spec)


def expression(text: str, k: Var, n: Var) -> Expr:
    found = eval(text, {"k": k, "n": n})
    return const(found) if isinstance(found, int) else found


LAYOUTS: dict[str, tuple[tuple[int, ...], list[str], list[str]]] = {
    "as it is": ((K, N), ["k", "n"], ["k", "n"]),
    "transposed": ((N, K), ["n", "k"], ["n", "k"]),
    "1×1 convolution": ((N, K, 1, 1), ["n", "k", "0", "0"], ["n", "k", "0", "0"]),
    "batch of one": ((1, K, N), ["0", "k", "n"], ["0", "k", "n"]),
    "split heads": ((K, 4, 5), ["k", "n // 5", "n % 5"], ["k", "n // 5", "n % 5"]),
    "heads and rows swapped": ((5, K, 4), ["n % 5", "k", "n // 5"], ["n % 5", "k", "n // 5"]),
    "flat": ((K * N,), ["k * 20 + n"], ["k * 20 + n"]),
    "taps and channels turned": ((N, 4, 3), ["n", "k % 4", "k // 4"], ["n", "k % 4", "k // 4"]),
    "turned, columns last": ((4, 3, N), ["k % 4", "k // 4", "n"], ["k % 4", "k // 4", "n"]),
    "split rows": ((3, N, 4), ["k // 4", "n", "k % 4"], ["k // 4", "n", "k % 4"]),
}


@pytest.mark.parametrize(("shape", "index", "numbers"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_panels_hold_the_matrix(shape: tuple[int, ...], index: list[str], numbers: list[str]) -> None:
    made = region(shape, index)
    found = packing(made, 1)
    tensor = made.inputs[1].const_value
    assert tensor is not None
    weights = tensor.numpy()
    expected = np.array(
        [[weights[tuple(eval(text, {"k": k, "n": n}) for text in numbers)] for n in range(N)] for k in range(K)]
    )
    panels = found.packed(tensor, "panels").numpy()
    assert panels.shape == found.panels
    np.testing.assert_array_equal(unpack(panels, N), expected)


REFUSED = {
    "dynamic": (region((K, N), ["k", "n"], constant=False), 1, "'w' is not constant"),
    "not an operand": (region((K, N), ["k", "n"]), 0, "'x' is not constant"),
    "a part": (region((K, 3 * N), ["k", "n + 20"]), 1, "not all of it"),
    "mixed": (region((K * N,), ["(k + n) % 240"]), 1, "not made of rows or columns alone"),
    "repeated": (region((K, N), ["k", "n * 0"]), 1, "not made of rows or columns alone"),
    "backwards": (region((K, N), ["k", "19 - n"]), 1, "not"),
}


@pytest.mark.parametrize(("made", "index", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_packed(made: Region, index: int, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        packing(made, index)
