"""Random tile programs as machine code against the interpreter; `--programs N` runs more than the suite's few, from
the seed that `--first-program` names.

Many programs share one translation unit, so that each costs little: names of a program's own get its number.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from random_programs import RandomProgram, random_program

from tilecore.compile import HEADERS, passes_for
from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import const
from tilecore.emit_c import emit_c
from tilecore.emit_expr import EmitError
from tilecore.emit_host import Signature, symbol_order
from tilecore.emit_product import shared_units
from tilecore.errors import TileError
from tilecore.infer import InferenceError, infer
from tilecore.interpret import interpret
from tilecore.link import from_memory_source
from tilecore.lower import lower
from tilecore.profile import detect_target
from tilecore.target import Target
from tilecore.toolchain import Source, Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
BATCH = 40
TOLERANCE = 5e-6  # of an output's largest element: some tens of float32 roundings
OWN = re.compile(r"^static [^=;(]*?\b(\w+) ?[(\[]", re.MULTILINE)
STAMP = ("TILE_DOT(", "TILE_DOT_FUSED(", "TILE_BYTES(")
REFUSED = (TileError, InferenceError, EmitError)


@dataclass(frozen=True)
class Emitted:
    """A program and its C text, every name of its own numbered."""

    made: RandomProgram
    text: str


def emit(made: RandomProgram, target: Target) -> Emitted:
    program = made.program
    for rewrite in passes_for(target):
        program = rewrite(program)
    signature = Signature(f"Fuzz{made.seed}", program.inputs, program.outputs, const(0))
    text = emit_c(lower(infer(program, target)), signature, target)
    suffix = f"_{made.seed}"
    for name in set(OWN.findall(text)):
        text = re.sub(rf"\b{name}\b", name + suffix, text)
    text = re.sub(r"\b(mma_)", rf"s{made.seed}_\1", text)
    entry = (
        f'__attribute__((visibility("default"))) void call{suffix}(const int64_t* symbols, const void* const* inputs,\n'
        f"    void* const* outputs, void* scratch) {{\n    int64_t copied = -1;\n"
        f"    run{suffix}(symbols, inputs, outputs, scratch, &copied, 0, tasks{suffix}(symbols));\n}}\n"
        f'__attribute__((visibility("default"))) int64_t need{suffix}(const int64_t* symbols) {{\n'
        f"    return (int64_t)scratch_size{suffix}(symbols);\n}}\n"
    )
    return Emitted(made, text + entry)


def run(emitted: Emitted, library: ctypes.CDLL) -> dict[str, np.ndarray]:
    """The outputs of one program. Memory starts as NaN, so that what was not written shows."""
    made = emitted.made
    program, seed = made.program, made.seed
    sizes = {
        str(dim): size
        for tensor in program.inputs
        for dim, size in zip(tensor.shape, made.arrays[tensor.name].shape, strict=True)
    }
    symbols = (ctypes.c_int64 * 32)(*(sizes[name] for name in symbol_order(program.inputs)))
    shapes = [tuple(int(Evaluator({}, sizes)(dim)) for dim in tensor.shape) for tensor in program.outputs]
    outputs = [
        made.arrays[tensor.name].copy() if tensor.name in made.arrays else np.full(shape, np.nan, np.float32)
        for tensor, shape in zip(program.outputs, shapes, strict=True)
    ]
    arrays = [np.ascontiguousarray(made.arrays[tensor.name]) for tensor in program.inputs]
    need = getattr(library, f"need_{seed}")
    need.restype = ctypes.c_int64
    scratch = np.full(need(symbols) + 64, 0xFF, np.uint8)
    base = ctypes.c_void_p((scratch.ctypes.data + 63) // 64 * 64)
    pointers = [(ctypes.c_void_p * max(1, len(group)))(*(a.ctypes.data for a in group)) for group in (arrays, outputs)]
    getattr(library, f"call_{seed}")(symbols, *pointers, base)
    return {tensor.name: array for tensor, array in zip(program.outputs, outputs, strict=True)}


def batches(seeds: range, target: Target) -> Iterator[tuple[list[Emitted], int]]:
    """Programs in batches, and how many of each batch's seeds were refused."""
    for first in range(0, len(seeds), BATCH):
        batch, found = seeds[first : first + BATCH], list[Emitted]()
        for seed in batch:
            try:
                found.append(emit(random_program(seed), target))
            except REFUSED:
                continue
        yield found, len(batch) - len(found)


def without_twins(text: str) -> str:
    """`text`, each of whose stamps of whole-number products stands once: macros give those functions their names."""
    seen, lines = set[str](), list[str]()
    for line in text.split("\n"):
        if not line.startswith(STAMP) or line not in seen:
            lines.append(line)
        seen.add(line)
    return "\n".join(lines)


def check(batch: list[Emitted], toolchain: Toolchain, target: Target) -> list[str]:
    text = without_twins("\n".join(emitted.text for emitted in batch))
    texts = [
        f"#include <stdint.h>\n{from_memory_source(False)}",
        text,
        *(unit.text for unit in shared_units([text], target)),
    ]
    objects = [toolchain.object(Source(text, target.flags, (HEADERS,))) for text in texts]
    library = ctypes.CDLL(str(toolchain.library(objects)))
    wrong: list[str] = []
    for emitted in batch:
        got, want = run(emitted, library), interpret(emitted.made.program, emitted.made.arrays)
        for name, value in want.items():
            scale = max(1.0, float(np.abs(value[np.isfinite(value)]).max(initial=0.0)))
            if not np.allclose(got[name], value, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
                wrong.append(f"seed {emitted.made.seed}, {name}: off by {np.nanmax(np.abs(got[name] - value)):.2g}")
    return wrong


@pytest.mark.timeout(7200)
def test_random_programs_compute_what_the_interpreter_does(object_cache: Path, request: pytest.FixtureRequest) -> None:
    count, first = (int(str(request.config.getoption(name))) for name in ("--programs", "--first-program"))
    target, toolchain, refused, wrong = detect_target(), find_toolchain(object_cache), 0, list[str]()
    for batch, left_out in batches(range(first, first + count), target):
        refused += left_out
        wrong += check(batch, toolchain, target)
    print(f"{count} programs from {first}, {refused} refused, {len(wrong)} wrong")
    assert not wrong, wrong
    assert refused < count // 10
