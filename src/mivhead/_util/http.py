"""Requests to services that are not trusted: httpx, and what it lacks.

httpx limits the time of a single read, so that a server that sends one byte at a time can hold a
client forever. Here a whole exchange has a deadline, an answer has a maximum size, and what may
pass is tried again. Redirects are not followed: one could carry a key or images to another host.
"""

from __future__ import annotations

import ipaddress
import json
import random
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Self
from urllib.parse import urlsplit

from mivhead._util.optional import need
from mivhead._util.text import one_line, shorten
from mivhead.errors import InputError, NotAvailableError

LONGEST_WAIT = 60.0  # seconds that a server may ask the client to wait
MAX_REASON = 2**16  # bytes of an error that are read
BUSY = frozenset({408, 429, 502, 503, 504})  # what may pass


@dataclass(frozen=True)
class Answer:
    """What a service answered; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        """The type of the body, without parameters; empty if none is given."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class HttpClient:
    """Sends requests to one service.

    Parameters
    ----------
    url : str
        Address of the service, by which errors name it; without what may be secret.
    extra : str
        The extra that installs httpx, for the error if it is missing.
    timeout : float
        Seconds that one exchange may take, from connecting to the last byte of the answer.
    attempts : int
        Maximum number of attempts per request. Lost connections and statuses in `again` are
        retried.
    again : container of int, default=BUSY
        Statuses after which a request is sent again.
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
        extra: str,
        timeout: float,
        attempts: int,
        again: Container[int] = BUSY,
        backoff: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.url, self.timeout, self.attempts = url, timeout, attempts
        self._again, self._backoff, self._random = again, backoff, random.Random(seed)
        self._httpx = need("httpx", extra)
        parts = urlsplit(url)
        self.http = self._httpx.Client(
            timeout=timeout,
            follow_redirects=False,
            headers={"User-Agent": "mivhead", "Accept-Encoding": "identity"},
            # The system's certificates; without https there is nothing to verify.
            verify=ssl.create_default_context() if parts.scheme == "https" else False,
            trust_env=not is_loopback(parts.hostname),  # proxies
            # None is kept: the deadline learns of a connection when it is made.
            limits=self._httpx.Limits(max_keepalive_connections=0),
        )
        weakref.finalize(self, self.http.close)  # for those who never call `close`

    def send(
        self,
        method: str,
        url: str,
        *,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        **what: Any,
    ) -> Answer:
        """Send a request, again if that may help, and return the answer with any other status.

        The answer may have `max_bytes`; `what` is what httpx sends: `json`, `files`, `params`, ...
        """
        for attempt in range(self.attempts):
            wait = 0.0
            try:
                answer = self._exchange(method, url, max_bytes, headers=headers, **what)
            except _Lost as error:
                reason = str(error)
            else:
                if answer.status not in self._again:
                    return answer
                reason = f"HTTP {answer.status}: {self.reason(answer)}"
                wait = read_retry_after(answer.headers.get("retry-after"))
                if wait > LONGEST_WAIT:
                    raise NotAvailableError(
                        f"{self.url} asks to wait {wait:.0f} s (HTTP {answer.status}): try again "
                        "later."
                    )
            pause = self._backoff * 2**attempt * self._random.uniform(0.5, 1.5)
            if attempt + 1 < self.attempts:
                time.sleep(max(wait, pause))
        times = "" if self.attempts == 1 else f" {self.attempts} times in a row"
        raise NotAvailableError(
            f"{self.url} failed{times} ({reason}): check that the service is running and "
            "reachable, and try again."
        )

    def reason(self, answer: Answer) -> str:
        """Return why a service refused a request, in one short line."""
        text = answer.body[:MAX_REASON].decode(errors="replace")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return self.clean(text) or "no readable reason was given."
        for name in ("error", "message", "detail"):
            while isinstance(document, dict) and name in document:
                document = document[name]
        return self.clean(document if isinstance(document, str) else json.dumps(document))

    def clean(self, text: str) -> str:
        """Return a string of unknown origin in one short line, without control characters."""
        return shorten(" ".join(one_line(text).split()), 200)

    def _exchange(self, method: str, url: str, max_bytes: int, **what: Any) -> Answer:
        body = bytearray()
        with _Deadline(self.timeout) as deadline:
            try:
                extensions = {"trace": deadline.watch}
                with self.http.stream(method, url, extensions=extensions, **what) as response:
                    for chunk in response.iter_raw():  # not decompressed: it could be a bomb
                        body += chunk
                        if len(body) > max_bytes:
                            raise InputError(
                                f"{self.url} sent a response of more than {max_bytes:,} bytes."
                            )
                        deadline.check()
            except (self._httpx.InvalidURL, self._httpx.UnsupportedProtocol) as error:
                raise InputError(f"{self.url} is not the address of a service.") from error
            except self._httpx.RequestError as error:
                deadline.check()
                raise self._explain(error, len(body)) from None
            deadline.check()  # what was read may be incomplete
        return Answer(response.status_code, response.headers, bytes(body))

    def _explain(self, error: Exception, received: int) -> Exception:
        """Return what to raise for an error of httpx."""
        text, cause = str(error), error.__cause__
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return NotAvailableError(
                    f"The certificate of {self.url} is not valid ({cause.verify_message}): "
                    "nothing was sent."
                )
            cause = cause.__cause__
        if isinstance(error, self._httpx.TimeoutException):
            return _Lost(f"no response within {self.timeout:g} s")
        if "content-length" in text.lower():
            return InputError(f"{self.url} sent a response whose length is not a valid number.")
        if "complete message body" in text:
            return _Lost(f"the response was truncated after {received:,} bytes")
        return _Lost(f"connection lost: {self.clean(text or type(error).__name__)}")


class _Lost(Exception):  # noqa: N818  # control flow, not an error
    """An exchange that was not completed."""


class _Deadline:
    """Cuts off an exchange that takes too long, whatever phase it is in.

    The connection is shut down at the deadline, which ends every read and write at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    def watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Take note of a connection: httpx calls this for everything that it does."""
        if event == "connection.connect_tcp.complete":
            made = info["return_value"].get_extra_info("socket")
            with self._lock:  # a duplicate, because TLS takes over the original
                self._connections.append(made.dup())
            self.check()  # it may have come too late to be cut

    def check(self) -> None:
        """Raise an error if the time is over."""
        if time.monotonic() >= self._end:
            raise _Lost(f"no response within {self._seconds:g} s")

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


def is_loopback(host: str | None) -> bool:
    """Return whether a host name refers to this machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("example.org")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def read_retry_after(value: str | None) -> float:
    r"""Return the seconds of a `Retry-After` header, a number or a date; 0 if unreadable.

    >>> read_retry_after("5"), read_retry_after("7\x1e"), read_retry_after("soon")
    (5.0, 7.0, 0.0)
    """
    value = (value or "").strip()
    if re.fullmatch("[0-9]+", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
