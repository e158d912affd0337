"""The work of fitting plain experts: descriptions, and ridge regressions in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mivhead.benchmark.work import Episode, Work
from mivhead.blocks import Block
from mivhead.experts.descriptions import DIRECTIONS, ROUNDS, SPARE
from mivhead.experts.experts import expected_shapes
from mivhead.head.config import BlockConfig


def experts_work(blocks: Sequence[BlockConfig], episode: Episode) -> Work:
    """Work of all experts on the support images; views play no part."""
    images, products = episode.support, 0.0
    for block in blocks:
        if block.grid is not None:
            patches = images * block.grid[0] * block.grid[1]
            products += _space(block.channels, patches)
            directions = min(block.channels, DIRECTIONS)
            if directions < block.channels:
                products += patches * block.channels * directions
            products += patches * directions**2  # covariances
    empty = [_empty(block) for block in blocks]
    shapes = expected_shapes(empty, episode.ways)
    for size in (shape[0] for name, shape in shapes.items() if name.endswith(".coefficients")):
        smaller = min(images, size)
        products += images * size * smaller + smaller**3  # system and its inverse
        products += images * (size + smaller) * episode.ways
    return Work(products=products, paper=products)


def _space(channels: int, patches: int) -> float:
    """Count the main directions of the patches: their scatter, then rounds of products with it."""
    if channels <= DIRECTIONS:
        return 0.0
    width = min(channels, DIRECTIONS + SPARE)
    a_round = channels**2 * width + 2 * channels * width**2  # the product, and a QR
    return float(patches * channels**2 + (ROUNDS + 1) * a_round)


def _empty(block: BlockConfig) -> Block:
    """Return a block of this shape without images."""
    shapes = block.layout
    return Block(**{name: torch.empty(0, *shape) for name, shape in shapes.items()})
