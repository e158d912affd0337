"""Component 3: one logit per class from the cosines of all blocks, and the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.head.recipe import Recipe


def combine(cosines: Tensor, recipe: Recipe) -> Tensor:
    """One logit per class from the cosines of all blocks, (block, query, class)."""
    if recipe.temperature_order == "inside":
        return torch.logsumexp(cosines / recipe.temperature, dim=0)
    return torch.logsumexp(cosines, dim=0) / recipe.temperature


def loss(cosines: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy, summed over queries: of the combined logits, or of each block by itself."""
    if recipe.objective == "joint":
        return F.cross_entropy(combine(cosines, recipe), labels, reduction="sum")
    everything = (cosines / recipe.temperature).flatten(0, 1)  # (block and query, class)
    return F.cross_entropy(everything, labels.repeat(len(cosines)), reduction="sum")
