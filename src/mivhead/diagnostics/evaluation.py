"""Accuracy of a model on labelled images: overall, per class, and which classes it confuses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.text import html_table
from mivhead.errors import ImageError, InputError
from mivhead.images.imageset import ImageSet, Skipped, check_images
from mivhead.images.sources import open_labelled
from mivhead.model.decision import NONE, Thresholds
from mivhead.model.prediction import DecisionCounts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mivhead.features import FeatureTable
    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.prediction import Prediction

MAX_NAMED = 5  # classes that an error lists
MAX_ROWS = 50  # of a table in a notebook


@dataclass(frozen=True)
class Score:
    """How many images of a set were predicted correctly."""

    images: int  # number of images
    right: int  # number of images whose predicted class is their label

    @property
    def accuracy(self) -> float:
        """Share of correct predictions; NaN if there are no images."""
        return self.right / self.images if self.images else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy."""
        return wilson_interval(self.right, self.images)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document.

        Returns
        -------
        dict
        """
        return {**asdict(self), "accuracy": self.accuracy, "interval": list(self.interval)}


@dataclass(frozen=True)
class Mistake:
    """An image whose predicted class differs from its label."""

    id: str  # name of the image
    # Its label and the predicted class
    label: str
    predicted: str
    probability: float  # probability of the predicted class
    # Whether the label of a shot is likely to be wrong; False for an image that is just hard
    mislabelled: bool = False

    @property
    def confident(self) -> bool:
        """Whether the probability is more than one half. Deprecated: see `mislabelled`."""
        warnings.warn(
            "Mistake.confident is deprecated: mislabelled says whether a label is likely wrong.",
            FutureWarning,
            stacklevel=2,
        )
        return self.probability > 0.5


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """What thresholds of decisions trade for each other."""

    # (image,): probability of the predicted class of every image of a known class
    probabilities: NDArray[np.floating[Any]]
    right: NDArray[np.bool_]  # (image,): whether it is the true class
    # (image,) or None: how unlike the shots these images are; None if the model cannot tell
    unknown: NDArray[np.floating[Any]] | None
    # (foreign image,): how unlike the shots images of other things are; empty if there were none
    foreign: NDArray[np.floating[Any]]
    thresholds: Thresholds  # the default thresholds of the model

    def risk_coverage(self) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
        """Return coverage and risk: of the surest images, their share, and how many are wrong.

        >>> p, right = np.array([0.9, 0.6, 0.8]), np.array([True, False, True])
        >>> coverage, risk = Tradeoff(p, right, None, p[:0], Thresholds()).risk_coverage()
        >>> coverage.round(2).tolist(), risk.round(2).tolist()
        ([0.33, 0.67, 1.0], [0.0, 0.0, 0.33])
        """
        wrong = ~self.right[np.argsort(-self.probabilities, kind="stable")]
        count = np.arange(1, len(wrong) + 1)
        return count / len(wrong), np.cumsum(wrong) / count

    def roc(self) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
        """Return the shares of known and of foreign images that are rejected, per threshold."""
        if self.unknown is None or not len(self.foreign):
            raise InputError("A ROC curve needs foreign images, and a model that can reject them.")
        cuts = np.concatenate([[np.inf], -np.sort(-np.unique([*self.unknown, *self.foreign]))])
        below = np.nextafter(cuts, -np.inf)  # a score at the cut is rejected
        known = (self.unknown[None] > below[:, None]).mean(axis=1)
        foreign = (self.foreign[None] > below[:, None]).mean(axis=1)
        return known, foreign

    @property
    def auroc(self) -> float:
        """Probability that a foreign image has the larger score than a known one."""
        known, foreign = self.roc()
        return float((np.diff(known) * (foreign[1:] + foreign[:-1]) / 2).sum())

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the risk-coverage curve and, if there are foreign images, the ROC curve.

        Parameters
        ----------
        path : str, Path or None, default=None
            A .png, .svg or .pdf file to write. None writes nothing.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it.
        """
        from mivhead.diagnostics.pictures import draw_tradeoff

        return draw_tradeoff(self, path)


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Predictions of a model compared with the labels of some images.

    Parameters
    ----------
    classes : sequence of str
        All classes of the model.
    confusion : array of shape (class, class)
        Number of images by true class (rows) and predicted class (columns).
    mistakes : tuple of Mistake, default=()
        The misclassified images, the most confident mistake first.
    skipped : tuple of Skipped, default=()
        Unreadable images that were left out.
    images : ImageSet or None, default=None
        The images, to show the misclassified ones; None if features were evaluated.
    shots : tuple of str, default=()
        Images that the model was trained on, and that were therefore left out.
    tradeoff : Tradeoff or None, default=None
        How many images get a name, and how many of the names are wrong, for all thresholds.
    decisions, foreign : DecisionCounts or None, default=None
        How many images got a name at the thresholds that were used, and how many images of other
        things; None if there were none.

    Examples
    --------
    >>> Evaluation(("cat", "dog"), np.array([[19, 1], [1, 19]]))
    <Evaluation: 38 of 40 images right, 95.0 % (95 % interval 83.5 % to 98.6 %)>
    """

    classes: tuple[str, ...]
    confusion: NDArray[np.int64]
    mistakes: tuple[Mistake, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    images: ImageSet | None = None
    shots: tuple[str, ...] = ()
    tradeoff: Tradeoff | None = None
    decisions: DecisionCounts | None = None
    foreign: DecisionCounts | None = None

    def __repr__(self) -> str:
        """Summarise the accuracy in one line."""
        return f"<Evaluation: {summarise(self.score, 'images')}>"

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document.

        Returns
        -------
        dict
        """
        return {
            **self.score.as_json(),
            "classes": {name: score.as_json() for name, score in self.per_class.items()},
            "confusions": [
                {"count": count, "label": true, "predicted": predicted}
                for count, true, predicted in self.confusions
            ],
            "mistakes": [
                {
                    "file": each.id,
                    "label": each.label,
                    "predicted": each.predicted,
                    "probability": each.probability,
                }
                for each in self.mistakes
            ],
            "decisions": None if self.decisions is None else asdict(self.decisions),
            "foreign": None if self.foreign is None else asdict(self.foreign),
            "skipped": [asdict(each) for each in self.skipped],
            "shots": list(self.shots),
        }

    def _repr_html_(self) -> str:
        """Make tables for a notebook: the accuracy per class, and the misclassified images."""
        text = f"<p><b>Accuracy</b>: {summarise(self.score, 'images')}</p>"
        if self.shots:
            text += f"<p>{len(self.shots)} images were left out: the model was trained on them.</p>"
        rows = [
            (name, each.images, each.right, f"{100 * each.accuracy:.1f} %")
            for name, each in self.per_class.items()
        ]
        text += html_table(("class", "images", "right", "accuracy"), rows)
        return text + mistakes_table("Misclassified images", self.mistakes)

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
        """95 % confidence interval of the accuracy."""
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
        found = [
            (int(self.confusion[i, j]), self.classes[i], self.classes[j])
            for i, j in zip(*np.nonzero(self.confusion), strict=True)
            if i != j
        ]
        return sorted(found, key=lambda each: -each[0])

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the confusion matrix.

        Parameters
        ----------
        path : str, Path or None, default=None
            A .png, .svg or .pdf file to write. None writes nothing.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it.
        """
        from mivhead.diagnostics.pictures import draw_confusion

        return draw_confusion(self.confusion, self.classes, path)

    def plot_tradeoff(self, path: str | Path | None = None) -> Figure:
        """Draw what the thresholds of decisions trade; see `Tradeoff.plot`.

        Parameters
        ----------
        path : str or Path, default=None
            Where to write the drawing: a .png, .svg or .pdf file. None writes nothing.

        Returns
        -------
        matplotlib.figure.Figure
        """
        assert self.tradeoff is not None, "`evaluate` sets it"
        return self.tradeoff.plot(path)

    def plot_mistakes(self, path: str | Path | None = None, *, count: int = 24) -> Figure:
        """Draw the misclassified images, the most confident mistakes first.

        Parameters
        ----------
        path : str, Path or None, default=None
            A .png, .svg or .pdf file to write. None writes nothing.
        count : int, default=24
            Maximum number of images.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it.
        """
        from mivhead.diagnostics.pictures import draw_mistakes

        if self.images is None:
            raise InputError("Features were evaluated, so there are no images to draw.")
        row_of = {id_: row for row, id_ in enumerate(self.images.ids)}
        drawn = self.mistakes[:count]
        pictures = [self.images.load(row_of[each.id]) for each in drawn]
        return draw_mistakes(drawn, pictures, path, total=len(self.mistakes))


def summarise(score: Score, noun: str) -> str:
    """Write a score and its interval in words."""
    if not score.images:
        return f"no {noun}"
    low, high = (f"{100 * bound:.1f} %" for bound in score.interval)
    return (
        f"{score.right} of {score.images} {noun} right, {100 * score.accuracy:.1f} % "
        f"(95 % interval {low} to {high})"
    )


def mistakes_table(title: str, mistakes: Sequence[Mistake]) -> str:
    """Make an HTML table of mistakes; nothing if there are none."""
    if not mistakes:
        return ""
    rows = [
        (m.id, m.label, m.predicted, f"{100 * m.probability:.0f} %") for m in mistakes[:MAX_ROWS]
    ]
    more = len(mistakes) - len(rows)
    note = f"<p>... and {more:,} more</p>" if more else ""
    header = ("file", "label", "predicted", "probability")
    return f"<p><b>{escape(title)}</b></p>{html_table(header, rows)}{note}"


def evaluate(
    model: FewShotClassifier | ExportedClassifier,
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

    Returns
    -------
    Evaluation
        Accuracy with its interval, per class too, confusion matrix and misclassified images.

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
    if not isinstance(source, str | Path | ImageSet):
        _check_labels(model, source.labels, "The table")
        seen = set() if include_shots else _shots_in_table(model, source)
        chosen = [row for row in range(len(source)) if row not in seen]
        left_out = tuple(source.ids[row] for row in sorted(seen))
        _check_left(chosen, left_out)
        table = source if not seen else _take(source, chosen)
        labels, skipped, images = table.labels or (), [], None
        predictions = model.classify(table, **decision)
    else:
        images = source if isinstance(source, ImageSet) else open_labelled(source, min_classes=1)
        name = "The image set" if isinstance(source, ImageSet) else str(source)
        _check_labels(model, images.labels, name)
        skipped = check_images(images) if skip_bad else []
        images = images.without(skipped)
        seen = set() if include_shots else _shots_in_images(model, images)
        left_out = tuple(images.ids[row] for row in sorted(seen))
        images = images.take(row for row in range(len(images)) if row not in seen)
        _check_left(images.sources, left_out, skipped)
        labels, predictions = images.labels or (), model.classify(images, **decision)
    thresholds, names = model.thresholds(**decision), model.classes_.tolist()
    compared = compare_predictions(labels, predictions, names, skipped, other=thresholds.other)
    # Images of the class that stands for everything else are foreign.
    other = None if thresholds.other is None else str(names[thresholds.other])
    pairs = list(zip(map(str, labels), predictions, strict=True))
    known = [(label, each) for label, each in pairs if label != other]
    strange = [each for label, each in pairs if label == other]
    if foreign is not None:
        strange += model.classify(foreign, skip_bad=skip_bad, **decision)
    own = [each for _, each in known]
    return replace(
        compared,
        images=images,
        shots=left_out,
        tradeoff=_tradeoff(known, strange, thresholds),
        decisions=DecisionCounts.count(own, [label for label, _ in known]) if own else None,
        foreign=DecisionCounts.count(strange) if strange else None,
    )


def _tradeoff(
    known: Sequence[tuple[str, Prediction]], strange: Sequence[Prediction], thresholds: Thresholds
) -> Tradeoff:
    scores = [each.unknown for _, each in known]
    return Tradeoff(
        np.asarray([each.probability for _, each in known]),
        np.asarray([str(each.label) == label for label, each in known], bool),
        None if None in scores else np.asarray(scores, float),
        np.asarray([each.unknown for each in strange if each.unknown is not None], float),
        thresholds,
    )


def _shots_in_images(model: FewShotClassifier | ExportedClassifier, images: ImageSet) -> set[int]:
    """Return the rows of the images that the model was trained on."""
    shots = getattr(model, "shots_", None)
    if shots is None:  # an exported model, or one that tunes its backbone
        return set()
    from mivhead.extraction.pipeline import LoadedImage

    known, found = set(shots.hashes), set()
    for row, image in enumerate(images.sources):
        with suppress(ImageError):  # reported where the image is decoded
            if LoadedImage(image).hash in known:
                found.add(row)
    return found


def _shots_in_table(model: FewShotClassifier | ExportedClassifier, table: FeatureTable) -> set[int]:
    """Return the rows of the features that the model was trained on."""
    shots = getattr(model, "shots_", None)
    if shots is None:
        return set()
    from mivhead.model.shots import digests

    known = {*shots.hashes, *digests(shots.features)}
    hashes = getattr(table, "hashes", None) or digests(table.features)
    return {row for row, each in enumerate(hashes) if each in known}


def _take(table: FeatureTable, rows: list[int]) -> FeatureTable:
    return replace(
        table,
        features=table.features[np.array(rows)],
        ids=tuple(table.ids[row] for row in rows),
        labels=tuple((table.labels or ())[row] for row in rows),
        views=None,
        view_of=None,
        hashes=None,
        pictures=None,
    )


def _check_left(chosen: Sequence[Any], shots: Sequence[str], skipped: Sequence[Any] = ()) -> None:
    if not len(chosen) and shots:
        which = "readable images" if skipped else "images"
        raise InputError(
            f"The model was trained on all of the {len(shots)} {which}, so its accuracy on them "
            "says nothing about new images: give other images, or measure these with "
            "--include-shots (include_shots=True)."
        )


def compare_predictions(
    labels: Sequence[Any],
    predictions: Sequence[Prediction],
    classes: Sequence[Any],
    skipped: Sequence[Skipped] = (),
    *,
    other: int | None = None,
) -> Evaluation:
    """Count predictions by label and predicted class.

    "None of these" counts as a prediction of class number `other`, if there is one.
    """
    names = tuple(map(str, classes))
    row_of = {name: row for row, name in enumerate(names)}
    confusion = np.zeros((len(names), len(names)), np.int64)
    mistakes = []
    for label, each in zip(map(str, labels), predictions, strict=True):
        foreign = other is not None and each.decision == NONE
        predicted = names[other] if foreign else str(each.label)  # type: ignore[index]  # not None
        confusion[row_of[label], row_of[predicted]] += 1
        if predicted != label:
            mistakes.append(Mistake(each.id, label, predicted, each.probability))
    mistakes.sort(key=lambda mistake: -mistake.probability)
    return Evaluation(names, confusion, tuple(mistakes), tuple(skipped))


def wilson_interval(successes: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion, or NaNs if there were no trials.

    It remains valid for few trials and for proportions near 0 or 1.

    References
    ----------
    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal
    of the American Statistical Association 22, 1927.

    Examples
    --------
    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    # scipy's binomtest(...).proportion_ci("wilson") runs an exact test first: 5 ms per class.
    if trials == 0:
        return math.nan, math.nan
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low, high = (centre - half) / scale, (centre + half) / scale
    # Exact at the ends, where rounding would turn 100 % into ">99 %".
    return low if successes > 0 else 0.0, high if successes < trials else 1.0


def _check_labels(
    model: FewShotClassifier | ExportedClassifier, labels: Sequence[str] | None, name: str
) -> Sequence[str]:
    """Raise an error if there are no labels, or if the model does not know one of them."""
    if labels is None:
        raise InputError(f"{name} has no labels to compare the predictions with.")
    known = [str(each) for each in model.classes_.tolist()]
    unknown = sorted(set(map(str, labels)) - set(known))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        listed = ", ".join(known[:MAX_NAMED]) + (", ..." if len(known) > MAX_NAMED else "")
        raise InputError(
            f"{name} has the class {unknown[0]!r}{more}, which the model does not know (its "
            f"classes are {listed}): rename the folder or leave it out."
        )
    return labels
