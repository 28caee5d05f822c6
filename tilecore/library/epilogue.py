"""One output of a region as kernels see it: a function of the accumulated value and its logical index."""

from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Var
from tilecore.contract.spec import Result
from tilecore.language import Value
from tilecore.value import Operand, program


@dataclass(frozen=True, slots=True)
class Epilogue:
    """`result` over the axes of its place and the placeholder `acc`."""

    acc: Var
    result: Result

    @property
    def dtype(self) -> DType:
        """The type that the value is accumulated in."""
        return self.acc.dtype

    def __call__(self, value: Operand, *index: Operand) -> Value:
        """The element at `index` for the accumulated `value`."""
        return program(self.result.value, {self.acc: value, **dict(zip(self.result.place.axes, index, strict=True))})
