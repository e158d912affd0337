"""Accuracy on labelled images: scores, confusions, mistakes, what cannot be evaluated."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

import mivhead
from mivhead import FewShotClassifier
from mivhead._util.arrays import wilson_interval
from mivhead.diagnostics.evaluation import (
    Evaluation,
    Score,
    evaluate,
)
from mivhead.errors import InputError
from mivhead.images.sources import open_labelled, open_unlabelled
from tests.helpers.tiny_backbone import TinyBackbone


@pytest.fixture
def model(shots):
    """A model of `shots`: red, green and blue images."""
    return FewShotClassifier(TinyBackbone(), recipe="experts", verbose=False).fit(shots)


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


def test_images_of_other_things_do_not_count(shots, queries):
    for folder in (shots, queries):
        (folder / "red").rename(folder / "other")
    model = FewShotClassifier(TinyBackbone(), recipe="experts", verbose=False).fit(shots)
    result = evaluate(model, queries)
    assert (result.score.images, result.decisions.images, result.foreign.images) == (10, 10, 5)
    assert "other" not in {mistake.label for mistake in result.mistakes}
    assert re.fullmatch(r"Of 100 photos, .*\nAccuracy .* of 10 photos right .*", str(result))
    images = open_labelled(queries)
    alone = evaluate(model, images.take([i for i in range(15) if images.labels[i] == "other"]))
    assert (alone.score.images, alone.decisions) == (0, None)


def test_evaluate_a_folder_or_images(model, shots, queries):
    result = model.evaluate(queries)
    assert result.score.images == 15
    assert result.accuracy == result.score.right / 15
    assert repr(result).startswith(f"<Evaluation: {result.score.right} of 15 images right, ")
    assert model.evaluate(sorted(queries.glob("red/*")), ["red"] * 5).score.images == 5
    with pytest.raises(InputError, match="trained on all of the 12 images"):
        model.evaluate(shots)
    assert model.evaluate(shots, include_shots=True).score.images == 12


def test_check_is_the_cross_validation_of_fit(model, shots, tmp_path):
    result = model.check(folds=2)
    assert (result.folds, result.score.images) == (2, 12)
    assert repr(result).startswith("<CrossValidation: 2-fold, ")
    model.save(tmp_path / "m.miv")  # a loaded model knows its shots, too
    again = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone()).check(folds=2)
    np.testing.assert_allclose(again.probabilities, result.probabilities, atol=1e-6)
