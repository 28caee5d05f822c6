"""The models of a folder: `NAME/VERSION/model.onnx`, found, loaded and looked up.

In: a folder, and two callables that optimise a model and open a session. Out: `Model`s by name and version.
Invariant: no name or path that a client sends is ever used to build a path, and every file that is opened lies inside
the repository or the cache, with symbolic links resolved.
"""

import hashlib
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnxruntime import InferenceSession

from runtime.server.external_data import external_locations
from runtime.server.model import Model, ModelError, describe
from runtime.server.ort_errors import LOAD_ERRORS
from runtime.server.settings import MODEL_FILE, Latest, Settings, SettingsError, Specific, VersionPolicy, read_settings
from runtime.session import DOMAIN

LOG = logging.getLogger("tilefuse.server")

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


class RepositoryError(Exception):
    """The repository cannot be served; the message lists each model that failed, with its reason."""


class NotFoundError(Exception):
    """No such model or version; the message is fit for a client."""


@dataclass(frozen=True)
class Loader:
    """How a model file becomes a session."""

    optimize: Callable[[Path, Path], None]
    """Fuses the model at the first path and writes it, with its library, to the second. Raises `ModelError`."""
    open_session: Callable[[Path, Settings], InferenceSession]
    """Opens a fused model or a plain one. Raises `ModelError` or ONNX Runtime's own errors."""
    cache: Path
    """Where optimised models are kept."""
    fingerprint: str = ""
    """What besides the model decides what `optimize` makes; part of the cache's key."""


@dataclass(frozen=True)
class ModelFolder:
    """A model as it lies on disk."""

    name: str
    settings: Settings
    versions: Mapping[int, Path]
    """The model file of each version that the policy asks for."""


@dataclass(frozen=True)
class IndexEntry:
    """One line of the repository's index."""

    name: str
    version: int
    state: str
    reason: str = ""


class Repository:
    """The loaded models. Lookups are safe from any thread, also while models are being loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, dict[int, Model]] = {}
        self._index: dict[tuple[str, int], IndexEntry] = {}

    def load(self, root: Path, loader: Loader) -> None:
        """Load every version of every model in `root`.

        Raises:
            RepositoryError: a model could not be found or loaded; those that could stay loaded.
        """
        folders, failures = find_models(root)
        for folder in folders:
            for version in folder.versions:
                self._note(IndexEntry(folder.name, version, "LOADING"))
        for folder in folders:
            for version, path in folder.versions.items():
                try:
                    model = load_version(folder, version, path=path, root=root, loader=loader)
                except ModelError as error:
                    self._note(IndexEntry(folder.name, version, "UNAVAILABLE", "failed to load, see the server's log"))
                    failures.append(f"{folder.name} version {version}: {error}")
                    continue
                with self._lock:
                    self._models.setdefault(folder.name, {})[version] = model
                    self._index[folder.name, version] = IndexEntry(folder.name, version, "READY")
                LOG.info("loaded %s version %d", folder.name, version)
        if failures:
            raise RepositoryError("\n".join(failures))

    def find(self, name: str, version: str) -> Model:
        """The model of that name; the highest loaded version when `version` is empty.

        Raises:
            NotFoundError: there is none.
        """
        with self._lock:
            versions = self._models.get(name)
            if not versions:
                raise NotFoundError(f"no model is named {shown(name)}")
            if not version:
                return versions[max(versions)]
            if not _VERSION.fullmatch(version) or int(version) not in versions:
                served = ", ".join(str(number) for number in sorted(versions))
                raise NotFoundError(f"model {name} has no version {shown(version)}; served: {served}")
            return versions[int(version)]

    def versions(self, name: str) -> tuple[int, ...]:
        """The loaded versions of a model, lowest first; empty when there is none."""
        with self._lock:
            return tuple(sorted(self._models.get(name, {})))

    def models(self) -> tuple[Model, ...]:
        """Every loaded model version, by name and version."""
        with self._lock:
            return tuple(
                versions[number] for _, versions in sorted(self._models.items()) for number in sorted(versions)
            )

    def index(self) -> tuple[IndexEntry, ...]:
        """The state of every version that was found."""
        with self._lock:
            return tuple(entry for _, entry in sorted(self._index.items()))

    def _note(self, entry: IndexEntry) -> None:
        with self._lock:
            self._index[entry.name, entry.version] = entry


def shown(text: str) -> str:
    """What a client sent, quoted and short enough for a status message."""
    return repr(text if len(text) <= 64 else text[:61] + "...")


def find_models(root: Path) -> tuple[list[ModelFolder], list[str]]:
    """The models in `root`, by name, and a line for each folder that cannot be one.

    Raises:
        RepositoryError: `root` is not a folder, or holds no model at all.
    """
    if not root.is_dir():
        raise RepositoryError(f"{root} is not a folder")
    folders: list[ModelFolder] = []
    failures: list[str] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            folders.append(_read_folder(path))
        except (ModelError, SettingsError) as error:
            failures.append(f"{path.name}: {error}")
    if not folders and not failures:
        raise RepositoryError(f"{root} holds no models; expected folders like NAME/1/{MODEL_FILE}")
    return folders, failures


def _read_folder(path: Path) -> ModelFolder:
    if not _MODEL_NAME.fullmatch(path.name):
        raise ModelError("a model's name has letters, digits, '_', '.' and '-' only, 128 at most")
    settings = read_settings(path)
    found = {
        int(entry.name): entry / MODEL_FILE
        for entry in path.iterdir()
        if _VERSION.fullmatch(entry.name) and (entry / MODEL_FILE).is_file()
    }
    if not found:
        raise ModelError(f"no version found; expected a file like {path / '1' / MODEL_FILE}")
    chosen = _choose_versions(tuple(sorted(found)), settings.version_policy)
    return ModelFolder(path.name, settings, {number: found[number] for number in chosen})


def _choose_versions(found: tuple[int, ...], policy: VersionPolicy) -> tuple[int, ...]:
    if isinstance(policy, Latest):
        return found[-policy.count :]
    if isinstance(policy, Specific):
        missing = [number for number in policy.versions if number not in found]
        if missing:
            raise ModelError(f"version_policy asks for version {missing[0]}, but there are only {list(found)}")
        return tuple(sorted(set(policy.versions)))
    return found


def load_version(folder: ModelFolder, version: int, *, path: Path, root: Path, loader: Loader) -> Model:
    """Load one version, optimising it first when it is a plain model.

    Raises:
        ModelError: it cannot be read, optimised or served.
    """
    try:
        files = _inspect(path, root)
        file = files.model
        if not files.fused and folder.settings.optimize:
            file = _optimized(files, loader)
        session = loader.open_session(file, folder.settings)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    except LOAD_ERRORS as error:
        raise ModelError(f"ONNX Runtime cannot load it: {error}") from error
    return describe(folder.name, version, session=session, settings=folder.settings)


@dataclass(frozen=True)
class _Files:
    """The real paths of a model's files."""

    model: Path
    externals: tuple[Path, ...]
    fused: bool
    """The model already has nodes of our domain."""


def _inspect(path: Path, root: Path) -> _Files:
    """Look at a model's files, refusing those that lie elsewhere."""
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
    return _Files(file, tuple(externals), any(opset.domain == DOMAIN for opset in model.opset_import))


def _optimized(files: _Files, loader: Loader) -> Path:
    """The fused twin of a plain model, from the cache or made now.

    The cache's key is the content of all its files and the loader's fingerprint.
    """
    digest = hashlib.sha256(loader.fingerprint.encode())
    for part in (files.model, *files.externals):
        with part.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    home = loader.cache / "models" / digest.hexdigest()[:32]
    if (home / MODEL_FILE).is_file():
        return home / MODEL_FILE
    LOG.info("optimising %s", files.model)
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".new-") as workshop:
        made = Path(workshop) / "made"
        made.mkdir()
        loader.optimize(files.model, made / MODEL_FILE)
        try:
            made.rename(home)
        except OSError:
            if not (home / MODEL_FILE).is_file():  # another server may have finished the same model first
                raise
    return home / MODEL_FILE
