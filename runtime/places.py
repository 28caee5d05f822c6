"""Where a command may write: found out before the work, not after it; and the passing files of what is being checked.

Comes in: the file that is to be written. Goes out: PlaceError when that cannot be. Invariant: passing files stand in
the folder of the output, so that external weights can stay in place, and are hidden; no other file is ever removed.
"""

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

LEFT_BEHIND = 24 * 3600  # seconds since a passing file was written to; no check takes that long


class PlaceError(Exception):
    """Nothing can be written there; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Passing:
    """A model with its library and weights under the names that they have until they are checked."""

    model: Path
    library: Path
    weights: Path


def passing(output: Path, process: int) -> Passing:
    """The passing files of one process for `output`."""
    model = output.with_name(f".{output.stem}.{process}.onnx")
    return Passing(model, model.with_suffix(".so"), model.with_name(f"{model.name}.data"))


def check_output(output: Path, model: Path) -> None:
    """Whether what becomes of `model`, and its library, can be written; PlaceError if not.

    What killed processes left there a day ago or more is removed.
    """
    if output.suffix != ".onnx":
        raise PlaceError(f"{output}: the output must end in .onnx, the library goes beside it with .so")
    if output.exists() and model.exists() and output.samefile(model):
        raise PlaceError(f"{output} is the model itself, which would be lost: name another file")
    check_place(output)
    check_place(output.with_suffix(".so"))
    stem = re.escape(output.stem)
    ours = re.compile(rf"\.{stem}\.\d+\.(so|onnx|onnx\.data)|\.(\.{stem}\.\d+|{stem})\.onnx(\.data)?\.\d+\.tmp")
    for path in output.parent.iterdir():
        if ours.fullmatch(path.name) and time.time() - path.stat().st_mtime > LEFT_BEHIND:
            path.unlink(missing_ok=True)


def check_place(file: Path) -> None:
    """Whether a file can be written. PlaceError."""
    if not file.parent.is_dir():
        raise PlaceError(f"{file.parent} is not a folder: make it first")
    if file.is_dir():
        raise PlaceError(f"{file} is a folder: name a file")
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="."):
            pass
    except OSError as error:
        raise PlaceError(f"cannot write to the folder {file.parent}: {error.strerror}; name another one") from error


def reason(error: OSError) -> str:
    """What the system says, and of which file unless it is a passing one."""
    name = error.filename2 or error.filename
    shown = name is not None and not Path(str(name)).name.startswith(".")
    return f"{error.strerror or error} ({name})" if shown else error.strerror or str(error)
