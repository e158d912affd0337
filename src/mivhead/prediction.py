"""`Prediction`: what a model says about one image; `Predictions`: about several, as a table.

Shared by fitted models (`mivhead.fewshot`) and exported ones, which run without PyTorch.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from mivhead._optional import need

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

    def top(self, count: int) -> list[tuple[Any, float]]:
        """Return the most probable classes with their probabilities, in descending order.

        >>> Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25}).top(1)
        [('dog', 0.75)]
        """
        return list(islice(self.probabilities.items(), count))

    def to_frame(self) -> Any:
        """Return all classes and their probabilities as a pandas `DataFrame`."""
        frame = need("pandas", "pandas").DataFrame
        return frame(self.probabilities.items(), columns=["label", "probability"])

    def __repr__(self) -> str:
        """Name the image and the most probable classes.

        >>> Prediction("a.jpg", "dog", 0.75, {"dog": 0.75, "cat": 0.25})
        <Prediction of 'a.jpg': dog 75.0 %, cat 25.0 %>
        """
        named = [f"{label} {100 * p:.1f} %" for label, p in self.top(SHOWN)]
        more = len(self.probabilities) - len(named)
        return f"<Prediction of {self.id!r}: {', '.join(named + [f'{more} more'] * (more > 0))}>"


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
            Number of classes per image. The columns are `file`, `label` and `probability`, followed
            by `label_2`, `probability_2` and so on.

        Returns
        -------
        pandas.DataFrame
        """
        frame = need("pandas", "pandas").DataFrame
        top = min(top, max((len(each.probabilities) for each in self), default=1))
        columns = ["file"]
        for place in range(1, top + 1):
            number = "" if place == 1 else f"_{place}"
            columns += [f"label{number}", f"probability{number}"]
        rows = ([each.id, *(v for pair in each.top(top) for v in pair)] for each in self)
        return frame(rows, columns=columns)

    def _repr_html_(self) -> str:
        """Make a table for a notebook: thumbnail, file, class, probability, runners-up."""
        rows = [self._row(number, each) for number, each in enumerate(self[:MAX_ROWS])]
        more = len(self) - len(rows)
        note = f"<p>... and {more:,} more</p>" if more else ""
        header = "<th></th>" * (self._load is not None) + "".join(
            f'<th style="text-align:left">{name}</th>'
            for name in ("file", "class", "probability", "runners-up")
        )
        table = f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody>"
        return f"<table>{table}</table>{note}"

    def _row(self, number: int, prediction: Prediction) -> str:
        cells = [] if self._load is None else [_thumbnail(self._load, number)]
        cells += [escape(prediction.id), f"<b>{escape(str(prediction.label))}</b>"]
        cells.append(
            f'<meter value="{prediction.probability:.4f}" style="width:5em"></meter> '
            f"{100 * prediction.probability:.1f} %"
        )
        others = prediction.top(SHOWN)[1:]
        cells.append(", ".join(f"{escape(str(name))} {100 * p:.1f} %" for name, p in others))
        return "<tr>" + "".join(f'<td style="text-align:left">{c}</td>' for c in cells) + "</tr>"


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
