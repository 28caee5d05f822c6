"""TLS, client certificates, bearer tokens and which methods they open."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from served_models import plain_loader, running, save_double

from proto import open_inference_pb2 as pb
from proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from runtime.server.handlers import SERVICE
from runtime.server.operations.access import GROUPS, Access, AccessError, Rule, group_of, read_access
from runtime.server.serve import RunningServer, ServerOptions
from runtime.server.transport import ListenError, TransportOptions

TOKEN = "s3cret"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_double(tmp_path / "models" / "double" / "1" / "model.onnx")
    (tmp_path / "models" / "double" / "tilefuse.toml").write_text("optimize = false\n")
    return tmp_path / "models"


def infer_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="double")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.ones(4, dtype=np.float32).tobytes())
    return request


def outcome(call: Callable[[], Any]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code()
    return grpc.StatusCode.OK


@dataclass
class Files:
    """Certificates on disk: the server's, and those that clients use."""

    cert: Path
    key: Path
    authority: Path
    authority_bytes: bytes
    clients: dict[str, tuple[bytes, bytes]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    authority, stranger = trustme.CA(), trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    paths = [tmp_path / name for name in ("server.pem", "server.key", "ca.pem")]
    server.cert_chain_pems[0].write_to_path(str(paths[0]))
    server.private_key_pem.write_to_path(str(paths[1]))
    authority.cert_pem.write_to_path(str(paths[2]))
    clients = {
        name: (cert.private_key_pem.bytes(), cert.cert_chain_pems[0].bytes())
        for name, cert in (
            ("worker", authority.issue_cert(common_name="worker")),
            ("operator", authority.issue_cert(common_name="operator")),
            ("stranger", stranger.issue_cert(common_name="worker")),
        )
    }
    return Files(paths[0], paths[1], paths[2], authority.cert_pem.bytes(), clients)


def secure(port: int, files: Files, client: str = "") -> grpc.Channel:
    key, chain = files.clients.get(client, (None, None))
    return grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(files.authority_bytes, key, chain))


def insecure(server: RunningServer) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{server.port}")


def served(root: Path, tmp_path: Path, transport: TransportOptions, **options: Any) -> RunningServer:
    server = RunningServer(ServerOptions(transport=transport, **options))
    server.load(root, plain_loader(tmp_path / "cache"))
    return server


def test_tls(root: Path, tmp_path: Path, files: Files) -> None:
    transport = TransportOptions(port=0, tls_cert=files.cert, tls_key=files.key)
    server = served(root, tmp_path, transport)
    try:
        with secure(server.port, files) as channel:
            stub: Any = GRPCInferenceServiceStub(channel)
            assert stub.ModelInfer(infer_request(), timeout=10).model_name == "double"
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = GRPCInferenceServiceStub(channel)
            assert outcome(lambda: stub.ServerLive(pb.ServerLiveRequest(), timeout=5)) is grpc.StatusCode.UNAVAILABLE
    finally:
        assert server.drain()


def test_client_certificates_open_what_their_subject_may(root: Path, tmp_path: Path, files: Files) -> None:
    transport = TransportOptions(port=0, tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.authority)
    rules = (
        Rule("", "worker", frozenset({"inference"})),
        Rule("", "operator", frozenset({"metadata", "admin"})),
    )
    server = served(root, tmp_path, transport, access=Access(rules), control_mode="explicit", load_models=("double",))
    expected = {
        "worker": (grpc.StatusCode.OK, DENIED, DENIED),
        "operator": (DENIED, grpc.StatusCode.OK, grpc.StatusCode.OK),
        "stranger": (grpc.StatusCode.UNAVAILABLE,) * 3,  # no connection: another authority signed the certificate
        "": (grpc.StatusCode.UNAVAILABLE,) * 3,
    }
    try:
        for client, codes in expected.items():
            with secure(server.port, files, client) as channel:
                stub: Any = GRPCInferenceServiceStub(channel)
                found = (
                    outcome(lambda stub=stub: stub.ModelInfer(infer_request(), timeout=10)),
                    outcome(lambda stub=stub: stub.ModelConfig(pb.ModelConfigRequest(name="double"), timeout=10)),
                    outcome(
                        lambda stub=stub: stub.RepositoryModelLoad(
                            pb.RepositoryModelLoadRequest(model_name="double"), timeout=10
                        )
                    ),
                )
                assert found == codes, client
    finally:
        assert server.drain()


ACCESS = Access((Rule(hashed(TOKEN), "", frozenset({"inference"})),), frozenset({"health"}))


def test_every_method_needs_a_token(root: Path, tmp_path: Path) -> None:
    """Of every service, streams included; and the token opens its groups only."""
    token = (("authorization", f"Bearer {TOKEN}"),)
    wrong = (("authorization", "Bearer s3cre"),)
    with running(root, plain_loader(tmp_path / "cache"), access=ACCESS) as (server, _), insecure(server) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        for method in SERVICE.methods:
            full = f"/{SERVICE.full_name}/{method.name}"
            group = group_of(full)
            request = getattr(pb, method.input_type.name)()
            for metadata in ((), wrong, (("authorization", TOKEN),), token):
                call = getattr(stub, method.name)
                code = outcome(
                    lambda call=call, metadata=metadata, request=request, streams=method.client_streaming: (
                        list(call(iter([]), metadata=metadata, timeout=10))
                        if streams
                        else call(request, metadata=metadata, timeout=10)
                    )
                )
                if group == "health":
                    assert code not in (UNAUTHENTICATED, DENIED), full
                elif metadata is not token:
                    assert code is UNAUTHENTICATED, full
                else:
                    assert (code is DENIED) is (group != "inference"), full
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        assert outcome(lambda: list(reflection.ServerReflectionInfo(iter([ask]), timeout=10))) is UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(iter(watch)).status == 1  # the stream that answers without a thread passes the check too
        watch.cancel()


def test_streams_are_denied_without_a_token(root: Path, tmp_path: Path) -> None:
    access = Access((Rule(hashed(TOKEN), "", frozenset(GROUPS)),))
    with running(root, plain_loader(tmp_path / "cache"), access=access) as (server, _), insecure(server) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert outcome(lambda: next(iter(watch))) is UNAUTHENTICATED
        stub: Any = GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([infer_request()]), metadata=(("authorization", f"Bearer {TOKEN}"),)))
        assert answers[0].infer_response.model_name == "double"


def test_a_method_of_no_group_is_denied() -> None:
    assert group_of("/other.Service/Method") is None
    assert {group_of(f"/{SERVICE.full_name}/{method.name}") for method in SERVICE.methods} == set(GROUPS)


def test_secrets_do_not_travel_in_the_clear(files: Files) -> None:
    with pytest.raises(ListenError, match=r"would travel in the clear to 0\.0\.0\.0"):
        RunningServer(ServerOptions(transport=TransportOptions(host="0.0.0.0", port=0), access=ACCESS))
    subject = Access((Rule("", "worker", frozenset()),))
    with pytest.raises(ListenError, match="tls_client_ca is not given"):
        RunningServer(ServerOptions(transport=TransportOptions(port=0), access=subject))
    with pytest.raises(ListenError, match="tls_cert is given without tls_key"):
        RunningServer(ServerOptions(transport=TransportOptions(port=0, tls_cert=files.cert)))
    with pytest.raises(ListenError, match="need tls_cert"):
        RunningServer(ServerOptions(transport=TransportOptions(port=0, tls_client_ca=files.cert)))
    with pytest.raises(ListenError, match=r"nothing\.pem: cannot be read"):
        RunningServer(
            ServerOptions(transport=TransportOptions(port=0, tls_cert=Path("nothing.pem"), tls_key=files.key))
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rules = 1", "unknown key 'rules'"),
        ("rule = 1", r"written as \[\[rule\]\] tables"),
        ("[[rule]]\ngroups = ['inference']", "rule 1 needs either token_sha256 or subject"),
        ("[[rule]]\ntoken_sha256 = 'abc'", "64 hexadecimal digits"),
        ("[[rule]]\nsubject = 'a'\ngroups = ['all']", "must be a list of health, inference, metadata, admin"),
        ("[[rule]]\nsubject = 'a'\ntoken = 'x'", "rule 1: unknown key 'token'"),
        ("anonymous = ['none']", "anonymous: groups must be a list"),
        ("anonymous = [", "Invalid"),
    ],
)
def test_rules_that_are_not_complete_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(AccessError, match=reason):
        read_access(path)


def test_rules_are_read(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(f"anonymous = ['health']\n[[rule]]\ntoken_sha256 = '{hashed(TOKEN)}'\ngroups = ['inference']\n")
    assert read_access(path) == ACCESS
