"""Baseline and Baseline++: a linear or a cosine classifier, trained by Adam on the full batch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from mivhead_bench.methods.base import Array, Labels, PooledClassifier

LENGTH_EPS = 1e-5  # added to the length of a feature
MANY_CLASSES = 200  # above which Baseline++ needs a larger scale


@dataclass(kw_only=True, eq=False, repr=False)
class _Trained(PooledClassifier):
    """Both classifiers: a layer on features, and its optimiser."""

    paper: ClassVar = "Chen et al. 2019, A Closer Look at Few-shot Classification, arXiv 1904.04232"
    optimiser: ClassVar = "Adam"

    learning_rate: float = 0.03
    steps: int = 400

    @abstractmethod
    def _layer(self, channels: int, classes: int) -> nn.Module:
        """Make the layer, with PyTorch's initial weights."""

    @abstractmethod
    def _score(self, x: Tensor) -> Tensor:
        """Logits (image, class) of vectors (image, channel)."""

    def _learn(self, x: Array, labels: Labels) -> None:
        seed = np.random.RandomState(self.random_state).randint(2**31 - 1)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.layer_ = self._layer(x.shape[1], len(self.classes_))
        vectors, targets = torch.tensor(x, dtype=torch.float32), torch.as_tensor(labels)
        optimiser = torch.optim.Adam(self.layer_.parameters(), lr=self.learning_rate)
        self.losses_ = []  # before each step
        for _ in range(self.steps):
            optimiser.zero_grad()
            loss = F.cross_entropy(self._score(vectors), targets)
            loss.backward()
            optimiser.step()
            self.losses_.append(loss.item())

    def _logits(self, x: Array) -> Array:
        with torch.no_grad():
            logits: Array = self._score(torch.tensor(x, dtype=torch.float32)).double().numpy()
        return logits


@dataclass(kw_only=True, eq=False, repr=False)
class Baseline(_Trained):
    """A linear layer, trained by Adam.

    The paper trains it by SGD in small batches; here it has the optimiser of Baseline++, so that
    the two differ only in the classifier.
    """

    def _layer(self, channels: int, classes: int) -> nn.Module:
        layer = nn.Linear(channels, classes)
        nn.init.zeros_(layer.bias)
        return layer

    def _score(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer_(x)
        return logits


@dataclass(kw_only=True, eq=False, repr=False)
class BaselinePlusPlus(_Trained):
    """A cosine layer, trained by Adam.

    Features and class vectors have length 1, and each class has a learned length; logits are
    scale * length * cosine.
    """

    scale: float | None = None  # None: 2, or 10 above 200 classes

    def _layer(self, channels: int, classes: int) -> nn.Module:
        layer = nn.Linear(channels, classes, bias=False)
        weight_norm(layer, dim=0)
        return layer

    def _score(self, x: Tensor) -> Tensor:
        scale = self.scale or (2.0 if len(self.classes_) <= MANY_CLASSES else 10.0)
        logits: Tensor = scale * self.layer_(x / (x.norm(dim=1, keepdim=True) + LENGTH_EPS))
        return logits
