"""What is counted as work: of a task, of a backbone's pass, of an adaptation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mivhead.backbones.base import Backbone

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
        """Leave one of several folds out, as `mivhead.heldout.deal` deals them.

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
