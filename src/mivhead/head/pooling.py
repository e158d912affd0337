"""Component 1: pooling by attention, from patches to one vector per image.

Patches of a candidate compete for the candidate (theta), candidates compete for the image (mu).
Patches are frozen, so what depends on them alone is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
MAP_CHUNK = 2**18  # numbers in maps that are pooled at once: PyTorch makes 8 bytes more of each


@dataclass(eq=False)
class Chunk:
    """Patches of one candidate of some images, and where they go for work.

    A copy streams from memory at full speed, which matrix products with a single row do not; it
    stays in the processor's cache while it is used, and turns half precision into single.
    """

    rows: slice  # the images
    patches: Tensor  # (image, patch, channel)
    place: Tensor  # (image, patch, channel), shared by all chunks
    config: BlockConfig
    _scale: Tensor | None = None

    def load(self) -> tuple[Tensor, Tensor]:
        """Copy the patches to their place, over those of the last chunk.

        Beside them: what theta . patch is multiplied with, (image, 1, patch).
        """
        x = self.place.copy_(self.patches)
        if self._scale is None:
            self._scale = _score_scale(_norms(x, self.config), self.config).unsqueeze(1)
        return x, self._scale


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of n images of one block, ready for pooling."""

    maps: tuple[tuple[Chunk, ...], ...]  # the chunks of every map candidate
    token: Tensor | None  # (image, channel)


def prepare(block: Block, config: BlockConfig, dtype: torch.dtype = torch.float32) -> Candidates:
    """Derive the candidates of a block.

    Patches stay float16 if the features are, which halves what a step reads: they turn into
    `dtype` chunk by chunk, as they are used. Everything else is of `dtype`.
    """
    maps: list[tuple[Chunk, ...]] = []
    if block.map is not None and config.candidate_sizes:
        patches = derive_candidates(block.map, config.candidate_sizes, dtype)
        parts = [p.chunk(chunk_count(p, CHUNK)) for p in patches]
        place = block.map.new_empty(max(part[0].numel() for part in parts), dtype=dtype)
        maps = [tuple(_chunks(part, place, config)) for part in parts]
    return Candidates(tuple(maps), None if block.token is None else block.token.to(dtype))


def derive_candidates(
    map_: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[Tensor]:
    """Max-pool maps to several sizes: (image, patch, channel) each; at most as wide as `dtype`."""
    kept = min(map_.dtype, dtype, key=lambda kind: kind.itemsize)
    n, channels, *native = map_.shape
    patches = [map_.new_empty(n, h * w, channels, dtype=kept) for h, w in sizes]
    count = chunk_count(map_, MAP_CHUNK)
    for some, *outs in zip(*(x.chunk(count) for x in (map_, *patches)), strict=True):
        # Channels last: a patch is a row, and pooling takes many channels at a time.
        last = some.contiguous(memory_format=torch.channels_last)
        for size, out in zip(sizes, outs, strict=True):
            pooled = last if list(size) == native else F.adaptive_max_pool2d(last, size)
            out.copy_(pooled.permute(0, 2, 3, 1).flatten(1, 2))
    return patches


def chunk_count(images: Tensor, numbers: int) -> int:
    """Chunks of about so many numbers, but of one image at least."""
    return max(1, min(len(images), round(images.numel() / numbers)))


def _chunks(parts: Sequence[Tensor], place: Tensor, config: BlockConfig) -> Iterator[Chunk]:
    start = 0
    for patches in parts:
        rows = slice(start, start := start + len(patches))
        yield Chunk(rows, patches, place[: patches.numel()].view(patches.shape), config)


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
        images = candidates.maps[0][-1].rows.stop
        pooled = theta.new_empty(len(candidates.maps), images, 1, len(theta))
        weights: list[Tensor] = []  # of every chunk: (image, 1, patch)
        for chunks, out in zip(candidates.maps, pooled, strict=True):
            for chunk in chunks:
                x, scale = chunk.load()
                # a row times a matrix is several times as fast as a matrix times a column
                scores = torch.bmm(theta.expand(len(x), 1, -1), x.mT).mul_(scale)
                weights.append(torch.softmax(scores, dim=-1))
                torch.bmm(weights[-1], x, out=out[chunk.rows])
        ctx.candidates, ctx.weights = candidates, weights
        pooled = pooled.squeeze(2).transpose(0, 1)
        ctx.save_for_backward(pooled)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gradient of theta; the softmax takes off grad . pooled from the scores' gradient."""
        (pooled,) = ctx.saved_tensors
        means = (grad * pooled).sum(dim=2)[..., None, None]  # (image, candidate, 1, 1)
        sums = grad.new_empty(grad.shape[1], len(grad), 1, grad.shape[2])
        weights = iter(ctx.weights)
        parts = ctx.candidates.maps, grad.unsqueeze(2).unbind(1), means.unbind(1), sums
        for chunks, g, mean, out in zip(*parts, strict=True):
            for chunk in chunks:
                (x, scale), rows = chunk.load(), chunk.rows
                d_scores = torch.bmm(g[rows], x.mT).sub_(mean[rows])  # (image, 1, patch)
                d_scores.mul_(next(weights)).mul_(scale)
                torch.bmm(d_scores, x, out=out[rows])
        return sums.sum(dim=(0, 1, 2)), None


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
        theta = self.theta

        def weights(chunk: Chunk) -> Tensor:  # (image, patch)
            x, scale = chunk.load()
            return torch.softmax((x @ theta) * scale.squeeze(1), dim=-1)

        return [torch.cat([weights(chunk) for chunk in chunks]) for chunks in candidates.maps]

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
