"""The FiT heads: Gaussian classes whose covariances are a trained mixture, and ProtoNets.

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
from typing import ClassVar

import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mivhead_bench.methods.base import Array, Labels, PooledClassifier, class_means

PAPER = "Shysheya et al. 2023, FiT: Parameter Efficient Few-shot Transfer, arXiv 2206.08671"
LEAST_IDENTITY = 1e-4  # keeps Sigma invertible even if training shrinks the identity's weight


class Gaussians:
    """One Gaussian per class of support images (image, channel), which are ordered by class."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.mean = x.mean(dim=0)
        _, values, basis = torch.linalg.svd(x - self.mean, full_matrices=False)
        real = values > max(x.shape) * torch.finfo(x.dtype).eps * values.max()
        self.basis = basis[real]  # (dimension, channel), orthonormal rows
        self.variances = values[real].square() / (len(x) - 1)  # (dimension,)
        self.z, _ = self.coordinates(x)  # (image, dimension)
        classes = self.z.split(labels.bincount().tolist())
        self.means = torch.stack([z.mean(dim=0) for z in classes])  # (class, dimension)
        # E, padded with zeros; the covariance of a single shot is zero.
        self.deviations = pad_sequence(
            [(z - z.mean(dim=0)) / math.sqrt(max(len(z) - 1, 1)) for z in classes], batch_first=True
        )  # (class, shot, dimension)

    def coordinates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (image, dimension) in the span, and squared distances from it (image,)."""
        centred = x - self.mean
        inside = centred @ self.basis.T
        return inside, (centred - inside @ self.basis).square().sum(dim=1)

    def log_densities(self, z: Tensor, outside: Tensor, weights: Tensor) -> Tensor:
        """Log densities (image, class) at coordinates z, at squared distances from the span.

        The weights are those of the class covariances (a), the total one (b) and the identity (c);
        without the first, all classes share one covariance.
        """
        *of_class, total, identity = weights
        precision = 1 / (total * self.variances + identity)  # P: (dimension,)
        distances = (
            (z.square() @ precision)[:, None]
            + self.means.square() @ precision
            - 2 * z @ (self.means * precision).T
        )  # (image, class)
        rest = len(self.mean) - len(precision)  # dimensions outside of the span
        volume = (
            -precision.log().sum() + rest * identity.log() + len(self.mean) * math.log(math.tau)
        )
        densities: Tensor = -(distances + (outside / identity)[..., None] + volume) / 2
        if not of_class:
            return densities
        (a,) = of_class
        weighted = self.deviations * precision  # E_k P: (class, shot, dimension)
        crossed = weighted @ z.T - weighted @ self.means[:, :, None]  # (class, shot, image)
        inner = weighted @ self.deviations.mT  # E_k P E_k': (class, shot, shot)
        matrices = torch.eye(inner.shape[1], dtype=z.dtype) + a * inner
        root = torch.linalg.cholesky(matrices)
        half_log_det: Tensor = root.diagonal(dim1=1, dim2=2).log().sum(dim=1)  # (class,)
        solved = torch.linalg.solve_triangular(root, crossed, upper=False)
        gained: Tensor = a / 2 * solved.square().sum(dim=1).T  # (image, class)
        return densities + gained - half_log_det


@dataclass(kw_only=True, eq=False, repr=False)
class _FitHead(PooledClassifier):
    """Logits are the Gaussian log densities, without a prior.

    The weights of the covariances are trained by Adam, with the support as its own queries.
    """

    paper: ClassVar = PAPER
    START: ClassVar[tuple[float, ...]]  # of the weights, the identity's last

    learning_rate: float = 0.0035
    steps: int = 400

    def _learn(self, x: Array, labels: Labels) -> None:
        targets = torch.as_tensor(labels)
        self.gaussians_ = Gaussians(torch.as_tensor(x), targets)
        trained = torch.tensor(self.START, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([trained], lr=self.learning_rate)
        self.losses_ = []  # before each step
        inside = torch.zeros(())
        for _ in range(self.steps):
            optimiser.zero_grad()
            z, weights = self.gaussians_.z, _positive(trained)
            loss = F.cross_entropy(self.gaussians_.log_densities(z, inside, weights), targets)
            loss.backward()
            optimiser.step()
            self.losses_.append(loss.item())
        self.weights_ = _positive(trained).detach()

    def _logits(self, x: Array) -> Array:
        z, outside = self.gaussians_.coordinates(torch.as_tensor(x))
        logits: Array = self.gaussians_.log_densities(z, outside, self.weights_).numpy()
        return logits


def _positive(weights: Tensor) -> Tensor:
    """Weights as they are used: those of covariances are not negative."""
    return torch.cat([weights[:-1].relu(), weights[-1:].clamp_min(LEAST_IDENTITY)])


@dataclass(kw_only=True, eq=False, repr=False)
class FitLDA(_FitHead):
    """Gaussian classes with one covariance.

    Sigma = w1 cov + w2 I, with cov that of the whole support.
    """

    START: ClassVar = (1.0, 1.0)


@dataclass(kw_only=True, eq=False, repr=False)
class FitQDA(_FitHead):
    """Gaussian classes, each with its own covariance.

    Sigma_k = w1 cov_k + w2 cov + w3 I. Time grows with the cube of the number of support images,
    not with the channels.
    """

    START: ClassVar = (0.5, 0.5, 1.0)


@dataclass(kw_only=True, eq=False, repr=False)
class ProtoNets(PooledClassifier):
    """Euclidean distance to the class mean; nothing is trained."""

    paper: ClassVar = PAPER

    def _learn(self, x: Array, labels: Labels) -> None:
        self.means_ = class_means(x, labels)

    def _logits(self, x: Array) -> Array:
        distances: Array = cdist(x, self.means_, "sqeuclidean")
        return -distances
