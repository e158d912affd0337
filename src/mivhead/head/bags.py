"""Bags: the shots of each class, as a padded table of support rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bags:
    """Which support rows belong to which class."""

    rows: Tensor  # (class, shot): support rows, padded with row 0
    real: Tensor  # (class, shot): whether the entry is a shot, not padding
    even: bool  # whether all rows come in order and nothing is padded, as with equal shots

    @classmethod
    def from_labels(cls, labels: Tensor, classes: int) -> Bags:
        """Make bags from class numbers 0 .. classes - 1, each of which occurs at least once.

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).rows
        tensor([[0, 2],
                [1, 0]])
        """
        shots = torch.bincount(labels, minlength=classes)  # (class,)
        place = torch.arange(int(shots.max()), device=labels.device)  # (shot,)
        real = place < shots[:, None]
        rows = torch.zeros(real.shape, dtype=torch.long, device=labels.device)
        rows[real] = order = labels.argsort(stable=True)
        even = bool(real.all()) and torch.equal(order, torch.arange(len(labels)).to(order))
        return cls(rows, real, even)

    def own(self, sources: Tensor) -> Tensor:
        """Mark the shot that each query was made from, if its class has others.

        `sources` holds the support row of every query; the answer is (class, shot, query).

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).own(torch.tensor([2, 1])).nonzero()
        tensor([[0, 1, 0]])
        """
        several = self.real & (self.shots > 1)[:, None]  # (class, shot)
        return (self.rows[:, :, None] == sources) & several[:, :, None]

    @property
    def shots(self) -> Tensor:
        """Number of shots per class."""
        return self.real.sum(dim=1)
