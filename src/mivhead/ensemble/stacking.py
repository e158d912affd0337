"""How much each voice counts: weights that explain held-out images best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mivhead.ensemble.ridge import Experts, expected_shapes, expert_weights
from mivhead.features import Block, Features

PRIOR_STRENGTH = 0.1  # of the start, in held-out images that it is worth
LEAST = 0.001  # of its start, that a voice keeps: if all seem to harm, the start decides, unsurely


def stack(votes: Tensor, labels: Tensor, start: Tensor, strength: float = PRIOR_STRENGTH) -> Tensor:
    """Choose weights, all positive, for a sum of votes that is read as logits.

    They minimise the cross-entropy of held-out images plus a penalty on the distance from where
    they start: with few images they stay there. As the sum is made to fit images that no voice
    has seen, its probabilities are calibrated too.

    Parameters
    ----------
    votes
        What each voice says of images it has not seen: (voice, image, class).
    labels
        Class numbers of the images.
    start
        Weights (voice,) before any evidence.
    strength
        Of the penalty.

    Examples
    --------
    >>> right, wrong = torch.eye(2), 1 - torch.eye(2)
    >>> votes = torch.stack([right, wrong]).repeat_interleave(20, dim=1)
    >>> stack(votes, torch.arange(2).repeat_interleave(20), torch.ones(2)).gt(1).tolist()
    [True, False]
    """
    from scipy.optimize import minimize

    if not len(labels):
        return start
    z = votes.double().numpy(force=True)
    y, before = labels.numpy(force=True), start.double().numpy(force=True)
    images, unit = np.arange(len(y)), before.mean()

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits = np.tensordot(weights, z, axes=1)  # (image, class)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        moved = (weights - before) / unit
        expected = np.einsum("vnc,nc->v", z, np.exp(log_p))  # vote that the sum expects
        slope = expected - z[:, images, y].sum(axis=1) + 2 * strength * moved / unit
        return strength * (moved**2).sum() - log_p[images, y].sum(), slope

    bounds = [(LEAST * weight, None) for weight in before]
    found = minimize(loss, before, jac=True, method="L-BFGS-B", bounds=bounds)
    return torch.as_tensor(found.x).to(start)


# The committee: the head's blocks and the plain experts, and how much each of them counts.


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
