"""Component 1: pooling by attention, from patches to one vector per image (equations 1 and 2).

The patches of a candidate compete to represent the candidate (theta), and the candidates compete to
represent the image (mu). Patches are frozen, so all that depends on them alone is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.features import Block
from mivhead.head.recipe import BlockConfig

NORM_EPS = 1e-12  # of L2 norms
LN_EPS = 1e-5  # of LayerNorms


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates A_n of n images of one block, ready for pooling."""

    maps: tuple[Tensor, ...]  # of every map candidate: (image, patch, channel)
    scale: Tensor | None  # tau / sqrt(C) / |patch|: (image, patches of all maps)
    token: Tensor | None  # (image, channel)


def derive_candidates(
    map_: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Max-pool maps (image, channel, H, W) to several sizes.

    Returns
    -------
    patches : list of Tensor
        Of each size: (image, patch, channel), in the type of the maps.
    norms : Tensor
        Of the patches of all sizes: (image, patch), in `dtype`.
    """
    native = tuple(map_.shape[2:])
    pooled = [map_ if s == native else F.adaptive_max_pool2d(map_, s) for s in sizes]
    patches = [x.flatten(2).mT.contiguous() for x in pooled]  # (image, patch, channel) each
    norms = [torch.linalg.vector_norm(x, dim=2, dtype=dtype) for x in patches]
    return patches, torch.cat(norms, dim=1)


def pool_patches(theta: Tensor, maps: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Equation 1: pooled candidates I_n, (image, candidate, channel)."""
    if maps[0].dtype != theta.dtype:
        scales = scale.split([x.shape[1] for x in maps], dim=1)
        pooled = [_PoolHalf.apply(theta, x, s) for x, s in zip(maps, scales, strict=True)]
        return torch.stack(pooled, dim=1)
    weights = patch_weights(theta, maps, scale)  # (image, patch) each
    pairs = zip(weights, maps, strict=True)
    return torch.cat([w.unsqueeze(1) @ x for w, x in pairs], dim=1)


class _PoolHalf(torch.autograd.Function):
    """Equation 1 for one map candidate in half precision: (image, channel).

    The same formula, with its gradient written out: autograd would keep two copies of every patch
    in full precision until the end of the step, which is more memory than everything else.
    """

    @staticmethod
    def forward(ctx: Any, theta: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        """Pool patches x, (image, patch, channel)."""
        full = x.to(theta.dtype)
        weights = torch.softmax((full @ theta) * scale, dim=-1)  # (image, patch)
        ctx.save_for_backward(theta, x, scale, weights)
        return (weights.unsqueeze(1) @ full).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """Return the gradient of theta; the patches are frozen."""
        theta, x, scale, weights = ctx.saved_tensors
        full = x.to(theta.dtype)
        of_weights = (full @ grads[0].unsqueeze(2)).squeeze(2)  # (image, patch)
        mean = (weights * of_weights).sum(dim=1, keepdim=True)
        of_scores = weights * (of_weights - mean) * scale  # (image, patch)
        return torch.einsum("np,npc->c", of_scores, full), None, None


def patch_weights(theta: Tensor, maps: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Attention of equation 1, over the patches of each map candidate: (image, patch) each."""
    scales = scale.split([x.shape[1] for x in maps], dim=1)
    pairs = zip(maps, scales, strict=True)
    return [torch.softmax((x.to(theta.dtype) @ theta) * s, dim=-1) for x, s in pairs]


def pool_candidates(mu: Tensor, candidates: Tensor, factor: float, length: float | None) -> Tensor:
    """Equation 2: image vectors M_n, (image, channel), from B_n, (image, candidate, channel).

    The score of a candidate x is factor mu . x / |x|; a `length` replaces |x|.
    """
    if length is None:
        norms = torch.linalg.vector_norm(candidates, dim=-1).clamp_min(NORM_EPS)
    else:
        norms = candidates.new_full(candidates.shape[:-1], length)
    scores = (candidates @ mu) * (factor / norms)  # (image, candidate)
    weights = torch.softmax(scores, dim=-1)
    return (weights.unsqueeze(1) @ candidates).squeeze(1)


class PoolingByAttention(nn.Module):
    """The candidates of an image to its vector M_n.

    `theta` and `mu` start at zero, which is average pooling. They are shared by all candidates of
    the block, and exist only where there is something to choose from.
    """

    theta: nn.Parameter | None
    mu: nn.Parameter | None

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        self.factor = config.tau / math.sqrt(channels)
        self.length = math.sqrt(channels) if config.form == "vit" else None  # None: |patch|
        has_theta, has_mu = bool(config.candidate_sizes), config.candidates > 1
        self.theta = nn.Parameter(torch.zeros(channels)) if has_theta else None
        self.mu = nn.Parameter(torch.zeros(channels)) if has_mu else None

    def prepare(self, block: Block, like: Tensor) -> Candidates:
        """Derive the candidates of a block, which do not change during training.

        They are on the device of `like`. Patches stay float16 if the features are, which halves
        what a step reads; everything else has the type of `like`.
        """
        maps: tuple[Tensor, ...] = ()
        scale = None
        if block.map is not None and self.config.candidate_sizes:
            map_ = torch.as_tensor(block.map, device=like.device)
            map_ = map_ if map_.dtype == torch.float16 else map_.to(like.dtype)
            derived, norms = derive_candidates(map_, self.config.candidate_sizes, like.dtype)
            if self.length is not None:
                norms = torch.full_like(norms, self.length)
            maps, scale = tuple(derived), self.factor / norms.clamp_min_(NORM_EPS)
        token = None if block.token is None else torch.as_tensor(block.token).to(like)
        return Candidates(maps, scale, token)

    def forward(self, candidates: Candidates) -> Tensor:
        """Image vectors M_n: (image, channel)."""
        parts: list[Tensor] = []  # each (image, candidate, channel)
        if self.theta is not None:
            assert candidates.scale is not None
            pooled = pool_patches(self.theta, candidates.maps, candidates.scale)  # (1)
            vit = self.config.form == "vit"
            parts.append(F.layer_norm(pooled, pooled.shape[-1:], eps=LN_EPS) if vit else pooled)
        if candidates.token is not None:
            parts.append(candidates.token.unsqueeze(1))  # [CLS]
        stacked = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]  # B_n
        if self.mu is None:
            return stacked.squeeze(1)
        return pool_candidates(self.mu, stacked, self.factor, self.length)  # (2)
