"""`TuningClassifier`: what all methods that tune the backbone share.

They work on a copy of the backbone's network (`Network`) and on pixels, where other methods work on
features. The classifier on top is NCC: logits are cosines to the class means of the tuned features,
divided by a temperature. The support images are their own queries, and the gradient flows through
the means as well. Training runs on the full batch, in bounded memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from mivhead.errors import InputError
from mivhead_bench.methods.base import LogitClassifier, check_hyperparameters
from mivhead_bench.methods.tuning.network import Network, Pixels, chunk_size, split

TEMPERATURE = 0.1

Loss: TypeAlias = Callable[[Tensor], Tensor]  # features (image, channel) of the batch to a number


@dataclass(kw_only=True, eq=False, repr=False)
class TuningClassifier(LogitClassifier):
    """Base of the methods that tune a copy of the backbone.

    A subclass defines in `_attach` what is trained, and in `_optimiser` how. `attach` gives an
    estimator the network to tune, before every `fit`.
    """

    needs: ClassVar = "images"
    paper: ClassVar[str]

    steps: int  # passes over the support set
    use_views: bool = False  # train on augmented views as well
    # Images whose activations are kept; a larger support set takes a third more time. None: as many
    # as have the pixels of 32 images at 224 px, or as fit into the memory of a GPU.
    images_at_once: int | None = None
    random_state: int | None = None  # where weights are drawn at random
    device: str | None = None  # None: where the backbone is

    @abstractmethod
    def check(self, network: Network) -> None:
        """Raise an error that explains why this method cannot tune a network."""

    @abstractmethod
    def _attach(
        self, network: Network, pixels: Pixels, labels: Tensor
    ) -> Mapping[str, nn.Parameter]:
        """Insert adapters into the network of labelled images; return what is trained, by name."""

    @abstractmethod
    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Make the optimiser of what is trained."""

    def _penalty(self) -> Tensor | float:
        """Return what is added to the cross-entropy."""
        return 0.0

    def attach(self, network: Network) -> Self:
        """Take a copy of the backbone's module (`network_of`), which the next `fit` tunes."""
        check_hyperparameters(self)
        self.check(network)
        self._untuned = network
        return self

    def fit(
        self, X: Pixels, y: ArrayLike, *, views: Pixels | None = None, view_of: Any = None
    ) -> Self:
        """Tune the attached network on labelled images (image, R, R, 3).

        With `use_views`, views of the images `view_of` are queries in training; class means are
        those of the images alone.
        """
        network: Network | None = self.__dict__.pop("_untuned", None)
        if network is None:
            raise InputError(f"{type(self).__name__} needs attach(network) before every fit.")
        self.network_ = network if self.device is None else network.to(self.device)
        self.classes_, numbers = np.unique(np.asarray(y), return_inverse=True)
        images, sources = X, numbers
        if self.use_views and views is not None:
            images, sources = np.concatenate([X, views]), np.append(numbers, numbers[view_of])
        labels = torch.as_tensor(sources, device=network.device)
        self._train(images, labels, len(X))
        return self

    def _train(self, pixels: Pixels, labels: Tensor, originals: int) -> None:
        network, shots = self.network_, labels[:originals]

        def loss(features: Tensor) -> Tensor:
            logits = cosines(features, class_means(features[:originals], shots))
            return F.cross_entropy(logits, labels) + self._penalty()

        self.adapters_ = self._attach(network, pixels[:originals], shots)
        optimiser = self._optimiser(self.adapters_)
        chunk = chunk_size(network, self.images_at_once)
        self.losses_ = train(network, pixels, loss, optimiser, steps=self.steps, chunk=chunk)
        self.means_ = class_means(network.embed(pixels[:originals]), shots)  # (class, channel)

    def logits(self, X: Pixels) -> NDArray[np.float32]:
        """Logits (image, class)."""
        logits: NDArray[np.float32] = cosines(self.network_.embed(X), self.means_).numpy(force=True)
        return logits


def unit(x: Tensor) -> Tensor:
    """Scale vectors (..., channel) to length 1."""
    return F.normalize(x, dim=-1)


def class_means(x: Tensor, labels: Tensor) -> Tensor:
    """Mean vector of every class, (class, channel), of vectors (image, channel)."""
    members = F.one_hot(labels).to(x.dtype)  # (image, class)
    return members.T @ x / members.sum(dim=0)[:, None]


def cosines(features: Tensor, means: Tensor) -> Tensor:
    """Logits (image, class): cosines to the class means, divided by a temperature."""
    return unit(features) @ unit(means).T / TEMPERATURE


def train(
    network: Network, pixels: Pixels, loss: Loss, optimiser: Optimizer, *, steps: int, chunk: int
) -> list[float]:
    """Train the optimiser's parameters; return the loss before each step."""
    losses: list[float] = []
    for _ in range(steps):
        optimiser.zero_grad()
        value = _backward(network, pixels, loss, chunk)
        if not torch.isfinite(value):
            raise InputError(
                f"Training diverged at step {len(losses)}: the loss is {value.item()}. "
                "Lower learning_rate."
            )
        losses.append(value.item())
        optimiser.step()
    return losses


def _backward(network: Network, pixels: Pixels, loss: Loss, chunk: int) -> Tensor:
    """Add the gradient of the batch's loss to what is trained.

    One pass of the network, or two if there are more images than a chunk: the first, without a
    graph, gives all features and the gradient of the loss with respect to them; the second
    propagates that gradient, chunk by chunk. The sum is the exact gradient of the batch.
    """
    if len(pixels) <= chunk:
        value = loss(network(network.batch(pixels)))
        value.backward()
        return value.detach()
    features = network.embed(pixels, chunk).requires_grad_()
    value = loss(features)
    value.backward()
    gradient = torch.as_tensor(features.grad)  # (image, channel)
    for part, flow in zip(split(pixels, chunk), gradient.split(chunk), strict=True):
        network(network.batch(part)).backward(flow)
    return value.detach()
