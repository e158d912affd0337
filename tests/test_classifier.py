"""`MIVClassifier`: what must always hold, whatever the features."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mivhead import BlockPreset, Features, MIVClassifier, Preset, Recipe
from mivhead.errors import InputError
from mivhead.features import SupportSet
from mivhead.head.recipe import RECIPES

FAST = {"recipe": Recipe(steps=8), "random_state": 0}


def clusters(seed: int, shots: list[int], extra: int = 0) -> tuple[Features, np.ndarray]:
    """Features of two blocks in clusters, one per class, with unequal shots."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(shots)), np.array(shots) + extra)
    centres = np.random.default_rng(99).normal(size=(len(shots), 12))
    base = centres[labels] + 0.3 * rng.normal(size=(len(labels), 12))
    maps = base[:, :8, None, None] + 0.3 * rng.normal(size=(len(labels), 8, 4, 4))
    blocks = [
        maps.astype(np.float32),
        {"map": maps[:, :, :2, :2], "token": base[:, 4:]},
    ]
    return Features(blocks).to("float32"), labels


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    return load_digits(return_X_y=True)


@pytest.mark.parametrize(
    ("recipe", "accuracy", "falls"), [("paper", 0.75, 4), ("mivhead", 0.8, 1.5)]
)
def test_it_learns(digits, recipe: str, accuracy: float, falls: float) -> None:
    X, y = digits
    classifier = MIVClassifier(recipe, random_state=0).fit(X[:200], y[:200])
    assert classifier.score(X[200:600], y[200:600]) > accuracy
    assert classifier.losses_[-1] < classifier.losses_[0] / falls


def test_the_same_seed_gives_the_same_model_bit_for_bit() -> None:
    X, y = clusters(0, [3, 2, 1])
    for recipe in (Recipe.paper(steps=8), Recipe(steps=8)):
        a, b = (MIVClassifier(recipe, random_state=0).fit(X, y) for _ in range(2))
        for name, value in a.head_.params.items():
            np.testing.assert_array_equal(value, b.head_.params[name])
        np.testing.assert_array_equal(a.logits(X), b.logits(X))
        c = clone(a).set_params(random_state=1).fit(X, y)
        from_seed = recipe.start == "random"  # the other recipe draws nothing
        assert np.array_equal(a.logits(X), c.logits(X)) != from_seed


def test_fitting_leaves_the_global_generators_alone() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002  # the global generator is the point
    before = random.random(), np.random.random()  # noqa: NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    X, y = clusters(0, [2, 2])
    MIVClassifier(**FAST).fit(X, y)
    assert before == (random.random(), np.random.random())  # noqa: NPY002


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_order_of_shots_and_queries_does_not_matter(shots: list[int], drawn) -> None:
    X, y = clusters(1, shots)
    queries, _ = clusters(2, [4] * len(shots))
    expected = MIVClassifier(**FAST).fit(X, y).logits(queries)
    order = list(range(len(y)))
    drawn.shuffle(order)
    shuffled = MIVClassifier(**FAST).fit(X[order], y[order])
    turn = list(range(len(queries)))
    drawn.shuffle(turn)
    np.testing.assert_allclose(shuffled.logits(queries[turn]), expected[turn], atol=2e-3, rtol=0)


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)))
def test_names_and_order_of_classes_do_not_matter(names: list[int]) -> None:
    X, y = clusters(1, [1, 2, 3, 2])
    queries, _ = clusters(2, [3] * 4)
    expected = MIVClassifier(**FAST).fit(X, y).predict_proba(queries)
    renamed = MIVClassifier(**FAST).fit(X, np.array(names)[y]).predict_proba(queries)
    np.testing.assert_allclose(renamed[:, names], expected, atol=2e-4)


def test_a_query_is_answered_alone_as_in_a_crowd() -> None:
    X, y = clusters(1, [1, 5, 2])
    queries, _ = clusters(2, [50] * 3)  # more than one batch
    classifier = MIVClassifier(**FAST).fit(X, y)
    together = classifier.logits(queries)
    for i in (0, 70, 149):
        alone = classifier.logits(queries[i])
        np.testing.assert_allclose(alone, together[i : i + 1], rtol=1e-6, atol=1e-5)


def test_chunks_do_not_change_the_answer(monkeypatch) -> None:
    X, y = clusters(1, [1, 5, 2])
    queries, _ = clusters(2, [10] * 3)
    expected = MIVClassifier(**FAST).fit(X, y).logits(queries)
    monkeypatch.setattr("mivhead.head.formulas.CHUNK_VALUES", 100)
    monkeypatch.setattr("mivhead.head.components.PREDICT", 7)
    again = MIVClassifier(**FAST).fit(X, y).logits(queries)
    np.testing.assert_allclose(again, expected, atol=1e-3, rtol=0)


def test_queries_are_scored_in_batches() -> None:
    X, y = clusters(1, [2] * 4)
    queries, _ = clusters(2, [500] * 4)
    classifier = MIVClassifier(**FAST).fit(X, y)
    seen = []
    original = classifier.head_.embed
    classifier.head_.embed = lambda features: seen.append(len(features)) or original(features)
    classifier.logits(queries)
    assert max(seen) <= 64
    assert sum(seen) == len(queries)


def test_many_classes_of_one_shot_need_no_warning() -> None:
    X = np.random.default_rng(0).normal(size=(40, 16))
    classifier = MIVClassifier(Recipe(steps=2), random_state=0).fit(X, np.arange(40))
    assert classifier.predict_proba(X).shape == (40, 40)


def test_views_are_pseudo_queries_of_their_originals_class() -> None:
    X, y = clusters(1, [2, 2, 2])
    views, _ = clusters(5, [2, 2, 2])
    plain = MIVClassifier(**FAST).fit(X, y)
    order = [5, 0, 3, 1, 2, 4]
    with_views = MIVClassifier(**FAST).fit(X, y, views=views[order], view_of=order)
    assert with_views.losses_[0] != plain.losses_[0]
    assert len(with_views.support_) == len(X)  # bags hold originals only
    # The same as training on everything with bags of originals: the loss is a mean over both.
    both = MIVClassifier(**FAST).fit(X, y, views=X, view_of=np.arange(6))
    assert both.losses_[0] == pytest.approx(plain.losses_[0], abs=1e-6)


def test_string_labels_lists_of_blocks_and_tables(digits) -> None:
    X, y = digits
    names = np.array(["zero", "one", "two"])[y[y < 3]]
    table = X[y < 3].astype(np.float32)
    classifier = MIVClassifier(**FAST).fit(table[:30], names[:30])
    assert set(classifier.classes_) == {"zero", "one", "two"}
    assert set(classifier.predict(table[30:40])) <= set(classifier.classes_)
    maps = table.reshape(-1, 1, 8, 8)
    blocks = MIVClassifier(**FAST).fit([maps[:30], {"token": table[:30]}], names[:30])
    assert blocks.predict([maps[30:40], {"token": table[30:40]}]).shape == (10,)


def test_scikit_learns_tools(digits) -> None:
    X, y = digits[0][:90], digits[1][:90]
    assert cross_val_score(MIVClassifier(**FAST), X, y, cv=3).mean() > 0.5
    recipes = [Recipe(eta=eta, steps=steps) for eta in (0.0, 0.1) for steps in (2, 8)]
    search = GridSearchCV(MIVClassifier(**FAST), {"recipe": recipes}, cv=2)
    assert search.fit(X, y).best_score_ > 0.5
    pipeline = make_pipeline(StandardScaler(), MIVClassifier(**FAST)).fit(X, y)
    assert pipeline.score(X, y) > 0.8
    features = Features(X.reshape(-1, 1, 8, 8))
    scores = cross_val_score(MIVClassifier(**FAST), features, y, cv=3)
    assert scores.shape == (3,)


def test_two_classes_follow_scikit_learns_convention() -> None:
    X, y = clusters(0, [3, 3])
    classifier = MIVClassifier(**FAST).fit(X, y)
    decisions = classifier.decision_function(X)
    assert decisions.shape == (6,)
    np.testing.assert_array_equal(decisions > 0, classifier.predict(X) == 1)


def test_probabilities() -> None:
    X, y = clusters(0, [3, 1, 2])
    classifier = MIVClassifier(**FAST).fit(X, y)
    p = classifier.predict_proba(X)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    np.testing.assert_array_equal(classifier.classes_[p.argmax(axis=1)], classifier.predict(X))


def test_a_recipe_is_taken_by_name_or_as_an_object() -> None:
    X, y = clusters(0, [2, 2])
    assert MIVClassifier().fit(X, y).head_.recipe == Recipe()
    for name, recipe in RECIPES.items():
        assert MIVClassifier(name).fit(X, y).head_.recipe == recipe
        changed = replace(recipe, steps=1, temperature_order="inside", eta=0.5)
        classifier = MIVClassifier(changed).fit(X, y)
        assert classifier.head_.recipe == changed
        assert len(classifier.losses_) == changed.has_head


def test_fields_of_the_derived_preset_can_be_replaced() -> None:
    X, y = clusters(0, [2, 2])
    classifier = MIVClassifier(preset={"tau": 7.0, "pool_sizes": [[3], []]}, **FAST).fit(X, y)
    assert [layer.config.tau for layer in classifier.head_.layers] == [7.0, 7.0]
    assert [layer.config.pool_sizes for layer in classifier.head_.layers] == [(3,), ()]
    with pytest.raises(InputError, match=r"field of a preset must be .*'ta'\. Did you mean 'tau'"):
        MIVClassifier(preset={"ta": 7.0}).fit(X, y)


def test_views_are_left_out_by_the_recipe() -> None:
    X, y = clusters(0, [2, 2])
    views, _ = clusters(5, [2, 2])
    alone = MIVClassifier(Recipe(steps=3)).fit(X, y)
    given_views = {"views": views, "view_of": np.arange(4)}
    without = MIVClassifier(Recipe(steps=3, use_views=False)).fit(X, y, **given_views)
    np.testing.assert_array_equal(without.logits(X), alone.logits(X))


def test_presets_are_taken_or_derived() -> None:
    X, y = clusters(0, [2, 2])
    derived = MIVClassifier(**FAST).fit(X, y).head_.layers
    assert [layer.config.form for layer in derived] == ["cnn", "vit"]
    assert [layer.config.tau for layer in derived] == [500.0, 200.0]
    blocks = (BlockPreset((3,), tau=7.0), BlockPreset((), native=False, form="vit"))
    given_preset = MIVClassifier(preset=Preset(("a", "b"), blocks), **FAST).fit(X, y)
    assert given_preset.head_.layers[0].config.pool_sizes == (3,)
    with pytest.raises(InputError, match="1 blocks, the features have 2"):
        MIVClassifier(preset=blocks[:1], **FAST).fit(X, y)


@pytest.mark.parametrize("recipe", ["papr", 3])
def test_a_wrong_recipe_is_refused(recipe: object) -> None:
    X, y = clusters(0, [2, 2])
    with pytest.raises(InputError, match="recipe"):
        MIVClassifier(recipe).fit(X, y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature_order": "before"}, "after, inside"),
        ({"temperature": 0.0}, "temperature"),
        ({"steps": -1}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"eta": -1}, "eta"),
        ({"eta": np.nan}, "eta"),
        ({"momentum": 1.0}, "momentum"),
        ({"use_views": 1}, "use_views"),
    ],
)
def test_wrong_values_of_a_recipe_are_named(change: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe(**change)


def test_numbers_of_numpy_are_taken() -> None:
    assert Recipe(eta=np.float32(0.5), steps=np.int64(3)).steps == 3


def test_tiny_features_are_refused_before_they_are_distorted(digits) -> None:
    X, y = digits
    for scale in (1e-11, 1e-12):  # the lengths of vectors would be about 1e-12, where norms end
        with pytest.raises(InputError, match="multiply your features"):
            MIVClassifier("paper").fit(scale * X[:50], y[:50])
    small = MIVClassifier("paper", random_state=0).fit(2.0**-29 * X[:200], y[:200])
    assert small.score(2.0**-29 * X[200:600], y[200:600]) > 0.75  # as in `test_it_learns`


def test_wrong_data_is_named() -> None:
    X, y = clusters(0, [2, 2])
    with pytest.raises(InputError, match="at least 2 classes"):
        MIVClassifier().fit(X, np.zeros(4))
    with pytest.raises(InputError, match="4 images, but y has 3"):
        MIVClassifier().fit(X, y[:3])
    with pytest.raises(InputError, match="together"):
        MIVClassifier().fit(X, y, view_of=[0])
    with pytest.raises(InputError, match="one for each of 4 views"):
        MIVClassifier().fit(X, y, views=X, view_of=[0])
    with pytest.raises(InputError, match="rows 0 to 3"):
        MIVClassifier().fit(X, y, views=X, view_of=[0, 1, 2, 4])
    with pytest.raises(InputError, match="other blocks than X"):
        MIVClassifier().fit(X, y, views=np.ones((4, 2)), view_of=[0, 1, 2, 3])
    with pytest.raises(NotFittedError):
        MIVClassifier().predict(X)


def test_other_channels_in_prediction_than_in_fitting() -> None:
    X, y = clusters(0, [2, 2])
    classifier = MIVClassifier(**FAST).fit(X, y)
    with pytest.raises(InputError, match=r"expected .*'block0.map': \(8, 4, 4\)"):
        classifier.predict(np.ones((1, 9, 4, 4)))


# How frequent classes are, and how many shots they have.


def test_refitting_leaves_the_pooled_vector_to_others() -> None:
    rng = np.random.default_rng(0)
    X = Features([rng.random((6, 8, 4, 4), np.float32), {"token": rng.random((6, 16))}])
    y = np.arange(6) // 2
    preset = [BlockPreset(), BlockPreset(form="vit", pooled=True)]
    model = MIVClassifier(preset=preset, random_state=0).fit(X, y)
    again = model.unfitted().fit_support(SupportSet.read(X, y), model.seed_)
    assert again.blocks_ == model.blocks_
    np.testing.assert_array_equal(again.logits(X), model.logits(X))
