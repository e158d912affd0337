"""Accuracy of a model on labelled images: overall, per class, and which classes it confuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import wilson_interval
from mivhead._util.text import percent
from mivhead.decision import NONE
from mivhead.errors import ImageError, InputError
from mivhead.extraction.pipeline import LoadedImage
from mivhead.features import FeatureTable
from mivhead.images.imageset import ImageSet, Skipped, check_images
from mivhead.images.sources import open_labelled
from mivhead.model.shots import digests
from mivhead.prediction import DecisionCounts, of_hundred

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.model import Model
    from mivhead.prediction import Prediction


@dataclass(frozen=True)
class Score:
    """How many images of a set were predicted correctly."""

    images: int
    right: int  # images whose predicted class is their label

    @property
    def accuracy(self) -> float:
        """Share of correct predictions; NaN if there are no images."""
        return self.right / self.images if self.images else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the accuracy."""
        return wilson_interval(self.right, self.images)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        return {**asdict(self), "accuracy": self.accuracy, "interval": list(self.interval)}


@dataclass(frozen=True)
class Mistake:
    """An image whose predicted class differs from its label."""

    id: str  # name of the image
    label: str
    predicted: str
    probability: float  # probability of the predicted class
    # Whether the label of a shot is likely to be wrong; False for an image that is just hard
    mislabelled: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Predictions of a model compared with the labels of some images.

    Examples
    --------
    >>> Evaluation(("cat", "dog"), np.array([[19, 1], [1, 19]]))
    <Evaluation: 38 of 40 images right, 95.0% (95% interval 83.5% to 98.6%)>
    """

    classes: tuple[str, ...]  # of the model
    confusion: NDArray[np.int64]  # (class, class): images by true class and predicted class
    mistakes: tuple[Mistake, ...] = ()  # misclassified images, the most confident mistake first
    skipped: tuple[Skipped, ...] = ()  # unreadable images that were left out
    shots: tuple[str, ...] = ()  # images that were left out, as the model was trained on them
    # How many images got a name, and how many images of other things; None if there were none
    decisions: DecisionCounts | None = None
    foreign: DecisionCounts | None = None

    def __repr__(self) -> str:
        """Summarise the accuracy in one line."""
        score = self.score
        low, high = (f"{100 * bound:.1f}%" for bound in score.interval)
        return (
            f"<Evaluation: {score.right} of {score.images} images right, "
            f"{100 * score.accuracy:.1f}% (95% interval {low} to {high})>"
        )

    def __str__(self) -> str:
        """Say what people get, then the accuracy."""
        score, text = self.score, ""
        if (counts := self.decisions) is not None and counts.wrong is not None:
            right, wrong = counts.named - counts.wrong, counts.wrong
            text = f"{of_hundred(right / counts.images, wrong / counts.images, new=False)}\n"
        low, high = map(percent, score.interval)
        return (
            f"{text}Accuracy {percent(score.accuracy, 1)}: {score.right:,} of {score.images:,} "
            f"photos right (95% interval {low} to {high})."
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        return {
            **self.score.as_json(),
            "classes": {name: score.as_json() for name, score in self.per_class.items()},
            "confusions": [
                {"count": count, "label": true, "predicted": predicted}
                for count, true, predicted in self.confusions
            ],
            "mistakes": [
                {"file": mistake.id}
                | {key: getattr(mistake, key) for key in ("label", "predicted", "probability")}
                for mistake in self.mistakes
            ],
            "decisions": None if self.decisions is None else asdict(self.decisions),
            "foreign": None if self.foreign is None else asdict(self.foreign),
            "skipped": [asdict(image) for image in self.skipped],
            "shots": list(self.shots),
        }

    @property
    def score(self) -> Score:
        """Score over all classes."""
        return Score(int(self.confusion.sum()), int(np.trace(self.confusion)))

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return self.score.accuracy

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the accuracy."""
        return self.score.interval

    @property
    def per_class(self) -> dict[str, Score]:
        """Score of every class that has images."""
        totals = self.confusion.sum(axis=1)
        return {
            name: Score(int(totals[i]), int(self.confusion[i, i]))
            for i, name in enumerate(self.classes)
            if totals[i]
        }

    @property
    def confusions(self) -> list[tuple[int, str, str]]:
        """Count, true class and predicted class of every confusion, the most frequent first."""
        confusions = [
            (int(self.confusion[i, j]), self.classes[i], self.classes[j])
            for i, j in zip(*np.nonzero(self.confusion), strict=True)
            if i != j
        ]
        return sorted(confusions, key=lambda confusion: -confusion[0])

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the confusion matrix, to a .png, .svg or .pdf file if a path is given."""
        from mivhead.diagnostics.pictures import draw_confusion

        return draw_confusion(self.confusion, self.classes, path)


def evaluate(
    model: Model | ExportedClassifier,
    source: str | Path | ImageSet | FeatureTable,
    *,
    skip_bad: bool = False,
    include_shots: bool = False,
    foreign: Any = None,
    **decision: Any,
) -> Evaluation:
    """Measure a model on labelled images that it was not trained on.

    Images that are among the shots of the model, by their content, are left out.

    Parameters
    ----------
    model : FewShotClassifier or ExportedClassifier
        A fitted model.
    source : path, ImageSet or FeatureTable
        A folder with one folder per class, a zip archive of one, a CSV file of paths and labels;
        or images or features that carry labels.
    skip_bad : bool, default=False
        Leave out unreadable images instead of raising an error.
    include_shots : bool, default=False
        Measure images that the model was trained on as well, although that says little about new
        images.
    foreign : images, features or None, default=None
        Images of other things, without labels, to measure how many of them the model rejects.
    **decision : dict
        `reject`, `max_errors` and `class_prior`, as for `classify`.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import FewShotClassifier
    >>> from mivhead.images.imageset import from_images, label_images
    >>> dark, light = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    >>> model = FewShotClassifier(threshold=0).fit([dark, light], ["night", "day"])
    >>> grey, pale = light // 4, light - 20
    >>> test = label_images(from_images([dark, grey, pale]), ["night", "night", "day"])
    >>> result = evaluate(model, test)
    >>> result.score, result.shots
    (Score(images=2, right=2), ('image 0',))
    """
    name = "The image set" if isinstance(source, ImageSet) else "The table"
    if isinstance(source, str | Path):
        name, source = str(source), open_labelled(source, min_classes=1)
    _check_labels(model, source.labels, name)
    skipped: list[Skipped] = []
    if isinstance(source, ImageSet) and skip_bad:
        skipped = check_images(source)
        source = source.without(skipped)
    seen = set() if include_shots else _rows_of_shots(model, source)
    shots = tuple(source.ids[row] for row in sorted(seen))
    rows = [row for row in range(len(source)) if row not in seen]
    if shots and not rows:
        raise InputError(
            f"The model was trained on all of the {len(shots)} images, so its accuracy on them "
            "says nothing about new images: give other images."
        )
    if seen:
        source = source.take(rows) if isinstance(source, ImageSet) else source[rows]
    labels, predictions = list(map(str, source.labels or ())), model.classify(source, **decision)
    names, other = tuple(map(str, model.classes_.tolist())), model.thresholds(**decision).other
    other_name = None if other is None else names[other]
    # Images of the class that stands for everything else are foreign.
    strange = [p for p, label in zip(predictions, labels, strict=True) if label == other_name]
    predictions = [p for p, label in zip(predictions, labels, strict=True) if label != other_name]
    labels = [label for label in labels if label != other_name]
    if foreign is not None:
        strange += model.classify(foreign, skip_bad=skip_bad, **decision)
    confusion, mistakes = _compare(labels, predictions, names, other_name)
    decisions = DecisionCounts.count(predictions, labels)
    return Evaluation(
        names,
        confusion,
        mistakes,
        tuple(skipped),
        shots,
        decisions if labels else None,
        DecisionCounts.count(strange) if strange else None,
    )


def _check_labels(
    model: Model | ExportedClassifier, labels: Sequence[str] | None, name: str
) -> None:
    """Raise an error if there are no labels, or if the model does not know one of them."""
    if labels is None:
        raise InputError(f"{name} has no labels to compare the predictions with.")
    known = list(map(str, model.classes_.tolist()))
    if unknown := sorted(set(map(str, labels)) - set(known)):
        raise InputError(
            f"{name} has the class {unknown[0]!r}, which the model does not know (its classes are "
            f"{', '.join(known)}): rename the folder or leave it out."
        )


def _rows_of_shots(model: Model | ExportedClassifier, source: ImageSet | FeatureTable) -> set[int]:
    """Return the rows of images or features that the model was trained on."""
    shots = getattr(model, "shots_", None)
    if shots is None:  # an exported model
        return set()
    known = set(shots.hashes)
    if isinstance(source, FeatureTable):
        known.update(digests(shots.features))
        hashes = source.hashes or digests(source.features)
        return {row for row, digest in enumerate(hashes) if digest in known}
    rows = set()
    for row, image in enumerate(source.sources):
        with suppress(ImageError):  # reported where the image is decoded
            if LoadedImage(image).hash in known:
                rows.add(row)
    return rows


def _compare(
    labels: Sequence[str],
    predictions: Sequence[Prediction],
    names: Sequence[str],
    other: str | None,
) -> tuple[NDArray[np.int64], tuple[Mistake, ...]]:
    """Count predictions by label and predicted class, and list the wrong ones.

    "None of these" counts as a prediction of the class `other`, if there is one.
    """
    row_of = {name: row for row, name in enumerate(names)}
    confusion = np.zeros((len(names), len(names)), np.int64)
    mistakes = []
    for label, prediction in zip(labels, predictions, strict=True):
        predicted = str(prediction.label)
        if other is not None and prediction.decision == NONE:
            predicted = other
        confusion[row_of[label], row_of[predicted]] += 1
        if predicted != label:
            mistakes.append(Mistake(prediction.id, label, predicted, prediction.probability))
    return confusion, tuple(sorted(mistakes, key=lambda mistake: -mistake.probability))
