"""The tile compiler: a spec, or a kernel in the tile language, in; C text, a library or a callable out.

import tilecore
import tilecore.language as T

@tilecore.jit
def double(A: T.Tensor((T.dynamic("n"),), "float32"), B: T.Tensor((T.dynamic("n"),), "float32")): ...
"""

from tilecore import layout, math
from tilecore.call import KernelError
from tilecore.contract.dtype import DType
from tilecore.errors import TileError
from tilecore.jitted import Jit, JitKernel, compile, jit
from tilecore.scalars import ceildiv as cdiv
from tilecore.tuned import autotune

JITKernel = JitKernel  # TileLang's spelling

__all__ = [
    "DType",
    "JITKernel",
    "Jit",
    "JitKernel",
    "KernelError",
    "PassConfigKey",
    "TileError",
    "autotune",
    "cdiv",
    "compile",
    "jit",
    "layout",
    "math",
]


class _AnyName(type):
    """Every attribute is its own name: options of GPU passes, which change nothing here."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class PassConfigKey(metaclass=_AnyName):
    """TileLang's names of pass options, accepted by `jit` and without effect on a CPU."""
