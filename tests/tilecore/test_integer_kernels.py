"""Contractions of bytes, compiled: the sums are those of exact integer arithmetic, to the last bit.

The oracle is numpy in 64-bit integers, so that it shares nothing with the compiler's own idea of a contraction.
"""

import platform
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from emulated_targets import emulated
from tile_specs import axis, tensor

from tilecore.call import load_kernel
from tilecore.compile import compile_spec, prepare
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Expr, Load, Sym, Var, binary, cast, const, unary
from tilecore.contract.panel import pack, pack_groups
from tilecore.contract.spec import ContractionSpec, Place, Result, Tensor, View
from tilecore.profile import detect_profile, profile_named
from tilecore.recommend import keeps_left
from tilecore.target import Target, targets_for
from tilecore.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
BYTES = {"i8": DType.I8, "u8": DType.U8}


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def level(value: Expr, zero: Expr | None) -> Expr:
    """A byte less its zero point, which 16 bits hold."""
    wide = cast(value, DType.I16)
    return wide if zero is None else wide - cast(zero, DType.I16)


def integer_spec(kinds: tuple[str, str], depth: int, columns: int, *, zeros: str, constant: bool) -> ContractionSpec:
    """sums[m, n] = Σ_k (a[m, k] − za) · (b[k, n] − zb[n]), also requantised to a byte with a scale of 1/64.

    `zeros`: "" for none, "left" for za alone, "both".
    """
    rows = Sym("M")
    a = tensor("a", rows, depth, dtype=BYTES[kinds[0]])
    b = Tensor("b", BYTES[kinds[1]], (const(depth), const(columns)), constant)
    za, zb = tensor("za", 1, dtype=BYTES[kinds[0]]), tensor("zb", columns, dtype=BYTES[kinds[1]])
    g, m, k, n = axis("g", 1), axis("m", rows), axis("k", depth), axis("n", columns)
    acc = Var("acc", DType.I32)
    scaled = binary("add", unary("round", cast(acc, DType.F32) * (1 / 64)), 3.0)
    byte = cast(binary("max", binary("min", scaled, 255.0), 0.0), DType.U8)
    outputs = (
        Result(Place(tensor("sums", rows, columns, dtype=DType.I32), (g, m, n), (m, n)), acc),
        Result(Place(tensor("bytes", rows, columns, dtype=DType.U8), (g, m, n), (m, n)), byte),
    )
    return ContractionSpec(
        (a, b, za, zb)[: {"": 2, "left": 3, "both": 4}[zeros]],
        View("a", (g, m, k), level(Load(a, (m, k)), Load(za, (const(0),)) if zeros else None)),
        View("b", (g, k, n), level(Load(b, (k, n)), Load(zb, (n,)) if zeros == "both" else None)),
        acc,
        outputs,
    )


def extremes(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Bytes of which many are the smallest and largest there are: sums of pairs then pass 16 bits."""
    info = np.iinfo(BYTES[kind].row.numpy)
    values = rng.integers(info.min, info.max + 1, shape)
    picked = rng.random(shape)
    values = np.where(picked < 0.3, info.min, np.where(picked > 0.7, info.max, values))
    return values.astype(BYTES[kind].row.numpy)


@pytest.mark.parametrize("kinds", [("u8", "i8"), ("i8", "i8"), ("u8", "u8"), ("i8", "u8")])
@pytest.mark.parametrize(
    ("zeros", "constant", "depth", "columns"),
    [("", True, 37, 50), ("left", True, 99, 80), ("both", True, 64, 40), ("", False, 21, 16), ("both", False, 1, 35)],
)
def test_sums_of_bytes_are_exact(
    kinds: tuple[str, str], zeros: str, constant: bool, depth: int, columns: int, toolchain: Toolchain
) -> None:
    spec = integer_spec(kinds, depth, columns, zeros=zeros, constant=constant)
    config = {"block_m": 7, "block_n": 32, "block_k": {"left": 96}.get(zeros, min(depth, 23))}
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(PROFILE.target,), config=config)
    compiled = load_kernel(kernel, PROFILE.target, toolchain)
    rng = np.random.default_rng(depth)
    for rows in (1, 2, 15):
        arrays = {
            "a": extremes(rng, (rows, depth), kinds[0]),
            "b": extremes(rng, (depth, columns), kinds[1]),
            "za": extremes(rng, (1,), kinds[0]),
            "zb": extremes(rng, (columns,), kinds[1]),
        }
        left = arrays["a"].astype(np.int64) - (arrays["za"].astype(np.int64) if zeros else 0)
        right = arrays["b"].astype(np.int64) - (arrays["zb"].astype(np.int64) if zeros == "both" else 0)
        given = [arrays[t.name] for t in spec.inputs]
        if constant:
            assert kernel.packed == (1,)
            given[1] = pack(arrays["b"]) if zeros == "both" else pack_groups(arrays["b"], 4, sums=True)
        sums, bytes_ = compiled(*given)
        np.testing.assert_array_equal(sums, left @ right)
        expected = np.clip(np.rint((left @ right).astype(np.float32) * np.float32(1 / 64)) + 3, 0, 255)
        np.testing.assert_array_equal(bytes_, expected.astype(np.uint8))
        wanted = evaluate(spec, {t.name: arrays[t.name] for t in spec.inputs})
        np.testing.assert_array_equal(sums, wanted["sums"])


@pytest.mark.parametrize(("machine", "kept"), [("zen4", True), ("sapphire-rapids", False)])
def test_levels_are_kept_for_all_columns_but_beside_tile_registers(machine: str, kept: bool) -> None:
    profile = profile_named(machine)
    spec, _ = prepare(integer_spec(("u8", "i8"), 64, 48, zeros="left", constant=True))
    assert isinstance(spec, ContractionSpec)
    assert keeps_left(spec, profile, profile.target) is kept
    given, _ = prepare(integer_spec(("u8", "i8"), 64, 48, zeros="left", constant=False))
    assert isinstance(given, ContractionSpec)
    assert not keeps_left(given, profile, profile.target), "panels that are packed here are kept instead"


TARGETS_HERE = [
    *(t for t in targets_for(platform.machine()) if not t.base and t.lanes <= PROFILE.target.lanes),
    *([emulated("x86-64-v4")] if platform.machine() == "x86_64" else ()),  # with VNNI and tiles of bytes
]


@pytest.mark.parametrize("target", TARGETS_HERE)
@pytest.mark.parametrize("kinds", [("u8", "i8"), ("i8", "u8")])
@pytest.mark.parametrize(("depth", "step", "block_m"), [(200, 200, 48), (200, 100, 96), (2178, 2178, 96)])
def test_large_sums_of_bytes_are_exact(
    depth: int, step: int, block_m: int, kinds: tuple[str, str], target: Target, toolchain: Toolchain
) -> None:
    """Where the processor multiplies bytes, or tiles of them: whole tiles and tails in every direction."""
    spec = integer_spec(kinds, depth, 104, zeros="left", constant=True)
    config = {"block_m": block_m, "block_n": 112, "block_k": step}
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(target,), config=config)
    compiled = load_kernel(kernel, target, toolchain)
    rng = np.random.default_rng(5)
    for rows in (3, 9, 32, 91):
        a, b, za = (
            extremes(rng, shape, kind)
            for shape, kind in (((rows, depth), kinds[0]), ((depth, 104), kinds[1]), ((1,), kinds[0]))
        )
        sums, _ = compiled(a, pack_groups(b, 4, sums=True), za)
        np.testing.assert_array_equal(sums, (a.astype(np.int64) - za.astype(np.int64)) @ b.astype(np.int64))


def test_levels_of_more_than_a_byte_are_exact_too(toolchain: Toolchain) -> None:
    """A row that no byte and one zero point make, so that nothing can multiply it as bytes."""
    left = tensor("a", Sym("M"), 70, dtype=DType.I16)
    right = Tensor("b", DType.I8, (const(70), const(32)), True)
    g, m, k, n = axis("g", 1), axis("m", Sym("M")), axis("k", 70), axis("n", 32)
    acc = Var("acc", DType.I32)
    views = View("a", (g, m, k), Load(left, (m, k))), View("b", (g, k, n), cast(Load(right, (k, n)), DType.I16))
    place = Place(tensor("sums", Sym("M"), 32, dtype=DType.I32), (g, m, n), (m, n))
    spec = ContractionSpec((left, right), *views, acc, (Result(place, acc),))
    kernel = compile_spec(spec, label="Test", profile=PROFILE, targets=(PROFILE.target,))
    rng = np.random.default_rng(6)
    a, b = rng.integers(-3000, 3000, (40, 70)).astype(np.int16), extremes(rng, (70, 32), "i8")
    a[:20] %= 200  # some rows are bytes
    (sums,) = load_kernel(kernel, PROFILE.target, toolchain)(a, pack_groups(b, 4, sums=True))
    np.testing.assert_array_equal(sums, a.astype(np.int64) @ b.astype(np.int64))


def test_bytes_themselves_are_widened(toolchain: Toolchain) -> None:
    spec = integer_spec(("i8", "i8"), 8, 16, zeros="", constant=False)
    a, b = spec.inputs
    g, m, k = spec.a.axes
    n = spec.b.axes[2]
    raw = ContractionSpec(
        spec.inputs,
        View("a", (g, m, k), Load(a, (m, k))),
        View("b", (g, k, n), Load(b, (k, n))),
        spec.acc,
        spec.outputs,
    )
    kernel = compile_spec(raw, label="Test", profile=PROFILE, targets=(PROFILE.target,))
    rng = np.random.default_rng(8)
    left, right = extremes(rng, (5, 8), "i8"), extremes(rng, (8, 16), "i8")
    sums = load_kernel(kernel, PROFILE.target, toolchain)(left, right)[0]
    np.testing.assert_array_equal(sums, left.astype(np.int64) @ right.astype(np.int64))


@pytest.mark.parametrize("kinds", list(product(("u8", "i8"), ("u8", "i8"))))
def test_levels_that_are_bytes_less_one_number_are_multiplied_as_they_are(kinds: tuple[str, str]) -> None:
    target = next(t for t in targets_for("x86_64") if t.name == "x86-64-v4")
    spec = integer_spec(kinds, 200, 104, zeros="left", constant=True)

    def text(step: int) -> str:
        config = {"block_m": 48, "block_n": 112, "block_k": step}
        profile = profile_named("zen4")
        (made,) = compile_spec(spec, label="Test", profile=profile, targets=(target,), config=config).sources.values()
        return made

    assert f"level_product_{kinds[1]}(s_a_bytes" in text(200)
    assert f"product_{kinds[1]}_plain(s_a" in text(200), "processors that multiply no bytes widen them"
    assert "level_product" not in text(100), "a part of the depth has no sums of columns"
