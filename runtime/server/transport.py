"""The gRPC server under the service: its options, its port, health and reflection.

In: `TransportOptions` and handlers. Out: a `grpc.Server` that is bound and not started. Invariant: nothing listens on
an address that was not asked for, and the port is ours alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from proto import open_inference_pb2 as pb

LARGEST_MESSAGE = 2**31 - 2**20
"""Protobuf cannot hold more than 2 GiB."""
COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}


class ListenError(Exception):
    """The server cannot listen where or as it was told to."""


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Where and how to listen. Times in seconds; 0 leaves a time to gRPC, which means none or its default."""

    host: str = "127.0.0.1"
    port: int = 8001
    """0 picks a free one."""
    shared: bool = False
    """Other processes of ours listen on the port as well."""
    tls_cert: Path | None = None
    """The server's certificate chain, PEM; with `tls_key`, only TLS is spoken."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """Clients must have a certificate that this authority (PEM) signed."""
    message_bytes: int = 128 * 2**20
    """The largest request and response."""
    metadata_bytes: int = 16 * 2**10
    """The largest headers of a call."""
    compression: str = "none"
    """Of responses; requests may be compressed anyhow."""
    keepalive_seconds: float = 0.0
    """Ping a client that has been silent for so long."""
    keepalive_timeout_seconds: float = 20.0
    """Close a connection whose ping is not answered within that time."""
    least_ping_seconds: float = 10.0
    """Close the connection of a client that pings more often."""
    connection_idle_seconds: float = 0.0
    """Close a connection without calls after that time."""
    connection_age_seconds: float = 0.0
    """Ask clients to connect anew after that time, so that they spread over new servers."""
    connection_grace_seconds: float = 0.0
    """How long their calls may then still run."""


def channel_options(options: TransportOptions) -> tuple[tuple[str, int], ...]:
    """gRPC's own options.

    Raises:
        ListenError: a value is out of range.
    """
    if options.tls_cert is None and (options.tls_key is not None or options.tls_client_ca is not None):
        raise ListenError("tls_key and tls_client_ca need tls_cert")
    if not 0 < options.message_bytes <= LARGEST_MESSAGE:
        raise ListenError(f"message size is {options.message_bytes} bytes, but 1 to {LARGEST_MESSAGE} are possible")
    found = [
        ("grpc.max_receive_message_length", options.message_bytes),
        ("grpc.max_send_message_length", options.message_bytes),
        ("grpc.max_metadata_size", options.metadata_bytes),
        ("grpc.absolute_max_metadata_size", options.metadata_bytes),
        ("grpc.so_reuseport", int(options.shared)),  # unasked, a second server on the same port is a mistake
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(options.least_ping_seconds)),
    ]
    for name, seconds in (
        ("grpc.keepalive_time_ms", options.keepalive_seconds),
        ("grpc.keepalive_timeout_ms", options.keepalive_timeout_seconds),
        ("grpc.max_connection_idle_ms", options.connection_idle_seconds),
        ("grpc.max_connection_age_ms", options.connection_age_seconds),
        ("grpc.max_connection_age_grace_ms", options.connection_grace_seconds),
    ):
        if seconds > 0:
            found.append((name, _ms(seconds)))
    return tuple(found)


def bind(server: grpc.Server, options: TransportOptions) -> int:
    """Listen; gives the port.

    Raises:
        ListenError: the address is taken or no address.
    """
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        if options.tls_cert is None:
            port = server.add_insecure_port(f"{host}:{options.port}")
        else:
            port = server.add_secure_port(f"{host}:{options.port}", _credentials(options))
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {host}:{options.port}: the port is taken or the address is not ours"
        ) from error
    if port == 0:
        raise ListenError(f"cannot listen on {host}:{options.port}")
    return port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _credentials(options: TransportOptions) -> grpc.ServerCredentials:
    """The certificates. ListenError: one is missing or cannot be read."""
    assert options.tls_cert is not None
    if options.tls_key is None:
        raise ListenError("tls_cert is given without tls_key")
    authority = _read(options.tls_client_ca) if options.tls_client_ca is not None else None
    pair = (_read(options.tls_key), _read(options.tls_cert))
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ListenError(f"{path}: cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise ListenError(f"{path}: is not a PEM file")
    return data


def add_reflection(server: grpc.Server) -> None:
    """Describe our services. Their files come from different descriptor pools, so they are copied into one."""
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    modules: Sequence[Any] = (pb, health_pb2, reflection_pb2)
    for module in modules:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        names += [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection(names, server, pool=pool)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
