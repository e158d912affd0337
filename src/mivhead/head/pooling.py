"""Component 1: pooling by attention, from patches to one vector per image.

Patches of a candidate compete for the candidate (theta), candidates compete for the image (mu).
Patches are frozen, so what depends on them alone is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.features import Block
from mivhead.head.recipe import BlockConfig
from mivhead.kernels import functions as derive
from mivhead.kernels.functions import CandidatePooling, PatchPooling
from mivhead.kernels.library import serves

NORM_EPS = 1e-12  # of L2 norms
LN_EPS = 1e-5  # of LayerNorms


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of n images of one block, ready for pooling."""

    maps: tuple[Tensor, ...]  # of every map candidate: (image, patch, channel)
    scale: Tensor | None  # what theta . patch is multiplied with: (image, patches of all maps)
    token: Tensor | None  # (image, channel)


def prepare(block: Block, config: BlockConfig, dtype: torch.dtype = torch.float32) -> Candidates:
    """Derive the candidates of a block.

    Patches stay float16 if the features are, which halves what a step reads. Everything else is
    of `dtype`.
    """
    maps: tuple[Tensor, ...] = ()
    scale = None
    if block.map is not None and config.candidate_sizes:
        derived, norms = derive_candidates(block.map, config.candidate_sizes, dtype)
        if config.form == "vit":
            norms = torch.full_like(norms, math.sqrt(config.channels))
        maps, scale = tuple(derived), _score_scale(norms.clamp_min_(NORM_EPS), config)
    return Candidates(maps, scale, None if block.token is None else block.token.to(dtype))


def derive_candidates(
    map_: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Max-pool maps to several sizes: patches, (image, patch, channel) each, and all their norms.

    Patches are of `dtype`, or float16 if the maps are; norms are (image, patches of all sizes).
    """
    map_ = map_ if map_.dtype == torch.float16 else map_.to(dtype)
    if dtype == torch.float32 and derive.takes(map_):
        return derive.derive(map_, sizes)
    native = tuple(map_.shape[2:])
    pooled = [map_ if s == native else F.adaptive_max_pool2d(map_, s) for s in sizes]
    patches = [x.flatten(2).mT.contiguous() for x in pooled]
    norms = [torch.linalg.vector_norm(x, dim=2, dtype=dtype) for x in patches]
    return patches, torch.cat(norms, dim=1)


def _score_scale(norms: Tensor, config: BlockConfig) -> Tensor:
    return config.tau / math.sqrt(config.channels) / norms


def _norms(vectors: Tensor, config: BlockConfig) -> Tensor:
    """Norms that divide vectors before they are scored: |x| (CNN) or sqrt(C) (ViT)."""
    if config.form == "vit":
        return vectors.new_full(vectors.shape[:-1], math.sqrt(config.channels))
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.clamp_min(NORM_EPS)


def pool_patches(theta: Tensor, candidates: Candidates) -> Tensor:
    """Pooled candidates I_n: (image, candidate, channel)."""
    assert candidates.scale is not None
    if serves(theta, candidates.scale):
        pooled: Tensor = PatchPooling.apply(theta, candidates.maps, candidates.scale)
        return pooled
    weights = patch_weights(theta, candidates)
    pairs = zip(weights, candidates.maps, strict=True)
    return torch.cat([w.unsqueeze(1) @ x.to(theta.dtype) for w, x in pairs], dim=1)


def patch_weights(theta: Tensor, candidates: Candidates) -> list[Tensor]:
    """Attention over the patches of each map candidate, each (image, patch)."""
    assert candidates.scale is not None
    scales = candidates.scale.split([x.shape[1] for x in candidates.maps], dim=1)
    pairs = zip(candidates.maps, scales, strict=True)
    return [torch.softmax((x.to(theta.dtype) @ theta) * scale, dim=-1) for x, scale in pairs]


def pool_candidates(mu: Tensor, candidates: Tensor, config: BlockConfig) -> Tensor:
    """Image vectors M_n, (image, channel), from candidates B_n, (image, candidate, channel)."""
    if serves(mu, candidates):
        length = 0.0 if config.form == "cnn" else math.sqrt(config.channels)
        factor = config.tau / math.sqrt(config.channels)
        vectors: Tensor = CandidatePooling.apply(mu, candidates, factor, NORM_EPS, length)
        return vectors
    scores = (candidates @ mu) * _score_scale(_norms(candidates, config), config)
    weights = torch.softmax(scores, dim=-1)  # (image, candidate)
    return (weights.unsqueeze(1) @ candidates).squeeze(1)


class PoolingByAttention(nn.Module):
    """Candidates of an image to its vector M_n (equations 1 and 2 of the paper).

    `theta` and `mu` start at zero (plain averaging), are shared by all candidates, and exist only
    where there is something to choose from.
    """

    theta: nn.Parameter | None
    mu: nn.Parameter | None

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        has_theta, has_mu = bool(config.candidate_sizes), config.candidates > 1
        self.theta = nn.Parameter(torch.zeros(channels)) if has_theta else None
        self.mu = nn.Parameter(torch.zeros(channels)) if has_mu else None

    def patch_weights(self, candidates: Candidates) -> list[Tensor]:
        """Attention over the patches of each map candidate, each (image, patch)."""
        return [] if self.theta is None else patch_weights(self.theta, candidates)

    def forward(self, candidates: Candidates) -> Tensor:
        """Image vectors (image, channel)."""
        parts: list[Tensor] = []  # each (image, candidate, channel)
        if self.theta is not None:
            pooled = pool_patches(self.theta, candidates)
            vit = self.config.form == "vit"
            parts.append(F.layer_norm(pooled, pooled.shape[-1:], eps=LN_EPS) if vit else pooled)
        if candidates.token is not None:
            parts.append(candidates.token.unsqueeze(1))
        stacked = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]  # B_n
        if self.mu is None:
            return stacked.squeeze(1)
        return pool_candidates(self.mu, stacked, self.config)
