"""The classifier that a backbone was trained with, and what it says about one-shot tasks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead import MIVClassifier
from mivhead.backbones import load_backbone
from mivhead.backbones.classes import read_classifier, recognise, recognition
from mivhead.backbones.preset import BlockPreset
from mivhead.ensemble.stacking import LARGEST_TRUST, RECOGNISED, trust_mean
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.head.blocks import BlockConfig
from mivhead.support import SupportSet

NAME = "efficientnet_lite0"


def test_recognition_in_plain_loops() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(6, 0.3), size=4)
    sure = sum(max(row) for row in p.tolist()) / 4
    answers = [sum(p[i, c] for i in range(4)) / 4 for c in range(6)]
    information = sum(  # of the joint distribution of image and answer
        p[i, c] / 4 * math.log(p[i, c] / answers[c]) for i in range(4) for c in range(6)
    )
    assert recognition(p) == pytest.approx(sure * information / math.log(4))


def test_recognition_is_between_none_and_all() -> None:
    rng = np.random.default_rng(1)
    for sharpness in (0.01, 0.1, 1.0, 10.0):
        assert 0 <= recognition(rng.dirichlet(np.full(9, sharpness), size=5)) <= 1
    assert recognition(np.eye(5)) == pytest.approx(1)
    assert recognition(np.full((5, 7), 1 / 7)) == pytest.approx(0, abs=1e-12)


def test_the_classifier_is_the_one_of_the_network() -> None:
    weights, biases = read_classifier(NAME)
    assert weights.shape == (1000, 1280)
    assert biases.shape == (1000,)
    torch = pytest.importorskip("torch")
    from mivhead.backbones.efficientnet_lite_network import build

    means = np.random.default_rng(0).random((3, 1280), np.float32)
    with torch.no_grad():
        p = build(NAME).classifier(torch.from_numpy(means)).softmax(dim=1).numpy()
    assert recognise(NAME, means) == pytest.approx(recognition(p), rel=1e-4)
    assert recognise(NAME, means[:, :100]) is None  # of another backbone


def test_the_better_the_shots_are_recognised_the_more_the_mean_counts() -> None:
    prior, means = np.array([0.4, 7.5, 2.5], np.float32), np.array([False, False, True])
    np.testing.assert_allclose(trust_mean(prior, means, RECOGNISED), prior, rtol=1e-6)
    for recognised in (0.0, 0.1, 0.3, 1.0):
        found = trust_mean(prior, means, recognised)
        assert found.sum() == pytest.approx(prior.sum(), rel=1e-6)  # so probabilities stay as sure
        factor = min((recognised / RECOGNISED) ** 3, LARGEST_TRUST)
        assert found[2] / found[0] == pytest.approx(factor * 2.5 / 0.4, rel=1e-5)
        assert found[1] / found[0] == pytest.approx(7.5 / 0.4, rel=1e-5)


def shots(count: int, scale: float = 1.0) -> Features:
    rng = np.random.default_rng(2)
    shapes = [(112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)]
    return Features([scale * rng.random((count, *shape), np.float32) ** 4 for shape in shapes])


def test_one_shot_models_use_it_and_files_keep_it(tmp_path: Path) -> None:
    preset = load_backbone(NAME).preset
    X, y = shots(4), np.arange(4)
    usual = MIVClassifier(preset=[BlockPreset(plain=i == 3) for i in range(4)], random_state=0)
    without, model = usual.fit(X, y), MIVClassifier(preset=preset, random_state=0).fit(X, y)
    recognised = recognise(NAME, X.blocks[-1].map.mean(axis=(2, 3)))
    expected = trust_mean(without.ensemble_.weights, np.arange(10) == 9, recognised)
    np.testing.assert_allclose(model.ensemble_.weights, expected, rtol=1e-5)
    large = MIVClassifier(preset=preset, random_state=0).fit(shots(4, 2.0**30), y)
    assert large.ensemble_.weights[-1] != model.ensemble_.weights[-1]  # other means, other answers
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv").classifier_
    refitted = again.refitted(SupportSet.read(X, y))
    np.testing.assert_array_equal(refitted.logits(X), model.logits(X))


def test_models_of_several_shots_are_as_without_it() -> None:
    preset, X, y = load_backbone(NAME).preset, shots(4), np.array([0, 0, 1, 1])
    plain = [BlockPreset(plain=i == 3) for i in range(4)]
    found, expected = (
        MIVClassifier("experts", preset=each, random_state=0).fit(X, y).logits(X)
        for each in (preset, plain)
    )
    np.testing.assert_array_equal(found, expected)


def test_only_known_classifiers_have_a_name() -> None:
    with pytest.raises(InputError, match="classifier must be one of"):
        BlockPreset(classifier="../weights")
    with pytest.raises(InputError, match="classifier must be one of"):
        BlockConfig(8, 1, (2, 2), token=False, classifier="../weights")
