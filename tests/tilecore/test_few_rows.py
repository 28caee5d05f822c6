"""Products of few rows with a right operand that is unpacked as it is used: any depth, block and number of rows.

The oracle is numpy in double precision on the levels themselves.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tile_specs import axis, tensor

from tilecore.call import CompiledKernel, load_kernel
from tilecore.compile import compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const
from tilecore.contract.few_rows import FEW_ROWS
from tilecore.contract.panel import join_bits, pack, pack_groups, packed_level
from tilecore.contract.spec import ContractionSpec, Place, Product, Result, Tensor, View
from tilecore.profile import detect_profile, detect_targets
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
ROWS = (1, 2, 3, 7, FEW_ROWS, FEW_ROWS + 3)


@dataclass(frozen=True)
class Weight:
    """Levels of `bits` bits [depth, columns]; a scale (and a zero point) per column and block of rows."""

    bits: int
    depth: int
    columns: int
    block: int  # 0: one for all rows
    zeros: bool = True
    step: int = 64  # rows of it that one tile holds
    siblings: int = 0
    computed: bool = False  # the left operand, too
    in_bytes: bool = False  # the left operand may be rounded to bytes


WEIGHTS = (
    Weight(4, 128, 48, 32),
    Weight(4, 45, 17, 16, step=16),
    Weight(4, 80, 32, 32, step=48),
    Weight(4, 96, 48, 0, zeros=False),
    Weight(2, 64, 24, 32),
    Weight(8, 67, 20, 32),
    Weight(4, 64, 32, 16, siblings=1),
    Weight(4, 64, 32, 32, computed=True),
)


@dataclass(frozen=True)
class Parts:
    """The tensors of one weight, what they hold, and the weight in double precision."""

    tensors: tuple[Tensor, ...]
    arrays: tuple[np.ndarray, ...]  # as kernels take them
    value: Expr
    exact: np.ndarray


def parts_of(weight: Weight, number: int, k: Var, n: Var, rng: np.random.Generator) -> Parts:
    """One weight, its names ending in `number`."""
    kind = {2: DType.U2, 4: DType.U4, 8: DType.U8}[weight.bits]
    blocks = -(-weight.depth // weight.block) if weight.block else 1
    shape, small = (weight.depth, weight.columns), (blocks, weight.columns)
    levels, zero = (rng.integers(0, 1 << weight.bits, size) for size in (shape, small))
    zero = zero if weight.zeros else np.full(small, 1 << (weight.bits - 1))
    scale = rng.uniform(0.01, 0.03, small).astype(np.float32)

    def constant(name: str, dtype: DType, dims: tuple[int, int]) -> Tensor:
        return Tensor(f"{name}{number}", dtype, (const(dims[0]), const(dims[1])), True)

    def packed(array: np.ndarray) -> np.ndarray:
        """In panels, as `pack_constants` asks for: not a single row of whole elements."""
        if weight.in_bytes and len(array) > blocks:
            return pack_groups(join_bits(array, weight.bits) if weight.bits < 8 else array.astype(np.uint8), 4)
        if weight.bits == 8:
            return pack(array.astype(np.uint8)) if len(array) > 1 else array.astype(np.uint8)
        return pack(join_bits(array, weight.bits))

    sources = constant("q", kind, shape), constant("s", DType.F32, small), constant("z", kind, small)
    level = cast(Load(sources[0], (k, n)), DType.I32)
    if weight.in_bytes and weight.bits == 4:  # as operators spell them
        sources = constant("q", DType.U8, (weight.depth // 2, weight.columns)), *sources[1:]
        level = packed_level(Load(sources[0], (k // 2, n)), k, 4)
    row = k // weight.block if weight.block else const(0)
    point = cast(Load(sources[2], (row, n)), DType.I32) if weight.zeros else const(1 << (weight.bits - 1), DType.I32)
    apart = cast(level, DType.F32) - cast(point, DType.F32) if weight.in_bytes else cast(level - point, DType.F32)
    value = apart * Load(sources[1], (row, n))
    wide = [np.repeat(part, weight.block or weight.depth, 0)[: weight.depth] for part in (zero, scale)]
    arrays = (packed(levels), scale if blocks == 1 else pack(scale), packed(zero))
    count = 3 if weight.zeros else 2
    return Parts(sources[:count], arrays[:count], value, (levels - wide[0]) * wide[1].astype(np.float64))


def spec_of(weight: Weight, rng: np.random.Generator) -> tuple[ContractionSpec, list[Parts]]:
    """y = a · w, plus a · w₁ where there is a sibling; `a` squared where it is computed."""
    rows = Sym("M")
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", weight.depth), axis("n", weight.columns)
    a = tensor("a", rows, weight.depth)
    parts = [parts_of(weight, number, k, n, rng) for number in range(1 + weight.siblings)]
    accs = [Var(f"acc{number}", DType.F32) for number in range(len(parts))]
    total: Expr = accs[0]
    for acc in accs[1:]:
        total = total + acc
    left: Expr = Load(a, (m, k))
    views = [View(f"b{number}", (g, k, n), part.value) for number, part in enumerate(parts)]
    y = tensor("y", rows, weight.columns)
    spec = ContractionSpec(
        (a, *(source for part in parts for source in part.tensors)),
        View("a", (g, m, k), left * left if weight.computed else left),
        views[0],
        accs[0],
        (Result(Place(y, (g, m, n), (m, n)), total),),
        siblings=tuple(Product(view, acc) for view, acc in zip(views[1:], accs[1:], strict=True)),
        byte_block=weight.block if weight.in_bytes else 0,
    )
    return spec, parts


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def compiled(
    weight: Weight, spec: ContractionSpec, toolchain: Toolchain, target: Target = PROFILE.target
) -> CompiledKernel:
    config = {"block_m": 24, "block_n": 32, "block_k": min(weight.step, weight.depth)}
    profile = replace(PROFILE, target=target)
    kernel = compile_spec(spec, label="Test", profile=profile, targets=(target,), config=config)
    text = kernel.sources[target.name]
    assert "total" in text, "elements of the weight are written to memory first"
    assert ("if (!once_x0_levels_" in text) == weight.in_bytes, "tasks round what others have"
    asked = [f"__builtin_prefetch(input{number} +" in text for number in range(1, len(spec.inputs))]
    assert asked == [weight.in_bytes] * len(asked), "levels, scales and zero points come late"
    return load_kernel(kernel, target, toolchain)


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_products_of_few_rows_are_right(weight: Weight, toolchain: Toolchain) -> None:
    rng = np.random.default_rng(weight.depth)
    spec, parts = spec_of(weight, rng)
    run = compiled(weight, spec, toolchain)
    exact = sum(part.exact for part in parts)
    size = sum(np.abs(part.exact) for part in parts)
    for rows in ROWS:
        a = rng.standard_normal((rows, weight.depth)).astype(np.float32)
        wide = a.astype(np.float64) ** (2 if weight.computed else 1)
        got = run(a, *(array for part in parts for array in part.arrays))[0]
        np.testing.assert_allclose(got, wide @ exact, rtol=0, atol=4e-7 * float((np.abs(wide) @ size).max()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("target", detect_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize(
    "weight",
    [
        Weight(4, 128, 80, 32, in_bytes=True),
        Weight(4, 112, 40, 16, in_bytes=True, zeros=False),
        Weight(8, 192, 80, 64, in_bytes=True),
        Weight(8, 512, 32, 512, in_bytes=True, step=512),
    ],
    ids=str,
)
def test_levels_meet_bytes_with_and_without_instructions_for_them(
    weight: Weight, target: Target, fused: bool, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Activations that are bytes times a power of two, which rounding leaves as they are, as blocks reach 127."""
    if not fused and target.fused_dot:
        header = tmp_path_factory.mktemp("plain") / "plain.h"
        header.write_text('#include "tile_features.h"\n#define tile_x86_vnni(bits) 0\n')
        target = replace(target, flags=(*target.flags, "-include", str(header)))
    rng = np.random.default_rng(weight.depth)
    spec, (parts,) = spec_of(weight, rng)
    run = compiled(weight, spec, toolchain, target)
    for rows in (*ROWS, 24, 61):
        levels = rng.integers(-127, 128, (rows, weight.depth))
        levels[:, :: weight.block] = 127 * rng.choice([-1, 1], levels[:, :: weight.block].shape)
        a = (levels * 2.0 ** rng.integers(-6, 6, (rows, 1))).astype(np.float32)
        got = run(a, *parts.arrays)[0]
        size = float((np.abs(a.astype(np.float64)) @ np.abs(parts.exact)).max())
        np.testing.assert_allclose(got, a.astype(np.float64) @ parts.exact, rtol=0, atol=4e-7 * size)


def test_elements_of_any_size_keep_their_own_precision(toolchain: Toolchain) -> None:
    """A level at its zero point is 0: what is multiplied by it, however large, leaves the others' sum as it is."""
    weight = Weight(4, 64, 32, 32)
    rng = np.random.default_rng(3)
    spec, (parts,) = spec_of(weight, rng)
    run = compiled(weight, spec, toolchain)
    a = (rng.standard_normal((1, 64)) * 10.0 ** rng.integers(-6, 7, (1, 64))).astype(np.float32)
    terms = np.abs(a.astype(np.float64)) @ np.abs(parts.exact)
    off = np.abs(run(a, *parts.arrays)[0] - a.astype(np.float64) @ parts.exact)
    assert (off <= 1e-6 * terms).all()
    column = int(np.argmax((parts.exact == 0).any(0)))
    row = int(np.argmax(parts.exact[:, column] == 0))
    tiny = np.full((1, 64), 1e-3, np.float32)
    huge = tiny.copy()
    huge[0, row] = 1e30
    assert run(huge, *parts.arrays)[0][0, column] == pytest.approx(run(tiny, *parts.arrays)[0][0, column], rel=1e-6)


def test_nan_and_infinity_go_through(toolchain: Toolchain) -> None:
    weight = replace(WEIGHTS[0], zeros=False)
    rng = np.random.default_rng(4)
    spec, (parts,) = spec_of(weight, rng)
    run = compiled(weight, spec, toolchain)
    for odd in (np.nan, np.inf):
        a = rng.standard_normal((2, weight.depth)).astype(np.float32)
        a[1, 77] = odd
        got = run(a, *parts.arrays)[0]
        assert np.isfinite(got[0]).all()
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(got[1], np.float64(odd) * np.sign(parts.exact[77]))


def test_other_operands_that_are_computed(toolchain: Toolchain) -> None:
    """A product of two activations, the right one doubled where it is used."""
    rows, depth, columns = Sym("M"), 37, 32
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", depth), axis("n", columns)
    a, b, y = tensor("a", rows, depth), tensor("b", depth, columns), tensor("y", rows, columns)
    acc = Var("acc", DType.F32)
    spec = ContractionSpec(
        (a, b),
        View("a", (g, m, k), Load(a, (m, k))),
        View("b", (g, k, n), binary("mul", Load(b, (k, n)), 2.0)),
        acc,
        (Result(Place(y, (g, m, n), (m, n)), acc),),
    )
    run = compiled(Weight(8, depth, columns, 0), spec, toolchain)
    rng = np.random.default_rng(5)
    for count in (1, 5, 20):
        left, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((count, depth), (depth, columns)))
        np.testing.assert_allclose(run(left, right)[0], 2 * left.astype(np.float64) @ right, rtol=0, atol=2e-5)
