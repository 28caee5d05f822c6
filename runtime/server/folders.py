"""The models of a folder as they lie on disk: `NAME/VERSION/model.onnx`.

In: the repository's folder. Out: `ModelFolder`s, and the real paths of a version's files. Invariant: every file that is
opened lies inside the repository or the cache, with symbolic links resolved.
"""

import fcntl
import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from runtime.server.external_data import external_locations
from runtime.server.model import ModelError
from runtime.server.settings import MODEL_FILE, Latest, Settings, Specific, VersionPolicy
from runtime.server.settings_files import FILES, read_settings
from runtime.session import DOMAIN

LOG = logging.getLogger("tilefuse.server")

MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, size, inode and time of change of files: another stamp means other content."""


class RepositoryError(Exception):
    """The repository cannot be served; the message lists each model that failed, with its reason."""


@dataclass(frozen=True)
class ModelFolder:
    """A model as it lies on disk."""

    name: str
    settings: Settings
    versions: Mapping[int, Path]
    """The model file of each version that the policy asks for."""
    stamps: Mapping[int, Stamp]
    """Of the version's files and the configuration."""


@dataclass(frozen=True)
class Files:
    """The real paths of a version's files."""

    model: Path
    externals: tuple[Path, ...]
    fused: int
    """How many nodes of our domain it has."""


def model_names(root: Path) -> list[str]:
    """The names of the folders in `root` that may be models.

    Raises:
        RepositoryError: `root` is not a folder.
    """
    if not root.is_dir():
        raise RepositoryError(f"{root} is not a folder")
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".") and path.is_dir())


def read_folder(path: Path) -> ModelFolder:
    """The model in the folder `path`.

    Raises:
        ModelError, SettingsError: it cannot be served.
    """
    if not MODEL_NAME.fullmatch(path.name):
        raise ModelError("a model's name has letters, digits, '_', '.' and '-' only, 128 at most")
    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise ModelError(f"{path} is a link that leads out of the repository, to {path.resolve()}")
    for file in (path / name for name in FILES):
        if not file.resolve().is_relative_to(path.resolve()):
            raise ModelError(f"{file} is a link that leads out of the model's folder")
    settings = read_settings(path)
    found = {
        int(entry.name): entry / settings.filename
        for entry in path.iterdir()
        if VERSION.fullmatch(entry.name) and (entry / settings.filename).is_file()
    }
    if not found:
        raise ModelError(f"no version found; expected a file like {path / '1' / settings.filename}")
    chosen = _choose_versions(tuple(sorted(found)), settings.version_policy)
    return ModelFolder(
        path.name,
        settings,
        {number: found[number] for number in chosen},
        {number: _stamp(path, found[number].parent) for number in chosen},
    )


def inspect_files(path: Path, root: Path) -> Files:
    """Look at the files of the model at `path`, refusing those that lie elsewhere.

    Raises:
        ModelError: a file is no model, or lies outside of the repository.
        OSError: a file cannot be read.
    """
    file = path.resolve(strict=True)
    for part in (file, file.with_suffix(".so").resolve()):
        if not part.is_relative_to(root.resolve()):
            raise ModelError(f"{path} or its library is a link that leads out of the repository, to {part}")
    try:
        model = onnx.load_model(file, load_external_data=False)
    except DecodeError as error:
        raise ModelError(f"{path} is not an ONNX model ({error})") from error
    externals: list[Path] = []
    for location in external_locations(model):
        external = (file.parent / location).resolve()
        if not external.is_relative_to(file.parent):
            raise ModelError(f"{path} has external data at {location!r}, which is outside its folder")
        externals.append(external)
    return Files(file, tuple(externals), fused_nodes(model))


def fused_nodes(model: onnx.ModelProto) -> int:
    """How many nodes of our domain a model has; at least 1 where it imports the domain."""
    nodes = sum(1 for node in _nodes(model.graph) if node.domain == DOMAIN)
    return nodes or int(any(opset.domain == DOMAIN for opset in model.opset_import))


def optimized_twin(
    files: Files, *, cache: Path, fingerprint: str, optimize: Callable[[Path, Path], None] | None
) -> Path | None:
    """The fused twin of a plain model, from the cache or made now by `optimize`; None when there is none to be had.

    The cache's key is the content of all its files and the fingerprint.
    """
    digest = hashlib.sha256(fingerprint.encode())
    for part in (files.model, *files.externals):
        with part.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    home = cache / "models" / digest.hexdigest()[:32]
    if (home / MODEL_FILE).is_file():
        return home / MODEL_FILE
    if optimize is None:
        return None
    home.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(cache / "locks" / home.name):
        if not (home / MODEL_FILE).is_file():  # another process may have made it meanwhile
            _make_twin(files, home, optimize)
    return home / MODEL_FILE


def _make_twin(files: Files, home: Path, optimize: Callable[[Path, Path], None]) -> None:
    LOG.info("optimising %s", files.model)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".new-") as workshop:
        made = Path(workshop) / "made"
        made.mkdir()
        optimize(files.model, made / MODEL_FILE)
        made.rename(home)


@contextmanager
def _claimed(file: Path) -> Generator[None]:
    """Keep other processes from what is inside; one that dies lets go of it."""
    file.parent.mkdir(exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _choose_versions(found: tuple[int, ...], policy: VersionPolicy) -> tuple[int, ...]:
    if isinstance(policy, Latest):
        return found[-policy.count :]
    if isinstance(policy, Specific):
        missing = [number for number in policy.versions if number not in found]
        if missing:
            raise ModelError(f"version_policy asks for version {missing[0]}, but there are only {list(found)}")
        return tuple(sorted(set(policy.versions)))
    return found


def _stamp(folder: Path, version: Path) -> Stamp:
    files = [folder / name for name in FILES] + sorted(version.iterdir())
    stats = [(path.name, path.stat()) for path in files if path.exists()]
    return tuple((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in stats)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
