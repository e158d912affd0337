"""scikit-learn's own checks, on 2-D input."""

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from mivhead.classifier import FeatureClassifier
from mivhead.methods import make_method

NAMES = ("ncc", "ridge", "logistic", "knn", "fit-protonets")


@parametrize_with_checks([make_method(name) for name in NAMES])
def test_sklearn_check(estimator: FeatureClassifier, check: Any) -> None:
    check(estimator)
