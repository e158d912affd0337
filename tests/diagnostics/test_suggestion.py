"""Which images to label next: typical, different, once each."""

from pathlib import Path

import numpy as np
import pytest

from mivhead import Features, FewShotClassifier
from mivhead.diagnostics import suggestion
from mivhead.diagnostics.suggestion import (
    CLOSE,
    DUPLICATE,
    Suggestion,
    choose,
    suggest,
)
from mivhead.errors import InputError
from mivhead.features import FeatureTable
from tests.conftest import write_images
from tests.helpers.tiny_backbone import TinyBackbone


def clusters(sizes: list[int], spread: float = 0.12, seed: int = 0) -> np.ndarray:
    """Unit vectors around as many directions as there are sizes."""
    rng = np.random.default_rng(seed)
    centres = np.repeat(np.eye(len(sizes), 16), sizes, axis=0)
    vectors = centres + spread * rng.normal(size=(sum(sizes), 16))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_one_of_each_cluster_the_largest_first() -> None:
    vectors = clusters([12, 8, 5])
    rows = [row for row, _ in choose(vectors, 3)]
    assert [0 if row < 12 else 1 if row < 20 else 2 for row in rows] == [0, 1, 2]
    assert [size for _, size in choose(vectors, 3)] == [12, 8, 5]


def test_the_typical_image_of_a_cluster() -> None:
    vectors = clusters([9])
    ((row, size),) = choose(vectors, 1)
    similarity = (vectors @ vectors.T).sum(axis=1)  # all nine are neighbours of each other
    assert (row, size) == (similarity.argmax(), 9)


def test_clusters_with_a_label_come_last() -> None:
    vectors = clusters([12, 8, 5])
    rows = [row for row, _ in choose(vectors, 2, labelled=np.eye(3, 16)[:1])]
    assert all(row >= 12 for row in rows)


def test_the_margin_decides_if_it_is_given() -> None:
    vectors = clusters([9])
    margins = np.ones(9)
    margins[4] = 0.1
    assert choose(vectors, 1, margins=margins) == [(4, 9)]


def test_near_duplicates_are_suggested_once() -> None:
    vectors = np.repeat(clusters([3, 3]), 4, axis=0)
    rows = [row for row, _ in choose(vectors, 24)]
    assert len(rows) == 6
    chosen = vectors[rows]
    assert np.triu(chosen @ chosen.T, 1).max() < DUPLICATE


@pytest.mark.parametrize("at_once", [1, 5, 256])
def test_an_image_is_left_out_if_one_before_it_is_nearly_the_same(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suggestion, "AT_ONCE", at_once)
    vectors = clusters([9, 8, 7], spread=0.035)
    expected: list[int] = []
    for row, vector in enumerate(vectors):
        if all(float(vector @ vectors[other]) < DUPLICATE for other in expected):
            expected.append(row)
    assert 3 < len(expected) < 20
    assert sorted(row for row, _ in choose(vectors, 24)) == expected


def test_images_like_no_class_are_possible_new_classes(tmp_path: Path) -> None:
    shots = write_images(tmp_path / "shots", 4)
    model = FewShotClassifier(TinyBackbone()).fit(shots)
    table = model.extract(write_images(tmp_path / "new", 5, seed=1))
    found = suggest(table, 6, model=model)
    assert 0 < len(found) <= 6
    assert len({each.id for each in found}) == len(found)
    decisions = {each.id: each.decision for each in model.classify(table)}
    for each in found:
        assert (decisions[each.id] == "none of these") == (each.new_class is not None)
        assert (each.label is None) == (each.new_class is not None)


def test_with_several_shots_per_class_close_calls_are_suggested(tmp_path: Path) -> None:
    model = FewShotClassifier(TinyBackbone()).fit(write_images(tmp_path / "shots", 4))
    table = model.extract(write_images(tmp_path / "new", 12, seed=3))
    found = [each for each in suggest(table, 3, model=model) if each.new_class is None]
    assert found
    known = [p for p in model.classify(table) if p.decision != "none of these"]
    margins = {p.id: -np.subtract(*sorted(p.probabilities.values())[-2:]) for p in known}
    close = sorted(margins, key=margins.__getitem__)[: CLOSE * len(found)]
    for each in found:
        assert each.id in close
        ranked = next(list(p.probabilities) for p in known if p.id == each.id)
        assert [each.label, each.runner_up] == ranked[:2]
    few = FewShotClassifier(TinyBackbone()).fit(write_images(tmp_path / "few", 2))
    assert all(each.runner_up is None for each in suggest(table, 3, model=few))


def test_near_duplicates_do_not_crowd_out_other_close_calls() -> None:
    labels = tuple("aaaabbbb")
    shots = FeatureTable(Features(clusters([4, 4])), tuple(map(str, range(8))), labels)
    model = FewShotClassifier(None, recipe="experts").fit(shots)
    vectors = clusters([20, 20], seed=1)
    table = FeatureTable(Features(vectors), tuple(map(str, range(40))))
    known = [i for i, p in enumerate(model.classify(table)) if p.decision != "none of these"]
    closest = min(known, key=lambda i: abs(vectors[i, 0] - vectors[i, 1]))
    rows = [closest] * 60 + [i for i in known if i != closest]
    many = FeatureTable(Features(vectors[rows]), tuple(map(str, range(len(rows)))))
    found = suggest(many, 4, model=model)
    assert len(found) == 4
    assert sum(int(each.id) < 60 for each in found) <= 1


def test_shots_of_the_class_other_do_not_count(tmp_path: Path) -> None:
    shots = write_images(tmp_path / "shots", 1)
    model = FewShotClassifier(TinyBackbone(), other="red").fit(shots)
    more = write_images(tmp_path / "more", 20, seed=5)
    model.add(sorted((more / "red").iterdir()), ["red"] * 20)
    table = model.extract(write_images(tmp_path / "new", 4, seed=3))
    assert all(each.runner_up is None for each in suggest(table, 3, model=model))


def test_without_a_model_and_bad_input() -> None:
    table = FeatureTable(Features(clusters([6, 3])), tuple("abcdefghi"))
    found = suggest(table, 2)
    assert [each.represents for each in found] == [6, 3]
    assert suggest(table, 2) == found
    assert len(suggest(table, 100)) == 9
    with pytest.raises(InputError, match="n must be at least 1, got 0"):
        suggest(table, 0)


def test_reasons_in_words() -> None:
    found = [Suggestion("a", None, 1), Suggestion("b", "x", 3), Suggestion("c", "x", 1, 2)]
    found.append(Suggestion("d", "x", 4, runner_up="y"))
    assert [suggestion.reason for suggestion in found] == [
        "typical of 1 photo",
        "typical of 3 photos",
        "possible new class 2, like 1 photo",
        "x or y?",
    ]
