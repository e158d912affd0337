"""Accuracy on labelled images: scores, confusions, mistakes, what cannot be evaluated."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.diagnostics.evaluation import (
    Evaluation,
    Score,
    Tradeoff,
    evaluate,
    wilson_interval,
)
from mivhead.errors import InputError
from mivhead.images.sources import open_labelled, open_unlabelled
from mivhead.model.decision import Thresholds
from tests.helpers.tiny_backbone import TinyBackbone


@pytest.fixture
def model(shots):
    """A model of `shots`: red, green and blue images."""
    return FewShotClassifier(TinyBackbone(), method="ncc", verbose=False).fit_folder(shots)


def test_folders_and_features_give_the_same_evaluation(model, queries):
    images = open_labelled(queries)
    results = [evaluate(model, each) for each in (queries, images, model.extract(images))]
    for result in results:
        assert result.classes == ("blue", "green", "red")
        assert result.score.images == 15
        np.testing.assert_array_equal(result.confusion, results[0].confusion)
    predicted = model.predict(images).tolist()
    right = sum(p == label for p, label in zip(predicted, images.labels, strict=True))
    assert results[0].score.right == right
    assert results[0].accuracy == right / 15
    assert results[0].interval == wilson_interval(right, 15)


def test_features_and_their_labels(model, queries):
    table = model.extract(open_labelled(queries))
    expected = evaluate(model, table).confusion
    for given in (table.features, replace(table, labels=None)):
        found = model.evaluate(given, table.labels)
        np.testing.assert_array_equal(found.confusion, expected)
    with pytest.raises(InputError, match="no labels"):
        model.evaluate(table.features)
    with pytest.raises(InputError, match="15 images, but 2 labels"):
        model.evaluate(table.features, ["red", "blue"])
    with pytest.raises(InputError, match=r"labels\[0\] is missing"):
        model.evaluate(table.features, [None, *table.labels[1:]])


def test_mistakes_are_listed_with_their_files(model, queries):
    (queries / "red" / "0.png").rename(queries / "green" / "wrong.png")
    result = evaluate(model, queries)
    assert result.per_class["red"].images == 4
    listed = {mistake.id: mistake for mistake in result.mistakes}
    wrong = listed["green/wrong.png"]
    assert (wrong.label, wrong.predicted) == ("green", "red")
    assert 1 / 3 < wrong.probability <= 1
    probabilities = [mistake.probability for mistake in result.mistakes]
    assert probabilities == sorted(probabilities, reverse=True)
    assert (1, "green", "red") in result.confusions
    assert sum(count for count, _, _ in result.confusions) == len(result.mistakes)


def test_unreadable_images_are_skipped_on_request(model, queries):
    (queries / "red" / "bad.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"bad\.png"):
        evaluate(model, queries)
    result = evaluate(model, queries, skip_bad=True)
    assert result.score.images == 15
    assert [each.id for each in result.skipped] == ["red/bad.png"]


def test_labels_that_are_missing_or_unknown(model, queries):
    with pytest.raises(InputError, match="has no labels"):
        evaluate(model, open_unlabelled(queries))
    with pytest.raises(InputError, match="has no labels"):
        evaluate(model, model.extract(open_unlabelled(queries)))
    (queries / "red").rename(queries / "rouge")
    with pytest.raises(InputError, match=r"the class 'rouge', .* blue, green, red"):
        evaluate(model, queries)


def test_confusions_are_sorted_by_count():
    result = Evaluation(("a", "b", "c"), np.array([[5, 1, 0], [3, 0, 2], [0, 0, 0]]))
    assert result.confusions == [(3, "b", "a"), (2, "b", "c"), (1, "a", "b")]
    assert result.score == Score(11, 5)
    assert result.per_class == {"a": Score(6, 5), "b": Score(5, 0)}  # no images of c


def test_no_images_have_no_accuracy():
    assert math.isnan(Score(0, 0).accuracy)
    assert all(math.isnan(bound) for bound in Score(0, 0).interval)


def test_wilson_interval_solves_its_equation() -> None:
    for k, n in ((0, 5), (3, 7), (50, 50)):
        for bound in wilson_interval(k, n):
            assert (k / n - bound) ** 2 == pytest.approx(
                1.96**2 * bound * (1 - bound) / n, abs=1e-9
            )


def test_wilson_interval_is_exact_at_its_ends() -> None:
    assert {wilson_interval(n, n)[1] for n in range(1, 100)} == {1.0}
    assert {wilson_interval(0, n)[0] for n in range(1, 100)} == {0.0}


def some_tradeoff() -> Tradeoff:
    rng = np.random.default_rng(0)
    return Tradeoff(
        rng.uniform(size=40),
        rng.uniform(size=40) < 0.7,
        rng.normal(size=40),
        rng.normal(loc=1.0, size=30),
        Thresholds(unknown=0.8, probability=0.5),
    )


def test_risk_and_coverage_in_plain_loops() -> None:
    found = some_tradeoff()
    coverage, risk = found.risk_coverage()
    for share, wrong in zip(coverage, risk, strict=True):
        surest = sorted(found.probabilities)[-round(share * 40) :]
        named = [
            not r for p, r in zip(found.probabilities, found.right, strict=True) if p in surest
        ]
        assert wrong == pytest.approx(np.mean(named))


def test_the_area_under_the_roc_curve_counts_pairs() -> None:
    found = some_tradeoff()
    assert found.unknown is not None
    pairs = [(f > k) + 0.5 * (f == k) for k in found.unknown for f in found.foreign]
    assert found.auroc == pytest.approx(np.mean(pairs))
    known, foreign = found.roc()
    assert (known[0], foreign[0], known[-1], foreign[-1]) == (0.0, 0.0, 1.0, 1.0)
    nothing = replace(found, foreign=found.foreign[:0])
    with pytest.raises(InputError, match="needs foreign images"):
        nothing.roc()


def test_tradeoffs_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    some_tradeoff().plot(tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 1000
    figure = replace(some_tradeoff(), unknown=None).plot()
    assert len(figure.axes) == 1
