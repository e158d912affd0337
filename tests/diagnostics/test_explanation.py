"""Reasons for a prediction: the object, its picture, its HTML, and the pages."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mivhead
from mivhead import Features, FewShotClassifier, MIVClassifier
from mivhead.diagnostics.cross_validation import cross_validate
from mivhead.diagnostics.explanation import Explanation, explain_images
from mivhead.diagnostics.pages import explanation_html, write_results, write_suspects
from mivhead.errors import InputError
from mivhead.images.sources import open_labelled
from tests.conftest import write_images
from tests.helpers.tiny_backbone import TinyBackbone

EVIL = "</script><script>alert('&\"')</script>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("reasons")
    return write_images(root / "shots", 4), write_images(root / "queries", 2, seed=1)


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> FewShotClassifier:
    return FewShotClassifier(TinyBackbone(threshold=5)).fit_folder(folders[0])


@pytest.fixture(scope="module")
def reasons(model: FewShotClassifier, folders: tuple[Path, Path]) -> list[Explanation]:
    found = model.explain(folders[1])
    assert isinstance(found, list)
    return found


def test_the_votes_add_up_to_the_log_odds(reasons: list[Explanation]) -> None:
    for each in reasons:
        p = each.prediction.probabilities
        expected = math.log(p[each.prediction.label] / p[each.runner_up])
        assert sum(vote.separates for vote in each.votes) == pytest.approx(expected, abs=1e-4)
        sizes = [abs(vote.separates) for vote in each.votes]
        assert sizes == sorted(sizes, reverse=True)


def test_predictions_are_those_of_classify(
    model: FewShotClassifier, folders: tuple[Path, Path], reasons: list[Explanation]
) -> None:
    assert [each.prediction for each in reasons] == model.classify(folders[1])


def test_features_are_explained_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(6, 8))
    MIVClassifier(random_state=0).fit(vectors, list("xxxyyy")).save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv")
    new = rng.normal(size=(2, 8))
    for given in (new, Features(new)):
        found = model.explain(given)
        assert isinstance(found, list)
        assert [each.prediction for each in found] == model.classify(new)
    (only,) = model.explain(new[:1])
    assert only.image is None


def test_an_explanation_is_short_in_print(reasons: list[Explanation]) -> None:
    assert "\n" not in repr(reasons[0])
    assert reasons[0].prediction.id in repr(reasons[0])


def test_heat_maps_are_weights(reasons: list[Explanation]) -> None:
    for each in reasons:
        assert list(each.blocks) == [0, 1]
        assert each.heat.shape == (4, 4)  # of the finest block
        for heat in (each.heat, *each.blocks.values()):
            assert heat.min() >= 0
            assert heat.sum() == pytest.approx(1, abs=1e-5)


def test_close_shots_are_of_the_two_classes(
    model: FewShotClassifier, reasons: list[Explanation]
) -> None:
    for each in reasons:
        labels = [shot.label for shot in each.shots]
        assert labels == [each.prediction.label] * 3 + [each.runner_up] * 3
        weights = [shot.weight for shot in each.shots[:3]]
        assert weights == sorted(weights, reverse=True)
        assert all(-1 <= shot.similarity <= 1.0001 for shot in each.shots)
        assert each.shots[0].picture is not None


def test_a_shot_is_closest_to_itself(model: FewShotClassifier, folders: tuple[Path, Path]) -> None:
    found = model.explain(folders[0] / "red" / "2.png")
    assert isinstance(found, Explanation)
    best = max(found.shots, key=lambda shot: shot.similarity)
    assert best.name == "red/2.png"
    assert best.similarity == pytest.approx(1, abs=1e-3)


def test_json_is_plain(reasons: list[Explanation]) -> None:
    document = json.loads(json.dumps(reasons[0].as_json(), allow_nan=False))
    assert document["runner_up"]["label"] == reasons[0].runner_up
    assert np.shape(document["heat"]) == (4, 4)
    assert set(document["shots"][0]) == {"name", "label", "weight", "similarity"}


def test_other_methods_and_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = FewShotClassifier(TinyBackbone(), method="ncc").fit_folder(folders[0])
    model.save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone())
    found = model.explain(folders[1] / "red" / "0.png")
    assert found.heat is None
    assert found.votes == ()
    assert found.shots[0].label == "red"
    assert found.shots[0].weight is None
    table = model.extract(folders[1])
    assert model.explain(table)[0].image is None
    paper = FewShotClassifier(TinyBackbone(), recipe="paper").fit_folder(folders[0])
    votes = paper.explain(folders[1] / "red" / "0.png").votes
    assert [vote.separates for vote in votes] == [None, None]
    experts = FewShotClassifier(TinyBackbone(), recipe="experts").fit_folder(folders[0])
    reasons = experts.explain(folders[1] / "red" / "0.png")
    assert reasons.heat is None
    assert not any("attention" in vote.member for vote in reasons.votes)
    assert sum(vote.separates for vote in reasons.votes) > 0
    tuned = FewShotClassifier(TinyBackbone(), method="finetune")
    tuned.classifier_ = object()
    with pytest.raises(InputError, match="finetune tunes the backbone"):
        tuned.explain(folders[1])


def test_picture(reasons: list[Explanation], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = reasons[0].plot(tmp_path / "why.png")
    assert (tmp_path / "why.png").stat().st_size > 10_000
    assert len(figure.axes) == 1 + 3 + 6 + 1  # image, heat maps, shots, votes


def rename(each: Explanation, name: str) -> Explanation:
    """The same explanation with a name that tries to break out of the page."""
    prediction = each.prediction
    probabilities = {
        (name if label == prediction.label else label): p
        for label, p in prediction.probabilities.items()
    }
    changed = replace(prediction, id=name, label=name, decision=name, probabilities=probabilities)
    shots = tuple(replace(shot, name=name, label=name) for shot in each.shots)
    votes = tuple(replace(vote, member=name, label=name) for vote in each.votes)
    return replace(each, prediction=changed, shots=shots, votes=votes)


def test_notebook_html_escapes_everything(reasons: list[Explanation]) -> None:
    html = explanation_html(rename(reasons[0], EVIL))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert html.count("data:image/jpeg;base64,") == 4 + 6
    assert reasons[0]._repr_html_().startswith("<div>")


def read_page(path: Path) -> tuple[str, dict[str, Any]]:
    page = path.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(found[1])


def test_page_of_results(reasons: list[Explanation], tmp_path: Path) -> None:
    path = tmp_path / "results.html"
    evil = [rename(reasons[0], EVIL), *reasons[1:]]
    unsure = replace(reasons[2].prediction, decision="unsure")
    none = replace(reasons[3].prediction, decision="none of these")
    evil[2:4] = [replace(reasons[2], prediction=unsure), replace(reasons[3], prediction=none)]
    assert write_results(evil, path, title=EVIL, classes=[EVIL, "red"]) == 6
    page, data = read_page(path)
    assert page.count("<script") == 2
    assert "alert('&\"')" not in page
    assert [item["group"] for item in data["items"]] == ["none", "unsure"] + ["named"] * 4
    certain = [item["top"][0][1] for item in data["items"][2:]]
    assert certain == sorted(certain)
    assert EVIL in data["classes"]
    item = next(item for item in data["items"] if item["file"] == EVIL)
    assert item["grid"] == [4, 4]
    assert len(base64.b64decode(item["heat"])) == 16
    assert max(base64.b64decode(item["heat"])) == 255
    assert all(shot["src"].startswith("data:image/jpeg;base64,") for shot in data["shots"])


def test_pages_load_nothing_and_run_only_their_own_script(
    reasons: list[Explanation], tmp_path: Path
) -> None:
    path = tmp_path / "results.html"
    write_results(reasons, path, title="birds", classes=["red"])
    page, _ = read_page(path)
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; img-src data:;")
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_page_of_suspects(tmp_path: Path) -> None:
    shots = write_images(tmp_path / "shots", 4)
    (shots / "red" / "0.png").rename(shots / "blue" / "wrong.png")
    model = FewShotClassifier(TinyBackbone()).fit_folder(shots)
    table = model.extract(open_labelled(shots))
    result = cross_validate(model.classifier_, table, verbose=False)
    count = write_suspects(result, model.shots_, tmp_path / "fit.html", title="suspects")
    _, data = read_page(tmp_path / "fit.html")
    assert count == len(data["items"]) >= 1
    first = data["items"][0]
    assert first["file"] == "blue/wrong.png"
    assert first["note"].endswith("looks like red")
    assert first["note"].startswith("mislabelled? ") == result.suspects[0].mislabelled
    near = [data["shots"][place]["label"] for place, _ in first["near"]]
    assert near == ["blue"] * 3 + ["red"] * 3
    assert data["columns"] == "shot,class"


def test_any_number_of_images_in_bounded_memory(
    model: FewShotClassifier, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mivhead.extraction import pipeline

    monkeypatch.setattr(pipeline, "PART", 2)
    found = explain_images(model, folders[1], pictures=False)
    assert next(found).image is None
    assert len(list(found)) == 5
