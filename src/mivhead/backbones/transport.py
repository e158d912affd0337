"""HTTP with patience and without trust: timeouts, retries, size limits, keys that stay secret.

A key is read from the environment at every request and stored nowhere. Answers of unknown servers
end up in errors only after the key has been cut out of them.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import random
import re
import ssl
import time
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit

from mivhead.errors import InputError, NotAvailableError

MAX_BYTES = 256 * 2**20  # of an answer
MAX_MESSAGE_BYTES = 2**16  # of an answer that is an error
LONGEST_WAIT = 60.0  # seconds that a server may ask us to wait
_SECRET = re.compile("key|token|secret|sig|pass|auth|cred", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """The body of a good answer and what it is."""

    body: bytes
    kind: str
    headers: http.client.HTTPMessage


class _TryAgain(Exception):  # noqa: N818  # control flow, not an error
    """One attempt failed; the next one may not."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        self.reason = reason
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could carry the key and the images to another host: none is followed."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Sends JSON to one service and returns what it answers.

    Parameters
    ----------
    url
        Address of the service, http or https.
    key
        Name of the environment variable that holds the key; None: no key is sent.
    header
        Header for the key; in `Authorization` it follows the word `Bearer`.
    timeout
        Seconds that an answer may take, from the first byte sent to the last one received.
    attempts
        How often a request is made at most. Too many requests (429), errors of the server (5xx) and
        lost connections are tried again.
    backoff
        Seconds before the second attempt; they double each time, times a random 0.5 to 1.5. A
        server's `Retry-After` goes first.
    seed
        Seed of these random factors.
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
                "key is the name of an environment variable that holds the key, never the key "
                "itself; what was given is no such name."
            )
        if not re.fullmatch("[A-Za-z0-9-]+", header):
            raise InputError(f"header must be the name of an HTTP header, got {header!r}.")
        if attempts < 1 or not timeout > 0 or backoff < 0:
            raise InputError(
                "attempts must be at least 1, timeout positive and backoff not negative, got "
                f"{attempts}, {timeout} and {backoff}."
            )
        self.key, self.header = key, header
        self.timeout, self.attempts, self.backoff = timeout, attempts, backoff
        self._random = random.Random(seed)
        proxies = urllib.request.ProxyHandler({} if is_loopback(urlsplit(url).hostname) else None)
        self._opener = urllib.request.build_opener(_NoRedirect, proxies)

    def send(
        self, path: str = "", document: Any = None, accept: str = "application/json"
    ) -> Answer:
        """GET, or POST if there is a document; try again where that can help."""
        headers = {"Accept": accept, "User-Agent": "mivhead", **self._key_header()}
        body = None
        if document is not None:
            body = json.dumps(document).encode()
            headers["Content-Type"] = "application/json"
        parts = urlsplit(self.url)
        url = urlunsplit(parts._replace(path=parts.path.rstrip("/") + path)) if path else self.url
        for attempt in range(1, self.attempts + 1):
            try:
                return self._once(urllib.request.Request(url, body, headers))
            except _TryAgain as failure:
                reason = failure.reason
                pause = self.backoff * 2 ** (attempt - 1) * self._random.uniform(0.5, 1.5)
                if attempt < self.attempts:
                    time.sleep(max(pause, failure.wait or 0.0))
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        raise NotAvailableError(
            f"{self.shown} was asked {times} without success ({reason}): check that the service "
            "runs and can be reached, and try again."
        )

    def _once(self, request: urllib.request.Request) -> Answer:
        deadline = time.monotonic() + self.timeout
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                body = self._read(response, deadline, MAX_BYTES)
                return Answer(body, response.headers.get_content_type(), response.headers)
        except HTTPError as error:
            with error:
                self._judge(error, deadline)
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise NotAvailableError(
                    f"{self.shown} cannot prove who it is ({cause.verify_message}): nothing was "
                    "sent."
                ) from None
            if isinstance(cause, TimeoutError):
                raise _TryAgain(f"no answer within {self.timeout:g} s") from None
            raise _TryAgain(f"connection lost: {self._tidy(str(cause) or repr(cause))}") from None

    def _read(self, response: Any, deadline: float, limit: int) -> bytes:
        """Read a whole body, but neither for ever nor without end."""
        expected = response.headers.get("Content-Length", "")
        body = bytearray()
        while chunk := response.read1(2**16):
            body += chunk
            if len(body) > limit:
                raise InputError(f"{self.shown} answers with more than {limit:,} bytes.")
            if time.monotonic() > deadline:
                raise TimeoutError
        if expected.isdecimal() and len(body) < int(expected):
            raise _TryAgain(f"the answer broke off after {len(body):,} of {int(expected):,} bytes")
        return bytes(body)

    def _judge(self, error: HTTPError, deadline: float) -> NoReturn:
        """Turn a bad status into another attempt or an error."""
        status = error.code
        if status in (408, 429) or status >= 500:
            wait = _retry_after(error.headers.get("Retry-After"))
            if wait is not None and wait > LONGEST_WAIT:
                raise NotAvailableError(
                    f"{self.shown} asks to wait {wait:.0f} s (HTTP {status}): try again later."
                )
            raise _TryAgain(f"HTTP {status}: {self._message(error, deadline)}", wait)
        if 300 <= status < 400:
            target = urlsplit(error.headers.get("Location", ""))
            raise InputError(
                f"{self.shown} redirects to {self._tidy(target.netloc or 'another address')}, "
                "which is not followed: give the right address yourself."
            )
        if status in (401, 403):
            advice = (
                f"check the key in the environment variable {self.key}."
                if self.key
                else "put its key into an environment variable and name that with #key=VARIABLE."
            )
            raise NotAvailableError(f"{self.shown} refuses access (HTTP {status}): {advice}")
        raise InputError(
            f"{self.shown} refuses the request (HTTP {status}): {self._message(error, deadline)}"
        )

    def _message(self, error: HTTPError, deadline: float) -> str:
        """Tell what the service says, in one tidy line."""
        try:
            text = self._read(error, deadline, MAX_MESSAGE_BYTES).decode(errors="replace")
            document = json.loads(text)
        except (_TryAgain, InputError, OSError, http.client.HTTPException):
            return "without a readable reason."
        except (ValueError, RecursionError):
            return self._tidy(text)
        for name in ("error", "message", "detail"):
            while isinstance(document, dict) and name in document:
                document = document[name]
        return self._tidy(document if isinstance(document, str) else json.dumps(document))

    def _tidy(self, text: str) -> str:
        """Cut the key, line breaks and length out of a text from elsewhere."""
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
                f"The key in the environment variable {self.key} holds characters that no key has."
            )
        return {self.header: f"Bearer {key}" if self.header == "Authorization" else key}


def check_url(url: str) -> str:
    """Return an address that can be used, and that carries no secrets of its own.

    >>> check_url("ftp://host/file")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: A service has an address like https://host/path, got ftp://host/file.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not match
        usable = False
    if not usable or not re.fullmatch("[!-~]+", url):
        shown = url.partition("?")[0].rpartition("@")[2]  # without what may be secret
        raise InputError(f"A service has an address like https://host/path, got {shown}.")
    if "@" in parts.netloc or any(_SECRET.search(q.split("=")[0]) for q in parts.query.split("&")):
        raise InputError(
            f"The address of {parts.hostname} holds a name, password or key: put keys into an "
            "environment variable and name that with #key=VARIABLE."
        )
    return url


def is_loopback(host: str | None) -> bool:
    """Whether a host name is this machine's own.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("example.org")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _retry_after(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header, which is a number or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
