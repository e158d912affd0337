"""GFLOPs of an adaptation: all arithmetic, by the paper's rule, and as the paper prints them.

All arithmetic: multiplications and additions of convolutions, matrix products, attention, L1
distances, cosines and factorisations, forward and backward, in units of 10^9. By the paper's rule:
a multiply-add counts once, only matrix products and convolutions count, a training step is three
forward passes, and the unit is 2^30. As the paper prints them: the same rule, applied to the
implementation of its authors, which does more work (`mivhead.methods.miv.authors_work`).

Every method counts its own work (`mivhead.methods.cost`); this module adds the backbone's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mivhead.backbones.base import Backbone, module_of
from mivhead.backbones.preset import Preset
from mivhead.features import Features
from mivhead.methods.cost import BackboneWork, TaskSize, Work
from mivhead.methods.miv import views_rule
from mivhead.methods.registry import get_method, make_method

GIGA = 1e9
PAPER_GIGA = 2.0**30


@dataclass(frozen=True)
class Cost:
    """GFLOPs of one adaptation, the backbone's passes included; None if they are not known."""

    gflops: float | None  # all arithmetic, in units of 10^9
    gflops_paper: float | None  # by the paper's rule, in units of 2^30
    # By the same rule for the authors' implementation: what the paper prints.
    gflops_authors: float | None


def count(
    method: str,
    features: Features,
    size: TaskSize,
    backbone: BackboneWork | None,
    *,
    preset: Preset | None = None,
    recipe: Any = None,
    params: Mapping[str, Any] | None = None,
    classifier: Any = None,
) -> Cost:
    """Count the adaptation of a method to a task.

    Only the shapes of the features matter. Views count for methods that use them. `backbone` is one
    image's pass (`measure_backbone`); None for a black box, whose work is not known and counts as
    nothing. A fitted `classifier` knows how many steps its solver took; without one, one is made.
    All values are None for a method that does not count its work.

    >>> import numpy as np
    >>> features, size = Features(np.ones((1, 64, 7, 7))), TaskSize((5, 5), (15, 15))
    >>> cost = count("miv", features, size, BackboneWork(4e8))
    >>> round(cost.gflops), round(cost.gflops_paper)
    (32, 15)
    """
    facts, given, made = get_method(method), dict(params or {}), classifier
    if made is None:
        made = make_method(method, preset=preset, recipe=recipe, random_state=0, **given)
    if views_rule(method, recipe, given) is None:
        size = size.without_views()
    passed = backbone or BackboneWork(0.0)
    work = facts.work(made, size, features, passed)
    # A method that tunes the backbone counts its passes itself.
    return _cost(work, 0.0 if facts.needs == "images" else size.images * passed.total)


def _cost(work: Work | None, frozen: float) -> Cost:
    """Add the multiply-adds of a frozen backbone's pass."""
    if work is None:
        return Cost(None, None, None)
    total = 2 * (work.products + frozen) + work.others
    authors = work.paper if work.authors is None else work.authors
    return Cost(total / GIGA, (work.paper + frozen) / PAPER_GIGA, (authors + frozen) / PAPER_GIGA)


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
        (module_of(backbone) or backbone).extract([image])
    counts = counter.get_flop_counts().get("Global", {})
    by_name = {str(op): flops for op, flops in counts.items()}
    between = sum(f for name, f in by_name.items() if "bmm" in name or "attention" in name)
    total = sum(by_name.values())
    return BackboneWork(total / 2, spatial / 2, between / 2) if total else None
