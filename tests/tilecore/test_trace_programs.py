"""What tracing makes: names, spans, structure, promotion, tunables and operands."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from kernel_texts import OPERANDS, program_of

from tilecore import language as T
from tilecore.contract.dtype import DType
from tilecore.contract.expr import Sym, const
from tilecore.contract.spec import Place, Tensor, View
from tilecore.interpret import interpret
from tilecore.ir import Buffer, Copy, For, If, Parallel, Store
from tilecore.language import Handle, Value
from tilecore.printer import print_program, print_statement
from tilecore.span import Span
from tilecore.trace import trace


def body_text(kernel: Callable[..., None], **extents: int) -> str:
    return "\n".join(map(print_statement, program_of(kernel, **extents).body))


def test_names_are_the_author_s_and_unique() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(2, 3) as (x, y):
            s = T.alloc_shared((8, 8), T.float32)
            x_ = T.alloc_fragment((8, 8), T.float32)
            A1 = T.alloc_fragment(8, T.float32)
            s2, s3 = (T.alloc_fragment((8,), T.float32) for _ in range(2))
            T.copy(A, s)
            for k in T.serial(2):
                for i, j in T.Parallel(8, 8):
                    x_[i, j] = s[i, j] + T.cast(k, T.float32)
            for i, j in T.Parallel(8, 8):
                C[i, j + x * 32 + y * 8] = x_[i, j]
            T.clear(A1)
            T.clear(s2)
            T.clear(s3)

    program = program_of(kernel)
    assert [axis.name for axis in program.grid] == ["x", "y"]
    assert [buffer.name for buffer in program.buffers] == ["s", "x_", "A1", "fragment", "fragment1"]
    loop = program.body[1]
    assert isinstance(loop, For)
    assert loop.var.name == "k"
    first, second = loop.body[0], program.body[2]
    assert isinstance(first, Parallel)
    assert isinstance(second, Parallel)
    assert [axis.name for axis in first.axes] == ["i", "j"]
    assert [axis.name for axis in second.axes] == ["i1", "j1"]


def test_every_statement_has_its_span() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(1):
            s = T.alloc_shared((8, 8), T.float32)
            T.copy(A, s)
            for n in T.Pipelined(1, 3, num_stages=4):
                T.fill(s, 2.0)
                for i, j in T.Parallel(8, 8):
                    C[i, j] = s[i, j] * T.cast(n, T.float32)

    program = program_of(kernel)
    lines = inspect.getsource(kernel).splitlines()
    first = kernel.__code__.co_firstlineno

    def text(span: Span | None) -> str:
        assert span is not None
        assert span.file == __file__
        assert span.line == span.end_line
        indent = 4  # of this file's nested function, which getsource keeps
        assert lines[0].startswith(" " * indent + "def")
        return lines[span.line - first][span.column : span.end_column]

    copy, loop = program.body
    assert isinstance(loop, For)
    assert (loop.kind, loop.stages, str(loop.start), str(loop.var.extent)) == ("pipelined", 4, "0", "2")
    fill, parallel = loop.body
    assert isinstance(parallel, Parallel)
    assert text(program.buffers[0].span) == "T.alloc_shared((8, 8), T.float32)"
    assert text(copy.span) == "T.copy(A, s)"
    assert text(loop.span) == "T.Pipelined(1, 3, num_stages=4)"
    assert text(fill.span) == "T.fill(s, 2.0)"
    assert text(parallel.span) == "T.Parallel(8, 8)"
    store = parallel.body[0]
    assert text(store.span) == "C[i, j]"
    assert text(getattr(store.value, "span", None)) == "s[i, j] * T.cast(n, T.float32)"


def test_tunables_are_symbols_then_numbers() -> None:
    def kernel(A: Handle, C: Handle, *, block_m: Any = T.auto, scale: float = 2.0) -> None:
        with T.Kernel(T.ceildiv(8, block_m)) as m:
            s = T.alloc_shared((block_m, 8), T.float32)
            T.copy(A[m * block_m, 0], s)
            for i, j in T.Parallel(block_m, 8):
                C[m * block_m + i, j] = s[i, j] * scale

    symbolic = program_of(kernel)
    assert symbolic.tunables == (Sym("block_m"),)
    assert symbolic.buffers[0].shape == (Sym("block_m"), const(8))
    concrete = program_of(kernel, block_m=3)
    assert concrete.tunables == ()
    assert concrete.grid[0].extent == const(3)
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(interpret(concrete, {"A": array})["C"], array * 2)


def test_known_extents_are_python_ints() -> None:
    seen: list[Any] = []

    def kernel(D: Handle) -> None:
        with T.Kernel(1):
            seen.extend(D.shape)

    program_of(kernel)
    assert isinstance(seen[0], Value)
    assert seen[1] == 8
    assert isinstance(seen[1], int)


def test_promotion() -> None:
    seen: dict[str, DType] = {}

    def kernel(A: Handle, H: Handle, L: Handle, I: Handle, J: Handle, M: Handle) -> None:  # noqa: E741
        with T.Kernel(8) as m:
            seen["wider float"] = (A[m, 0] + H[m, 0]).dtype
            seen["widest float"] = (L[m, 0] * A[m, 0]).dtype
            seen["number"] = (2 * H[m, 0] + 0.5).dtype
            seen["index and float"] = (A[m, 0] * m).dtype
            seen["index and half"] = (H[m, 0] * m).dtype
            seen["index and number"] = (m * 0.5).dtype
            seen["bits"] = ((J[m] & 7) ^ (J[m] << 2)).dtype
            seen["wider int"] = (I[m] + J[m]).dtype
            seen["comparison"] = (A[m, 0] < 3).dtype
            seen["logic"] = (~M[m, 0] & (m > 2)).dtype
            seen["infinity"] = T.max(H[m, 0], -T.infinity).dtype
            seen["cast"] = T.cast(J[m], T.float16).dtype
            seen["two numbers"] = T.if_then_else(m > 2, 1.0, 0.0).dtype
            seen["numpy"] = (np.float32(2.0) * H[m, 0]).dtype  # type: ignore[operator]

    program_of(kernel)
    assert seen == {
        "wider float": DType.F32,
        "widest float": DType.F64,
        "number": DType.F16,
        "index and float": DType.F32,
        "index and half": DType.F16,
        "index and number": DType.F32,
        "bits": DType.I32,
        "wider int": DType.I64,
        "comparison": DType.BOOL,
        "logic": DType.BOOL,
        "infinity": DType.F16,
        "cast": DType.F16,
        "two numbers": DType.F32,
        "numpy": DType.F16,
    }


def test_stores_narrow_and_indices_widen() -> None:
    def kernel(A: Handle, H: Handle, J: Handle) -> None:
        with T.Kernel(8) as m:
            for j in T.Parallel(8):
                H[m, j] = A[J[m], j]

    assert body_text(kernel) == "parallel j < 8\n  H[m, j] = f16(A[i64(J[m]), j])"


def test_copies_align_to_the_right_and_take_slices() -> None:
    def kernel(D: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            row = T.alloc_shared((8,), T.float32)
            block = T.alloc_shared((2, 4), T.float32)
            T.copy(D[m, 0], row)
            T.copy(D[m : m + 2, 4:], block)
            T.copy(block[1, :], row[0:4])
            T.copy(row, C[m, 0])

    assert body_text(kernel).splitlines() == [
        "copy row = D[m, 0 : +8]",
        "copy block = D[m : +2, 4 : +4]",
        "copy row[0 : +4] = block[1, 0 : +4]",
        "copy C[m, 0 : +8] = row",
    ]


def test_tensor_operands_are_inputs_or_outputs_by_their_use() -> None:
    def kernel(A: Handle, C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_shared((8,), T.float32)
            T.copy(A[m, 0], s)
            T.copy(s, C[m, 0])

    program = program_of(kernel)
    assert program.inputs == (OPERANDS["A"],)
    assert program.outputs == (OPERANDS["C"],)
    assert [view.name for view in program.views] == ["A"]
    assert [place.name for place in program.places] == ["C"]
    copies = [stmt for stmt in program.body if isinstance(stmt, Copy)]
    assert isinstance(copies[0].src.source, View)
    assert isinstance(copies[1].dst.source, Place)


def test_annotated_tensors_need_no_operands() -> None:
    rows = T.dynamic("rows")

    def double(A: T.Tensor((rows, 4), "float32"), C: T.Tensor((rows, 4), T.float32)) -> None:  # type: ignore[valid-type]
        with T.Kernel(rows) as r:
            for j in T.Parallel(4):
                C[r, j] = A[r, j] * 2.0

    program = trace(double)
    assert program.inputs == (Tensor("A", DType.F32, (Sym("rows"), const(4))),)
    array = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(interpret(program, {"A": array})["C"], array * 2)


def test_if_and_else() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            with T.If(m < 3):
                T.fill(s, 1.0)
            with T.Else():
                T.fill(s, 2.0)
            for j in T.Parallel(8):
                C[m, j] = s[j]

    program = program_of(kernel)
    assert isinstance(program.body[0], If)
    result = interpret(program, {})["C"]
    np.testing.assert_array_equal(result[:, 0], [1, 1, 1, 2, 2, 2, 2, 2])


def test_kernels_call_plain_python_functions() -> None:
    def halves(tile: Handle) -> None:
        for i in T.Parallel(*tile.shape):
            tile[i] *= 0.5

    def kernel(C: Handle) -> None:
        with T.Kernel(8, threads=128) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.fill(s, 8)
            for _ in range(3):
                halves(s)
            for j in T.Parallel(8):
                C[m, j] = s[j]

    program = program_of(kernel)
    assert program.threads == 128
    assert isinstance(program.buffers[0], Buffer)
    np.testing.assert_array_equal(interpret(program, {})["C"], np.ones((8, 8)))


def test_a_value_read_before_a_loop_stays_good_when_the_loop_leaves_its_tile_alone() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            s = T.alloc_fragment((8,), T.float32)
            T.fill(s, 3.0)
            first = s[0]
            for n in T.serial(8):
                C[m, n] = first
            C[m, 0] = first

    np.testing.assert_array_equal(interpret(program_of(kernel), {})["C"], np.full((8, 8), 3.0))


def test_tracing_is_deterministic() -> None:
    def kernel(A: Handle, C: Handle, block: Any = T.auto) -> None:
        with T.Kernel(T.ceildiv(8, block)) as m:
            s = T.alloc_shared((block, 8), T.float32)
            T.copy(A[m * block, 0], s)
            for i, j in T.Parallel(block, 8):
                C[m * block + i, j] = T.exp(s[i, j])

    assert program_of(kernel) == program_of(kernel)
    assert print_program(program_of(kernel)) == print_program(program_of(kernel))


def test_single_element_stores_stand_at_statement_level() -> None:
    def kernel(C: Handle) -> None:
        with T.Kernel(8) as m:
            C[m, 0] = 1.0

    assert isinstance(program_of(kernel).body[0], Store)
