"""What a fused model depends on besides the model: the compiler's own sources, so that caches notice a new version."""

import hashlib
from functools import cache
from pathlib import Path

import fuser
import tilecore

SOURCES = ("*.py", "*.c", "*.h")


@cache
def compiler_fingerprint() -> str:
    """Hash of every source file of the fuser, the tile compiler and the runtime's native half."""
    digest = hashlib.sha256()
    folders = [Path(module.__file__ or "").parent for module in (fuser, tilecore)] + [Path(__file__).parent / "csrc"]
    for folder in folders:
        for pattern in SOURCES:
            for path in sorted(folder.rglob(pattern)):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
