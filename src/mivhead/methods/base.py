"""`PooledClassifier`: what all rivals on one vector per image share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mivhead.errors import InputError
from mivhead.estimator import FeatureClassifier, SupportSet
from mivhead.features import Features
from mivhead.methods.pooled import pooled
from mivhead.methods.state import (
    check_learned,
    layout_to_json,
    params_to_json,
    read_layout,
    restore_params,
)
from mivhead.schema import split_tensors

ROWS = 256  # queries scored at once: memory stays flat in their number


class Shots(NamedTuple):
    """A support set of pooled features, ordered by class."""

    x: Tensor  # (image, channel)
    labels: Tensor  # (image,): class numbers
    classes: int
    seed: int


class PooledClassifier(FeatureClassifier):
    """A method that learns tensors from pooled features and scores pooled features with them.

    A subclass names its tensors and their dimensions in `TENSORS`, learns them in `_learn`, uses
    them in `_score`, and checks its hyperparameters in `_check_params`. Augmented views, with
    `use_views`, count as more images.
    """

    TENSORS: ClassVar[Mapping[str, str]]
    use_views: bool
    learned_: dict[str, Tensor]

    @abstractmethod
    def _learn(self, shots: Shots) -> dict[str, Tensor]:
        """Learn tensors from a support set."""

    @abstractmethod
    def _score(self, x: Tensor) -> Tensor:
        """Logits (image, class) of pooled features (image, channel)."""

    @abstractmethod
    def _check_params(self) -> None:
        """Raise an error for hyperparameters that make no sense."""

    def _fit(self, support: SupportSet, seed: int) -> None:
        self._check_params()
        features = support.everything if self.use_views else support.features
        numbers = support.all_labels if self.use_views else support.labels
        order = np.argsort(numbers, kind="stable")
        x = pooled(features)[torch.as_tensor(order, device=features.device)]
        labels = torch.as_tensor(numbers[order], device=x.device)
        self.learned_ = self._learn(Shots(x, labels, len(self.classes_), seed))

    def _logits(self, features: Features) -> Tensor:
        device = next(iter(self.learned_.values())).device
        chunks = pooled(features).to(device).split(ROWS)
        return torch.cat([self._score(x) for x in chunks])

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {"params": params_to_json(self), "layout": layout_to_json(self.layout_)}
        return config, {f"params.{name}": tensor for name, tensor in self.learned_.items()}

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        stored = {name: value for name, value in config.items() if value is not None}
        if different := sorted(stored.keys() ^ {"params", "layout"}):
            raise InputError(f"config has an unknown key or lacks one: {different[0]!r}.")
        restore_params(self, stored["params"])
        self._check_params()
        empty = read_layout(stored["layout"])
        (learned,) = split_tensors(tensors, ("params",))
        sizes = {"class": len(self.classes_), "channel": empty.blocks[-1].channels}
        check_learned(learned, self.TENSORS, sizes)
        device = self.device or "cpu"
        self.learned_ = {name: tensor.to(device) for name, tensor in learned.items()}
        self.layout_, self.n_features_in_ = empty.layout, empty.shape[1]


def check_positive(name: str, value: float) -> None:
    """Raise an error that names a hyperparameter which must be a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
        raise InputError(f"{name} must be a positive number, got {value!r}.")


def check_count(name: str, value: int, least: int) -> None:
    """Raise an error that names a hyperparameter which must be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")
