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
from mivhead import Features, FewShotClassifier, MIVClassifier, Recipe
from mivhead.diagnostics.explanation import Explanation, attention_of, explain_images
from mivhead.diagnostics.pages import write_results
from tests.conftest import write_images
from tests.helpers.tiny_backbone import TinyBackbone
from tests.test_classifier import FAST, clusters

EVIL = "</script><script>alert('&\"')</script>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("reasons")
    return write_images(root / "shots", 4), write_images(root / "queries", 2, seed=1)


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> FewShotClassifier:
    return FewShotClassifier(TinyBackbone(threshold=5)).fit(folders[0])


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
    mivhead.save(MIVClassifier(random_state=0).fit(vectors, list("xxxyyy")), tmp_path / "m.miv")
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


def read_page(path: Path) -> tuple[str, dict[str, Any]]:
    page = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(found[1])


def test_page_of_results(reasons: list[Explanation], tmp_path: Path) -> None:
    path = tmp_path / "results.html"
    evil = [rename(reasons[0], EVIL), *reasons[1:]]
    unsure = replace(reasons[2].prediction, decision="unsure")
    none = replace(reasons[3].prediction, decision="none of these")
    evil[2:4] = [replace(reasons[2], prediction=unsure), replace(reasons[3], prediction=none)]
    write_results(evil, path, title=EVIL, classes=[EVIL, "red"], model=EVIL)
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
    write_results(reasons, path, title="birds", classes=["red"], model="a.miv")
    page, _ = read_page(path)
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; img-src data:;")
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_any_number_of_images_in_bounded_memory(
    model: FewShotClassifier, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mivhead.extraction import pipeline

    monkeypatch.setattr(pipeline, "PART", 2)
    found = explain_images(model, folders[1], pictures=False)
    assert next(found).image is None
    assert len(list(found)) == 5


def test_attention_sums_to_one_per_image_and_per_class() -> None:
    X, y = clusters(0, [3, 1, 2])
    classifier = MIVClassifier(**FAST).fit(X, y)
    queries, _ = clusters(1, [2, 2, 2])
    blocks = attention_of(classifier, queries)
    assert [b.patches.shape[1:] for b in blocks] == [(4, 4), (2, 2)]
    for block in blocks:
        np.testing.assert_allclose(block.patches.sum(axis=(1, 2)), 1, rtol=1e-5)
        assert block.shots.shape == (6, 6)
        for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
            np.testing.assert_allclose(block.shots[:, rows].sum(axis=1), 1, rtol=1e-5)


def test_a_shot_attends_most_to_itself() -> None:
    X, y = clusters(0, [3, 3])
    classifier = MIVClassifier(Recipe(steps=0, eta=5.0), random_state=0).fit(X, y)
    shots = attention_of(classifier, X)[0].shots
    assert all(shots[i, i] == shots[i, (i // 3) * 3 : (i // 3) * 3 + 3].max() for i in range(6))


def test_attention_without_maps() -> None:
    X, y = np.eye(6, 8), [0, 0, 0, 1, 1, 1]
    classifier = MIVClassifier(Recipe(eta=0.0, steps=1)).fit(X, y)
    (block,) = attention_of(classifier, X)
    assert block.patches is None
    np.testing.assert_allclose(block.shots[0], np.full(6, 1 / 3), rtol=1e-6)
