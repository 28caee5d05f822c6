"""One version of a model from its folder to a `Model` that is warm.

In: a `ModelFolder` and a `Loader`. Out: a `Model`, fused if it is in the cache or is to be fused first, else plain.
Invariant: what is given out has run once on each batch size and bucket, or says in the log why it could not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnxruntime import InferenceSession

from runtime.server.folders import Files, ModelFolder, fused_nodes, inspect_files, optimized_twin
from runtime.server.generation.decoder import NotADecoderError, recognise
from runtime.server.generation.engine import Engine
from runtime.server.generation.probe import probe
from runtime.server.model import Model, ModelError, describe
from runtime.server.ort_errors import LOAD_ERRORS
from runtime.server.settings import Generation, Settings
from runtime.server.statistics import Statistics
from runtime.server.warmup import warm_up
from runtime.unpadded import padding_mask

LEAST_WORTH = 4 * 2**20
"""Bytes that padding may take even where the weights have fewer: a run costs more than reading them."""


@dataclass(frozen=True)
class Loader:
    """How a model file becomes a session."""

    optimize: Callable[[Path, Path, Settings], None]
    """Fuses the model at the first path and writes it, with its library, to the second, for sessions with those
    settings. Raises `ModelError`."""
    open_session: Callable[[Path, Settings, bool], InferenceSession]
    """Opens a model, fused or not as the flag says. Raises `ModelError` or ONNX Runtime's own errors."""
    cache: Path
    """Where optimised models are kept."""
    fingerprint: str = ""
    """What besides the model decides what `optimize` makes; part of the cache's key."""
    optimize_first: bool = False
    """Fuse every plain model before it is served."""
    stop: Callable[[], None] = lambda: None
    """Ends what `optimize` is doing."""

    def twin(self, files: Files, settings: Settings, *, make: bool) -> Path | None:
        """The fused twin of a plain model, from the cache or, on request, made now.

        Raises:
            ModelError: it cannot be optimised.
        """
        parts = [self.fingerprint]
        parts += [] if settings.unpad is None else [f"without padding by {settings.unpad}"]
        parts += [] if settings.threads is None else [f"for {settings.threads} threads"]
        return optimized_twin(
            files,
            cache=self.cache,
            fingerprint=" ".join(parts),
            optimize=(lambda model, output: self.optimize(model, output, settings)) if make else None,
        )


@dataclass(frozen=True)
class Loaded:
    """A model, and whether it is served unfused for now."""

    model: Model
    plain: Files | None
    """The files to fuse in the background."""


def load_version(folder: ModelFolder, version: int, *, root: Path, loader: Loader) -> Loaded:
    """Load and warm up one version.

    Raises:
        ModelError: it cannot be read, optimised or served.
    """
    settings = folder.settings
    path = folder.versions[version]
    try:
        files = inspect_files(path, root)
        if files.fused or not settings.optimize:
            _check_padding(files, settings)
            return Loaded(_open(folder.name, version, files.model, files.fused, settings, loader), None)
        first = settings.optimize_first or loader.optimize_first
        twin = loader.twin(files, settings, make=first)
        if twin is not None:
            return Loaded(_open_twin(folder.name, version, twin, settings, loader, None), None)
        note = "served unfused until it has been optimised"
        return Loaded(_open(folder.name, version, files.model, 0, settings, loader, note=note), files)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


def load_fused(model: Model, files: Files, loader: Loader) -> Model:
    """The fused twin of a plain model that is served, made now, with the same counters.

    Raises:
        ModelError: it cannot be optimised or served.
    """
    try:
        twin = loader.twin(files, model.settings, make=True)
        assert twin is not None
        return _open_twin(model.name, model.version, twin, model.settings, loader, model.statistics)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from error


def _check_padding(files: Files, settings: Settings) -> None:
    """ModelError when a model that is served as it is computes padding that the settings want left out."""
    wanted = settings.unpad
    if wanted is not None and padding_mask(onnx.load_model(files.model, load_external_data=False)) != wanted:
        raise ModelError(
            f"tilefuse.toml has padding.unpad, but {files.model.name} is served as it is and computes padding: make it "
            f"with `tilefuse optimize --unpad {wanted}`, or have the server optimise the plain model"
        )


def _open_twin(
    name: str, version: int, twin: Path, settings: Settings, loader: Loader, statistics: Statistics | None
) -> Model:
    fused = fused_nodes(onnx.load_model(twin, load_external_data=False))
    note = "" if fused else "no region of it could be fused"
    return _open(name, version, twin, fused, settings, loader, note=note, statistics=statistics)


def _open(
    name: str,
    version: int,
    path: Path,
    fused: int,
    settings: Settings,
    loader: Loader,
    *,
    note: str = "",
    statistics: Statistics | None = None,
) -> Model:
    try:
        session = loader.open_session(path, settings, fused > 0)
    except LOAD_ERRORS as error:
        raise ModelError(f"ONNX Runtime cannot load it: {error}") from error
    model = describe(name, version, session=session, settings=settings, fused=fused, note=note, statistics=statistics)
    model = replace(model, engine=_engine(model, path))
    warm_up(model)
    return model


def _engine(model: Model, path: Path) -> Engine | None:
    """What generates tokens with the model, if it is a decoder with a cache. ModelError: it is to be one and is not."""
    settings = model.settings.generation or Generation()
    if not settings.enabled:
        return None
    try:
        decoder = recognise(model.inputs, model.outputs, settings)
        abilities = probe(model.session, decoder)
    except NotADecoderError as error:
        if model.settings.generation is not None:
            raise ModelError(f"tilefuse.toml has [generation], but the model cannot generate: {error}") from error
        if error.likely:
            model.notes.append(f"it does not generate tokens: {error}")
        return None
    if not abilities.rows:
        model.notes.append("its streams run one by one: in one run they change each other's logits")
    elif not abilities.padding:
        model.notes.append("only streams of equal length run together: padding changes their logits")
    files = (file for file in path.parent.iterdir() if file.is_file() and file.suffix != ".so")
    return Engine(
        model.session,
        decoder,
        abilities,
        settings=settings,
        statistics=model.statistics,
        weight_bytes=max(LEAST_WORTH, sum(file.stat().st_size for file in files)),
    )
