"""Tracing of small kernels in tests, and the text of their errors."""

import inspect
import linecache
from collections.abc import Callable

import pytest

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Sym, const
from tilecore.contract.spec import Tensor
from tilecore.errors import TileError
from tilecore.ir import Program
from tilecore.trace import trace

Kernel = Callable[..., None]
OPERANDS = {
    "A": Tensor("A", DType.F32, (const(8), const(8))),
    "B": Tensor("B", DType.F32, (const(8), const(8))),
    "C": Tensor("C", DType.F32, (const(8), const(8))),
    "D": Tensor("D", DType.F32, (Sym("N"), const(8))),
    "F": Tensor("F", DType.F32, (Sym("N"), const(8))),
    "H": Tensor("H", DType.F16, (const(8), const(8))),
    "I": Tensor("I", DType.I64, (const(8),)),
    "J": Tensor("J", DType.I32, (const(8),)),
    "K": Tensor("K", DType.BF16, (const(8), const(8))),
    "L": Tensor("L", DType.F64, (const(8), const(8))),
    "M": Tensor("M", DType.BOOL, (const(8), const(8))),
}


def program_of(kernel: Kernel, **extents: int) -> Program:
    """The trace of a kernel whose operands are some of `OPERANDS`."""
    names = inspect.signature(kernel).parameters
    operands = {name: OPERANDS[name] for name in names if name in OPERANDS}
    return trace(kernel, operands=operands, extents=extents or None)


def refusal(kernel: Kernel) -> TileError:
    """The error that tracing `kernel` ends with."""
    with pytest.raises(TileError) as caught:
        program_of(kernel)
    return caught.value


def underlined(error: TileError) -> str:
    """The source text above the carets of `error`; checks that its rendering has them there."""
    span = error.span
    assert span is not None
    text = linecache.getline(span.file, span.line).rstrip("\n")
    lines = str(error).splitlines()
    assert lines[0].startswith(f"{span.file}:{span.line}:{span.column + 1}: ")
    end = span.end_column if span.end_line == span.line else len(text)
    margin = len(f" {span.line} | ")
    assert lines[1][margin:] == text
    assert lines[2][margin:] == " " * span.column + "^" * max(end - span.column, 1)
    return text[span.column : end]
