"""Out-of-fold predictions: nothing of an image reaches the head that predicts it."""

import numpy as np
import pytest

from mivhead import Features, Recipe
from mivhead.ensemble.stacking import assign_folds, fold_numbers, out_of_fold_cosines
from mivhead.features import SupportSet
from mivhead.head import train
from mivhead.head.components import bag_starts
from mivhead.head.recipe import BlockConfig, resolve_blocks
from mivhead.head.train import HeadTask, Trainer

RECIPE = Recipe()
LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 2, 3, 3])  # class 2 has one image
SINGLE = 7
VIEW_ROWS = np.array([9, 0, 4, 4, 7, 2])


def drawn(images: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (images, 6, 3, 3), (images, 8)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def support_of(blocks: list, views: list | None = None) -> SupportSet:
    if views is None:
        return SupportSet(Features(blocks), LABELS, None, np.empty(0, np.int64))
    return SupportSet(Features(blocks), LABELS, Features(views), VIEW_ROWS)


@pytest.fixture
def support() -> SupportSet:
    return support_of(drawn(10, 0), drawn(6, 1))


def out_of_fold(
    support: SupportSet, configs: list[BlockConfig], seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Train a head without each fold; return cosines, and which images have them."""
    fold = assign_folds(support)
    trainer = Trainer(support, configs, RECIPE, seed)
    trained = trainer.fit([fold != number for number in fold_numbers(fold)])
    classes = len(support.shots)
    return out_of_fold_cosines(trained, fold, len(configs), classes), fold >= 0


def test_classes_are_split_into_halves(support: SupportSet) -> None:
    fold = assign_folds(support)
    for label, sizes in ((0, (2, 2)), (1, (2, 1)), (3, (1, 1))):
        own = fold[label == LABELS]
        assert ((own == 0).sum(), (own == 1).sum()) == sizes
    assert fold[SINGLE] == -1


def test_neighbours_in_length_go_to_different_halves(support: SupportSet) -> None:
    fold, token = assign_folds(support), support.features.blocks[-1].token
    for label in (0, 1, 3):
        own = np.flatnonzero(label == LABELS)
        ranked = sorted(own, key=lambda i: float((token[i] ** 2).sum()))
        assert [fold[i] for i in ranked] == [place % 2 for place in range(len(own))]


def test_the_order_of_images_and_classes_does_not_change_the_halves(support: SupportSet) -> None:
    fold = assign_folds(support)
    rng = np.random.default_rng(0)
    for _ in range(5):
        names = rng.permutation(4)  # class c becomes names[c]
        order = rng.permutation(10)
        order = order[np.argsort(names[LABELS[order]], kind="stable")]
        other = SupportSet(
            support.features[order], names[LABELS[order]], None, np.empty(0, np.int64)
        )
        np.testing.assert_array_equal(assign_folds(other), fold[order])


def test_no_head_has_seen_an_image_or_its_views(support: SupportSet, monkeypatch) -> None:
    trained, original = [], train.train

    def spy(layers, candidates, task: HeadTask, *rest):
        if layers[0].config.channels == 8:  # block 1, which has tokens
            (each,) = candidates
            trained.append(each.token[task.rows])
        return original(layers, candidates, task, *rest)

    monkeypatch.setattr(train, "train", spy)

    def in_turn(work, parts):  # one fold after the other
        for part in range(parts):
            work(part)

    monkeypatch.setattr(train, "run_parts", in_turn)
    out_of_fold(support, resolve_blocks(support.features))
    fold = assign_folds(support)
    assert len(trained) == 2
    for number, tokens in enumerate(trained):
        seen = {tuple(row) for row in tokens.tolist()}
        for i, token in enumerate(support.features.blocks[1].token.tolist()):
            assert (tuple(token) in seen) == (fold[i] != number)
        for row, token in zip(VIEW_ROWS, support.views.blocks[1].token.tolist(), strict=True):
            assert (tuple(token) in seen) == (fold[row] != number)


def test_an_image_and_its_views_do_not_change_predictions_of_its_own_fold(
    support: SupportSet,
) -> None:
    """Its own block 0 becomes another, and its views too; folds are assigned by block 1."""
    changed = 4
    blocks, views = drawn(10, 0), drawn(6, 1)
    blocks[0][changed] = 50 * blocks[0][changed][::-1]
    for part in views:
        part[changed == VIEW_ROWS] += 30
    other = support_of(blocks, views)
    configs = resolve_blocks(support.features)
    before, predicted = out_of_fold(support, configs)
    after, _ = out_of_fold(other, configs)
    fold = assign_folds(support)
    np.testing.assert_array_equal(assign_folds(other), fold)
    same_head = (fold == fold[changed]) & (np.arange(10) != changed)
    np.testing.assert_array_equal(after[:, same_head], before[:, same_head])
    other_head = predicted & (fold != fold[changed])
    assert not np.allclose(after[:, other_head], before[:, other_head], atol=1e-3)


def test_predictions_are_those_of_heads_trained_on_the_other_half(support: SupportSet) -> None:
    configs = resolve_blocks(support.features)
    found, predicted = out_of_fold(support, configs, seed=3)
    assert predicted.tolist() == [i != SINGLE for i in range(10)]
    assert (found[:, SINGLE] == 0).all()
    fold = assign_folds(support)
    for number in (0, 1):
        kept = support.take(fold != number)
        head, losses, _ = Trainer(kept, configs, RECIPE, 3).fit()[0]
        assert len(losses) == RECIPE.steps
        assert SINGLE in np.flatnonzero(fold != number)
        rows = np.flatnonzero(fold == number)
        embedded = head.embed(kept.features)
        cosines = head.cosines(embedded, bag_starts(kept.shots), support.features[rows])
        np.testing.assert_allclose(found[:, rows], cosines, rtol=1e-5, atol=1e-5)


def test_the_single_image_of_a_class_has_no_out_of_fold_prediction() -> None:
    single = SupportSet(
        Features(np.eye(3, dtype=np.float32)), np.arange(3), None, np.empty(0, np.int64)
    )
    assert assign_folds(single).tolist() == [-1, -1, -1]
    found, predicted = out_of_fold(single, resolve_blocks(single.features))
    assert not predicted.any()
    assert found.shape[1:] == (3, 3)


def test_the_image_behind_each_pseudo_query_is_hidden_where_the_recipe_masks_it(
    support: SupportSet,
) -> None:
    alone = {SINGLE: -1}  # nothing else could stand for its class
    everyone = HeadTask.of(support, RECIPE, None)
    assert everyone.hidden.tolist() == [alone.get(i, i) for i in [*range(10), *VIEW_ROWS]]
    assert HeadTask.of(support, Recipe.paper(), None).hidden is None
