"""A page for people and JSON and metrics for machines, read-only, on a port of its own.

In: HTTP requests of GET and HEAD. Out: `/` (the page), `/status.json`, `/metrics`, `/live`, `/ready`. Invariants:
nothing can be changed here; nothing is loaded from elsewhere; a page of another origin cannot read it, as only requests
for an address or a name of this machine are answered.
"""

import ipaddress
import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from runtime.server.budget import Budget
from runtime.server.generation.engine import Engine
from runtime.server.operations.metrics import CONTENT_TYPE, Metrics
from runtime.server.repository import Repository
from runtime.server.statistics import BUCKETS_MS

PAGE = Path(__file__).parent / "status.html"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class StatusError(Exception):
    """The status port cannot be opened."""


class StatusServer:
    """Answers in threads of its own until `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        repository: Repository,
        budget: Budget,
        calls: Callable[[], int],
        ready: Callable[[], bool],
        version: str,
    ) -> None:
        """Listen on `host`:`port`; 0 picks a free port. `calls` tells how many were accepted and are not answered.

        Raises:
            StatusError: the address is taken or not ours.
        """
        metrics = Metrics(repository, budget, calls)
        page = PAGE.read_bytes()

        def status() -> bytes:
            found = describe_status(repository, budget)
            found |= {"calls": calls(), "ready": ready(), "server": f"tilefuse {version}"}
            return json.dumps(found).encode()

        pages: dict[str, Callable[[], tuple[HTTPStatus, str, bytes]]] = {
            "/": lambda: (HTTPStatus.OK, "text/html; charset=utf-8", page),
            "/status.json": lambda: (HTTPStatus.OK, "application/json", status()),
            "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE, metrics.text()),
            "/live": lambda: (HTTPStatus.OK, "text/plain", b"live\n"),
            "/ready": lambda: (
                (HTTPStatus.OK, "text/plain", b"ready\n")
                if ready()
                else (HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"not ready\n")
            ),
        }
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(pages))
        except OSError as error:
            raise StatusError(f"the status page cannot listen on {host}:{port}: {error.strerror}") from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="tilefuse-status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


def describe_status(repository: Repository, budget: Budget) -> dict[str, Any]:
    """What the page shows."""
    models = {(model.name, model.version): model for model in repository.models()}
    rows: list[dict[str, Any]] = []
    for entry in repository.index():
        model = models.get((entry.name, entry.version))
        row: dict[str, Any] = {
            "name": entry.name,
            "version": entry.version,
            "state": entry.state,
            "notes": [entry.reason] if entry.reason else [],
        }
        if model is not None:
            totals = model.statistics.totals()
            row |= {
                "notes": [*row["notes"], *model.notes],
                "fused": model.fused,
                "waiting": model.waiting,
                "running": model.usage.count,
                "success": totals.success,
                "failure": totals.failure,
                "rows": totals.rows,
                "executions": totals.executions,
                "mean_ms": totals.request_ns / 1e6 / totals.success if totals.success else None,
                "latencies": totals.latencies,
            }
            if model.engine is not None:
                row["generation"] = _describe_generation(model.engine)
        rows.append(row)
    return {
        "in_flight": {"requests": budget.requests, "bytes": budget.bytes},
        "buckets_ms": BUCKETS_MS,
        "models": rows,
    }


def _describe_generation(engine: Engine) -> dict[str, Any]:
    totals = engine.counters.totals()
    first, between = totals.first, totals.between
    return {
        "streams": engine.active,
        "kept": engine.kept,
        "tokens": totals.tokens,
        "rows_per_step": totals.step_rows / totals.steps if totals.steps else None,
        "cache_bytes": engine.reserved_bytes,
        "cache_limit": engine.settings.cache_bytes,
        "first_ms": first.ns / 1e6 / sum(first.counts) if any(first.counts) else None,
        "token_ms": between.ns / 1e6 / sum(between.counts) if any(between.counts) else None,
    }


def _handler(pages: dict[str, Callable[[], tuple[HTTPStatus, str, bytes]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD; http.server refuses every other method."""

        timeout = 10
        server_version = "tilefuse"
        sys_version = ""

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: probes and scrapes come every few seconds."""

        def _answer(self, *, body: bool) -> None:
            status, kind, content = self._page()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _page(self) -> tuple[HTTPStatus, str, bytes]:
            if not _is_this_machine(self.headers.get("Host", "")):
                return HTTPStatus.FORBIDDEN, "text/plain", b"ask by address, or as localhost\n"
            page = pages.get(self.path.partition("?")[0])
            if page is None:
                return HTTPStatus.NOT_FOUND, "text/plain", b"there are /, /status.json, /metrics, /live and /ready\n"
            return page()

    return Handler


def _is_this_machine(host: str) -> bool:
    """Whether a Host header is localhost or an address, which no foreign name can be made to mean."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
