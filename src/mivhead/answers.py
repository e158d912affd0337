"""What a classifier says of images: names and probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prediction:
    """What the classifier says of one image."""

    id: str
    label: Any
    probability: float
    probabilities: dict[Any, float]  # by falling probability


def predictions(
    ids: Sequence[str], classes: NDArray[Any], probabilities: NDArray[np.floating[Any]]
) -> list[Prediction]:
    """Name images from their probabilities (image, class).

    >>> predictions(["a.jpg"], np.array(["cat", "dog"]), np.array([[0.25, 0.75]]))[0].label
    'dog'
    """
    found = []
    names = classes.tolist()
    for id_, row in zip(ids, probabilities, strict=True):
        ranked = {names[i]: float(row[i]) for i in np.argsort(-row, kind="stable")}
        best = next(iter(ranked))
        found.append(Prediction(id_, best, ranked[best], ranked))
    return found
