"""JSON to a service that extracts features, and keys that stay secret.

A key is read from the environment for every request and never stored. Text from a server appears
in errors only after the key has been removed from it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mivhead._util.http import BUSY, Answer, HttpClient
from mivhead.errors import InputError, NotAvailableError

MAX_BYTES = 256 * 2**20  # of a response
_SECRET = re.compile("key|token|secret|sig|pass|auth|cred", re.IGNORECASE)


class JsonClient(HttpClient):
    """Sends JSON to one service and returns its responses.

    `key` is the name of the environment variable that holds the key, by default no key is sent; in
    the header `Authorization` it follows the word `Bearer`. All errors of a server (5xx) are
    retried, as `mivhead._util.http.HttpClient` does.
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
        self.address = check_url(url)
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
        how: dict[str, Any] = {"timeout": timeout, "attempts": attempts, "backoff": backoff}
        again = BUSY | set(range(500, 600))
        super().__init__(self.shown, extra="http", again=again, seed=seed, **how)

    def ask(self, path: str = "", document: Any = None, accept: str = "application/json") -> Answer:
        """Send GET, or POST if there is a document; return a successful answer."""
        parts = urlsplit(self.address)
        url = urlunsplit(parts._replace(path=parts.path.rstrip("/") + path)) if path else None
        answer = self.send(
            "GET" if document is None else "POST",
            url or self.address,
            max_bytes=MAX_BYTES,
            headers={"Accept": accept, **self._key_header()},
            **({} if document is None else {"json": document}),
        )
        status = answer.status
        if status < 300:
            return answer
        if status < 400:
            host = ""
            with suppress(ValueError):  # of a target that is not a valid address
                host = urlsplit(answer.headers.get("location", "")).netloc
            raise InputError(
                f"{self.shown} redirects to {self.clean(host) or 'another address'}, which is not "
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
            f"{self.shown} rejected the request (HTTP {status}): {self.reason(answer)}"
        )

    def clean(self, text: str) -> str:
        """Remove the key as well, which a server may repeat."""
        key = os.environ.get(self.key or "", "").strip()
        return super().clean(text.replace(key, "***") if key else text)

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
