"""`Prediction`: what a model says about one image; `Predictions`: about several, as a table.

Shared by fitted models (`mivhead.model.fewshot`) and exported ones, which run without PyTorch.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from mivhead._util.optional import need
from mivhead._util.text import Html, html_table, one_line
from mivhead.model.decision import NONE, UNSURE, Thresholds

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN = 3  # classes that the short form of a prediction names
MAX_ROWS = 100  # of a table in a notebook
THUMBNAIL = 96  # pixels of its longer side; shown at half the size, for sharp screens


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

    def top(self, count: int) -> list[tuple[Any, float]]:
        """Return the most probable classes with their probabilities, in descending order.

        Parameters
        ----------
        count : int
            How many to return at most.

        Returns
        -------
        list of (label, probability)

        Examples
        --------
        >>> Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25}).top(1)
        [('dog', 0.75)]
        """
        return list(islice(self.probabilities.items(), count))

    def as_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values for a JSON document: the form that every door writes.

        Parameters
        ----------
        top : int or None, default=None
            Number of classes to include, the most probable first; None: all.

        Returns
        -------
        dict

        Examples
        --------
        >>> sorted(Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25}).as_json())
        ['decision', 'file', 'label', 'probability', 'top', 'unknown']
        """
        chosen = {} if self.prediction_set is None else {"set": list(self.prediction_set)}
        ranked = islice(self.probabilities.items(), top)
        return {
            "file": self.id,
            "label": self.label,
            "probability": self.probability,
            "decision": self.decision,
            "unknown": self.unknown,
            **chosen,
            "top": [{"label": label, "probability": p} for label, p in ranked],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Prediction:
        """Read what `as_json` wrote.

        Parameters
        ----------
        document : mapping
            With all keys of `as_json`; `set` may be missing.

        Returns
        -------
        Prediction
        """
        chosen = document.get("set")
        return cls(
            document["file"],
            document["label"],
            document["probability"],
            {each["label"]: each["probability"] for each in document["top"]},
            document["decision"],
            document["unknown"],
            None if chosen is None else tuple(chosen),
        )

    def to_frame(self) -> Any:
        """Return all classes and their probabilities as a pandas `DataFrame`.

        Returns
        -------
        pandas.DataFrame
            With the columns `label` and `probability`.
        """
        frame = need("pandas", "pandas").DataFrame
        return frame(self.probabilities.items(), columns=["label", "probability"])

    def __repr__(self) -> str:
        """Name the image and the most probable classes.

        >>> Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25})
        <Prediction of 'a.jpg': dog 75.0 %, cat 25.0 %>
        """
        named = [f"{label} {100 * p:.1f} %" for label, p in self.top(SHOWN)]
        more = len(self.probabilities) - len(named)
        listed = ", ".join(named + [f"{more} more"] * (more > 0))
        decided = "" if self.decision == self.label else f"{self.decision}; "
        return one_line(f"<Prediction of {self.id!r}: {decided}{listed}>")


class Predictions(list[Prediction]):
    """The predictions for several images: a list that a notebook shows as a table.

    Parameters
    ----------
    found : iterable of Prediction
        The predictions.
    load : callable or None, default=None
        Returns the image of a row, for thumbnails; None shows none.

    Examples
    --------
    >>> found = predictions(["a.jpg"], np.array(["cat", "dog"]), np.array([[0.25, 0.75]]))
    >>> Predictions(found)
    [<Prediction of 'a.jpg': dog 75.0 %, cat 25.0 %>]
    """

    def __init__(
        self, found: Iterable[Prediction], load: Callable[[int], Image] | None = None
    ) -> None:
        super().__init__(found)
        self._load = load

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        """Return a prediction or, for a slice, `Predictions`."""
        if not isinstance(key, slice):
            return super().__getitem__(key)
        rows = range(len(self))[key]
        load = None if self._load is None else partial(_load_row, self._load, rows)
        return Predictions(super().__getitem__(key), load)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the images out of pickles."""
        return Predictions, (list(self),)

    def to_frame(self, top: int = 1) -> Any:
        """Return a pandas `DataFrame` with one row per image.

        Parameters
        ----------
        top : int, default=1
            Number of classes per image. The columns are `file`, `decision`, `label` and
            `probability`, followed by `label_2`, `probability_2` and so on.

        Returns
        -------
        pandas.DataFrame
        """
        frame = need("pandas", "pandas").DataFrame
        top = min(top, max((len(each.probabilities) for each in self), default=1))
        columns = ["file", "decision"]
        for place in range(1, top + 1):
            number = "" if place == 1 else f"_{place}"
            columns += [f"label{number}", f"probability{number}"]
        rows = []
        for each in self:
            ranked = [value for pair in each.top(top) for value in pair]
            rows.append([each.id, each.decision, *ranked])
        return frame(rows, columns=columns)

    def _repr_html_(self) -> str:
        """Make a table for a notebook: thumbnail, file, class, probability, runners-up."""
        rows = [self._row(number, each) for number, each in enumerate(self[:MAX_ROWS])]
        more = len(self) - len(rows)
        note = f"<p>... and {more:,} more</p>" if more else ""
        pictures = [""] * (self._load is not None)
        return html_table([*pictures, "file", "class", "probability", "runners-up"], rows) + note

    def _row(self, number: int, prediction: Prediction) -> list[str]:
        cells: list[str] = [] if self._load is None else [Html(_thumbnail(self._load, number))]
        name = f"<b>{escape(str(prediction.decision))}</b>"
        if prediction.decision != prediction.label:
            name += f" ({escape(str(prediction.label))}?)"
        probability = prediction.probability
        meter = f'<meter value="{probability:.4f}" style="width:5em"></meter>'
        others = [f"{label} {100 * p:.1f} %" for label, p in prediction.top(SHOWN)[1:]]
        shown = Html(f"{meter} {100 * probability:.1f} %")
        return [*cells, prediction.id, Html(name), shown, ", ".join(others)]


def _load_row(load: Callable[[int], Image], rows: range, row: int) -> Image:
    return load(rows[row])


def _thumbnail(load: Callable[[int], Image], row: int) -> str:
    """Make an HTML image of a row; nothing if it can no longer be read."""
    try:
        picture = load(row).convert("RGB")
    except (OSError, ValueError):  # the file was moved, or an upload was closed
        return ""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    data = b64encode(buffer.getvalue()).decode()
    return f'<img src="data:image/jpeg;base64,{data}" style="max-height:{THUMBNAIL // 2}px">'


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
        cls, found: Sequence[Prediction], labels: Sequence[Any] | None = None
    ) -> DecisionCounts:
        """Count the decisions of predictions; with labels, the wrong names too.

        >>> sure = Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25})
        >>> DecisionCounts.count([sure, sure], ["dog", "cat"])
        DecisionCounts(images=2, named=2, unsure=0, none=0, wrong=1)
        """
        unsure = sum(each.decision == UNSURE for each in found)
        none = sum(each.decision == NONE for each in found)
        wrong = None
        if labels is not None:
            wrong = sum(
                each.decision not in (UNSURE, NONE) and str(each.decision) != str(label)
                for each, label in zip(found, labels, strict=True)
            )
        return cls(len(found), len(found) - unsure - none, unsure, none, wrong)


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
    other = None if thresholds.other is None else names[thresholds.other]
    adjusted = thresholds.adjust(probabilities)
    for i, (id_, row) in enumerate(zip(ids, adjusted, strict=True)):
        ranked = {names[c]: float(row[c]) for c in np.argsort(-row, kind="stable")}
        named = {name: p for name, p in ranked.items() if name != other}
        best, probability = next(iter(named.items()))
        score = None if unknown is None else float(unknown[i])
        decision = thresholds.decide(best, probability, score)
        if next(iter(ranked)) == other:
            decision = NONE
        chosen = thresholds.select(named)
        found.append(Prediction(id_, best, probability, ranked, decision, score, chosen))
    return found
