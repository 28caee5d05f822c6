"""Blocks of even height: as many rows in all, no more blocks than before, and results against float64."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_narrow_kernels import contraction

from tilecore.call import load_kernel
from tilecore.compile import compile_spec
from tilecore.contract.evaluate import Evaluator, evaluate
from tilecore.contract.expr import Const, Expr, Sym, const
from tilecore.contract.narrow import narrowed
from tilecore.contract.panel import pack, pack_groups
from tilecore.contract.spec import ContractionSpec, check
from tilecore.even_rows import even_rows, height_of
from tilecore.interpret import interpret
from tilecore.library import kernel_for
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target
from tilecore.toolchain import find_toolchain
from tilecore.trace import trace
from tilecore.verify import verify

UNIT = 6


def linear(rows: Expr, *, scaled: bool) -> ContractionSpec:
    return contraction(40, 70, constant=True, transposed=False, scaled=scaled, rows=rows)


@pytest.mark.parametrize("block", [24, 48, 192])
def test_blocks_are_as_even_as_whole_register_tiles_allow(block: int) -> None:
    dim = Sym("M")
    height = height_of(dim, block, UNIT)
    for rows in range(1, 700):
        known = height_of(const(rows), block, UNIT)
        assert isinstance(known, Const)
        assert Evaluator({}, {"M": rows})(height) == known.value
        each = int(known.value)
        assert each <= block
        assert each % UNIT == 0
        blocks = -(-rows // each)
        assert blocks == -(-rows // block), "no more blocks than before"
        assert rows - (blocks - 1) * each > each - UNIT * blocks, "the last one is as high but for whole tiles"


def test_a_block_is_never_higher_than_its_tile() -> None:
    assert height_of(const(64), 32, UNIT) == const(32), "six does not divide 32"
    assert height_of(const(0), 96, UNIT) == const(UNIT)


@pytest.mark.parametrize("rows", [1, 5, 24, 25, 49, 97])
def test_results_are_the_same(rows: int) -> None:
    spec = linear(Sym("M"), scaled=True)
    even = even_rows(spec, 24, UNIT)
    assert even is not spec
    check(even)
    function, operands = kernel_for(even)
    extents = {"block_m": 24, "block_n": 32, "block_k": 40}
    operands |= {"columns_first": True, "most_rows": 24}
    program = trace(function, inputs=even.inputs, operands=operands, extents=extents)
    verify(program)
    rng = np.random.default_rng(rows)
    shapes = {"a": (rows, 40), "b": (40, 70), "bias": (70,)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    want = evaluate(spec, arrays)["y"]
    np.testing.assert_allclose(interpret(program, arrays)["y"], want, rtol=1e-5, atol=1e-5)


def test_one_block_stays() -> None:
    spec = linear(const(24), scaled=True)
    assert even_rows(spec, 24, UNIT) is spec
    assert even_rows(spec, 23, UNIT) is not spec


@pytest.mark.cpu
@pytest.mark.parametrize("target", detect_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("narrow", [True, False], ids=["rounded", "scaled"])
@pytest.mark.parametrize("rows", [0, 1, 3, 25, 47, 49, 53, 96, 97, 145, 197])
def test_compiled_blocks_give_every_row_once(rows: int, narrow: bool, target: Target, object_cache: Path) -> None:
    """What stands beyond the results stays as it was: `load_kernel` checks that."""
    spec = linear(Sym("M"), scaled=not narrow)
    config = {"block_m": 48, "block_n": 32, "block_k": 40}
    found = narrowed(spec) if narrow else spec
    kernel = compile_spec(found, label="Even", profile=detect_profile(), targets=(target,), config=config)
    rng = np.random.default_rng(rows)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 40), (40, 70)))
    if rows > 3:
        a[rows - 1, 3], a[rows // 3, 7] = np.nan, np.inf
    bias = rng.standard_normal(70).astype(np.float32)
    packed = pack_groups(b.astype(ml_dtypes.bfloat16), 2) if narrow else pack(b)
    (got,) = load_kernel(kernel, target, find_toolchain(object_cache))(a, packed, bias)
    left, right = (x.astype(ml_dtypes.bfloat16 if narrow else np.float32).astype(np.float64) for x in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        want = left * (1.0 if narrow else 3.0) @ right + bias
        want = want / (1 + np.exp(-want))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    finite = np.isfinite(want)
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= 4e-6 * np.abs(want[finite]).max(initial=1)
