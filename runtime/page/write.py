"""Writes the page: one HTML file that needs no network and no other file.

Comes in: a report, the two drawings and the texts of the kernels. Goes out: the file, whole or not at all. Invariant:
everything that came from a model is data in the page, never markup or script.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runtime.page.drawing import Drawing
from runtime.report import Report

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class KernelText:
    """What the compiler made of one operator: tile program, C for one instruction set, and why it is tiled so."""

    program: str
    source: str
    target: str
    why: str


def write_page(
    path: Path, report: Report, *, before: Drawing, after: Drawing, kernels: Mapping[str, KernelText]
) -> None:
    """Write the page to `path`. `kernels` are by the operators of the report's regions. OSError as it comes."""
    data = {
        "report": report.to_json(),
        "before": before.to_json(),
        "after": after.to_json(),
        "kernels": {
            op: {"program": text.program, "source": text.source, "target": text.target, "why": text.why}
            for op, text in kernels.items()
        },
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for mark, text in (
        ("/*STYLE*/", (HERE / "page.css").read_text(encoding="utf-8")),
        ("/*DATA*/", _embedded(data)),
        ("/*SCRIPT*/", (HERE / "page.js").read_text(encoding="utf-8")),
    ):
        page = page.replace(mark, text, 1)
    passing = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with ExitStack() as undo:
        undo.callback(passing.unlink, missing_ok=True)
        passing.write_text(page, encoding="utf-8")
        os.replace(passing, path)


def _embedded(data: object) -> str:
    """JSON that can stand inside a script element: no character can end it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
