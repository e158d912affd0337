"""The vectors of an image, derived again from the head's parameters in plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from mivhead import MIVClassifier
from mivhead.errors import InputError
from mivhead.head.recipe import Recipe
from mivhead_bench.figures.tsne import (
    Embeddings,
    centroid_embeddings,
    draw_tsne,
    miv_embeddings,
    project,
)
from tests.helpers.extras import needs
from tests.helpers.pictures import ink

pytestmark = needs("matplotlib", "plot")

LABELS = ["a", "a", "a", "b", "b", "c"]


@pytest.fixture(scope="module")
def blocks():
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(7, 8, 4, 4)).astype(np.float32)
    return [maps, rng.normal(size=(7, 12)).astype(np.float32)]


def fitted(blocks) -> MIVClassifier:
    shots = [block[:6] for block in blocks]
    return MIVClassifier(Recipe.paper(steps=3), random_state=0).fit(shots, LABELS)


def cosines(found) -> np.ndarray:
    mean = found.prototypes.mean(axis=0)
    p, q = found.prototypes - mean, found.query - mean
    return (p @ q) / (np.linalg.norm(p, axis=1) * np.linalg.norm(q))


def test_cosines_of_these_vectors_are_the_heads_logits(blocks):
    classifier = fitted(blocks)
    query = [block[6:] for block in blocks]
    per_block = [cosines(e) for e in miv_embeddings(classifier, query)]
    logits = np.log(np.sum(np.exp(per_block), axis=0)) / 0.1  # the authors' order
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(classifier.predict_proba(query)[0], expected, rtol=2e-4)


def test_a_single_shot_is_its_prototype(blocks):
    classifier = fitted(blocks)
    for found in miv_embeddings(classifier, [block[6:] for block in blocks]):
        assert found.labels.tolist() == [0, 0, 0, 1, 1, 2]
        np.testing.assert_allclose(found.prototypes[2], found.shots[5], atol=1e-6)


def test_centroids_are_means_of_pooled_features(blocks):
    found = centroid_embeddings(fitted(blocks), [block[6:] for block in blocks])
    np.testing.assert_allclose(found.prototypes[1], blocks[1][3:5].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(found.query, blocks[1][6])


def test_one_image_only(blocks):
    with pytest.raises(InputError, match="one image, got 2"):
        miv_embeddings(fitted(blocks), [block[:2] for block in blocks])


def around_centres(classes: int, shots: int = 3, title: str = "block 1 of 2") -> Embeddings:
    rng = np.random.default_rng(0)
    centres = 10 * rng.normal(size=(classes, 6))
    labels = np.repeat(np.arange(classes), shots)
    points = centres[labels] + rng.normal(size=(len(labels), 6))
    return Embeddings(title, points, labels, centres, centres[0] + 0.1)


def test_neighbours_stay_neighbours():
    plane = project(around_centres(4, shots=6), seed=0)
    assert plane.shape == (24 + 4 + 1, 2)
    distances = np.linalg.norm(plane[24:28] - plane[28], axis=1)
    assert distances.argmin() == 0  # the query is nearest to the prototype it was made from


def test_the_same_seed_gives_the_same_plane():
    np.testing.assert_array_equal(
        project(around_centres(3), seed=1), project(around_centres(3), seed=1)
    )


@pytest.mark.parametrize("classes", [2, 30])
def test_tsne_is_drawn(classes, tmp_path):
    names = [f"class $1_{i}" for i in range(classes)]
    panels = [around_centres(classes, shots=1), around_centres(classes, title="nearest centroids")]
    truth = names[1] if classes > 2 else None
    draw_tsne(panels, names, tmp_path / "t.png", title="a $", truth=truth)
    assert ink(tmp_path / "t.png") > 5


def test_many_classes_are_named_or_counted() -> None:
    """50 hues are indistinguishable: the most probable classes are coloured, the rest is grey."""
    rng = np.random.default_rng(0)
    names = [f"a rather long name, no. {i}" for i in range(50)]
    labels = np.arange(50).repeat(2)
    panel = Embeddings("b", rng.normal(size=(100, 4)), labels, rng.normal(size=(50, 4)), np.ones(4))
    figure = draw_tsne([panel], names, title="t", truth=names[40], ranked=names)
    legend = figure.legends[0]
    entries = [text.get_text() for text in legend.get_texts()]
    assert entries[3:-1] == [*names[:11], names[40]]
    assert entries[-1] == "38 other classes"
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert box.x1 <= figure.bbox.x1 + 1
    assert box.y0 >= figure.bbox.y0
    assert box.y1 <= figure.bbox.y1
    colours = {c.get_markerfacecolor() for c in legend.legend_handles[3:-1]}
    assert len(colours) == 12
    few = draw_tsne([panel], names, title="t")  # without a ranking, the first ones
    assert few.legends[0].get_texts()[3].get_text() == names[0]
