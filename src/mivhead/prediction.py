"""`Prediction`: what a model says about one image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.text import one_line
from mivhead.decision import NONE, UNSURE, Thresholds

SHOWN = 3  # classes that the short form of a prediction names


@dataclass(frozen=True, repr=False)
class Prediction:
    """The prediction for one image.

    Parameters
    ----------
    id : str
        Name of the image, such as its path.
    label : object
        The most probable class; never the class that stands for everything else.
    probability : float
        Its probability.
    probabilities : dict
        Probabilities of all classes, in descending order.
    decision : object, default=label
        The class if the model is sure enough of it, `"unsure"` if it may be another one, or
        `"none of these"` if the image is unlike all shots.
    unknown : float or None, default=None
        How unlike the shots the image is: larger is more unlike. None if the model cannot tell.
    """

    id: str
    label: Any
    probability: float
    probabilities: dict[Any, float]
    decision: Any = None
    unknown: float | None = None

    def __post_init__(self) -> None:
        if self.decision is None:  # no thresholds: the class in any case
            object.__setattr__(self, "decision", self.label)

    def top(self, count: int) -> list[tuple[Any, float]]:
        """Return the most probable classes with their probabilities, in descending order.

        >>> Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25}).top(1)
        [('dog', 0.75)]
        """
        return list(islice(self.probabilities.items(), count))

    @property
    def unlike(self) -> str:
        """What to say of an image that is none of these; its probabilities say nothing."""
        return f"unlike all your photos; closest: {self.label}"

    def as_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values for a JSON document, with the `top` most probable classes.

        >>> sorted(Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25}).as_json())
        ['closest', 'decision', 'file', 'probability', 'top', 'unknown']
        """
        ranked = islice(self.probabilities.items(), top)
        return {
            "file": self.id,
            "decision": self.decision,
            "closest": self.label,
            "probability": self.probability,
            "unknown": self.unknown,
            "top": [{"label": label, "probability": p} for label, p in ranked],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Prediction:
        """Read what `as_json` wrote."""
        return cls(
            document["file"],
            document["closest"],
            document["probability"],
            {ranked["label"]: ranked["probability"] for ranked in document["top"]},
            document["decision"],
            document["unknown"],
        )

    def __repr__(self) -> str:
        """Name the image and the most probable classes.

        >>> Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25})
        <Prediction of 'a.jpg': dog 75.0%, cat 25.0%>
        """
        named = [f"{label} {100 * p:.1f}%" for label, p in self.top(SHOWN)]
        more = len(self.probabilities) - len(named)
        listed = ", ".join(named + [f"{more} more"] * (more > 0))
        if self.decision == NONE:
            listed = self.unlike
        decided = "" if self.decision == self.label else f"{self.decision}; "
        return one_line(f"<Prediction of {self.id!r}: {decided}{listed}>")


@dataclass(frozen=True)
class DecisionCounts:
    """How many of some images got a name."""

    # Number of images, and how many of them were named, "unsure" and "none of these"
    images: int
    named: int
    unsure: int
    none: int
    # How many of the names are not the label of the image; None if there are no labels
    wrong: int | None = None

    @classmethod
    def count(
        cls, predictions: Sequence[Prediction], labels: Sequence[Any] | None = None
    ) -> DecisionCounts:
        """Count the decisions of predictions; with labels, the wrong names too.

        >>> sure = Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25})
        >>> DecisionCounts.count([sure, sure], ["dog", "cat"])
        DecisionCounts(images=2, named=2, unsure=0, none=0, wrong=1)
        """
        decisions = [prediction.decision for prediction in predictions]
        unsure, none = decisions.count(UNSURE), decisions.count(NONE)
        wrong = None
        if labels is not None:
            pairs = zip(decisions, labels, strict=True)
            wrong = sum(str(name) not in (UNSURE, NONE, str(label)) for name, label in pairs)
        return cls(len(decisions), len(decisions) - unsure - none, unsure, none, wrong)


def of_hundred(right: float, wrong: float, *, new: bool = True) -> str:
    """Say what happens to 100 photos, from the fractions that get the right name and a wrong one.

    >>> of_hundred(0.62, 0.05)
    'Of 100 new photos like these, about 62 get the right name, 5 a wrong one, 33 are left to you.'
    """
    named, mistaken = round(100 * right), round(100 * wrong)
    rest = max(0, 100 - named - mistaken)
    if new:
        return (
            f"Of 100 new photos like these, about {named} get the right name, {mistaken} a wrong "
            f"one, {rest} are left to you."
        )
    return f"Of 100 photos, {named} got the right name, {mistaken} a wrong one, {rest} none."


def predictions(
    ids: Sequence[str],
    classes: NDArray[Any],
    probabilities: NDArray[np.floating[Any]],
    unknown: NDArray[np.floating[Any]] | None = None,
    thresholds: Thresholds | None = None,
) -> list[Prediction]:
    """Turn probabilities (image, class), and scores (image,) of unknown images, into predictions.

    >>> classes, probabilities = np.array(["cat", "dog"]), np.array([[0.25, 0.75]])
    >>> predictions(["a.jpg"], classes, probabilities)[0].decision
    'dog'
    >>> strict = Thresholds(probability=(0.8, 0.8))
    >>> predictions(["a.jpg"], classes, probabilities, None, strict)[0].decision
    'unsure'
    """
    made = []
    names = classes.tolist()
    thresholds = thresholds or Thresholds()
    other = None if thresholds.other is None else names[thresholds.other]
    adjusted = thresholds.adjust(probabilities)
    for i, (id_, row) in enumerate(zip(ids, adjusted, strict=True)):
        ranked = {names[c]: float(row[c]) for c in np.argsort(-row, kind="stable")}
        closest = next(name for name in ranked if name != other)
        score = None if unknown is None else float(unknown[i])
        decision = thresholds.decide(row, score, names)
        made.append(Prediction(id_, closest, ranked[closest], ranked, decision, score))
    return made
