"""Component 1: pooling by attention, from patches to one vector per image.

Patches of a candidate compete for the candidate (theta), candidates compete for the image (mu).
Patches are frozen, so what depends on them alone is computed once: `prepare`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mivhead.blocks import Block
from mivhead.head.config import BlockConfig

NORM_EPS = 1e-12  # of L2 norms
LN_EPS = 1e-5  # of LayerNorms
CHUNK = 2**19  # numbers in a chunk of patches: 2 MB in float32


@dataclass(frozen=True, eq=False)
class Candidates:
    """The patch-level candidates of n images of one block, ready for pooling."""

    patches: tuple[Tensor, ...]  # per map candidate: (image, patch, channel)
    scales: tuple[Tensor | float, ...]  # what theta . patch is multiplied with: (image, patch)
    token: Tensor | None  # (image, channel)


def prepare(block: Block, config: BlockConfig, dtype: torch.dtype = torch.float32) -> Candidates:
    """Derive the candidates of a block and the scale of every patch's score."""
    patches: list[Tensor] = []
    if block.map is not None:
        n, channels, *native = block.map.shape
        sizes = config.candidate_sizes
        patches = [block.map.new_empty(n, h * w, channels, dtype=dtype) for h, w in sizes]
        for some in chunks(block.map):
            map_ = block.map[some].to(dtype)
            for size, out in zip(sizes, patches, strict=True):
                pooled = map_ if list(size) == native else F.adaptive_max_pool2d(map_, size)
                out[some] = pooled.flatten(2).transpose(1, 2)
    token = None if block.token is None else block.token.to(dtype)
    return Candidates(tuple(patches), tuple(_score_scale(p, config) for p in patches), token)


def _score_scale(vectors: Tensor, config: BlockConfig) -> Tensor | float:
    """tau/sqrt(C) and the normalisation of the vectors, which is 1/|x| (CNN) or 1/sqrt(C) (ViT)."""
    scale = config.tau / math.sqrt(config.channels)
    if config.form == "vit":
        return scale / math.sqrt(config.channels)
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return scale / norms.clamp_min(NORM_EPS)


def attention_weights(query: Tensor, vectors: Tensor, scale: Tensor | float) -> Tensor:
    """Softmax over the vectors of an image: (image, vector, channel) to (image, vector)."""
    return torch.softmax((vectors @ query) * scale, dim=-1)


def pool(weights: Tensor, vectors: Tensor) -> Tensor:
    """Weighted sum: (image, vector) and (image, vector, channel) to (image, channel)."""
    return torch.bmm(weights.unsqueeze(1), vectors).squeeze(1)


class PatchPooling(torch.autograd.Function):
    """`pool(attention_weights(theta, patches, scale), patches)` for patches without a gradient.

    Patches are most of what a step reads. They pass in chunks that stay in the processor's cache
    while they are used twice: to score and to sum up; backward, to weigh and to sum up.
    """

    @staticmethod
    def forward(ctx: Any, theta: Tensor, patches: Tensor, scale: Tensor | float) -> Tensor:
        """Pooled candidates (image, channel)."""
        pooled, weights = (
            patches.new_empty(patches[:, 0].shape),
            patches.new_empty(patches.shape[:2]),
        )
        for some in chunks(patches):
            weights[some] = attention_weights(theta, patches[some], _rows(scale, some))
            pooled[some] = pool(weights[some], patches[some])
        ctx.save_for_backward(patches, weights, pooled)
        ctx.scale = scale
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of theta; the softmax takes off grad . pooled from the scores' gradient."""
        patches, weights, pooled = ctx.saved_tensors
        mean = (grad * pooled).sum(dim=1, keepdim=True)  # (image, 1)
        d_theta = torch.zeros_like(grad[0])
        for some in chunks(patches):
            x = patches[some]  # (image, patch, channel)
            d_weights = pool(grad[some], x.transpose(1, 2))  # (image, patch)
            d_scores = (d_weights - mean[some]) * weights[some] * _rows(ctx.scale, some)
            d_theta.addmv_(x.flatten(0, 1).T, d_scores.flatten())
        return d_theta, None, None


def chunks(patches: Tensor) -> Iterator[slice]:
    """Cut images into chunks of at most about `CHUNK` numbers."""
    size = max(1, CHUNK // patches[0].numel())
    return (slice(start, start + size) for start in range(0, len(patches), size))


def _rows(scale: Tensor | float, some: slice) -> Tensor | float:
    return scale if isinstance(scale, float) else scale[some]


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
        return [
            attention_weights(self.theta, patches, scale)
            for patches, scale in zip(candidates.patches, candidates.scales, strict=True)
            if self.theta is not None
        ]

    def forward(self, candidates: Candidates) -> Tensor:
        """Image vectors (image, channel)."""
        pooled: list[Tensor] = [
            PatchPooling.apply(self.theta, patches, scale)  # I_n: (image, channel)
            for patches, scale in zip(candidates.patches, candidates.scales, strict=True)
        ]
        if self.config.form == "vit":
            pooled = [F.layer_norm(vector, vector.shape[-1:], eps=LN_EPS) for vector in pooled]
        if candidates.token is not None:
            pooled.append(candidates.token)
        if self.mu is None:
            return pooled[0]
        stacked = torch.stack(pooled, dim=1)  # B_n: (image, candidate, channel)
        scale = _score_scale(stacked, self.config)  # (image, candidate)
        return pool(attention_weights(self.mu, stacked, scale), stacked)  # M_n: (image, channel)
