"""`Prediction`: what a model says about one image.

Shared by fitted models (`mivhead.fewshot`) and exported ones, which run without PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Parameters
    ----------
    id : str
        Name of the image, such as its path.
    label : object
        The most probable class.
    probability : float
        Its probability.
    probabilities : dict
        Probabilities of all classes, in descending order.
    """

    id: str
    label: Any
    probability: float
    probabilities: dict[Any, float]


def predictions(
    ids: Sequence[str], classes: NDArray[Any], probabilities: NDArray[np.floating[Any]]
) -> list[Prediction]:
    """Turn probabilities (image, class) into predictions.

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
