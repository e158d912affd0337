"""What stands between the network and an ASGI application: access control and limits.

Three middlewares, in the order in which a request meets them:

- `ErrorAnswers` turns the exceptions of all others into `{"error": "one sentence"}`.
- `Guard` checks the `Host` and `Origin` headers, so that no web page can reach a server on this
  machine, and asks for a key.
- `BodyLimits` receives the whole body before the application sees the request, within a limit per
  request, a limit on the memory of all requests and a deadline, which also holds for the answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mivhead.errors import InputError, MivError, NotAvailableError

_log = logging.getLogger(__name__)

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
MIN_KEY = 8  # characters


class Refusal(Exception):  # noqa: N818  # an answer, not an error of the server
    """An error answer, with one sentence for the client, to a request that is not served."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})

    def response(self) -> Response:
        """Return the answer."""
        return error_response(self.status, str(self), self.headers)


def busy(message: str, seconds: float = 1.0) -> Refusal:
    """Return the answer of a busy server: 503, and when to try again."""
    wait = str(max(1, min(60, round(seconds))))
    return Refusal(503, message, {"Retry-After": wait})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return `{"error": message}`, the form of every error."""
    return JSONResponse({"error": message}, status, dict(headers or {}))


@dataclass(frozen=True)
class Limits:
    """How much a service takes on."""

    max_bytes: int = 64 * 2**20  # size of a request
    max_images: int = 64  # images per request
    # Pixels that are being decoded at the same time, in all requests together; an image with more
    # pixels than that is refused
    max_pixels: int = 64 * 2**20
    # Images that wait or are being computed, in all requests together; beyond it, requests are
    # answered with 503 and `Retry-After`
    max_queue: int = 256
    # Bytes of all request bodies that are held in memory at the same time
    max_memory: int = 256 * 2**20
    # Seconds from the first byte of a request to the last byte of its answer
    deadline: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"{name} must be positive, got {value}.")


class ApiKeys:
    """The keys that open a service, compared in constant time.

    Parameters
    ----------
    keys : iterable of str
        Each at least 8 printable ASCII characters without spaces.

    Examples
    --------
    >>> keys = ApiKeys(["correct-horse"])
    >>> keys.open({"authorization": "Bearer correct-horse"}), keys.open({})
    (True, False)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]
        if not self._keys:
            raise InputError("There are no keys: give at least one.")
        if any(len(k) < MIN_KEY or not all(33 <= c <= 126 for c in k) for k in self._keys):
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
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a text file"
            raise NotAvailableError(f"Cannot read the keys in {path}: {reason}.") from error
        return cls(line.strip() for line in lines if line.strip() and not line.startswith("#"))

    def open(self, headers: Mapping[str, str]) -> bool:
        """Return whether the `Authorization` header holds a key, as `Bearer` or Basic password."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = value.strip().encode("utf-8", "replace")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif kind.lower() != "bearer":
            return False
        found = False
        for key in self._keys:  # all of them, so that the time does not tell which one matched
            found |= hmac.compare_digest(given, key)
        return found


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
        self.app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        local = self._hosts is not None and self._hosts <= set(LOOPBACK_HOSTS)
        # Only a proxy speaks https. On this machine https is another server.
        self._schemes = ("http",) if local else ("http", "https")
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on."""
        if scope["type"] == "http":
            self._check(scope)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise Refusal(
                421, "This server is not known by that host name: see the option --allowed-host."
            )
        origin = headers.get("origin")
        if origin is not None and not _same_origin(origin, host, self._schemes):
            raise Refusal(403, "Web pages of other sites may not use this server.")
        free = self._keys is None or scope["path"] in self._open_paths
        if not free and not (self._keys and self._keys.open(headers)):
            message = "A key is required: send it as `Authorization: Bearer KEY`."
            raise Refusal(401, message, {"WWW-Authenticate": "Bearer"})


def _without_port(host: str) -> str:
    """Return the host of a `Host` header.

    >>> _without_port("localhost:8765"), _without_port("[::1]:80"), _without_port("::1")
    ('localhost', '[::1]', '::1')
    """
    name, _, port = host.lower().rpartition(":")
    has_port = port.isdecimal() and (name.endswith("]") or ":" not in name)
    return name if name and has_port else host.lower()


def _same_origin(origin: str, host: str, schemes: Collection[str]) -> bool:
    """Return whether a page comes from this server.

    >>> _same_origin("http://localhost", "localhost", ["http"])
    True
    >>> _same_origin("https://localhost", "localhost", ["http"])
    False
    """
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    return found.scheme in schemes and found.netloc.lower() == host.lower() != ""


class BodyLimits:
    """Middleware: receive the body within limits of size, memory and time, then call the app.

    A client that sends slowly occupies memory only for what it has sent, and no place in any queue.
    The application is cancelled at the deadline, and when the client disconnects. The application
    receives the body in one piece.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self._limits = limits
        self._held = 0  # bytes of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        size, complete = 0, False
        try:
            async with asyncio.timeout(self._limits.deadline) as clock:
                complete = await self._receive(body, Headers(scope=scope), receive)
                size = len(body)
                if complete:
                    await _call(self.app, scope, body, receive, send)
        except TimeoutError:
            if not clock.expired():
                raise
            raise self._late(complete) from None
        finally:
            self._held -= size or len(body)

    async def _receive(self, body: bytearray, headers: Headers, receive: Receive) -> bool:
        """Receive the body; return whether it is complete, as the client may leave."""
        limits = self._limits
        too_large = Refusal(413, f"A request may have at most {limits.max_bytes:,} bytes.")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may disagree about where the request ends, and take the rest for another one.
            reason = "Send either Content-Length or Transfer-Encoding."
            raise Refusal(400, reason, {"Connection": "close"})
        if not length.isdecimal():
            raise Refusal(400, "Content-Length is not a number.")
        if len(length) > 18 or int(length) > limits.max_bytes:
            raise too_large
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk: bytes = message.get("body", b"")
            if len(body) + len(chunk) > limits.max_bytes:
                raise too_large
            if self._held + len(chunk) > limits.max_memory:
                raise busy("The server holds too many requests in memory: try again.")
            self._held += len(chunk)
            body += chunk
            if not message.get("more_body", False):
                return True

    def _late(self, complete: bool) -> Refusal:
        seconds = f"{self._limits.deadline:g} s"
        if complete:
            return busy(f"The answer was not ready within {seconds}: try again later.", 5)
        return Refusal(408, f"The request was not received within {seconds}.")


async def _call(app: ASGIApp, scope: Scope, body: bytearray, receive: Receive, send: Send) -> None:
    """Call an application with a body that has been received; cancel it if the client leaves.

    The body is emptied: only the application holds it.
    """
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
    body.clear()
    gone = asyncio.Event()

    async def replay() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    work = asyncio.ensure_future(app(scope, replay, send))
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, watcher):
            task.cancel()
        await asyncio.gather(work, watcher, return_exceptions=True)


class ErrorAnswers:
    """Middleware: answer every exception with a status and one sentence.

    The messages of `MivError`s are meant for users; those of other exceptions stay in the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["app"] = self  # where Starlette's router finds one, it raises instead of answering
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, note)
        except Exception as error:
            if started:  # only closing the connection can tell the client
                raise
            response = _answer(error, scope)
            # Its frames hold the request, and some of them hold the exception: it would stay in
            # memory until Python looks for such cycles.
            error.__traceback__ = None
            await response(scope, receive, send)


def _answer(error: Exception, scope: Scope) -> Response:
    if isinstance(error, Refusal):
        return error.response()
    if isinstance(error, HTTPException):  # of Starlette's router
        message = {
            404: f"There is nothing at {scope['path']:.80}: see /openapi.json.",
            405: f"{scope['method']:.20} is not supported here.",
        }.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, error.headers)
    if isinstance(error, InputError):
        return error_response(400, str(error))
    if isinstance(error, MivError):
        return error_response(500, str(error))
    _log.error("unexpected error", exc_info=error)
    return error_response(500, "The server failed; see its log.")
