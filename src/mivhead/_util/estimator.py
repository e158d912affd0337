"""scikit-learn's conventions for estimators, without importing scikit-learn.

scikit-learn takes longer to import than a model to fit, so classifiers do not inherit from its base
classes. They behave as if they did: `clone`, `GridSearchCV`, pipelines and the checks of
`sklearn.utils.estimator_checks` work. What is out of the ordinary (a data frame, a sparse matrix, a
list of numbers) is left to scikit-learn's own validation, if it is installed.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.errors import InputError

CLASS_KINDS = "iubUS"  # of NumPy's types: labels that need no further check


class Estimator:
    """Base of classifiers: parameters by name, tags, and a short form.

    A subclass stores the arguments of its constructor under their names, as in scikit-learn.
    """

    @classmethod
    def _get_param_names(cls) -> list[str]:
        return sorted(set(inspect.signature(cls.__init__).parameters) - {"self"})

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name.

        Parameters
        ----------
        deep : bool, default=True
            Whether to include the parameters of parameters that are estimators themselves.

        Returns
        -------
        dict
            Names and values.
        """
        params = {name: getattr(self, name) for name in self._get_param_names()}
        if deep:
            for name, value in list(params.items()):
                if hasattr(value, "get_params") and not isinstance(value, type):
                    params |= {f"{name}__{k}": v for k, v in value.get_params().items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name.

        Parameters
        ----------
        **params : dict
            Names and values; `name__inner` sets a parameter of a parameter.

        Returns
        -------
        self : object
            The estimator.
        """
        known = self._get_param_names()
        for key, value in params.items():
            name, nested, inner = key.partition("__")
            if name not in known:
                raise InputError(
                    f"Invalid parameter {name!r} for {type(self).__name__}. Valid parameters are: "
                    f"{known}."
                )
            if nested:
                getattr(self, name).set_params(**{inner: value})
            else:
                setattr(self, name, value)
        return self

    def copy_unfitted(self) -> Self:
        """Make a new estimator with the same parameters, as scikit-learn's `clone` does.

        Returns
        -------
        object
            An estimator of the same class, not fitted.
        """
        made = type(self)(**self.get_params(deep=False))
        if hasattr(self, "_made_as"):  # the name of its method
            made._made_as = self._made_as  # type: ignore[attr-defined]
        return made

    def score(self, X: Any, y: ArrayLike) -> float:
        """Return the accuracy.

        Parameters
        ----------
        X : images or features
            What `predict` takes.
        y : array-like of shape (n,)
            The true labels.

        Returns
        -------
        float
            Share of correct predictions.
        """
        return float(np.mean(self.predict(X) == np.asarray(y)))  # type: ignore[attr-defined]

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """Show the parameters that differ from their defaults."""
        defaults = inspect.signature(type(self).__init__).parameters
        changed = [
            f"{name}={value!r}"
            for name, value in self.get_params(deep=False).items()
            if not _is_same(value, defaults[name].default)
        ]
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


def _is_same(value: Any, default: Any) -> bool:
    try:
        return value is default or bool(value == default)
    except (TypeError, ValueError):  # such as arrays
        return False


@cache
def has_sklearn() -> bool:
    """Whether scikit-learn can be imported: it may be there for its images alone, without SciPy."""
    return all(find_spec(name) is not None for name in ("sklearn", "scipy"))


def check_fitted(estimator: Any, attribute: str) -> None:
    """Raise scikit-learn's `NotFittedError`, or ours without it, if an attribute is missing."""
    if hasattr(estimator, attribute):
        return
    message = (
        f"This {type(estimator).__name__} instance is not fitted yet. Call 'fit' with appropriate "
        "arguments before using this estimator."
    )
    if not has_sklearn():
        raise InputError(message)
    from sklearn.exceptions import NotFittedError

    raise NotFittedError(message)


def random_seed(random_state: int | np.random.RandomState | None) -> int:
    """Draw a random seed from what scikit-learn takes as `random_state`.

    >>> random_seed(0) == random_seed(0)
    True
    """
    if random_state is None:
        generator = np.random.mtrand._rand
    elif isinstance(random_state, np.random.RandomState):
        generator = random_state
    else:
        try:
            generator = np.random.RandomState(random_state)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"random_state must be an integer from 0 to 2**32 - 1, a RandomState or None, got "
                f"{random_state!r}."
            ) from error
    return int(generator.randint(2**31 - 1))


def read_table(estimator: Any, X: Any, *, reset: bool) -> NDArray[Any]:
    """Check a two-dimensional table of numbers, (image, value), as scikit-learn would.

    Unless `reset`, which is set while fitting, it must fit the estimator's `n_features_in_`.
    Returns float32 or float64.
    """
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
    if has_sklearn():
        from sklearn.utils.validation import validate_data

        checked: NDArray[Any] = validate_data(
            estimator, X, dtype=[np.float32, np.float64], reset=reset
        )
        return checked
    try:
        table = np.asarray(X, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"X must be a table of numbers: {error}.") from error
    expected = table.shape[1:] if reset else (getattr(estimator, "n_features_in_", None),)
    if table.ndim != 2 or not table.size or table.shape[1:] != expected:
        raise InputError(f"X has shape {table.shape}, expected (images, values).")
    if not np.isfinite(table).all():
        raise InputError("X holds NaN or infinity.")
    if reset:
        estimator.n_features_in_ = table.shape[1]
    return table


def read_labels(y: ArrayLike) -> NDArray[Any]:
    """Check labels, one per image, as scikit-learn would.

    >>> read_labels(["b", "a"]).tolist()
    ['b', 'a']
    """
    values = np.asarray(y)
    if values.ndim == 1 and values.dtype.kind in CLASS_KINDS:
        return values
    if has_sklearn():
        return _sklearn_labels(y)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise InputError(f"y should be a 1d array, got an array of shape {values.shape} instead.")
    if values.dtype.kind == "f" and not (
        np.isfinite(values).all() and (values == values.round()).all()
    ):
        raise InputError("Unknown label type: y holds numbers that are not integers.")
    return values


def _sklearn_labels(y: ArrayLike) -> NDArray[Any]:
    import warnings

    from sklearn.utils import assert_all_finite
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import column_or_1d

    values: NDArray[Any] = column_or_1d(y, warn=True)
    if values.dtype.kind == "f":
        assert_all_finite(values, input_name="y")
    with warnings.catch_warnings():  # few shots per class are the normal case here
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        check_classification_targets(values)
    return values
