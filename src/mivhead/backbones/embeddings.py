"""Services that return one vector per image, in the shapes that are common for embeddings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import torch

from mivhead.backbones.base import Identity
from mivhead.backbones.transport import Client
from mivhead.backbones.wire import blame, parse_json
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.preset import BlockPreset, Preprocessing, Preset

TAP = "embedding"
IMAGE, DATA_URL, MODEL = "$image", "$data_url", "$model"
MAX_IMAGES = 64
_UNCHANGED = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # the service normalises


class Embeddings:
    """An embedding service.

    Parameters
    ----------
    client
        Its address and how to talk to it.
    model
        What the service calls the model.
    request
        What it wants to be sent: JSON in which `"$model"` stands for the model and `"$image"` for
        an image (base64 of a PNG; `"$data_url"` for the same as a data URL). The outermost list
        around the image gets one entry per image; without a list, each image is a request of its
        own. By default `{"model": "$model", "input": ["$image"]}`.
    size
        Images are resized to `size` x `size` before they are sent.
    preset
        Other settings for the head.

    Notes
    -----
    Answers may be `{"data": [{"embedding": [...]}, ...]}` (ordered by `index` if there is one),
    `{"embeddings": [[...], ...]}`, `{"embeddings": {"float": [[...], ...]}}`, a bare list of
    vectors, or `{"embedding": [...]}` for a single image.

    A service does not show its weights. The identity is made of the address, the model and the
    request: if the provider changes the model behind a name, nobody can tell.
    """

    def __init__(
        self,
        client: Client,
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
                f"An embedding service has the single tap {TAP!r} and no mean and std of ours."
            )
        self._client = client
        self._request = _read_request(request, model)
        self.max_images = MAX_IMAGES if _find_list(self._request) else 1
        self.shown = client.shown
        self.preset = preset
        name = client.shown if model is None else f"{client.shown}#model={model}"
        known = json.dumps([client.url, self._request], sort_keys=True)
        digest = hashlib.sha256(known.encode()).hexdigest()
        self.identity = Identity(name, digest, preset.preprocessing, preset.taps)

    def ask(self, images: list[str], dtype: torch.dtype) -> Features:
        """Features of the base64 PNGs of one request."""
        answer = self._client.send("", fill(self._request, images))
        with blame(self.shown):
            vectors = torch.tensor(read_vectors(parse_json(answer.body)), dtype=torch.float64)
            return Features({"token": vectors.to(dtype)})  # (n, C)


def fill(template: Any, images: list[str]) -> Any:
    """Put images into a request.

    >>> fill({"input": [{"image": "$image"}]}, ["QUE=", "QkI="])
    {'input': [{'image': 'QUE='}, {'image': 'QkI='}]}
    """
    if isinstance(template, dict):
        return {name: fill(value, images) for name, value in template.items()}
    if isinstance(template, list) and _count_images(template):
        return [_put(template[0], image) for image in images]
    return _put(template, images[0])


def read_vectors(document: Any) -> list[list[float]]:
    """Find the vectors in an answer, one per image and all of one width.

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
            raise InputError(f"entry {i} is no list of numbers.")
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
            f"request must be an object that holds {IMAGE!r} or {DATA_URL!r} once, got "
            f"{json.dumps(request)[:80]}."
        )
    repeated = _find_list(request)
    if repeated is not None and len(repeated) != 1:
        raise InputError(f"The list around {IMAGE!r} in request must have one entry.")
    if model is None and MODEL in json.dumps(request):
        raise InputError(f"request holds {MODEL!r}: give the model.")
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
