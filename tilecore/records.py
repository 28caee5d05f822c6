"""Small JSON files that are kept: measured profiles, times, descriptions of kernels. Readers see all of one or none."""

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path`. OSError when it cannot be; then nothing is left behind, and what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
    with ExitStack() as undo:
        undo.callback(Path(name).unlink, missing_ok=True)
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(value, indent=1) + "\n")
        os.replace(name, path)
