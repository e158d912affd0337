"""What an adaptation costs in GFLOPs, by the paper's rule and as the paper prints it.

The paper's rule: a multiply-add counts once, only matrix products and convolutions count, a
training step is three forward passes, and the unit is 2^30. What the paper prints is the same rule
applied to its authors' implementation of the MIV-head, which does more work than ours.

The MIV-head is counted by its formula, and the backbone by PyTorch's counter. A method that tunes
the backbone passes it in every step; the heads of other methods are small beside one pass of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from mivhead.backbones.base import Backbone
from mivhead.backbones.efficientnet_lite import WEIGHTS
from mivhead.classifier import MIVClassifier
from mivhead.ensemble.constants import COMPONENTS, FOLDS
from mivhead.ensemble.descriptors import ITERATIONS, OVERSAMPLING
from mivhead.features import Features
from mivhead.head.recipe import BlockConfig, resolve_blocks, resolve_recipe, taken_blocks
from mivhead_bench.head.recipe import Ablation
from mivhead_bench.methods.miv import AblatedHead
from mivhead_bench.methods.tuning.base import TuningClassifier
from mivhead_bench.methods.tuning.network import network_of

GIGA = 2.0**30
BACKWARD = 3  # a training step costs three forward passes
REPEATED = 512  # up to this many channels, the authors repeat the support for every query


@dataclass(frozen=True)
class TaskSize:
    """The size of a task: for each class, its shots and the augmented views of all its shots."""

    shots: tuple[int, ...]
    views: tuple[int, ...]

    @classmethod
    def from_labels(cls, labels: Sequence[int], views: Sequence[int]) -> TaskSize:
        """Count support images and their views (one number per image) by class.

        >>> TaskSize.from_labels([0, 0, 1], [2, 2, 3])
        TaskSize(shots=(2, 1), views=(4, 3))
        """
        shots = np.bincount(labels)
        extra = np.bincount(labels, weights=views, minlength=len(shots))
        return cls(tuple(map(int, shots)), tuple(map(int, extra)))

    def without_fold(self, fold: int) -> TaskSize:
        """Leave one of the folds out, as stacking does.

        >>> TaskSize((5, 1), (10, 4)).without_fold(0)
        TaskSize(shots=(2, 1), views=(4, 4))
        """
        kept = [s if s == 1 else s - len(range(fold, s, FOLDS)) for s in self.shots]
        pairs = zip(kept, self.shots, self.views, strict=True)
        return TaskSize(tuple(kept), tuple(round(v * k / s) for k, s, v in pairs))

    @property
    def ways(self) -> int:
        """Number of classes."""
        return len(self.shots)

    @property
    def support(self) -> int:
        """Number of support images."""
        return sum(self.shots)

    @property
    def images(self) -> int:
        """Number of support images and views."""
        return self.support + sum(self.views)


@dataclass(frozen=True)
class Cost:
    """GFLOPs of one adaptation, the backbone's passes included."""

    gflops_paper: float  # by the paper's rule
    gflops_authors: float  # by the same rule for the authors' implementation: what the paper prints


def count(classifier: Any, features: Features, size: TaskSize, backbone: float | None) -> Cost:
    """Count the adaptation of a classifier, fitted or not, to a task.

    Only the shapes of the features matter. The size has views only if the classifier uses them, and
    `backbone` is what `measure_backbone` counted; None counts as nothing. The ridge experts of the
    default recipe are known after fitting.

    >>> features, size = Features(np.ones((1, 64, 7, 7))), TaskSize((5, 5), (15, 15))
    >>> cost = count(MIVClassifier("paper"), features, size, backbone=4e8)
    >>> round(cost.gflops_paper), round(cost.gflops_authors)
    (15, 19)
    """
    passed = backbone or 0.0
    frozen = ours = size.images * passed
    authors = None
    if isinstance(classifier, TuningClassifier):
        ours = BACKWARD * classifier.steps * frozen
    elif isinstance(classifier, MIVClassifier | AblatedHead):
        recipe = Ablation.of(resolve_recipe(classifier.recipe))
        blocks = used_blocks(resolve_blocks(features, classifier.preset), recipe)
        ours += head_products(blocks, recipe, size)
        if recipe.has_experts:
            ours += ensemble_products(classifier, blocks, recipe, size)
        else:  # their shots pass as bags, and again as pseudo-queries
            authors = frozen + size.support * passed + authors_products(blocks, recipe, size)
    return Cost(ours / GIGA, (ours if authors is None else authors) / GIGA)


def used_blocks(blocks: Sequence[BlockConfig], recipe: Ablation) -> list[BlockConfig]:
    """Return the blocks that the head uses."""
    kept = recipe.last_blocks and recipe.last_blocks + blocks[-1].pooled
    last = blocks[-(kept or 0) :]
    return [last[i] for i in taken_blocks(last, recipe)]


def head_products(blocks: Sequence[BlockConfig], recipe: Ablation, size: TaskSize) -> float:
    """Count all steps of our head: each image is pooled and projected once per step."""
    total = 0.0
    for block in blocks:
        total += size.images * (_pooling(block) + _projections(recipe) * block.channels**2)
        total += _comparison(block, recipe, size)
    return BACKWARD * recipe.steps * total


def authors_products(blocks: Sequence[BlockConfig], recipe: Ablation, size: TaskSize) -> float:
    """Count the head as the paper's authors implemented it.

    The support is pooled as bags and again as pseudo-queries, a query is projected once per class
    and, in blocks of up to 512 channels, the support once per query.
    """
    total = 0.0
    for block in blocks:
        total += (size.images + size.support) * _pooling(block)
        if recipe.prototype == "mean":
            total += _comparison(block, recipe, size)
            continue
        keys = 1 + recipe.cross_attention
        copies = size.images if block.channels <= REPEATED else 1
        projected = (keys + recipe.co_excitation) * size.ways * size.images
        total += (projected + keys * copies * size.support) * block.channels**2
        pairs = size.images * size.support * block.channels
        dot = recipe.cross_attention and recipe.attention == "dot"
        total += pairs * (1 + dot)  # one sum of gated values and keys
    return BACKWARD * recipe.steps * total


def _pooling(block: BlockConfig) -> float:
    """Component 1, an image: scores and weighted sums of patches, then of candidates."""
    patches = sum(h * w for h, w in block.candidate_sizes)
    candidates = block.candidates if block.candidates > 1 else 0
    return 2 * (patches + candidates) * block.channels


def _projections(recipe: Ablation) -> int:
    """Component 2: square layers that each image passes, for keys, values and gates."""
    if recipe.prototype == "mean":
        return 0
    return 1 + recipe.cross_attention + recipe.co_excitation


def _comparison(block: BlockConfig, recipe: Ablation, size: TaskSize) -> float:
    """Component 2: scores of queries with shots, and weighted sums of values and of keys.

    The rule does not count L1 distances, nor the cosines of Component 3.
    """
    shots = size.support * block.channels
    if recipe.prototype == "mean":
        return shots
    sums = 1 + recipe.skip
    if not recipe.cross_attention:  # the same weights for all queries
        return sums * shots
    return size.images * shots * (sums + (recipe.attention == "dot"))


def ensemble_products(
    classifier: MIVClassifier, blocks: Sequence[BlockConfig], recipe: Ablation, size: TaskSize
) -> float:
    """Count the heads that leave a fold out and, of a fitted classifier, its ridge experts."""
    total = 0.0
    if max(size.shots) > 1:
        total += sum(head_products(blocks, recipe, size.without_fold(i)) for i in range(FOLDS))
    if hasattr(classifier, "ensemble_"):
        total += experts_products(classifier, size)
    return total


def experts_products(classifier: MIVClassifier, size: TaskSize) -> float:
    """Count the ridge experts of a fitted classifier: descriptors and closed-form regressions."""
    total = 0.0
    for block in classifier.blocks_:
        if block.grid is not None:
            patches = size.support * block.grid[0] * block.grid[1]
            total += patches * min(block.channels, COMPONENTS) ** 2  # covariances
            total += _pca_products(block.channels, patches)
    assert classifier.ensemble_ is not None
    for ridge in classifier.ensemble_.experts.ridges.values():
        length = len(ridge.coefficients)
        smaller = min(size.support, length)
        total += smaller**3 + size.support * (length * smaller + (length + smaller) * size.ways)
    return total


def _pca_products(channels: int, patches: int) -> float:
    """Count a PCA of patches by subspace iteration, and the patches in its directions."""
    if channels <= COMPONENTS:
        return 0.0
    width = min(channels, COMPONENTS + OVERSAMPLING)
    iteration = channels**2 * width + 2 * channels * width**2  # the product, and a QR
    scatter = patches * channels**2
    return scatter + (ITERATIONS + 1) * iteration + patches * channels * COMPONENTS


def measure_backbone(backbone: Backbone) -> float | None:
    """Count the multiply-adds of one image's pass with PyTorch's counter; None for a black box.

    >>> from mivhead.backbones import load_backbone
    >>> measure_backbone(load_backbone("efficientnet_lite0")) / 1e9 < 0.4
    True
    """
    with FlopCounterMode(display=False) as counter:
        if backbone.identity.name in WEIGHTS:  # it runs without PyTorch
            network = network_of(backbone, "a count of FLOPs")
            network(network.blank())
        else:
            size = backbone.preset.preprocessing.size
            backbone.extract([Image.new("RGB", (size, size))])
    return counter.get_total_flops() / 2 or None
