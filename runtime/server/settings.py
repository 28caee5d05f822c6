"""How one model is to be served: `config.pbtxt` (Triton's keys) and `tilefuse.toml` (ours) to frozen `Settings`.

In: the two optional files of a model's folder. Out: `Settings`, or a `SettingsError` that names file, place and key.
Invariant: a key that this server does not act on is refused, never ignored.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from proto import open_inference_pb2 as pb
from runtime.wire import BY_CONFIG, Datatype

MODEL_FILE = "model.onnx"
_TOML_KEYS = {"optimize": bool, "threads": int, "provider": bool}


class SettingsError(Exception):
    """A configuration file cannot be used; the message names the file and what to change."""


@dataclass(frozen=True)
class DeclaredTensor:
    """An input or output as config.pbtxt declares it; without the batch dim when `max_batch_size` is above 0."""

    name: str
    datatype: Datatype
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Latest:
    """Serve the `count` highest versions."""

    count: int


@dataclass(frozen=True)
class Specific:
    """Serve exactly these versions."""

    versions: tuple[int, ...]


@dataclass(frozen=True)
class Every:
    """Serve all versions."""


VersionPolicy = Latest | Specific | Every


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to serve one model; the defaults are those of a folder without configuration files."""

    max_batch_size: int = 0
    """Above 0: the first dim of every tensor is the batch, and a request has at most this many rows."""
    version_policy: VersionPolicy = Latest(1)
    inputs: tuple[DeclaredTensor, ...] = ()
    outputs: tuple[DeclaredTensor, ...] = ()
    optimize: bool = True
    """Fuse a plain model when it is loaded."""
    threads: int | None = None
    """Threads of the session; None leaves it to the server's own setting."""
    provider: bool = False
    """Run fused nodes through the plugin execution provider instead of custom ops."""


def read_settings(folder: Path) -> Settings:
    """The settings of the model in `folder`.

    Raises:
        SettingsError: a file cannot be parsed or asks for something that this server does not do.
    """
    pbtxt = folder / "config.pbtxt"
    toml = folder / "tilefuse.toml"
    config = _parse_pbtxt(pbtxt, folder.name) if pbtxt.is_file() else pb.ModelConfig()
    ours = _parse_toml(toml) if toml.is_file() else {}
    return Settings(
        max_batch_size=config.max_batch_size,
        version_policy=_version_policy(config.version_policy, pbtxt),
        inputs=_declared(config.input, pbtxt),
        outputs=_declared(config.output, pbtxt),
        optimize=bool(ours.get("optimize", True)),
        threads=ours.get("threads"),
        provider=bool(ours.get("provider", False)),
    )


def _parse_pbtxt(path: Path, model: str) -> pb.ModelConfig:
    config = pb.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        known = ", ".join(field.name for field in pb.ModelConfig.DESCRIPTOR.fields)
        raise SettingsError(f"{path}: {error} (this server reads {known})") from error
    for key, accepted in (
        ("name", model),
        ("platform", "onnxruntime_onnx"),
        ("backend", "onnxruntime"),
        ("default_model_filename", MODEL_FILE),
    ):
        value = getattr(config, key)
        if value not in ("", accepted):
            raise SettingsError(f"{path}: {key} is {value!r}, but only {accepted!r} can be served here")
    if config.max_batch_size < 0:
        raise SettingsError(f"{path}: max_batch_size is {config.max_batch_size}, but it must be 0 or more")
    return config


def _parse_toml(path: Path) -> dict[str, int]:
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    for key, value in read.items():
        kind = _TOML_KEYS.get(key)
        if kind is None:
            raise SettingsError(f"{path}: unknown key {key!r}; this server reads {', '.join(_TOML_KEYS)}")
        if type(value) is not kind:
            raise SettingsError(f"{path}: {key} is {value!r}, but it must be of type {kind.__name__}")
    if read.get("threads", 1) < 1:
        raise SettingsError(f"{path}: threads is {read['threads']}, but it must be 1 or more")
    return read


def _version_policy(policy: pb.ModelVersionPolicy, path: Path) -> VersionPolicy:
    match policy.WhichOneof("policy_choice"):
        case "latest":
            if policy.latest.num_versions == 0:
                raise SettingsError(f"{path}: version_policy latest needs num_versions of 1 or more")
            return Latest(policy.latest.num_versions)
        case "specific":
            if not policy.specific.versions:
                raise SettingsError(f"{path}: version_policy specific lists no versions")
            return Specific(tuple(policy.specific.versions))
        case "all":
            return Every()
        case _:
            return Latest(1)


def _declared(tensors: Sequence[pb.ModelInput] | Sequence[pb.ModelOutput], path: Path) -> tuple[DeclaredTensor, ...]:
    return tuple(_declare(tensor, path) for tensor in tensors)


def _declare(tensor: pb.ModelInput | pb.ModelOutput, path: Path) -> DeclaredTensor:
    datatype = BY_CONFIG.get(pb.DataType.Name(tensor.data_type))
    if not tensor.name or datatype is None:
        raise SettingsError(f"{path}: an input or output needs both name and data_type, found {tensor.name!r} without")
    if any(extent < -1 for extent in tensor.dims):
        raise SettingsError(f"{path}: dims of {tensor.name!r} are {list(tensor.dims)}, each must be -1, 0 or more")
    return DeclaredTensor(tensor.name, datatype, tuple(tensor.dims))
