"""What gcc makes of the register tiles of floats: how often they read a vector of B."""

import re
import subprocess
from pathlib import Path

import pytest

from tilecore.compile import HEADERS
from tilecore.contract.dtype import DType
from tilecore.emit_product import KINDS, shared_units
from tilecore.target import target_named
from tilecore.toolchain import COMMON, Compiler, find_compiler

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def gcc() -> Compiler:
    compiler = find_compiler()
    if "Free Software Foundation" not in compiler.version:
        pytest.skip("tells what gcc does")
    return compiler


def listing(target_name: str, compiler: Compiler, folder: Path) -> dict[str, list[str]]:
    """The instructions of each tile of the product of floats that kernels share."""
    target, kind = target_named(target_name), KINDS[DType.F32, DType.F32, DType.F32, False]
    called = f"tile_{kind.function}_{target.name.replace('-', '_')}("
    (unit,) = shared_units([called], target)
    source, assembly = folder / "unit.c", folder / "unit.s"
    source.write_text(unit.text)
    flags = compiler.spelled((*COMMON, *target.flags, "-S", f"-I{HEADERS}"))
    subprocess.run([*compiler.command, *flags, "-o", str(assembly), str(source)], check=True)
    tiles: dict[str, list[str]] = {}
    name = ""
    for line in assembly.read_text().splitlines():
        if label := re.match(r"(mma_\d+x\d+|tile_\w+)\b.*:", line):
            name = label[1]
        tiles.setdefault(name, []).append(line.strip())
    return tiles


@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3"])
def test_vectors_of_b_are_read_once_for_all_rows(target: str, gcc: Compiler, tmp_path: Path) -> None:
    """Read for each of three rows, they made these take as long as four with AVX-512."""
    tiles = listing(target, gcc, tmp_path)
    several = [name for name in tiles if re.match(r"mma_[2-6]x", name)]
    assert {"mma_2", "mma_3"} <= {name.split("x")[0] for name in several}
    for name in several:
        products = [line for line in tiles[name] if line.startswith("vfmadd")]
        assert products
        assert not [line for line in products if "(" in line and "{1to" not in line], name


@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3"])
def test_one_row_has_eight_sums_in_registers(target: str, gcc: Compiler, tmp_path: Path) -> None:
    for name, lines in listing(target, gcc, tmp_path).items():
        if name.startswith("mma_1x"):
            sums = {line.split("%")[-1] for line in lines if line.startswith("vfmadd231ps")}
            assert len(sums) >= 8, name
            assert not [line for line in lines if line.startswith("vmov") and "(%rsp)" in line and "mm" in line]
