"""An HTTP client that trusts no server: deadlines, retries, size limits, keys that stay secret.

Retries come from tenacity (the extra `http`), which works with any transport. The transport is the
standard library's: it needs no package, and the deadline for a whole exchange, the size limits and
the refusal of redirects would have to be written for httpx as well.

A key is read from the environment for every request and never stored. Text from a server appears
in errors only after the key has been removed from it.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import random
import re
import socket
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit

from mivhead._util.optional import need
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    import tenacity

MAX_BYTES = 256 * 2**20  # of a response
MAX_MESSAGE_BYTES = 2**16  # of an error response
LONGEST_WAIT = 60.0  # seconds that a server may ask the client to wait
_SECRET = re.compile("key|token|secret|sig|pass|auth|cred", re.IGNORECASE)


@dataclass(frozen=True)
class Response:
    """The body, content type and headers of a successful response."""

    body: bytes
    content_type: str
    headers: http.client.HTTPMessage


class _TryAgain(Exception):  # noqa: N818  # control flow, not an error
    """An attempt failed; another one may succeed after `wait` seconds, if the server set any."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, as one could carry the key and the images to another host."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        """Leave the response as it is, before the standard library parses the target."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _Deadline:
    """Cuts off an exchange that takes too long, whatever phase it is in.

    The timeout of a socket only bounds each single read: a server that sends one byte at a time can
    hold the client forever. So the whole exchange is timed from outside, and its connection is shut
    down at the deadline, which ends every read and write at once.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    def connect(self, address: tuple[str, int], *_ignored: Any, **__: Any) -> socket.socket:
        """Connect as `socket.create_connection` does, but bound all of a host's addresses."""
        failure: OSError = TimeoutError()
        for *_, (host, port, *_) in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            if self.left <= 0:
                raise TimeoutError
            try:
                found = socket.create_connection((str(host), port), self.left)
            except OSError as error:
                failure = error
                continue
            with self._lock:  # a duplicate, because TLS takes over the original
                self._connections.append(found.dup())
            if self.left <= 0:  # too late to be cut
                found.close()
                raise TimeoutError
            return found
        raise failure

    def check(self) -> None:
        """Raise an error if the time is over: what was read may be incomplete."""
        if self.left <= 0:
            raise TimeoutError

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def _cut(self) -> None:
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):  # already closed by the server
                    connection.shutdown(socket.SHUT_RDWR)


class _Request(urllib.request.Request):
    """A request with a deadline."""

    def __init__(
        self, url: str, body: bytes | None, headers: dict[str, str], deadline: _Deadline
    ) -> None:
        super().__init__(url, body, headers)
        self.deadline = deadline


class _BoundedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections that the deadline of their request can cut."""

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        make = partial(self._make, http_class, req.deadline)
        return super().do_open(make, req, **options)

    @staticmethod
    def _make(http_class: Any, deadline: _Deadline, host: str, **options: Any) -> Any:
        connection = http_class(host, **options)
        connection._create_connection = deadline.connect  # what `http.client` calls to connect
        return connection


class JsonClient:
    """Sends JSON to one service and returns its responses.

    Parameters
    ----------
    url : str
        Address of the service, http or https.
    key : str, optional
        Name of the environment variable that holds the key; by default no key is sent.
    header : str, default="Authorization"
        Header for the key; in `Authorization` the key follows the word `Bearer`.
    timeout : float, default=60.0
        Seconds that one exchange may take, from the first byte sent to the last one received.
    attempts : int, default=5
        Maximum number of attempts per request. Too many requests (429), server errors (5xx) and
        lost connections are retried.
    backoff : float, default=0.5
        Seconds before the second attempt. The pause doubles each time and is multiplied by a random
        factor from 0.5 to 1.5; it is never shorter than a server's `Retry-After`.
    seed : int, default=0
        Seed of the random factors.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        header: str = "Authorization",
        timeout: float = 60.0,
        attempts: int = 5,
        backoff: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.url = check_url(url)
        self.shown = urlunsplit((*urlsplit(url)[:3], "", "")).rstrip("/")  # for people
        if key is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key):
            raise InputError(
                "key must be the name of an environment variable that holds the key, never the key "
                "itself; the given value is not such a name."
            )
        if not re.fullmatch("[A-Za-z0-9-]+", header):
            raise InputError(f"header must be the name of an HTTP header, got {header!r}.")
        if attempts < 1 or not timeout > 0 or backoff < 0:
            raise InputError(
                "attempts must be at least 1, timeout positive and backoff non-negative, got "
                f"{attempts}, {timeout} and {backoff}."
            )
        self.key, self.header = key, header
        self.timeout, self.attempts, self.backoff = timeout, attempts, backoff
        self._random = random.Random(seed)
        self._tenacity = need("tenacity", "http")
        proxies = urllib.request.ProxyHandler({} if is_loopback(urlsplit(url).hostname) else None)
        self._opener = urllib.request.build_opener(_NoRedirect, _BoundedHandler, proxies)

    def send(
        self, path: str = "", document: Any = None, accept: str = "application/json"
    ) -> Response:
        """Send GET, or POST if there is a document; retry where another attempt may succeed."""
        headers = {"Accept": accept, "User-Agent": "mivhead", **self._key_header()}
        body = None
        if document is not None:
            body = json.dumps(document).encode()
            headers["Content-Type"] = "application/json"
        parts = urlsplit(self.url)
        url = urlunsplit(parts._replace(path=parts.path.rstrip("/") + path)) if path else self.url
        retrying = self._tenacity.Retrying(
            retry=self._tenacity.retry_if_exception_type(_TryAgain),
            stop=self._tenacity.stop_after_attempt(self.attempts),
            wait=self._pause,
            reraise=True,
        )
        try:
            response: Response = retrying(self._send_once, url, body, headers)
        except _TryAgain as failure:
            times = "once" if self.attempts == 1 else f"{self.attempts} times"
            raise NotAvailableError(
                f"{self.shown} was asked {times} without success ({failure}): check that the "
                "service is running and reachable, and try again."
            ) from None
        return response

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """Return the seconds to wait before the next attempt."""
        failure = state.outcome.exception() if state.outcome else None
        asked = failure.wait if isinstance(failure, _TryAgain) else 0.0
        backoff: float = self._tenacity.wait_exponential(multiplier=self.backoff)(state)
        return max(asked, backoff * self._random.uniform(0.5, 1.5))

    def _send_once(self, url: str, body: bytes | None, headers: dict[str, str]) -> Response:
        with _Deadline(self.timeout) as deadline:
            return self._exchange(_Request(url, body, headers, deadline), deadline)

    def _exchange(self, request: _Request, deadline: _Deadline) -> Response:
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                content = self._read(response, deadline, MAX_BYTES)
                return Response(content, response.headers.get_content_type(), response.headers)
        except HTTPError as error:
            with error:
                self._handle_status(error, deadline)
        # URLError and timeouts are OSErrors. ValueError: a status line or chunk that is not valid.
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, InputError):
                raise
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise NotAvailableError(
                    f"The certificate of {self.shown} is not valid ({cause.verify_message}): "
                    "nothing was sent."
                ) from None
            if isinstance(cause, TimeoutError) or deadline.left <= 0:
                raise _TryAgain(f"no response within {self.timeout:g} s") from None
            raise _TryAgain(f"connection lost: {self._clean(str(cause) or repr(cause))}") from None

    def _read(self, response: Any, deadline: _Deadline, limit: int) -> bytes:
        """Read a whole body, up to a deadline and a size limit."""
        expected = response.headers.get("Content-Length", "").strip()
        if not re.fullmatch("[0-9]{0,18}", expected):
            raise InputError(f"{self.shown} sent a response whose length is not a valid number.")
        body = bytearray()
        while chunk := response.read1(2**16):
            body += chunk
            if len(body) > limit:
                raise InputError(f"{self.shown} sent a response of more than {limit:,} bytes.")
            deadline.check()
        deadline.check()
        if expected and len(body) < int(expected):
            raise _TryAgain(
                f"the response was truncated after {len(body):,} of {int(expected):,} bytes"
            )
        return bytes(body)

    def _handle_status(self, error: HTTPError, deadline: _Deadline) -> NoReturn:
        """Turn an error status into another attempt or an error."""
        status = error.code
        if status in (408, 429) or status >= 500:
            wait = _parse_retry_after(error.headers.get("Retry-After"))
            if wait > LONGEST_WAIT:
                raise NotAvailableError(
                    f"{self.shown} asks to wait {wait:.0f} s (HTTP {status}): try again later."
                )
            raise _TryAgain(f"HTTP {status}: {self._message(error, deadline)}", wait)
        if 300 <= status < 400:
            host = ""
            with suppress(ValueError):  # of a target that is not a valid address
                host = urlsplit(error.headers.get("Location", "")).netloc
            raise InputError(
                f"{self.shown} redirects to {self._clean(host) or 'another address'}, which is not "
                "followed: give the final address."
            )
        if status in (401, 403):
            advice = (
                f"check the key in the environment variable {self.key}."
                if self.key
                else "put its key into an environment variable and name it with #key=VARIABLE."
            )
            raise NotAvailableError(f"{self.shown} denied access (HTTP {status}): {advice}")
        raise InputError(
            f"{self.shown} rejected the request (HTTP {status}): {self._message(error, deadline)}"
        )

    def _message(self, error: HTTPError, deadline: _Deadline) -> str:
        """Return the service's error message, cleaned, in one line."""
        try:
            text = self._read(error, deadline, MAX_MESSAGE_BYTES).decode(errors="replace")
            document = json.loads(text)
        except (_TryAgain, InputError, OSError, http.client.HTTPException):
            return "no readable reason was given."
        except (ValueError, RecursionError):
            return self._clean(text)
        for name in ("error", "message", "detail"):
            while isinstance(document, dict) and name in document:
                document = document[name]
        return self._clean(document if isinstance(document, str) else json.dumps(document))

    def _clean(self, text: str) -> str:
        """Remove the key, control characters and excess length from a string of unknown origin."""
        if key := os.environ.get(self.key or "", "").strip():
            text = text.replace(key, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 200 else text[:200] + "..."

    def _key_header(self) -> dict[str, str]:
        if self.key is None:
            return {}
        key = os.environ.get(self.key, "").strip()
        if not key:
            raise NotAvailableError(
                f"The environment variable {self.key}, which holds the key for {self.shown}, is "
                "not set."
            )
        if not re.fullmatch("[!-~]+", key):
            raise InputError(
                f"The key in the environment variable {self.key} contains characters that are not "
                "allowed in a key."
            )
        return {self.header: f"Bearer {key}" if self.header == "Authorization" else key}


def check_url(url: str) -> str:
    """Return the address of a service if it is valid and contains no secrets.

    >>> check_url("ftp://host/file")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: The address of a service must look like https://host/path, got \
ftp://host/file.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is not a number, unbalanced brackets
        usable = False
    if not usable or not re.fullmatch("[!-~]+", url):
        shown = url.partition("?")[0].rpartition("@")[2]  # without what may be secret
        raise InputError(f"The address of a service must look like https://host/path, got {shown}.")
    if "@" in parts.netloc or any(_SECRET.search(q.split("=")[0]) for q in parts.query.split("&")):
        raise InputError(
            f"The address of {parts.hostname} contains a user name, password or key: put the key "
            "into an environment variable and name the variable with #key=VARIABLE."
        )
    return url


def is_loopback(host: str | None) -> bool:
    """Return whether a host name refers to this machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("example.org")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _parse_retry_after(value: str | None) -> float:
    r"""Return the seconds of a `Retry-After` header, a number or a date; 0 if unreadable.

    >>> _parse_retry_after("5"), _parse_retry_after("7\x1e"), _parse_retry_after("soon")
    (5.0, 7.0, 0.0)
    """
    if value is None:
        return 0.0
    value = value.strip()
    if re.fullmatch("[0-9]+", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
