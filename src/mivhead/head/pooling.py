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
CHUNK = 2**20  # numbers in a chunk of patches, about: 4 MB in float32


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
        count = chunk_count(block.map)
        for map_, *outs in zip(*(x.chunk(count) for x in (block.map, *patches)), strict=True):
            # Channels last: a patch is a row, and pooling takes many channels at a time.
            last = map_.contiguous(memory_format=torch.channels_last)
            for size, out in zip(sizes, outs, strict=True):
                pooled = last if list(size) == native else F.adaptive_max_pool2d(last, size)
                out.copy_(pooled.permute(0, 2, 3, 1).flatten(1, 2))
    scales = tuple(
        torch.cat([_score_scale(_norms(x, config), config) for x in loaded(p, dtype)])
        for p in patches
    )
    return Candidates(
        tuple(patches), scales, None if block.token is None else block.token.to(dtype)
    )


def _score_scale(norms: Tensor, config: BlockConfig) -> Tensor:
    return config.tau / math.sqrt(config.channels) / norms


def _norms(vectors: Tensor, config: BlockConfig) -> Tensor:
    """Norms that divide vectors before they are scored: |x| (CNN) or sqrt(C) (ViT)."""
    if config.form == "vit":
        return vectors.new_full(vectors.shape[:-1], math.sqrt(config.channels))
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.clamp_min_(NORM_EPS)


class PatchPooling(torch.autograd.Function):
    """Sums of patches x, weighted with softmax(theta . x scale), for each map candidate.

    Patches have no gradient, and are most of what a step reads. They pass in chunks that stay in
    the processor's cache while they are used twice: to score and to sum up; backward, to weigh and
    to sum up.
    """

    @staticmethod
    def forward(ctx: Any, theta: Tensor, candidates: Candidates) -> Tensor:
        """Pooled candidates I_n: (image, candidate, channel)."""
        images, _, channels = candidates.patches[0].shape
        query = theta.expand(images, 1, channels)
        pooled = theta.new_empty(len(candidates.patches), images, 1, channels)
        weights: list[Tensor] = []  # of every chunk: (image, 1, patch)
        for patches, scale, out in zip(candidates.patches, candidates.scales, pooled, strict=True):
            parts = (t.chunk(chunk_count(patches)) for t in (query, scale.unsqueeze(1), out))
            for x, q, s, sums in zip(loaded(patches, theta.dtype), *parts, strict=True):
                # a row times a matrix is several times as fast as a matrix times a column
                scores = torch.bmm(q, x.mT).mul_(s)
                weights.append(torch.softmax(scores, dim=-1))
                torch.bmm(weights[-1], x, out=sums)
        ctx.candidates, ctx.weights = candidates, weights
        pooled = pooled.squeeze(2).transpose(0, 1)
        ctx.save_for_backward(pooled)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gradient of theta; the softmax takes off grad . pooled from the scores' gradient."""
        (pooled,) = ctx.saved_tensors
        mean = (grad * pooled).sum(dim=2, keepdim=True)  # (image, candidate, 1)
        sums = grad.new_empty(grad.shape[1], len(grad), 1, grad.shape[2])
        weights = iter(ctx.weights)
        for i, (patches, scale) in enumerate(
            zip(ctx.candidates.patches, ctx.candidates.scales, strict=True)
        ):
            one = slice(i, i + 1)
            given = (grad[:, one], mean[:, one], scale.unsqueeze(1), sums[i])
            parts = (t.chunk(chunk_count(patches)) for t in given)
            for x, g, m, s, out in zip(loaded(patches, grad.dtype), *parts, strict=True):
                d_scores = torch.bmm(g, x.mT).sub_(m).mul_(next(weights)).mul_(s)
                torch.bmm(d_scores, x, out=out)
        return sums.sum(dim=(0, 1, 2)), None


def chunk_count(patches: Tensor) -> int:
    """Chunks of about `CHUNK` numbers, but of one image at least."""
    return max(1, min(len(patches), round(patches.numel() / CHUNK)))


def loaded(patches: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Copy patches chunk by chunk to one small place, each over the last one.

    A copy streams from memory at full speed, which matrix products with a single row do not.
    """
    chunks = patches.chunk(chunk_count(patches))
    place = torch.empty_like(chunks[0], dtype=dtype)
    for chunk in chunks:
        yield place[: len(chunk)].copy_(chunk)


class CandidatePooling(torch.autograd.Function):
    """Sums of candidates x, weighted with softmax(mu . x tau / (sqrt(C) |x|)), for each image."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, candidates: Tensor, config: BlockConfig) -> Tensor:
        """Image vectors M_n: (image, channel)."""
        norms = _norms(candidates, config).unsqueeze(1)  # (image, 1, candidate)
        scale = _score_scale(norms, config)
        scores = torch.bmm(mu.expand(len(candidates), 1, -1), candidates.mT).mul_(scale)
        weights = torch.softmax(scores, dim=-1)  # (image, 1, candidate)
        ctx.save_for_backward(mu, candidates, norms, scale, scores, weights)
        ctx.normalised = config.form == "cnn"
        return torch.bmm(weights, candidates).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of mu and of the candidates."""
        mu, candidates, norms, scale, scores, weights = ctx.saved_tensors
        grad = grad.unsqueeze(1)  # (image, 1, channel)
        d_weights = torch.bmm(grad, candidates.mT).mul_(weights)  # (image, 1, candidate)
        d_scores = d_weights.sub_(weights * d_weights.sum(dim=2, keepdim=True))
        slope = d_scores * scale
        d_mu = torch.bmm(slope, candidates).sum(dim=(0, 1))
        # candidates take part in the sum, in the dot products and in the norms
        factors = torch.cat([weights, slope], dim=1).mT  # (image, candidate, 2)
        rows = torch.cat([grad, mu.expand_as(grad)], dim=1)  # (image, 2, channel)
        if not ctx.normalised:
            return d_mu, torch.bmm(factors, rows), None
        by_norm = d_scores.mul_(scores).div_(norms.square()).mT  # (image, candidate, 1)
        return d_mu, torch.bmm(factors, rows).sub_(candidates * by_norm), None


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
        weights = []
        for patches, scale in zip(candidates.patches, candidates.scales, strict=True):
            chunks = zip(
                loaded(patches, self.theta.dtype), scale.chunk(chunk_count(patches)), strict=True
            )
            weights.append(
                torch.cat([torch.softmax((x @ self.theta) * s, dim=-1) for x, s in chunks])
            )
        return weights

    def forward(self, candidates: Candidates) -> Tensor:
        """Image vectors (image, channel)."""
        parts: list[Tensor] = []  # each (image, candidate, channel)
        if self.theta is not None:
            pooled: Tensor = PatchPooling.apply(self.theta, candidates)
            vit = self.config.form == "vit"
            parts.append(F.layer_norm(pooled, pooled.shape[-1:], eps=LN_EPS) if vit else pooled)
        if candidates.token is not None:
            parts.append(candidates.token.unsqueeze(1))
        stacked = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]  # B_n
        if self.mu is None:
            return stacked.squeeze(1)
        vectors: Tensor = CandidatePooling.apply(self.mu, stacked, self.config)
        return vectors
