"""Reads `config.pbtxt`, the model configuration of Triton Inference Server, in protobuf's text format.

In: the file. Out: changes of the default `Settings`, by field. Invariant: keys that this server does not know, and
values that it does not act on, become warnings by name; values that would change what is computed are errors.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from proto import open_inference_pb2 as pb
from runtime.server.settings import (
    MODEL_FILE,
    Batching,
    DeclaredTensor,
    Every,
    Latest,
    QueuePolicy,
    SettingsError,
    Specific,
    VersionPolicy,
    Warmup,
    WarmupInput,
    require_one_of,
)
from runtime.wire import BY_CONFIG, Datatype

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\.onnx")
_TOKEN = re.compile(
    r"""#[^\n]*|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[A-Za-z_][A-Za-z0-9_.]*|[{}<>\[\]:,;]|[^\s{}<>\[\]:,;"'#]+"""
)
_THREADS = "intra_op_thread_count"


def read_config(path: Path) -> dict[str, Any]:
    """The settings in the file, by their names in `Settings`, `warnings` included.

    Raises:
        SettingsError: it cannot be parsed, or asks for what cannot be served.
    """
    config = pb.ModelConfig()
    try:
        text = path.read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    require_one_of(path, "name", config.name, (path.parent.name,))
    require_one_of(path, "platform", config.platform, ("onnxruntime_onnx",))
    require_one_of(path, "backend", config.backend, ("onnxruntime",))
    if config.max_batch_size < 0:
        raise SettingsError(f"{path}: max_batch_size is {config.max_batch_size}, but it must be 0 or more")
    if config.default_model_filename and not _FILE_NAME.fullmatch(config.default_model_filename):
        raise SettingsError(
            f"{path}: default_model_filename is {config.default_model_filename!r}, but it must be a plain "
            "name that ends in .onnx"
        )
    warnings = [f"{path}: {key} is not supported and has no effect" for key in unknown_keys(text)]
    return {
        "max_batch_size": config.max_batch_size,
        "version_policy": _version_policy(config.version_policy, path),
        "inputs": _declared(config.input, path),
        "outputs": _declared(config.output, path),
        "filename": config.default_model_filename or MODEL_FILE,
        "instances": _instances(config.instance_group, path, warnings),
        "threads": _threads(config.parameters, path, warnings),
        "batching": _batching(config, path, warnings) if config.HasField("dynamic_batching") else None,
        "warmups": tuple(_warmup(entry, path) for entry in config.model_warmup),
        "warnings": tuple(warnings),
    }


def unknown_keys(text: str) -> list[str]:
    """The dotted names of keys in a config.pbtxt that `ModelConfig` does not have, each once, in order.

    `text` has been parsed, so it is well-formed.
    """
    tokens = [token for token in _TOKEN.findall(text) if token[0] not in "#,;"]
    found: dict[str, None] = {}
    _walk(tokens[::-1], "", pb.ModelConfig.DESCRIPTOR, found)
    return list(found)


def _walk(tokens: list[str], prefix: str, message: Any, found: dict[str, None]) -> None:
    """Take one message's fields off the end of `tokens`, and the brace that closes it."""
    while tokens and (key := tokens.pop()) not in "}>":
        field = message.fields_by_name.get(key) if message is not None else None
        if message is not None and field is None:
            found[prefix + key] = None
        if tokens and tokens[-1] == ":":
            tokens.pop()
        many = bool(tokens) and tokens[-1] == "["
        while tokens:
            token = tokens.pop()
            if token in "{<":
                _walk(tokens, f"{prefix}{key}.", field.message_type if field is not None else None, found)
            while token[0] in "\"'" and tokens and tokens[-1][0] in "\"'":
                tokens.pop()  # text in several pieces
            if not many or token == "]":
                break


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


def _instances(groups: Sequence[pb.ModelInstanceGroup], path: Path, warnings: list[str]) -> int | None:
    for group in groups:
        if group.count < 0:
            raise SettingsError(f"{path}: instance_group count is {group.count}, but it must be 1 or more")
        if group.kind == pb.ModelInstanceGroup.KIND_GPU:
            warnings.append(f"{path}: instance_group kind KIND_GPU is not supported, the instances run on the CPU")
    return sum(group.count or 1 for group in groups) or None


def _threads(parameters: Mapping[str, pb.ModelParameter], path: Path, warnings: list[str]) -> int | None:
    unknown = [key for key in parameters if key != _THREADS]
    warnings.extend(f"{path}: parameter {key!r} is not supported and has no effect" for key in unknown)
    if _THREADS not in parameters:
        return None
    text = parameters[_THREADS].string_value
    if not text.isascii() or not text.isdigit():
        raise SettingsError(f"{path}: parameter {_THREADS} is {text!r}, but it must be a whole number")
    return int(text) or None


def _batching(config: pb.ModelConfig, path: Path, warnings: list[str]) -> Batching:
    asked = config.dynamic_batching
    if config.max_batch_size < 1:
        raise SettingsError(f"{path}: dynamic_batching needs a max_batch_size of 1 or more")
    for rows in asked.preferred_batch_size:
        if not 1 <= rows <= config.max_batch_size:
            raise SettingsError(f"{path}: preferred_batch_size is {rows}, but it must be 1 to {config.max_batch_size}")
    levels, default = asked.priority_levels, asked.default_priority_level
    if levels and not 1 <= default <= levels:
        raise SettingsError(f"{path}: default_priority_level is {default}, but it must be 1 to {levels}")
    for level in asked.priority_queue_policy:
        if not 1 <= level <= levels:
            raise SettingsError(f"{path}: priority_queue_policy names level {level}, but priority_levels is {levels}")
    if asked.preserve_ordering:
        warnings.append(f"{path}: preserve_ordering has no effect: every call has its own answer")
    return Batching(
        preferred=tuple(sorted(set(asked.preferred_batch_size))),
        passed_over=asked.max_queue_delay_microseconds / 1e6,
        priorities=levels,
        default_priority=default,
        policy=_queue_policy(asked.default_queue_policy),
        policies=tuple((level, _queue_policy(policy)) for level, policy in sorted(asked.priority_queue_policy.items())),
    )


def _queue_policy(policy: pb.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout=policy.default_timeout_microseconds / 1e6 or None,
        delay=policy.timeout_action == pb.ModelQueuePolicy.DELAY,
        override=policy.allow_timeout_override,
        largest=policy.max_queue_size,
    )


def _warmup(entry: pb.ModelWarmup, path: Path) -> Warmup:
    inputs = tuple(_warmup_input(name, sent, entry, path) for name, sent in sorted(entry.inputs.items()))
    return Warmup(entry.name, inputs, max(1, entry.count))


def _warmup_input(name: str, sent: pb.ModelWarmup.Input, entry: pb.ModelWarmup, path: Path) -> WarmupInput:
    datatype: Datatype | None = BY_CONFIG.get(pb.DataType.Name(sent.data_type))
    if datatype is None or any(extent < 0 for extent in sent.dims):
        raise SettingsError(f"{path}: model_warmup {entry.name!r}: {name!r} needs a data_type, and dims of 0 or more")
    shape = ((entry.batch_size,) if entry.batch_size else ()) + tuple(sent.dims)
    content = "random" if sent.random_data else "zero"
    if sent.WhichOneof("input_data_type") == "input_data_file":
        file = path.parent / "warmup" / sent.input_data_file
        if not file.resolve().is_relative_to((path.parent / "warmup").resolve()):
            raise SettingsError(f"{path}: model_warmup {entry.name!r}: {sent.input_data_file!r} is outside of warmup/")
        content = str(file)
    return WarmupInput(name, datatype, shape, content)
