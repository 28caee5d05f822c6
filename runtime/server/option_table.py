"""Every setting of the server, once: the flags of `tilefuse serve` and the keys of its `--config` file.

In: values by name, from the file and the flags. Out: `ServerOptions`. Invariants: a flag and a key of one name mean the
same; a flag overrides the file; an unknown key is an error.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.server.control import MODES
from runtime.server.operations.access import read_access
from runtime.server.operations.logs import FORMATS
from runtime.server.serve import ServerOptions
from runtime.server.transport import COMPRESSIONS, TransportOptions

MIB = 2**20


class ConfigError(Exception):
    """The configuration file cannot be used; the message names it and the key."""


@dataclass(frozen=True)
class Option:
    """One setting."""

    name: str
    """With underscores, as in the file; the flag has dashes."""
    kind: type
    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    """May be given several times; a list in the file."""


_TRANSPORT = TransportOptions()
_SERVER = ServerOptions()

OPTIONS: tuple[Option, ...] = (
    # Where to listen
    Option("host", str, _TRANSPORT.host, "The address to listen on."),
    Option("port", int, _TRANSPORT.port, "The port; 0 picks a free one.", 0, 65535),
    Option("processes", int, 1, "So many processes answer on the port; each has all models.", 1, 64),
    Option("tls_cert", Path, None, "Certificate chain in PEM: speak TLS only."),
    Option("tls_key", Path, None, "Its private key in PEM."),
    Option("tls_client_ca", Path, None, "Demand client certificates that this authority signed."),
    Option("access", Path, None, "A TOML file that says who may call what."),
    Option("status_port", int, None, "Status page and metrics on this port; 0 picks a free one.", 0, 65535),
    Option("status_host", str, _SERVER.status_host, "The address of the status port."),
    # Connections and messages
    Option("message_mib", int, _TRANSPORT.message_bytes // MIB, "Largest request or response in MiB.", 1, 2047),
    Option("metadata_kib", int, _TRANSPORT.metadata_bytes // 2**10, "Largest headers of a call in KiB.", 1, 1024),
    Option("compression", str, _TRANSPORT.compression, "Of responses.", choices=tuple(COMPRESSIONS)),
    Option("keepalive_seconds", float, _TRANSPORT.keepalive_seconds, "Ping silent clients after; 0: gRPC's own.", 0),
    Option("keepalive_timeout_seconds", float, _TRANSPORT.keepalive_timeout_seconds, "Wait for the answer.", 0),
    Option("least_ping_seconds", float, _TRANSPORT.least_ping_seconds, "Refuse clients that ping more often.", 0),
    Option("connection_idle_seconds", float, _TRANSPORT.connection_idle_seconds, "Close idle ones; 0: never.", 0),
    Option("connection_age_seconds", float, _TRANSPORT.connection_age_seconds, "Close old ones; 0: never.", 0),
    Option("connection_grace_seconds", float, _TRANSPORT.connection_grace_seconds, "Extra time of their calls.", 0),
    # Work in flight
    Option("workers", int, _SERVER.workers, "Calls that are worked on at the same time.", 1, 4096),
    Option("waiting", int, _SERVER.waiting, "Calls that may wait for a worker.", 0),
    Option("in_flight_mib", int, _SERVER.in_flight_bytes // MIB, "Requests worked on, together, in MiB.", 1),
    Option("drain_seconds", float, _SERVER.drain_seconds, "How long a shutdown waits for calls in flight.", 0),
    # Models
    Option("model_control_mode", str, _SERVER.control_mode, "Who loads models.", choices=MODES),
    Option("load_model", str, (), "With explicit: load this model at start.", many=True),
    Option("poll_seconds", float, _SERVER.poll_seconds, "With poll: how often to look.", 0.1),
    Option("optimize_first", bool, False, "Fuse plain models before they are served, not in the background."),
    # What is told
    Option("log_format", str, "text", "Of the log on stderr.", choices=FORMATS),
    Option("log_calls", bool, _SERVER.log_calls, "Log a line for every call."),
    Option("trace_endpoint", str, _SERVER.trace_endpoint, "Send OpenTelemetry traces there, http://HOST:4317."),
)
_BY_NAME = {option.name: option for option in OPTIONS}


def read_file(path: Path) -> dict[str, Any]:
    """The settings in the TOML file at `path`.

    Raises:
        ConfigError: it cannot be read, or a key is unknown or has a wrong value.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for key, value in found.items():
        option = _BY_NAME.get(key)
        if option is None:
            raise ConfigError(f"{path}: unknown key {key!r}; the keys are {', '.join(_BY_NAME)}")
        _check(path, option, value)
    return {key: _as_given(_BY_NAME[key], value) for key, value in found.items()}


def build_options(given: Mapping[str, Any]) -> ServerOptions:
    """The options, from the settings that are given and the defaults of all others."""
    value = {option.name: option.default for option in OPTIONS} | dict(given)
    transport = TransportOptions(
        host=value["host"],
        port=value["port"],
        shared=value["processes"] > 1,
        tls_cert=value["tls_cert"],
        tls_key=value["tls_key"],
        tls_client_ca=value["tls_client_ca"],
        message_bytes=value["message_mib"] * MIB,
        metadata_bytes=value["metadata_kib"] * 2**10,
        compression=value["compression"],
        keepalive_seconds=value["keepalive_seconds"],
        keepalive_timeout_seconds=value["keepalive_timeout_seconds"],
        least_ping_seconds=value["least_ping_seconds"],
        connection_idle_seconds=value["connection_idle_seconds"],
        connection_age_seconds=value["connection_age_seconds"],
        connection_grace_seconds=value["connection_grace_seconds"],
    )
    return ServerOptions(
        transport=transport,
        workers=value["workers"],
        waiting=value["waiting"],
        in_flight_bytes=value["in_flight_mib"] * MIB,
        drain_seconds=value["drain_seconds"],
        control_mode=value["model_control_mode"],
        load_models=value["load_model"],
        poll_seconds=value["poll_seconds"],
        access=read_access(value["access"]) if value["access"] is not None else None,
        status_host=value["status_host"],
        status_port=value["status_port"],
        log_calls=value["log_calls"],
        trace_endpoint=value["trace_endpoint"],
    )


def _as_given(option: Option, value: Any) -> Any:
    """A value of the file as a flag would give it."""
    if option.many:
        return tuple(value)
    return Path(value) if option.kind is Path else value


def _check(path: Path, option: Option, value: Any) -> None:
    values = value if option.many else [value]
    if option.many and not isinstance(value, list):
        raise ConfigError(f"{path}: {option.name} is {value!r}, but it must be a list")
    for one in values:
        kinds = {float: (int, float), Path: (str,)}.get(option.kind, (option.kind,))
        if type(one) not in kinds:
            raise ConfigError(f"{path}: {option.name} is {one!r}, but it must be of type {kinds[-1].__name__}")
        if option.choices and one not in option.choices:
            raise ConfigError(f"{path}: {option.name} is {one!r}, but it must be {', '.join(option.choices)}")
        if (option.least is not None and one < option.least) or (option.most is not None and one > option.most):
            most = "" if option.most is None else f" and at most {option.most:g}"
            raise ConfigError(f"{path}: {option.name} is {one}, but it must be at least {option.least:g}{most}")
