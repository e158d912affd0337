"""scikit-learn's own checks, for estimators that do not inherit from its base class."""

import warnings
from collections.abc import Callable
from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks


def checks(estimators: list[Any], **settings: Any) -> Callable[..., Any]:
    """Parametrise a test with every check for every estimator."""
    with warnings.catch_warnings():
        # Not inheriting is the purpose of `mivhead._util.estimator`.
        warnings.filterwarnings("ignore", ".* does not inherit from `sklearn.base.BaseEstimator`")
        decorated: Callable[..., Any] = parametrize_with_checks(estimators, **settings)
    return decorated
