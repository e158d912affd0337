"""A backbone at a URL: a service that returns one vector per image.

    https://host/v1/embeddings#model=NAME&key=VARIABLE

The part after the `#` holds options of `EmbeddingBackbone` and is never sent. Images are resized
here and sent as PNG. The key is read from an environment variable for every request and never
stored; text of the service appears in errors only after the key has been removed from it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import httpx
import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from mivhead._util.http import is_loopback
from mivhead._util.schema import parse_json
from mivhead._util.text import one_line, shorten
from mivhead.backbones.base import DecodedImage, Identity, join, storage_type, to_pictures
from mivhead.backbones.preset import EMBEDDING, TOKEN, Preprocessing, Preset
from mivhead.errors import InputError, NotAvailableError, reason_of
from mivhead.features import Features

IMAGE, DATA_URL, MODEL = "$image", "$data_url", "$model"  # in a request template
TEMPLATE = '{"model": "$model", "input": ["$image"]}'
BATCH = 8  # images per request
MAX_BYTES = 256 * 2**20  # of a response
TIMEOUT = 60.0  # seconds per request
CONCURRENCY = 4  # requests at the same time
ATTEMPTS, BACKOFF = 5, 0.5  # per request, and seconds before the second one
LONGEST_WAIT = 60.0  # seconds that a service may ask the client to wait
BUSY = (408, 429, *range(500, 600))  # statuses after which a request is sent again
_OPTIONS: dict[str, Any] = {"model": str, "request": str, "key": str, "size": int}  # after the `#`
_SECRET = re.compile("key|token|secret|sig|pass|auth|cred", re.IGNORECASE)


def load(
    spec: str,
    *,
    preset: Preset | None,
    device: object,  # noqa: ARG001  # the service chooses its device
    dtype: np.dtype[Any],
    **options: Any,
) -> EmbeddingBackbone:
    """Use the service at a URL; see `mivhead.backbones.load_backbone`."""
    if preset is not None:  # of a model that was trained on it
        options["size"] = preset.preprocessing.size
    url, _, fragment = spec.partition("#")
    for name, text in parse_qsl(fragment, keep_blank_values=True):
        try:
            options.setdefault(name, _OPTIONS[name](text))
        except (KeyError, ValueError):  # its value may be a secret: do not repeat it
            known = ", ".join(_OPTIONS)
            raise InputError(f"After the # of a URL may follow {known}; got {name[:40]}.") from None
    return EmbeddingBackbone(url, dtype=dtype, **options)


class EmbeddingBackbone:
    """A service that returns one vector per image.

    `request` is the JSON that it expects, in which `"$model"` stands for the model and `"$image"`
    for an image (the base64 of a PNG; `"$data_url"` for the same as a data URL). The outermost list
    around the image gets one entry per image; without a list, each image is a request of its own.
    `key` names the environment variable that holds the key.

    A service does not reveal its weights. The identity consists of the URL, the model and the
    request: a provider that changes the model behind a name goes unnoticed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        request: str = TEMPLATE,
        size: int = 224,
        key: str | None = None,
        dtype: DTypeLike = "float16",
    ) -> None:
        if key is not None and not key.isidentifier():
            raise InputError("key must be the name of an environment variable.")
        check_url(url)
        self._url, self._key = url, key
        self._shown = urlunsplit((*urlsplit(url)[:3], "", "")).rstrip("/")  # for people
        self._template = _read_template(request, model)
        several = fill(self._template, ["a", "b"]) != fill(self._template, ["a"])
        self._batch_size = BATCH if several else 1
        self._http = httpx.Client(
            timeout=TIMEOUT,
            limits=httpx.Limits(max_keepalive_connections=0),  # `_exchange` hangs up on late ones
            follow_redirects=False,  # one could carry the key or images to another host
            headers={"User-Agent": "mivhead", "Accept-Encoding": "identity"},
            trust_env=not is_loopback(urlsplit(url).hostname),  # proxies
        )
        self.dtype = storage_type(dtype)
        # The service normalises; every vector is a token.
        preprocessing = Preprocessing(size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        block = replace(TOKEN, native=False)
        self.preset = Preset((EMBEDDING,), (block,), preprocessing)
        known = json.dumps([self._url, self._template], sort_keys=True)
        weights = hashlib.sha256(known.encode()).hexdigest()
        name = self._shown + ("" if model is None else f"#model={model}")
        self.identity = Identity(name, weights, preprocessing, (EMBEDDING,))

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        pictures = to_pictures(images, self.preset.preprocessing.size)
        encoded, step = [encode_image(picture) for picture in pictures], self._batch_size
        batches = [encoded[start : start + step] for start in range(0, len(encoded), step)]
        with ThreadPoolExecutor(min(CONCURRENCY, len(batches))) as pool:
            parts = list(pool.map(self._embed, batches))  # after a failure no new request is sent
        if len({part.shape[1] for part in parts}) > 1:
            raise InputError(f"{self._shown} returned vectors of different lengths.")
        return join([[{"token": part}] for part in parts], self.dtype)

    def _embed(self, batch: list[str]) -> NDArray[np.float64]:
        """Return the vectors (image, channel) of one request."""
        body = self._post(fill(self._template, batch))
        try:
            vectors = np.asarray(find_vectors(parse_json(body)), np.float64)
            if vectors.ndim != 2 or len(vectors) != len(batch) or not np.isfinite(vectors).all():
                raise ValueError(f"expected a vector for each of {len(batch)} images")
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(
                f"{self._shown} returned an unusable response: {reason_of(error)[:200]}."
            ) from error
        return vectors

    def _post(self, document: Any) -> bytes:
        """Send a document, again if the service is busy or lost, and return its answer."""
        secret = os.environ.get(self._key, "").strip() if self._key else ""
        if self._key and not re.fullmatch("[!-~]+", secret):
            raise NotAvailableError(f"The environment variable {self._key} holds no key.")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        for attempt in range(ATTEMPTS):
            wait = BACKOFF * 2**attempt
            try:
                response, body = self._exchange(document, headers)
                if response.status_code < 300:
                    return body
                reason = f"HTTP {response.status_code}: {body[:4096].decode(errors='replace')}"
                if response.status_code not in BUSY:
                    raise InputError(
                        f"{self._shown} rejected the request ({_clean(reason, secret)}). Give the "
                        "final URL, as redirects are not followed; if it needs a key, name the "
                        "variable that holds it with #key=VARIABLE."
                    )
                if (seconds := response.headers.get("retry-after", "")).isdecimal():
                    wait = max(wait, min(float(seconds), LONGEST_WAIT))
            except (httpx.RequestError, TimeoutError) as error:
                reason = reason_of(error)
            if attempt + 1 < ATTEMPTS:
                time.sleep(wait)
        raise NotAvailableError(
            f"{self._shown} failed {ATTEMPTS} times in a row ({_clean(reason, secret)}): try later."
        )

    def _exchange(self, document: Any, headers: dict[str, str]) -> tuple[httpx.Response, bytes]:
        """Return a response and its body, within limits of size and time."""
        body, sockets, late = bytearray(), list[socket.socket](), threading.Event()

        def note(event: str, info: dict[str, Any]) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                sockets.append(info["return_value"].get_extra_info("socket"))

        def hang_up() -> None:  # httpx limits the time of every read alone
            late.set()
            for connection in sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(TIMEOUT, hang_up)
        timer.start()
        try:
            with self._http.stream(
                "POST", self._url, json=document, headers=headers, extensions={"trace": note}
            ) as response:
                for chunk in response.iter_raw():  # not decompressed: it could be a bomb
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise InputError(f"{self._shown} sent more than {MAX_BYTES:,} bytes.")
        except httpx.RequestError:
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"no complete response within {TIMEOUT:g} s")
        return response, bytes(body)


def _clean(text: str, secret: str) -> str:
    """Return a string of unknown origin in one short line, without the key."""
    if secret:  # as it is, or as a string of JSON
        text = text.replace("\\/", "/").replace(json.dumps(secret)[1:-1], "***")
        text = text.replace(secret, "***")
    return shorten(" ".join(one_line(text).split()), 200)


def check_url(url: str) -> None:
    """Raise an error if the URL of a service is not valid or contains a secret."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        names = [query.partition("=")[0] for query in parts.query.split("&")]
        secret = "@" in parts.netloc or any(map(_SECRET.search, names))
    except ValueError:  # a port that is not a number, unbalanced brackets
        usable = secret = False
    if not usable or secret or not re.fullmatch("[!-~]+", url):
        raise InputError(
            "A URL like https://host/path is needed, without user name, password or key: name the "
            "variable that holds the key with #key=VARIABLE."
        )


def encode_image(picture: Image.Image) -> str:
    """Return the base64 of an image as PNG, which is lossless; speed matters more than size."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _read_template(request: str, model: str | None) -> Any:
    if model is None and f'"{MODEL}"' in request:
        raise InputError("Name the model of the service: append #model=NAME to the URL.")
    try:
        template = json.loads(request.replace(f'"{MODEL}"', json.dumps(model)))
        if fill(template, ["a"]) == template:
            raise ValueError
    except ValueError:
        raise InputError(f"request must be JSON with {IMAGE!r} or {DATA_URL!r} in it.") from None
    return template


def fill(node: Any, images: Sequence[str]) -> Any:
    """Fill images into a request template: the list around an image gets one entry per image."""
    if isinstance(node, dict):
        return {name: fill(value, images) for name, value in node.items()}
    if isinstance(node, list):
        if all(fill(entry, ["x"]) == entry for entry in node):
            return node
        if len(node) > 1:
            raise InputError(f"The list around {IMAGE!r} in request must have exactly one entry.")
        return [fill(node[0], [image]) for image in images]
    if not isinstance(node, str):
        return node
    return {IMAGE: images[0], DATA_URL: f"data:image/png;base64,{images[0]}"}.get(node, node)


def find_vectors(document: Any) -> list[Any]:
    """Find the vectors in a response, one per image, in one of the usual forms."""
    rows = document
    for name in ("data", "embeddings", "float", "embedding"):
        if isinstance(rows, dict) and name in rows:
            rows = [rows[name]] if name == "embedding" else rows[name]
    if isinstance(rows, list) and all(isinstance(r, dict) and "embedding" in r for r in rows):
        rows = [row["embedding"] for row in sorted(rows, key=lambda row: row.get("index", 0))]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"no vectors in {json.dumps(document)[:80]}")
    return rows
