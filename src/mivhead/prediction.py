"""`Prediction`: what a model says about one image.

Shared by fitted models (`mivhead.fewshot`) and exported ones, which run without PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.decision import Thresholds


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
    decision : object
        The class if the model is sure enough of it, `"unsure"` if other classes are plausible too,
        or `"none of these"` if the image is unlike all shots.
    unknown : float or None, default=None
        How unlike the shots the image is: larger is more unlike. None if the model cannot tell.
    prediction_set : tuple or None, default=None
        Classes that hold the true one with the coverage that was asked for, the most probable
        first. None if no coverage was asked for.
    """

    id: str
    label: Any
    probability: float
    probabilities: dict[Any, float]
    decision: Any = None
    unknown: float | None = None
    prediction_set: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if self.decision is None:  # no thresholds: the class in any case
            object.__setattr__(self, "decision", self.label)


def predictions(
    ids: Sequence[str],
    classes: NDArray[Any],
    probabilities: NDArray[np.floating[Any]],
    unknown: NDArray[np.floating[Any]] | None = None,
    thresholds: Thresholds | None = None,
) -> list[Prediction]:
    """Turn probabilities (image, class), and scores of unknown images, into predictions.

    Parameters
    ----------
    ids : sequence of str
        One per image.
    classes : array of shape (class,)
        The labels.
    probabilities : array of shape (image, class)
        Their probabilities.
    unknown : array of shape (image,) or None, default=None
        How unlike the shots each image is.
    thresholds : Thresholds or None, default=None
        When not to give a name; None: always give one.

    Examples
    --------
    >>> classes, probabilities = np.array(["cat", "dog"]), np.array([[0.25, 0.75]])
    >>> predictions(["a.jpg"], classes, probabilities)[0].decision
    'dog'
    >>> strict = Thresholds(probability=0.8)
    >>> predictions(["a.jpg"], classes, probabilities, None, strict)[0].decision
    'unsure'
    """
    found = []
    names = classes.tolist()
    thresholds = thresholds or Thresholds()
    for i, (id_, row) in enumerate(zip(ids, probabilities, strict=True)):
        ranked = {names[c]: float(row[c]) for c in np.argsort(-row, kind="stable")}
        best, probability = next(iter(ranked.items()))
        score = None if unknown is None else float(unknown[i])
        found.append(
            Prediction(
                id_,
                best,
                probability,
                ranked,
                thresholds.decide(best, probability, score),
                score,
                thresholds.select(ranked),
            )
        )
    return found
