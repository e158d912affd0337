"""Models that change: new files are loaded, bad ones are not, and clients with a key add shots."""

from __future__ import annotations

import io
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mivhead
from tests.helpers.services import serving, toy
from tests.service.conftest import photo, train

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from mivhead.errors import InputError
from mivhead.service.application import create_app
from mivhead.service.models import ModelLoader, Models
from mivhead.service.protection import ApiKeys
from mivhead.service.server import Server
from tests.helpers.web import web

KEY = {"Authorization": "Bearer correct-horse"}


@pytest.fixture
def file(tmp_path: Path, model_file: Path) -> Path:
    path = tmp_path / "colours.miv"
    shutil.copy(model_file, path)
    return path


# New files.


def test_a_changed_file_is_loaded_and_a_bad_one_is_not(file: Path) -> None:
    results: list[tuple[str, str]] = []
    load = ModelLoader(backbone=toy())
    models = Models([file], load=load, on_reload=lambda *each: results.append(each))
    before = models.get()
    assert models.reload_changed() == []
    good = file.read_bytes()
    for bad in (b"", b"not a model", good[: len(good) // 2]):
        file.write_bytes(bad)
        assert models.reload_changed() == []
        assert models.get() is before
        assert "colours.miv" in models.describe("colours")["problem"]
        assert models.reload_changed() == []  # it is not tried twice
    file.unlink()
    assert models.reload_changed() == []
    assert "No such file" in models.describe("colours")["problem"]
    assert models.get() is before
    train(("red", "blue"), seed=5).save(file)
    assert models.reload_changed() == ["colours"]
    assert models.get().facts["classes"] == ["blue", "red"]
    assert models.get().version != before.version
    assert models.describe("colours")["problem"] is None
    assert results == [("colours", "failed")] * 4 + [("colours", "ok")]


def test_a_file_that_comes_back_is_no_problem(file: Path) -> None:
    models = Models([file], load=ModelLoader(backbone=toy()))
    hidden = file.with_name("hidden")
    file.rename(hidden)
    models.reload_changed()
    assert "No such file" in models.describe("colours")["problem"]
    hidden.rename(file)
    assert models.reload_changed() == []
    assert models.describe("colours")["problem"] is None


def test_a_model_that_the_service_changed_is_not_read_again(file: Path) -> None:
    models = Models([file], load=ModelLoader(backbone=toy()))
    train(("red", "blue"), seed=5).save(file)
    assert models.reload_changed() == ["colours"]
    models.change("colours", lambda model: model.rename("red", "crimson"))
    assert models.reload_changed() == []
    assert models.get().facts["classes"] == ["blue", "crimson"]


def test_a_model_of_another_backbone_does_not_replace_a_good_one(file: Path) -> None:
    models = Models([file], load=ModelLoader(backbone=toy()))
    before = models.get()
    images = [Image.open(io.BytesIO(photo(name))) for name in ("red", "blue")]
    mivhead.FewShotClassifier(threshold=0, method="ncc").fit(images, ["a", "b"]).save(file)
    assert models.reload_changed() == []
    assert models.get() is before
    assert "efficientnet_lite0" in models.describe("colours")["problem"]


def test_the_service_notices_new_files_while_it_serves(file: Path) -> None:
    app = create_app([file], load=ModelLoader(backbone=toy()), reload_seconds=0.1)
    stop = threading.Event()
    codes: set[int] = set()

    def ask(url: str) -> None:
        while not stop.is_set():
            codes.add(web.post(f"{url}/v1/predict", files={"images": photo()}).status_code)

    with serving(Server(app, port=0)) as url:
        client = threading.Thread(target=ask, args=(url,))
        client.start()
        try:
            for names in (("red", "blue"), ("green", "red"), ("red", "green", "blue")):
                train(names, seed=1).save(file)
                wait_for(url, lambda model, names=names: model["classes"] == sorted(names))
            file.write_bytes(b"broken")
            wait_for(url, lambda model: model["problem"])
        finally:
            stop.set()
            client.join()
        metrics = web.get(f"{url}/metrics").text
    assert codes == {200}
    assert 'miv_reloads_total{model="colours",result="ok"} 3.0' in metrics
    assert 'miv_reloads_total{model="colours",result="failed"} 1.0' in metrics


def wait_for(url: str, condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition(web.get(f"{url}/v1/models/colours").json()):
        assert time.monotonic() < end
        time.sleep(0.05)


# Changes by clients.


@pytest.fixture
def changing(file: Path) -> Iterator[str]:
    keys = ApiKeys(["correct-horse"])
    load = ModelLoader(backbone=toy())
    app = create_app([file], load=load, keys=keys, allow_changes=True, reload_seconds=None)
    with serving(Server(app, port=0)) as url:
        yield f"{url}/v1/models/colours"


def test_changes_are_off_by_default_and_need_a_key(url: str, file: Path, changing: str) -> None:
    response = web.post(f"{url}/v1/models/colours/shots", files={"images": photo()})
    assert response.status_code == 404
    with pytest.raises(InputError, match="Changes of models need a key"):
        create_app([file], load=ModelLoader(backbone=toy()), allow_changes=True)
    response = web.post(f"{changing}/shots", files={"images": photo()}, data={"label": "red"})
    assert response.status_code == 401


def test_a_class_is_added_changed_and_removed(changing: str, file: Path) -> None:
    shots = [("images", (f"{i}.png", photo((250, 250, 40), i))) for i in range(3)]
    response = web.post(f"{changing}/shots", files=shots, data={"label": "yellow"}, headers=KEY)
    assert response.status_code == 201, response.text
    assert response.json()["model"]["shots"] == {"blue": 3, "green": 3, "red": 3, "yellow": 3}
    assert "yellow" in response.json()["change"]
    listed = web.get(f"{changing}/shots", headers=KEY).json()["shots"]
    assert sorted(listed["yellow"]) == ["yellow/0.png", "yellow/1.png", "yellow/2.png"]
    predict = changing.replace("/models/colours", "/predict")
    response = web.post(predict, files={"images": photo((250, 250, 40), 9)}, headers=KEY)
    assert response.json()["predictions"][0]["label"] == "yellow"
    # The file holds the same model.
    saved = mivhead.load(file, backbone=toy())
    assert saved.classes_.tolist() == ["blue", "green", "red", "yellow"]

    response = web.patch(f"{changing}/classes/yellow", json={"name": "gold"}, headers=KEY)
    assert response.json()["model"]["classes"] == ["blue", "gold", "green", "red"]
    response = web.patch(f"{changing}/shots/yellow/0.png", json={"label": "red"}, headers=KEY)
    assert response.json()["model"]["shots"] == {"blue": 3, "gold": 2, "green": 3, "red": 4}
    response = web.delete(f"{changing}/shots/yellow/0.png", headers=KEY)
    assert response.json()["model"]["shots"]["red"] == 3
    response = web.delete(f"{changing}/classes/gold", headers=KEY)
    assert response.json()["model"]["classes"] == ["blue", "green", "red"]
    assert web.get(changing, headers=KEY).json()["problem"] is None


def test_bad_changes_change_nothing(changing: str, file: Path) -> None:
    before = file.read_bytes()
    image = {"images": photo()}
    for response, code, message in (
        (web.post(f"{changing}/shots", files=image, headers=KEY), 400, "name of a class"),
        (
            web.post(f"{changing}/shots", files=image, data={"label": "a\nb"}, headers=KEY),
            400,
            "name of a class",
        ),
        (
            web.post(f"{changing}/shots", files={"images": b"x"}, data={"label": "a"}, headers=KEY),
            400,
            "is not a JPEG",
        ),
        (web.delete(f"{changing}/classes/pink", headers=KEY), 404, "no class 'pink'"),
        (web.delete(f"{changing}/shots/pink", headers=KEY), 404, "no shot 'pink'"),
        (web.patch(f"{changing}/classes/red", json={}, headers=KEY), 400, "as `name`"),
        (
            web.patch(f"{changing}/classes/red", json={"name": "blue"}, headers=KEY),
            400,
            "blue",
        ),
        (web.patch(f"{changing}/classes/red", json={"nam": "x"}, headers=KEY), 400, "'nam'"),
    ):
        assert response.status_code == code, response.text
        assert message in response.json()["error"]
    assert file.read_bytes() == before
    assert web.get(changing, headers=KEY).json()["shots"] == {"blue": 3, "green": 3, "red": 3}


def test_a_full_disk_changes_nothing(
    changing: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    shots = {"images": photo((250, 250, 40))}
    response = web.post(f"{changing}/shots", files=shots, data={"label": "yellow"}, headers=KEY)
    assert response.status_code == 500
    assert "No space left on device" in response.json()["error"]
    assert web.get(changing, headers=KEY).json()["classes"] == ["blue", "green", "red"]


def test_a_file_that_somebody_else_wrote_is_not_lost(changing: str, file: Path) -> None:
    train(("red", "blue"), seed=2).save(file)
    shots = {"images": photo((250, 250, 40))}
    response = web.post(f"{changing}/shots", files=shots, data={"label": "yellow"}, headers=KEY)
    assert response.json()["model"]["classes"] == ["blue", "red", "yellow"]
