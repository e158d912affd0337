"""`/v1/predict` and `/v1/models`: every form of a request gets what the library predicts."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mivhead import FewShotClassifier, MIVClassifier, save
from mivhead.errors import InputError
from mivhead.service.engine import name_files
from mivhead.service.middleware import JsonFormatter
from tests.helpers.services import toy
from tests.helpers.tiny_backbone import TinyBackbone
from tests.helpers.web import web
from tests.service.conftest import PATH, Waiting, clients, photo, train


def expected(model: FewShotClassifier, *files: bytes) -> list[dict[Any, float]]:
    images = [Image.open(io.BytesIO(file)) for file in files]
    return [prediction.probabilities for prediction in model.classify(images)]


def predicted(response: Any) -> list[dict[Any, float]]:
    assert response.status_code == 200, response.text
    rows = response.json()["predictions"]
    return [{each["label"]: each["probability"] for each in row["top"]} for row in rows]


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


FORMS = {
    "multipart": lambda files: {
        "files": [("images", (f"{i}.png", f)) for i, f in enumerate(files)]
    },
    "json": lambda files: {"json": {"images": [text(f) for f in files]}},
    "named": lambda files: {"json": {"images": [{"name": "a", "data": text(f)} for f in files]}},
    "data-url": lambda files: {
        "json": {"images": [f"data:image/png;base64,{text(f)}" for f in files]}
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_images_in_every_form(url: str, colours: FewShotClassifier, form: str) -> None:
    files = [photo(colour, 50) for colour in ("blue", "red", "green")]
    response = web.post(url + PATH, **FORMS[form](files))
    for ours, theirs in zip(predicted(response), expected(colours, *files), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    labels = [row["closest"] for row in response.json()["predictions"]]
    assert labels == ["blue", "red", "green"]


def test_one_image_as_the_body(url: str, colours: FewShotClassifier) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (300, 211, 3), np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    for data, kind in (
        (photo("green", 7, "JPEG"), "image/jpeg"),
        (photo("green", 7), "application/octet-stream"),
        (file.getvalue(), "image/png"),  # resized as the backbone does
    ):
        response = web.post(url + PATH, content=data, headers={"Content-Type": kind})
        assert predicted(response) == expected(colours, data)


def test_features(url: str, colours: FewShotClassifier, tmp_path: Path) -> None:
    features = toy().extract([Image.open(io.BytesIO(photo(c, 9))) for c in ("red", "blue")])
    probabilities = [each.probabilities for each in colours.classify(features)]
    named = {name: tensor.tolist() for name, tensor in features.tensors.items()}
    assert predicted(web.post(url + PATH, json={"features": named})) == probabilities
    vectors, labels = np.eye(4, 6, dtype=np.float32), ["a", "a", "b", "b"]
    save(MIVClassifier(random_state=0).fit(vectors, labels), tmp_path / "vectors.miv")

    async def main() -> None:
        async with clients(tmp_path / "vectors.miv") as client:
            response = await client.post(PATH, json={"features": vectors.tolist()})
            assert [row["closest"] for row in response.json()["predictions"]] == labels
            response = await client.post(PATH, files={"images": photo()})
            assert response.status_code == 400
            response = await client.post(PATH, json={"features": [[1.0, float(2**70)]]})
            assert response.status_code == 400

    asyncio.run(main())


def test_an_unreadable_image_does_not_affect_the_others(url: str) -> None:
    files = [
        ("images", ("good.png", photo("red"))),
        ("images", ("text.jpg", b"not an image")),
        ("images", ("empty.png", b"")),
        ("images", ("cut.png", photo("blue")[:100])),
        ("images", ("also good.png", photo("blue"))),
    ]
    response = web.post(url + PATH, files=files)
    assert response.status_code == 200
    rows = response.json()["predictions"]
    assert [row["file"] for row in rows] == [name for _, (name, _) in files]
    assert [row.get("closest") for row in rows] == ["red", None, None, None, "blue"]
    assert all(row["error"].startswith(row["file"]) for row in rows if "error" in row)
    response = web.post(url + PATH, files=files[1:3])
    assert response.status_code == 400
    assert response.json()["error"].startswith("text.jpg")


def test_a_class_prior(url: str, colours: FewShotClassifier) -> None:
    red = photo("red", 40)
    frequencies = {"red": 0.0, "green": 1.0, "blue": 2.5}
    (wanted,) = colours.classify([Image.open(io.BytesIO(red))], class_prior=frequencies)
    assert wanted.label != "red"
    as_text = "red=0,green=1,blue=2.5"
    for response in (
        web.post(f"{url}{PATH}?prior={as_text}", files={"images": red}),
        web.post(url + PATH, files={"images": red}, data={"prior": as_text}),
        web.post(url + PATH, json={"images": [text(red), text(b"damaged")], "prior": frequencies}),
    ):
        row = response.json()["predictions"][0]
        assert (row["closest"], row["decision"]) == (wanted.label, wanted.decision)
        assert predicted_top(row) == pytest.approx(wanted.probabilities, abs=1e-4)


def predicted_top(row: dict[str, Any]) -> dict[str, float]:
    return {each["label"]: each["probability"] for each in row["top"]}


def test_the_most_probable_classes_only(url: str) -> None:
    for request in (
        {"url": f"{url}{PATH}?top=2", "files": {"images": photo()}},
        {"url": url + PATH, "files": {"images": photo()}, "data": {"top": "2"}},
        {"url": url + PATH, "json": {"images": [text(photo())], "top": 2}},
    ):
        (row,) = web.post(**request).json()["predictions"]
        assert len(row["top"]) == 2
        assert row["top"][0]["probability"] == row["probability"]


def kind(name: str) -> dict[str, str]:
    return {"Content-Type": name}


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"files": {"photo": b"x"}}, 400),
        ({"files": [("images", b"x")] * 9}, 400),
        ({"json": {"images": [text(b"x")] * 9}}, 400),
        ({"json": {"images": ["no base64"]}}, 400),
        ({"json": {"images": []}}, 400),
        ({"json": {"images": [{"data": "x", "y": 1}]}}, 400),
        ({"json": {"images": [{"name": "a\ud800", "data": text(photo())}]}}, 400),
        ({"json": {}}, 400),
        ({"json": []}, 400),
        ({"json": {"images": [text(photo())], "to": 3}}, 400),
        ({"json": {"images": [text(photo())], "top": 2.0}}, 400),
        ({"json": {"images": [text(photo())], "model": 3}}, 400),
        ({"json": {"images": [text(photo())], "model": "x"}}, 404),
        ({"json": {"images": [text(photo())], "prior": "red=1"}}, 400),
        ({"json": {"images": [text(photo())], "prior": 3}}, 400),
        ({"json": {"features": [[1, 2], [3]]}}, 400),
        ({"json": {"features": {"block9.map": [[1.0]]}}}, 400),
        ({"content": b"[" * 50_000, "headers": kind("application/json")}, 400),
        ({"content": b"x", "headers": kind("text/plain")}, 415),
        ({"content": b"", "headers": kind("image/png")}, 400),
        ({"content": b"x", "headers": kind("multipart/form-data")}, 400),
        ({"content": b"x", "headers": kind("multipart/form-data; boundary=a")}, 400),
    ],
)
def test_refusals(url: str, request_: Any, code: int) -> None:
    if "json" in request_:  # httpx does not send half of a character
        body = json.dumps(request_["json"])
        request_ = {"content": body, "headers": kind("application/json")}
    response = web.post(url + PATH, **request_)
    assert response.status_code == code, response.text
    assert response.json()["error"]


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.binary(max_size=300),
    st.sampled_from(["application/json", "multipart/form-data; boundary=x", "image/png"]),
)
def test_any_body_gets_an_answer(url: str, body: bytes, type_: str) -> None:
    response = web.post(url + PATH, content=body, headers=kind(type_))
    assert response.status_code == 400
    assert response.json()["error"]


def test_models_and_health(url: str, model_file: Path) -> None:
    (model,) = web.get(f"{url}/v1/models").json()["models"]
    assert model["classes"] == ["blue", "green", "red"]
    assert model["shots"] == {"blue": 3, "green": 3, "red": 3}
    assert (model["backbone"], model["image_size"], model["estimate"]) == ("toy", 16, None)
    assert (model["file"], model["problem"]) == ("colours.miv", None)
    assert str(model_file.parent) not in json.dumps(model)
    assert web.get(f"{url}/healthz").json() == {"status": "ok"}
    assert web.get(f"{url}/readyz").json() == {"status": "ready", "models": ["colours"]}


def test_a_model_tells_what_accuracy_its_shots_suggest(tmp_path: Path) -> None:
    model = train()
    check = model.check()
    model.save(tmp_path / "colours.miv")

    async def main() -> None:
        async with clients(tmp_path / "colours.miv") as client:
            (facts,) = (await client.get("/v1/models")).json()["models"]
            estimate = facts["estimate"]
            assert (estimate["accuracy"], estimate["tested"]) == (check.accuracy, 9)
            assert (estimate["low"], estimate["high"]) == check.interval

    asyncio.run(main())


def test_several_models_by_name(tmp_path: Path, model_file: Path) -> None:
    train(("red", "blue"), seed=3).save(tmp_path / "two.miv")

    async def main() -> None:
        async with clients(model_file, f"pair={tmp_path / 'two.miv'}") as client:
            for name, classes in (("colours", 3), ("pair", 2)):
                response = await client.post(f"{PATH}?model={name}", files={"images": photo("red")})
                assert response.json()["model"] == name
                assert len(predicted(response)[0]) == classes
            response = await client.post(PATH, files={"images": photo("red")})
            assert response.status_code == 400
            assert response.json()["error"].endswith("the models are colours, pair.")

    asyncio.run(main())


@pytest.mark.parametrize("files", [["a.miv", "b/a.miv"], ["a b.miv"], []])
def test_names_of_models(files: list[str]) -> None:
    with pytest.raises(InputError):
        name_files(files)


async def metric(client: Any, line: str) -> None:
    """Wait until a line is among the metrics."""
    while line not in (await client.get("/metrics")).text.splitlines():
        await asyncio.sleep(0)


def test_requests_of_many_clients_share_batches(
    model_file: Path, colours: FewShotClassifier
) -> None:
    backbone = Waiting()
    files = [photo("green", i) for i in range(9)]

    async def main() -> list[Any]:
        async with clients(model_file, backbone=backbone) as client:
            first = asyncio.create_task(client.post(PATH, files={"images": files[0]}))
            await asyncio.to_thread(backbone.entered.wait)
            others = [
                asyncio.create_task(client.post(PATH, files={"images": file})) for file in files[1:]
            ]
            await metric(client, "miv_queue_images 9.0")
            backbone.go.set()
            answers = await asyncio.gather(first, *others)
            await metric(client, "miv_queue_images 0.0")
            await metric(client, 'miv_requests_total{path="/v1/predict",status="200"} 9.0')
            await metric(client, 'miv_predictions_total{decision="green",model="colours"} 9.0')
            await metric(client, f"miv_batch_images_count {len(backbone.batches) - 1}.0")
            return answers

    answers = asyncio.run(main())
    assert sum(backbone.batches) == 10
    assert len(backbone.batches) < 10
    for answer, probabilities in zip(answers, expected(colours, *files), strict=True):
        assert predicted(answer)[0] == pytest.approx(probabilities, abs=1e-6)


class Broken(TinyBackbone):
    def __init__(self) -> None:
        super().__init__("toy", token=True)
        self.calls = 0

    def extract(self, images: Any) -> Any:
        self.calls += 1
        if self.calls == 2:  # after the trial at the start
            raise RuntimeError("secret path of the server")
        return super().extract(images)


def test_failures_stay_inside(model_file: Path) -> None:
    async def main() -> None:
        async with clients(model_file, backbone=Broken()) as client:
            response = await client.post(PATH, files={"images": photo()})
            assert response.status_code == 500
            assert response.json() == {"error": "The server failed; see its log."}
            assert (await client.post(PATH, files={"images": photo()})).status_code == 200

    asyncio.run(main())


def test_logs_hold_no_images_keys_or_queries(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    header = {"Authorization": "Bearer very-secret-key"}
    web.post(f"{url}{PATH}?top=1", files={"images": ("face.png", photo("red"))}, headers=header)
    web.post(f"{url}{PATH}?q=private", content=b"private", headers=header)
    records = [record for record in caplog.records if hasattr(record, "facts")]
    assert {"client", "id", "images", "model", "seconds", "status"} <= set(records[0].facts)
    lines = [JsonFormatter().format(record) for record in records]
    assert not any(s in line for line in lines for s in ("very-secret", "face.png", "private"))
    record = logging.makeLogRecord({"msg": "a\n", "facts": {"path": "/\x1b[31m\n"}})
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert json.loads(line)["path"] == "/\x1b[31m\n"
