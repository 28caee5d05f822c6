"""Which models are served: loads, reloads and unloads them, at start, on request or as the folder changes.

In: the repository's folder and a `Loader`. Out: changes of a `Repository`. Invariants: a new version is warm before the
old one goes; a load that fails changes nothing; what was taken out is waited for; one thing at a time happens to one
model.

A plain model is served unfused at once, and fused by a thread in the background.
"""

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.server.dataplane import shown
from runtime.server.errors import LoadFailedError, NotFoundError
from runtime.server.folders import (
    MODEL_NAME,
    Files,
    ModelFolder,
    RepositoryError,
    Stamp,
    model_names,
    read_folder,
)
from runtime.server.loading import Loader, load_fused, load_version
from runtime.server.model import Model, ModelError
from runtime.server.repository import LOADING, UNAVAILABLE, IndexEntry, Repository
from runtime.server.settings import MODEL_FILE, SettingsError

LOG = logging.getLogger("tilefuse.server")

NONE, POLL, EXPLICIT = "none", "poll", "explicit"
MODES = (NONE, POLL, EXPLICIT)
HIDDEN_REASON = "failed to load, see the server's log"


@dataclass
class _State:
    """What is known about a model's folder."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: dict[int, Stamp] = field(default_factory=dict)
    failed: object = None
    """What the folder looked like when loading it failed."""
    former: list[Model] = field(default_factory=list)
    """Replaced by others, and perhaps still in use."""

    def replaced(self, models: Sequence[Model]) -> None:
        """Remember models that others were put in place of, as long as they are in use."""
        self.former = [model for model in (*self.former, *models) if model.usage.count]


class Control:
    """Loads and unloads models. Safe from any thread."""

    def __init__(self, repository: Repository, root: Path, loader: Loader, *, on_change: Callable[[str], None]) -> None:
        """`on_change` is told the name of a model after it was loaded or taken out."""
        self._repository = repository
        self._root = root
        self._loader = loader
        self._on_change = on_change
        self._states: defaultdict[str, _State] = defaultdict(_State)
        self._states_lock = threading.Lock()
        self._plain: queue.SimpleQueue[tuple[Model, Files] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._fuse_plain_models, "tilefuse-optimize")

    def load_all(self) -> None:
        """Load every model in the folder.

        Raises:
            RepositoryError: there are none, or some cannot be loaded; those that can are.
        """
        names = model_names(self._root)
        if not names:
            raise RepositoryError(f"{self._root} holds no models; expected folders like NAME/1/{MODEL_FILE}")
        failures: list[str] = []
        for name in names:
            try:
                self._load(name)
            except (ModelError, SettingsError) as error:
                failures.append(f"{name}: {error}")
        if failures:
            raise RepositoryError("\n".join(failures))

    def list_all(self) -> None:
        """Put every model in the folder into the index, not loaded. RepositoryError: it is not a folder."""
        for name in model_names(self._root):
            self._repository.note(IndexEntry(name, 0, UNAVAILABLE, "not loaded"))

    def load(self, name: str) -> None:
        """Load a model, or load it again as it is now.

        Raises:
            NotFoundError: there is no such folder.
            LoadFailedError: it cannot be loaded; whatever was served before still is.
        """
        if not MODEL_NAME.fullmatch(name) or name not in model_names(self._root):
            raise NotFoundError(f"the repository has no model {shown(name)}")
        try:
            self._load(name)
        except (ModelError, SettingsError) as error:
            LOG.error("%s: %s", name, error)
            reason = str(error).replace(f"{self._root.resolve()}/", "").replace(f"{self._root}/", "")
            raise LoadFailedError(f"model {name} cannot be loaded: {reason}") from error

    def unload(self, name: str, *, wanted: Callable[[], bool] = lambda: True) -> None:
        """Take a model out, and wait for the requests that use it, as long as the caller is `wanted`.

        Raises:
            NotFoundError: it is not loaded.
        """
        if not self._repository.versions(name):
            raise NotFoundError(f"no model is named {shown(name)}")
        with self._state(name).lock:
            self._take_out(name, "unloaded", wanted)

    def poll(self) -> None:
        """Load what is new or has changed in the folder, and take out what is gone."""
        try:
            names = model_names(self._root)
        except (RepositoryError, OSError) as error:
            LOG.error("the repository cannot be read: %s", error)
            return
        for name in names:
            try:
                self._load(name, changed_only=True)
            except (ModelError, SettingsError) as error:
                LOG.error("%s: %s", name, error)
        for name in {entry.name for entry in self._repository.index()} - set(names):
            with self._state(name).lock:
                self._take_out(name, "its folder is gone", lambda: True)
                self._repository.forget(name)

    def poll_every(self, seconds: float) -> None:
        """Poll in a thread until `stop`."""

        def keep_polling() -> None:
            while not self._stopping.wait(seconds):
                self.poll()

        self._start(keep_polling, "tilefuse-poll")

    def stop(self) -> None:
        """End polling and optimising."""
        self._stopping.set()
        self._loader.stop()
        self._plain.put(None)
        for thread in self._threads:
            thread.join(5)

    def _state(self, name: str) -> _State:
        with self._states_lock:
            return self._states[name]

    def _load(self, name: str, *, changed_only: bool = False) -> None:
        """Read the folder and serve what it holds. ModelError, SettingsError: it cannot be loaded."""
        state = self._state(name)
        with state.lock:
            try:
                folder = read_folder(self._root / name)
            except (ModelError, SettingsError, OSError) as error:
                known, state.failed = state.failed, str(error)
                self._repository.note(IndexEntry(name, 0, UNAVAILABLE, HIDDEN_REASON))
                if changed_only and known == state.failed:
                    return
                raise error if not isinstance(error, OSError) else ModelError(f"cannot be read: {error}") from error
            if changed_only and folder.stamps in (state.loaded, state.failed):
                return
            for warning in folder.settings.warnings:
                LOG.warning("%s", warning)
            try:
                self._serve(folder, state)
            except ModelError:
                state.failed = dict(folder.stamps)
                raise
        self._on_change(name)

    def _serve(self, folder: ModelFolder, state: _State) -> None:
        """Load the versions that are new or changed, then put them in place all at once."""
        served = {model.version: model for model in self._repository.models() if model.name == folder.name}
        models: dict[int, Model] = {}
        plain: list[tuple[Model, Files]] = []
        for version, stamp in folder.stamps.items():
            if version in served and state.loaded.get(version) == stamp:
                models[version] = served[version]
                continue
            self._repository.note(IndexEntry(folder.name, version, LOADING))
            try:
                loaded = load_version(folder, version, root=self._root, loader=self._loader)
            except ModelError as error:
                self._repository.note(IndexEntry(folder.name, version, UNAVAILABLE, HIDDEN_REASON))
                raise ModelError(f"version {version}: {error}") from error
            models[version] = loaded.model
            if loaded.plain is not None:
                plain.append((loaded.model, loaded.plain))
        retired = self._repository.replace(folder.name, models)
        state.loaded, state.failed = dict(folder.stamps), None
        for version in sorted(models.keys() - {v for v, model in served.items() if models.get(v) is model}):
            LOG.info("loaded %s version %d", folder.name, version)
        for job in plain:
            LOG.info("optimising %s version %d in the background", job[0].name, job[0].version)
            self._plain.put(job)
        state.replaced(retired)
        for model in retired:
            model.retire()
            LOG.info("let go of %s version %d", model.name, model.version)

    def _take_out(self, name: str, reason: str, wanted: Callable[[], bool]) -> None:
        retired = self._repository.replace(name, {})
        state = self._state(name)
        versions, state.loaded, state.failed = list(state.loaded), {}, None
        leaving, state.former = [*retired, *state.former], []
        for version in versions:
            self._repository.note(IndexEntry(name, version, UNAVAILABLE, reason))
        if retired:
            self._on_change(name)
        for model in leaving:
            model.retire()
            while not model.usage.wait_idle(0.1) and wanted():
                continue
            LOG.info("unloaded %s version %d", model.name, model.version)

    def _fuse_plain_models(self) -> None:
        """Fuse one model after the other, and serve each instead of its plain form."""
        while (job := self._plain.get()) is not None:
            model, files = job
            try:
                fused = load_fused(model, files, self._loader)
            except ModelError as error:
                if not self._stopping.is_set():
                    LOG.error("%s version %d stays unfused: %s", model.name, model.version, error)
                    model.notes[:] = [f"it could not be optimised: {error}"]
                continue
            state = self._state(model.name)
            with state.lock:
                if self._repository.exchange(model, fused):
                    state.replaced([model])
                    LOG.info("%s version %d is now served fused", model.name, model.version)

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
