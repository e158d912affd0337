"""What an adaptation costs: the sizes and units in which every method counts its own work.

A method counts in its own file, in `work`: matrix products as multiply-adds, forward and backward,
and everything else that matters as single operations. What is counted is what the method needs, not
how an implementation arranges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BACKWARD = 3  # the paper's rule: a training step costs three forward passes


@dataclass(frozen=True)
class TaskSize:
    """The size of a task: for each class, its shots and the augmented views of all its shots."""

    shots: tuple[int, ...]
    views: tuple[int, ...]

    @classmethod
    def from_labels(cls, labels: Sequence[int], views: Sequence[int]) -> TaskSize:
        """Count support images and their views (one number per image) by class.

        >>> TaskSize.from_labels([0, 0, 1], [2, 2, 3])
        TaskSize(shots=(2, 1), views=(4, 3))
        """
        shots = np.bincount(labels)
        extra = np.bincount(labels, weights=views, minlength=len(shots))
        return cls(tuple(map(int, shots)), tuple(map(int, extra)))

    def without_fold(self, fold: int, folds: int) -> TaskSize:
        """Leave one of several folds out, as cross-validation within a support set does.

        >>> TaskSize((5, 1), (10, 4)).without_fold(0, 2)
        TaskSize(shots=(2, 1), views=(4, 4))
        """
        kept = [s if s == 1 else s - len(range(fold, s, folds)) for s in self.shots]
        pairs = zip(kept, self.shots, self.views, strict=True)
        return TaskSize(tuple(kept), tuple(round(v * k / s) for k, s, v in pairs))

    def without_views(self) -> TaskSize:
        """Leave the augmented views out."""
        return TaskSize(self.shots, (0,) * self.ways)

    @property
    def ways(self) -> int:
        """Number of classes."""
        return len(self.shots)

    @property
    def support(self) -> int:
        """Number of support images."""
        return sum(self.shots)

    @property
    def images(self) -> int:
        """Number of support images and views."""
        return self.support + sum(self.views)

    @property
    def largest(self) -> int:
        """Images and views of the largest class."""
        return max(s + v for s, v in zip(self.shots, self.views, strict=True))


@dataclass(frozen=True)
class Work:
    """Arithmetic of an adaptation, without a frozen backbone's pass over the images."""

    products: float = 0.0  # multiply-adds of matrix products, forward and backward
    others: float = 0.0  # single operations besides: L1 distances, cosines, factorisations
    # Multiply-adds by the paper's rule: matrix products of a forward pass, times three for each
    # training step.
    paper: float = 0.0
    # The same count for the implementation of the paper's authors, where it does more work than
    # ours; None where it does the same.
    authors: float | None = None

    @classmethod
    def once(cls, products: float, others: float = 0.0) -> Work:
        """Work that is done once, without training steps: both rules count it alike."""
        return cls(products, others, products)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products, self.others + other.others, self.paper + other.paper
        )


@dataclass(frozen=True)
class BackboneWork:
    """Multiply-adds of one image's pass through a backbone."""

    total: float  # all convolutions and matrix products
    conv3x3: float = 0.0  # those of 3x3 convolutions, to which TSA adds adapters
    attention: float = 0.0  # those between activations: queries with keys, weights with values
