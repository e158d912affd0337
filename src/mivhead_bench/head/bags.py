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
        return cls(rows, real, even)

    @classmethod
    def from_shots(cls, shots: Sequence[int], device: torch.device) -> Bags:
        """Make the bags of a support set that is ordered by class."""
        labels = torch.repeat_interleave(torch.as_tensor(shots, device=device))
        return cls.from_labels(labels, len(shots))

    def hidden(self, sources: Tensor) -> Tensor:
        """Mark the shot that each query was made from, if its class has others.

        `sources` holds the support row of each query. Returns (class, shot, query).

        >>> Bags.from_labels(torch.tensor([0, 1, 0]), 2).hidden(torch.tensor([2, 1])).nonzero()
        tensor([[0, 1, 0]])
        """
        has_others = self.real & (self.shots > 1)[:, None]  # (class, shot)
        return (self.rows[:, :, None] == sources) & has_others[:, :, None]

    @property
    def shots(self) -> Tensor:
        """Number of shots per class."""
        return self.real.sum(dim=1)

    def __len__(self) -> int:
        return int(self.real.sum())  # shots of all classes

    def collect(self, values: Tensor) -> Tensor:
        """Sort the values of the support, (image, head, d), into bags: (head, class, shot, d)."""
        bagged = values.unflatten(0, self.real.shape) if self.even else values[self.rows]
        return bagged.permute(2, 0, 1, 3)
