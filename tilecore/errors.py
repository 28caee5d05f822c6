"""What a kernel's author sees when a kernel is wrong: the position in their file, carets, and what to write instead.

Comes in: a message, a span and help. Goes out: a `TileError` whose text is complete. No frame of the front end is a
user frame: `user_frame` skips the modules of this package, but not the kernels in `tilecore.library`.
"""

import os
import sys
from collections.abc import Sequence
from types import FrameType

from tilecore.span import Span, span_of_frame

_FRONT_END = os.path.dirname(__file__)


class TileError(Exception):
    """A tile program that cannot be traced or is not well formed. `str()` gives position, line, carets and help.

    `against` are other places that the message is about, each with what was found there.
    """

    def __init__(
        self, message: str, span: Span | None = None, *, instead: str = "", against: Sequence[tuple[Span, str]] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.span = span
        self.instead = instead
        self.against = tuple(against)

    def __str__(self) -> str:
        text = self.message if self.span is None else self.span.render(self.message)
        text = "\n".join([text, *(span.render(found) for span, found in self.against)])
        return f"{text}\n  instead: {self.instead}" if self.instead else text


class UnknownNameError(TileError, AttributeError):
    """A name that the tile language does not have."""


def user_frame() -> FrameType:
    """The innermost frame of the kernel's author."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == _FRONT_END:
        frame = frame.f_back
    if frame is None:
        raise RuntimeError("the tile language was called from no frame but its own")
    return frame


def user_span() -> Span:
    """What the author's innermost frame is executing, with exact columns."""
    return span_of_frame(user_frame())
