"""What the MIV-head costs, step by step through its three components and its ensemble.

The estimator is `mivhead.MIVClassifier`; its ablations are in `mivhead.methods.ablation`. Every
product is counted once forward, and once more for each factor that has a gradient. Bags are not
padded, and nothing is computed twice. Each image is pooled and projected once per step, as a
pseudo-query; the support is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mivhead.ensemble.descriptors import COMPONENTS, ITERATIONS, OVERSAMPLING
from mivhead.ensemble.ridge import expected_shapes
from mivhead.ensemble.stacking import FOLDS
from mivhead.features import Block, Features
from mivhead.head.recipe import BlockConfig, Recipe, resolve_blocks, resolve_recipe
from mivhead.methods.cost import BACKWARD, BackboneWork, TaskSize, Work

L1 = 3  # operations per pair of values: difference, absolute value, sum
PASSES = 3  # where both factors have a gradient


def work(classifier: Any, size: TaskSize, features: Features, _backbone: BackboneWork) -> Work:
    """Count the work of fitting a `MIVClassifier` or one of its ablations."""
    recipe = resolve_recipe(classifier.recipe)
    blocks = resolve_blocks(features, classifier.preset)
    kept = recipe.last_blocks and recipe.last_blocks + blocks[-1].pooled
    return miv_work(blocks[-(kept or 0) :], recipe, size)


def miv_work(blocks: Sequence[BlockConfig], recipe: Recipe, size: TaskSize) -> Work:
    """Count the head and, where the recipe has them, ridge experts and out-of-fold heads."""
    taken = [block for block in blocks if not block.pooled] or blocks
    if recipe.vote == "logsumexp":
        return _head_work(taken, recipe, size)
    own = [block for block in taken if not block.plain] or taken
    total = _head_work(own, recipe, size) + experts_work(blocks, size)
    if recipe.vote == "stacked" and max(size.shots) > 1:
        for fold in range(FOLDS):
            total += _head_work(own, recipe, size.without_fold(fold, FOLDS))
    return total


def _head_work(blocks: Sequence[BlockConfig], recipe: Recipe, size: TaskSize) -> Work:
    """Count all steps, and embedding the support once more for prediction."""
    step, embedding = Work(), 0.0
    for block in blocks:
        step += _pooling(block, size.images) + _projections(block, recipe, size.images)
        step += _attention(block, recipe, size) + _prototypes(block, recipe, size)
        step += _cosines(block, size)
        embedding += _pooling(block, 1).paper + _projections(block, recipe, 1).paper
    steps = recipe.steps
    return Work(
        steps * step.products + embedding * size.support,
        steps * step.others,
        BACKWARD * steps * step.paper,
    )


def _pooling(block: BlockConfig, images: int) -> Work:
    """Component 1: scores and weighted sums of patches, then of candidates."""
    patches = sum(h * w for h, w in block.candidate_sizes) * images * block.channels
    stacked = block.candidates * images * block.channels if block.candidates > 1 else 0
    # Patches are frozen: only theta and the weights have gradients. Candidates depend on theta, so
    # their weighted sum has gradients of both factors.
    return Work(products=4 * patches + 5 * stacked, paper=2 * patches + 2 * stacked)


def _projections(block: BlockConfig, recipe: Recipe, images: int) -> Work:
    """Component 2: keys, values and gates."""
    if recipe.prototype == "mean":
        return Work()
    layers = 1 + recipe.cross_attention + recipe.co_excitation
    forward = layers * images * block.channels**2
    return Work(products=PASSES * forward, paper=forward)


def _attention(block: BlockConfig, recipe: Recipe, size: TaskSize) -> Work:
    """Component 2: scores of every pseudo-query with every shot."""
    if recipe.prototype == "mean" or not recipe.cross_attention:
        return Work()
    pairs = size.images * size.support * block.channels
    if recipe.attention == "l1":
        return Work(others=PASSES * L1 * pairs)  # the paper's rule does not count the distance
    return Work(products=PASSES * pairs, paper=pairs)


def _prototypes(block: BlockConfig, recipe: Recipe, size: TaskSize) -> Work:
    """Component 2: weighted sums of values and, for the skip connection, of keys."""
    shots = size.support * block.channels
    if recipe.prototype == "mean":
        return Work(products=2 * shots, paper=shots)
    sums = 1 + recipe.skip
    if not recipe.cross_attention:  # the weights are constants, the same for all queries
        return Work(products=2 * sums * shots, paper=sums * shots)
    forward = sums * size.images * shots
    return Work(products=PASSES * forward, paper=forward)


def _cosines(block: BlockConfig, size: TaskSize) -> Work:
    """Component 3: a dot product and a length for each query and class."""
    pairs = size.images * size.ways * block.channels
    return Work(others=PASSES * 2 * 2 * pairs)


def experts_work(blocks: Sequence[BlockConfig], size: TaskSize) -> Work:
    """Count the ridge experts: descriptors of the support images, and closed-form regressions."""
    images, products = size.support, 0.0
    for block in blocks:
        if block.grid is not None:
            patches = images * block.grid[0] * block.grid[1]
            products += _pca_products(block.channels, patches)
            directions = min(block.channels, COMPONENTS)
            if directions < block.channels:
                products += patches * block.channels * directions
            products += patches * directions**2  # covariances
    shapes = expected_shapes([_empty(block) for block in blocks], size.ways)
    for length in (shape[0] for name, shape in shapes.items() if name.endswith(".coefficients")):
        smaller = min(images, length)
        products += images * length * smaller + smaller**3  # system and its inverse
        products += images * (length + smaller) * size.ways
    return Work.once(products)


def _pca_products(channels: int, patches: int) -> float:
    """Count a PCA of the patches by subspace iteration: their scatter, then products with it."""
    if channels <= COMPONENTS:
        return 0.0
    width = min(channels, COMPONENTS + OVERSAMPLING)
    iteration = channels**2 * width + 2 * channels * width**2  # the product, and a QR
    return float(patches * channels**2 + (ITERATIONS + 1) * iteration)


def _empty(block: BlockConfig) -> Block:
    """Make a block of this shape without images."""
    return Block(**{name: torch.empty(0, *shape) for name, shape in block.layout.items()})
