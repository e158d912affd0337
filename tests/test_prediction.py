"""`Prediction`: its short form and its most probable classes."""

import subprocess
import sys
from dataclasses import replace

import numpy as np

import mivhead
from mivhead.prediction import Prediction, predictions
from tests.helpers.tiny_backbone import TinyBackbone


def made(count=3, classes=50):
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(classes), count)
    names = np.array([f"class {i:02}" for i in range(classes)])
    return predictions([f"{i}.jpg" for i in range(count)], names, probabilities)


def test_a_prediction_is_one_short_line():
    text = repr(made()[0])
    assert text.startswith("<Prediction of '0.jpg': class ")
    assert text.endswith("47 more>")
    assert len(text) < 100


def test_a_prediction_without_a_name_says_so():
    unsure = Prediction("a.jpg", "cat", 0.6, {"cat": 0.6, "dog": 0.4}, "unsure")
    assert repr(unsure) == "<Prediction of 'a.jpg': unsure; cat 60.0%, dog 40.0%>"
    none = replace(unsure, decision="none of these")  # which probabilities say nothing about
    expected = "<Prediction of 'a.jpg': none of these; unlike all your photos; closest: cat>"
    assert repr(none) == expected


def test_the_most_probable_classes():
    prediction = made()[0]
    assert prediction.top(3) == list(prediction.probabilities.items())[:3]
    assert prediction.top(1) == [(prediction.label, prediction.probability)]
    assert len(prediction.top(99)) == 50


def test_a_fitted_model_says_what_it_knows(shots, tmp_path):
    model = mivhead.FewShotClassifier(TinyBackbone())
    assert repr(model).startswith("FewShotClassifier(")
    model.fit(shots).save(tmp_path / "m.miv")
    text = repr(mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone()))
    assert text.startswith("<FewShotClassifier on ")
    assert text.endswith(", 3 classes: blue, green, red>")


def test_modules_are_reached_after_one_import():
    code = (
        "import mivhead, sys; assert 'torch' not in sys.modules\n"
        "assert {'stores', 'backbones', 'FeatureTable'} <= set(dir(mivhead))\n"
        "mivhead.stores.open, mivhead.backbones.load_backbone\n"
        "for name in dir(mivhead): getattr(mivhead, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
