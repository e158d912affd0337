"""Real images that come with scikit-learn: training lowers the loss, and the methods work."""

import time

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mivhead.methods import make_method
from tests.helpers.few_shots import RIVALS

PIXELS, DIGITS = load_digits(return_X_y=True)
PIXELS = PIXELS / 16
SUPPORT, QUERIES = slice(0, 100), slice(100, 700)


@pytest.mark.parametrize("name", RIVALS)
def test_digits_are_learnt_and_training_lowers_the_loss(name: str) -> None:
    classifier = make_method(name, random_state=0).fit(PIXELS[SUPPORT], DIGITS[SUPPORT])
    assert classifier.score(PIXELS[QUERIES], DIGITS[QUERIES]) > 0.64  # chance is 0.1
    if name in ("baseline", "baseline++", "fit-lda", "fit-qda"):
        assert len(classifier.losses_) == 400
        assert classifier.losses_[-1] < 0.5 * classifier.losses_[0]


@pytest.mark.slow
def test_qda_of_fifty_classes_takes_seconds() -> None:
    """A step costs a few products of 500 x 500 matrices, not 50 inverses of 1280 x 1280 ones."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(50), 10)
    X = (0.3 * rng.normal(size=(50, 1280))[y] + rng.normal(size=(500, 1280))).astype(np.float32)
    start = time.process_time()
    classifier = make_method("fit-qda").fit(X, y)
    step = (time.process_time() - start) / 400
    assert classifier.score(X, y) == 1.0
    square = X[:, :500].astype(np.float64)
    start = time.process_time()
    for _ in range(100):
        square @ square
    product = (time.process_time() - start) / 100
    assert step < 10 * product
    assert step * 400 < 60
