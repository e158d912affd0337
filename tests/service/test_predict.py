"""`/v1/predict` and `/v1/models`: every form of a request gets what the library predicts."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.backbones.wire import encode_features
from mivhead.client import Client
from tests.helpers.services import serving, toy
from tests.helpers.tiny_backbone import TinyBackbone
from tests.service.conftest import photo, train

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from mivhead.errors import InputError
from mivhead.service.application import create_app
from mivhead.service.models import ModelLoader, name_files
from mivhead.service.protection import Limits
from mivhead.service.server import Server
from tests.helpers.web import web

PATH = "/v1/predict"


def expected(model: FewShotClassifier, *files: bytes) -> list[dict[Any, float]]:
    images = [Image.open(io.BytesIO(file)) for file in files]
    return [each.probabilities for each in model.classify(images)]


def found(response: Any) -> list[dict[Any, float]]:
    assert response.status_code == 200, response.text
    predictions = response.json()["predictions"]
    return [{t["label"]: t["probability"] for t in each["top"]} for each in predictions]


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
@pytest.mark.parametrize("count", [1, 3])
def test_images_in_every_form(url: str, colours: FewShotClassifier, form: str, count: int) -> None:
    files = [photo(colour, 50) for colour in ("blue", "red", "green")[:count]]
    response = web.post(url + PATH, **FORMS[form](files))
    for ours, theirs in zip(found(response), expected(colours, *files), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert [each["label"] for each in response.json()["predictions"]] == ["blue", "red", "green"][
        :count
    ]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_one_image_as_the_body(url: str, colours: FewShotClassifier, kind: str) -> None:
    data = photo("green", 7, kind)
    for content_type in (f"image/{kind.lower()}", "application/octet-stream"):
        response = web.post(url + PATH, content=data, headers={"Content-Type": content_type})
        assert found(response) == expected(colours, data)


def test_a_photo_of_any_size_is_resized_as_the_backbone_does(
    url: str, colours: FewShotClassifier
) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (300, 211, 3), np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    response = web.post(url + PATH, files={"images": file.getvalue()})
    assert response.status_code == 200 or response.json()["error"]
    assert found(response) == expected(colours, file.getvalue())


def test_features_as_json_and_as_safetensors(url: str, colours: FewShotClassifier) -> None:
    pictures = [Image.open(io.BytesIO(photo(c, 9))) for c in ("red", "blue")]
    features = toy().extract(pictures)
    probabilities = [each.probabilities for each in colours.classify(features)]
    named = {name: tensor.tolist() for name, tensor in features.tensors.items()}
    response = web.post(url + PATH, json={"features": named})
    assert found(response) == probabilities
    kind = {"Content-Type": "application/x-safetensors"}
    response = web.post(url + PATH, content=encode_features(features), headers=kind)
    assert found(response) == probabilities


def test_vectors(tmp_path: Path) -> None:
    vectors, labels = np.eye(4, 6, dtype=np.float32), ["a", "a", "b", "b"]
    from mivhead import MIVClassifier, save

    classifier = MIVClassifier(random_state=0).fit(vectors, labels)
    save(classifier, tmp_path / "vectors.miv")
    with serving(Server(create_app([tmp_path / "vectors.miv"]), port=0)) as address:
        response = web.post(address + PATH, json={"features": vectors.tolist()})
        predicted = [each["label"] for each in response.json()["predictions"]]
        assert predicted == labels
        response = web.post(address + PATH, files={"images": photo()})
        assert response.status_code == 400
        assert "trained on features of unknown origin" in response.json()["error"]
        response = web.post(address + PATH, json={"features": [[1.0, float(2**70)]]})
        assert response.status_code == 400


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
    results = response.json()["predictions"]
    assert [each["file"] for each in results] == [name for _, (name, _) in files]
    assert [each.get("label") for each in results] == ["red", None, None, None, "blue"]
    assert results[1]["error"].startswith("text.jpg is not a JPEG")
    assert results[2]["error"] == "empty.png is empty (0 bytes)."
    assert results[3]["error"].startswith("cut.png is corrupted")
    response = web.post(url + PATH, files=files[1:3])
    assert response.status_code == 400
    assert response.json()["error"].startswith("text.jpg is not a JPEG")


def test_explanations(url: str, colours: FewShotClassifier) -> None:
    files = [("images", ("a.png", photo("blue", 4))), ("images", ("b.txt", b"text"))]
    response = web.post(f"{url}/v1/explain", files=files)
    assert response.status_code == 200, response.text
    found, bad = response.json()["explanations"]
    expected = colours.explain(Image.open(io.BytesIO(photo("blue", 4)))).as_json()
    assert (found["file"], found["label"]) == ("a.png", "blue")
    assert found["runner_up"]["label"] == expected["runner_up"]["label"]
    assert [each["name"] for each in found["shots"]] == [s["name"] for s in expected["shots"]]
    assert bad["error"].startswith("b.txt is not a JPEG")
    response = web.post(f"{url}/v1/explain", json={"features": [[1.0]]})
    assert response.status_code == 400


def test_a_class_prior(url: str, colours: FewShotClassifier) -> None:
    red = photo("red", 40)
    picture = Image.open(io.BytesIO(red))
    frequencies = {"red": 0.0, "green": 1.0, "blue": 2.5}
    (wanted,) = colours.classify([picture], class_prior=frequencies)
    assert wanted.label != "red"
    text_form = "red=0,green=1,blue=2.5"
    answers = [
        web.post(f"{url}{PATH}?prior={text_form}", files={"images": red}),
        web.post(url + PATH, files={"images": red}, data={"prior": text_form}),
        web.post(url + PATH, json={"images": [text(red), text(b"damaged")], "prior": frequencies}),
    ]
    for each in answers:
        first = each.json()["predictions"][0]
        assert first["label"] == wanted.label
        assert first["decision"] == wanted.decision
        top = {t["label"]: t["probability"] for t in first["top"]}
        assert top == pytest.approx(wanted.probabilities, abs=1e-4)
    plain = web.post(f"{url}{PATH}?prior=uniform", files={"images": red})
    assert found(plain) == [pytest.approx(expected(colours, red)[0], abs=1e-4)]
    with Client(url) as client:
        assert client.predict(red, class_prior=frequencies)[0].label == wanted.label


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ("often", "'often'"),
        ("red=1,green=1,blue=1,pink=1", "no class 'pink'"),
        ("red=1", "no frequency for"),
        ("red=-1,green=1,blue=1", "from 0 to 1e+100, got -1.0 for red"),
        ("red=nan,green=1,blue=1", "1e+100, got nan for red"),
        ("red=0,green=0,blue=0", "only zeros"),
        ("red=much,green=1,blue=1", "not a list of frequencies"),
        ({"red": "1", "green": 1, "blue": 1}, "1e+100, got '1' for red"),
        ({"red": True, "green": 1, "blue": 1}, "1e+100, got True for red"),
        (3, "prior must be a string or an object"),
    ],
)
def test_a_prior_that_cannot_be_used(url: str, prior: Any, message: str) -> None:
    answer = web.post(url + PATH, json={"images": [text(photo("red"))], "prior": prior})
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_the_most_probable_classes_only(url: str) -> None:
    for request in (
        {"url": f"{url}{PATH}?top=2", "files": {"images": photo()}},
        {"url": url + PATH, "files": {"images": photo()}, "data": {"top": "2"}},
        {"url": url + PATH, "json": {"images": [text(photo())], "top": 2}},
    ):
        (prediction,) = web.post(**request).json()["predictions"]
        top = [each["probability"] for each in prediction["top"]]
        assert len(top) == 2
        assert top[0] == prediction["probability"] >= top[1]


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        ({"files": {"photo": b"x"}}, 400, "The field 'photo' holds a file: name it `images`"),
        ({"files": [("images", b"x")] * 9}, 400, "Too many files"),
        ({"json": {"images": ["x"] * 9}}, 400, "Image 0 is not base64"),
        ({"json": {"images": [text(b"x")] * 9}}, 400, "at most 8 images, got 9"),
        ({"json": {"images": []}}, 400, "There are no images"),
        ({"json": {"images": "abc"}}, 400, "`images` must be a list"),
        ({"json": {"images": [3]}}, 400, "Image 0 must be a string of base64"),
        ({"json": {"images": [{"data": "x", "y": 1}]}}, 400, "Image 0 must be"),
        ({"json": {}}, 400, "Send either `images` or `features`"),
        ({"json": []}, 400, "must be a JSON object"),
        ({"json": {"images": [text(photo())], "to": 3}}, 400, "'to' is unknown; the options are"),
        ({"json": {"images": [text(photo())], "top": 0}}, 400, "top must be an integer from 1"),
        ({"json": {"images": [text(photo())], "top": True}}, 400, "top must be an integer from 1"),
        ({"json": {"images": [text(photo())], "model": 3}}, 400, "model must be a string"),
        ({"json": {"images": [text(photo())], "model": "x"}}, 404, "There is no model 'x'"),
        ({"json": {"features": [[1, 2], [3]]}}, 400, "must hold numbers in lists of equal"),
        ({"json": {"features": {"block0.map": "x"}}}, 400, "`block0.map` must hold numbers"),
        ({"json": {"features": {"block9.map": [[1.0]]}}}, 400, "block9.map"),
        ({"json": {"features": [1, 2]}}, 400, "`features` must be a list of vectors"),
        ({"content": b"[" * 50_000, "headers": {"Content-Type": "application/json"}}, 400, "JSON"),
        ({"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415, "is not supported"),
        ({"content": b"x"}, 415, "is not supported"),
        ({"content": b"", "headers": {"Content-Type": "image/png"}}, 400, "is empty"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "The form"),
        (
            {"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=a"}},
            400,
            "The form",
        ),
        (
            {"content": b"x" * 20, "headers": {"Content-Type": "application/x-safetensors"}},
            400,
            "not readable",
        ),
        ({"content": b"x" * 200_001}, 413, "at most 200,000 bytes"),
    ],
)
def test_refusals(url: str, request_: Any, code: int, message: str) -> None:
    response = web.post(url + PATH, **request_)
    assert response.status_code == code, response.text
    assert message in response.json()["error"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=300),
    st.sampled_from(
        [
            "application/json",
            "multipart/form-data; boundary=x",
            "image/png",
            "application/x-safetensors",
        ]
    ),
)
def test_any_body_gets_an_answer(url: str, body: bytes, kind: str) -> None:
    response = web.post(url + PATH, content=body, headers={"Content-Type": kind})
    assert response.status_code == 400
    assert response.json()["error"]


def test_models_and_health(url: str, model_file: Path) -> None:
    (model,) = web.get(f"{url}/v1/models").json()["models"]
    assert model == web.get(f"{url}/v1/models/colours").json()
    assert model["classes"] == ["blue", "green", "red"]
    assert model["shots"] == {"blue": 3, "green": 3, "red": 3}
    assert (model["backbone"], model["image_size"], model["method"]) == ("toy", 16, "miv")
    assert (model["file"], model["problem"]) == ("colours.miv", None)
    assert str(model_file.parent) not in json.dumps(model)
    assert web.get(f"{url}/v1/models/birds").status_code == 404
    assert web.get(f"{url}/healthz").json() == {"status": "ok"}
    assert web.get(f"{url}/readyz").json() == {"status": "ready", "models": ["colours"]}


def test_answers_are_sent_at_once(url: str) -> None:
    """Without TCP_NODELAY, an answer on an open connection waits 40 ms for an acknowledgement."""
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        web.get(f"{url}/healthz")
        seconds.append(time.perf_counter() - start)
    assert min(seconds[3:]) < 0.03


def test_several_models_by_name(tmp_path: Path, model_file: Path) -> None:
    other = tmp_path / "two.miv"
    train(("red", "blue"), seed=3).save(other)
    load = ModelLoader(backbone=toy())
    app = create_app([model_file, f"pair={other}"], load=load)
    with serving(Server(app, port=0)) as address:
        names = [each["name"] for each in web.get(f"{address}/v1/models").json()["models"]]
        assert names == ["colours", "pair"]
        for name, classes in (("colours", 3), ("pair", 2)):
            response = web.post(f"{address}{PATH}?model={name}", files={"images": photo("red")})
            assert response.json()["model"] == name
            assert len(found(response)[0]) == classes
        response = web.post(address + PATH, files={"images": photo("red")})
        assert response.status_code == 400
        assert response.json()["error"].endswith("the models are colours, pair.")


def test_names_of_models() -> None:
    with pytest.raises(InputError, match="Two models would have the name 'a'"):
        name_files(["a.miv", "b/a.miv"])
    with pytest.raises(InputError, match="cannot be served as 'a b'"):
        name_files(["a b.miv"])
    with pytest.raises(InputError, match="nothing to serve"):
        create_app([])
    with pytest.raises(InputError, match=r"no\.miv"):
        create_app(["no.miv"])


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Counting(TinyBackbone):
    """Notes the sizes of batches; the first one waits for a signal."""

    def __init__(self) -> None:
        super().__init__("toy", token=True)
        self.batches: list[int] = []
        self.go = threading.Event()

    def extract(self, images: Any) -> Any:
        self.batches.append(len(images))
        if len(self.batches) == 2:  # after the trial at the start
            assert self.go.wait(30)
        return super().extract(images)


def test_requests_of_many_clients_share_batches(
    model_file: Path, colours: FewShotClassifier
) -> None:
    backbone = Counting()
    app = create_app([model_file], load=ModelLoader(backbone=backbone))
    files = [photo("green", i) for i in range(9)]
    answers: dict[int, Any] = {}
    with serving(Server(app, port=0)) as address:

        def ask(i: int) -> None:
            answers[i] = web.post(address + PATH, files={"images": files[i]})

        clients = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
        clients[0].start()
        until(lambda: len(backbone.batches) == 2)
        for client in clients[1:]:
            client.start()
        until(lambda: "miv_queue_images 9.0" in web.get(f"{address}/metrics").text)
        backbone.go.set()
        for client in clients:
            client.join()
        counted = 'miv_requests_total{path="/v1/predict",status="200"} 9.0'
        until(lambda: counted in web.get(f"{address}/metrics").text)
        metrics = web.get(f"{address}/metrics").text
    assert sum(backbone.batches) == 10
    assert max(backbone.batches) > 1
    for i, probabilities in enumerate(expected(colours, *files)):
        assert found(answers[i])[0] == pytest.approx(probabilities, abs=1e-6)
    assert 'miv_predictions_total{decision="green",model="colours"} 9.0' in metrics
    assert f"miv_batch_images_count {len(backbone.batches) - 1}.0" in metrics
    assert "miv_queue_images 0.0" in metrics


class Broken(TinyBackbone):
    def __init__(self) -> None:
        super().__init__("toy", token=True)
        self.calls = 0

    def extract(self, images: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("secret path of the server")
        return super().extract(images)


def test_failures_stay_inside(model_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app([model_file], load=ModelLoader(backbone=Broken()), limits=Limits())
    with serving(Server(app, port=0)) as address:
        for _ in range(2):
            response = web.post(address + PATH, files={"images": photo()})
            assert response.status_code == 500
            assert response.json() == {"error": "The server failed; see its log."}
        assert web.get(f"{address}/healthz").status_code == 200
    assert "secret path of the server" in caplog.text
