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
CHUNK = 2**20  # numbers in a chunk of patches: 4 MB in float32


@dataclass(frozen=True, eq=False)
class Candidates:
    """The patch-level candidates of n images of one block, ready for pooling."""

    patches: tuple[Tensor, ...]  # per map candidate: (image, patch, channel), typed as the features
    scales: tuple[Tensor, ...]  # what theta . patch is multiplied with: (image, patch)
    token: Tensor | None  # (image, channel)


def prepare(block: Block, config: BlockConfig, dtype: torch.dtype = torch.float32) -> Candidates:
    """Derive the candidates of a block and the scale of every patch's score.

    Patches stay float16 if the features are, which halves what a step reads: they turn into
    `dtype` chunk by chunk, as they are used. Everything else is of `dtype`.
    """
    patches: list[Tensor] = []
    if block.map is not None:
        kept = min(block.map.dtype, dtype, key=lambda kind: kind.itemsize)
        n, channels, *native = block.map.shape
        sizes = config.candidate_sizes
        patches = [block.map.new_empty(n, h * w, channels, dtype=kept) for h, w in sizes]
        step = chunk_size(block.map)
        for map_, *outs in zip(
            block.map.split(step), *(p.split(step) for p in patches), strict=True
        ):
            # Channels last: a patch is a row, and pooling takes many channels at a time.
            last = map_.contiguous(memory_format=torch.channels_last)
            for size, out in zip(sizes, outs, strict=True):
                pooled = last if list(size) == native else F.adaptive_max_pool2d(last, size)
                out.copy_(pooled.permute(0, 2, 3, 1).flatten(1, 2))
    scales = tuple(torch.cat([_score_scale(x, config) for x in loaded(p, dtype)]) for p in patches)
    return Candidates(
        tuple(patches), scales, None if block.token is None else block.token.to(dtype)
    )


def _score_scale(vectors: Tensor, config: BlockConfig) -> Tensor:
    """tau/sqrt(C) and the normalisation of the vectors, which is 1/|x| (CNN) or 1/sqrt(C) (ViT)."""
    scale = config.tau / math.sqrt(config.channels)
    if config.form == "vit":
        return vectors.new_full((1, 1), scale / math.sqrt(config.channels)).expand(
            vectors.shape[:-1]
        )
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return scale / norms.clamp_min(NORM_EPS)


def attention_weights(query: Tensor, vectors: Tensor, scale: Tensor) -> Tensor:
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
    def forward(ctx: Any, theta: Tensor, patches: Tensor, scale: Tensor) -> Tensor:
        """Pooled candidates (image, channel)."""
        size = chunk_size(patches)
        images, count, channels = patches.shape
        pooled = theta.new_empty(images, 1, channels)
        weights = theta.new_empty(images, 1, count)
        query = theta.expand(images, 1, channels)
        parts = (x.split(size) for x in (query, scale.unsqueeze(1), weights, pooled))
        for x, q, s, w, p in zip(loaded(patches, theta.dtype), *parts, strict=True):
            scores = torch.bmm(q, x.transpose(1, 2)).mul_(s)  # (image, 1, patch)
            torch.softmax(scores, dim=-1, out=w)
            torch.bmm(w, x, out=p)
        ctx.save_for_backward(patches, scale, weights, pooled)
        return pooled.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of theta; the softmax takes off grad . pooled from the scores' gradient."""
        patches, scale, weights, pooled = ctx.saved_tensors
        size = chunk_size(patches)
        grad = grad.unsqueeze(1)  # (image, 1, channel)
        mean = (grad * pooled).sum(dim=2, keepdim=True)  # (image, 1, 1)
        slope = weights * scale.unsqueeze(1)  # (image, 1, patch)
        sums = torch.empty_like(pooled)
        parts = (x.split(size) for x in (grad, mean, slope, sums))
        for x, g, m, s, out in zip(loaded(patches, grad.dtype), *parts, strict=True):
            d_scores = torch.bmm(g, x.transpose(1, 2)).sub_(m).mul_(s)  # (image, 1, patch)
            torch.bmm(d_scores, x, out=out)
        return sums.sum(dim=(0, 1)), None, None


def chunk_size(patches: Tensor) -> int:
    """Images in a chunk of about `CHUNK` numbers."""
    return max(1, CHUNK // patches.shape[1:].numel())


def loaded(patches: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Copy patches chunk by chunk to one small place, each over the last one.

    A copy streams from memory at full speed, which matrix products with a single row do not.
    """
    size = chunk_size(patches)
    place = patches.new_empty(min(size, len(patches)), *patches.shape[1:], dtype=dtype)
    for chunk in patches.split(size):
        yield place[: len(chunk)].copy_(chunk)


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
        if self.theta is None:
            return []
        theta = self.theta
        return [
            torch.cat(
                [
                    attention_weights(theta, x, s)
                    for x, s in zip(
                        loaded(patches, theta.dtype), scale.split(chunk_size(patches)), strict=True
                    )
                ]
            )
            for patches, scale in zip(candidates.patches, candidates.scales, strict=True)
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
