"""Bags: the shots of each class, which queries are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bags:
    """The shots of each class, as a padded table of support rows."""

    rows: Tensor  # (class, shot): support rows, padded with row 0
    real: Tensor  # (class, shot): whether the entry is a shot rather than padding
    order: Tensor  # (shot,): support rows, class after class
    starts: Tensor  # (class + 1,): where each class starts in `order`
    even: bool  # whether all rows are in order and nothing is padded, as with equal shots

    @classmethod
    def from_labels(cls, labels: Tensor, classes: int) -> Bags:
        """Make bags from class numbers 0 .. classes - 1, each of which occurs at least once.

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).rows
        tensor([[0, 2],
                [1, 0]])
        """
        shots = torch.bincount(labels, minlength=classes)  # (class,)
        place = torch.arange(int(shots.max()), device=labels.device)  # (shot,)
        real = place < shots[:, None]  # (class, shot)
        rows = torch.zeros(real.shape, dtype=torch.long, device=labels.device)
        rows[real] = order = labels.argsort(stable=True)
        even = bool(real.all()) and torch.equal(order, torch.arange(len(labels)).to(order))
        starts = torch.cat([shots.new_zeros(1), shots.cumsum(0)])
        return cls(rows, real, order, starts, even)

    @classmethod
    def from_shots(cls, shots: Sequence[int], device: torch.device) -> Bags:
        """Make the bags of a support set that is ordered by class."""
        labels = torch.repeat_interleave(torch.as_tensor(shots, device=device))
        return cls.from_labels(labels, len(shots))

    def own(self, sources: Tensor) -> Tensor:
        """Find the shot that each query was made from, if its class has others.

        `sources` holds the support row of every query. The result is its position in `order`, or
        -1.

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).own(torch.tensor([2, 1]))
        tensor([ 1, -1])
        """
        place = self.order.argsort()  # (support row,)
        alone = torch.repeat_interleave(self.shots == 1, self.shots)  # (shot,)
        return torch.where(alone, -1, torch.arange(len(alone)).to(place))[place[sources]]

    def table(self, hidden: Tensor) -> Tensor:
        """Mark the shots that `own` found: (class, shot, query).

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).table(torch.tensor([1, -1])).nonzero()
        tensor([[0, 1, 0]])
        """
        place = self.starts[:-1, None] + torch.arange(self.real.shape[1]).to(self.starts)
        return (place[:, :, None] == hidden) & self.real[:, :, None]

    @property
    def shots(self) -> Tensor:
        """Number of shots per class."""
        return self.real.sum(dim=1)

    def collect(self, values: Tensor) -> Tensor:
        """Sort the values of the support, (image, head, d), into bags: (head, class, shot, d)."""
        bagged = values.unflatten(0, self.real.shape) if self.even else values[self.rows]
        return bagged.permute(2, 0, 1, 3)
