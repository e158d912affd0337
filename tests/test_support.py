"""The support set: one object from the images to the fit."""

import numpy as np
import pytest

from mivhead import Features, FewShotClassifier, MIVClassifier, Recipe
from mivhead.errors import InputError
from mivhead.features import FeatureTable
from mivhead.support import SupportSet

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
    assert support.all_labels.tolist() == [0, 1, 2, 2, 2, 1]
    assert support.shots == [1, 1, 2]


def test_pixels_are_a_support_set_too() -> None:
    pixels = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
    support = SupportSet.read(pixels, Y, pixels[:1], [0])
    np.testing.assert_array_equal(support.everything, pixels[[3, 1, 0, 2, 0]])
    assert support.everything.dtype == np.uint8


def test_taking_shots_forgets_classes_without_any() -> None:
    vectors = {
        name: np.eye(4, 3)[i] + 0.1 for i, name in enumerate(("elk", "owl", "robin", "wren"))
    }
    support = SupportSet.read(Features(X), Y, class_vectors=vectors)
    assert support.classes.tolist() == ["elk", "owl", "robin", "wren"]
    assert support.seen.tolist() == [1, 2, 3]
    part = support.take(np.array([True, True, True, False]))
    assert part.classes.tolist() == ["owl", "robin", "wren"]
    assert part.labels.tolist() == [0, 1, 2]
    assert part.class_vectors is None


def test_all_parts_are_divided_alike() -> None:
    support = SupportSet.read(Features(X), Y, Features(X), range(4), Features(2 * X))
    half = support.divide([1])
    assert half.features == Features(X[[3, 1, 0, 2]] / 2)
    assert (half.views, half.unlabelled) == (Features(X / 2), Features(X))
    assert support.divide([0]) is support


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"y": ["a"] * 4}, "at least 2 classes"),
        ({"y": ["a", "b"]}, "4 images, but y has 2 labels"),
        ({"view_of": [0]}, "without views"),
        ({"views": Features(X[:1]), "view_of": [4]}, "rows of X, 0 to 3"),
        ({"views": Features(X[:1, :2]), "view_of": [0]}, "other blocks than X"),
        ({"unlabelled": Features(X[:, :2])}, "other blocks than X"),
        ({"class_vectors": {"owl": X[0]}}, "no vector for the class 'robin'"),
        ({"class_vectors": "owl"}, "one row per class"),
        ({"class_vectors": [[1, 2], [1]]}, "one row per class"),
        ({"class_vectors": {**VECTORS, "owl": ["a"] * 3}}, "must be a list of numbers"),
        ({"class_vectors": {**VECTORS, "owl": [[1], [1, 2]]}}, "must be a list of numbers"),
        ({"class_vectors": {**VECTORS, "owl": [1e300] * 3}}, "has no direction"),
        ({"class_vectors": {**VECTORS, None: X[0]}}, "is missing"),
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
    model = FewShotClassifier(None, recipe=Recipe(steps=2)).fit_table(table)
    assert model.shots_.features is model.classifier_.support_
    model.rename("wren", "dunnock")
    assert model.shots_.features is model.classifier_.support_
