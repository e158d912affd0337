"""What every request passes before it reaches an ASGI application, and its answer afterwards.

- `Observer` writes one line of JSON per request to the log, and counts for Prometheus. Neither
  contains images, keys or query strings.
- `Guard` checks the `Host` and `Origin` headers, so that no web page can reach a server on this
  machine, and asks for a key.
- `BodyLimits` receives the whole body before the application sees the request, within a limit per
  request, a limit on the memory of all requests and a deadline, which also holds for the answer.
- `ERROR_HANDLERS` turns exceptions into `{"error": "one sentence"}`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mivhead.errors import InputError, MivError, NotAvailableError, reading

_log = logging.getLogger(__name__)

_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # images
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
MIN_KEY = 8  # characters
RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Limits:
    """How much a service takes on."""

    max_bytes: int = 64 * 2**20  # of a request
    max_images: int = 64  # of a request
    max_pixels: int = 64 * 2**20  # of an image
    # Images that wait or are being computed, in all requests together
    max_queue: int = 256
    # Bytes of all request bodies that are held in memory at the same time
    max_memory: int = 96 * 2**20
    # Seconds from the head of a request to its answer
    deadline: float = 60.0


class ApiKeys:
    """The keys that open a service, compared in constant time.

    >>> keys = ApiKeys(["correct-horse"])
    >>> keys.open({"authorization": "Bearer correct-horse"}), keys.open({})
    (True, False)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]
        if not self._keys:
            raise InputError("There are no keys: give at least one.")
        for key in self._keys:
            if len(key) < MIN_KEY or not all(33 <= byte <= 126 for byte in key):
                raise InputError(
                    f"A key must have at least {MIN_KEY} printable ASCII characters and no spaces."
                )

    @classmethod
    def from_variable(cls, name: str) -> ApiKeys:
        """Read one key from an environment variable."""
        value = os.environ.get(name, "").strip()
        if not value:
            raise NotAvailableError(
                f"The environment variable {name}, which holds the key, is not set."
            )
        return cls([value])

    @classmethod
    def from_file(cls, path: str | Path) -> ApiKeys:
        """Read one key per line of a file; empty lines and lines that start with # do not count."""
        with reading(f"The file of keys {path}", UnicodeDecodeError, kind=NotAvailableError):
            lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
        return cls(line for line in lines if line and not line.startswith("#"))

    def open(self, headers: Mapping[str, str]) -> bool:
        """Return whether the `Authorization` header holds a key."""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        sent_key = sent.strip().encode("utf-8", "replace")
        # All keys are compared, so that the time does not tell which one matched.
        matches = [hmac.compare_digest(sent_key, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class Guard:
    """Middleware: refuse requests from web pages of other sites, and those without a key.

    A server on this machine is within reach of every web page that its user opens. A page can send
    requests to `http://127.0.0.1`, which `Origin` reveals, and can give its own host name this
    address, which `Host` reveals.

    Hosts are names without a port by which the server may be addressed, by default any. Without
    keys none is needed; `open_paths`, such as health checks, never need one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] | None = None,
        keys: ApiKeys | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        self.app, self._keys, self._open_paths = app, keys, open_paths
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        local = self._hosts is not None and self._hosts <= set(LOOPBACK_HOSTS)
        # Only a proxy has https: on this machine, a page with https is of another server.
        self._schemes = ("http",) if local else ("http", "https")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if self._hosts is not None and _without_port(host) not in self._hosts:
            return error_response(
                421, "This server is not known by that host name: see the option --allowed-host."
            )
        origins = [f"{scheme}://{host}" for scheme in self._schemes if host]
        if headers.get("origin", "").lower() not in ("", *origins):
            return error_response(403, "Web pages of other sites may not use this server.")
        if self._keys is None or scope["path"] in self._open_paths or self._keys.open(headers):
            return None
        message = "A key is required: send it as `Authorization: Bearer KEY`."
        return error_response(401, message, {"WWW-Authenticate": "Bearer"})


def _without_port(host: str) -> str:
    """Return the host of a `Host` header.

    >>> _without_port("localhost:8765"), _without_port("[::1]:80"), _without_port("a:80:80")
    ('localhost', '[::1]', '')
    """
    try:
        parts = urlsplit(f"//{host}")
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return ""
    return host.removesuffix(port)


class BodyLimits:
    """Middleware: receive the body within limits of size, memory and time, then call the app.

    The application receives the body in one piece, and is cancelled at the deadline.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self._limits = app, limits
        self._held = 0  # bytes of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limits, size, complete = self._limits, 0, False
        chunks: list[bytes] = []
        too_large = error_response(413, f"A request may have at most {limits.max_bytes:,} bytes.")
        announced = int(Headers(scope=scope).get("content-length", "0"))
        refusal = too_large if announced > limits.max_bytes else None

        async def replay() -> Message:
            if not chunks:
                return await receive()
            body = b"".join(chunks)
            chunks.clear()  # from now on, the application alone holds the body
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            async with asyncio.timeout(limits.deadline):
                while refusal is None and not complete:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    chunk = message.get("body", b"")
                    if size + len(chunk) > limits.max_bytes:
                        refusal = too_large
                    elif self._held + len(chunk) > limits.max_memory:
                        refusal = busy("The server holds too many requests in memory: try again.")
                    else:
                        chunks.append(chunk)
                        size += len(chunk)
                        self._held += len(chunk)
                        complete = not message.get("more_body", False)
                if complete:
                    await self.app(scope, replay, send)
        except TimeoutError:
            seconds = f"{limits.deadline:g} s"
            if complete:
                refusal = busy(f"The answer was not ready within {seconds}: try again later.")
            else:
                refusal = error_response(408, f"The request was not received within {seconds}.")
        finally:
            self._held -= size
        if refusal is not None:
            await refusal(scope, receive, send)


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return `{"error": message}`, the form of every error."""
    return JSONResponse({"error": message}, status, headers)


def busy(message: str) -> Response:
    """Return the answer of a busy server: 503, and when to try again."""
    return error_response(503, message, RETRY)


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return error_response(error.status_code, error.detail, error.headers)
    if isinstance(error, MivError):
        return error_response(400 if isinstance(error, InputError) else 500, str(error))
    return error_response(500, "The server failed; see its log.")  # uvicorn logs the exception


ERROR_HANDLERS: dict[Any, Any] = dict.fromkeys((HTTPException, MivError, Exception), _answer_error)


# What operators see.


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"miv_{name}", text, labels, registry=self._registry, **options)

        self.requests = metric(Counter, "requests", "All requests.", "path", "status")
        self.seconds = metric(Histogram, "request_seconds", "Seconds per request.", "path")
        self.batches = metric(Histogram, "batch_images", "Images per batch.", buckets=_BATCHES)
        self.batch_seconds = metric(Counter, "batch_seconds", "Seconds spent on computing batches.")
        self.queue = metric(Gauge, "queue_images", "Images that wait or are being computed.")
        self.predictions = metric(Counter, "predictions", "Predictions.", "model", "decision")
        self.reloads = metric(Counter, "reloads", "Changed model files.", "model", "result")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Observer:
    """Middleware: log and count every request, and give each an id in `X-Request-Id`.

    Requests to other than `known_paths` are counted together.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, known_paths: Collection[str]) -> None:
        self.app, self._metrics, self._known_paths = app, metrics, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        facts = scope["miv"] = {"id": secrets.token_hex(8)}  # endpoints add to it
        status = 499  # the client left

        async def note_start(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = facts["id"]
            await send(message)

        try:
            await self.app(scope, receive, note_start)
        except BaseException:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - start
            path = scope["path"] if scope["path"] in self._known_paths else "other"
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            record = {
                "client": scope["client"][0] if scope.get("client") else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                **facts,
            }
            _log.info("request", extra={"facts": record})


class JsonFormatter(logging.Formatter):
    """One line of JSON per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        document: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def log_to_stderr() -> None:
    """Write the log of the service and of uvicorn to stderr, one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("mivhead.service", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
