"""The recipe "experts": the ensemble without a head."""

from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead import MIVClassifier
from mivhead.ensemble.constants import FEW_SHOTS
from mivhead.ensemble.ridge import Experts
from mivhead.ensemble.stacking import fit_weights
from mivhead.features import Features, SupportSet

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
    weights *= 1 - FEW_SHOTS / 4  # of four shots per class
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
    mivhead.save(model, tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv").classifier_
    np.testing.assert_array_equal(again.logits(queries), model.logits(queries))
    whole = MIVClassifier(random_state=0).fit(X, y)
    mivhead.save(whole, tmp_path / "whole.miv")
    assert (tmp_path / "m.miv").stat().st_size < (tmp_path / "whole.miv").stat().st_size


def test_cross_validation_leaves_shots_out() -> None:
    X, y = task([4, 4, 4], noise=0.5)
    fold = np.tile([0, 1, 0, 1], 3)
    support = SupportSet.read(Features(X), y)
    logits = MIVClassifier("experts", random_state=0).cross_validated_logits(support, fold)
    assert logits.shape == (12, 3)
    assert (logits.argmax(axis=1) == y).mean() > 0.8
