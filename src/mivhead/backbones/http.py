"""A backbone at a URL: a mivhead server, or any service that returns embeddings.

    http://gpu-machine:8765                            a server started by `miv backbones serve`
    https://host/v1/embeddings#model=NAME&key=API_KEY  an embedding service

The part after the `#` holds options of `connect` and is never sent. Images are resized on the
client and sent as PNG, which is small and lossless: a server gives the same features as the same
backbone running locally, and has the same identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mivhead._util.schema import from_json
from mivhead.backbones.base import Identity, storage_type
from mivhead.backbones.preprocessing import DecodedImage, to_pixels
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.backbones.presets import PRESETS
from mivhead.backbones.transport import MAX_BYTES, JsonClient
from mivhead.backbones.wire import (
    BACKBONE_PATH,
    FEATURES_PATH,
    IDENTITY_HEADER,
    MAX_TEXTS,
    PROTOCOL,
    SAFETENSORS,
    TEXTS_PATH,
    ServerInfo,
    decode_features,
    encode_image,
    naming,
    parse_json,
)
from mivhead.errors import InputError
from mivhead.features import Features

# Options that may follow the `#` of an address, and their types.
_OPTIONS = {
    "model": str,
    "request": str,
    "size": int,
    "key": str,
    "header": str,
    "batch_size": int,
    "concurrency": int,
    "timeout": float,
    "attempts": int,
}

# Of embedding services.
TAP = "embedding"
IMAGE, DATA_URL, MODEL = "$image", "$data_url", "$model"
MAX_IMAGES = 64
_UNCHANGED = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # the service normalises


def connect(
    url: str,
    *,
    model: str | None = None,
    request: str | dict[str, Any] | None = None,
    size: int = 224,
    key: str | None = None,
    header: str = "Authorization",
    batch_size: int = 8,
    concurrency: int = 4,
    timeout: float = 60.0,
    attempts: int = 5,
    backoff: float = 0.5,
    seed: int = 0,
    preset: Preset | None = None,
    dtype: DTypeLike = "float16",
) -> RemoteBackbone:
    """Use the service at an address as a backbone.

    Parameters
    ----------
    url : str
        Address of a mivhead server or, if `model` or `request` is given, of an embedding service.
    model, request, size : str, str or dict, int
        For embedding services: see `mivhead.backbones.http.EmbeddingService`.
    key, header, timeout, attempts, backoff, seed : optional
        See `mivhead.backbones.transport.JsonClient`. `key` names an environment variable.
    batch_size : int, default=8
        Images per request.
    concurrency : int, default=4
        Maximum number of concurrent requests.
    preset : Preset, optional
        Other settings for the head, for the same taps and preprocessing.
    dtype : str or numpy.dtype, default="float16"
        The type that features are rounded to.

    Returns
    -------
    RemoteBackbone
    """
    client = JsonClient(
        url,
        key=key,
        header=header,
        timeout=timeout,
        attempts=attempts,
        backoff=backoff,
        seed=seed,
    )
    service: RemoteService
    if model is None and request is None:
        service = MivServer(client, preset)
    else:
        service = EmbeddingService(client, model=model, request=request, size=size, preset=preset)
    return RemoteBackbone(
        service, dtype=storage_type(dtype), batch_size=batch_size, concurrency=concurrency
    )


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: object,  # noqa: ARG001  # the service chooses its device
    dtype: np.dtype[Any],
    **options: Any,
) -> RemoteBackbone:
    """Connect to the service at `spec`; see `mivhead.backbones.load_backbone`."""
    if weights is not None:
        raise InputError("A remote backbone has its own weights: omit weights.")
    url, _, fragment = spec.partition("#")
    return connect(url, preset=preset, dtype=dtype, **(_read_options(fragment) | options))


def _read_options(fragment: str) -> dict[str, Any]:
    """Read the options in the part of an address after the `#`."""
    options: dict[str, Any] = {}
    for name, text in parse_qsl(fragment, keep_blank_values=True):
        if name not in _OPTIONS:  # its value may be a secret: do not repeat it
            raise InputError(
                f"The options after the # of an address are {', '.join(_OPTIONS)}; got "
                f"{name[:40]!r}."
            )
        try:
            options[name] = _OPTIONS[name](text)
        except ValueError:
            raise InputError(f"{name} after the # of an address must be a number.") from None
    return options


class RemoteService(Protocol):
    """A kind of service: knows its identity, and turns encoded images into features."""

    identity: Identity
    preset: Preset
    shown: str
    max_images: int

    def ask(self, images: list[str], dtype: np.dtype[Any]) -> Features:
        """Return the features of one request's images, each the base64 of a PNG."""
        ...


class RemoteBackbone:
    """A service as a `Backbone`: sends batches concurrently and checks the responses.

    A service may accept fewer images per request than `batch_size`.
    """

    def __init__(
        self, service: RemoteService, *, dtype: np.dtype[Any], batch_size: int, concurrency: int
    ) -> None:
        if batch_size < 1 or concurrency < 1:
            raise InputError(
                "batch_size and concurrency must be at least 1, "
                f"got {batch_size} and {concurrency}."
            )
        self.identity = service.identity
        self.preset = service.preset
        self._service = service
        self.dtype = dtype
        self._batch_size = min(batch_size, service.max_images)
        self._concurrency = concurrency
        self._layout: dict[str, tuple[int, ...]] | None = None  # of the first response

    @property
    def embed_texts(self) -> Callable[[list[str]], NDArray[np.float32]] | None:
        """Maps sentences to vectors; None if the service has no text tower."""
        service = self._service
        return service.embed if isinstance(service, MivServer) and service.texts else None

    def __repr__(self) -> str:
        return f"RemoteBackbone({self._service.shown!r}, {self.identity.name!r})"

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        if not len(images):
            raise InputError("There are no images: give at least one.")
        size = self.identity.preprocessing.size
        pixels = [to_pixels(image, i, size) for i, image in enumerate(images)]  # each (R, R, 3)
        starts = range(0, len(pixels), self._batch_size)
        batches = [pixels[start : start + self._batch_size] for start in starts]
        pool = ThreadPoolExecutor(max_workers=min(self._concurrency, len(batches)))
        try:
            parts = list(pool.map(self._ask, batches))
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure no new request is sent
        for part in parts:  # in the images' order, so that errors are reproducible
            self._check_layout(part)
        return Features.concat(parts)

    def _ask(self, batch: list[np.ndarray[Any, Any]]) -> Features:
        part = self._service.ask([encode_image(each) for each in batch], self.dtype)
        if len(part) != len(batch):
            raise InputError(
                f"{self._service.shown} returned {len(part)} results for {len(batch)} images."
            )
        return part

    def _check_layout(self, part: Features) -> None:
        if len(part.blocks) != len(self.preset.taps):
            raise InputError(
                f"{self._service.shown} returned {len(part.blocks)} blocks, but lists "
                f"{len(self.preset.taps)} taps: {', '.join(self.preset.taps)}."
            )
        self._layout = self._layout or part.layout
        if part.layout != self._layout:
            raise InputError(
                f"{self._service.shown} returned features of the layout {part.layout}, but "
                f"{self._layout} before: all responses must come from the same model."
            )


class MivServer:
    """A mivhead server, which reports its own identity and preset.

    `preset` has other settings for the head, for the server's taps and preprocessing.
    """

    def __init__(self, client: JsonClient, preset: Preset | None) -> None:
        self._client = client
        self.shown = client.shown
        try:
            document = parse_json(client.ask(BACKBONE_PATH).body)
            about = from_json(ServerInfo, document, "the server's answer")
        except InputError as error:
            raise InputError(
                f"{client.shown} is not a mivhead server ({error}) For a service that returns "
                "embeddings, append #model=NAME to its full address."
            ) from None
        if about.protocol != PROTOCOL or about.max_images < 1:
            raise InputError(
                f"{client.shown} uses version {about.protocol} of the protocol, this mivhead "
                f"uses version {PROTOCOL}: update the older of the two."
            )
        self.identity = about.identity
        self.texts = about.texts
        self.preset = preset or _with_classifier(about.identity, about.preset)
        image_bytes = 2 * 4 * self.identity.preprocessing.size**2  # more than a base64 PNG
        self.max_images = max(1, min(about.max_images, about.max_bytes // image_bytes))
        if (self.preset.taps, self.preset.preprocessing) != (
            self.identity.taps,
            self.identity.preprocessing,
        ):
            raise InputError(
                f"{client.shown} taps {', '.join(self.identity.taps)} at "
                f"{self.identity.preprocessing.size} px: a preset with other taps or another "
                "preprocessing must be set on the server."
            )

    def ask(self, images: list[str], dtype: np.dtype[Any]) -> Features:
        """Return the features of one request's images, each the base64 of a PNG."""
        response = self._client.ask(FEATURES_PATH, {"images": images}, accept=SAFETENSORS)
        if response.headers.get(IDENTITY_HEADER, self.identity.key) != self.identity.key:
            raise InputError(
                f"{self.shown} no longer serves {self.identity.name}: load the backbone again, and "
                "extract all features with the same one."
            )
        with naming(self.shown):
            return decode_features(response.body, response.content_type, dtype, MAX_BYTES)

    def embed(self, sentences: list[str]) -> NDArray[np.float32]:
        """Return the vectors (sentence, channel) of sentences."""
        parts = []
        for start in range(0, len(sentences), MAX_TEXTS):
            texts = sentences[start : start + MAX_TEXTS]
            response = self._client.ask(TEXTS_PATH, {"texts": texts}, accept=SAFETENSORS)
            with naming(self.shown):
                found = decode_features(
                    response.body, response.content_type, np.float32, MAX_BYTES
                ).blocks
            if len(found) != 1 or found[0].token is None or len(found[0].token) != len(texts):
                raise InputError(f"{self.shown} did not return one vector for each text.")
            parts.append(found[0].token)
        return np.concatenate(parts)


def _with_classifier(identity: Identity, preset: Preset) -> Preset:
    """Add to a preset which network's own classifier its last block belongs to, if it is known."""
    known = PRESETS.get(identity.name)
    if known is None or known.taps != preset.taps:
        return preset
    last = replace(preset.blocks[-1], classifier=known.blocks[-1].classifier)
    return replace(preset, blocks=(*preset.blocks[:-1], last))


class EmbeddingService:
    """A service that returns one vector per image, in one of the common shapes.

    Parameters
    ----------
    client : JsonClient
        Sends the requests.
    model : str, optional
        The service's name for the model.
    request : str or dict, optional
        The JSON that the service expects, in which `"$model"` stands for the model and `"$image"`
        for an image (the base64 of a PNG; `"$data_url"` for the same as a data URL). The outermost
        list around the image gets one entry per image; without a list, each image is a request of
        its own. By default `{"model": "$model", "input": ["$image"]}`.
    size : int, default=224
        Images are resized to `size` x `size` before they are sent.
    preset : Preset, optional
        Other settings for the head.

    Notes
    -----
    Responses may be `{"data": [{"embedding": [...]}, ...]}` (ordered by `index` if present),
    `{"embeddings": [[...], ...]}`, `{"embeddings": {"float": [[...], ...]}}`, a bare list of
    vectors, or `{"embedding": [...]}` for a single image.

    A service does not reveal its weights. The identity consists of the address, the model and the
    request: a provider that changes the model behind a name goes unnoticed.
    """

    def __init__(
        self,
        client: JsonClient,
        *,
        model: str | None = None,
        request: str | dict[str, Any] | None = None,
        size: int = 224,
        preset: Preset | None = None,
    ) -> None:
        if preset is None:
            head = BlockPreset(native=False, form="vit", tau=200.0)  # a token, as every vector is
            preset = Preset((TAP,), (head,), replace(_UNCHANGED, size=size))
        if preset.taps != (TAP,) or preset != _with_size(preset):
            raise InputError(
                f"The preset of an embedding service must have the single tap {TAP!r}, mean 0 and "
                "std 1, as the service normalises the images."
            )
        self._client = client
        self._request = _read_request(request, model)
        self.max_images = MAX_IMAGES if _find_list(self._request) else 1
        self.shown = client.shown
        self.preset = preset
        name = client.shown if model is None else f"{client.shown}#model={model}"
        known = json.dumps([client.address, self._request], sort_keys=True)
        digest = hashlib.sha256(known.encode()).hexdigest()
        self.identity = Identity(name, digest, preset.preprocessing, preset.taps)

    def ask(self, images: list[str], dtype: np.dtype[Any]) -> Features:
        """Return the features of one request's images, each the base64 of a PNG."""
        response = self._client.ask("", fill(self._request, images))
        with naming(self.shown):
            vectors = np.array(read_vectors(parse_json(response.body)), np.float64)
            with np.errstate(over="ignore"):  # `Features` refuse infinity
                return Features({"token": vectors.astype(dtype)})  # (n, C)


def fill(template: Any, images: list[str]) -> Any:
    """Fill images into a request template.

    >>> fill({"input": [{"image": "$image"}]}, ["QUE=", "QkI="])
    {'input': [{'image': 'QUE='}, {'image': 'QkI='}]}
    """
    if isinstance(template, dict):
        return {name: fill(value, images) for name, value in template.items()}
    if isinstance(template, list) and _count_images(template):
        return [_put(template[0], image) for image in images]
    return _put(template, images[0])


def read_vectors(document: Any) -> list[list[float]]:
    """Find the vectors in a response, one per image and all of the same width.

    >>> read_vectors({"data": [{"embedding": [1, 2]}, {"embedding": [3, 4]}]})
    [[1, 2], [3, 4]]
    """
    rows = document
    for name in ("data", "embeddings", "float", "embedding"):
        if isinstance(rows, dict) and name in rows:
            rows = [rows[name]] if name == "embedding" else rows[name]
    if isinstance(rows, list) and all(isinstance(r, dict) and "embedding" in r for r in rows):
        places = [row.get("index") for row in rows]
        if all(type(place) is int for place in places):
            if sorted(places) != list(range(len(rows))):
                raise InputError(f"its entries have the indices {places!r:.80}.")
            rows = sorted(rows, key=lambda row: row["index"])
        rows = [row["embedding"] for row in rows]
    if not isinstance(rows, list) or not rows:
        raise InputError(
            'expected {"data": [{"embedding": [...]}, ...]}, {"embeddings": [[...], ...]} or a '
            f"list of vectors, got {json.dumps(document)[:80]}."
        )
    for i, row in enumerate(rows):
        if not isinstance(row, list) or not all(_is_number(value) for value in row):
            raise InputError(f"entry {i} is not a list of numbers.")
        if len(row) != len(rows[0]):
            raise InputError(f"entry {i} has {len(row)} values, but entry 0 has {len(rows[0])}.")
    return rows


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _read_request(request: str | dict[str, Any] | None, model: str | None) -> Any:
    if request is None:
        request = {"model": MODEL, "input": [IMAGE]}
    if isinstance(request, str):
        try:
            request = json.loads(request)
        except ValueError:
            raise InputError(f"request must be JSON, got {request!r:.80}.") from None
    if not isinstance(request, dict) or _count_images(request) != 1:
        raise InputError(
            f"request must be an object that contains {IMAGE!r} or {DATA_URL!r} once, got "
            f"{json.dumps(request)[:80]}."
        )
    repeated = _find_list(request)
    if repeated is not None and len(repeated) != 1:
        raise InputError(f"The list around {IMAGE!r} in request must have exactly one entry.")
    if model is None and MODEL in json.dumps(request):
        raise InputError(f"request contains {MODEL!r}: give the model as well.")
    return _replace(request, {MODEL: model})


def _find_list(node: Any) -> list[Any] | None:
    """Find the outermost list around the image."""
    if isinstance(node, list):
        return node if _count_images(node) else None
    inner = node.values() if isinstance(node, dict) else ()
    return next((found for value in inner if (found := _find_list(value))), None)


def _count_images(node: Any) -> int:
    if isinstance(node, dict | list):
        return sum(map(_count_images, node.values() if isinstance(node, dict) else node))
    return int(node in (IMAGE, DATA_URL))


def _put(node: Any, image: str) -> Any:
    return _replace(node, {IMAGE: image, DATA_URL: f"data:image/png;base64,{image}"})


def _replace(node: Any, values: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {name: _replace(value, values) for name, value in node.items()}
    if isinstance(node, list):
        return [_replace(value, values) for value in node]
    return values.get(node, node) if isinstance(node, str) else node


def _with_size(preset: Preset) -> Preset:
    return replace(preset, preprocessing=replace(_UNCHANGED, size=preset.preprocessing.size))
