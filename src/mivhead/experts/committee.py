"""The committee: the head's blocks and the plain experts, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.blocks import Block
from mivhead.experts.experts import Experts, expected_shapes, expert_weights
from mivhead.experts.stacking import stack
from mivhead.features import Features

WEIGHTS = "weights"  # their name in a model file
BLOCK, DEEPEST_BLOCK = 0.5, 1.0  # what a block's cosine counts before any evidence


@dataclass(frozen=True, eq=False)
class Committee:
    """Experts, and the weights of all voices: of the head's blocks first, then of the experts."""

    experts: Experts
    weights: Tensor  # (voice,)

    @classmethod
    def fit(
        cls,
        features: Features,
        labels: Tensor,
        blocks: int,
        unseen: tuple[Tensor, NDArray[np.bool_]] | None,
    ) -> Self:
        """Fit the experts and, on held-out images, the weights.

        Parameters
        ----------
        features, labels
            The support set.
        blocks
            How many blocks the head has.
        unseen
            What the head says of held-out images, (block, image, class), and which images those
            are; None: the weights stay where they start.
        """
        experts, votes = Experts.fit(features, labels, int(labels.max()) + 1)
        own = torch.full((blocks,), BLOCK)
        own[-1] = DEEPEST_BLOCK
        start = torch.cat([own, expert_weights(list(experts.ridges))])
        if unseen is None:
            return cls(experts, start.to(votes))
        cosines, held_out = unseen
        rows = torch.as_tensor(np.flatnonzero(held_out), device=labels.device)
        everything = torch.cat([cosines, votes])[:, rows]  # (voice, image, class)
        return cls(experts, stack(everything, labels[rows], start.to(votes)))

    def vote(self, cosines: Tensor, features: Features) -> Tensor:
        """Logits (image, class) from the head's cosines (block, image, class) and the experts."""
        votes = torch.cat([cosines, self.experts(features)])
        return (self.weights[:, None, None] * votes).sum(dim=0)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a model file holds of it."""
        return {WEIGHTS: self.weights} | self.experts.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], blocks: Sequence[Block]) -> Self:
        """Make it from the tensors of a model file, which were checked."""
        return cls(Experts.from_tensors(tensors, blocks), tensors[WEIGHTS])

    @staticmethod
    def expected_shapes(blocks: Sequence[Block], head_blocks: int, classes: int) -> dict[str, Any]:
        """Names and shapes of `tensors`."""
        shapes = expected_shapes(blocks, classes)
        experts = sum(name.endswith(".intercepts") for name in shapes)
        return {WEIGHTS: (head_blocks + experts,), **shapes}
