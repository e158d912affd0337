"""Fixed descriptors of an image, computed from the patches of a block: one vector each.

- `mean`: the mean patch, or the token: what is there.
- `layout`: all patches, concatenated: what is where.
- `second_order`: the covariances of channels over the patches: which textures and parts there are.

The last two see patches in the coordinates of a PCA of the support set's patches, so that the size
of a descriptor does not depend on the backbone.
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

COMPONENTS = 128  # principal components of patches, at most
SIDE = 7  # of a layout, at most
OVERSAMPLING = 8  # additional components during the subspace iteration, which make it converge
ITERATIONS = 3  # of the subspace iteration
NOISE = 1e-6  # variance along a component, relative to the largest, that may be rounding


@dataclass(frozen=True, eq=False)
class PatchPCA:
    """A PCA of the patches of a block."""

    mean: Tensor  # (channel,)
    components: Tensor  # (channel, component)

    @classmethod
    def fit(cls, map_: Tensor) -> PatchPCA:
        """Fit to the patches of maps (image, channel, H, W)."""
        patches = map_.flatten(2).transpose(1, 2).flatten(0, 1).float()  # (patch, channel)
        mean = patches.mean(dim=0)
        patches = patches - mean  # not in place: they may be the maps themselves
        return cls(mean, principal_components(patches.T @ patches))

    def __call__(self, map_: Tensor) -> Tensor:
        """Transform patches: (image, channel, H, W) to (image, component, H, W)."""
        centred = map_.float() - self.mean[:, None, None]
        channels, components = self.components.shape
        if channels == components:  # all of them are kept, unrotated
            return centred
        rotated: Tensor = self.components.T @ centred.flatten(2)  # (image, component, patch)
        return rotated.view(len(map_), components, *map_.shape[2:])


def principal_components(scatter: Tensor) -> Tensor:
    """Return the first eigenvectors of a scatter matrix as columns, by subspace iteration.

    Written out because `torch.pca_lowrank` draws its start from the global generator. With few
    channels nothing is left out, and the result is the identity.

    >>> principal_components(torch.eye(3)).shape
    torch.Size([3, 3])
    """
    channels = len(scatter)
    if channels <= COMPONENTS:
        return torch.eye(channels, dtype=scatter.dtype, device=scatter.device)
    width = min(channels, COMPONENTS + OVERSAMPLING)
    generator = torch.Generator().manual_seed(0)  # any start will do, as long as it is the same
    start = torch.randn(channels, width, generator=generator).to(scatter)
    basis = torch.linalg.qr(start).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(scatter @ basis).Q
    variances, inside = torch.linalg.eigh(basis.T @ scatter @ basis)  # ascending
    # Few patches span few dimensions; all other components would be made of rounding errors.
    varies = variances > NOISE * variances[-1]
    first: Tensor = (basis @ (inside * varies))[:, -COMPONENTS:].contiguous()
    return first


def compute_descriptors(
    block: Block, pca: PatchPCA | None, kinds: Iterable[Kind]
) -> Iterator[tuple[Kind, Tensor]]:
    """Compute several descriptors, (image, dimension) each; patches are transformed only once.

    >>> block = Block(map=torch.randn(2, 3, 4, 4))
    >>> described = compute_descriptors(block, PatchPCA.fit(block.map), ["layout", "mean"])
    >>> {kind: tuple(x.shape) for kind, x in described}
    {'layout': (2, 48), 'mean': (2, 3)}
    """
    patches = None  # (image, component, H, W)
    for kind in kinds:
        if kind == "mean":
            yield kind, mean_vectors(block)
            continue
        if patches is None:
            assert block.map is not None
            assert pca is not None
            patches = pca(block.map)
        yield kind, _layout(patches) if kind == "layout" else _second_order(patches)


def mean_vectors(block: Block) -> Tensor:
    """Return the token, or the mean patch, with mean 0 and length 1."""
    if block.token is not None:
        vectors = block.token.float()
    else:
        assert block.map is not None
        vectors = block.map.mean(dim=(2, 3), dtype=torch.float32)
    return F.normalize(F.layer_norm(vectors, vectors.shape[1:]), dim=1)


def _layout(patches: Tensor) -> Tensor:
    """Concatenate all patches, after average pooling to at most 7x7."""
    height, width = patches.shape[2:]
    if max(height, width) > SIDE:
        patches = F.adaptive_avg_pool2d(patches, (min(SIDE, height), min(SIDE, width)))
    return F.normalize(patches.flatten(1), dim=1)


def _second_order(patches: Tensor) -> Tensor:
    """Signed square roots of the covariances of all pairs of components."""
    patches = patches.flatten(2)  # (image, component, patch)
    patches = patches - patches.mean(dim=2, keepdim=True)
    covariances = patches @ patches.transpose(1, 2)
    size = patches.shape[1]
    row, column = torch.triu_indices(size, size, device=patches.device)
    pairs = covariances.flatten(1).index_select(1, row * size + column)
    return F.normalize(pairs.abs().sqrt().copysign(pairs), dim=1)
