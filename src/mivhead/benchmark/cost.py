"""GFLOPs of an adaptation: honestly, and by the paper's rule.

Honestly: multiplications and additions of all convolutions, matrix products, attention, L1
distances, cosines and factorisations, forward and backward, in units of 10^9. By the paper's rule:
a multiply-add counts once, only matrix products and convolutions count, a training step is three
forward passes, and the unit is 2^30; with it ratios can be compared with the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from mivhead.backbones.base import Backbone
from mivhead.classifier import MIVClassifier
from mivhead.ensemble.descriptors import COMPONENTS, ITERATIONS, OVERSAMPLING
from mivhead.ensemble.ridge import expected_shapes
from mivhead.ensemble.stacking import FOLDS
from mivhead.features import Block, Features
from mivhead.head.recipe import BlockConfig, Recipe, resolve_blocks, resolve_recipe
from mivhead.methods.ablation import views_rule
from mivhead.methods.registry import METHODS, make_method
from mivhead.preset import Preset

STEPS = 40  # of the methods that tune the backbone, if their parameters do not say


@dataclass(frozen=True)
class Cost:
    """GFLOPs of one adaptation, the backbone's passes included."""

    gflops: float
    gflops_paper: float


def count(
    method: str,
    features: Features,
    episode: Episode,
    backbone: BackboneWork | None,
    *,
    preset: Preset | None = None,
    recipe: Any = None,
    params: Mapping[str, Any] | None = None,
    iterations: int | None = None,
) -> Cost:
    """Count the adaptation of a method to a task.

    Parameters
    ----------
    method
        One of `mivhead.methods.METHODS`.
    features
        Some features of the backbone, for their shapes; none of their images is looked at.
    episode
        The sizes of the task. Views count for methods that use them.
    backbone
        One image's pass (`measure_backbone`); None for a black box, whose work nobody knows.
    preset, recipe, params
        As for `make_method`.
    iterations
        Steps that a solver took (`n_iter_`), for logistic regression.

    Examples
    --------
    >>> import torch
    >>> features, episode = Features(torch.ones(1, 64, 7, 7)), Episode((5, 5), (15, 15))
    >>> cost = count("miv", features, episode, BackboneWork(4e8))
    >>> round(cost.gflops), round(cost.gflops_paper)
    (32, 15)
    """
    given = dict(params or {})
    if method in TUNING:
        return _tuning(method, features, episode, backbone, given)
    classifier = make_method(method, preset=preset, recipe=recipe, random_state=0, **given)
    settings = classifier.get_params(deep=False)
    if views_rule(method, recipe, given) is None:
        episode = Episode(episode.shots, (0,) * episode.ways)
    if isinstance(classifier, MIVClassifier):
        own = resolve_recipe(classifier.recipe)
        blocks = resolve_blocks(features, classifier.preset)
        work = miv_work(blocks[-(own.last_blocks or 0) :], own, episode)
    else:
        most = max(s + v for s, v in zip(episode.shots, episode.views, strict=True))
        channels = features.blocks[-1].channels
        sizes = Vectors(episode.images, channels, episode.ways, most)
        work = head_work(method, sizes, settings, iterations)
    return _cost(work, 0.0 if backbone is None else episode.images * backbone.total)


def _tuning(
    method: str,
    features: Features,
    episode: Episode,
    backbone: BackboneWork | None,
    params: dict[str, Any],
) -> Cost:
    known = METHODS.get(method)
    uses_views = params.get("use_views", known is not None and known.uses_views)
    images = episode.images if uses_views else episode.support
    work = tuning_work(
        method,
        backbone or BackboneWork(0.0),
        images,
        features.blocks[-1].channels,
        episode.ways,
        params.get("steps", STEPS),
    )
    return _cost(work, 0.0)


def _cost(work: Work, frozen: float) -> Cost:
    """Add the multiply-adds of a frozen backbone's pass."""
    honest = 2 * (work.products + frozen) + work.others
    return Cost(honest / GIGA, (work.paper + frozen) / PAPER_GIGA)


# The work of fitting plain experts: descriptions, and ridge regressions in closed form.


def experts_work(blocks: Sequence[BlockConfig], episode: Episode) -> Work:
    """Work of all experts on the support images; views play no part."""
    images, products = episode.support, 0.0
    for block in blocks:
        if block.grid is not None:
            patches = images * block.grid[0] * block.grid[1]
            products += _space(block.channels, patches)
            directions = min(block.channels, COMPONENTS)
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
    if channels <= COMPONENTS:
        return 0.0
    width = min(channels, COMPONENTS + OVERSAMPLING)
    a_round = channels**2 * width + 2 * channels * width**2  # the product, and a QR
    return float(patches * channels**2 + (ITERATIONS + 1) * a_round)


def _empty(block: BlockConfig) -> Block:
    """Return a block of this shape without images."""
    shapes = block.layout
    return Block(**{name: torch.empty(0, *shape) for name, shape in shapes.items()})


# The work of the plain heads, which see one vector per image.


LOGISTIC_STEPS = 100  # of L-BFGS, where nobody counted them


class Vectors:
    """The sizes a plain head sees: n images of C channels in L classes, at most M of a class."""

    def __init__(self, images: int, channels: int, classes: int, most: int) -> None:
        self.n, self.c, self.ways, self.most = images, channels, classes, most
        self.span = min(images - 1, channels)  # dimensions of the centred images


def head_work(method: str, size: Vectors, params: dict[str, Any], iterations: int | None) -> Work:
    """Work of fitting a plain head; `iterations` of solvers that stop by themselves."""
    if method == "logistic":
        return _logistic(size, iterations or LOGISTIC_STEPS)
    return HEADS[method](size, params)


def _once(products: float, others: float = 0.0) -> Work:
    return Work(products, others, products)


def _nothing(_: Vectors, __: dict[str, Any]) -> Work:
    return Work()  # features are kept as they are


def _means(size: Vectors, _: dict[str, Any]) -> Work:
    return _once(size.ways * size.n * size.c)


def _linear(size: Vectors, params: dict[str, Any]) -> Work:
    """Train a layer: features are frozen, so that a step is the scores and one gradient."""
    forward = params["steps"] * size.n * size.c * size.ways
    return Work(2 * forward, paper=BACKWARD * forward)


def _lda(size: Vectors, params: dict[str, Any]) -> Work:
    start = _span(size)
    forward = _shared(size)
    steps = params["steps"]
    return start + Work(2 * steps * forward, paper=BACKWARD * steps * forward)


def _qda(size: Vectors, params: dict[str, Any]) -> Work:
    n, r, most, ways = size.n, size.span, size.most, size.ways
    systems = n * r * (n + ways)  # products of all shots with all images and class means
    solved = ways * most**2 * n
    cubes = ways * most**3
    forward = _shared(size) + systems + solved
    # Backward through inverses: four products and two triangular solutions of small matrices.
    step = 2 * _shared(size) + 2 * systems + 3 * solved + 4 * cubes
    factors = cubes / 3 + 2 * cubes / 3 + 2 * cubes
    steps = params["steps"]
    start = _span(size)
    end = Work(systems, cubes / 3 + ways * most**2 * r)
    return start + end + Work(steps * step, steps * factors, BACKWARD * steps * forward)


def _span(size: Vectors) -> Work:
    """Count a singular value decomposition, as textbooks do, coordinates and class means."""
    n, c, r = size.n, size.c, size.span
    long, short = max(n, c), min(n, c)
    svd = 6 * long * short**2 + 20 * short**3
    return _once(2 * n * c * r + size.ways * n * r, svd)


def _shared(size: Vectors) -> float:
    """Log densities under a shared covariance, forward."""
    return (size.n + size.ways) * size.span + size.n * size.span * size.ways


def _ridge(size: Vectors, _: dict[str, Any]) -> Work:
    """Count a system, its inverse, the map, and what the map would say of held-out images."""
    n, c, ways = size.n, size.c, size.ways
    small = min(n, c)
    fitted = small**2 * (max(n, c) + ways) + (n + 1) * c * ways
    held_out = n * c * ways + (n * c**2 if n > c else 0)
    return _once(fitted + held_out, 2 * small**3)


def _svm(size: Vectors, _: dict[str, Any]) -> Work:
    """One kernel matrix of all pairs; what libsvm does beyond it is small."""
    return _once(size.n**2 * size.c)


def _logistic(size: Vectors, iterations: int) -> Work:
    n, c, ways = size.n, size.c, size.ways
    small, long = min(n, c), max(n, c)
    qr = 4 * long * small**2 - 4 * small**3 / 3
    forward = iterations * n * small * ways
    end = ways * small * c
    return Work(2 * forward + end, qr, BACKWARD * forward + end)


HEADS: dict[str, Callable[[Vectors, dict[str, Any]], Work]] = {
    "ncc": _means,
    "fit-protonets": _means,
    "knn": _nothing,
    "tip-adapter": _nothing,
    "baseline": _linear,
    "baseline++": _linear,
    "fit-lda": _lda,
    "fit-qda": _qda,
    "ridge": _ridge,
    "svm": _svm,
}


# The work of training a MIV-head, step by step through its three components.
#
# Counted is what the method needs, not how an implementation arranges it: every product once
# forward, and once more for each factor that has a gradient. Bags are not padded, nothing is
# computed twice. Each image is pooled and projected once a step, as a pseudo-query; the support
# is among them.


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


# The work of methods that tune the backbone: every step passes it, forward and backward.


TUNING = ("tsa", "ett", "ln-tune", "finetune")


def tuning_work(
    method: str, backbone: BackboneWork, images: int, channels: int, ways: int, steps: int
) -> Work:
    """Work of all steps on these images.

    A backward pass through a frozen layer computes the gradient of its input only, through a
    trained one that of its weights too; through attention, of both factors.
    """
    total, attention = images * backbone.total, images * backbone.attention
    frozen = total - attention
    adapters = 0.0
    if method == "finetune":
        step = 3 * total
    elif method == "tsa":
        adapters = images * backbone.conv3x3 / 9  # 1x1 beside 3x3
        step = 2 * total + 3 * adapters
    else:
        step = 2 * frozen + 3 * attention
    if method == "ett":
        # A prefix per class beside the keys and values, made by C -> C/2 -> 24 C for 12 blocks.
        adapters = ways * (channels * channels / 2 + channels / 2 * 24 * channels)
        step += 3 * adapters
    mapped = images * channels**2 if method in ("tsa", "ett") else 0.0  # the feature map beta
    classify = mapped + 2 * images * ways * channels  # class means and cosines
    return Work(
        steps * (step + 3 * classify), paper=BACKWARD * steps * (total + adapters + classify)
    )


# What is counted as work: of a task, of a backbone's pass, of an adaptation.


GIGA = 1e9
PAPER_GIGA = 2.0**30
BACKWARD = 3  # the paper's rule: a training step costs three forward passes


@dataclass(frozen=True)
class Episode:
    """The sizes of a task: per class, its shots and the augmented views of all its shots."""

    shots: tuple[int, ...]
    views: tuple[int, ...]

    @classmethod
    def from_labels(cls, labels: Sequence[int], views: Sequence[int]) -> Episode:
        """Count support images and their views (one number per image) by class.

        >>> Episode.from_labels([0, 0, 1], [2, 2, 3])
        Episode(shots=(2, 1), views=(4, 3))
        """
        shots = np.bincount(labels)
        extra = np.bincount(labels, weights=views, minlength=len(shots))
        return cls(tuple(map(int, shots)), tuple(map(int, extra)))

    def without(self, fold: int, folds: int) -> Episode:
        """Leave one of several folds out, as `mivhead.ensemble.stacking.assign_folds` does.

        >>> Episode((5, 1), (10, 4)).without(0, 2)
        Episode(shots=(2, 1), views=(4, 4))
        """
        kept = [s if s == 1 else s - len(range(fold, s, folds)) for s in self.shots]
        pairs = zip(kept, self.shots, self.views, strict=True)
        return Episode(tuple(kept), tuple(round(v * k / s) for k, s, v in pairs))

    @property
    def ways(self) -> int:
        """Classes."""
        return len(self.shots)

    @property
    def support(self) -> int:
        """Support images."""
        return sum(self.shots)

    @property
    def images(self) -> int:
        """Support images and views."""
        return self.support + sum(self.views)


@dataclass(frozen=True)
class Work:
    """Arithmetic of an adaptation, without the backbone's pass over frozen images.

    Parameters
    ----------
    products
        Multiply-adds of matrix products, forward and backward.
    others
        Single operations beside them: L1 distances, cosines, factorisations.
    paper
        Multiply-adds by the paper's rule: matrix products of a forward pass, times three for each
        training step.
    """

    products: float = 0.0
    others: float = 0.0
    paper: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products, self.others + other.others, self.paper + other.paper
        )


@dataclass(frozen=True)
class BackboneWork:
    """Multiply-adds of one image's pass through a backbone.

    Parameters
    ----------
    total
        All convolutions and matrix products.
    conv3x3
        Those of 3x3 convolutions, which TSA puts adapters beside.
    attention
        Those between activations: queries with keys, weights with values.
    """

    total: float
    conv3x3: float = 0.0
    attention: float = 0.0


def measure_backbone(backbone: Backbone) -> BackboneWork | None:
    """Count a pass of one image with PyTorch's own counter; None for a black box.

    >>> from mivhead.backbones import load_backbone
    >>> measure_backbone(load_backbone("efficientnet_lite0")).total / 1e9 < 0.4
    True
    """
    from torch import ops
    from torch.utils.flop_counter import FlopCounterMode

    spatial = 0

    def convolution(
        _: Any, w: Sequence[int], *__: Any, out_shape: Sequence[int], **___: Any
    ) -> int:
        nonlocal spatial
        flops = 2 * math.prod(out_shape) * math.prod(w[1:])
        spatial += flops if tuple(w[2:]) == (3, 3) else 0
        return flops

    size = backbone.preset.preprocessing.size
    image = Image.new("RGB", (size, size))  # what extraction gives every backbone
    counter = FlopCounterMode(display=False, custom_mapping={ops.aten.convolution: convolution})
    with counter:
        backbone.extract([image])
    counts = counter.get_flop_counts().get("Global", {})
    by_name = {str(op): flops for op, flops in counts.items()}
    between = sum(f for name, f in by_name.items() if "bmm" in name or "attention" in name)
    total = sum(by_name.values())
    return BackboneWork(total / 2, spatial / 2, between / 2) if total else None
