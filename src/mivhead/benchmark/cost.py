"""GFLOPs of an adaptation: honestly, and by the paper's rule.

Honestly: multiplications and additions of all convolutions, matrix products, attention, L1
distances, cosines and factorisations, forward and backward, in units of 10^9. By the paper's rule:
a multiply-add counts once, only matrix products and convolutions count, a training step is three
forward passes, and the unit is 2^30; with it ratios can be compared with the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mivhead.benchmark.cost_heads import Vectors, head_work
from mivhead.benchmark.cost_miv import miv_work
from mivhead.benchmark.cost_tuning import TUNING, tuning_work
from mivhead.benchmark.work import GIGA, PAPER_GIGA, BackboneWork, Episode, Work
from mivhead.classifier import MIVClassifier
from mivhead.features import Features
from mivhead.head.config import resolve_blocks
from mivhead.methods.ablation import MIVAblation
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
    if not settings.get("use_views", METHODS[method].uses_views):
        episode = Episode(episode.shots, (0,) * episode.ways)
    if isinstance(classifier, MIVClassifier):
        blocks = resolve_blocks(features, None if preset is None else preset.blocks)
        work = miv_work(blocks, classifier._recipe(), episode)
    elif isinstance(classifier, MIVAblation):
        blocks = resolve_blocks(classifier._select(features), classifier._presets(features))
        work = miv_work(blocks, classifier._recipe(), episode)
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
