"""Writes what shows a wrong kernel, so that it can be sent to us: the region alone and the values around it.

Comes in: a region, its kernel and a suspect of `repair`. Goes out: a folder with `model.onnx` (the region in standard
operators), `inputs.npz`, `expected.npz`, `actual.npz` (unless the kernel failed to run), the kernel's C text, and
`problem.txt`. Optimising that model and verifying it on these inputs repeats the fault.
"""

import platform
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from fuser.region import Region
from fuser.save import save
from fuser.shapes import Shapes
from fuser.standalone import standalone
from runtime.repair import Suspect
from tilecore.compile import Kernel

Array = npt.NDArray[Any]


def write_repro(
    folder: Path, region: Region, *, kernel: Kernel, suspect: Suspect, shapes: Shapes, opsets: Mapping[str, int]
) -> Path:
    """Write everything below `folder`; gives the folder that was made, named after the region. OSError as it comes."""
    made = folder / re.sub(r"[^A-Za-z0-9._-]+", "_", f"{region.kind}-{region.outputs[0].name}").strip("_")
    made.mkdir(parents=True, exist_ok=True)
    save(standalone(region, shapes, opsets), made / "model.onnx")
    for name, values in (("inputs", suspect.inputs), ("expected", suspect.expected), ("actual", suspect.actual)):
        if values:
            save_arrays(made / f"{name}.npz", values)
    for target, text in kernel.sources.items():
        (made / f"{kernel.name}.{target}.c").write_text(text)
    (made / "problem.txt").write_text(
        f"{region.label}\n{suspect.problem}\n\n"
        "To see it: tilefuse optimize model.onnx -o fused.onnx --no-verify\n"
        "           tilefuse verify model.onnx fused.onnx --inputs inputs.npz\n\n"
        f"onnxruntime {ort.__version__}, numpy {np.__version__}, {platform.platform()}\n\n{region.spec}\n"
    )
    return made


def save_arrays(path: Path, values: Mapping[str, Array]) -> None:
    """What `numpy.savez` writes, for names that it has arguments of too (a value called "file")."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in values.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _portable(value))


def _portable(value: Array) -> Array:
    """Types that numpy has itself as they are, others (bfloat16) as float32, which holds all of their values."""
    return value if value.dtype.isbuiltin == 1 else value.astype(np.float32)
