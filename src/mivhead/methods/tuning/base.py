"""`TuningClassifier`: what all methods that tune the backbone share.

They take images and a torch module where a `FeatureClassifier` takes features. The head is NCC:
logits are cosines to the class means of the tuned features, divided by a temperature; the support
images are their own queries, and the gradient flows through the means as well.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.optim import Optimizer

from mivhead.errors import InputError
from mivhead.methods.base import check_count, check_positive
from mivhead.methods.pooled import class_means, unit
from mivhead.methods.state import params_to_json, restore_params
from mivhead.methods.tuning.network import Network, Pixels
from mivhead.methods.tuning.training import chunk_size, embed, train
from mivhead.progress import progress_bar
from mivhead.schema import check_tensors, split_tensors

TEMPERATURE = 0.1
MEANS = "means"  # the class means of the tuned features, in a model file
PREDICTED = 4  # images per pass in prediction: activations stay in the cache


class TuningClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # sklearn: untyped
    """Base of the methods that tune a copy of the backbone.

    A subclass says in `_attach` what is trained, and in `_optimiser` how. What it trains and the
    class means are the model; the network itself is not, and is given again after loading.
    """

    STORED: ClassVar[str]  # pattern of the names of its tensors
    steps: int
    use_views: bool
    images_at_once: int | None
    random_state: int | np.random.RandomState | None
    device: str | None
    verbose: bool
    classes_: NDArray[Any]
    seed_: int

    @abstractmethod
    def check(self, network: Network) -> None:
        """Raise an error that explains why this network cannot be tuned, before any work."""

    @abstractmethod
    def _attach(self, network: Network) -> dict[str, nn.Parameter]:
        """Put adapters into the network; return what is trained, by name."""

    @abstractmethod
    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Make the optimiser of the adapters."""

    def _begin(self, _pixels: Pixels, _labels: Tensor) -> dict[str, nn.Parameter]:
        """Prepare training on images ordered by class; return what is trained, by name."""
        return self.adapters_

    def _penalty(self) -> Tensor | float:
        """Return what is added to the cross-entropy."""
        return 0.0

    def _end(self) -> None:
        """Put what was trained into the adapters."""
        for parameter in self.adapters_.values():
            parameter.requires_grad_(False)

    def fit(
        self,
        network: Network,
        X: Pixels,
        y: Any,
        *,
        views: Pixels | None = None,
        view_of: NDArray[np.int64] | None = None,
    ) -> Self:
        """Tune a network on labelled images, which it belongs to from now on.

        Parameters
        ----------
        network
            A copy of the backbone's module (`mivhead.tunable.network_of`).
        X
            Images (image, R, R, 3) of the network's size.
        y
            Their labels.
        views, view_of
            Augmented images, and for each the row of X that it was made from. With `use_views`
            they are queries in training; class means are those of the images alone.
        """
        self._check_params()
        self.check(network)
        self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        if len(labels) != len(X):
            raise InputError(f"X holds {len(X)} images, but y has {len(labels)} labels.")
        if len(self.classes_) < 2:
            raise InputError(
                f"y holds {len(self.classes_)} class; a classifier needs at least 2 classes."
            )
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        order = np.argsort(labels, kind="stable")
        everything, numbers = X[order], labels[order]
        if self.use_views and views is not None and view_of is not None:
            everything = np.concatenate([everything, views])
            numbers = np.concatenate([numbers, labels[view_of]])
        self.shots_ = np.bincount(labels).tolist()
        self.views_ = len(everything) - len(X)
        self._install(network)
        self._train(everything, torch.as_tensor(numbers, device=network.device), len(X))
        return self

    def attach(self, network: Network) -> Self:
        """Give a loaded model the network that its adapters belong to."""
        check_is_fitted(self, "classes_")
        self.check(network)
        stored = self.tensors_
        self._install(network)
        shapes = {name: tuple(p.shape) for name, p in self.adapters_.items()}
        means = (len(self.classes_), network.channels)
        check_tensors(stored, {**shapes, MEANS: means})
        with torch.no_grad():
            for name, parameter in self.adapters_.items():
                parameter.copy_(stored[name])
        self.means_ = stored[MEANS].to(network.device)
        return self

    def logits(self, X: Pixels) -> Tensor:
        """Logits (image, class)."""
        check_is_fitted(self, "means_")
        return _cosines(embed(self.network_, X, PREDICTED), self.means_)

    def predict_proba(self, X: Pixels) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        return torch.softmax(self.logits(X).double(), dim=1).numpy(force=True)

    def predict(self, X: Pixels) -> NDArray[Any]:
        """Labels of the most probable classes."""
        chosen: NDArray[Any] = self.classes_[self.logits(X).argmax(dim=1).numpy(force=True)]
        return chosen

    @property
    def attached(self) -> bool:
        """Whether there is a network to predict with; not so after loading."""
        return hasattr(self, "network_")

    @property
    def tensors_(self) -> dict[str, Tensor]:
        """What was learned: adapters and class means."""
        if self.attached:
            adapters = {name: p.detach() for name, p in self.adapters_.items()}
            return {**adapters, MEANS: self.means_}
        return self._stored

    def _check_params(self) -> None:
        check_count("steps", self.steps, least=0)
        if self.images_at_once is not None:
            check_count("images_at_once", self.images_at_once, least=1)
        if hasattr(self, "learning_rate"):
            check_positive("learning_rate", self.learning_rate)

    def _install(self, network: Network) -> None:
        self.network_ = network if self.device is None else network.to(self.device)
        attached = self._attach(self.network_)
        self.adapters_ = self.network_.used(attached)
        for name in attached.keys() - self.adapters_.keys():
            attached[name].requires_grad_(False)

    def _train(self, pixels: Pixels, labels: Tensor, originals: int) -> None:
        network, classes = self.network_, len(self.classes_)
        chunk = chunk_size(network, self.images_at_once)

        def means(features: Tensor) -> Tensor:
            return class_means(features[:originals], labels[:originals], classes)

        def loss(features: Tensor) -> Tensor:
            entropy = F.cross_entropy(_cosines(features, means(features)), labels)
            return entropy + self._penalty()

        trained = self._begin(pixels[:originals], labels[:originals])
        with progress_bar("tuning", self.steps, show=self.verbose, unit="step") as advance:
            self.losses_ = train(
                network,
                pixels,
                loss,
                self._optimiser(trained),
                steps=self.steps,
                chunk=chunk,
                advance=advance,
            )
        self._end()
        self.means_ = means(embed(network, pixels[:originals], PREDICTED))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the network out of copies for other processes; there it is attached again."""
        state: dict[str, Any] = super().__getstate__()
        if not self.attached:
            return state
        kept = {*self.get_params(deep=False), "classes_", "seed_", "losses_", "_sklearn_version"}
        own = {name: value for name, value in state.items() if name in kept}
        return {**own, "_stored": self.tensors_}

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {f"params.{name}": tensor for name, tensor in self.tensors_.items()}
        return {"params": params_to_json(self)}, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        stored = {name: value for name, value in config.items() if value is not None}
        if different := sorted(stored.keys() ^ {"params"}):
            raise InputError(f"config has an unknown key or lacks one: {different[0]!r}.")
        restore_params(self, stored["params"])
        self._check_params()
        (learned,) = split_tensors(tensors, ("params",))
        # The shapes of adapters follow from the network, which comes with the first image.
        check_tensors(learned, {MEANS: (), **{name: t.shape for name, t in learned.items()}})
        for name in learned.keys() - {MEANS}:
            if not re.fullmatch(self.STORED, name):
                raise InputError(f"tensor {name!r} is unexpected.")
        means = learned[MEANS]
        if means.ndim != 2 or len(means) != len(self.classes_):
            raise InputError(
                f"tensor 'means' has shape {tuple(means.shape)}, expected a row for each of "
                f"{len(self.classes_)} classes."
            )
        self._stored = learned


def _cosines(features: Tensor, means: Tensor) -> Tensor:
    return unit(features) @ unit(means).T / TEMPERATURE  # (image, class)
