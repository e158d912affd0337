"""Component 3: centred cosine similarities, and one logit per class from all blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mivhead.head.config import Recipe
from mivhead.head.pooling import NORM_EPS


def cosine(prototypes: Tensor, vectors: Tensor, *, centred: bool) -> Tensor:
    """Cosine of a query with its prototypes, around the mean m of those prototypes.

    (query, class, head, d) and (query, head, d) to (query, class).
    """
    vectors = vectors.unsqueeze(1)  # (query, 1, head, d)
    if centred:
        mean = prototypes.mean(dim=1, keepdim=True)  # m: (query, 1, head, d)
        prototypes, vectors = prototypes - mean, vectors - mean
    dots: Tensor = (prototypes * vectors).sum(dim=(2, 3))  # (query, class)
    norms: Tensor = torch.linalg.vector_norm(prototypes, dim=(2, 3))  # (query, class)
    length: Tensor = torch.linalg.vector_norm(vectors, dim=(2, 3))  # (query, 1)
    return dots / (norms.clamp_min(NORM_EPS) * length.clamp_min(NORM_EPS))


def combine(cosines: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """One logit per class from the cosines of all blocks, each (query, class)."""
    stacked = torch.stack(tuple(cosines))  # (block, query, class)
    if recipe.temperature_order == "inside":
        return torch.logsumexp(stacked / recipe.temperature, dim=0)
    return torch.logsumexp(stacked, dim=0) / recipe.temperature
