"""The support set: one object from the images to the fit."""

import numpy as np
import pytest

from mivhead import Features, FewShotClassifier, MIVClassifier, Recipe
from mivhead.errors import InputError
from mivhead.features import FeatureTable, SupportSet

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = ["wren", "robin", "wren", "owl"]
VECTORS = {"wren": X[0], "robin": X[1], "owl": X[2]}


def test_images_are_ordered_by_class_and_views_follow_them() -> None:
    support = SupportSet.read(Features(X), Y, Features(X[[2, 1]]), [2, 1])
    assert support.classes.tolist() == ["owl", "robin", "wren"]
    assert support.labels.tolist() == [0, 1, 2, 2]
    assert support.features == Features(X[[3, 1, 0, 2]])
    assert support.view_rows.tolist() == [3, 1]
    assert support.features[support.view_rows] == support.views
    assert support.labels[support.sources].tolist() == [0, 1, 2, 2, 2, 1]
    assert support.shots == [1, 1, 2]


def test_features_that_are_too_small_are_refused() -> None:
    """From about 1e-11 on, the paper's recipe would fall to chance."""
    maps, y = np.random.default_rng(0).random((4, 8, 3, 3)), [0, 0, 1, 1]
    for scale in (1e-9, 1e-12):
        with pytest.raises(InputError, match="constant"):
            SupportSet.read(Features(scale * maps), y)
    SupportSet.read(Features(0 * maps), y)
    expected, found = (
        MIVClassifier("paper", random_state=0).fit(scale * maps, y).predict_proba(scale * maps)
        for scale in (1.0, 1e-7)
    )
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_taking_some_shots_takes_their_views() -> None:
    support = SupportSet.read(Features(X), Y, Features(X), range(4), class_vectors=VECTORS)
    part = support.take(np.array([True, True, True, False]))
    assert part.labels.tolist() == [0, 1, 2]
    assert part.views == Features(X[[0, 1, 3]])
    assert part.features[part.view_rows] == part.views


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"y": ["a"] * 4}, "at least 2 classes"),
        ({"y": ["a", "b"]}, "2 labels"),
        ({"view_of": [0]}, "together"),
        ({"views": Features(X[:1]), "view_of": [4]}, "0 to 3"),
        ({"unlabelled": Features(X[:, :2])}, "other blocks than X"),
        ({"class_vectors": {"owl": X[0]}}, "'robin'"),
        ({"class_vectors": {**VECTORS, "elk": X[0]}}, "'elk'"),
        ({"class_vectors": [[1, 2], [1]]}, "one vector per"),
        ({"class_vectors": {**VECTORS, "owl": ["a"] * 3}}, "one vector per"),
        ({"class_vectors": {**VECTORS, "owl": [1e300] * 3}}, "has no direction"),
    ],
)
def test_bad_input(given: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        SupportSet.read(Features(X), **{"y": Y, **given})


def test_a_classifier_does_not_share_the_users_arrays() -> None:
    mine = np.random.default_rng(0).normal(size=(6, 8))
    queries = mine + 0.1
    classifier = MIVClassifier(Recipe(steps=2), random_state=0).fit(mine, [0, 0, 0, 1, 1, 1])
    before = classifier.logits(queries)
    mine[:] = 0
    classifier.__dict__.pop("embedded_")  # made of the support again
    np.testing.assert_array_equal(classifier.logits(queries), before)


def test_a_model_keeps_its_features_once() -> None:
    table = FeatureTable(Features(X), tuple("1234"), tuple(Y))
    model = FewShotClassifier(None, recipe=Recipe(steps=2)).fit(table)
    assert model.shots_.features is model.classifier_.support_
    model.rename("wren", "dunnock")
    assert model.shots_.features is model.classifier_.support_
