"""Random regions as machine code against float64: `--specs N` takes more than the suite's few, from the seed that
`--first-program` names. What this backend has no code for is refused with a reason.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from cuda_specs import F32
from random_specs import HALVES, RandomSpec, random_spec
from region_arrays import drawn, faults, in_float64, shape_of, tolerance_of

from tilecore.call import CompiledKernel, load_kernels
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import loads
from tilecore.contract.panel import group_of, has_sums, join_bits, pack_groups, rows_of
from tilecore.contract.spec import Spec, byte_block_of, outputs_of, views_of
from tilecore.emit_expr import EmitError
from tilecore.errors import TileError
from tilecore.infer import InferenceError
from tilecore.profile import detect_profile, detect_targets
from tilecore.recommend import NoConfigurationError
from tilecore.target import Target
from tilecore.toolchain import find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
REFUSED = (EmitError, InferenceError, NoConfigurationError, TileError)
BATCH = 25
FOUND = (556,)  # half-precision masks of vectors that gcc spills
EXACT = 1e-4  # where every tensor is float32, of an element and of the output's root mean square
MARGIN, UNTOUCHED = 4096, 0xAB  # bytes around outputs
LARGE = 3_000_000  # elements: more of them cost time and show nothing


def region(seed: int) -> RandomSpec:
    """A region of float32 as a rule: this backend rounds operands only where they are bfloat16 on both sides."""
    return random_spec(seed, operands=HALVES if seed % 4 == 0 else (F32,))


def kernel_of(found: RandomSpec, target: Target) -> Kernel:
    return compile_spec(found.spec, label=f"Fuzz{found.seed}", profile=PROFILE, targets=(target,))


def stored(spec: Spec, index: int, array: np.ndarray) -> np.ndarray:
    """A constant as the kernel wants it: in panels."""
    tensor = spec.inputs[index]
    view, load = next((view, one) for view in views_of(spec) for one in loads(view.value) if one.source == tensor)
    rows = rows_of(load, view)
    assert rows is not None
    matrix = array.reshape(-1, array.shape[-1])
    matrix = matrix.T if rows.by_column else matrix
    bits = load.dtype.bits
    whole = join_bits(matrix, bits) if bits < 8 else matrix
    return pack_groups(whole, group_of(load, view, byte_block_of(spec)), sums=has_sums(load, view))


def called(compiled: CompiledKernel, given: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The outputs of a call that writes nothing but these."""
    call = compiled.prepare(*given)
    memories = [np.full(one.nbytes + 2 * MARGIN, UNTOUCHED, np.uint8) for one in call.results]
    inside = [
        memory[MARGIN:-MARGIN].view(one.dtype).reshape(one.shape)
        for memory, one in zip(memories, call.results, strict=True)
    ]
    for array in inside:
        array.reshape(-1).view(np.uint8)[:] = 0xFF
    addresses = [array.ctypes.data for array in call.arrays], [array.ctypes.data for array in inside]
    compiled.native.worker(call.symbols, *addresses)(0, call.tasks)
    for memory in memories:
        assert (memory[:MARGIN] == UNTOUCHED).all(), f"{compiled.kernel.name} writes before an output"
        assert (memory[-MARGIN:] == UNTOUCHED).all(), f"{compiled.kernel.name} writes past an output"
    return tuple(inside)


def wrong(found: RandomSpec, compiled: CompiledKernel) -> list[str]:
    """What differs, for plain numbers and with NaN and infinity among those of the first operand."""
    spec, sizes, said = found.spec, found.sizes, list[str]()
    floats = {one.dtype for one in (*spec.inputs, *outputs_of(spec)) if one.dtype.is_float}
    tolerance = EXACT if floats == {F32} else tolerance_of(spec)
    for special in (False, True):
        rng = np.random.default_rng(found.seed)
        arrays = {one.name: drawn(one, shape_of(one, sizes), rng) for one in spec.inputs}
        arrays = {one.name: arrays[one.name].astype(one.dtype.row.numpy) for one in spec.inputs}
        if special:
            first = next((arrays[name] for name in ("x", "q", "a") if name in arrays), None)
            if first is None or first.size == 0 or first.dtype.kind in "iub":
                break
            first.reshape(-1)[int(rng.integers(first.size))] = np.nan
            first.reshape(-1)[int(rng.integers(first.size))] = np.inf
        given = [arrays[one.name] for one in spec.inputs]
        for index in compiled.kernel.packed:
            given[index] = stored(spec, index, given[index])
        got = called(compiled, given)
        judges = (
            evaluate(spec, {name: in_float64(array) for name, array in arrays.items()}),
            evaluate(spec, arrays, wide=False),  # rounds casts in the midst of a program, as kernels do
        )
        for one, result in zip(outputs_of(spec), got, strict=True):
            numbers = in_float64(result)
            differs = [faults(numbers, in_float64(judge[one.name]), tolerance) for judge in judges]
            where = f"{one.name}{' with NaN and infinity' * special}"
            said += [f"seed {found.seed}, {found.kind}: {where} differs in {differs[0]}"] * all(differs)
    return said


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", detect_targets(), ids=lambda target: target.name)
def test_random_regions_are_right_or_refused(
    target: Target, object_cache: Path, request: pytest.FixtureRequest
) -> None:
    count, start = (int(str(request.config.getoption(name))) for name in ("--specs", "--first-program"))
    seeds = [*range(start, start + count), *FOUND]
    toolchain, differing, right = find_toolchain(object_cache), list[str](), 0
    for begin in range(0, len(seeds), BATCH):
        pairs: list[tuple[RandomSpec, Kernel]] = []
        for seed in seeds[begin : begin + BATCH]:
            found = region(seed)
            tensors = (*found.spec.inputs, *outputs_of(found.spec))
            if sum(math.prod(shape_of(one, found.sizes)) for one in tensors) > LARGE:
                continue
            try:
                pairs.append((found, kernel_of(found, target)))
            except REFUSED:
                continue
        loaded = load_kernels([kernel for _, kernel in pairs], target, toolchain)
        for (found, _), compiled in zip(pairs, loaded, strict=True):
            said = wrong(found, compiled)
            differing += said
            right += not said
    print(f"{right} of {len(seeds)} regions from {start} right, {len(differing)} wrong")
    assert not differing, "\n".join(differing)
    assert right > len(seeds) // 2
