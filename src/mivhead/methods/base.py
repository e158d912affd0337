"""`PooledClassifier`: what all methods on one vector per image share.

A method is a subclass that names its arrays and their dimensions in `TENSORS`, learns them in
`_learn`, scores with them in `_score`, exports that formula in `_graph`, and counts its own cost in
`_work`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import from_json, split_tensors
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError
from mivhead.features import (
    Features,
    layout_to_json,
    mean_patches,
    read_layout,
    to_single,
)
from mivhead.methods.cost import BackboneWork, TaskSize, Work
from mivhead.support import SupportSet

Array = NDArray[Any]  # of float32 or float64

ROWS = 256  # queries scored at once, so that memory does not grow with their number
NORM_EPS = 1e-12
MAX_SIZE = 2**20  # of a dimension in a model file; keeps a forged file from overflowing

# These belong to the run and not to the model; the MIV-head keeps its recipe and blocks in its own
# state.
NOT_STORED = frozenset({"random_state", "device", "verbose", "images_at_once", "recipe", "preset"})


class PooledShots(NamedTuple):
    """A support set of pooled features, ordered by class."""

    x: Array  # (image, channel)
    labels: NDArray[np.int64]  # (image,): class numbers
    classes: int
    seed: int


class Vectors(NamedTuple):
    """The sizes that a method on pooled features counts with."""

    n: int  # images, views included
    c: int  # channels
    ways: int
    most: int  # images of the largest class

    @property
    def span(self) -> int:
        """Dimensions of the space that the centred images span."""
        return min(self.n - 1, self.c)


@dataclass(kw_only=True, eq=False, repr=False)
class PooledClassifier(FeatureClassifier):
    """A method that learns arrays from pooled features and scores pooled features with them.

    The fields are hyperparameters; subclasses add their own.
    """

    TENSORS: ClassVar[Mapping[str, str]]

    use_views: bool = False  # count augmented views as further images
    random_state: int | np.random.RandomState | None = None  # where weights are drawn at random
    device: str | None = None  # ignored: these methods compute on the CPU
    learned_: dict[str, Array] = field(init=False)

    @abstractmethod
    def _check_params(self) -> None:
        """Raise an error for hyperparameters that are not valid."""

    @abstractmethod
    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        """Learn arrays from a support set."""

    @abstractmethod
    def _score(self, x: Array) -> Array:
        """Logits (image, class) of pooled features (image, channel)."""

    def _graph(self, _x: Any) -> Any:
        """Return the formula of `_score` as an ONNX graph of a `mivhead.export.graph.Value`.

        It computes in double precision where `_score` does. None if it cannot be exported.
        """
        return None

    def graph(self, x: Any) -> Any:
        """Return the formula of `_score` as an ONNX graph; None if it cannot be exported."""
        owner = next(kind for kind in type(self).__mro__ if "_score" in vars(kind))
        # Of the same class, so that both are the same formula.
        return self._graph(x) if "_graph" in vars(owner) else None

    def _work(self, _size: Vectors) -> Work | None:
        """Count the work of `_learn`; None if it is not known."""
        return None

    def work(self, size: TaskSize, features: Features, _backbone: BackboneWork) -> Work | None:
        """Count the work of fitting to a task of this size; None if it is not known."""
        channels = features.blocks[-1].channels
        return self._work(Vectors(size.images, channels, size.ways, size.largest))

    def _fit(self, support: SupportSet, seed: int) -> None:
        self._check_params()
        features = support.everything if self.use_views else support.features
        numbers = support.all_labels if self.use_views else support.labels
        order = np.argsort(numbers, kind="stable")
        shots = PooledShots(pooled(features)[order], numbers[order], len(self.classes_), seed)
        self.learned_ = self._learn(shots)

    def _logits(self, features: Features) -> Array:
        x = pooled(features)
        return np.concatenate([self._score(x[i : i + ROWS]) for i in range(0, len(x), ROWS)])

    def _state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        config = {"params": params_to_json(self), "layout": layout_to_json(self.layout_)}
        return config, {f"params.{name}": tensor for name, tensor in self.learned_.items()}

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        stored = check_keys(config, {"params", "layout"})
        restore_params(self, stored["params"])
        self._check_params()
        empty = read_layout(stored["layout"])
        (learned,) = split_tensors(tensors, ("params",))
        sizes = {"class": len(self.classes_), "channel": empty.blocks[-1].channels}
        check_learned(learned, self.TENSORS, sizes)
        self.learned_ = dict(learned)
        self.layout_, self.n_features_in_ = empty.layout, empty.shape[1]
        try:
            self._score(np.zeros((1, sizes["channel"]), np.float32))
        except ValueError as error:  # of NumPy, such as for sizes that do not fit
            raise InputError(f"its tensors do not fit each other: {error}.") from error


# Hyperparameters


def check_positive(name: str, value: float) -> None:
    """Raise an error that names a hyperparameter which must be a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
        raise InputError(f"{name} must be a positive number, got {value!r}.")


def check_count(name: str, value: int, least: int) -> None:
    """Raise an error that names a hyperparameter which must be an integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")


# One vector per image


def pooled(features: Features) -> NDArray[np.float32]:
    """Pool to (image, channel) in float32: the deepest block's token, else the mean of its map.

    >>> pooled(Features(np.arange(8.0).reshape(1, 2, 2, 2)))
    array([[1.5, 5.5]], dtype=float32)
    """
    block = features.blocks[-1]
    if block.token is not None:
        return to_single(block.token)
    assert block.map is not None
    return mean_patches(block.map)


def unit(x: Array) -> Array:
    """Scale vectors (..., channel) to length 1; zero vectors stay zero."""
    lengths = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
    scaled: Array = x / np.maximum(lengths, NORM_EPS)
    return scaled


def graph_unit(x: Any) -> Any:
    """Scale vectors (n, C) of a graph to length 1, as `unit` does."""
    return x / x.length(1, least=NORM_EPS)


def graph_distances(x: Any, rows: Array) -> Any:
    """Squared distances (n, row) in a graph; differences first, which keeps all digits."""
    apart = x.reshape(0, 1, -1) - rows[None]  # (n, row, C)
    return (apart * apart).sum(2)


def class_means(x: Array, labels: NDArray[np.int64], classes: int) -> Array:
    """Mean vector of every class: (image, channel) to (class, channel).

    >>> class_means(np.array([[2.0], [4.0], [5.0]]), np.array([0, 0, 1]), 2).T
    array([[3., 5.]])
    """
    return membership(labels, classes, x.dtype).T @ x / counts(labels, classes, x.dtype)[:, None]


def class_means_work(size: Vectors) -> Work:
    """Count the work of `class_means`."""
    return Work.once(size.ways * size.n * size.c)


def membership(labels: NDArray[np.int64], classes: int, dtype: Any) -> Array:
    """One-hot rows (image, class)."""
    return np.eye(classes, dtype=dtype)[labels]


def counts(labels: NDArray[np.int64], classes: int, dtype: Any = np.int64) -> Array:
    """Images per class."""
    return np.bincount(labels, minlength=classes).astype(dtype)


def padded_rows(shots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows (class, shot) of images ordered by class, and whether there is such a shot.

    >>> padded_rows(np.array([2, 1]))[0].tolist()
    [[0, 1], [2, 0]]
    """
    place = np.arange(shots.max())
    real = place < shots[:, None]
    return np.where(real, (shots.cumsum() - shots)[:, None] + place, 0), real


def squared_distances(x: Array, rows: Array) -> Array:
    """Squared Euclidean distances (image, row) of vectors (image, channel) and (row, channel).

    >>> squared_distances(np.array([[0.0, 3.0]]), np.array([[4.0, 0.0], [0.0, 3.0]]))
    array([[25.,  0.]])
    """
    middle = rows.mean(axis=0)  # differences of small numbers keep more digits
    x, rows = x - middle, rows - middle
    lengths = np.square(x).sum(axis=1)[:, None] + np.square(rows).sum(axis=1)
    distances: Array = np.maximum(lengths - 2 * x @ rows.T, 0)
    return distances


# Training


def cross_entropy(logits: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
    """Mean cross-entropy of logits (image, class), and its gradient."""
    images = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    shares = np.exp(shifted)
    totals = shares.sum(axis=1, keepdims=True)
    loss = (np.log(totals[:, 0]) - shifted[images, labels]).mean()
    gradient = shares / totals
    gradient[images, labels] -= 1
    return float(loss), gradient / len(labels)


def minimise(
    loss: Callable[[], tuple[float, Sequence[Array]]],
    parameters: Sequence[Array],
    *,
    rate: float,
    steps: int,
) -> list[float]:
    """Change parameters in place by Adam on the full batch; return the loss before each step.

    Parameters
    ----------
    loss : callable
        Returns the loss and its gradients, one for each parameter.
    parameters : sequence of array
        What is trained.
    rate : float
        The learning rate.
    steps : int
        Number of steps.

    Examples
    --------
    >>> x = np.array([3.0])
    >>> losses = minimise(lambda: (x.item() ** 2, [2 * x]), [x], rate=0.1, steps=200)
    >>> losses[0], abs(x.item()) < 0.01
    (9.0, True)
    """
    means, squares = ([np.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(1, steps + 1):
        value, gradients = loss()
        losses.append(value)
        first, second = 1 - 0.9**step, math.sqrt(1 - 0.999**step)  # corrections of the zero start
        for p, mean, square, gradient in zip(parameters, means, squares, gradients, strict=True):
            mean += (gradient - mean) * 0.1
            square *= 0.999
            square += 0.001 * np.square(gradient)
            p -= rate / first * mean / (np.sqrt(square) / second + 1e-8)
    return losses


# What a model file holds: hyperparameters, the layout of the features, tensors. Reading trusts
# nothing: every key, type, name, shape and value is checked.


def check_keys(config: Mapping[str, Any], expected: set[str]) -> dict[str, Any]:
    """Check that exactly these keys have a value."""
    stored = {name: value for name, value in config.items() if value is not None}
    if different := sorted(stored.keys() ^ expected):
        raise InputError(f"config has an unknown key or lacks one: {different[0]!r}.")
    return stored


def params_to_json(estimator: Any) -> dict[str, Any]:
    """Hyperparameters that are stored with a model, as plain values."""
    params: dict[str, Any] = estimator.get_params(deep=False)
    return {name: value for name, value in params.items() if name not in NOT_STORED}


def restore_params(estimator: Any, document: Any) -> None:
    """Set hyperparameters from JSON, checked against the fields of the estimator's class."""
    hints = get_type_hints(type(estimator))
    stored = [
        (each.name, hints[each.name], field(default=each.default))
        for each in fields(estimator)
        if each.init and each.name not in NOT_STORED
    ]
    schema = make_dataclass("Params", stored, frozen=True)
    estimator.set_params(**vars(from_json(schema, document, "config.params")))


def check_learned(
    tensors: Mapping[str, Array], dimensions: Mapping[str, str], known: Mapping[str, int]
) -> None:
    """Check tensors against the names of their dimensions; all must be present and finite.

    A dimension whose size is not known may have any size, but the same one everywhere. A tensor
    called `labels` holds class numbers, every other one floats.

    >>> check_learned({"means": np.zeros((5, 3))}, {"means": "class channel"}, {"channel": 4})
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: tensor 'means' has shape (5, 3), expected class=5 channel=4.
    """
    if different := sorted(tensors.keys() ^ dimensions.keys()):
        kind = "unexpected" if different[0] in tensors else "missing"
        raise InputError(f"tensor {different[0]!r} is {kind}.")
    sizes = dict(known)
    for name, dims in dimensions.items():
        tensor, names = tensors[name], dims.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(names):
            raise InputError(f"tensor {name!r} has shape {shape}, expected ({', '.join(names)}).")
        for dim, size in zip(names, shape, strict=True):
            sizes.setdefault(dim, int(dim) if dim.isdigit() else size)
        if shape != tuple(sizes[dim] for dim in names):
            expected = " ".join(f"{dim}={sizes[dim]}" for dim in names)
            raise InputError(f"tensor {name!r} has shape {shape}, expected {expected}.")
        _check_values(name, tensor, sizes)


def _check_values(name: str, array: Array, sizes: Mapping[str, int]) -> None:
    expected = ("int64",) if name == "labels" else ("float32", "float64")
    if array.dtype.name not in expected:
        raise InputError(f"tensor {name!r} has type {array.dtype}, expected {expected[-1]}.")
    if name == "labels":
        if array.size and not (0 <= int(array.min()) <= int(array.max()) < sizes["class"]):
            raise InputError(f"tensor 'labels' must hold class numbers below {sizes['class']}.")
    elif not np.isfinite(array).all():
        raise InputError(f"tensor {name!r} holds NaN or infinity.")
