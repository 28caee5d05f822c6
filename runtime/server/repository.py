"""The loaded models: looked up, leased to requests, put in each other's place.

In: `Model`s from whoever loads them. Out: `Model`s by name and version. Invariants: a request finds either the old
version of a model or the new one, whole; a model that was taken out is let go once no request uses it; no name that a
client sends is ever used to build a path.
"""

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from runtime.server.dataplane import shown
from runtime.server.errors import NotFoundError
from runtime.server.folders import VERSION
from runtime.server.model import Model

READY, LOADING, UNAVAILABLE = "READY", "LOADING", "UNAVAILABLE"


@dataclass(frozen=True)
class IndexEntry:
    """One line of the repository's index."""

    name: str
    version: int
    """0: the folder could not be read."""
    state: str
    reason: str = ""


class Repository:
    """The loaded models. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, dict[int, Model]] = {}
        self._index: dict[str, dict[int, IndexEntry]] = {}

    def find(self, name: str, version: str) -> Model:
        """The model of that name; the highest loaded version when `version` is empty.

        Raises:
            NotFoundError: there is none.
        """
        with self._lock:
            return self._find(name, version)

    def take(self, name: str, version: str) -> Model:
        """The model as `find` gives it, which stays loaded until `usage.leave`."""
        with self._lock:
            model = self._find(name, version)
            model.usage.enter()
        return model

    @contextmanager
    def lease(self, name: str, version: str) -> Generator[Model]:
        """The model as `take` gives it, until the end of the block."""
        model = self.take(name, version)
        try:
            yield model
        finally:
            model.usage.leave()

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
            return tuple(entry for _, versions in sorted(self._index.items()) for _, entry in sorted(versions.items()))

    def replace(self, name: str, models: Mapping[int, Model]) -> list[Model]:
        """Serve exactly these versions of a model; gives those that were served until now and no longer are."""
        with self._lock:
            old = self._models.pop(name, {})
            if models:
                self._models[name] = dict(models)
                self._index[name] = {number: IndexEntry(name, number, READY) for number in models}
        return [model for number, model in old.items() if models.get(number) is not model]

    def exchange(self, old: Model, new: Model) -> bool:
        """Serve `new` where `old` is served; False when it is not served any more."""
        with self._lock:
            versions = self._models.get(old.name, {})
            if versions.get(old.version) is not old:
                return False
            versions[old.version] = new
            return True

    def note(self, entry: IndexEntry) -> None:
        """Say how things stand with a version that is not served."""
        with self._lock:
            versions = self._index.setdefault(entry.name, {})
            served = self._models.get(entry.name, {})
            if served and entry.version in (0, *served):
                return  # what is loaded goes on while something else is tried
            versions.pop(0, None)
            versions[entry.version] = entry

    def forget(self, name: str) -> None:
        """Leave a model out of the index: its folder is gone."""
        with self._lock:
            self._index.pop(name, None)

    def _find(self, name: str, version: str) -> Model:
        versions = self._models.get(name)
        if not versions:
            raise NotFoundError(f"no model is named {shown(name)}")
        if not version:
            return versions[max(versions)]
        if not VERSION.fullmatch(version) or int(version) not in versions:
            served = ", ".join(str(number) for number in sorted(versions))
            raise NotFoundError(f"model {name} has no version {shown(version)}; served: {served}")
        return versions[int(version)]
