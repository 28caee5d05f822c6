"""Source positions: where in the user's file an IR node came from, and how an error shows it."""

import itertools
import linecache
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one source file; lines count from 1, columns from 0 and in characters."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def render(self, message: str) -> str:
        """`message` with the position, the line and carets under the exact columns."""
        text = linecache.getline(self.file, self.line).rstrip("\n")
        end = self.end_column if self.end_line == self.line else len(text)
        number = str(self.line)
        carets = " " * self.column + "^" * max(end - self.column, 1)
        return (
            f"{self.file}:{self.line}:{self.column + 1}: {message}\n {number} | {text}\n {' ' * len(number)} | {carets}"
        )


def span_of_frame(frame: object) -> Span:
    """The expression that `frame` is executing, with exact columns."""
    code = frame.f_code  # type: ignore[attr-defined]
    position = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))  # type: ignore[attr-defined]
    line, end_line, column, end_column = (value or 0 for value in position)
    return Span(code.co_filename, line, column, end_line, end_column)
