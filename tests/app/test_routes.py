"""The app over HTTP: who may ask, what is refused, and what can be downloaded."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
import httpx

from mivhead.app.project import Project, opened
from mivhead.app.routes import Token, address_for_others, make_server
from mivhead.errors import NotAvailableError
from tests.app.test_learner import fill, learning, ready, wait
from tests.helpers.services import serving
from tests.service.conftest import photo


@pytest.fixture
def site(project: Project) -> Iterator[Any]:
    """A running app, and a client that came by its link."""
    token = Token(project)
    with (
        learning(project) as learner,
        serving(make_server(project, learner, token, 0)) as url,
        httpx.Client(base_url=url, follow_redirects=True, trust_env=False) as client,
    ):
        assert client.get("/", params={"token": token.value}).status_code == 200
        yield SimpleNamespace(
            project=project, learner=learner, url=url, token=token.value, client=client
        )


def change(site: Any, action: str, **more: Any) -> Any:
    return site.client.post("/api/change", json={"action": action, **more})


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
        assert "has expired" in answer.json()["error"]
    answer = httpx.get(f"{site.url}/?token=wrong", trust_env=False)
    assert answer.status_code == 401
    assert "This link has expired" in answer.text


def test_a_new_link_ends_the_old_one(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "cache"))
    old = Token(project)
    assert Token(project).value == old.value  # a page that is open reconnects
    (kept,) = (tmp_path / "cache/app").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert kept.parent.stat().st_mode & 0o077 == 0
    new = Token(project, renew=True)
    assert new.value != old.value
    assert not new.matches(old.value)


def test_the_link_of_a_project_is_not_known_to_who_sent_it(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.folder / ".miv-app/token").write_text("x" * 43)
    assert Token(project).value != "x" * 43
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "cache"))
    first = Token(project).value
    assert first != "x" * 43
    assert not [
        p for p in project.folder.rglob("*") if p.is_file() and first in p.read_text("latin-1")
    ]
    project.close()
    shutil.copytree(project.folder, tmp_path / "copy")
    with opened(tmp_path / "copy") as copy:
        assert Token(copy).value != first


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        (
            {"origin": "https://localhost", "host": "localhost"},
            403,
        ),  # another server of this machine
        ({"host": "evil.example"}, 421),
    ],
)
def test_other_web_pages_are_refused(site: Any, headers: dict[str, str], status: int) -> None:
    answer = site.client.post(
        "/api/change", json={"action": "add class", "name": "x"}, headers=headers
    )
    assert answer.status_code == status
    assert site.project.snapshot().classes == {}


def test_a_form_of_another_site_is_no_change(site: Any) -> None:
    body = json.dumps({"action": "add class", "name": "x"})
    answer = site.client.post("/api/change", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 415


def test_every_answer_is_secured(site: Any) -> None:
    for path in (
        "/",
        "/static/app.css",
        "/static/palette.css",
        "/api/state",
        "/nothing",
        "/thumb/x",
    ):
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


def test_everything_that_the_page_names_is_served(site: Any) -> None:
    named = re.findall(r'(?:href|src)="(/static/[^"]+)"', site.client.get("/").text)
    assert "/static/palette.css" in named
    for path in named:
        assert site.client.get(path).status_code == 200, path


def test_nothing_on_the_page_comes_from_elsewhere(site: Any) -> None:
    page = site.client.get("/").text
    assert "http" not in page
    for name in ("main", "api", "parts", "teach", "tryit", "dialogs", "strings"):
        code = site.client.get(f"/static/{name}.js").text
        assert "http://" not in code
        assert "https://" not in code
        assert "innerHTML" not in code


def test_changes_and_their_errors(site: Any) -> None:
    assert change(site, "add class", name="<img src=x onerror=alert(1)>").status_code == 400
    assert change(site, "add class", name="robin").status_code == 200
    assert "already" in change(site, "add class", name="ROBIN").json()["error"]
    answer = site.client.post(
        "/api/photos", params={"name": "a.png", "class": "robin"}, content=photo("red")
    )
    photo_id = answer.json()["id"]
    state = site.client.get("/api/state").json()
    assert state["classes"] == [{"name": "robin", "photos": [{"id": photo_id, "name": "a.png"}]}]
    assert state["undo"] == {"action": "add", "class": "robin", "count": 1}
    assert site.client.get(f"/thumb/{photo_id}").headers["content-type"] == "image/jpeg"
    assert site.client.get(f"/photo/{photo_id}").content[:2] == b"\xff\xd8"
    assert change(site, "delete", ids=[photo_id]).status_code == 200
    assert change(site, "undo").status_code == 200
    assert len(site.project.snapshot().classes["robin"]) == 1
    for wrong in ({"action": "fly"}, {"action": "delete", "ids": "x"}, {"action": 3}, {}):
        assert site.client.post("/api/change", json=wrong).status_code == 400
    assert change(site, "move", ids=[photo_id], to="wren").status_code == 400


def test_a_bad_photo_is_named(site: Any) -> None:
    change(site, "add class", name="robin")
    answer = site.client.post(
        "/api/photos", params={"name": "notes.jpg", "class": "robin"}, content=b"text"
    )
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("notes.jpg is not a JPEG")


def send(site: Any, length: int, body: bytes) -> socket.socket:
    """Start a request for a photo that claims to have this length."""
    cookie = "; ".join(f"{name}={value}" for name, value in site.client.cookies.items())
    address = urlsplit(site.url)
    connection = socket.create_connection((address.hostname, address.port))
    head = (
        f"POST /api/photos?name=a.png&class=robin HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Cookie: {cookie}\r\nContent-Length: {length}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_a_photo_that_is_too_large_is_refused_before_it_is_sent(site: Any) -> None:
    with send(site, 99_999_999, b"x") as connection:
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_body_cut_off_adds_nothing(site: Any) -> None:
    change(site, "add class", name="robin")
    send(site, 5000, photo("red")[:100]).close()
    assert site.client.get("/api/state").json()["classes"][0]["photos"] == []


def test_downloads(site: Any) -> None:
    assert site.client.get("/download/model").status_code == 400
    assert site.client.get("/download/passwords").status_code == 404
    fill(site.project)
    new = site.project.add_photo(photo("red", 50), "=new.png", None)
    wait(site.learner, lambda known: ready(known) and new.id in known.predictions)
    decision = str(site.learner.known.predictions[new.id].decision)
    model = site.client.get("/download/model")
    assert model.content == (site.project.folder / "model.miv").read_bytes()
    text = site.client.get("/download/csv").content.decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 10
    assert (rows[0]["file"], rows[0]["decision"]) == ("'=new.png", decision)
    archive = zipfile.ZipFile(io.BytesIO(site.client.get("/download/sorted").content))
    assert f"{decision}/=new.png" in archive.namelist()
    assert "red/0.png" in archive.namelist()
    assert len(archive.namelist()) == 10
    assert not list((site.project.folder / ".miv-app").glob("*.part"))
    page = site.client.get("/download/report")
    assert "attachment" in page.headers["content-disposition"]
    assert "of new photos like these should be named correctly" in page.text


def test_the_report_escapes_names(site: Any) -> None:
    fill(site.project)
    change(site, "rename class", name="red", to="a & b")
    page = site.client.get("/download/report").text
    assert "a &amp; b" in page
    assert "a & b" not in page


def test_a_port_in_use(site: Any, project: Project) -> None:
    port = urlsplit(site.url).port
    with pytest.raises(NotAvailableError, match="choose another with --port"):
        make_server(project, site.learner, Token(project), port)
    other = make_server(project, site.learner, Token(project))  # that of the last time is taken
    assert other.port != port
    other.close()


def test_classes_are_made_on_the_way_merged_and_undone_by_name(site: Any) -> None:
    project = site.project
    ids = [project.add_photo(photo("red", i), f"{i}.png", None).id for i in range(3)]
    answer = change(site, "move", ids=ids[:1], to=" other ", create=True)
    assert list(project.snapshot().classes) == ["other"]
    assert change(site, "move", ids=ids[1:2], to="Other", create=True).status_code == 200
    assert len(project.snapshot().classes["other"]) == 2  # the class that is there
    # A change is undone by its name only while it is the last one.
    refused = change(site, "undo", id=answer.json()["change"])
    assert refused.status_code == 400
    assert "There are later changes" in refused.json()["error"]
    change(site, "add class", name="robin")
    last = change(site, "rename class", name="other", to="ROBIN").json()["change"]
    assert {name: len(all_) for name, all_ in project.snapshot().classes.items()} == {"robin": 2}
    assert site.client.get("/api/state").json()["undo"]["action"] == "merge class"
    assert change(site, "undo", id=last).status_code == 200
    found = {name: len(all_) for name, all_ in project.snapshot().classes.items()}
    assert found == {"other": 2, "robin": 0}
    assert change(site, "redo").status_code == 200
    assert len(project.snapshot().classes["robin"]) == 2
    assert change(site, "move", ids=ids[2:], to="none of these", create=True).status_code == 400


def test_what_a_camera_sees_is_named_and_not_kept(site: Any) -> None:
    assert "no model yet" in site.client.post("/api/name", content=photo("red")).json()["error"]
    fill(site.project)
    wait(site.learner, ready)
    files = sorted(site.project.folder.rglob("*"))
    found = site.client.post("/api/name", content=photo("red", 7)).json()
    assert found["label"] == found["top"][0][0] == "red"
    assert site.client.post("/api/name", content=b"Hello").status_code == 400
    assert [each for each in sorted(site.project.folder.rglob("*")) if each not in files] == []


def test_settings_are_kept(site: Any) -> None:
    assert not site.client.get("/api/state").json()["unlabelled"]["on"]
    assert change(site, "settings", unlabelled=True).status_code == 200
    assert site.client.get("/api/state").json()["unlabelled"]["on"]
    path = site.project.folder / ".miv-app/settings.json"
    assert json.loads(path.read_text()) == {"unlabelled": True}


def test_the_example_is_for_an_empty_project(site: Any) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn carries the images of the example")
    assert change(site, "example").status_code == 200
    found = site.project.snapshot()
    counts = {name: len(photos) for name, photos in found.classes.items()}
    assert counts == {"zero": 6, "one": 6, "two": 6, "three": 6}
    assert len(found.new) == 12
    assert "for an empty project" in change(site, "example").json()["error"]
    assert change(site, "undo").status_code == 200
    assert site.project.snapshot().classes == {}


def test_a_phone_comes_in_by_the_link_only(project: Project) -> None:
    token = Token(project)
    with learning(project) as learner:
        server = make_server(project, learner, token, 0, "0.0.0.0")
        with serving(server) as url, httpx.Client(trust_env=False) as client:
            port = urlsplit(url).port
            local = f"http://127.0.0.1:{port}"
            other = address_for_others("0.0.0.0")
            phone = {"host": f"{other}:{port}"}
            assert client.get(local, headers=phone).status_code == 401
            assert client.get(local, headers={"host": f"evil.example:{port}"}).status_code == 421
            answer = client.get(local, headers=phone, params={"token": token.value})
            assert answer.status_code == 303
            state = client.get(f"{local}/api/state", headers=phone).json()
            assert state["phone"] == f"http://{other}:{port}/?token={token.value}"
            code = client.get(f"{local}/qr.svg", headers=phone)
            assert code.headers["content-type"] == "image/svg+xml"
            assert b"<svg" in code.content


def test_without_a_phone_there_is_no_code(site: Any) -> None:
    assert site.client.get("/qr.svg").status_code == 404
    assert site.client.get("/api/state").json()["phone"] is None
    assert site.client.post("/api/prepare/model").status_code == 404
