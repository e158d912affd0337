"""`PooledClassifier`: what all methods on one vector per image share.

A method is a subclass that names its tensors and their dimensions in `TENSORS`, learns them in
`_learn`, scores with them in `_score`, and counts its own cost in `_work`.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from typing import Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from mivhead._util.schema import from_json, split_tensors
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError
from mivhead.features import Features, SupportSet, layout_to_json, read_layout
from mivhead.methods.cost import BackboneWork, TaskSize, Work

ROWS = 256  # queries scored at once, so that memory does not grow with their number
NORM_EPS = 1e-12
MAX_SIZE = 2**20  # of a dimension in a model file; keeps a forged file from overflowing

# These belong to the run and not to the model; the MIV-head keeps its recipe and blocks in its own
# state.
NOT_STORED = frozenset({"random_state", "device", "verbose", "images_at_once", "recipe", "preset"})


class PooledShots(NamedTuple):
    """A support set of pooled features, ordered by class."""

    x: Tensor  # (image, channel)
    labels: Tensor  # (image,): class numbers
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


class PooledClassifier(FeatureClassifier):
    """A method that learns tensors from pooled features and scores pooled features with them.

    With `use_views`, augmented views count as further images.
    """

    TENSORS: ClassVar[Mapping[str, str]]
    use_views: bool
    learned_: dict[str, Tensor]

    @abstractmethod
    def _check_params(self) -> None:
        """Raise an error for hyperparameters that are not valid."""

    @abstractmethod
    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        """Learn tensors from a support set."""

    @abstractmethod
    def _score(self, x: Tensor) -> Tensor:
        """Logits (image, class) of pooled features (image, channel)."""

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
        x = pooled(features)[torch.as_tensor(order, device=features.device)]
        x = x.to(with_doubles(x.device))
        labels = torch.as_tensor(numbers[order], device=x.device)
        self.learned_ = self._learn(PooledShots(x, labels, len(self.classes_), seed))

    def _logits(self, features: Features) -> Tensor:
        device = next(iter(self.learned_.values())).device
        chunks = pooled(features).to(device).split(ROWS)
        return torch.cat([self._score(x) for x in chunks])

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {"params": params_to_json(self), "layout": layout_to_json(self.layout_)}
        return config, {f"params.{name}": tensor for name, tensor in self.learned_.items()}

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        stored = check_keys(config, {"params", "layout"})
        restore_params(self, stored["params"])
        self._check_params()
        empty = read_layout(stored["layout"])
        (learned,) = split_tensors(tensors, ("params",))
        sizes = {"class": len(self.classes_), "channel": empty.blocks[-1].channels}
        check_learned(learned, self.TENSORS, sizes)
        device = with_doubles(torch.device(self.device or "cpu"))
        self.learned_ = {name: tensor.to(device) for name, tensor in learned.items()}
        self.layout_, self.n_features_in_ = empty.layout, empty.shape[1]
        try:
            self._score(torch.zeros(1, sizes["channel"], device=device))
        except RuntimeError as error:  # of PyTorch, such as for mixed types
            raise InputError(f"its tensors do not fit each other: {error}.") from error


def with_doubles(device: torch.device) -> torch.device:
    """Return the device, or the CPU instead of Apple's GPUs, which have no double precision.

    These methods compute with one vector per image, which takes little time anywhere.

    >>> with_doubles(torch.device("mps")), with_doubles(torch.device("cuda"))
    (device(type='cpu'), device(type='cuda'))
    """
    return torch.device("cpu") if device.type == "mps" else device


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


def pooled(features: Features) -> Tensor:
    """Pool to (image, channel) in float32: the deepest block's token, else the mean of its map.

    >>> pooled(Features(torch.arange(8.0).view(1, 2, 2, 2)))
    tensor([[1.5000, 5.5000]])
    """
    block = features.blocks[-1]
    if block.token is not None:
        return block.token.float()
    return torch.as_tensor(block.map).mean(dim=(2, 3), dtype=torch.float32)


def unit(x: Tensor) -> Tensor:
    """Scale vectors (..., channel) to length 1; zero vectors stay zero."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / lengths.clamp_min(NORM_EPS)


def class_means(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean vector of every class: (image, channel) to (class, channel).

    >>> class_means(torch.tensor([[2.0], [4.0], [5.0]]), torch.tensor([0, 0, 1]), 2).T
    tensor([[3., 5.]])
    """
    return membership(labels, classes, x.dtype).T @ x / counts(labels, classes)[:, None]


def class_means_work(size: Vectors) -> Work:
    """Count the work of `class_means`."""
    return Work.once(size.ways * size.n * size.c)


def membership(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """One-hot rows (image, class)."""
    return torch.nn.functional.one_hot(labels, classes).to(dtype)


def counts(labels: Tensor, classes: int) -> Tensor:
    """Images per class."""
    return torch.bincount(labels, minlength=classes)


def minimise(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], *, rate: float, steps: int
) -> list[float]:
    """Change parameters in place by Adam on the full batch; return the loss before each step.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> losses = minimise(lambda: x**2, [x], rate=0.1, steps=200)
    >>> losses[0], abs(x.item()) < 0.01
    (9.0, True)
    """
    # The function, because the class `torch.optim.Adam` imports PyTorch's compiler: two seconds.
    params = list(parameters)
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    taken = [torch.zeros(()) for _ in params]
    losses = []
    for _ in range(steps):
        with torch.enable_grad():
            value = loss()
            gradients = list(torch.autograd.grad(value, params))
        losses.append(value.item())
        with torch.no_grad():
            adam(
                params,
                gradients,
                means,
                squares,
                [],
                taken,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=rate,
                weight_decay=0.0,
                eps=1e-8,
                maximize=False,
            )
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
    """Set hyperparameters from JSON, checked against the annotations of the constructor."""
    init = type(estimator).__init__
    hints = get_type_hints(init)
    fields = [
        (name, hints[name], field(default=parameter.default))
        for name, parameter in inspect.signature(init).parameters.items()
        if name != "self" and name not in NOT_STORED
    ]
    schema = make_dataclass("Params", fields, frozen=True)
    estimator.set_params(**vars(from_json(schema, document, "config.params")))


def check_learned(
    tensors: Mapping[str, Tensor], dimensions: Mapping[str, str], known: Mapping[str, int]
) -> None:
    """Check tensors against the names of their dimensions; all must be present and finite.

    A dimension whose size is not known may have any size, but the same one everywhere. A tensor
    called `labels` holds class numbers, every other one floats.

    >>> check_learned({"means": torch.zeros(5, 3)}, {"means": "class channel"}, {"channel": 4})
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


def _check_values(name: str, tensor: Tensor, sizes: Mapping[str, int]) -> None:
    expected = (torch.int64,) if name == "labels" else (torch.float32, torch.float64)
    if tensor.dtype not in expected:
        raise InputError(f"tensor {name!r} has type {tensor.dtype}, expected {expected[-1]}.")
    if name == "labels":
        if tensor.numel() and not (0 <= int(tensor.min()) <= int(tensor.max()) < sizes["class"]):
            raise InputError(f"tensor 'labels' must hold class numbers below {sizes['class']}.")
    elif not torch.isfinite(tensor).all():
        raise InputError(f"tensor {name!r} holds NaN or infinity.")
