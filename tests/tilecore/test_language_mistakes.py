"""Typical mistakes of a kernel's author: each is one error of ours, at its place, that says what to do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_texts import underlined

import tilecore
from tilecore import language as T
from tilecore.errors import TileError
from tilecore.trace import trace

Tensor: Any = T.Tensor


def typo() -> None:
    with T.Kernel(1) as _:
        T.alloc_shard((8,), "float32")


def numpy_function(A: Tensor((8,)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        for i in T.Parallel(8):
            C[i] = np.exp(A[i])


def arithmetic_of_a_tile(A: Tensor((8,)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        a = T.alloc_shared((8,), "float32")
        T.copy(A, a)
        T.copy(a * 2, C)


def three_names_for_two_extents(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(8, 8) as (x, y, z):
        C[x, y] = z


def two_names_for_one_axis(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        for i, j in T.Parallel(8):
            C[i, j] = 0.0


def tile_of_a_task_s_size() -> None:
    with T.Kernel(4) as n:
        T.alloc_shared((n, 8), "float32")


def block_forgotten(A: Tensor((32,)), C: Tensor((32,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(4) as n:
        for i in T.Parallel(8):
            C[n + i] = A[n * 8 + i]


def pairs_of_tasks_in_one_place(A: Tensor((32,)), C: Tensor((32,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(4) as n:
        a = T.alloc_shared((8,), "float32")
        T.copy(A[n * 8], a)
        T.copy(a, C[n // 2 * 8])


def while_over_points(A: Tensor((8,)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        a = T.alloc_fragment((8,), "float32")
        T.copy(A, a)
        for i in T.Parallel(8):
            with T.While(a[i] > 0):
                a[i] -= 1.0
        T.copy(a, C)


def ones_outside(A: Tensor((8,)), C: Tensor((9,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        T.annotate_safe_value({A: 1.0})
        T.copy(A[0:9], C)


def barrier() -> None:
    with T.Kernel(1) as _:
        T.mbarrier_wait_parity(0, 1)


def number_of_no_byte(A: Tensor((8,), "int8"), C: Tensor((8,), "bool")) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        for i in T.Parallel(8):
            C[i] = A[i] < 300


def negative_byte(C: Tensor((8,), "uint8")) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        T.fill(C[0:8], -1)


def what_stood_there(C: Tensor((8,), "int32"), D: Tensor((8,), "int32")) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        for i in T.serial(8):
            D[i] = T.atomic_add(C[0], 1, return_prev=True)


def assertion_of_a_point(A: Tensor((8,)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        for i in T.Parallel(8):
            T.device_assert(A[i] > 0, "not above 0")
            C[i] = A[i]


MISTAKES = (
    (what_stood_there, "T.atomic_add with return_prev", "T.atomic_add(C[0], 1, return_prev=True)", "T.cumsum"),
    (assertion_of_a_point, "T.assert inside T.Parallel", 'T.device_assert(A[i] > 0, "not above 0")', "T.all_of"),
    (typo, "the tile language has no T.alloc_shard", "T.alloc_shard", "T.alloc_shared"),
    (numpy_function, "numpy's exp of the symbolic value A[i]", "np.exp(A[i])", "T.exp"),
    (arithmetic_of_a_tile, "arithmetic of shared a: f32[8], which is a whole tile", "a * 2", "T.Parallel"),
    (three_names_for_two_extents, "T.Kernel of 2 extents and 3 names", None, "one name for each extent"),
    (two_names_for_one_axis, "T.Parallel of 1 extents and 2 names", "for i, j in T.Parallel(8):",
     "one name for each extent"),
    (tile_of_a_task_s_size, "a tile extent is n, which a loop or the grid changes",
     'T.alloc_shared((n, 8), "float32")', "numbers"),
    (block_forgotten, "neighbouring tasks of n write the same elements of C, at [(i + n)]", "C[n + i]",
     "n * block + i"),
    (pairs_of_tasks_in_one_place, "neighbouring tasks of n write the same elements of C", "T.copy(a, C[n // 2 * 8])",
     "differs for every n"),
    (while_over_points, "a T.While inside T.Parallel", "T.While(a[i] > 0)", "T.serial with `if`"),
    (ones_outside, "1.0 outside of view A: f32[8], where 0 is read", "T.annotate_safe_value({A: 1.0})",
     "T.if_then_else"),
    (number_of_no_byte, "300 is no i8: these are -128 to 127", "A[i] < 300", "T.cast(300, T.int8), its lowest 8 bits"),
    (negative_byte, "-1 is no u8: these are 0 to 255", "T.fill(C[0:8], -1)", "a wider type"),
    (barrier, "T.mbarrier_wait_parity is for GPU threads", "T.mbarrier_wait_parity", "such as T.copy"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "message", "place", "advice"), MISTAKES, ids=lambda each: getattr(each, "__name__", None)
)
def test_a_mistake(kernel: Callable[..., None], message: str, place: str | None, advice: str) -> None:
    with pytest.raises(TileError) as caught:
        trace(kernel)
    assert caught.value.message.startswith(message)
    assert advice in caught.value.instead
    if place is not None:
        assert underlined(caught.value) == place


def points_past_the_tile(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        tile = T.alloc_shared((8, 4), "float32")
        for i, j in T.Parallel(8, 5):
            tile[i, j] = 0.0
        T.copy(tile, C[0, 0])


def copy_of_other_extents(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        source = T.alloc_shared((8, 4), "float32")
        target = T.alloc_shared((4, 4), "float32")
        T.clear(source)
        T.copy(source, target)
        T.copy(target, C[0, 0])


def product_of_other_extents(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        a = T.alloc_shared((8, 4), "float32")
        b = T.alloc_shared((5, 8), "float32")
        T.gemm(a, b, T.alloc_fragment((8, 8), "float32"), clear_accum=True)


def result_of_other_extents(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        a = T.alloc_shared((8, 8), "float32")
        c = T.alloc_fragment((8, 7), "float32")
        T.gemm(a, a, c, clear_accum=True)


def sums_of_other_extents(C: Tensor((8, 8))) -> None:  # type: ignore[valid-type]
    with T.Kernel(1) as _:
        a = T.alloc_shared((8, 4), "float32")
        sums = T.alloc_fragment((4,), "float32")
        T.reduce_sum(a, sums, dim=1)


CONTRADICTIONS = (
    (points_past_the_tile, "tile[i, j]", ['T.alloc_shared((8, 4), "float32")']),
    (copy_of_other_extents, "T.copy(source, target)",
     ['T.alloc_shared((8, 4), "float32")', 'T.alloc_shared((4, 4), "float32")']),
    (product_of_other_extents, None, ['T.alloc_shared((8, 4), "float32")', 'T.alloc_shared((5, 8), "float32")']),
    (result_of_other_extents, "T.gemm(a, a, c, clear_accum=True)",
     ['T.alloc_shared((8, 8), "float32")', 'T.alloc_fragment((8, 7), "float32")']),
    (sums_of_other_extents, "T.reduce_sum(a, sums, dim=1)",
     ['T.alloc_shared((8, 4), "float32")', 'T.alloc_fragment((4,), "float32")']),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "place", "others"), CONTRADICTIONS, ids=lambda each: getattr(each, "__name__", None)
)
def test_extents_that_contradict_each_other_show_every_place(
    kernel: Callable[..., None], place: str | None, others: list[str]
) -> None:
    with pytest.raises(TileError) as caught:
        trace(kernel)
    if place is not None:
        assert underlined(caught.value) == place
    shown = [underlined(TileError(found, span)) for span, found in caught.value.against]
    assert shown == others
    assert all(span.render(found) in str(caught.value) for span, found in caught.value.against)


def test_tasks_that_a_bound_keeps_apart_are_no_mistake() -> None:
    def kernel(A: Tensor((32,)), C: Tensor((40,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(4) as n:
            for i in T.Parallel(16):
                with T.If(i < 8):
                    C[n * 8 + i] = A[n * 8 + i]

    trace(kernel)


@pytest.mark.parametrize("tasks", [0, 1])
def test_tasks_that_are_none_or_one_meet_nobody(tasks: int) -> None:
    def kernel(A: Tensor((8,)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(tasks) as _:
            for i in T.Parallel(8):
                C[i] = A[i]

    trace(kernel)


def test_a_name_that_is_not_there_is_an_attribute_that_is_not_there() -> None:
    assert not hasattr(T, "alloc_shard")
    assert not hasattr(T, "tma_copy")


def test_what_t_empty_made_has_to_be_returned() -> None:
    @tilecore.jit
    def forgotten(A: Any) -> None:  # pyright: ignore[reportRedeclaration]
        N = T.const("N")
        A: T.Tensor((N,), "float32")  # type: ignore[valid-type, no-redef]
        B = T.empty((N,), "float32")
        with T.Kernel(1) as _:
            T.copy(A, B)

    with pytest.raises(tilecore.KernelError, match=r"forgotten makes B by T.empty and does not return it"):
        forgotten(np.ones(3, np.float32))


def test_a_result_that_nothing_writes() -> None:
    def idle(A: Tensor((8,)), C: Tensor((8,))) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            T.print(A[0])

    with pytest.raises(tilecore.KernelError, match="idle returns C, which nothing in it writes"):
        tilecore.compile(idle, out_idx=1)
