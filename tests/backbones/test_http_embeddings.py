"""Embedding services: usual shapes of requests and answers, and what can be wrong with them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.backbones import load_backbone
from mivhead.backbones.http import connect, fill, read_vectors
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.errors import InputError
from tests.helpers.conformance import check, photos
from tests.helpers.extras import needs
from tests.helpers.services import FaultyServer, Reply, Request, as_json, running, says, status

pytestmark = needs("httpx", "http")


def embed(text: str) -> list[float]:
    """Seven numbers of an image: colour means, spreads, and the width."""
    image = Image.open(io.BytesIO(base64.b64decode(text.rpartition(",")[2])))
    assert image.format == "PNG"
    pixels = np.asarray(image) / 255
    return [*pixels.mean((0, 1)), *pixels.std((0, 1)), image.width / 100]


def service(answer: Callable[[list[list[float]]], Any]) -> Callable[[Request], Reply]:
    """A service in the most common form, with its own way to wrap the vectors."""

    def reply(request: Request) -> Reply:
        document = json.loads(request.body)
        assert document["model"] == "toy"
        return as_json(answer([embed(text) for text in document["input"]]))

    return reply


def as_data(vectors: list[list[float]]) -> Any:
    return {"data": [{"object": "embedding", "embedding": v} for v in vectors], "usage": {"n": 1}}


def as_data_backwards(vectors: list[list[float]]) -> Any:
    return {"data": [{"embedding": v, "index": i} for i, v in enumerate(vectors)][::-1]}


SHAPES = [
    as_data,
    as_data_backwards,
    lambda vectors: {"embeddings": vectors},
    lambda vectors: {"embeddings": {"float": vectors}},
    lambda vectors: {"embeddings": [{"embedding": v} for v in vectors]},
    lambda vectors: vectors,
]


def test_conformance() -> None:
    with running(FaultyServer(service(as_data), [status(429), status(500)])) as url:
        check(connect(url + "/v1/embeddings", model="toy", batch_size=2, backoff=0.001))


@pytest.mark.parametrize("shape", SHAPES)
def test_usual_shapes_of_answers(shape: Callable[[list[list[float]]], Any]) -> None:
    server = FaultyServer(service(shape))
    with running(server) as url:
        backbone = load_backbone(f"{url}/v1/embeddings#model=toy&size=32&batch_size=2")
        images = photos(5)
        found = backbone.extract(images)
    resized = [Image.fromarray(i).resize((32, 32), Image.Resampling.BICUBIC) for i in images]
    pixels = np.stack([np.asarray(i) / 255 for i in resized])  # (n, 32, 32, 3)
    parts = [pixels.mean((1, 2)), pixels.std((1, 2)), np.full((5, 1), 0.32)]
    expected = np.concatenate(parts, axis=1).astype(np.float16)
    np.testing.assert_allclose(found.tensors["block0.token"], expected, rtol=1e-3, atol=1e-5)
    assert sorted(len(json.loads(each.body)["input"]) for each in server.posts) == [1, 2, 2]
    assert {each.path for each in server.posts} == {"/v1/embeddings"}


def test_answer_for_a_single_image() -> None:
    def reply(request: Request) -> Reply:
        return as_json({"embedding": embed(json.loads(request.body)["inputImage"])})

    server = FaultyServer(reply)
    with running(server) as url:
        backbone = connect(url, request={"inputImage": "$image"})
        assert len(backbone.extract(photos(3))) == 3
    assert len(server.posts) == 3


def test_requests_follow_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", "abc")

    def reply(request: Request) -> Reply:
        assert request.headers["x-api-key"] == "abc"
        document = json.loads(request.body)
        assert document["name"] == "toy"
        assert document["kinds"] == ["float"]
        entries = [entry["content"][0]["url"] for entry in document["inputs"]]
        assert all(entry.startswith("data:image/png;base64,") for entry in entries)
        return as_json({"embeddings": [embed(entry) for entry in entries]})

    request = {
        "name": "$model",
        "kinds": ["float"],
        "inputs": [{"content": [{"type": "image", "url": "$data_url"}]}],
    }
    with running(FaultyServer(reply)) as url:
        backbone = load_backbone(
            f"{url}#key=TOY_KEY&header=x-api-key", model="toy", request=json.dumps(request)
        )
        assert len(backbone.extract(photos(3))) == 3
        assert backbone.identity.name == f"{url}#model=toy"


def test_template_is_filled_once_per_image() -> None:
    template = {"images": [["$image", {"again": 1}]], "other": [1, 2]}
    assert fill(template, ["A", "B"]) == {
        "images": [["A", {"again": 1}], ["B", {"again": 1}]],
        "other": [1, 2],
    }


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be an object"),
        ({"input": []}, "contains '.image' or '.data_url' once"),
        ({"input": ["$image", "$image"]}, "once"),
        ({"input": ["$image", "text"]}, "exactly one entry"),
        ({"model": "$model", "input": ["$image"]}, "give the model as well"),
    ],
)
def test_bad_templates(request_: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        connect("http://127.0.0.1:9", request=request_)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"embeddings": [[1, 2, 3], [1, 2, 3], [1, 2]]}, "entry 2 has 2 values, but entry 0 has 3"),
        ({"embeddings": [[1.0], [2.0]]}, "2 results for 3 images"),
        ({"embeddings": [[1.0]] * 4}, "4 results for 3 images"),
        ({"embeddings": [[1.0], [float("nan")], [1.0]]}, r"NaN or infinity \(first in image 1\)"),
        ({"embeddings": [[1.0], [1.0], [1e9]]}, r"NaN or infinity \(first in image 2\)"),
        ({"embeddings": [[], [], []]}, "no empty dimension"),
        ({"embeddings": [[1.0], ["2.0"], [3.0]]}, "entry 1 is not a list of numbers"),
        ({"embeddings": [[1.0], [True], [3.0]]}, "entry 1 is not a list of numbers"),
        ({"embeddings": [[10**400]] * 3}, "entry 0 is not a list of numbers"),
        ({"embeddings": [[1.0], None, [3.0]]}, "entry 1 is not a list of numbers"),
        ({"embeddings": [1.0, 2.0, 3.0]}, "entry 0 is not a list of numbers"),
        ({"data": [{"embedding": [1.0], "index": 0}] * 3}, r"indices \[0, 0, 0\]"),
        ({"data": []}, "expected .*, got"),
        ({"result": 3}, "expected .*, got"),
        (None, "expected .*, got null"),
    ],
)
def test_wrong_answers(answer: Any, message: str) -> None:
    with running(FaultyServer(lambda _: as_json(answer))) as url:
        backbone = connect(url, model="toy")
        with pytest.raises(InputError, match=f"{url}.* returned .*{message}"):
            backbone.extract(photos(3))


@pytest.mark.parametrize("body", [b"<html>", b"", b"[" * 100_000, b'{"data": [', b"\xff\xfe"])
def test_answers_that_are_not_json(body: bytes) -> None:
    with running(FaultyServer(service(as_data), [says(Reply(body))])) as url:
        backbone = connect(url, model="toy")
        with pytest.raises(InputError, match="returned an unusable response: the body is not JSON"):
            backbone.extract(photos(1))


def test_wrong_width_between_requests() -> None:
    narrow = says(as_json({"embeddings": [[1.0] * 6]}))
    right = says(as_json({"embeddings": [[1.0] * 7]}))
    with running(FaultyServer(service(as_data), [right, right, narrow])) as url:
        backbone = connect(url, model="toy", batch_size=1, concurrency=1)
        with pytest.raises(InputError, match=r"\(6,\).* but .*\(7,\).* before"):
            backbone.extract(photos(4))


def test_numbers_may_be_whole() -> None:
    assert read_vectors([[1, 2.5]]) == [[1, 2.5]]


def test_identity_depends_on_what_is_known() -> None:
    def key(url: str = "http://127.0.0.1:9/a", **options: Any) -> str:
        return connect(url, **({"model": "m"} | options)).identity.key

    others = [
        key("http://127.0.0.1:9/b"),
        key(model="n"),
        key(request={"input": ["$image"]}),
        key(size=100),
    ]
    assert len({key(), *others}) == 5
    assert key() == key(timeout=3.0, attempts=2, batch_size=3, key="SOME_KEY")


def test_preset_sets_the_size_and_the_head() -> None:
    plain = Preprocessing(size=48, mean=(0.0,) * 3, std=(1.0,) * 3)
    preset = Preset(("embedding",), (BlockPreset(heads=7),), plain, threshold=3)
    backbone = connect("http://127.0.0.1:9", model="m", preset=preset)
    assert backbone.preset == preset
    assert backbone.identity.preprocessing.size == 48
    for bad in (Preset(("x",), (BlockPreset(),), plain), Preset(("embedding",), (BlockPreset(),))):
        with pytest.raises(InputError, match="the single tap 'embedding'"):
            connect("http://127.0.0.1:9", model="m", preset=bad)
    with pytest.raises(InputError, match="size must be from 1 to 4096, got 0"):
        connect("http://127.0.0.1:9", model="m", size=0)


def test_a_classifier_learns_from_embeddings(shots: Any, queries: Any) -> None:
    with running(FaultyServer(service(as_data))) as url:
        classifier = FewShotClassifier(f"{url}#model=toy", threshold=0, cache=False)
        classifier.fit_folder(shots)
        paths = sorted(queries.glob("*/*.png"))
        found = classifier.predict(paths)
    assert np.mean(found == [path.parent.name for path in paths]) > 0.9
