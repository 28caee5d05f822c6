"""Rows in flight: stages of several rows share a loop, and every row is what it would be alone.

The oracle is numpy in double precision (`evaluate`), and each row in a call of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from emulated_targets import emulated_targets
from tile_specs import row_case

from tilecore.call import CompiledKernel, load_kernel
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.evaluate import evaluate
from tilecore.contract.spec import RowSpec, outputs_of
from tilecore.profile import detect_profile
from tilecore.target import Target
from tilecore.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.cpu
PROFILE = detect_profile()
LARGE = replace(PROFILE, l3=6)  # no result fits such a cache: all go past it
TARGETS = (PROFILE.target, *(target for target in emulated_targets() if not target.base))
ROWS = 11
each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.fixture(scope="module")
def toolchain(object_cache: Path) -> Toolchain:
    return find_toolchain(object_cache)


def compiled(kind: str, columns: int, target: Target, *, block: int = 2, large: bool = False) -> Kernel:
    spec = row_case(kind, rows=ROWS, columns=columns, dynamic=False).spec
    assert isinstance(spec, RowSpec)
    profile = LARGE if large else PROFILE
    return compile_spec(spec, label="Test", profile=profile, targets=(target,), config={"block_m": block})


def is_in_flight(kernel: Kernel, target: Target) -> bool:
    return "for (int64_t task" not in kernel.sources[target.name]


def in_pieces(run: CompiledKernel, arrays: Sequence[np.ndarray], cuts: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The results of a call whose tasks are given out in pieces that end at `cuts`, the last one first."""
    call = run.prepare(*arrays)
    addresses = [[array.ctypes.data for array in group] for group in (call.arrays, call.results)]
    work = run.native.worker(call.symbols, addresses[0], addresses[1])
    ends = [0, *(cut for cut in cuts if cut < call.tasks), call.tasks]
    for begin, end in reversed(list(pairwise(ends))):
        work(begin, end)
    return call.results


@each_target
@pytest.mark.parametrize("large", [False, True], ids=["kept", "past caches"])
@pytest.mark.parametrize("block", [1, 2, 3, 8])
@pytest.mark.parametrize(("kind", "columns"), [("softmax", 48), ("softmax", 67), ("layernorm", 96), ("layernorm", 5)])
def test_rows_are_right_however_tasks_are_given_out(
    kind: str, columns: int, block: int, large: bool, target: Target, toolchain: Toolchain
) -> None:
    kernel = compiled(kind, columns, target, block=block, large=large)
    assert is_in_flight(kernel, target)
    run = load_kernel(kernel, target, toolchain)
    for rows in (1, 2, 3, ROWS):
        case = row_case(kind, rows=rows, columns=columns, dynamic=False)
        want = evaluate(case.spec, case.arrays)
        arrays = [case.arrays[tensor.name] for tensor in case.spec.inputs]
        for cuts in ((), (1,), (2, 3), range(1, rows)):
            for output, got in zip(outputs_of(case.spec), in_pieces(run, arrays, cuts), strict=True):
                np.testing.assert_allclose(got, want[output.name], rtol=1e-5, atol=3e-6, err_msg=output.name)


@each_target
@pytest.mark.parametrize("kind", ["softmax", "layernorm"])
def test_a_row_is_to_the_bit_what_it_is_alone(kind: str, target: Target, toolchain: Toolchain) -> None:
    """Also where its neighbours hold what is no number."""
    run = load_kernel(compiled(kind, 151, target), target, toolchain)
    case = row_case(kind, rows=ROWS, columns=151, dynamic=False)
    arrays = [case.arrays[tensor.name] for tensor in case.spec.inputs]
    arrays[0][3, 150], arrays[0][5, 0], arrays[0][7] = np.nan, np.inf, -np.inf
    together = run(*arrays)
    for row in range(ROWS):
        alone = run(*(array[row : row + 1] if array.shape[0] == ROWS else array for array in arrays))
        for whole, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(whole[row], one[0])
    assert np.isnan(together[0][[3, 5, 7]]).any(1).all()
    assert np.isfinite(together[0][[2, 4, 6, 8]]).all()


@each_target
def test_long_rows_go_one_by_one(target: Target) -> None:
    """What is in flight stays in the first cache."""
    assert is_in_flight(compiled("softmax", 1024, target), target)
    assert not is_in_flight(compiled("softmax", 4096, target), target)
    assert not is_in_flight(compiled("pointwise", 64, target), target)
