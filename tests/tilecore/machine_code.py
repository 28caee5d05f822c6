"""The machine code of cubins, for tests."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest


def disassemble(image: bytes, folder: Path, *, whole: bool = False) -> Counter[str]:
    """How often each instruction occurs in a cubin, by its name up to the first dot, or by its `whole` name."""
    nvidia = pytest.importorskip("nvidia", reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    tools = [path for root in nvidia.__path__ for path in Path(root).rglob("bin/nvdisasm")]
    if not tools:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    text = subprocess.run([tools[0], "-c", path], check=True, capture_output=True, text=True).stdout
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text)
    return Counter(name if whole else name.split(".")[0] for name in names)
