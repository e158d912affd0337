"""scikit-learn's own checks, on 2-D input."""

from typing import Any

from mivhead.classifier import FeatureClassifier
from mivhead.methods import make_method
from tests.helpers.sklearn_checks import checks

NAMES = ("ncc", "logistic")


@checks([make_method(name) for name in NAMES])
def test_sklearn_check(estimator: FeatureClassifier, check: Any) -> None:
    check(estimator)
