"""`jit` and `compile`: three ways to write a kernel, arrays by numpy and DLPack, and what a wrong call says."""

import dataclasses
import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilecore
from tilecore import KernelError, TileError
from tilecore import language as T
from tilecore.interpret import interpret
from tilecore.trace import trace

pytestmark = pytest.mark.cpu
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def jit(object_cache: Path) -> Callable[..., Any]:
    return partial(tilecore.jit, cache=object_cache)


@pytest.fixture(scope="module")
def scale(jit: Callable[..., Any]) -> Any:
    n = T.dynamic("n")

    def scaled(A: T.Tensor((n, 4), "float32"), B: T.Tensor((n, 4), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(n) as i:
            for j in T.Parallel(4):
                B[i, j] = A[i, j] * 2

    return jit(scaled, out_idx=-1)


def test_a_function_with_annotated_parameters(scale: Any) -> None:
    for rows in (1, 5):
        array = RNG.standard_normal((rows, 4)).astype(np.float32)
        np.testing.assert_array_equal(scale(array), array * 2)
    assert len(scale.kernels) == 1


def test_a_function_that_makes_kernels_keeps_each(jit: Callable[..., Any]) -> None:
    made: list[int] = []

    def factory(n: int, block: int = 4) -> Any:
        made.append(n)

        @T.prim_func
        def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")) -> None:  # type: ignore[valid-type]
            with T.Kernel(T.ceildiv(n, block)) as b:
                a = T.alloc_fragment((block,), "float32")
                T.copy(A[b * block], a)
                T.copy(a, B[b * block])

        return kernel

    make = jit(factory, out_idx=[1])
    array = RNG.standard_normal(7).astype(np.float32)
    np.testing.assert_array_equal(make(7)(array), array)
    assert make(7) is make(7, 4)
    assert make(7, block=2) is not make(7)
    assert made == [7, 7]
    assert make(7).config["block"] == 4


@pytest.mark.parametrize(
    "alike", [(1, True), (2, 2.0), (0.0, -0.0), ([1, 2], [1, 2.0]), ((0.0,), (-0.0,)), ({"a": 1}, {"a": True})]
)
def test_arguments_that_python_calls_equal_have_kernels_of_their_own(
    jit: Callable[..., Any], alike: tuple[Any, Any]
) -> None:
    seen: list[Any] = []

    def factory(value: Any) -> Any:
        seen.append(value)

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")) -> None:  # type: ignore[valid-type]
            with T.Kernel(1) as _:
                for i in T.Parallel(4):
                    B[i] = A[i] + 1.0

        return kernel

    make = jit(factory, out_idx=[1])
    assert alike[0] == alike[1]
    for value in (*alike, *alike):
        make(value)
    assert repr(seen) == repr(list(alike))


def test_tables_of_numbers_are_told_apart_by_all_of_them(jit: Callable[..., Any]) -> None:
    def factory(table: np.ndarray) -> Any:
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")) -> None:  # type: ignore[valid-type]
            with T.Kernel(1) as _:
                for i in T.Parallel(4):
                    B[i] = A[i] * float(table[1000])

        return kernel

    make = jit(factory, out_idx=[1])
    ones, table = np.ones(4, np.float32), np.arange(2001.0)
    for factor in (1000.0, 3.0):
        table[1000] = factor
        np.testing.assert_array_equal(make(table.copy())(ones), factor * ones)


def test_a_function_that_declares_its_tensors(jit: Callable[..., Any]) -> None:
    def added(A: Any, B: Any, factor: float = 1.0) -> Any:  # pyright: ignore[reportRedeclaration]
        M, N = T.const("M, N")
        A: T.Tensor((M, N), "float32")  # type: ignore
        B: T.Tensor((N,), "float32")  # type: ignore
        C = T.empty((M, N), "float32")
        D = T.empty((M,), "int32")
        with T.Kernel(M) as i:
            for j in T.Parallel(N):
                C[i, j] = A[i, j] + B[j] * factor
            D[i] = M * N
        return C, D

    kernel = jit(added)
    a, b = RNG.standard_normal((3, 5)).astype(np.float32), RNG.standard_normal(5).astype(np.float32)
    total, count = kernel(a, b, factor=2.0)
    np.testing.assert_allclose(total, a + 2 * b, rtol=1e-6)
    np.testing.assert_array_equal(count, [15, 15, 15])
    compiled = kernel.compile(M=3, N=5, factor=2.0)
    np.testing.assert_array_equal(compiled(a, b)[0], total)
    with pytest.raises(KernelError, match=r"needs N: pass arrays, or name=… to compile\(\)"):
        kernel.compile(M=3)


def test_what_was_generated_and_decided_is_shown(scale: Any) -> None:
    kernel = scale.compile()
    assert "tile_kernel" in kernel.source
    assert f"{Path(__file__).name}:" in kernel.source
    text = kernel.explain()
    assert "kernel scaled(A, B) -> B" in text
    assert "parallel j < 4" in text
    assert "vectors along j" in text
    assert kernel.config["target"] in text


class Foreign:
    """An array of another library: memory by DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_arrays_by_dlpack(scale: Any) -> None:
    array = RNG.standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(scale(Foreign(array))), array * 2)


class Brains(Foreign):
    """An array of a library with a bfloat16 of its own, which DLPack of numpy does not know: this module."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Unsupported dtype in DLTensor.")

    def view(self, dtype: Any) -> "Foreign":
        return Foreign(self.array.view(dtype))


int16, bfloat16 = np.int16, ml_dtypes.bfloat16


def from_dlpack(array: np.ndarray) -> np.ndarray:
    return array


def test_bfloat16_of_another_library(jit: Callable[..., Any]) -> None:
    def doubled(A: T.Tensor((5,), "bfloat16"), B: T.Tensor((5,), "bfloat16")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            for i in T.Parallel(5):
                B[i] = A[i] * 2

    array = np.arange(5).astype(ml_dtypes.bfloat16)
    found = jit(doubled, out_idx=1)(Brains(array))
    assert isinstance(found, np.ndarray)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), np.arange(5) * 2)


def test_arguments_by_name_and_tensors_of_no_axes(jit: Callable[..., Any]) -> None:
    def scaled(A: T.Tensor((), "float32"), B: T.Tensor((3,), "float32"), C: T.Tensor((), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            C[()] = A[()] * B[2]

    kernel = jit(scaled, out_idx=2)
    three = np.arange(3, dtype=np.float32)
    assert kernel(B=three, A=np.array(2.5, np.float32)) == 5
    assert kernel(2.5, B=three) == 5
    assert interpret(trace(scaled), {"A": np.array(2.5), "B": three})["C"] == 5
    with pytest.raises(KernelError, match=r"scaled takes 2 arguments \(A, B\), got 1 and D"):
        kernel(2.5, D=three)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (np.zeros((3, 4)), "A: f32[n, 4]: found float64, expected float32; A.astype(…) converts"),
        (np.zeros(4, np.float32), "A: f32[n, 4]: found 1 dims (4,), expected 2"),
        (np.zeros((3, 5), np.float32), "A: f32[n, 4]: dim 1 is 5, expected 4; its shape is (3, 5)"),
        (np.zeros((4, 3), np.float32).T, "found strides of (1, 3) elements for shape (3, 4), expected dense rows"),
        (np.frombuffer(bytes(17), np.uint8)[1:].view(np.float32).reshape(1, 4), "is not aligned to 4 bytes"),
        ([1.0, 2.0], "A is a list: expected a numpy array, or one that offers __dlpack__"),
    ],
)
def test_a_wrong_array_is_named_with_what_was_expected(scale: Any, argument: Any, message: str) -> None:
    with pytest.raises(KernelError) as caught:
        scale(argument)
    assert message in str(caught.value)


def test_wrong_outputs_and_counts(jit: Callable[..., Any], scale: Any) -> None:
    in_place = jit(scale.original)
    array = np.zeros((3, 4), np.float32)
    with pytest.raises(KernelError, match="dim 0 is 2, expected 3 as n is 3 by dim 0 of A"):
        in_place(array, np.zeros((2, 4), np.float32))
    with pytest.raises(KernelError, match="shares memory with A"):
        in_place(array, array)
    frozen = np.zeros((3, 4), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(KernelError, match="read-only"):
        in_place(array, frozen)
    with pytest.raises(KernelError, match=r"takes 2 arguments \(A, B\), got 1"):
        in_place(array)


def test_extents_left_open_are_given_by_name(jit: Callable[..., Any]) -> None:
    def copied(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32"), *, block: Any = T.auto) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(8, block)) as b:
            a = T.alloc_fragment((block,), "float32")
            T.copy(A[b * block], a)
            T.copy(a, B[b * block])

    array = RNG.standard_normal(8).astype(np.float32)
    kernel = jit(copied, out_idx=1).compile(block=4)
    assert kernel.steps[0].program.grid[0].extent is not None
    assert str(kernel.steps[0].program.grid[0].extent) == "2"
    np.testing.assert_array_equal(kernel(array), array)


def test_extents_left_open_are_completed(jit: Callable[..., Any]) -> None:
    n = T.dynamic("n")

    def product(
        A: T.Tensor((n, 96), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((96, 80), "float32"),  # type: ignore[valid-type]
        C: T.Tensor((n, 80), "float32"),  # type: ignore[valid-type]
        *,
        block_m: Any = T.auto,
        block_n: Any = T.auto,
    ) -> None:
        with T.Kernel(T.ceildiv(80, block_n), T.ceildiv(n, block_m)) as (y, x):
            a, b = T.alloc_shared((block_m, 96), "float32"), T.alloc_shared((96, block_n), "float32")
            c = T.alloc_fragment((block_m, block_n), "float32")
            T.copy(A[x * block_m, 0], a)
            T.copy(B[0, y * block_n], b)
            T.gemm(a, b, c, clear=True)
            T.copy(c, C[x * block_m, y * block_n])

    function = jit(product, out_idx=2)
    a, b = RNG.standard_normal((50, 96)).astype(np.float32), RNG.standard_normal((96, 80)).astype(np.float32)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    whole, part = function.compile(), function.compile(block_m=16)
    assert part.config["block_m"] == 16
    assert whole.config["block_m"] >= 32  # small tiles copy more for every multiply-add
    assert "per element copied" in whole.explain()
    for kernel in (whole, part):
        np.testing.assert_allclose(kernel(a, b), wanted, rtol=1e-4, atol=1e-4)


def test_extents_of_a_function_that_declares_its_tensors_are_completed_for_its_arrays(jit: Callable[..., Any]) -> None:
    def product(A: Any, B: Any, block_m: Any = T.auto, block_n: Any = T.auto) -> Any:  # type: ignore[reportRedeclaration]
        M, N, K = T.const("M, N, K")
        A: T.Tensor((M, K), "float32")  # type: ignore[valid-type,no-redef]
        B: T.Tensor((K, N), "float32")  # type: ignore[valid-type,no-redef]
        C = T.empty((M, N), "float32")
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m)) as (y, x):
            a, b = T.alloc_shared((block_m, K), "float32"), T.alloc_shared((K, block_n), "float32")
            c = T.alloc_fragment((block_m, block_n), "float32")
            T.copy(A[x * block_m, 0], a)
            T.copy(B[0, y * block_n], b)
            T.gemm(a, b, c, clear=True)
            T.copy(c, C[x * block_m, y * block_n])
        return C

    function = jit(product)
    a, b = RNG.standard_normal((50, 96)).astype(np.float32), RNG.standard_normal((96, 80)).astype(np.float32)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    for given in ({}, {"block_m": 16}, {"block_m": 16, "block_n": 32}):
        np.testing.assert_allclose(function(a, b, **given), wanted, rtol=1e-4, atol=1e-4)
        kernel = function.compile(M=50, N=80, K=96, **given)
        assert {name: kernel.config[name] for name in given} == given
        assert ("per element copied" in kernel.explain()) == (len(given) < 2)
        assert kernel.config["block_n"] in (16, 32, 64, 128)
    with pytest.raises(KernelError, match=r"no configs for block_m, block_n of product, .* autotune\(configs=\[…\]\)"):
        tilecore.autotune()(function)(a, b)


def test_extents_are_left_open_where_the_kernel_is_not_where_it_is_made(jit: Callable[..., Any]) -> None:
    def factory(n: int, block: Any = T.auto) -> Any:
        @T.prim_func
        def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), part: Any = T.auto) -> None:  # type: ignore[valid-type]
            with T.Kernel(T.ceildiv(n, part)) as b:
                for i in T.Parallel(part):
                    B[b * part + i] = A[b * part + i] * float(block)

        return kernel

    function = jit(factory, out_idx=1)
    array = RNG.standard_normal(40).astype(np.float32)
    np.testing.assert_array_equal(function(40, 2)(array), array * 2)
    with pytest.raises(KernelError, match=r"block of factory is T.auto: give a number, or make"):
        function(40)


def test_measured_configurations(jit: Callable[..., Any]) -> None:
    def factory(n: int, block: int = 1, times: int = 1) -> Any:
        @T.prim_func
        def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")) -> None:  # type: ignore[valid-type]
            with T.Kernel(n // block) as b:
                for i in T.Parallel(block):
                    B[b * block + i] = A[b * block + i] * float(times)

        return kernel

    configs = [{"block": block, "times": times} for block in (4, 8) for times in (2, 3)]
    tuned = tilecore.autotune(configs=configs, warmup=1, rep=2)(jit(factory, out_idx=1))
    assert tuned(16, times=2).config["block"] in (4, 8)
    assert tuned(16, block=2, times=3).config["block"] == 2
    assert tuned(16, 2).config["block"] == 2  # given by position: only the other one is chosen
    assert set(tuned.best((16, 2), {}).microseconds) == {"times=2", "times=3"}


def test_what_was_measured_is_remembered_by_program_and_class_of_sizes(jit: Callable[..., Any], tmp_path: Path) -> None:
    n = T.dynamic("n")

    def twice(A: T.Tensor((n, 64), "float32"), B: T.Tensor((n, 64), "float32"), block: int = T.auto) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(n, block)) as i:
            for r, c in T.Parallel(block, 64):
                B[i * block + r, c] = A[i * block + r, c] * 2.0

    def tuned() -> Any:
        return tilecore.autotune(top=3)(jit(twice, out_idx=1, cache=tmp_path))

    first = tuned().best((), {"n": 100})
    assert len(first.microseconds) == 3
    assert not first.remembered
    again, array = tuned(), np.full((120, 64), 3.0, np.float32)
    np.testing.assert_array_equal(again(array), 2 * array)
    assert again.best((array,), {}) == dataclasses.replace(first, remembered=True)
    (record,) = (tmp_path / "tuned").glob("*.json")
    larger = tuned().best((np.zeros((300, 64), np.float32),), {})
    assert not larger.remembered
    record.write_text("{}")
    with pytest.raises(KernelError, match="delete it and tune again"):
        tuned().best((array,), {})
    with pytest.raises(KernelError, match="give n, or call with arrays"):
        tuned().best((), {})


def test_a_name_that_a_symbolic_branch_assigns_is_undecided(jit: Callable[..., Any]) -> None:
    def chosen(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(8) as i:
            if A[i] > 0:  # noqa: SIM108 - the spelling is the point
                value = 1.0
            else:
                value = 2.0
            B[i] = value

    with pytest.raises(TileError) as caught:
        jit(chosen, out_idx=1).compile()
    assert "value" in str(caught.value)
    assert "T.alloc_var" in str(caught.value)
    assert "B[i]" in str(caught.value)


def test_what_is_for_gpu_threads_is_refused_by_name(jit: Callable[..., Any]) -> None:
    def threads(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            i = T.get_thread_binding(0)
            B[i] = A[i]

    with pytest.raises(TileError) as caught:
        jit(threads, out_idx=1).compile()
    assert caught.value.message == "T.get_thread_binding is for GPU threads"
    assert "^" in str(caught.value)


def test_a_loop_that_nothing_ends_is_refused(jit: Callable[..., Any]) -> None:
    def endless(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(8) as i:
            while A[i] > 0:
                B[i] = 1.0

    with pytest.raises(TileError, match="nothing in the loop changes its condition"):
        jit(endless, out_idx=1).compile()


COUNT = T.dynamic("n")


def added(X: T.Tensor((COUNT,), "float32"), C: T.Tensor((COUNT,), "float32"), block: int = T.auto) -> None:  # type: ignore[valid-type]
    with T.Kernel(T.ceildiv(COUNT, block)) as b:
        for i in T.Parallel(block):
            T.atomic_add(C[b * block + i], X[b * block + i])


def declared(X: Any, C: Any, block: int = 8) -> None:  # pyright: ignore[reportRedeclaration]
    n = T.const("n")
    X: T.Tensor((n,), "float32")  # type: ignore[no-redef]
    C: T.Tensor((n,), "float32")  # type: ignore[no-redef]
    with T.Kernel(T.ceildiv(n, block)) as b:
        for i in T.Parallel(block):
            T.atomic_add(C[b * block + i], X[b * block + i])


@pytest.mark.parametrize(("function", "configs"), [(added, None), (declared, [{"block": 8}, {"block": 16}])])
@pytest.mark.parametrize("by_name", [False, True])
def test_measuring_leaves_the_arrays_of_the_call_alone(
    jit: Callable[..., Any], function: Any, configs: Any, by_name: bool, tmp_path: Path
) -> None:
    """Sums join with what stands there: every run that only measures would be added, too."""
    tuned = tilecore.autotune(configs)(jit(function, cache=tmp_path))
    x, c = np.ones(1000, np.float32), np.full(1000, 2.0, np.float32)
    if by_name:
        tuned(X=x, C=c)
    else:
        tuned(x, c)
    np.testing.assert_array_equal(c, 3.0)


def doubled(send: Any, kernel: Any) -> None:
    send.put(kernel(np.full((1000, 4), 3.0, np.float32)))


@pytest.mark.filterwarnings("ignore:This process")  # which is what is tested
def test_a_forked_process_runs_kernels_that_its_parent_has_run(scale: Any) -> None:
    """Threads do not come along with a fork."""
    scale(np.ones((1000, 4), np.float32))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=doubled, args=(results, scale))
    child.start()
    try:
        np.testing.assert_array_equal(results.get(timeout=60), 6.0)
    finally:
        child.kill()
        child.join()


def test_kernels_share_their_threads(jit: Callable[..., Any]) -> None:
    def made(factor: float) -> Any:
        def kernel(A: T.Tensor((999,), "float32"), B: T.Tensor((999,), "float32")) -> None:  # type: ignore[valid-type]
            with T.Kernel(333) as b:
                for i in T.Parallel(3):
                    B[b * 3 + i] = A[b * 3 + i] * factor

        return jit(kernel, out_idx=1, threads=2)

    kernels = [made(float(factor)) for factor in range(5)]
    kernels[0](np.ones(999, np.float32))
    before = threading.active_count()
    for factor, kernel in enumerate(kernels):
        np.testing.assert_array_equal(kernel(np.ones(999, np.float32)), float(factor))
    assert threading.active_count() <= before + 1  # of the two, the first kernel may have needed one
