"""Programs of a region as kernels see them: an output is a function of the accumulated values and its logical index,
what a sum starts from one of its index.
"""

from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Var
from tilecore.contract.spec import Result
from tilecore.language import Value
from tilecore.value import Operand, program


@dataclass(frozen=True, slots=True)
class Epilogue:
    """`result` over the axes of its place and the placeholders `accs`."""

    accs: tuple[Var, ...]
    result: Result

    @property
    def dtype(self) -> DType:
        """The type that values are accumulated in."""
        return self.accs[0].dtype

    def __call__(self, values: tuple[Operand, ...], *index: Operand) -> Value:
        """The element at `index` for the accumulated `values`, one per placeholder."""
        bound: dict[Var, Operand] = dict(zip(self.accs, values, strict=True))
        return program(self.result.value, bound | dict(zip(self.result.place.axes, index, strict=True)))


@dataclass(frozen=True, slots=True)
class Formula:
    """A program over `axes`, such as the first state of a recurrence, or its decay."""

    axes: tuple[Var, ...]
    value: Expr

    def __call__(self, *index: Operand) -> Value:
        """The element at `index`."""
        return program(self.value, dict(zip(self.axes, index, strict=True)))
