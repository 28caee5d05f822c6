"""Attention's two products around its softmax, one iteration apart: S of the next keys is computed before O of these.

Comes in: a loop. Goes out: its parts, when they may be told apart: the tensor cores then have work while a warpgroup's
own softmax runs. Nothing is reordered that reads what the other writes.
"""

from dataclasses import dataclass

from tilecore.contract.spec import View
from tilecore.graph import buffers_of
from tilecore.ir import Copy, For, Gemm, If, Stmt


@dataclass(frozen=True, slots=True)
class Overlap:
    """`scores` (after its copies), then `between`, which reads no sums, then `late`, then `sums` of all that. Copies of
    what `between` reads are in it.
    """

    scores: Gemm
    between: tuple[Stmt, ...]
    late: tuple[Stmt, ...]
    sums: Gemm
    score_copies: tuple[Copy, ...]
    sum_copies: tuple[Copy, ...]


def overlap_of(loop: For) -> Overlap | None:
    """The parts of a loop of two products, of which the second reads what is computed from the first."""
    gemms = [stmt for stmt in loop.body if isinstance(stmt, Gemm)]
    if len(gemms) != 2 or any(isinstance(stmt, For | If) for stmt in loop.body) or loop.body[-1] is not gemms[1]:
        return None
    scores, sums = gemms
    copies = [stmt for stmt in loop.body if isinstance(stmt, Copy) and isinstance(stmt.src.source, View)]
    score_copies = tuple(one for one in copies if one.dst.source in (scores.a, scores.b))
    sum_copies = tuple(one for one in copies if one.dst.source in (sums.a, sums.b))
    if set(score_copies) & set(sum_copies) or not sum_copies:
        return None
    work = [stmt for stmt in loop.body if stmt not in (*score_copies, *sum_copies, *gemms)]
    held = {sums.a, sums.c}  # in flight while `between` runs
    late = tuple(stmt for stmt in work if held & {buffer for side in buffers_of(stmt) for buffer in side})
    between = tuple(stmt for stmt in work if stmt not in late)
    order = [loop.body.index(stmt) for stmt in (scores, *between, *late, sums)]
    if order != sorted(order) or scores.c in (sums.a, sums.c) or not between or not scores.clear:
        return None
    return Overlap(scores, between, late, sums, score_copies, sum_copies)
