"""Inputs of measured runs begin at a cache line, whatever arrays they are given as."""

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from models import regions
from models.graph import write
from runtime import ort_values
from runtime.bench import bound_run, default_session
from tilecore.aligned import LINE, aligned

SHAPES = ((), (5,), (3, 7, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.bool_, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_begin_at_a_line_and_hold_the_same(shape: tuple[int, ...], dtype: type) -> None:
    memory = np.zeros(4096, np.uint8)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    for start in range(0, LINE, 16):
        array = memory[start : start + size].view(dtype).reshape(shape)
        array[...] = np.arange(array.size).reshape(shape).astype(dtype)
        made = aligned(array)
        assert made.ctypes.data % LINE == 0
        assert made.dtype == array.dtype
        np.testing.assert_array_equal(made, array)
        assert aligned(made) is made, "what is aligned is not copied"


def test_arrays_of_any_strides_become_dense() -> None:
    array = np.arange(24.0).reshape(4, 6).T
    made = aligned(array)
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, array)
    assert aligned(np.float32(3)) == 3
    for other in (np.array(["a", "bc"], object), np.zeros((0, 3))):
        assert aligned(other) is other


def test_a_bound_run_reads_aligned_memory_that_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = default_session(write(regions.pointwise("double", hidden=33), tmp_path / "double.onnx"), 1)
    binding, starts, to_ort = session.io_binding(), list[int](), ort_values.to_ort

    def watched(array: np.ndarray) -> ort.OrtValue:
        starts.append(array.ctypes.data % LINE)
        return to_ort(array)

    monkeypatch.setattr(ort_values, "to_ort", watched)
    monkeypatch.setattr(session, "io_binding", lambda: binding)
    given = np.random.default_rng(0).standard_normal((1, 5, 33), dtype=np.float32)[:, ::-1]
    run = bound_run(session, {"x": given})
    gc.collect()
    others = [np.full(given.shape, 7.0, np.float32) for _ in range(64)]  # take memory that was let go
    run()
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 2 * given + 1)
    assert starts == [0]
    assert len(others) == 64
