"""The FiT heads: Gaussian classes whose covariance is a trained mixture, and ProtoNets.

Everything happens in the low-dimensional span of the support set. With m the mean of all support
images, all that differs between classes lies in the span of the n centred images, which has r < n
dimensions. One singular value decomposition finds an orthonormal basis of it in which the total
covariance is diagonal, so that

    Sigma_k = a cov_k + b cov + c I  =  a E_k' E_k + diag(b variances + c)    within the span,
                                        c I                                   outside of it,

with one row of E_k per image of class k. Woodbury's identity turns the inverse and the determinant
of Sigma_k into those of a matrix as small as the class has images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead.methods.base import (
    Array,
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    class_means,
    class_means_work,
    counts,
    cross_entropy,
    graph_distances,
    membership,
    minimise,
    padded_rows,
    squared_distances,
)
from mivhead.methods.cost import BACKWARD, Work

LEAST_IDENTITY = 1e-4  # keeps Sigma invertible even if training shrinks the identity's weight


class Span(NamedTuple):
    """The space that the centred support images span."""

    mean: Array  # (channel,)
    basis: Array  # (dimension, channel), orthonormal rows
    variances: Array  # (dimension,): the total covariance, diagonal in this basis


def span_of(x: Array) -> Span:
    """Span of the images (image, channel), of which there are at least two."""
    mean = x.mean(axis=0)
    _, values, basis = np.linalg.svd(x - mean, full_matrices=False)
    noise = max(x.shape) * np.finfo(x.dtype).eps * values.max()
    real = values > noise
    return Span(mean, basis[real], np.square(values[real]) / (len(x) - 1))


def coordinates(x: Array, span: Span) -> tuple[Array, Array]:
    """Coordinates (image, dimension) in the span, and squared distances from it (image,)."""
    centred = x - span.mean
    inside = centred @ span.basis.T
    return inside, np.square(centred - inside @ span.basis).sum(axis=1)


class Weights(NamedTuple):
    """Weights of the class covariance, the total covariance and the identity."""

    of_class: float
    total: float
    identity: float


class Systems(NamedTuple):
    """The small linear systems of all classes, padded to the shots of the largest class."""

    inverse: Array  # of I + a E_k P E_k': (class, shot, shot)
    half_log_det: Array  # half the logarithm of its determinant: (class,)
    inner: Array  # E_k P E_k': (class, shot, shot)
    crossed: Array  # E_k P (z - mean_k) of all images z: (class, shot, image)
    solved: Array  # the inverse times `crossed`


class Support:
    """Support images ordered by class: what does not change while the weights are trained."""

    def __init__(self, x: Array, labels: NDArray[np.int64], classes: int) -> None:
        self.span = span_of(x)
        self.z, _ = coordinates(x, self.span)  # (image, dimension)
        self.means = class_means(self.z, labels, classes)  # (class, dimension)
        self.labels, self.channels = labels, int(x.shape[1])
        shots = counts(labels, classes)
        self.rows, self.real = padded_rows(shots)  # (class, shot)
        # cov_k is divided by shots - 1; the covariance of a single shot is zero.
        self.scale = 1 / np.sqrt(np.maximum(shots - 1, 1))  # (class,)
        self.deviations = (self.z - self.means[labels]) * self.scale[labels, None]  # E
        self.points = np.concatenate([self.z, self.means])  # (image and class, dimension)
        self.squares = np.square(self.points)

    def precision(self, weights: Weights) -> Array:
        """Inverse of diag(b variances + c): (dimension,)."""
        precision: Array = 1 / (weights.total * self.span.variances + weights.identity)
        return precision

    def log_volume(self, weights: Weights) -> float:
        """Logarithm of det(2 pi Sigma), without the class's own part."""
        inside = -np.log(self.precision(weights)).sum()
        outside = self._outside * math.log(weights.identity)
        return float(inside + outside + self.channels * math.log(2 * math.pi))

    @property
    def _outside(self) -> int:
        """Dimensions outside of the span."""
        return self.channels - len(self.span.variances)

    def linear(self, weights: Weights) -> Array:
        """Log densities (image, class) of the support under the shared covariance alone."""
        precision = self.precision(weights)
        squares = self.squares @ precision  # (image and class,)
        crossed = self.z @ (self.means * precision).T  # (image, class)
        images = len(self.z)
        distances = squares[:images, None] + squares[images:] - 2 * crossed
        densities: Array = -(distances + self.log_volume(weights)) / 2
        return densities

    def quadratic(self, weights: Weights, systems: Systems) -> Array:
        """Log densities (image, class) of the support with a covariance per class."""
        gained = (systems.crossed * systems.solved).sum(axis=1).T  # (image, class)
        gained *= weights.of_class / 2
        densities: Array = self.linear(weights) + gained - systems.half_log_det
        return densities

    def systems(self, weights: Weights) -> Systems:
        """Solve the systems of all classes."""
        weighted = self.deviations * self.precision(weights)  # E P: (shot, dimension)
        # The costly product, of all shots with all images and class means
        products = weighted @ self.points.T
        images, means = products[:, : len(self.z)], products[:, len(self.z) :]
        crossed = images - means[np.arange(len(images)), self.labels, None]  # (shot, image)
        padded = crossed[self.rows] * self.real[:, :, None]  # (class, shot, image)
        # The rows of E_k are deviations of images too, so their products are already there.
        own = np.take_along_axis(padded, self.rows[:, None, :], axis=2)
        inner = own * self.real[:, None, :] * self.scale[:, None, None]
        matrices = np.eye(inner.shape[1]) + weights.of_class * inner
        inverse, (_, log_det) = np.linalg.inv(matrices), np.linalg.slogdet(matrices)
        return Systems(inverse, log_det / 2, inner, padded, inverse @ padded)

    # Gradients with respect to the three weights, given those of the log densities.

    def linear_gradient(self, weights: Weights, grad: Array) -> Array:
        """Gradient through `linear`."""
        images, classes = grad.sum(axis=1), grad.sum(axis=0)
        products = (self.z * (grad @ self.means)).sum(axis=0)
        d_precision = products - np.concatenate([images, classes]) @ self.squares / 2
        d_precision += grad.sum() / self.precision(weights) / 2  # of the volume
        volume = np.array([0, 0, -grad.sum() / 2 * self._outside / weights.identity])
        return volume + self._through_precision(weights, d_precision)

    def quadratic_gradient(self, weights: Weights, systems: Systems, grad: Array) -> Array:
        """Gradient through `quadratic`."""
        a, crossed, solved = weights.of_class, systems.crossed, systems.solved
        flow = solved * grad.T[:, None, :]  # (class, shot, image)
        d_matrices = -a / 2 * flow @ solved.swapaxes(1, 2)
        d_matrices -= grad.sum(axis=0)[:, None, None] / 2 * systems.inverse  # (class, shot, shot)
        d_a = (flow * crossed).sum() / 2 + (d_matrices * systems.inner).sum()
        d_padded = a * flow
        d_own = a * d_matrices * self.real[:, None, :] * self.scale[:, None, None]
        classes, shots = np.ogrid[: self.rows.shape[0], : self.rows.shape[1]]
        np.add.at(d_padded, (classes[:, :, None], shots[:, :, None], self.rows[:, None, :]), d_own)
        d_crossed = d_padded[self.real]  # (shot, image), in the order of the support
        d_products = np.zeros((len(self.z), len(self.points)))
        d_products[:, : len(self.z)] = d_crossed
        d_products[np.arange(len(self.z)), len(self.z) + self.labels] = -d_crossed.sum(axis=1)
        d_precision = ((d_products @ self.points) * self.deviations).sum(axis=0)
        own = np.array([d_a, 0, 0]) + self._through_precision(weights, d_precision)
        return own + self.linear_gradient(weights, grad)

    def _through_precision(self, weights: Weights, grad: Array) -> Array:
        d_variances = -grad * np.square(self.precision(weights))  # of b variances + c
        return np.array([0, (d_variances * self.span.variances).sum(), d_variances.sum()])

    def finish(self, weights: Weights, *, quadratic: bool) -> dict[str, Array]:
        """Compute what prediction needs, as arrays."""
        precision = self.precision(weights)
        volumes = np.full(len(self.means), self.log_volume(weights))
        rows, labels = self.z[:0], self.labels[:0]
        if quadratic:
            systems = self.systems(weights)
            weighted = (self.deviations * precision)[self.rows] * self.real[:, :, None]
            root = np.linalg.cholesky(systems.inverse)  # inverse = root root'
            solved = root.swapaxes(1, 2) @ weighted
            rows = (math.sqrt(weights.of_class) * solved)[self.real]  # (shot, dimension)
            labels = self.labels
            volumes = volumes + 2 * systems.half_log_det
        return {
            "weights": np.array(weights),
            "mean": self.span.mean,
            "basis": self.span.basis,
            "precision": precision,
            "means": self.means,
            "rows": rows,
            "labels": labels,
            "volumes": volumes,
        }


# Dimensions of what `finish` returns.
DIMENSIONS = {
    "weights": "3",
    "mean": "channel",
    "basis": "dimension channel",
    "precision": "dimension",
    "means": "class dimension",
    "rows": "row dimension",
    "labels": "row",
    "volumes": "class",
}


def log_densities(x: Array, learned: dict[str, Array]) -> Array:
    """Log densities (image, class) of new images, from what `Support.finish` returned."""
    precision, means, labels = learned["precision"], learned["means"], learned["labels"]
    z, outside = coordinates(x, Span(learned["mean"], learned["basis"], precision))
    root = np.sqrt(precision)
    distances = squared_distances(z * root, means * root)  # (image, class)
    distances += outside[:, None] / learned["weights"][2]
    offsets = (learned["rows"] * means[labels]).sum(axis=1)  # (row,)
    gained = np.square(z @ learned["rows"].T - offsets)  # (image, row)
    distances -= gained @ membership(labels, len(means), gained.dtype)
    return -(distances + learned["volumes"]) / 2


@dataclass(kw_only=True, eq=False, repr=False)
class _FitHead(PooledClassifier):
    """LDA and QDA; they differ in the weights they start from and in the class covariances."""

    TENSORS: ClassVar = DIMENSIONS
    START: ClassVar[tuple[float, ...]]  # as many as are trained, the identity's last

    learning_rate: float = 0.0035
    steps: int = 400

    def _check_params(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_count("steps", self.steps, least=0)

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        support = Support(shots.x.astype(np.float64), shots.labels, shots.classes)
        w = np.array(self.START)
        quadratic = len(w) == 3

        def loss() -> tuple[float, list[Array]]:
            weights = _weights(w)
            if quadratic:
                systems = support.systems(weights)
                value, grad = cross_entropy(support.quadratic(weights, systems), shots.labels)
                gradient = support.quadratic_gradient(weights, systems, grad)
            else:
                value, grad = cross_entropy(support.linear(weights), shots.labels)
                gradient = support.linear_gradient(weights, grad)
            least = np.zeros_like(w)
            least[-1] = LEAST_IDENTITY
            return value, [gradient[-len(w) :] * (w > least)]  # none where `_weights` clips

        self.losses_ = minimise(loss, [w], rate=self.learning_rate, steps=self.steps)
        return support.finish(_weights(w), quadratic=quadratic)

    def _score(self, x: Array) -> Array:
        return log_densities(x.astype(np.float64), self.learned_)

    def _graph(self, x: Any) -> Any:
        learned = self.learned_
        precision, means, labels = (learned[name] for name in ("precision", "means", "labels"))
        centred = x.cast(np.float64) - learned["mean"]
        inside = centred @ learned["basis"].T  # (n, dimension)
        rest = centred - inside @ learned["basis"]
        outside = (rest * rest).sum(1, keepdims=True) / float(learned["weights"][2])  # (n, 1)
        root = np.sqrt(precision)
        distances = graph_distances(inside * root, means * root) + outside  # (n, class)
        if len(labels):
            offsets = (learned["rows"] * means[labels]).sum(axis=1)
            gained = inside @ learned["rows"].T - offsets  # (n, row)
            distances = distances - (gained * gained) @ membership(labels, len(means), np.float64)
        return (distances + learned["volumes"]) * -0.5


@dataclass(kw_only=True, eq=False, repr=False)
class FitLDA(_FitHead):
    """One covariance for all classes: Sigma = w1 cov + w2 I, with cov that of the whole support.

    Logits are the Gaussian log densities, without a prior. The weights start at 1 and are trained
    with the support as its own queries.

    Parameters
    ----------
    learning_rate : float, default=0.0035
        Learning rate of Adam.
    steps : int, default=400
        Number of steps, each on the full batch.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Shysheya et al., "FiT: Parameter Efficient Few-shot Transfer Learning for Personalized and
    Federated Image Classification", 2023, arXiv 2206.08671.
    """

    START: ClassVar = (1.0, 1.0)

    def _work(self, size: Vectors) -> Work:
        forward = _linear_products(size)
        steps = self.steps
        return _span_work(size) + Work(2 * steps * forward, paper=BACKWARD * steps * forward)


@dataclass(kw_only=True, eq=False, repr=False)
class FitQDA(_FitHead):
    """A covariance per class: Sigma_k = w1 cov_k + w2 cov + w3 I, starting at 0.5, 0.5 and 1.

    Logits are the Gaussian log densities, without a prior. The covariance of a class of one shot is
    zero. Time grows with the cube of the number of support images, not with the channels.

    Parameters
    ----------
    learning_rate : float, default=0.0035
        Learning rate of Adam.
    steps : int, default=400
        Number of steps, each on the full batch.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Shysheya et al., "FiT: Parameter Efficient Few-shot Transfer Learning for Personalized and
    Federated Image Classification", 2023, arXiv 2206.08671.
    """

    START: ClassVar = (0.5, 0.5, 1.0)

    def _work(self, size: Vectors) -> Work:
        n, r, most, ways = size.n, size.span, size.most, size.ways
        linear = _linear_products(size)
        systems = n * r * (n + ways)  # products of all shots with all images and class means
        solved = ways * most**2 * n
        cubes = ways * most**3
        forward = linear + systems + solved
        factors = 2 * cubes + 2 * cubes / 3  # inverses and determinants
        end = Work(systems + solved + ways * most**2 * r, factors + cubes / 3)
        steps = self.steps
        training = Work(2 * steps * forward, steps * factors, BACKWARD * steps * forward)
        return _span_work(size) + end + training


def _weights(w: Array) -> Weights:
    """Weights as they are used: those of covariances are not negative."""
    of_class, total, identity = w if len(w) == 3 else (0.0, *w)
    return Weights(max(of_class, 0.0), max(total, 0.0), max(identity, LEAST_IDENTITY))


def _span_work(size: Vectors) -> Work:
    """Count a singular value decomposition, as textbooks do, coordinates and class means."""
    n, c, r = size.n, size.c, size.span
    long, short = max(n, c), min(n, c)
    svd = 6 * long * short**2 + 20 * short**3
    return Work.once(2 * n * c * r + size.ways * n * r, svd)


def _linear_products(size: Vectors) -> float:
    """Count the log densities under a shared covariance, forward."""
    return (size.n + size.ways) * size.span + size.n * size.span * size.ways


@dataclass(kw_only=True, eq=False, repr=False)
class ProtoNets(PooledClassifier):
    """The FiT head without covariances: negative squared Euclidean distance to the class means.

    References
    ----------
    Shysheya et al., "FiT: Parameter Efficient Few-shot Transfer Learning for Personalized and
    Federated Image Classification", 2023, arXiv 2206.08671.
    """

    TENSORS: ClassVar = {"means": "class channel"}

    def _check_params(self) -> None:
        """There is nothing to check."""

    def _learn(self, shots: PooledShots) -> dict[str, Array]:
        return {"means": class_means(shots.x.astype(np.float64), shots.labels, shots.classes)}

    def _score(self, x: Array) -> Array:
        return -squared_distances(x.astype(np.float64), self.learned_["means"])  # (image, class)

    def _graph(self, x: Any) -> Any:
        return graph_distances(x.cast(np.float64), self.learned_["means"]) * -1.0

    def _work(self, size: Vectors) -> Work:
        return class_means_work(size)
