"""What the author of a wrong kernel reads: text, caret and what to write instead, for every refusal of the language."""

import traceback
from pathlib import Path

import pytest
from kernel_texts import OPERANDS, program_of, refusal, underlined

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Var, const
from tilecore.contract.spec import Place, Tensor, View
from tilecore.errors import TileError
from tilecore.language import Handle
from tilecore.trace import trace


def test_if_on_a_symbolic_value() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                if j > m:
                    C[m, j] = 1.0

    error = refusal(kernel)
    assert error.message == "(j > m) is symbolic: it has no truth value while the kernel is traced"
    assert underlined(error) == "j > m"
    assert "T.if_then_else(condition, a, b)" in str(error)
    assert "`with T.If(condition):`" in str(error)


def test_while_on_a_symbolic_value() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            while m < 4:
                pass

    assert underlined(refusal(kernel)) == "m < 4"


def test_and_of_symbolic_values() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                C[m, j] = T.if_then_else(j > m and j > 2, 1.0, 0.0)

    error = refusal(kernel)
    assert underlined(error) == "j > m and j > 2"
    assert "&, | and ~" in error.instead


def test_or_of_symbolic_values() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.If(m < 2 or m > 6)

    assert underlined(refusal(kernel)) == "m < 2 or m > 6"


def test_not_of_a_symbolic_value() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.If(not m < 2)

    assert underlined(refusal(kernel)) == "not m < 2"


def test_chained_comparison() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.If(2 < m < 6)

    error = refusal(kernel)
    assert underlined(error) == "2 < m < 6"
    assert "(a < b) & (b < c)" in error.instead


def test_in_with_a_symbolic_value() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.If(m in (1, 2))

    assert underlined(refusal(kernel)) == "m in (1, 2)"


def test_range_of_a_symbolic_value() -> None:
    def kernel(D: Handle) -> None:
        with T.Kernel(1):
            for _ in range(D.shape[0]):
                pass

    error = refusal(kernel)
    assert error.message == "N is symbolic: it has no Python index while the kernel is traced"
    assert underlined(error) == "range(D.shape[0])"
    assert "T.serial(n)" in error.instead


@pytest.mark.parametrize(("convert", "what"), [(int, "int"), (float, "float"), (len, "length"), (list, "sequence")])
def test_python_conversions(convert: type, what: str) -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            convert(m)

    error = refusal(kernel)
    assert error.message == f"m is symbolic: it has no {what} while the kernel is traced"
    assert underlined(error) == "convert(m)"


def test_iterating_a_tile() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            s = T.alloc_fragment((8,), T.float32)
            for _ in s:
                pass

    error = refusal(kernel)
    assert error.message == "s cannot be iterated"
    assert underlined(error) == "for _ in s:"


def test_mixing_half_types() -> None:
    def kernel(H: Handle, K: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                C[m, j] = H[m, j] + K[m, j]

    error = refusal(kernel)
    assert error.message == "cannot mix f16 and bf16"
    assert underlined(error) == "H[m, j] + K[m, j]"


def test_dividing_integers() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            _ = m / 2

    error = refusal(kernel)
    assert error.message == "/ of i64 and i64"
    assert underlined(error) == "m / 2"
    assert error.instead.startswith("// for a whole quotient")


def test_whole_quotient_of_floats() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8) as m:
            _ = A[m, 0] // 2

    error = refusal(kernel)
    assert error.message == "// of f32"
    assert "T.floor(x / y)" in error.instead


def test_float_function_of_an_index() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.exp(m)

    error = refusal(kernel)
    assert error.message == "exp of i64"
    assert underlined(error) == "T.exp(m)"
    assert error.instead == "T.exp(T.cast(x, T.float32)) for a float result"


def test_logic_of_numbers() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            _ = m & (m > 2)

    error = refusal(kernel)
    assert error.message == "cannot mix i64 and bool"
    assert underlined(error) == "m & (m > 2)"


@pytest.mark.parametrize("name", ["and", "or", "xor", "shl", "shr"])
def test_bits_of_floats(name: str) -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8) as m:
            x = A[m, 0]
            _ = {"and": T.bitwise_and, "or": T.bitwise_or, "xor": T.bitwise_xor, "shl": T.shift_left}.get(
                name, T.shift_right
            )(x, x)

    error = refusal(kernel)
    assert error.message in (f"{name} needs bools or integers, found f32", f"{name} needs integers, found f32")
    assert "T.reinterpret(x, T.int32)" in error.instead


def test_arithmetic_of_bools() -> None:
    def kernel(M: Handle) -> None:
        with T.Kernel(8) as m:
            _ = M[m, 0] + M[m, 1]

    error = refusal(kernel)
    assert error.message == "add of bool"
    assert "T.if_then_else(x, 1.0, 0.0)" in error.instead


def test_condition_that_is_a_number() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.if_then_else(m, 1.0, 0.0)

    error = refusal(kernel)
    assert error.message == "the condition is i64"
    assert underlined(error) == "T.if_then_else(m, 1.0, 0.0)"


def test_if_condition_that_is_a_number() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m, T.If(m):
            pass

    error = refusal(kernel)
    assert error.message == "the condition is i64"
    assert underlined(error) == "T.If(m)"


def test_a_tile_where_a_scalar_belongs() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            for j in T.Parallel(8):
                C[m, j] = T.exp(s)  # type: ignore[arg-type]

    error = refusal(kernel)
    assert error.message == "expected a scalar, found fragment s: f32[8]"
    assert underlined(error) == "T.exp(s)"


def test_wrong_number_of_indices() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                C[m, j] = A[j]

    error = refusal(kernel)
    assert error.message == "view A: f32[8, 8] has 2 axes, found 1 index"
    assert underlined(error) == "A[j]"


def test_float_index() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                C[m, j] = A[m, A[m, j]]

    error = refusal(kernel)
    assert error.message == "an index must be an integer, found f32"
    assert underlined(error) == "A[m, A[m, j]]"


def test_storing_a_float_in_an_integer_tile() -> None:
    def kernel(A: Handle, J: Handle) -> None:
        with T.Kernel(8) as m:
            J[m] = A[m, 0]

    error = refusal(kernel)
    assert error.message == "cannot store f32 into an element of i32"
    assert underlined(error) == "J[m]"
    assert error.instead == "T.cast(value, T.int32)"


def logical(kind: str) -> View | Place:
    """A view or a place over (i < 8, j < 8)."""
    axes = (Var("i", extent=const(8)), Var("j", extent=const(8)))
    if kind == "view":
        return View("Q", axes, Load(OPERANDS["A"], axes))
    return Place(Tensor("O", DType.F32, (const(8), const(8))), axes, axes)


def test_writing_a_view() -> None:
    def kernel(Q: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                Q[m, j] = 0.0

    with pytest.raises(TileError) as caught:
        trace(kernel, inputs=(OPERANDS["A"],), operands={"Q": logical("view")})
    assert caught.value.message == "Q is an input: it cannot be assigned"
    assert underlined(caught.value) == "Q[m, j]"


def test_reading_an_output() -> None:
    def kernel(O: Handle) -> None:  # noqa: E741
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                O[m, j] += 1.0

    with pytest.raises(TileError) as caught:
        trace(kernel, operands={"O": logical("place")})
    assert caught.value.message == "O is an output: it can be written, not read"
    assert underlined(caught.value) == "O[m, j] += 1.0"


def test_reading_a_tensor_that_is_written() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                A[m, j] = A[m, j] + 1.0

    error = refusal(kernel)
    assert error.message == "A is written by this kernel: it cannot be read"
    assert underlined(error) == "A[m, j]"


def test_assigning_a_slice() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            C[m, 0:8] = 0.0

    error = refusal(kernel)
    assert error.message == "a slice cannot be assigned"
    assert underlined(error) == "C[m, 0:8]"


def test_a_slice_with_a_step() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_shared((4,), T.float32)
            T.copy(A[m, 0:8:2], s)

    error = refusal(kernel)
    assert error.message == "a slice of a tile has no step"
    assert underlined(error) == "A[m, 0:8:2]"


def test_a_copy_without_a_size() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            T.copy(A[m, 0], C[m, 0])

    error = refusal(kernel)
    assert error.message == "neither side of this copy says how large it is"
    assert underlined(error) == "T.copy(A[m, 0], C[m, 0])"


def test_a_copy_of_something_else() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            s = T.alloc_shared((4,), T.float32)
            T.copy(1.0, s)

    error = refusal(kernel)
    assert error.message == "expected a tile, found float 1.0"
    assert underlined(error) == "T.copy(1.0, s)"


def test_a_tile_with_too_many_axes_for_its_source() -> None:
    def kernel(A: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_shared((4, 4, 4), T.float32)
            T.copy(A[m, 0], s)

    error = refusal(kernel)
    assert error.message == "a tile of [4, 4, 4] does not fit A, which has 2 axes"


def test_a_stale_value() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.clear(s)
            for j in T.Parallel(8):
                old = s[j]
                s[j] = 1.0
                C[m, j] = old

    error = refusal(kernel)
    line = kernel.__code__.co_firstlineno + 5
    assert error.message == f"this value was read from s on line {line}, and s is written before it is used here"
    assert underlined(error) == "C[m, j]"


def test_a_value_that_a_later_iteration_would_read_anew() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.clear(s)
            first = s[0]
            for _ in T.serial(3):
                for j in T.Parallel(8):
                    C[m, j] = first
                T.fill(s, 1.0)

    error = refusal(kernel)
    assert "s is written before it is used here" in error.message
    assert underlined(error) == "C[m, j]"


def test_break_out_of_a_loop() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            s = T.alloc_fragment((8,), T.float32)
            for _ in T.serial(3):
                T.clear(s)
                break

    error = refusal(kernel)
    assert error.message.startswith("this loop was left by break, return or an error")
    assert underlined(error) == "T.serial(3)"


def test_return_out_of_a_parallel_loop() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                C[m, j] = 0.0
                return

    error = refusal(kernel)
    assert error.message.startswith("this T.Parallel loop was left")
    assert underlined(error) == "T.Parallel(8)"


def test_a_loop_inside_parallel_whose_bounds_differ_between_points() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                for _ in T.serial(j + 3):
                    C[m, j] = 0.0

    error = refusal(kernel)
    assert error.message.endswith("differ between points of T.Parallel: they depend on j")
    assert underlined(error) == "T.serial(j + 3)"


def test_a_tile_statement_inside_parallel() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            s = T.alloc_fragment((8,), T.float32)
            for _ in T.Parallel(8):
                T.clear(s)

    error = refusal(kernel)
    assert error.message == "T.fill inside T.Parallel: it works on whole tiles"
    assert underlined(error) == "T.clear(s)"


def test_else_without_if() -> None:
    def kernel() -> None:
        with T.Kernel(8), T.Else():
            pass

    error = refusal(kernel)
    assert error.message == "T.Else without a T.If just before it"
    assert underlined(error) == "T.Else()"


def test_a_reduction_over_no_such_axis() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            s = T.alloc_fragment((8,), T.float32)
            t = T.alloc_fragment((1,), T.float32)
            T.reduce_sum(s, t, dim=1)

    error = refusal(kernel)
    assert error.message == "fragment s: f32[8] has no axis 1"
    assert underlined(error) == "T.reduce_sum(s, t, dim=1)"
    assert error.instead == "dim between -1 and 0"


def test_gemm_of_no_tile() -> None:
    def kernel(A: Handle, B: Handle) -> None:
        with T.Kernel(8):
            c = T.alloc_fragment((8, 8), T.float32)
            T.gemm(A, 2.0, c, clear=True)  # type: ignore[arg-type]

    error = refusal(kernel)
    assert error.message == "T.gemm works on whole tiles, found float 2.0"
    assert error.instead == "a tile, an operand or a slice of one"


def test_no_grid() -> None:
    def kernel(A: Handle) -> None:
        pass

    error = refusal(kernel)
    assert error.message == "kernel has no grid"
    assert f"{Path(__file__)}:{kernel.__code__.co_firstlineno}" in str(error)


def test_statements_outside_of_the_grid() -> None:
    def store(C: Handle) -> None:
        C[0, 0] = 1.0

    def allocate() -> None:
        T.alloc_shared((8,), T.float32)

    assert refusal(store).message == "a statement outside of T.Kernel"
    assert refusal(allocate).message == "a tile allocated outside of T.Kernel"


def test_a_second_grid() -> None:
    def kernel() -> None:
        with T.Kernel(8), T.Kernel(8):
            pass

    error = refusal(kernel)
    assert error.message == "a second T.Kernel in one kernel"
    assert underlined(error) == "T.Kernel(8)"


def test_calling_a_kernel_directly() -> None:
    with pytest.raises(TileError, match=r"T\.Kernel outside of a trace"):
        T.Kernel(8)


def test_a_dtype_that_does_not_exist() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            T.alloc_shared((8,), "float31")

    error = refusal(kernel)
    assert error.message == "no dtype 'float31'"
    assert underlined(error) == 'T.alloc_shared((8,), "float31")'
    assert "bfloat16" in error.instead


def test_a_negative_extent() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            T.alloc_shared((-1,), T.float32)

    assert refusal(kernel).message == "a tile extent is -1"


def test_missing_and_unknown_operands() -> None:
    def kernel(A: Handle, block: object = T.auto) -> None:
        with T.Kernel(8):
            pass

    with pytest.raises(TileError, match="no operand for the parameter A of kernel"):
        trace(kernel)
    with pytest.raises(TileError, match=r"no extent for block, which is T\.auto"):
        trace(kernel, operands={"A": OPERANDS["A"]}, extents={})
    with pytest.raises(TileError, match="kernel has no parameter bloc"):
        trace(kernel, operands={"A": OPERANDS["A"]}, extents={"block": 1, "bloc": 2})


def test_a_tunable_named_like_a_dim() -> None:
    def kernel(D: Handle, N: object = T.auto) -> None:
        with T.Kernel(8):
            pass

    assert refusal(kernel).message == "N is T.auto, and a tensor or a dynamic extent has that name"


def test_errors_show_the_author_and_not_the_front_end() -> None:
    def kernel() -> None:
        with T.Kernel(8) as m:
            T.exp(m)

    def files(debug: bool) -> set[str]:
        with pytest.raises(TileError) as caught:
            trace(kernel, debug=debug)
        return {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}

    assert files(debug=False) == {Path(__file__).name, "trace.py"}
    assert {"scalars.py", "value.py"} <= files(debug=True)


def test_an_error_of_the_author_s_own_passes_unchanged() -> None:
    def kernel() -> None:
        with T.Kernel(8):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program_of(kernel)


def test_a_name_for_a_tile_and_for_a_cell() -> None:
    def kernel(C: T.Tensor((8,), "float32")) -> None:  # type: ignore[valid-type]
        with T.Kernel(1) as _:
            total = T.alloc_var(T.float32, init=0.0)
            total, _ = T.alloc_fragment((8,), T.float32), total + 1.0
            T.copy(total, C)

    with pytest.raises(TileError, match=r"total is a tile here and a T\.alloc_var elsewhere") as caught:
        T.prim_func(kernel)
    assert underlined(caught.value) == "total, _ = T.alloc_fragment((8,), T.float32), total + 1.0"
