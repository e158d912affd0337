"""`miv card`, `miv push` and hf:// addresses, against a hub on this computer."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mivhead
from mivhead.cli import card
from mivhead.errors import InputError, NotAvailableError
from mivhead.features import Features, FeatureTable
from mivhead.model.exported import ExportedClassifier
from tests.helpers.extras import needs
from tests.helpers.services import FaultyServer, Reply, Request, as_json, running

EXPORTED = Path(__file__).parents[1] / "golden" / "model-0.2.0.onnx"
COMMIT = "0123456789" * 4


class Hub:
    """As much of the hub's interface as publishing and loading a model needs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.private = True
        self.status: int | None = None

    def answer(self, request: Request) -> Reply:
        path = request.path.partition("?")[0]
        if self.status:
            return as_json({"error": "no"}, self.status)
        if path == "/api/repos/create":
            page = f"http://{request.headers['Host']}/me/birds"
            if self.files:
                return as_json({"error": "exists", "url": page}, 409)
            asked = json.loads(request.body)
            self.private = asked.get("private") or asked.get("visibility") == "private"
            return as_json({"url": page})
        if path.endswith("/preupload/main"):
            files = json.loads(request.body)["files"]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return as_json({"files": [{"path": each["path"], **how} for each in files]})
        if path.endswith("/commit/main"):
            for line in map(json.loads, request.body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[line["value"]["path"]] = content
                if line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            page = f"http://{request.headers['Host']}/me/birds/commit/{COMMIT}"
            return as_json({"commitUrl": page, "commitOid": COMMIT})
        if path == "/api/models/me/birds":
            return as_json(self.listing())
        if path == "/api/validate-yaml":
            return as_json({"errors": [], "warnings": []})
        name = path.rpartition("/")[2]
        if "/resolve/" in path and name in self.files:
            return Reply(self.files[name])
        return as_json({"error": "not found"}, 404)

    def listing(self) -> dict[str, Any]:
        files = []
        for name, data in self.files.items():
            sha256 = hashlib.sha256(data).hexdigest()
            large = {"sha256": sha256, "size": len(data), "pointerSize": 1}
            files.append({"rfilename": name, "size": len(data), "lfs": large})
        return {"id": "me/birds", "sha": COMMIT, "private": self.private, "siblings": files}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    state = Hub()
    with running(FaultyServer(state.answer)) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("MIV_WEIGHTS", str(tmp_path / "weights"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield state


def test_a_card_says_what_a_model_knows_and_contains(miv: Any, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "README.md"
    answer = miv("card", model, "-o", output, "--license", "cc-by-4.0")
    assert answer.code == 0, answer.err
    text = output.read_text()
    assert text.startswith("---\nlibrary_name: mivhead\npipeline_tag: image-classification\n")
    assert "license: cc-by-4.0\n---" in text
    assert "learned 3 classes from 9 images" in text
    assert "| checks | 3 |" in text
    assert "95 % interval" in text
    assert "licence of the weights: apache-2.0" in text
    assert "**small copies of these images**" in text
    assert f'mivhead.load("{model.name}")' in text
    assert json.loads(miv("card", model, "--license", "cc-by-4.0", "--json").out)["card"] == text


def test_a_card_shows_the_estimate_of_the_file(
    miv: Any, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert miv("fit", features, "-o", tmp_path / "m.miv").code == 0
    shown = next(s for s in miv("info", tmp_path / "m.miv").out.splitlines() if "accuracy" in s)
    monkeypatch.delattr(mivhead.FewShotClassifier, "check")
    text = miv("card", tmp_path / "m.miv").out.replace("**", "")
    assert shown.partition("images: ")[2] in text


def test_a_card_of_a_model_that_cannot_be_tested(miv: Any, tmp_path: Path) -> None:
    single = FeatureTable(Features(np.eye(4, dtype=np.float32)[:3]), tuple("123"), tuple("aab"))
    single.save(tmp_path / "f.safetensors")
    assert miv("fit", tmp_path / "f.safetensors", "-o", tmp_path / "m.miv").code == 0
    assert "Not measured: run `miv evaluate`" in miv("card", tmp_path / "m.miv").out


def test_a_card_of_an_exported_model(miv: Any) -> None:
    text = miv("card", EXPORTED).out
    assert "Not measured: run `miv evaluate`" in text
    assert "small copies" not in text
    assert "small, frozen; licence of the weights: not known to mivhead" in text


def test_names_of_a_stranger_are_text_in_a_card() -> None:
    evil = 'x|y\n---\n# h <img src="http://evil/"> [a](http://evil) `rm`'
    facts = {"kind": "model", "file": "m.miv", "classes": {evil: 2, "b": 1}, "library": evil}
    text = card.make_card({**facts, "backbone": {"name": evil}, "bytes": 10}, None)
    assert "<img" not in text.replace("\\<img", "")
    assert "](http" not in text
    assert next(line for line in text.splitlines() if line.startswith("#")) == "# m"
    assert text.count("\n---\n") == 1


@pytest.mark.parametrize("licence", ["MIT\nlicense: x", "", "a: b", "x" * 80])
def test_a_licence_is_a_name(licence: str, model: Path) -> None:
    from mivhead.cli.main import main

    with pytest.raises(SystemExit):
        main(["card", str(model), "--license", licence])


@needs("huggingface_hub", "hub")
def test_a_model_is_published_and_used(miv: Any, model: Path, new: Path, hub: Hub) -> None:
    answer = miv("push", model, "hf://me/birds")
    assert answer.code == 0, answer.err
    assert set(hub.files) == {"model.miv", "README.md"}
    assert hub.private
    assert hub.files["model.miv"] == model.read_bytes()
    assert b"miv predict hf://me/birds photo.jpg" in hub.files["README.md"]
    found = miv("predict", "hf://me/birds", new, "--json")
    assert found.code == 0, found.err
    here = json.loads(miv("predict", model, new, "--json").out)
    assert json.loads(found.out)["predictions"] == here["predictions"]
    assert mivhead.load("hf://me/birds/model.miv").classes_.tolist() == [
        "checks",
        "rings",
        "stripes",
    ]


@needs("huggingface_hub", "hub")
def test_pictures_are_not_published_by_mistake(miv: Any, fails: Any, model: Path, hub: Hub) -> None:
    assert "small copies of its images" in fails("push", model, "hf://me/birds", "--public")
    assert not hub.files
    assert miv("push", model, "hf://me/birds", "--public", "--with-pictures").code == 0
    assert not hub.private
    assert "can be read by everyone" in fails("push", model, "hf://me/birds")  # it exists already


@needs("huggingface_hub", "hub")
def test_a_few_pictures_are_not_published_by_mistake(
    fails: Any, model: Path, features: Path, hub: Hub, tmp_path: Path
) -> None:
    changed = mivhead.load(model)
    table = FeatureTable.load(features)
    doubled = Features([2 * block.map for block in table.features.blocks])
    ids = tuple(f"more/{name}" for name in table.ids)
    changed.add(FeatureTable(doubled, ids, table.labels, backbone=table.backbone))
    changed.save(tmp_path / "m.miv")
    message = fails("push", tmp_path / "m.miv", "hf://me/birds", "--public")
    assert "small copies of its images" in message
    assert not hub.files


@needs("huggingface_hub", "hub")
def test_another_kind_of_model_takes_the_place_of_the_first(
    miv: Any, model: Path, hub: Hub
) -> None:
    assert miv("push", model, "hf://me/birds").code == 0
    assert isinstance(mivhead.load("hf://me/birds"), mivhead.FewShotClassifier)
    assert miv("push", EXPORTED, "hf://me/birds").code == 0
    assert set(hub.files) == {"model.onnx", "README.md"}
    assert isinstance(mivhead.load("hf://me/birds"), ExportedClassifier)
    hub.status = 503
    with pytest.warns(UserWarning, match="An earlier download is used"):
        assert isinstance(mivhead.load("hf://me/birds"), ExportedClassifier)


@needs("huggingface_hub", "hub")
@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "hf auth login"), (500, "answered 500"), (200, "does not answer like the hub")],
)
def test_a_hub_that_refuses(fails: Any, model: Path, hub: Hub, status: int, words: str) -> None:
    hub.status = status
    assert words in fails("push", model, "hf://me/birds")


@needs("huggingface_hub", "hub")
def test_an_address_is_checked_before_anything_is_sent(fails: Any, model: Path) -> None:
    for address in ("me/birds", "hf://birds", "hf://../x", "https://hub/me/birds", "hf://a/b/c"):
        assert "is not an address like hf://me/birds" in fails("push", model, address)


def test_without_the_hub_an_earlier_download_is_used(model: Path, hub: Hub) -> None:
    with pytest.raises(NotAvailableError, match=r"has no file model\.miv or model\.onnx"):
        mivhead.load("hf://me/birds")
    hub.files["model.miv"] = model.read_bytes()
    first = mivhead.load("hf://me/birds")
    hub.status = 503
    with pytest.warns(UserWarning, match="An earlier download is used"):
        again = mivhead.load("hf://me/birds")
    assert np.array_equal(again.classes_, first.classes_)


@pytest.mark.parametrize("address", ["hf://me", "hf://me/../x", "hf://me/b/../../x", "hf://a/b/*"])
def test_addresses_that_name_no_model(address: str) -> None:
    with pytest.raises(InputError, match="is not an address like"):
        mivhead.load(address)


@pytest.mark.parametrize("published", [True, False])
def test_a_card_names_an_index_only_if_the_package_was_published(
    published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Message()
    found["Project-URL"] = "Paper, https://arxiv.org/abs/2507.00401"
    if published:
        found["Project-URL"] = "Source, https://example.org/mivhead"
    monkeypatch.setattr(card, "metadata", lambda name: found)
    usage = card._usage("birds.miv")
    assert ("pip install mivhead\n" in usage) is published
    assert ("pip install path/to/mivhead" in usage) is not published
