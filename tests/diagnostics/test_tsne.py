"""The vectors of an episode, derived again from the head's parameters in plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mivhead import FewShotClassifier, MIVClassifier, Preprocessing
from mivhead.backbones import from_module
from mivhead.diagnostics.tsne import centroid_episode, miv_episodes, tuned_episode
from mivhead.errors import InputError
from mivhead.head.recipe import Recipe
from mivhead.images.imageset import ImageSet, from_images
from mivhead.methods.registry import make_method

LABELS = ["a", "a", "a", "b", "b", "c"]


@pytest.fixture(scope="module")
def blocks():
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(7, 8, 4, 4)).astype(np.float32)
    return [maps, rng.normal(size=(7, 12)).astype(np.float32)]


def fitted(blocks, **recipe) -> MIVClassifier:
    shots = [block[:6] for block in blocks]
    return MIVClassifier(Recipe.paper(steps=3, **recipe), random_state=0).fit(shots, LABELS)


def cosines(episode, centred: bool) -> np.ndarray:
    mean = episode.prototypes.mean(axis=0) if centred else 0.0
    p, q = episode.prototypes - mean, episode.query - mean
    return (p @ q) / (np.linalg.norm(p, axis=1) * np.linalg.norm(q))


@pytest.mark.parametrize(
    "recipe",
    [{}, {"skip": False}, {"co_excitation": False}, {"cross_attention": False}],
    ids=lambda recipe: next(iter(recipe), "full"),
)
def test_cosines_of_these_vectors_are_the_heads_logits(blocks, recipe):
    classifier = fitted(blocks, **recipe)
    query = [block[6:] for block in blocks]
    per_block = [cosines(e, centred=True) for e in miv_episodes(classifier, query)]
    logits = np.log(np.sum(np.exp(per_block), axis=0)) / 0.1  # the authors' order
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(classifier.predict_proba(query)[0], expected, rtol=2e-4)


def test_the_ablation_with_means(blocks):
    classifier = fitted(blocks, prototype="mean")
    query = [block[6:] for block in blocks]
    for episode in miv_episodes(classifier, query):
        np.testing.assert_allclose(episode.prototypes[0], episode.shots[:3].mean(axis=0), atol=1e-6)
    per_block = [cosines(e, centred=False) for e in miv_episodes(classifier, query)]
    logits = np.log(np.sum(np.exp(per_block), axis=0)) / 0.1
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(classifier.predict_proba(query)[0], expected, rtol=2e-4)


def test_a_single_shot_is_its_prototype(blocks):
    classifier = fitted(blocks)
    for episode in miv_episodes(classifier, [block[6:] for block in blocks]):
        assert episode.labels.tolist() == [0, 0, 0, 1, 1, 2]
        np.testing.assert_allclose(episode.prototypes[2], episode.shots[5], atol=1e-6)


def test_centroids_are_means_of_pooled_features(blocks):
    episode = centroid_episode(fitted(blocks), [block[6:] for block in blocks])
    np.testing.assert_allclose(episode.prototypes[1], blocks[1][3:5].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(episode.query, blocks[1][6])


def test_one_image_only(blocks):
    with pytest.raises(InputError, match="one query, got 2 images"):
        miv_episodes(fitted(blocks), [block[:2] for block in blocks])


def test_the_miv_head_only():
    ncc = make_method("ncc").fit(torch.eye(4), [0, 0, 1, 1])
    with pytest.raises(InputError, match="Only the MIV-head"):
        miv_episodes(ncc, torch.eye(4)[:1])


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 255, (7, 24, 24, 3), np.uint8))


def test_a_tuned_backbone(pictures):
    """Cosines of these vectors are the probabilities of TSA."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    preprocessing = Preprocessing(size=32)
    backbone = from_module(resnet18(), ["layer4"], name="random", preprocessing=preprocessing)
    model = FewShotClassifier(
        backbone, method="tsa", method_params={"steps": 1}, cache=False, verbose=False
    ).fit(pictures[:6], LABELS)
    shots = ImageSet(from_images(pictures[:6]).sources, tuple(LABELS))
    episode = tuned_episode(model, shots, from_images(pictures[6:]))
    assert (episode.title, episode.labels.tolist()) == ("tsa", [0, 0, 0, 1, 1, 2])
    np.testing.assert_allclose(episode.prototypes[1], episode.shots[3:5].mean(axis=0), atol=1e-4)
    logits = cosines(episode, centred=False) / 0.1
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(model.predict_proba(pictures[6:])[0], expected, rtol=1e-3)
