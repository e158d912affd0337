"""Component 3: from v^P and v^Q of all blocks to one logit per class, and the loss.

The paper does not number the formulas of Component 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.head.recipe import Recipe
from mivhead_bench.head.pooling import NORM_EPS
from mivhead_bench.head.recipe import Ablation


def centred_cosines(v_q: Tensor, v_p: Tensor, recipe: Ablation) -> Tensor:
    """Cosines (query, class) of one block, around the mean of the prototypes if the recipe says so.

    `v_q` is (query, channel); `v_p` (query, class, channel), or (class, channel) if prototypes do
    not depend on the query.
    """
    u = v_q.unsqueeze(1)  # (query, 1, channel)
    if recipe.centres:
        m = v_p.mean(dim=-2, keepdim=True)  # over classes: (query, 1, channel)
        u, v_p = u - m, v_p - m
    u, p = (F.normalize(x, dim=-1, eps=NORM_EPS) for x in (u, v_p))
    return (u @ p.mT).squeeze(1)


def combine(cosines: Tensor, recipe: Recipe) -> Tensor:
    """Logits (query, class) from the cosines of all blocks, (block, query, class)."""
    if recipe.temperature_order == "inside":
        return torch.logsumexp(cosines / recipe.temperature, dim=0)
    return torch.logsumexp(cosines, dim=0) / recipe.temperature


def loss(cosines: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy, summed over queries: of the combined logits, or of each block on its own."""
    if recipe.objective == "joint":
        return F.cross_entropy(combine(cosines, recipe), labels, reduction="sum")
    logits = (cosines / recipe.temperature).flatten(0, 1)  # (block and query, class)
    return F.cross_entropy(logits, labels.repeat(len(cosines)), reduction="sum")
