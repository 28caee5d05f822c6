"""Maxima that need not rise: weights under any reference are as good while sums of them are finite.

Comes in: a loop whose running maximum its author calls a reference (`T.annotate_reference`). Goes out: what brings the
maximum up to date. A kernel leaves it out where the reference is a number that scores had, and sums of weights under it
are not large yet; rows whose sums come out NaN or infinite are computed a second time with all of it.
"""

from dataclasses import dataclass

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Load, Op
from tilecore.cuda.errors import CudaError
from tilecore.graph import buffers_of
from tilecore.ir import Buffer, Copy, For, Parallel, Program, Reduce, Stmt, Store

LARGE = {DType.F16: 3e4}  # of a thread's sum of weights, from which on the reference rises: weights are below 2^16
LARGEST = 1e9  # of weights that have the exponents of f32


@dataclass(frozen=True, slots=True)
class Reference:
    """`rising` are the statements in the loop that let `top` rise, and `sums` what they bring under the new one."""

    top: Buffer
    rising: tuple[Stmt, ...]
    sums: tuple[Buffer, ...]


def reference_of(program: Program, loop: For) -> Reference | None:
    """The reference of a loop; None where no maximum is one. CudaError for one that more than sums depends on."""
    names = {note.subject for note in program.annotations if note.what == "reference"}
    maxima = [stmt for stmt in loop.body if isinstance(stmt, Reduce) and stmt.dst.name in names]
    if len(maxima) != 1 or maxima[0].kind not in ("max", "fmax") or maxima[0].clear:
        return None
    top = maxima[0].dst
    copies = [stmt for stmt in loop.body if isinstance(stmt, Copy) and stmt.src.source == top]
    factors = {stmt.dst.source for stmt in copies if isinstance(stmt.dst.source, Buffer)}
    scaling = [stmt for stmt in loop.body if isinstance(stmt, Parallel) and factors & set(sum(buffers_of(stmt), ()))]
    stores = [store for stmt in scaling for store in stmt.body if store.target not in factors]
    sums = tuple(dict.fromkeys(store.target for store in stores if isinstance(store.target, Buffer)))
    if not all(_scales(store, factors) for store in stores):
        raise CudaError(f"{top.name} is a reference, but what makes up for its rise does more than scale sums")
    return Reference(top, (maxima[0], *copies, *scaling), sums)


def _scales(store: Store, factors: set[Buffer]) -> bool:
    """Whether a store multiplies its target by a factor."""
    match store.value:
        case Op(name="mul", args=(Load() as first, Load() as second)):
            sources = {first.source, second.source}
            return store.target in sources and bool(factors & sources)
        case _:
            return False
