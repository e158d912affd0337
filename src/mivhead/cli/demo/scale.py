"""How much the demo does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Numbers of classes, of images per class, and of comparisons."""

    classes: int = 10
    shots: int = 5  # to learn from
    new: int = 20  # to predict
    queries: int = 10  # to test on in each comparison
    tasks: int = 10  # comparisons


FULL = Scale()
QUICK = Scale(new=15, tasks=3)
