"""An HTTP server for any local backbone, so that one machine with a GPU can serve many clients.

It implements the protocol of `mivhead.backbones.wire`; `mivhead.backbones.http` is its client.
Images are decoded with the same limits as files, the size and number of requests are bounded, and
the backbone processes one batch at a time.

Written with the standard library's `http.server`, so that a backbone can be served without
installing a web framework.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
import os
import threading
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from mivhead.backbones.base import Backbone
from mivhead.backbones.preprocessing import to_pixels
from mivhead.backbones.wire import (
    BACKBONE_PATH,
    FEATURES_PATH,
    IDENTITY_HEADER,
    NPZ,
    PROTOCOL,
    SAFETENSORS,
    ServerInfo,
    encode_features,
    parse_json,
)
from mivhead.errors import InputError, NotAvailableError
from mivhead.images.decoding import load_image

HEALTH_PATH = "/healthz"
DEFAULT_PORT = 8765
MAX_IMAGES = 64
MAX_BYTES = 64 * 2**20
SLOTS = 8  # requests that are being read or decoded or wait for the backbone; others queue
PATIENCE = 30.0  # seconds that a request waits for a slot

_METHODS = {HEALTH_PATH: "GET", BACKBONE_PATH: "GET", FEATURES_PATH: "POST"}
_log = logging.getLogger(__name__)


class _Refusal(Exception):  # noqa: N818  # a response, not an error of the server
    """An error response to a request that cannot be served."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class BackboneServer(ThreadingHTTPServer):
    """Serves one backbone; `serve_forever` runs the server, `stop` stops it.

    Parameters
    ----------
    backbone : Backbone
        The backbone to serve.
    host : str, default="127.0.0.1"
        Address to listen on.
    port : int, default=8765
        Port to listen on; 0 chooses a free one.
    key : str, optional
        Name of an environment variable whose value every client must send as
        `Authorization: Bearer VALUE`. By default everyone who can reach the server may use it.
    max_images : int, default=64
        Maximum number of images per request.
    max_bytes : int, default=67108864
        Maximum size of a request.

    Examples
    --------
    >>> from mivhead.backbones import load_backbone
    >>> import threading
    >>> server = BackboneServer(load_backbone("efficientnet_lite0"), port=0)
    >>> threading.Thread(target=server.serve_forever).start()
    >>> load_backbone(server.url).identity.name
    'efficientnet_lite0'
    >>> server.stop()
    """

    daemon_threads = True  # an idle connection must not keep the process alive
    request_queue_size = 128

    def __init__(
        self,
        backbone: Backbone,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        key: str | None = None,
        max_images: int = MAX_IMAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.backbone = backbone
        self.about = ServerInfo(PROTOCOL, backbone.identity, backbone.preset, max_images, max_bytes)
        if key is not None and not os.environ.get(key, "").strip():
            raise NotAvailableError(
                f"The environment variable {key}, which holds the key, is not set."
            )
        self.key = key
        self.slots = threading.BoundedSemaphore(SLOTS)
        self.lock = threading.Lock()
        self.address_family = AF_INET6 if ":" in host else AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:  # OverflowError: an invalid port number
            reason = getattr(error, "strerror", None) or error
            raise NotAvailableError(
                f"Cannot listen on {host}, port {port}: {reason}; choose another with --port."
            ) from error

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Accept no new connections, finish the requests in progress, and close."""
        self.shutdown()
        self.close_gently()

    def close_gently(self) -> None:
        """Close after `serve_forever` has returned, once the requests in progress are finished."""
        self.server_close()
        for _ in range(SLOTS):
            self.slots.acquire(timeout=PATIENCE)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # inherited signature
        """Log at info level instead of printing: clients may disconnect at any time."""
        _log.info("the connection from %s was lost", client_address[0], exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: BackboneServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may be silent

    def do_GET(self) -> None:
        """Answer `GET`."""
        self._answer()

    def do_POST(self) -> None:
        """Answer `POST`."""
        self._answer()

    def _answer(self) -> None:
        try:
            self._route()
        except _Refusal as refusal:
            self._send_error(refusal.status, str(refusal), refusal.headers)
        except InputError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        # No exception of a backbone may stop the server, and clients must not see its message.
        except Exception:
            _log.exception("the backbone failed")
            self._send_error(
                HTTPStatus.INTERNAL_SERVER_ERROR, "The backbone failed; see the log of the server."
            )

    def _route(self) -> None:
        path = urlsplit(self.path).path
        method = _METHODS.get(path)
        if method is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"The only paths are {', '.join(_METHODS)}.")
        if method != self.command:
            message = f"{path} only supports {method}."
            raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, message, Allow=method)
        if path == HEALTH_PATH:
            self._send_json(HTTPStatus.OK, {"status": "ok"})
            return
        self._check_key()
        if path == BACKBONE_PATH:
            self._send_json(HTTPStatus.OK, asdict(self.server.about))
            return
        length = self._length()
        if not self.server.slots.acquire(timeout=PATIENCE):
            message = "The server is busy: try again."
            raise _Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message, Retry_After="1")
        try:
            kind = NPZ if NPZ in self.headers.get("Accept", "") else SAFETENSORS
            body = self._features(self.rfile.read(length), kind)
            headers = {IDENTITY_HEADER: self.server.about.identity.key}
            self._send(HTTPStatus.OK, body, kind, headers)
        finally:
            self.server.slots.release()

    def _check_key(self) -> None:
        if self.server.key is None:
            return
        expected = f"Bearer {os.environ.get(self.server.key, '').strip()}".encode()
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
            raise _Refusal(HTTPStatus.UNAUTHORIZED, "A key is required.", WWW_Authenticate="Bearer")

    def _length(self) -> int:
        """Return the size of the body, checked before any of it is read."""
        if self.headers.get_content_type() != "application/json":  # also rejects forms of web pages
            message = "Send application/json."
            raise _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "Send a Content-Length.")
        if int(length) > self.server.about.max_bytes:
            message = f"A request may have at most {self.server.about.max_bytes:,} bytes."
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        return int(length)

    def _features(self, body: bytes, kind: str) -> bytes:
        size = self.server.about.identity.preprocessing.size
        images = [
            _read_image(text, i, size)
            for i, text in enumerate(_read_request(body, self.server.about.max_images))
        ]
        with self.server.lock:
            features = self.server.backbone.extract(images)
        return encode_features(features, kind)

    def _send_error(
        self, status: HTTPStatus, message: str, headers: dict[str, str] | None = None
    ) -> None:
        self.close_connection = True  # the rest of the request is not read
        with suppress(OSError):  # the client may be gone
            self._send_json(status, {"error": message}, headers)

    def _send_json(
        self, status: HTTPStatus, document: Any, headers: dict[str, str] | None = None
    ) -> None:
        self._send(status, json.dumps(document).encode(), "application/json", headers)

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer malformed requests and unsupported methods in the same format."""
        self._send_error(HTTPStatus(code), message or explain or "The request is not valid.")

    def version_string(self) -> str:
        """Hide the versions of Python and the server."""
        return "mivhead"

    def log_message(self, form: str, *values: Any) -> None:
        """Log instead of printing."""
        _log.info("%s %r", self.client_address[0], form % values)


def _read_request(body: bytes, max_images: int) -> list[str]:
    document = parse_json(body)
    images = document.get("images") if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(images, list) or not all(isinstance(text, str) for text in images):
        raise InputError('Send {"images": ["base64 of an image file", ...]}.')
    if not 1 <= len(images) <= max_images:
        raise InputError(f"A request must have 1 to {max_images} images, got {len(images)}.")
    return images


def _read_image(text: str, position: int, size: int) -> Image.Image:
    """Decode one image and resize it immediately, so that few large ones are in memory."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"Image {position} is not base64.") from None
    pixels = to_pixels(load_image(data, name=f"Image {position}"), position, size)
    return Image.fromarray(pixels)
