"""What the verifier refuses, each with its caret; and programs close to those that it accepts."""

from dataclasses import replace

import pytest
from kernel_texts import program_of, refusal, underlined

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Sym, Var, const
from tilecore.errors import TileError
from tilecore.ir import Buffer, Copy, Fill, For, Gemm, Program, Reduce
from tilecore.language import Handle
from tilecore.verify import verify


def test_reading_a_tile_that_nothing_wrote() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            for j in T.Parallel(8):
                C[m, j] = s[j]

    error = refusal(kernel)
    assert error.message == "s is read here and nothing has written it"
    assert underlined(error) == "C[m, j]"
    assert error.instead.startswith("T.clear(s)")


def test_accumulating_into_a_tile_that_nothing_wrote() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.float32)
            c = T.alloc_fragment((8, 8), T.float32)
            T.copy(A, a)
            T.gemm(a, a, c)

    error = refusal(kernel)
    assert error.message == "c is read here and nothing has written it"
    assert underlined(error) == "T.gemm(a, a, c)"


def test_joining_a_reduction_to_a_tile_that_nothing_wrote() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.float32)
            t = T.alloc_fragment((8,), T.float32)
            T.copy(A, a)
            T.reduce_sum(a, t, dim=1, clear=False)

    assert refusal(kernel).message == "t is read here and nothing has written it"


def test_gemm_depths_that_differ() -> None:
    def kernel(A: Handle, block: object = T.auto) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, block), T.float32)
            b = T.alloc_shared((8, 8), T.float32)
            c = T.alloc_fragment((8, 8), T.float32)
            T.copy(A[0, 0], a)
            T.copy(A, b)
            T.gemm(a, b, c, clear=True)

    error = refusal(kernel)
    assert error.message == "gemm sums over block elements of a and 8 of b"
    assert underlined(error) == "T.gemm(a, b, c, clear=True)"
    assert "transpose_A" in error.instead


@pytest.mark.parametrize(
    ("c_shape", "c_dtype", "message"),
    [
        ((4, 8), T.float32, "gemm gives [8, 8]; c is [4, 8]"),
        ((8, 8), T.int32, "gemm of f32 cannot accumulate in i32"),
        ((8, 8, 1), T.float32, "gemm needs tiles of 2 axes; c has 3"),
    ],
)
def test_gemm_results_that_do_not_fit(c_shape: tuple[int, ...], c_dtype: DType, message: str) -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.float32)
            c = T.alloc_fragment(c_shape, c_dtype)
            T.copy(A, a)
            T.gemm(a, a, c, clear=True)

    error = refusal(kernel)
    assert error.message == message
    assert underlined(error) == "T.gemm(a, a, c, clear=True)"


def test_gemm_of_two_types() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.bfloat16)
            h = T.alloc_shared((8, 8), T.float16)
            c = T.alloc_fragment((8, 8), T.float32)
            T.copy(A, a)
            T.copy(A, h)
            T.gemm(a, h, c, clear=True)

    assert refusal(kernel).message == "gemm of bf16 and f16"


def test_gemm_onto_its_own_operand() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.float32)
            c = T.alloc_fragment((8, 8), T.float32)
            T.copy(A, a)
            T.gemm(a, a, c, clear=True)

    program = program_of(kernel)
    body = tuple(replace(stmt, c=stmt.a) if isinstance(stmt, Gemm) else stmt for stmt in program.body)
    with pytest.raises(TileError, match="gemm reads and writes a"):
        verify(replace(program, body=body))


def test_copies_of_different_extents() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            s = T.alloc_shared((4, 8), T.float32)
            T.copy(A[0:8, 0:8], s)

    error = refusal(kernel)
    assert error.message == "copy of [8, 8] from A to [4, 8] of s"
    assert underlined(error) == "T.copy(A[0:8, 0:8], s)"


def test_a_slice_past_the_end_of_a_tile() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            s = T.alloc_shared((8, 8), T.float32)
            T.copy(A[0:4, 0:8], s[6:10, :])

    error = refusal(kernel)
    assert error.message == "axis 0 of s has extent 8; this tile may reach from 6 to 10"


def test_a_slice_whose_extent_depends_on_a_loop() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_shared((8, 8), T.float32)
            T.copy(A[0:m, :], s)

    assert refusal(kernel).message == "the extent of axis 0 of this tile of A is m: it may not depend on a loop"


def test_copying_a_tile_to_itself() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            s = T.alloc_shared((8, 8), T.float32)
            t = T.alloc_shared((8, 8), T.float32)
            T.copy(A, s)
            T.copy(A, t)
            T.copy(s[0:4, :], t[4:8, :])

    program = program_of(kernel)
    *before, last = program.body
    assert isinstance(last, Copy)
    assert isinstance(last.src.source, Buffer)
    itself = replace(last, dst=replace(last.dst, source=last.src.source))
    with pytest.raises(TileError, match="s is copied to itself"):
        verify(replace(program, body=(*before, itself)))


def test_an_index_that_may_leave_its_tile() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.clear(s)
            for j in T.Parallel(8):
                C[m, j] = s[j + 1]

    error = refusal(kernel)
    assert error.message == "axis 0 of s has extent 8; the index (j + 1) is not proved inside it"
    assert underlined(error) == "s[j + 1]"


def test_a_tested_index_may_leave_its_tile() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.clear(s)
            for j in T.Parallel(8):
                C[m, j] = T.if_then_else(j < 7, s[j + 1], 0.0)

    verify(program_of(kernel))


def test_every_point_writing_one_element() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            t = T.alloc_fragment((8,), T.float32)
            T.clear(t)
            for i, j in T.Parallel(8, 8):
                t[i] = t[i] + A[i, j]

    error = refusal(kernel)
    assert error.message.startswith("t[i] is written by every point of j:")
    assert underlined(error) == "t[i]"
    assert error.instead.startswith("T.reduce_sum")


@pytest.mark.parametrize(("i_factor", "j_factor", "fine"), [(8, 1, True), (1, 8, True), (7, 1, False), (1, 1, False)])
def test_flat_indices_must_tell_points_apart(i_factor: int, j_factor: int, fine: bool) -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            t = T.alloc_fragment((64,), T.float32)
            for i, j in T.Parallel(8, 8):
                t[i * i_factor + j * j_factor] = A[i, j]

    if fine:
        verify(program_of(kernel))
    else:
        assert "is not proved to be written by one point of i, j" in refusal(kernel).message


def test_a_remainder_does_not_tell_points_apart() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            t = T.alloc_fragment((4,), T.float32)
            for i in T.Parallel(8):
                t[i % 4] = 1.0

    assert refusal(kernel).message.startswith("t[(i % 4)] is not proved to be written by one point of i")


def test_a_quotient_and_a_remainder_tell_points_apart() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            t = T.alloc_fragment((4, 8), T.float32)
            for i, j in T.Parallel(2, 16):
                t[(i * 16 + j) // 8, j % 8] = T.cast(m, T.float32)

    verify(program_of(kernel))


def test_an_if_around_a_read_that_may_leave_its_tile() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.clear(s)
            with T.If(m < 7):
                C[m, 0] = s[m + 1]

    verify(program_of(kernel))


def test_reading_what_another_point_writes() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            t = T.alloc_fragment((8,), T.float32)
            T.clear(t)
            for i in T.Parallel(8):
                t[i] = t[7 - i]

    error = refusal(kernel)
    assert error.message == "t[((i * -1) + 7)] is read here and may be written by another point as t[i]"
    assert underlined(error) == "t[7 - i]"


def test_two_stores_that_may_meet() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            t = T.alloc_fragment((9,), T.float32)
            for i in T.Parallel(8):
                t[i] = 0.0
                t[i + 1] = 1.0

    error = refusal(kernel)
    assert error.message == "t[(i + 1)] may be written by another point as t[i]"
    assert underlined(error) == "t[i + 1]"


def test_stores_and_loads_that_never_meet() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            t = T.alloc_fragment((16,), T.float32)
            T.clear(t)
            for i in T.Parallel(8):
                t[2 * i] = t[2 * i + 1]  # odd and even
            for i in T.Parallel(8):
                t[i] = t[i + 8]  # two halves
                t[i + 8] = t[i]  # what this point has just written

    verify(program_of(kernel))


def test_tasks_that_write_the_same_elements() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8, 4) as (m, h):
            for j in T.Parallel(8):
                C[m, j] = T.cast(h, T.float32)

    error = refusal(kernel)
    assert error.message == "every task of h writes the same elements of C"
    assert underlined(error) == "C[m, j]"


def test_tasks_that_copy_to_the_same_elements() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8):
            s = T.alloc_shared((8, 8), T.float32)
            T.copy(A, s)
            T.copy(s, C)

    assert refusal(kernel).message == "every task of task writes the same elements of C"


def test_one_task_chosen_by_an_if_may_write() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m, T.If(m == 3):
            for i, j in T.Parallel(8, 8):
                C[i, j] = 1.0

    verify(program_of(kernel))


def test_a_loop_variable_after_its_loop() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            total = 0.0
            for n in T.serial(8):
                total = total + T.cast(n, T.float32)
            C[m, 0] = total

    error = refusal(kernel)
    assert error.message == "n is used outside of its loop"
    assert underlined(error) == "C[m, 0]"
    assert "a traced body runs once" in error.instead


def test_a_symbol_that_no_input_has() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(T.dynamic("width")) as m:
            C[m, 0] = 1.0

    assert refusal(kernel).message == "width is not a dim of any input of kernel"


@pytest.mark.parametrize(("shape", "message"), [((4,), "[8]; t is [4]"), ((8, 8), "[8]; t is [8, 8]")])
def test_reductions_that_do_not_fit(shape: tuple[int, ...], message: str) -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.float32)
            t = T.alloc_fragment(shape, T.float32)
            T.copy(A, a)
            T.reduce_max(a, t, dim=1)

    error = refusal(kernel)
    assert error.message == f"a without axis 1 is {message}"
    assert underlined(error) == "T.reduce_max(a, t, dim=1)"


def test_a_reduction_into_another_type() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8):
            a = T.alloc_shared((8, 8), T.float32)
            t = T.alloc_fragment((8,), T.int32)
            T.copy(A, a)
            T.reduce_max(a, t, dim=1)

    assert refusal(kernel).message == "a value of f32 for t, which is i32"


def small() -> Program:
    """A program of one fill and one loop, to be broken by hand as a wrong pass would."""

    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8, 8), T.float32)
            t = T.alloc_fragment((8,), T.float32)
            for n in T.serial(2):
                T.copy(A, s)
                T.reduce_sum(s, t, dim=1)
                C[m, n] = t[0]

    return program_of(kernel)


def broken(program: Program, message: str) -> None:
    with pytest.raises(TileError) as caught:
        verify(program)
    assert caught.value.message == message


def test_what_passes_may_break() -> None:
    program = small()
    verify(program)
    loop = program.body[0]
    assert isinstance(loop, For)
    s, t = program.buffers
    stranger = Buffer("stranger", DType.F32, (const(8),), "fragment")
    fill = Fill(stranger, const(0.0, DType.F32))
    broken(replace(program, body=(fill,)), "stranger is not declared by kernel")
    broken(replace(program, buffers=(s, t, s)), "kernel: two buffers are named s")
    broken(
        replace(program, buffers=(replace(s, scope="global"), t)), "s has scope 'global', not one of shared, fragment"
    )
    broken(replace(program, body=(Fill(t, const(0)),)), "a value of i64 for t, which is f32")
    kinds = "a reduction of kind 'mean', not one of sum, max, fmax, min, prod, bitand, bitor, bitxor"
    broken(replace(program, body=(Reduce("mean", s, t, 1),)), kinds)
    broken(replace(program, body=(replace(loop, kind="wild"),)), "a loop of kind 'wild' with 1 stages")
    nested = replace(loop, body=(replace(loop, var=Var("n", extent=const(3))),))
    broken(replace(program, body=(nested,)), "the loop variable n hides another of that name")
    hidden = replace(loop, var=Var("m", extent=const(3)))
    broken(replace(program, body=(hidden,)), "the loop variable m hides another of that name")
    broken(replace(program, tunables=(), grid=(Var("m", extent=Sym("Z")),)), "Z is not a dim of any input of kernel")
    broken(replace(program, views=()), "A is not declared by kernel")
    broken(replace(program, outputs=()), "C is written but is not an output of kernel")
