"""What attention kernels do for every key beside the softmax: reductions, one value per row, and scores to be kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilecore import language as T
from tilecore.contract.evaluate import NEUTRAL
from tilecore.language import Handle, Value
from tilecore.library.epilogue import Epilogue
from tilecore.library.score import Score
from tilecore.value import Operand


@dataclass(frozen=True, slots=True)
class KeyReductions:
    """A tile per step for what it reduces, and its result for every row of a query tile."""

    score: Score
    parts: tuple[Handle, ...]
    wholes: tuple[Handle, ...]

    def add(self, b: Operand, h: Operand, row: Value, key: Value, keys: Operand) -> None:
        """Take in the tile of scores that begins at `row` and `key`; keys past the last one count for nothing."""
        for step, part, whole in zip(self.score.reductions, self.parts, self.wholes, strict=True):
            for i, j in T.Parallel(*part.shape):
                part[i, j] = self.score.part(step, key + j < keys, b, h, row + i, key + j)
            T.reduce(part, whole, step.kind, dim=1, clear=False)

    def at(self, row: Value) -> tuple[Value, ...]:
        """The results of one row of the tile."""
        return tuple(whole[row] for whole in self.wholes)


def key_reductions(score: Score, block_m: Any, block_n: Any) -> KeyReductions:
    """The tiles of all steps; results start neutral."""
    kinds = [(step.var.dtype, NEUTRAL[step.kind]) for step in score.reductions]
    parts = tuple(T.alloc_fragment((block_m, block_n), dtype) for dtype, _ in kinds)
    wholes = tuple(T.alloc_fragment((block_m,), dtype) for dtype, _ in kinds)
    for whole, (_, neutral) in zip(wholes, kinds, strict=True):
        T.fill(whole, neutral)
    return KeyReductions(score, parts, wholes)


def keep_scores(
    taps: Sequence[tuple[Handle, Epilogue]], raw: Handle, b: Operand, h: Operand, row: Value, key: Value
) -> None:
    """Store what `taps` make of the tile of dot products that begins at `row` and `key`."""
    for out, result in taps:
        for i, j in T.Parallel(*raw.shape):
            out[b, h, row + i, key + j] = result((raw[i, j],), b, h, row + i, key + j)
