"""Component 3: one logit per class from the cosines of all blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mivhead.head.config import Recipe


def combine(cosines: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """One logit per class from the cosines of all blocks, each (query, class)."""
    stacked = torch.stack(tuple(cosines))  # (block, query, class)
    if recipe.temperature_order == "inside":
        return torch.logsumexp(stacked / recipe.temperature, dim=0)
    return torch.logsumexp(stacked, dim=0) / recipe.temperature
