"""scikit-learn's conventions for estimators, without importing scikit-learn.

scikit-learn takes longer to import than a model to fit, so classifiers do not inherit from its base
classes. They behave as if they did: `clone`, `GridSearchCV`, pipelines and the checks of
`sklearn.utils.estimator_checks` work. What is out of the ordinary (a data frame, a list of numbers,
a wrong shape) is left to scikit-learn's own validation.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.errors import InputError

CLASS_KINDS = "iubUS"  # of NumPy's types: labels that need no further check


class Estimator:
    """Base of classifiers; a subclass stores the arguments of its constructor by their names."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn's
        """Return the parameters by name."""
        names = sorted(set(inspect.signature(type(self).__init__).parameters) - {"self"})
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise InputError(
                    f"Invalid parameter {name!r} for {type(self).__name__}. Valid parameters are: "
                    f"{list(known)}."
                )
            setattr(self, name, value)
        return self

    def score(self, X: Any, y: ArrayLike) -> float:
        """Return the accuracy on what `predict` takes and true labels."""
        return float(np.mean(self.predict(X) == np.asarray(y)))  # type: ignore[attr-defined]

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Show the parameters that differ from their defaults."""
        defaults = inspect.signature(type(self).__init__).parameters
        params = {name: repr(value) for name, value in self.get_params().items()}
        changed = [f"{k}={v}" for k, v in params.items() if v != repr(defaults[k].default)]
        return f"{type(self).__name__}({', '.join(changed)})"[:N_CHAR_MAX]

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that this is a classifier."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(),
        )


def check_fitted(estimator: Any, attribute: str) -> None:
    """Raise scikit-learn's `NotFittedError` if an attribute is missing."""
    if hasattr(estimator, attribute):
        return
    from sklearn.exceptions import NotFittedError

    raise NotFittedError(f"This {type(estimator).__name__} is not fitted yet: call `fit` first.")


def random_seed(random_state: int | np.random.RandomState | None) -> int:
    """Draw a random seed from what scikit-learn takes as `random_state`."""
    if random_state is None:
        return int(np.random.mtrand._rand.randint(2**31 - 1))
    if not isinstance(random_state, np.random.RandomState):
        try:
            random_state = np.random.RandomState(random_state)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"random_state must be an integer from 0 to 2**32 - 1, a RandomState or None, got "
                f"{random_state!r}."
            ) from error
    return int(random_state.randint(2**31 - 1))


def read_table(estimator: Any, X: Any, *, reset: bool) -> NDArray[Any]:
    """Check a table of numbers (image, value), as scikit-learn does; `reset` while fitting."""
    usual = (
        type(X) is np.ndarray
        and X.ndim == 2
        and X.dtype in (np.float32, np.float64)
        and X.size
        and not hasattr(estimator, "feature_names_in_")
        and (reset or X.shape[1] == getattr(estimator, "n_features_in_", None))
        and bool(np.isfinite(X).all())
    )
    if usual:
        if reset:
            estimator.n_features_in_ = X.shape[1]
        return np.asarray(X)
    from sklearn.utils.validation import validate_data

    checked: NDArray[Any] = validate_data(estimator, X, dtype=[np.float32, np.float64], reset=reset)
    return checked


def read_labels(y: ArrayLike) -> NDArray[Any]:
    """Check labels, one per image, as scikit-learn does.

    >>> read_labels(["b", "a"]).tolist()
    ['b', 'a']
    """
    values = np.asarray(y)
    if values.ndim == 1 and (not len(values) or values.dtype.kind in CLASS_KINDS):
        return values
    from sklearn.utils import assert_all_finite
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import column_or_1d

    values = np.asarray(column_or_1d(y, warn=True))
    if values.dtype.kind == "f":
        assert_all_finite(values, input_name="y")
    with warnings.catch_warnings():  # few shots per class are the normal case here
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        check_classification_targets(values)
    return values
