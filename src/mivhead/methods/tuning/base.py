"""`TuningClassifier`: what all methods that tune the backbone share.

They work on a copy of the backbone's network (`Network`) and on pixels, where other methods work on
features. The classifier on top is NCC: logits are cosines to the class means of the tuned features,
divided by a temperature. The support images are their own queries, and the gradient flows through
the means as well. Training runs on the full batch, in bounded memory.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from mivhead._util.estimator import Estimator, check_fitted, random_seed
from mivhead._util.progress import progress_bar
from mivhead._util.schema import check_tensors, split_tensors
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.methods.base import (
    NORM_EPS,
    check_count,
    check_keys,
    check_positive,
    params_to_json,
    restore_params,
)
from mivhead.methods.cost import BACKWARD, BackboneWork, TaskSize, Work
from mivhead.model.decision import softmax
from mivhead.support import SupportSet

TEMPERATURE = 0.1
MEANS = "means"  # the vectors of the classes, in a model file: usually means of tuned features
PREDICTED = 4  # images per pass in prediction on a CPU: activations stay in its cache
# Pixels whose activations are kept at once on a CPU: 32 images at 224 px.
MAX_PIXELS = 32 * 224 * 224
BYTES_PER_PIXEL = 2000  # of activations with gradients: about 3 GB for 32 images with a ResNet-50
SHARE = 0.6  # of a device's free memory that activations may take

Pixels: TypeAlias = NDArray[np.uint8]  # (image, R, R, 3), resized already
Tapped: TypeAlias = Callable[[Tensor], Sequence[Mapping[str, Tensor]]]
Loss: TypeAlias = Callable[[Tensor], Tensor]  # features (image, channel) of the batch to a number


class Network(nn.Module):
    """A copy of a backbone's module whose deepest tap gives one vector per image, with gradients.

    Parameters
    ----------
    model : Module
        A copy that is not used elsewhere, because methods change it.
    tapped : callable
        Returns the parts (`map`, `token`) of the taps of that copy, the deepest last.
    prepare : callable
        Turns pixels into the normalised batch `(n, 3, R, R)` that the model takes.
    size : int
        R, the side of its input.
    name : str
        The backbone's name, for error messages.
    """

    def __init__(
        self,
        model: nn.Module,
        tapped: Tapped,
        prepare: Callable[[Pixels], Tensor],
        size: int,
        name: str,
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.head: nn.Module = nn.Identity()  # on the pooled vector
        self.size = size
        self.name = name
        self._tapped = tapped
        self._prepare = prepare

    def forward(self, x: Tensor) -> Tensor:
        """Pool a normalised batch (n, 3, R, R) to (n, channel)."""
        parts = self._tapped(x)[-1]
        pooled = parts["token"] if "token" in parts else parts["map"].mean(dim=(2, 3))
        embedded: Tensor = self.head(pooled)
        return embedded

    def batch(self, pixels: Pixels) -> Tensor:
        """Normalise pixels to the input (n, 3, R, R), where the module is."""
        return self._prepare(pixels).to(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next(self.model.parameters()).device

    @property
    def channels(self) -> int:
        """Length of the pooled vector."""
        with torch.no_grad():
            return int(self(self.blank()).shape[1])

    def map_features(self) -> nn.Parameter:
        """Add a linear map after the pooled vector, at first the identity; return its matrix."""
        weight = nn.Parameter(torch.eye(self.channels, device=self.device))
        self.head = nn.Linear(len(weight), len(weight), bias=False, device="meta")
        self.head.weight = weight
        return weight

    def blank(self) -> Tensor:
        """One image of zeros (1, 3, R, R)."""
        return torch.zeros(1, 3, self.size, self.size, device=self.device)

    def used(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Leave out parameters that the pooled vector does not depend on, such as a classifier's.

        >>> model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
        >>> run = lambda x: [{"token": model["a"](x.mean(dim=(2, 3)))}]
        >>> network = Network(model, run, lambda pixels: pixels, 4, "two")
        >>> list(network.used(dict(model.requires_grad_().named_parameters())))
        ['a.weight', 'a.bias']
        """
        with torch.enable_grad():
            total = self(self.blank()).sum()
        found: Sequence[Any] = torch.autograd.grad(
            total, list(parameters.values()), allow_unused=True
        )
        pairs = zip(parameters.items(), found, strict=True)
        return {name: parameter for (name, parameter), grad in pairs if grad is not None}


def check_is_vit(network: Network, method: str, reason: str) -> None:
    """Raise an error if a network is not a ViT, by its layers and not by its class.

    A ViT has LayerNorms, and its only convolutions cut the image into patches.
    """
    modules = list(network.model.modules())
    convolutional = any(isinstance(m, nn.Conv2d) and m.kernel_size != m.stride for m in modules)
    if convolutional or not any(isinstance(m, nn.LayerNorm) for m in modules):
        raise InputError(
            f"{method} {reason} of a vision transformer; {network.name} is not one: choose a ViT, "
            "or another method, such as finetune."
        )


@dataclass(kw_only=True, eq=False, repr=False)
class TuningClassifier(Estimator):
    """Base of the methods that tune a copy of the backbone.

    A subclass defines in `_attach` what is trained, in `_optimiser` how, and in `_step_products`
    what a step costs. What it trains and the class means are the model; the network itself is not
    part of it. `attach` gives an estimator its network: before `fit`, and again after loading.
    """

    needs: ClassVar = "images"
    scale_: ClassVar = ()
    decision_: ClassVar = None
    unlabelled_: ClassVar = None
    has_ensemble: ClassVar = False
    STORED: ClassVar[str]  # pattern of the names of its tensors

    steps: int  # passes over the support set
    use_views: bool = False  # train on augmented views as well
    # Images whose activations are kept; a larger support set takes a third more time. None: as many
    # as have the pixels of 32 images at 224 px, or as fit into the memory of a GPU.
    images_at_once: int | None = None
    random_state: int | np.random.RandomState | None = None  # where weights are drawn at random
    device: str | None = None  # None: where the backbone is
    verbose: bool = True  # show a progress bar if training takes more than two seconds
    classes_: NDArray[Any] = field(init=False)
    seed_: int = field(init=False)

    @abstractmethod
    def check(self, network: Network) -> None:
        """Raise an error that explains why this method cannot tune a network."""

    @abstractmethod
    def _attach(self, network: Network) -> dict[str, nn.Parameter]:
        """Insert adapters into the network; return what is trained, by name."""

    @abstractmethod
    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Make the optimiser of the adapters."""

    @abstractmethod
    def _step_products(
        self, backbone: BackboneWork, images: int, channels: int, ways: int
    ) -> tuple[float, float, float]:
        """Count the multiply-adds of a step: of the network, of adapters and of a feature map.

        The network's are those of the forward and the backward pass, the others' of the forward
        pass alone.
        """

    def _begin(self, _pixels: Pixels, _labels: Tensor) -> dict[str, nn.Parameter]:
        """Prepare training on images ordered by class; return what is trained, by name."""
        return self.adapters_

    def _class_vectors(self, features: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Return what features are compared with, one vector per class: their means."""
        return class_means(features, labels, classes)

    def _penalty(self) -> Tensor | float:
        """Return what is added to the cross-entropy."""
        return 0.0

    def _end(self) -> None:
        """Finish training: move what was trained into the adapters."""
        for parameter in self.adapters_.values():
            parameter.requires_grad_(False)

    def attach(self, network: Network) -> Self:
        """Attach a network: to tune it in `fit`, or, after loading, to predict with it.

        Parameters
        ----------
        network : Network
            A copy of the backbone's module (`mivhead.model.readers.network_of`) of its own.
        """
        self._check_params()
        self.check(network)
        if hasattr(self, "_stored"):
            self._install(network)
            self._load_adapters()
        else:
            self._untuned = network
        return self

    def fit(
        self,
        X: Pixels,
        y: Any,
        *,
        views: Pixels | None = None,
        view_of: NDArray[np.int64] | None = None,
    ) -> Self:
        """Tune the attached network on labelled images.

        Parameters
        ----------
        X : ndarray of shape (image, R, R, 3)
            Images of the network's size.
        y : array-like of shape (image,)
            Their labels.
        views, view_of : ndarray, default=None
            Augmented images, and for each the row of X that it was made from. With `use_views`
            they are queries in training; class means are those of the images alone.
        """
        return self.fit_support(SupportSet.read(X, y, views, view_of))

    def fit_support(self, support: SupportSet) -> Self:
        """Tune the attached network on a checked support set, whose features are pixels.

        Parameters
        ----------
        support : SupportSet
            What `SupportSet.read` makes of the arguments of `fit`.
        """
        self._check_params()
        network: Network | None = self.__dict__.pop("_untuned", None)
        if network is None:
            raise InputError(
                f"{type(self).__name__} tunes the backbone, so features are not enough: "
                "use FewShotClassifier(method=...), or attach(network) before every fit."
            )
        if not self.use_views:
            support = replace(support, views=None, view_rows=support.view_rows[:0])
        self.seed_, self.classes_ = random_seed(self.random_state), support.classes
        self.shots_, self.views_ = support.shots, len(support.view_rows)
        self._install(network)
        labels = torch.as_tensor(support.all_labels, device=network.device)
        self._train(support.everything, labels, len(support.labels))
        return self

    def logits(self, X: Pixels) -> NDArray[np.float32]:
        """Logits (image, class)."""
        check_fitted(self, "means_")
        embedded = embed(self.network_, X, predicted_at_once(self.network_))
        logits: NDArray[np.float32] = cosines(embedded, self.means_).numpy(force=True)
        return logits

    def predict_proba(self, X: Pixels) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        return softmax(self.logits(X).astype(np.float64))

    def score_unknown(self, X: Pixels) -> tuple[NDArray[np.floating[Any]], None]:
        """Probabilities, and None: no shot is left out, so nothing tells how unlike images are."""
        return self.predict_proba(X), None

    def predict(self, X: Pixels) -> NDArray[Any]:
        """Labels of the most probable classes."""
        chosen: NDArray[Any] = self.classes_[self.logits(X).argmax(axis=1)]
        return chosen

    def work(self, size: TaskSize, features: Features, backbone: BackboneWork) -> Work:
        """Count the work of all steps; every step passes the network, forward and backward.

        A backward pass through a frozen layer computes the gradient of its input only, through a
        trained one also that of its weights, and through attention that of both factors.
        """
        images, ways, channels = size.images, size.ways, features.blocks[-1].channels
        step, adapters, mapped = self._step_products(backbone, images, channels, ways)
        classify = mapped + 2 * images * ways * channels  # class means and cosines
        forward = images * backbone.total + adapters + classify
        return Work(
            self.steps * (step + 3 * adapters + 3 * classify),
            paper=BACKWARD * self.steps * forward,
        )

    @property
    def attached(self) -> bool:
        """Whether there is a tuned network to predict with; False after loading."""
        return hasattr(self, "network_")

    @property
    def tensors_(self) -> dict[str, NDArray[Any]]:
        """What was learned: adapters and class means."""
        if self.attached:
            learned = {**self.adapters_, MEANS: self.means_}
            return {name: tensor.detach().numpy(force=True) for name, tensor in learned.items()}
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

    def _load_adapters(self) -> None:
        """Set the installed adapters to the tensors of a model file."""
        stored = self._stored
        shapes = {name: tuple(p.shape) for name, p in self.adapters_.items()}
        means = (len(self.classes_), self.network_.channels)
        check_tensors(stored, {**shapes, MEANS: means})
        with torch.no_grad():
            for name, parameter in self.adapters_.items():
                parameter.copy_(torch.as_tensor(stored[name]))
        self.means_ = torch.as_tensor(stored[MEANS], device=self.network_.device)

    def _train(self, pixels: Pixels, labels: Tensor, originals: int) -> None:
        network, classes = self.network_, len(self.classes_)
        chunk = chunk_size(network, self.images_at_once)

        def vectors(features: Tensor) -> Tensor:
            return self._class_vectors(features[:originals], labels[:originals], classes)

        def loss(features: Tensor) -> Tensor:
            entropy = F.cross_entropy(cosines(features, vectors(features)), labels)
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
        features = embed(network, pixels[:originals], predicted_at_once(network))
        self.means_ = vectors(features).detach()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the network out of pickles; it is attached again where they are loaded."""
        state = {name: value for name, value in vars(self).items() if name != "_untuned"}
        if not self.attached:
            return state
        kept = {*self.get_params(deep=False), "classes_", "seed_", "losses_", "_made_as"}
        own = {name: value for name, value in state.items() if name in kept}
        return {**own, "_stored": self.tensors_}

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        tensors = {f"params.{name}": tensor for name, tensor in self.tensors_.items()}
        return {"params": params_to_json(self)}, tensors

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        restore_params(self, check_keys(config, {"params"})["params"])
        self._check_params()
        (learned,) = split_tensors(tensors, ("params",))
        # The shapes of adapters follow from the network, which is attached later.
        check_tensors(learned, {MEANS: (), **{name: t.shape for name, t in learned.items()}})
        for name in learned.keys() - {MEANS}:
            if not re.fullmatch(self.STORED, name):
                raise InputError(f"tensor {name!r} is unexpected.")
        means = learned[MEANS]
        if means.ndim < 2 or len(means) != len(self.classes_):
            raise InputError(
                f"tensor 'means' has shape {tuple(means.shape)}, expected a row for each of "
                f"{len(self.classes_)} classes."
            )
        self._stored = learned


def unit(x: Tensor) -> Tensor:
    """Scale vectors (..., channel) to length 1, as `mivhead.methods.base.unit` does."""
    return F.normalize(x, dim=-1, eps=NORM_EPS)


def class_means(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean vector of every class, as `mivhead.methods.base.class_means` does."""
    members = F.one_hot(labels, classes).to(x.dtype)  # (image, class)
    return members.T @ x / members.sum(dim=0)[:, None]


def cosines(features: Tensor, means: Tensor) -> Tensor:
    """Logits (image, class): cosines to the vectors of the classes, divided by a temperature."""
    return unit(features) @ unit(means).T / TEMPERATURE  # (image, class)


def chunk_size(network: Network, images: int | None) -> int:
    """Images whose activations are kept at once: as given, or by the input and the memory.

    A larger batch passes the network twice per step (`train`), which would bias times: on a GPU,
    the chunk is therefore as large as its free memory allows.
    """
    if images is not None:
        return images
    usual = max(1, MAX_PIXELS // network.size**2)
    free = free_memory(network.device)
    if free is None:
        return usual
    return max(usual, int(SHARE * free / (BYTES_PER_PIXEL * network.size**2)))


def predicted_at_once(network: Network) -> int:
    """Images per pass without gradients: few on a CPU, and as many as fit on a GPU."""
    return PREDICTED if network.device.type == "cpu" else chunk_size(network, None)


def free_memory(device: torch.device | str) -> int | None:
    """Return the free bytes of a GPU; None for a CPU, or if the device does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def train(
    network: Network,
    pixels: Pixels,
    loss: Loss,
    optimiser: Optimizer,
    *,
    steps: int,
    chunk: int,
    advance: Callable[[int], object],
) -> list[float]:
    """Train the optimiser's parameters; return the loss before each step.

    Each step takes one pass of the network, or two if there are more images than a chunk: the
    first, without a graph, gives all features and the gradient of the loss with respect to them;
    the second propagates that gradient, chunk by chunk. The sum is the exact gradient of the batch.
    """
    losses: list[float] = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.enable_grad():
            value = _backward(network, pixels, loss, chunk)
        if not torch.isfinite(value):
            raise InputError(
                f"Training diverged at step {len(losses)}: the loss is {value.item()}. "
                "Lower learning_rate."
            )
        losses.append(value.item())
        optimiser.step()
        advance(1)
    return losses


def embed(network: Network, pixels: Pixels, chunk: int) -> Tensor:
    """Features (image, channel) without gradients."""
    with torch.no_grad():
        return torch.cat([network(network.batch(part)) for part in split(pixels, chunk)])


def _backward(network: Network, pixels: Pixels, loss: Loss, chunk: int) -> Tensor:
    if len(pixels) <= chunk:
        value = loss(network(network.batch(pixels)))
        value.backward()
        return value.detach()
    features = embed(network, pixels, chunk).requires_grad_()
    value = loss(features)
    value.backward()
    gradient = torch.as_tensor(features.grad)  # (image, channel)
    for part, flow in zip(split(pixels, chunk), gradient.split(chunk), strict=True):
        network(network.batch(part)).backward(flow)
    return value.detach()


def split(pixels: Pixels, chunk: int) -> Sequence[Pixels]:
    """Split images into parts that pass the network at once."""
    return [pixels[start : start + chunk] for start in range(0, len(pixels), chunk)]
