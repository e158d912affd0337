"""Fixed descriptions of an image, one vector each, from the patches of a block.

- `mean`: the mean patch (or the token): what is there.
- `layout`: all patches, side by side: what is where.
- `second_order`: how channels vary together over the patches: which textures and parts there are.

The last two see patches along the directions in which those of the support set vary most, so that
their size does not depend on the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.features import Block

Kind = Literal["second_order", "layout", "mean"]

DIRECTIONS = 128  # of patches, at most
SIDE = 7  # of a layout, at most
SPARE = 8  # directions followed beside those that are kept: the search for them is safer
ROUNDS = 3  # of that search
NOISE = 1e-6  # spread along a direction, of the largest, that may be rounding


@dataclass(frozen=True, eq=False)
class PatchSpace:
    """The mean patch of a block and the main directions of its patches."""

    middle: Tensor  # (channel,)
    directions: Tensor  # (channel, direction)

    @classmethod
    def fit(cls, map_: Tensor) -> PatchSpace:
        """Find the main directions of the patches of maps (image, channel, H, W)."""
        patches = map_.flatten(2).transpose(1, 2).flatten(0, 1).float()  # (patch, channel)
        middle = patches.mean(dim=0)
        patches = patches - middle  # not in place: they may be the maps themselves
        return cls(middle, main_directions(patches.T @ patches))

    def __call__(self, map_: Tensor) -> Tensor:
        """Patches in this space: (image, channel, H, W) to (image, direction, H, W)."""
        centred = map_.float() - self.middle[:, None, None]
        channels, directions = self.directions.shape
        if channels == directions:  # all of them are kept, as they are
            return centred
        turned: Tensor = self.directions.T @ centred.flatten(2)  # (image, direction, patch)
        return turned.view(len(map_), directions, *map_.shape[2:])


def main_directions(scatter: Tensor) -> Tensor:
    """Return the first eigenvectors of a symmetric matrix as columns, by subspace iteration.

    With few channels nothing is left out, and the answer is the identity.

    >>> main_directions(torch.eye(3)).shape
    torch.Size([3, 3])
    """
    channels = len(scatter)
    if channels <= DIRECTIONS:
        return torch.eye(channels, dtype=scatter.dtype, device=scatter.device)
    width = min(channels, DIRECTIONS + SPARE)
    generator = torch.Generator().manual_seed(0)  # any start will do, but always the same
    start = torch.randn(channels, width, generator=generator).to(scatter)
    basis = torch.linalg.qr(start).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(scatter @ basis).Q
    spread, inside = torch.linalg.eigh(basis.T @ scatter @ basis)  # ascending
    # Few patches vary along few directions; the others would be whatever rounding makes of them.
    varies = spread > NOISE * spread[-1]
    first: Tensor = (basis @ (inside * varies))[:, -DIRECTIONS:].contiguous()
    return first


def describe(
    block: Block, space: PatchSpace | None, kinds: Iterable[Kind]
) -> Iterator[tuple[Kind, Tensor]]:
    """Describe images in several ways, (image, dimension) each; patches are turned only once.

    >>> block = Block(map=torch.randn(2, 3, 4, 4))
    >>> described = describe(block, PatchSpace.fit(block.map), ["layout", "mean"])
    >>> {kind: tuple(x.shape) for kind, x in described}
    {'layout': (2, 48), 'mean': (2, 3)}
    """
    patches = None  # (image, direction, H, W)
    for kind in kinds:
        if kind == "mean":
            yield kind, _mean(block)
            continue
        if patches is None:
            assert block.map is not None
            assert space is not None
            patches = space(block.map)
        yield kind, _layout(patches) if kind == "layout" else _second_order(patches)


def _mean(block: Block) -> Tensor:
    """Return the token, or the mean patch, with mean 0 and length 1."""
    if block.token is not None:
        vectors = block.token.float()
    else:
        assert block.map is not None
        vectors = block.map.mean(dim=(2, 3), dtype=torch.float32)
    return F.normalize(F.layer_norm(vectors, vectors.shape[1:]), dim=1)


def _layout(patches: Tensor) -> Tensor:
    """All patches of a map of at most 7x7, side by side."""
    height, width = patches.shape[2:]
    if max(height, width) > SIDE:
        patches = F.adaptive_avg_pool2d(patches, (min(SIDE, height), min(SIDE, width)))
    return F.normalize(patches.flatten(1), dim=1)


def _second_order(patches: Tensor) -> Tensor:
    """Roots of the covariances of all pairs of directions, with their sign."""
    patches = patches.flatten(2)  # (image, direction, patch)
    patches = patches - patches.mean(dim=2, keepdim=True)
    covariances = patches @ patches.transpose(1, 2)
    size = patches.shape[1]
    row, column = torch.triu_indices(size, size, device=patches.device)
    pairs = covariances.flatten(1).index_select(1, row * size + column)
    return F.normalize(pairs.abs().sqrt().copysign(pairs), dim=1)
