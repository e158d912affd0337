"""Label Studio's calls: health, setup, predictions of tasks, and where images may come from."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.services import FaultyServer, Reply, running, serving, toy
from tests.service.conftest import photo

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from mivhead.errors import InputError, NotAvailableError
from mivhead.service.application import create_app
from mivhead.service.label_studio import LabelStudio, read_config
from mivhead.service.models import ModelLoader
from mivhead.service.server import Server
from tests.helpers.web import web

CONFIG = """
<View>
  <Image name="img" value="$photo"/>
  <Choices name="colour" toName="img"><Choice value="red"/><Choice value="blue"/></Choices>
</View>
"""


@pytest.fixture
def studio() -> Iterator[tuple[FaultyServer, str]]:
    """A server that has images."""

    def answer(request: Any) -> Reply:
        if request.path == "/moved.png":
            return Reply(b"", 302, {"Location": "http://127.0.0.1:1/"})
        name = request.path.removeprefix("/data/upload/").removesuffix(".png")
        return Reply(photo(name)) if name in ("red", "green", "blue") else Reply(b"", 404)

    server = FaultyServer(answer)
    with running(server) as address:
        yield server, address


@pytest.fixture
def backend(studio: tuple[FaultyServer, str], model_file: Path, monkeypatch: Any) -> Iterator[str]:
    monkeypatch.setenv("STUDIO_TOKEN", "token-123")
    app = create_app(
        [model_file],
        load=ModelLoader(backbone=toy()),
        label_studio=LabelStudio(studio[1], "STUDIO_TOKEN"),
    )
    with serving(Server(app, port=0)) as address:
        yield address


def task(address: str) -> dict[str, Any]:
    return {"id": 1, "data": {"photo": address}}


def test_tasks_are_predicted(backend: str, studio: tuple[FaultyServer, str]) -> None:
    assert web.get(f"{backend}/health").json()["status"] == "UP"
    setup = {"project": "1.2", "schema": CONFIG, "hostname": "http://evil", "access_token": "x"}
    version = web.post(f"{backend}/setup", json=setup).json()["model_version"]
    data = "data:image/png;base64," + base64.b64encode(photo("blue", 3)).decode()
    tasks = [
        task("/data/upload/red.png"),
        task(f"{studio[1]}/data/upload/blue.png"),
        task(data),
        task("/data/upload/green.png"),  # not a choice of this project
    ]
    for path in ("/predict", "/label-studio/colours/predict"):
        document = {"tasks": tasks, "label_config": CONFIG, "project": "1.2"}
        answer = web.post(backend + path, json=document).json()
        assert answer["model_version"] == version
        found = [each["result"] for each in answer["results"]]
        assert [[r["value"]["choices"] for r in each] for each in found] == [
            [["red"]],
            [["blue"]],
            [["blue"]],
            [],
        ]
        first = found[0][0]
        assert (first["from_name"], first["to_name"], first["type"]) == ("colour", "img", "choices")
        assert 0.5 < first["score"] <= 1
    assert {each.headers["Authorization"] for each in studio[0].requests} == {"Token token-123"}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:1/data/upload/red.png", "only images of this server are fetched"),
        ("https://example.org/red.png", "only images of this server are fetched"),
        ("//example.org/red.png", "only images of this server are fetched"),
        ("file:///etc/passwd", "only images of this server are fetched"),
        ("http://[", "only images of this server are fetched"),
        ("/absent.png", "answered 404 for /absent.png"),
        ("/moved.png", "answered 302 for /moved.png"),
        ("data:image/png;base64,?", "not base64"),
        ("data:,", "is empty"),
    ],
)
def test_nothing_else_is_fetched(backend: str, address: str, message: str) -> None:
    document = {"tasks": [task(address)], "label_config": CONFIG}
    response = web.post(f"{backend}/predict", json=document)
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "Send {"),
        ({"tasks": [3], "label_config": CONFIG}, "Send {"),
        ({"tasks": [{"data": {"image": "x"}}], "label_config": CONFIG}, "no image in its data"),
        ({"tasks": [], "label_config": "<View/>"}, "no <Choices> for an <Image>"),
        ({"tasks": [], "label_config": "<View"}, "not XML"),
        ({"tasks": []}, "must be XML"),
        ({"tasks": [], "label_config": "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"}, "must be XML"),
    ],
)
def test_refusals(backend: str, document: Any, message: str) -> None:
    response = web.post(f"{backend}/predict", json=document)
    assert response.status_code == 400
    assert message in response.json()["error"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
PHOTO = "data:image/png;base64," + base64.b64encode(photo("blue", 3)).decode()
TASK = st.fixed_dictionaries({"data": st.fixed_dictionaries({"photo": JSON | st.just(PHOTO)})})
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=12).map(lambda text: f'"{text}"')
CHOSEN = st.builds(CONFIG.replace, st.just('"colour"'), TEXT)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tasks": st.lists(TASK | JSON, max_size=3) | JSON,
            "label_config": CHOSEN | JSON,
            "schema": CHOSEN | JSON,
            "project": JSON,
        },
    )
    | JSON
)
def test_no_message_is_more_than_a_bad_request(backend: str, document: Any) -> None:
    body = json.dumps(document).encode()
    for path in ("/predict", "/setup", "/label-studio/colours/predict"):
        assert web.post(f"{backend}{path}", content=body).status_code in (200, 400, 415), document


def test_interfaces_that_are_deep_or_large(backend: str) -> None:
    deep = "<View>" * 100_000 + "</View>" * 100_000
    wide = CONFIG.replace("</Choices>", '<Choice value="x"/>' * 50_000 + "</Choices>")
    for config, status in ((deep, 400), (wide, 200)):
        document = {"tasks": [task(PHOTO)], "label_config": config}
        assert web.post(f"{backend}/predict", json=document).status_code == status


def test_without_a_server_only_data_urls(url: str) -> None:
    document = {"tasks": [task("/data/upload/red.png")], "label_config": CONFIG}
    response = web.post(f"{url}/predict", json=document)
    assert response.status_code == 400
    assert "--label-studio URL" in response.json()["error"]


def test_addresses_and_configurations() -> None:
    with pytest.raises(InputError, match="must be a URL"):
        LabelStudio("localhost:8080")
    with pytest.raises(NotAvailableError, match="NO_TOKEN"):
        LabelStudio("http://localhost:8080", "NO_TOKEN")
    assert read_config(CONFIG).labels == {"red", "blue"}
