"""The recipe "experts": the ensemble without a head."""

from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead import FewShotClassifier, MIVClassifier
from mivhead.diagnostics.tsne import miv_embeddings
from mivhead.ensemble.ridge import Experts
from mivhead.ensemble.stacking import fit_weights
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.head.recipe import Recipe
from mivhead.support import SupportSet
from tests.helpers.tiny_backbone import TinyBackbone

CENTRES = np.random.default_rng(0).normal(size=(3, 8, 4, 4))


def task(shots: list[int], seed: int = 1, noise: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(3), shots)
    return (CENTRES[y] + noise * rng.normal(size=(len(y), 8, 4, 4))).astype(np.float32), y


def test_logits_are_the_stacked_memberships_of_the_experts() -> None:
    X, y = task([4, 4, 4])
    queries = task([5, 5, 5], seed=2)[0]
    features = Features(X)
    experts, left_out = Experts.fit(features, y, 3)
    weights = fit_weights(left_out, y, np.array([3.0, 1.0, 3.0], np.float32))
    expected = np.einsum("m,mic->ic", weights, experts(Features(queries)))
    model = MIVClassifier("experts", random_state=0).fit(X, y)
    np.testing.assert_allclose(model.logits(queries), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shots", [[5, 5, 5], [1, 2, 9], [1, 1, 1]], ids=str)
def test_it_classifies_and_stores_no_shots(shots: list[int], tmp_path: Path) -> None:
    X, y = task(shots, noise=0.5)
    queries, wanted = task([20, 20, 20], seed=2, noise=0.5)
    model = MIVClassifier("experts", random_state=0).fit(X, y)
    assert model.score(queries, wanted) > 0.9
    assert model.losses_ == []
    assert model.head_.params == {}
    assert len(model.support_) == 0
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv").classifier_
    np.testing.assert_array_equal(again.logits(queries), model.logits(queries))
    whole = MIVClassifier(random_state=0).fit(X, y)
    whole.save(tmp_path / "whole.miv")
    assert (tmp_path / "m.miv").stat().st_size < (tmp_path / "whole.miv").stat().st_size


def test_the_objective_of_the_head_does_not_matter() -> None:
    X, y = task([3, 3, 3])
    joint = MIVClassifier(Recipe(vote="experts", objective="joint"), random_state=0).fit(X, y)
    np.testing.assert_array_equal(
        joint.logits(X), MIVClassifier("experts", random_state=1).fit(X, y).logits(X)
    )


def test_cross_validation_leaves_shots_out() -> None:
    X, y = task([4, 4, 4], noise=0.5)
    fold = np.tile([0, 1, 0, 1], 3)
    support = SupportSet.read(Features(X), y)
    logits = MIVClassifier("experts", random_state=0).cross_validated_logits(support, fold)
    assert logits.shape == (12, 3)
    assert (logits.argmax(axis=1) == y).mean() > 0.8


def test_unlabelled_images_are_used() -> None:
    X, y = task([1, 1, 1])
    others = task([20, 20, 20], seed=3)[0]
    model = MIVClassifier("experts", random_state=0).fit(X, y, unlabelled=others)
    assert model.unlabelled_ is not None
    assert model.unlabelled_.images == 60


def test_there_is_no_attention_to_draw() -> None:
    X, y = task([3, 3, 3])
    model = MIVClassifier("experts", random_state=0).fit(X, y)
    with pytest.raises(InputError, match="Only the MIV-head"):
        miv_embeddings(model, X[:1])


def test_shots_can_be_added_to_a_model_of_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [np.full((16, 16, 3), 40 + 80 * (i % 2) + rng.integers(9), np.uint8) for i in range(6)]
    model = FewShotClassifier(TinyBackbone(), recipe="experts").fit(images, ["dark", "light"] * 3)
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone())
    assert again.predict(images).tolist() == ["dark", "light"] * 3
    again.add([np.full((16, 16, 3), 60, np.uint8)], ["dark"])
    assert again.shot_counts == {"dark": 4, "light": 3}
    assert again.predict(images).tolist() == ["dark", "light"] * 3
