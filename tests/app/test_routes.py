"""The app over HTTP: who may ask, what is refused, and what can be downloaded."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mivhead.app.project import NEW, Project
from mivhead.app.routes import address_for_others, make_server
from mivhead.diagnostics.suggestion import suggest
from mivhead.errors import NotAvailableError
from tests.app.test_learner import fill, learning, ready, wait
from tests.conftest import COLOURS
from tests.helpers.services import serving
from tests.service.conftest import photo


@pytest.fixture
def site(project: Project) -> Iterator[Any]:
    """A running app, and a client that came by its link."""
    token = "secret"
    with (
        learning(project) as learner,
        serving(make_server(project, learner, token, 0)) as url,
        httpx.Client(base_url=url, follow_redirects=True, trust_env=False) as client,
    ):
        assert client.get("/", params={"token": token}).status_code == 200
        yield SimpleNamespace(project=project, learner=learner, url=url, token=token, client=client)


def change(site: Any, action: str, **more: Any) -> Any:
    return site.client.post("/api/change", json={"action": action, **more})


# Who may ask.


def test_the_link_opens_the_page_and_disappears(site: Any) -> None:
    answer = site.client.get("/", params={"token": site.token})
    assert "token" not in str(answer.url)
    assert '<div id="app">' in answer.text
    cookie = answer.history[0].headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()


@pytest.mark.parametrize("path", ["/api/state", "/static/main.js", "/thumb/x", "/download/model"])
def test_without_the_token_nothing_is_told(site: Any, path: str) -> None:
    for headers in ({}, {"cookie": f"miv-app-{urlsplit(site.url).port}=wrong"}):
        answer = httpx.get(site.url + path, headers=headers, trust_env=False)
        assert answer.status_code == 401
        assert answer.json()["error"]
    answer = httpx.get(f"{site.url}/?token=wrong", trust_env=False)
    assert answer.status_code == 401
    assert "This link has expired" in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://localhost", "host": "localhost"}, 403),  # another server
        ({"host": "evil.example"}, 421),
        ({"content-type": "text/plain"}, 415),  # a form of another site
    ],
)
def test_other_web_pages_are_refused(site: Any, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"action": "add class", "name": "x"})
    headers = {"content-type": "application/json", **headers}
    answer = site.client.post("/api/change", content=body, headers=headers)
    assert answer.status_code == status
    assert site.project.snapshot.classes == {}


def test_a_phone_comes_in_by_the_link_only(project: Project) -> None:
    token = "secret"
    with learning(project) as learner:
        server = make_server(project, learner, token, 0, "0.0.0.0")
        with serving(server) as url, httpx.Client(trust_env=False) as client:
            port = urlsplit(url).port
            local = f"http://127.0.0.1:{port}"
            phone = {"host": f"{address_for_others('0.0.0.0')}:{port}"}
            assert client.get(local, headers=phone).status_code == 401
            assert client.get(local, headers={"host": f"evil.example:{port}"}).status_code == 421
            answer = client.get(local, headers=phone, params={"token": token})
            assert answer.status_code == 303
            assert client.get(f"{local}/api/state", headers=phone).json()["shared"]


# The page.


def test_every_answer_is_secured(site: Any) -> None:
    for path in ("/", "/static/app.css", "/api/state", "/nothing", "/thumb/x"):
        headers = site.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["../server.py", "..%2fserver.py", "vendor", ".hidden", "/etc/passwd", "strings.py"]
)
def test_only_the_page_is_served(site: Any, path: str) -> None:
    assert site.client.get(f"/static/{path}").status_code == 404


def test_nothing_on_the_page_comes_from_elsewhere(site: Any) -> None:
    page = site.client.get("/").text
    assert "http" not in page
    named = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert "/static/palette.css" in named
    static = resources.files("mivhead.app") / "static"
    for path in [*named, *(f"/static/{f.name}" for f in static.iterdir() if ".js" in f.name)]:
        answer = site.client.get(path)
        assert answer.status_code == 200, path
        if path.endswith(".js"):
            assert not re.search("https?://|innerHTML", answer.text)
    vendored = hashlib.sha256((static / "vendor/htm-preact.js").read_bytes()).hexdigest()
    assert vendored in (static / "vendor/LICENSES.txt").read_text("utf-8")


# Changes.


def test_changes_and_their_errors(site: Any) -> None:
    assert change(site, "add class", name="<img src=x onerror=alert(1)>").status_code == 400
    assert change(site, "add class", name="robin").status_code == 200
    assert change(site, "add class", name="ROBIN").status_code == 400
    answer = change(site, "add class", name="robim")  # the page asks
    assert (answer.status_code, answer.json()["error"]) == (
        409,
        "'robim' is nearly the class 'robin'.",
    )
    assert change(site, "add class", name="robim", sure=True).status_code == 200
    assert change(site, "rename class", name="robim", to="rabim").status_code == 200
    assert change(site, "rename class", name="rabim", to="rubin").status_code == 409
    assert change(site, "delete class", name="rabim").status_code == 200
    query = {"name": "a.png", "class": "robin"}
    photo_id = site.client.post("/api/photos", params=query, content=photo("red")).json()["id"]
    state = site.client.get("/api/state").json()
    assert state["classes"] == [{"name": "robin", "photos": [{"id": photo_id, "name": "a.png"}]}]
    assert state["undo"] == {"action": "add", "class": "robin", "count": 1}
    assert site.client.get(f"/thumb/{photo_id}").headers["content-type"] == "image/jpeg"
    assert site.client.get(f"/photo/{photo_id}").content[:2] == b"\xff\xd8"
    assert change(site, "delete", ids=[photo_id]).status_code == 200
    assert change(site, "undo").status_code == 200
    assert len(site.project.snapshot.classes["robin"]) == 1
    for wrong in ({"action": "fly"}, {"action": "delete", "ids": "x"}, {"action": 3}, {}):
        assert site.client.post("/api/change", json=wrong).status_code == 400
    assert change(site, "move", ids=[photo_id], to="wren").status_code == 400
    answer = site.client.post("/api/photos", params={"name": "notes.jpg"}, content=b"text")
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("notes.jpg")


def test_classes_are_made_on_the_way_and_merged(site: Any) -> None:
    project = site.project
    ids = [project.add_photo(photo("red", i), f"{i}.png", None).id for i in range(3)]
    assert change(site, "move", ids=ids[:1], to=" other ", create=True).status_code == 200
    assert list(project.snapshot.classes) == ["other"]
    assert change(site, "move", ids=ids[1:2], to="Other", create=True).status_code == 200
    assert len(project.snapshot.classes["other"]) == 2  # the class that is there
    change(site, "add class", name="robin")
    assert change(site, "rename class", name="other", to="ROBIN").status_code == 200
    assert {name: len(all_) for name, all_ in project.snapshot.classes.items()} == {"robin": 2}
    assert site.client.get("/api/state").json()["undo"]["action"] == "merge class"
    assert change(site, "undo").status_code == 200
    counts = {name: len(all_) for name, all_ in project.snapshot.classes.items()}
    assert counts == {"other": 2, "robin": 0}
    assert change(site, "redo").status_code == 200
    assert len(project.snapshot.classes["robin"]) == 2
    assert change(site, "move", ids=ids[2:], to="none of these", create=True).status_code == 400


def test_the_example_is_for_an_empty_project(site: Any) -> None:
    assert change(site, "example").status_code == 200
    snapshot = site.project.snapshot
    counts = {name: len(photos) for name, photos in snapshot.classes.items()}
    assert counts == {"zero": 6, "one": 6, "two": 6, "three": 6}
    assert len(snapshot.new) == 12
    assert change(site, "example").status_code == 400
    assert change(site, "undo").status_code == 200
    assert site.project.snapshot.classes == {}


def test_what_a_camera_sees_is_named_and_not_kept(site: Any) -> None:
    assert site.client.post("/api/name", content=photo("red")).status_code == 400  # no model
    fill(site.project)
    wait(site.learner, ready)
    files = sorted(site.project.folder.rglob("*"))
    named = site.client.post("/api/name", content=photo("red", 7)).json()
    assert named["closest"] == named["top"][0]["label"] == "red"
    assert site.client.post("/api/name", content=b"Hello").status_code == 400
    assert sorted(site.project.folder.rglob("*")) == files


def test_downloads(site: Any) -> None:
    assert site.client.get("/download/model").status_code == 400
    assert site.client.get("/download/passwords").status_code == 404
    fill(site.project)
    (site.project.folder / "red/x\\..\\y.png").write_bytes(photo("red", 51))  # a stranger's
    (site.project.folder / "red").rename(site.project.folder / "C:\\red")
    site.project.rescan()
    new = site.project.add_photo(photo("red", 50), "=new.png", None)
    wait(site.learner, lambda state: ready(state) and new.id in state.predictions)
    decision = str(site.learner.state.predictions[new.id].decision)
    model = site.client.get("/download/model")
    assert "attachment" in model.headers["content-disposition"]
    assert model.content == (site.project.folder / "model.miv").read_bytes()
    text = site.client.get("/download/csv").content.decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 11
    assert rows[0]["file"].startswith("'=")  # not a formula
    assert rows[0]["decision"] == decision
    assert list(rows[0]) == ["file", "decision", "closest", "probability", "unknown", "kind"]
    content = site.client.get("/download/sorted").content
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert {"C__red/0.png", "C__red/x_.._y.png"} < set(names)
    assert f"{decision}/=new.png".replace("C:\\", "C__") in names
    assert len(names) == 11


def test_fewer_mistakes_or_more_names(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(project)
    for i in range(6):
        project.add_photo(photo(list(COLOURS)[i % 3], 50 + i), f"{i}.png", None)
    token = "secret"
    with (
        learning(project, recipe="mivhead") as learner,
        serving(make_server(project, learner, token, 0)) as url,
        httpx.Client(base_url=url, follow_redirects=True, trust_env=False) as client,
    ):
        client.get("/", params={"token": token})
        state = wait(learner, lambda state: ready(state) and len(state.predictions) == 6)
        # All are red with 90%.
        doubtful = dict.fromkeys(COLOURS, 0.05) | {"red": 0.9}
        found = {
            key: replace(p, label="red", probability=0.9, probabilities=doubtful, unknown=-9.0)
            for key, p in state.predictions.items()
        }
        learner._tell(predictions=found)
        monkeypatch.setattr(type(state.model), "read_parts", None)  # no photo is read again

        def decisions(max_errors: float) -> set[str]:
            before = client.get("/api/state").json()
            sent = {"action": "allow errors", "max_errors": max_errors}
            assert client.post("/api/change", json=sent).status_code == 200
            after = client.get("/api/state", params={"since": before["version"]}).json()
            assert after["errors"]["steps"][after["errors"]["step"]] == max_errors
            rows = csv.DictReader(client.get("/download/csv").text.splitlines())
            assert [row["decision"] for row in rows][:6] == [
                after["predictions"][photo.id]["decision"] for photo in project.snapshot.new
            ]
            names = after["estimate"]["names"]
            assert [sum(pair) for pair in names] == sorted(map(sum, names))  # more and more
            return {found["decision"] for found in after["predictions"].values()}

        assert decisions(0.02) == {"unsure"}
        assert decisions(0.3) == {"red"}
        assert client.post("/api/name", content=photo("red", 7)).json()["decision"] == "red"
        sent = {"action": "allow errors", "max_errors": 0.5}
        assert client.post("/api/change", json=sent).status_code == 400
    project.close()
    with closing(Project(project.folder)) as opened:
        assert opened.max_errors == 0.3
    for damaged in ('{"max_errors": 0.31}', "[", "[]", '{"max_errors": "x"}'):
        (project.folder / ".miv-app/settings.json").write_text(damaged)
        with closing(Project(project.folder)) as opened:
            assert opened.max_errors == 0.1


def test_a_port_in_use(site: Any, project: Project) -> None:
    with pytest.raises(NotAvailableError, match="--port"):
        make_server(project, site.learner, "token", urlsplit(site.url).port or 0)


def test_what_to_label_next(site: Any) -> None:
    assert site.client.get("/api/suggestions").json() == {}
    fill(site.project)
    for i in range(12):
        site.project.add_photo(photo(list(COLOURS)[i % 3], 50 + i), f"{i}.png", None)
    state = wait(site.learner, lambda state: ready(state) and len(state.predictions) == 12)
    suggested = site.client.get("/api/suggestions").json()
    # The order and the reasons of `miv suggest model.miv .miv-app/new`.
    expected = suggest(site.project.folder / NEW, 10, model=state.model)
    name_of = {photo.id: photo.name for photo in site.project.snapshot.new}
    assert [(name_of[key], reason) for key, reason in suggested.items()] == [
        (Path(image.id).name, image.reason) for image in expected
    ]


def test_a_dropped_folder_of_classes_is_one_step(site: Any) -> None:
    for name in ("red", "blue"):
        assert change(site, "add class", name=name, batch="drop").status_code == 200
        for i in range(2):
            query = {"name": f"{i}.png", "class": name, "batch": "drop"}
            site.client.post("/api/photos", params=query, content=photo(name, i))
    step = {"action": "add", "class": "", "count": 4}
    assert site.client.get("/api/state").json()["undo"] == step
    assert change(site, "undo").status_code == 200
    assert site.project.snapshot.classes == {}
    assert site.client.get("/api/state").json()["redo"] == step
