"""What the engine knows of a request for tokens and of the context that it continues.

In: prompts and parameters. Out: events, through a `Job`'s sink, in order: tokens, the last with the reason why it is
the last, or one error. Invariant: after the last token or the error there are no more events.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.server.generation.blocks import Place, Tokens
from runtime.server.generation.sampling import Sampling

STOP, LENGTH = "stop", "length"


@dataclass(eq=False)
class Sequence:
    """A context: what was said and answered so far. Changed by the engine only."""

    ended: Callable[[], None] = lambda: None
    """Called once, when its cache was let go."""
    place: Place | None = None
    """Its cache; None: it has none yet, or no longer."""
    pending: int | None = None
    """The last token that was generated, which is not in the cache yet."""
    reserved: int = 0
    """Bytes that are set aside for it."""
    busy: bool = False
    """A job works on it, or waits to."""
    gone: bool = False

    @property
    def length(self) -> int:
        """Positions in its cache."""
        return self.place.length if self.place is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return self.length + (self.pending is not None)


@dataclass(frozen=True)
class Produced:
    """One token."""

    job: "Job"
    token: int
    logits: NDArray[np.float32] | None
    """[vocabulary], if the job asks for them."""
    reason: str
    """Why it is the last one; empty: more follow."""


@dataclass(frozen=True)
class Failed:
    """There are no more tokens, because of an error."""

    job: "Job"
    error: Exception


Event = Produced | Failed


@dataclass(eq=False)
class Job:
    """One request. What is below the line belongs to the engine; times in nanoseconds."""

    sequence: Sequence
    prompt: Tokens
    max_tokens: int
    sink: Callable[[Event], None]
    backlog: Callable[[], int]
    """Events that the client has not taken yet; a job whose client is slow pauses."""
    sampling: Sampling = field(default_factory=Sampling)
    stops: frozenset[int] = frozenset()
    logits: bool = False
    keep: bool = False
    """Keep the sequence's cache after the answer."""
    timeout: float | None = None
    """Seconds that it may wait for its turn."""

    left: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """What of the prompt has not been read."""
    made: int = 0
    cancelled: bool = False
    paused: bool = False
    over: bool = False
    submitted: int = 0
    admitted: int = 0
    first: int = 0
    last: int = 0
    read_ns: int = 0
    """Time in runs that read its prompt."""
    step_ns: int = 0
    """Time in runs that generated."""
