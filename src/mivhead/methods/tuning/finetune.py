"""Full fine-tuning: every weight of the network is trained, at one pair of rates or at several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mivhead._util.estimator import check_fitted
from mivhead._util.schema import check_tensors
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.methods.base import check_positive
from mivhead.methods.cost import BackboneWork, TaskSize, Work
from mivhead.methods.tuning.base import (
    MEANS,
    Network,
    Pixels,
    TuningClassifier,
    class_means,
    embed,
    predicted_at_once,
    unit,
)
from mivhead.model.decision import softmax

HEAD = "head"  # the vectors of the classes, if they are trained
_TURN = Lock()  # of a thread that sets the weights of a network and predicts with them


@dataclass(kw_only=True, eq=False, repr=False)
class Finetune(TuningClassifier):
    """All weights of the network, with the NCC head: the costly reference, as in PMF.

    Statistics of BatchNorms stay as they are. A model file holds all weights that were trained, so
    it is as large as the network. The rate is ours, not searched as in PMF; `finetune-vote`
    averages over several.

    Parameters
    ----------
    steps : int, default=40
        Passes over the support set.
    learning_rate : float, default=5e-5
        Learning rate of Adam.
    head_rate : float or None, default=None
        Learning rate of the vectors of the classes, which start as the class means of length 1.
        None: they stay the class means of the tuned features.

    References
    ----------
    Hu et al., "Pushing the Limits of Simple Pipelines for Few-Shot Learning" (PMF), 2022,
    arXiv 2204.07305.
    """

    STORED: ClassVar = r"network\.[\w.-]+"

    steps: int = 40
    learning_rate: float = 5e-5
    head_rate: float | None = None

    def check(self, network: Network) -> None:
        """Accept every network."""

    def _check_params(self) -> None:
        super()._check_params()
        if self.head_rate is not None:
            check_positive("head_rate", self.head_rate)

    def _attach(self, network: Network) -> dict[str, nn.Parameter]:
        parameters = network.model.requires_grad_().named_parameters()
        return {f"network.{name}": parameter for name, parameter in parameters}

    def _begin(self, pixels: Pixels, labels: Tensor) -> dict[str, nn.Parameter]:
        self._head: nn.Parameter | None = None
        if self.head_rate is None:
            return self.adapters_
        network = self.network_
        features = embed(network, pixels, predicted_at_once(network))
        self._head = nn.Parameter(unit(class_means(features, labels, len(self.classes_))))
        return {**self.adapters_, HEAD: self._head}

    def _class_vectors(self, features: Tensor, labels: Tensor, classes: int) -> Tensor:
        if self._head is None:
            return super()._class_vectors(features, labels, classes)
        return self._head

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        own = [p for name, p in parameters.items() if name != HEAD]
        groups: list[dict[str, Any]] = [{"params": own, "lr": self.learning_rate}]
        if HEAD in parameters:
            groups.append({"params": [parameters[HEAD]], "lr": self.head_rate})
        return Adam(groups)

    def _step_products(
        self, backbone: BackboneWork, images: int, _channels: int, _ways: int
    ) -> tuple[float, float, float]:
        return 3 * images * backbone.total, 0.0, 0.0


@dataclass(kw_only=True, eq=False, repr=False)
class FinetuneVote(Finetune):
    """Full fine-tuning at nine pairs of learning rates, whose probabilities are averaged.

    No rate has to be chosen, at nine times the cost. A model file holds nine sets of weights.

    Parameters
    ----------
    steps : int, default=40
        Passes over the support set, for each pair of rates.
    backbone_rates, head_rates : tuple of float
        Learning rates of the network, and of the vectors of the classes; every pair is used.
    """

    backbone_rates: tuple[float, ...] = (2e-6, 1e-5, 5e-5)
    head_rates: tuple[float, ...] = (4e-4, 2e-3, 1e-2)
    learning_rate: float = field(init=False)
    head_rate: float = field(init=False)

    @property
    def _pairs(self) -> list[tuple[float, float]]:
        return list(product(self.backbone_rates, self.head_rates))

    def _check_params(self) -> None:
        for name in ("backbone_rates", "head_rates"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty: give at least one learning rate.")
        for rates in self._pairs:
            self.learning_rate, self.head_rate = rates
            super()._check_params()

    def _train(self, pixels: Pixels, labels: Tensor, originals: int) -> None:
        start = {name: parameter.detach().clone() for name, parameter in self.adapters_.items()}
        self.votes_: list[dict[str, Tensor]] = []
        for rates in self._pairs:
            self.learning_rate, self.head_rate = rates
            self._set(start)
            for parameter in self.adapters_.values():
                parameter.requires_grad_()
            super()._train(pixels, labels, originals)
            tuned = {name: p.detach().clone() for name, p in self.adapters_.items()}
            self.votes_.append({**tuned, MEANS: self.means_})

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.adapters_.items():
                parameter.copy_(weights[name])
        if MEANS in weights:
            self.means_ = weights[MEANS]

    def logits(self, X: Pixels) -> NDArray[np.float32]:
        """Logarithms of the mean probabilities (image, class)."""
        check_fitted(self, "means_")
        votes = []
        with _TURN:
            for vote in self.votes_:
                self._set(vote)
                votes.append(softmax(super().logits(X).astype(np.float64)))
        mean: NDArray[np.float32] = np.log(np.mean(votes, axis=0)).astype(np.float32)
        return mean

    def work(self, size: TaskSize, features: Features, backbone: BackboneWork) -> Work:
        """Count the work for all pairs of rates."""
        return sum([super().work(size, features, backbone)] * len(self._pairs), Work())

    @property
    def tensors_(self) -> dict[str, NDArray[Any]]:
        """What was learned, stacked over the pairs of rates; the vectors as (class, pair, ...)."""
        if not self.attached:
            return self._stored
        return {
            name: torch.stack([v[name] for v in self.votes_], int(name == MEANS)).numpy(force=True)
            for name in self.votes_[0]
        }

    def _load_adapters(self) -> None:
        count = len(self._pairs)
        shapes = {name: (count, *p.shape) for name, p in self.adapters_.items()}
        means = (len(self.classes_), count, self.network_.channels)
        check_tensors(self._stored, {**shapes, MEANS: means})
        stored = {
            name: torch.as_tensor(each, device=self.network_.device).unbind(int(name == MEANS))
            for name, each in self._stored.items()
        }
        self.votes_ = [{name: each[i] for name, each in stored.items()} for i in range(count)]
        self._set(self.votes_[0])
