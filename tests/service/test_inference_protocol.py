"""The Open Inference Protocol: what KServe's and Triton's clients send."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from tests.helpers.services import toy
from tests.service.conftest import photo

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from tests.helpers.web import web

MODEL = "/v2/models/colours"


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def tensor(name: str, kind: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape, "data": data}


def outputs(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {each["name"]: each for each in response.json()["outputs"]}


def test_server_and_model_are_described(url: str) -> None:
    assert web.get(f"{url}/v2").json()["name"] == "mivhead"
    assert web.get(f"{url}/v2/health/live").json() == {"live": True}
    assert web.get(f"{url}/v2/health/ready").json() == {"ready": True}
    model = web.get(url + MODEL).json()
    assert model["name"] == "colours"
    assert {each["name"] for each in model["outputs"]} >= {"label", "probabilities"}
    (version,) = model["versions"]
    assert web.get(f"{url}{MODEL}/versions/{version}").json() == model
    assert web.get(f"{url}{MODEL}/ready").json() == {"name": "colours", "ready": True}
    assert web.get(f"{url}{MODEL}/versions/2").status_code == 404
    assert web.get(f"{url}/v2/models/birds").status_code == 404


def test_images_as_bytes_and_as_pixels(url: str, colours: FewShotClassifier) -> None:
    files = [photo("blue", 4), photo("red", 5)]
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    expected = colours.classify(pictures)
    pixels = np.stack([np.asarray(each) for each in pictures])
    shape = list(pixels.shape)
    for given in (
        tensor("images", "BYTES", [2], [text(file) for file in files]),
        tensor("images", "UINT8", shape, pixels.tolist()),
        tensor("images", "UINT8", shape, pixels.ravel().tolist()),
    ):
        response = web.post(f"{url}{MODEL}/infer", json={"id": "42", "inputs": [given]})
        found = outputs(response)
        assert response.json()["id"] == "42"
        assert response.json()["model_name"] == "colours"
        assert found["label"]["data"] == ["blue", "red"]
        assert found["decision"]["data"] == [str(each.decision) for each in expected]
        assert found["probabilities"]["shape"] == [2, 3]
        rows = np.reshape(found["probabilities"]["data"], (2, 3))
        for row, each in zip(rows, expected, strict=True):
            probabilities = [each.probabilities[name] for name in ("blue", "green", "red")]
            assert row.tolist() == pytest.approx(probabilities, abs=1e-6)


def test_features_and_chosen_outputs(url: str, colours: FewShotClassifier) -> None:
    features = toy().extract([Image.open(io.BytesIO(photo("green")))])
    inputs = [
        tensor(name, "FP32", list(values.shape), values.flatten().tolist())
        for name, values in features.tensors.items()
    ]
    document = {"inputs": inputs, "outputs": [{"name": "label"}]}
    found = outputs(web.post(f"{url}{MODEL}/infer", json=document))
    assert set(found) == {"label"}
    assert found["label"]["data"] == ["green"]


IMAGE = tensor("images", "BYTES", [1], [text(photo())])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "Send {"),
        ({"inputs": []}, "Send either the input"),
        ({"inputs": [3]}, "Send {"),
        ({"inputs": [IMAGE, IMAGE]}, "its own name"),
        ({"inputs": [{**IMAGE, "shape": [2]}]}, "as many as the shape says"),
        ({"inputs": [{**IMAGE, "shape": ["1"]}]}, "list of positive integers"),
        ({"inputs": [{**IMAGE, "shape": []}]}, "list of positive integers"),
        ({"inputs": [{**IMAGE, "data": "x"}]}, "must be a list"),
        ({"inputs": [{**IMAGE, "datatype": "INT64"}]}, "has the datatype 'INT64'"),
        ({"inputs": [{**IMAGE, "data": ["?"]}]}, "not base64"),
        ({"inputs": [{**IMAGE, "data": [text(b"x")]}]}, "image 0 is not a JPEG"),
        ({"inputs": [tensor("images", "UINT8", [1, 2], [1, 2])]}, "height, width, 3"),
        ({"inputs": [tensor("images", "UINT8", [1, 1, 1, 3], [1, 2, 300])]}, "from 0 to 255"),
        ({"inputs": [tensor("images", "UINT8", [1, 1, 1, 3], [1, 2])]}, "as many numbers"),
        ({"inputs": [tensor("images", "UINT8", [9, 1, 1, 3], [1] * 27)]}, "1 to 8 images, got 9"),
        ({"inputs": [IMAGE, tensor("features", "FP32", [1, 1], [1])]}, "Send either"),
        ({"inputs": [tensor("features", "FP32", [1, 2], [1, 2])]}, "block"),
        ({"inputs": [IMAGE], "outputs": [{"name": "x"}]}, "The outputs are label"),
        ({"inputs": [IMAGE], "outputs": 3}, "The outputs are label"),
        ({"inputs": [IMAGE], "outputs": None}, "The outputs are label"),
        ({"inputs": [IMAGE], "id": 3}, "The id of a request must be a string"),
    ],
)
def test_refusals(url: str, document: Any, message: str) -> None:
    response = web.post(f"{url}{MODEL}/infer", json=document)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]
