"""Who may call what: bearer tokens and subjects of client certificates, per group of methods.

In: a TOML file of rules. Out: an interceptor. Invariants: every method of every service passes it, streams, health and
reflection included; a method that is in no group is denied; tokens are kept and compared as hashes only.
"""

import functools
import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from runtime.server.direct import CallContext

GROUPS: dict[str, tuple[str, ...]] = {
    "health": (
        "grpc.health.v1.Health/*",
        *(f"inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")),
    ),
    "inference": tuple(f"inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer")),
    "metadata": (
        "grpc.reflection.v1alpha.ServerReflection/*",
        *(
            f"inference.GRPCInferenceService/{name}"
            for name in ("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex")
        ),
    ),
    "admin": (
        "inference.GRPCInferenceService/*",
    ),  # whatever is in no other group: loading, unloading, what is not built
}
"""Methods by group; a method belongs to the first group that names it."""
_HASH = re.compile(r"[0-9a-f]{64}")


class AccessError(Exception):
    """The file of rules cannot be used; the message names it and the rule."""


@dataclass(frozen=True)
class Rule:
    """Who is known by a token or a certificate, and what they may call."""

    token_sha256: str
    """Of the bearer token, hexadecimal; empty: not known by one."""
    subject: str
    """Common name or alternative name in the client's certificate; empty: not known by one."""
    groups: frozenset[str]


@dataclass(frozen=True)
class Access:
    """All rules."""

    rules: tuple[Rule, ...]
    anonymous: frozenset[str] = frozenset()
    """What anybody may call."""

    @property
    def uses_tokens(self) -> bool:
        """Whether clients send secrets, which must not travel in the clear."""
        return any(rule.token_sha256 for rule in self.rules)

    @property
    def uses_subjects(self) -> bool:
        """Whether clients are known by certificates."""
        return any(rule.subject for rule in self.rules)


def read_access(path: Path) -> Access:
    """The rules in the TOML file at `path`.

    Raises:
        AccessError: it cannot be read, or a rule is not complete.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AccessError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AccessError(f"{path}: {error}") from error
    if strange := found.keys() - {"rule", "anonymous"}:
        raise AccessError(f"{path}: unknown key {sorted(strange)[0]!r}; the keys are anonymous and [[rule]]")
    entries = found.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise AccessError(f"{path}: rules are written as [[rule]] tables")
    rules = tuple(_rule(path, number, entry) for number, entry in enumerate(entries, 1))
    return Access(rules, _groups(path, "anonymous", found.get("anonymous", [])))


def _rule(path: Path, number: int, entry: dict[str, Any]) -> Rule:
    where = f"rule {number}"
    if strange := entry.keys() - {"token_sha256", "subject", "groups"}:
        raise AccessError(f"{path}: {where}: unknown key {sorted(strange)[0]!r}")
    token, subject = entry.get("token_sha256", ""), entry.get("subject", "")
    if not isinstance(token, str) or not isinstance(subject, str) or bool(token) == bool(subject):
        raise AccessError(f"{path}: {where} needs either token_sha256 or subject")
    if token and not _HASH.fullmatch(token):
        raise AccessError(f"{path}: {where}: token_sha256 must be the 64 hexadecimal digits of the token's SHA-256")
    return Rule(token, subject, _groups(path, where, entry.get("groups", [])))


def _groups(path: Path, where: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(name in GROUPS for name in value):
        raise AccessError(f"{path}: {where}: groups must be a list of {', '.join(GROUPS)}, but is {value!r}")
    return frozenset(value)


def group_of(method: str) -> str | None:
    """The group of a full method name, such as /inference.GRPCInferenceService/ModelInfer."""
    service, _, name = method.removeprefix("/").partition("/")
    for group, patterns in GROUPS.items():
        if f"{service}/{name}" in patterns or f"{service}/*" in patterns:
            return group
    return None


class AccessInterceptor(grpc.ServerInterceptor):
    """Refuses calls that no rule allows: UNAUTHENTICATED to who is not known, PERMISSION_DENIED to who is."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """The handler of a method, behind the check."""
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return None
        group = group_of(handler_call_details.method)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            work = getattr(handler, kind)
            if work is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(self._checked(work, group), handler.request_deserializer, handler.response_serializer)
        return handler

    def _checked(self, work: Callable[..., Any], group: str | None) -> Callable[..., Any]:
        @functools.wraps(work)
        def check(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            check_access(self._access, context, group)
            return work(request, context, *more)

        return check


def check_access(access: Access, context: CallContext, group: str | None) -> None:
    """Abort a call of a method of `group` unless a rule allows it."""
    if group not in access.anonymous:
        known = [rule for rule in access.rules if _holds(rule, context)]
        if not known:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call needs a bearer token or a client certificate")
        if group is None or not any(group in rule.groups for rule in known):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"you may not call methods of the group {group or 'none'}")


def _holds(rule: Rule, context: CallContext) -> bool:
    """Whether the caller is the one of the rule."""
    if rule.subject:
        identities = context.peer_identities() or ()
        names = context.auth_context().get("x509_common_name", ())
        return rule.subject.encode() in (*identities, *names)
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
            digest = hashlib.sha256(value.removeprefix("Bearer ").encode()).hexdigest()
            return hmac.compare_digest(digest, rule.token_sha256)
    return False
