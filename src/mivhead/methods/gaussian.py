"""The FiT heads: Gaussian classes whose covariance is a trained mixture, and ProtoNets.

Everything happens in the low-dimensional span of the support set. With m the mean of all support
images, whatever differs between classes lies in the span of the n centred images, which has r < n
dimensions. One singular value decomposition finds an orthonormal basis of it in which the total
covariance is diagonal, so that

    Sigma_k = a cov_k + b cov + c I  =  a E_k' E_k + diag(b variances + c)    within the span,
                                        c I                                   outside of it,

with one row of E_k per image of class k. Woodbury's identity turns the inverse and the determinant
of Sigma_k into those of a matrix as small as the class has images.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.head.cap import Bags
from mivhead.methods.base import (
    PooledClassifier,
    PooledShots,
    Vectors,
    check_count,
    check_positive,
    class_means,
    class_means_work,
    counts,
    minimise,
)
from mivhead.methods.cost import BACKWARD, Work

LEAST_IDENTITY = 1e-4  # keeps Sigma invertible, whatever training does to the identity's weight


class Span(NamedTuple):
    """The space that the centred support images span."""

    mean: Tensor  # (channel,)
    basis: Tensor  # (dimension, channel), orthonormal rows
    variances: Tensor  # (dimension,): the total covariance, diagonal in this basis


def span_of(x: Tensor) -> Span:
    """Span of the images (image, channel), of which there are at least two."""
    mean = x.mean(dim=0)
    _, values, basis = torch.linalg.svd(x - mean, full_matrices=False)
    noise = max(x.shape) * torch.finfo(x.dtype).eps * values.max()
    real = values > noise
    return Span(mean, basis[real], values[real].square() / (len(x) - 1))


def coordinates(x: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Coordinates (image, dimension) in the span, and squared distances from it (image,)."""
    centred = x - span.mean
    inside = centred @ span.basis.T
    return inside, (centred - inside @ span.basis).square().sum(dim=1)


class Weights(NamedTuple):
    """Weights of the class covariance, the total covariance and the identity; all scalars."""

    of_class: Tensor
    total: Tensor
    identity: Tensor


class Support:
    """Support images ordered by class: what does not change while the weights are trained."""

    def __init__(self, x: Tensor, labels: Tensor, classes: int) -> None:
        self.span = span_of(x)
        self.z, _ = coordinates(x, self.span)  # (image, dimension)
        self.means = class_means(self.z, labels, classes)  # (class, dimension)
        self.labels, self.channels = labels, x.shape[1]
        self.bags = Bags.from_labels(labels, classes)
        # cov_k is divided by shots - 1; the covariance of a single shot is zero.
        self.scale = (counts(labels, classes) - 1).clamp_min(1).to(x.dtype).rsqrt()  # (class,)
        self.deviations = (self.z - self.means[labels]) * self.scale[labels, None]  # E
        self.points = torch.cat([self.z, self.means])  # (image and class, dimension)
        self.squares = self.points.square()

    def precision(self, weights: Weights) -> Tensor:
        """Inverse of diag(b variances + c): (dimension,)."""
        return 1 / (weights.total * self.span.variances + weights.identity)

    def log_volume(self, weights: Weights) -> Tensor:
        """Logarithm of det(2 pi Sigma), without the class's own part."""
        outside = self.channels - len(self.span.variances)
        inside = -self.precision(weights).log().sum()
        return inside + outside * weights.identity.log() + self.channels * math.log(2 * math.pi)

    def linear(self, weights: Weights) -> Tensor:
        """Log densities (image, class) of the support under the shared covariance alone."""
        precision = self.precision(weights)
        squares = self.squares @ precision  # (image and class,)
        crossed = self.z @ (self.means * precision).T  # (image, class)
        images = len(self.z)
        distances = squares[:images, None] + squares[images:] - 2 * crossed
        return -(distances + self.log_volume(weights)) / 2

    def quadratic(self, weights: Weights) -> Tensor:
        """Log densities (image, class) of the support with a covariance per class."""
        root, crossed = self._small_systems(weights)
        solved = torch.cholesky_inverse(root) @ crossed  # (class, shot, image)
        gained = weights.of_class * (crossed * solved).sum(dim=1).T  # (image, class)
        densities: Tensor = self.linear(weights) + gained / 2 - _half_log_det(root)
        return densities

    def _small_systems(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Cholesky factors of I + a E_k P E_k', and E_k P (z - mean_k) of all images z."""
        weighted = self.deviations * self.precision(weights)  # E P: (shot, dimension)
        # The costly product, of all shots with all images and class means
        products = weighted @ self.points.T
        images, means = products[:, : len(self.z)], products[:, len(self.z) :]
        crossed = images - means.gather(1, self.labels[:, None])  # (shot, image)
        rows, real = self.bags.rows, self.bags.real
        padded = crossed[rows] * real[:, :, None]  # (class, shot, image)
        # The rows of E_k are deviations of images too, so their products are already there.
        own = rows[:, None, :].expand(-1, rows.shape[1], -1)
        inner = padded.gather(2, own) * real[:, None, :] * self.scale[:, None, None]
        identity = torch.eye(rows.shape[1], dtype=inner.dtype, device=inner.device)
        return torch.linalg.cholesky(identity + weights.of_class * inner), padded

    def finish(self, weights: Weights, *, quadratic: bool) -> dict[str, Tensor]:
        """Compute what prediction needs, as tensors."""
        precision = self.precision(weights)
        volumes = self.log_volume(weights).expand(len(self.means))
        rows, labels = self.z[:0], self.labels[:0]
        if quadratic:
            root, _ = self._small_systems(weights)
            real = self.bags.real
            weighted = (self.deviations * precision)[self.bags.rows] * real[:, :, None]
            solved = torch.linalg.solve_triangular(root, weighted, upper=False)
            rows = (weights.of_class.sqrt() * solved)[real]  # (shot, dimension)
            labels = self.labels
            volumes = volumes + 2 * _half_log_det(root)
        return {
            "weights": torch.stack(list(weights)),
            "mean": self.span.mean,
            "basis": self.span.basis,
            "precision": precision,
            "means": self.means,
            "rows": rows,
            "labels": labels,
            "volumes": volumes.contiguous(),
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


def log_densities(x: Tensor, learned: dict[str, Tensor]) -> Tensor:
    """Log densities (image, class) of new images, from what `Support.finish` returned."""
    precision, means, labels = learned["precision"], learned["means"], learned["labels"]
    span = Span(learned["mean"], learned["basis"], precision)
    z, outside = coordinates(x, span)
    root = precision.sqrt()
    distances = torch.cdist(z * root, means * root).square()  # (image, class)
    distances = distances + outside[:, None] / learned["weights"][2]
    offsets = (learned["rows"] * means[labels]).sum(dim=1)  # (row,)
    gained = (z @ learned["rows"].T - offsets).square()  # (image, row)
    distances = distances.index_add(1, labels, gained, alpha=-1)
    return -(distances + learned["volumes"]) / 2


def _half_log_det(root: Tensor) -> Tensor:
    """Half the log determinant of matrices, from their Cholesky factors: (class,)."""
    return root.diagonal(dim1=1, dim2=2).log().sum(dim=1)


class _FitHead(PooledClassifier):
    """LDA and QDA; they differ in the weights they start from and in the class covariances."""

    TENSORS: ClassVar = DIMENSIONS
    START: ClassVar[tuple[float, ...]]  # as many as are trained, the identity's last

    def __init__(
        self,
        *,
        learning_rate: float = 0.0035,
        steps: int = 400,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.steps = steps
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        check_count("steps", self.steps, least=0)

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        support = Support(shots.x.double(), shots.labels, shots.classes)
        quadratic = len(self.START) == 3
        score = support.quadratic if quadratic else support.linear
        w = torch.tensor(self.START, dtype=torch.float64, device=shots.x.device, requires_grad=True)
        self.losses_ = minimise(
            lambda: F.cross_entropy(score(_weights(w)), shots.labels),
            [w],
            rate=self.learning_rate,
            steps=self.steps,
        )
        with torch.no_grad():
            return support.finish(_weights(w), quadratic=quadratic)

    def _score(self, x: Tensor) -> Tensor:
        return log_densities(x.double(), self.learned_)


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
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the features are.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Shysheya et al., "FiT: Parameter Efficient Few-shot Transfer Learning for Personalized and
    Federated Image Classification", 2023, arXiv 2206.08671.
    """

    summary: ClassVar = "Gaussian classes with one covariance"
    paper: ClassVar = (
        "Shysheya et al. 2023, FiT: Parameter Efficient Few-shot Transfer, arXiv 2206.08671"
    )
    START: ClassVar = (1.0, 1.0)

    def _work(self, size: Vectors) -> Work:
        forward = _linear_products(size)
        steps = self.steps
        return _span_work(size) + Work(2 * steps * forward, paper=BACKWARD * steps * forward)


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
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the features are.

    Attributes
    ----------
    losses_ : list of float
        Training loss of every step.

    References
    ----------
    Shysheya et al., "FiT: Parameter Efficient Few-shot Transfer Learning for Personalized and
    Federated Image Classification", 2023, arXiv 2206.08671.
    """

    summary: ClassVar = "Gaussian classes, each with its own covariance"
    paper: ClassVar = (
        "Shysheya et al. 2023, FiT: Parameter Efficient Few-shot Transfer, arXiv 2206.08671"
    )
    START: ClassVar = (0.5, 0.5, 1.0)

    def _work(self, size: Vectors) -> Work:
        n, r, most, ways = size.n, size.span, size.most, size.ways
        linear = _linear_products(size)
        systems = n * r * (n + ways)  # products of all shots with all images and class means
        solved = ways * most**2 * n
        cubes = ways * most**3
        forward = linear + systems + solved
        # Backward through inverses: four products and two triangular solutions of small matrices.
        step = 2 * linear + 2 * systems + 3 * solved + 4 * cubes
        factors = cubes / 3 + 2 * cubes / 3 + 2 * cubes
        end = Work(systems, cubes / 3 + ways * most**2 * r)
        training = Work(self.steps * step, self.steps * factors, BACKWARD * self.steps * forward)
        return _span_work(size) + end + training


def _weights(w: Tensor) -> Weights:
    """Weights as they are used: those of covariances are not negative."""
    *covariances, identity = w.unbind()
    of_class, total = covariances if len(covariances) == 2 else (w.new_zeros(()), covariances[0])
    return Weights(of_class.relu(), total.relu(), identity.clamp_min(LEAST_IDENTITY))


def _span_work(size: Vectors) -> Work:
    """Count a singular value decomposition, as textbooks do, coordinates and class means."""
    n, c, r = size.n, size.c, size.span
    long, short = max(n, c), min(n, c)
    svd = 6 * long * short**2 + 20 * short**3
    return Work.once(2 * n * c * r + size.ways * n * r, svd)


def _linear_products(size: Vectors) -> float:
    """Count the log densities under a shared covariance, forward."""
    return (size.n + size.ways) * size.span + size.n * size.span * size.ways


class ProtoNets(PooledClassifier):
    """The FiT head without covariances: negative squared Euclidean distance to the class means.

    Parameters
    ----------
    use_views : bool, default=False
        Count augmented views as further images.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the features are.

    References
    ----------
    Shysheya et al., "FiT: Parameter Efficient Few-shot Transfer Learning for Personalized and
    Federated Image Classification", 2023, arXiv 2206.08671.
    """

    summary: ClassVar = "Euclidean distance to the class mean; nothing is trained"
    paper: ClassVar = (
        "Shysheya et al. 2023, FiT: Parameter Efficient Few-shot Transfer, arXiv 2206.08671"
    )
    TENSORS: ClassVar = {"means": "class channel"}

    def __init__(
        self,
        *,
        use_views: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
    ) -> None:
        self.use_views = use_views
        self.random_state = random_state
        self.device = device

    def _check_params(self) -> None:
        """There is nothing to check."""

    def _learn(self, shots: PooledShots) -> dict[str, Tensor]:
        return {"means": class_means(shots.x.double(), shots.labels, shots.classes)}

    def _score(self, x: Tensor) -> Tensor:
        return -torch.cdist(x.double(), self.learned_["means"]).square()  # (image, class)

    def _work(self, size: Vectors) -> Work:
        return class_means_work(size)
