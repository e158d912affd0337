"""The work of training a MIV-head, step by step through its three components.

Counted is what the method needs, not how an implementation arranges it: every product once
forward, and once more for each factor that has a gradient. Bags are not padded, nothing is computed
twice. Each image is pooled and projected once a step, as a pseudo-query; the support is among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mivhead.benchmark.cost_experts import experts_work
from mivhead.benchmark.work import BACKWARD, Episode, Work
from mivhead.head.config import BlockConfig, Recipe
from mivhead.heldout import FOLDS

L1 = 3  # operations per pair of values: difference, absolute value, sum
PASSES = 3  # where both factors have a gradient


def miv_work(blocks: Sequence[BlockConfig], recipe: Recipe, episode: Episode) -> Work:
    """Work of a head and, where the recipe has them, of experts and held-out heads."""
    if recipe.vote == "logsumexp":
        return _head_work(blocks, recipe, episode)
    own = [block for block in blocks if not block.plain] or blocks
    work = _head_work(own, recipe, episode) + experts_work(blocks, episode)
    if recipe.vote == "stacked" and max(episode.shots) > 1:
        for fold in range(FOLDS):
            work += _head_work(own, recipe, episode.without(fold, FOLDS))
    return work


def _head_work(blocks: Sequence[BlockConfig], recipe: Recipe, episode: Episode) -> Work:
    """Work of all steps, and of embedding the support once more for prediction."""
    step, embedding = Work(), 0.0
    for block in blocks:
        step += _pooling(block, episode.images) + _projections(block, recipe, episode.images)
        step += _attention(block, recipe, episode) + _prototypes(block, recipe, episode)
        step += _cosines(block, episode)
        embedding += _pooling(block, 1).paper + _projections(block, recipe, 1).paper
    steps = recipe.steps
    return Work(
        steps * step.products + embedding * episode.support,
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
    """Keys, values and gates of Component 2."""
    if recipe.prototype == "mean":
        return Work()
    layers = 1 + recipe.cross_attention + recipe.co_excitation
    forward = layers * images * block.channels**2
    return Work(products=PASSES * forward, paper=forward)


def _attention(block: BlockConfig, recipe: Recipe, episode: Episode) -> Work:
    """Scores of every pseudo-query with every shot."""
    if recipe.prototype == "mean" or not recipe.cross_attention:
        return Work()
    pairs = episode.images * episode.support * block.channels
    if recipe.attention == "l1":
        return Work(others=PASSES * L1 * pairs)  # the paper's rule leaves the distance out
    return Work(products=PASSES * pairs, paper=pairs)


def _prototypes(block: BlockConfig, recipe: Recipe, episode: Episode) -> Work:
    """Weighted sums of values and, for the skip connection, of keys."""
    shots = episode.support * block.channels
    if recipe.prototype == "mean":
        return Work(products=2 * shots, paper=shots)
    sums = 1 + recipe.skip
    if not recipe.cross_attention:  # the weights are constants, the same for all queries
        return Work(products=2 * sums * shots, paper=sums * shots)
    forward = sums * episode.images * shots
    return Work(products=PASSES * forward, paper=forward)


def _cosines(block: BlockConfig, episode: Episode) -> Work:
    """Component 3: a dot product and a length for each query and class."""
    pairs = episode.images * episode.ways * block.channels
    return Work(others=PASSES * 2 * 2 * pairs)
