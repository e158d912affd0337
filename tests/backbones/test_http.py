"""Embedding services: requests and responses, faults on the way, and keys that stay secret."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead import FewShotClassifier
from mivhead.backbones import http, load_backbone
from mivhead.backbones.http import EmbeddingBackbone
from mivhead.errors import InputError, MivError, NotAvailableError
from tests.helpers.conformance import check, photos
from tests.helpers.services import (
    FaultyServer,
    Reply,
    Request,
    as_json,
    breaks_off,
    changed,
    drips,
    drips_headers,
    hangs_up,
    resets,
    running,
    says,
    status,
    writes,
)

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF", 0.001)
    monkeypatch.setattr(http, "ATTEMPTS", 3)
    monkeypatch.setattr(http, "CONCURRENCY", 1)
    monkeypatch.setattr(http, "BATCH", 2)


def embed(text: str) -> list[float]:
    """Seven numbers of an image: colour means, spreads, and the width."""
    image = Image.open(io.BytesIO(base64.b64decode(text.rpartition(",")[2])))
    assert image.format == "PNG"
    pixels = np.asarray(image) / 255
    return [*pixels.mean((0, 1)), *pixels.std((0, 1)), image.width / 100]


def as_data(vectors: list[list[float]]) -> Any:
    return {"data": [{"object": "embedding", "embedding": v} for v in vectors], "usage": {"n": 1}}


def service(wrap: Callable[[list[list[float]]], Any] = as_data) -> Callable[[Request], Reply]:
    """A service in the most common form, with its own way to wrap the vectors."""

    def reply(request: Request) -> Reply:
        document = json.loads(request.body)
        assert document["model"] == "toy"
        return as_json(wrap([embed(text) for text in document["input"]]))

    return reply


WRAPPERS = [
    as_data,
    lambda vectors: {"data": [{"embedding": v, "index": i} for i, v in enumerate(vectors)][::-1]},
    lambda vectors: {"embeddings": vectors},
    lambda vectors: {"embeddings": {"float": vectors}},
    lambda vectors: {"embeddings": [{"embedding": v} for v in vectors]},
    lambda vectors: vectors,
]


def test_conformance() -> None:
    with running(FaultyServer(service(), [status(429), status(500)])) as url:
        check(EmbeddingBackbone(url + "/v1/embeddings", model="toy"))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_usual_shapes_of_responses(wrap: Callable[[list[list[float]]], Any]) -> None:
    server = FaultyServer(service(wrap))
    with running(server) as url:
        backbone = load_backbone(f"{url}/v1/embeddings#model=toy&size=32")
        images = photos(5)
        features = backbone.extract(images)
    resized = [Image.fromarray(i).resize((32, 32), Image.Resampling.BICUBIC) for i in images]
    pixels = np.stack([np.asarray(i) / 255 for i in resized])  # (n, 32, 32, 3)
    parts = [pixels.mean((1, 2)), pixels.std((1, 2)), np.full((5, 1), 0.32)]
    expected = np.concatenate(parts, axis=1).astype(np.float16)
    np.testing.assert_allclose(features.tensors["block0.token"], expected, rtol=1e-3, atol=1e-5)
    assert sorted(len(json.loads(post.body)["input"]) for post in server.posts) == [1, 2, 2]


def test_a_request_for_each_image() -> None:
    def reply(request: Request) -> Reply:
        return as_json({"embedding": embed(json.loads(request.body)["inputImage"])})

    server = FaultyServer(reply)
    with running(server) as url:
        backbone = EmbeddingBackbone(url, request='{"inputImage": "$image"}')
        assert len(backbone.extract(photos(3))) == 3
    assert len(server.posts) == 3


def test_requests_follow_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", KEY)

    def reply(request: Request) -> Reply:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        document = json.loads(request.body)
        assert document["name"] == "toy"
        assert document["kinds"] == ["float"]
        entries = [entry["content"][0]["url"] for entry in document["inputs"]]
        assert all(entry.startswith("data:image/png;base64,") for entry in entries)
        return as_json({"embeddings": [embed(entry) for entry in entries]})

    inputs = [{"content": [{"type": "image", "url": "$data_url"}]}]
    request = json.dumps({"name": "$model", "kinds": ["float"], "inputs": inputs})
    with running(FaultyServer(reply)) as url:
        backbone = load_backbone(f"{url}#key=TOY_KEY", model="toy", request=request)
        assert len(backbone.extract(photos(3))) == 3
        assert backbone.identity.name == f"{url}#model=toy"


def test_the_identity_depends_on_what_is_asked() -> None:
    kinds = [
        EmbeddingBackbone("http://host/a", model="x"),
        EmbeddingBackbone("http://host/a", model="y"),
        EmbeddingBackbone("http://host/b", model="x"),
        EmbeddingBackbone("http://host/a", model="x", request='{"m": "$model", "i": ["$image"]}'),
        EmbeddingBackbone("http://host/a", model="x", size=64),
    ]
    assert len({kind.identity.key for kind in kinds}) == len(kinds)


def test_a_model_of_a_service_is_saved_and_never_asks_it_by_itself(tmp_path: Path) -> None:
    server = FaultyServer(service())
    with running(server) as url:
        spec, images = f"{url}#model=toy&size=32", photos(4)
        fitted = FewShotClassifier(spec, cache=False, threshold=0).fit(images, list("aabb"))
        fitted.save(tmp_path / "m.miv")
        again = mivhead.load(tmp_path / "m.miv", backbone=spec)
        np.testing.assert_allclose(again.predict_proba(images), fitted.predict_proba(images))
        asked = len(server.requests)
        with pytest.raises(NotAvailableError):
            mivhead.load(tmp_path / "m.miv").predict(images)
        assert len(server.requests) == asked


@pytest.mark.parametrize(
    "fault", [status(503), status(429, Retry_After="0"), hangs_up, breaks_off, resets]
)
def test_what_may_pass_is_tried_again(fault: Any) -> None:
    with running(FaultyServer(service(), [fault, fault])) as url:
        backbone = EmbeddingBackbone(url, model="toy")
        assert len(backbone.extract(photos(2))) == 2


FAULTS = {
    "always busy": [status(503)] * 3,
    "redirect": [says(as_json({}, 302, Location="http://127.0.0.1:1/elsewhere"))],
    "denied": [says(as_json({"error": f"bad key {KEY}"}, 401))],
    "rejected": [says(as_json({"error": {"message": f"no such model {KEY}"}}, 400))],
    "not JSON": [says(Reply(b"<html>"))],
    "deep JSON": [says(Reply(b"[" * 100_000))],
    "too few": [says(as_json([[1.0, 2.0]]))],
    "ragged": [says(as_json([[1.0, 2.0], [1.0]]))],
    "not a number": [says(Reply(b"[[NaN, 1], [1, 2]]"))],
    "infinite": [says(Reply(b"[[1e999, 1], [1, 2]]"))],
    "too large for float16": [says(as_json([[1e300, 1], [1, 2]]))],
    "words": [says(as_json([["a"], ["b"]]))],
    "too long": [changed(lambda body: body + b" " * 70_000)],
    "20 GiB": [writes(b"HTTP/1.1 200 OK\r\nContent-Length: 21474836480\r\n\r\n" + b" " * 70_000)],
    "gzip": [says(Reply(gzip.compress(b"0" * 10**8), headers={"Content-Encoding": "gzip"}))],
    "drip": [drips] * 3,
    "drip of headers": [drips_headers] * 3,
    "nonsense": [writes(b"\x00" * 100)] * 3,
}


@pytest.mark.parametrize("name", FAULTS)
def test_other_faults_are_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", KEY)
    monkeypatch.setattr(http, "MAX_BYTES", 65_536)
    if name.startswith("drip"):
        monkeypatch.setattr(http, "TIMEOUT", 0.2)
    with running(FaultyServer(service(), FAULTS[name])) as url:
        backbone = EmbeddingBackbone(url, model="toy", key="TOY_KEY")
        with pytest.raises(MivError) as caught:
            backbone.extract(photos(2))
    message = str(caught.value)
    assert KEY not in message
    assert "\n" not in message
    assert len(message) < 500


def test_the_key_is_not_sent_after_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", KEY)
    other = FaultyServer(service())
    with running(other) as elsewhere:
        server = FaultyServer(service(), [says(as_json({}, 307, Location=elsewhere))])
        with running(server) as url, pytest.raises(InputError, match="redirects are not followed"):
            EmbeddingBackbone(url, model="toy", key="TOY_KEY").extract(photos(1))
        assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert other.requests == []


@pytest.mark.parametrize(
    "spec",
    [
        *("http://", "http://host:0/", "http://user:pw@host/", "http://host/?api_key=x"),
        *("http://host/", "http://host/#model=m&size=x", "http://host/#model=m&colour=red"),
        "http://host/#model=m&key=sk-123",
        'http://host/#model=m&request={"a":"b"}',
        'http://host/#model=m&request={"a":["$image","b"]}',
        'http://host/#model=m&request={"a":"$image"',
    ],
)
def test_refusals(spec: str) -> None:
    with pytest.raises(InputError) as caught:
        load_backbone(spec)
    assert "pw" not in str(caught.value)
    assert "sk-123" not in str(caught.value)


def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOY_KEY", raising=False)
    with pytest.raises(NotAvailableError, match="TOY_KEY"):
        EmbeddingBackbone("http://127.0.0.1:9", model="toy", key="TOY_KEY").extract(photos(1))
