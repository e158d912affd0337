"""The picture of `miv demo`: images, predictions, attention, and a chart of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.attention import explain
from mivhead.diagnostics.pictures import overlay, save_figure, square
from mivhead.features import FeatureTable
from mivhead.images.decoding import load_image
from mivhead.model.prediction import Prediction
from mivhead.model.shots import Shots

# Lengths are in inches from the upper left corner of the page.
WIDTH, MARGIN = 15.0, 0.5
COLUMNS, GAP = 5, 0.42
CARD = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
CARD_HEIGHT = 2.25
PICTURE = (CARD - 2 * 0.08) / 3  # three side by side
HEADER, HEADING, CHART = 0.95, 0.5, 1.85

TOP = 3  # classes whose probabilities are shown
INK, PALE, TRACK, LINE = "#22303c", "#7b8894", "#e9edf1", "#cfd6dc"
RIGHT, WRONG = "#1f7a5c", "#c0392b"
CAPTIONS = ("image", "looked at", "closest shot")


@dataclass(frozen=True, eq=False)
class Card:
    """One classified image.

    Parameters
    ----------
    image : PIL.Image.Image
        The image.
    heats : sequence of array of shape (H, W)
        The attention to every patch, per block.
    shot : PIL.Image.Image
        The shot of the predicted class that received the most attention.
    truth : str
        The true class.
    probabilities : mapping of str to float
        By class, in descending order.
    """

    image: Image.Image
    heats: Sequence[NDArray[np.floating[Any]]]
    shot: Image.Image
    truth: str
    probabilities: Mapping[str, float]


@dataclass(frozen=True)
class Bar:
    """The accuracy of one method, 0 to 1, with half the width of its interval."""

    name: str
    value: float
    half_width: float


def make_cards(
    classifier: MIVClassifier,
    shots: Shots,
    shots_folder: Path,
    images: FeatureTable,
    predictions: Sequence[Prediction],
    truths: Sequence[str],
) -> list[Card]:
    """Explain the predictions for some images.

    Parameters
    ----------
    classifier : MIVClassifier
        Fitted on the shots.
    shots : Shots
        The shots of the model; their names are paths relative to `shots_folder`.
    shots_folder : Path
        The folder of the shots.
    images : FeatureTable
        The images; their ids are paths.
    predictions, truths : sequence of Prediction, sequence of str
        The prediction and the true class of each image.

    Returns
    -------
    list of Card
    """
    attention = explain(classifier, images.features)
    cards = []
    for i, (prediction, truth) in enumerate(zip(predictions, truths, strict=True)):
        weights = np.sum([b.shots[i] for b in attention if b.shots is not None], axis=0)
        of_class = np.where(shots.labels == prediction.label, weights, -1.0)
        closest = shots.names[of_class.argmax()]
        cards.append(
            Card(
                image=load_image(images.ids[i]),
                heats=[b.patches[i] for b in attention if b.patches is not None],
                shot=load_image(shots_folder / closest),
                truth=truth,
                probabilities=prediction.probabilities,
            )
        )
    return cards


def draw_demo(
    sections: Mapping[str, Sequence[Card]],
    bars: Sequence[Bar],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    chart_title: str,
) -> None:
    """Draw rows of cards under the headings of their sections, and a chart of methods below.

    Parameters
    ----------
    sections : mapping of str to sequence of Card
        Cards by heading; a section without cards is omitted.
    bars : sequence of Bar
        The chart, ours first.
    path : str or Path
        A .png, .svg or .pdf.
    title, subtitle, chart_title : str
        One line each.
    """
    rows = [
        (heading if start == 0 else "", cards[start : start + COLUMNS])
        for heading, cards in sections.items()
        for start in range(0, len(cards), COLUMNS)
    ]
    headings = sum(bool(heading) for heading, _ in rows)
    page = _Page(HEADER + headings * HEADING + len(rows) * CARD_HEIGHT + CHART)
    page.write(MARGIN, 0.25, title, fontsize=21, weight="bold")
    page.write(MARGIN, 0.66, subtitle, fontsize=12.5, color=PALE)
    top = HEADER
    for heading, cards in rows:
        if heading:
            page.write(MARGIN, top + 0.14, heading, fontsize=13, weight="bold")
            top += HEADING
        for place, card in enumerate(cards):
            _draw_card(page, MARGIN + place * (CARD + GAP), top, card)
        top += CARD_HEIGHT
    page.write(MARGIN, top + 0.1, chart_title, fontsize=13, weight="bold")
    _draw_chart(page.axes(MARGIN + 1.7, top + 0.5, 9.0, 0.95), bars)
    save_figure(page.figure, path)


class _Page:
    """A figure whose parts are placed in inches from its upper left corner."""

    def __init__(self, height: float) -> None:
        from matplotlib.figure import Figure

        self.height = height
        self.figure = Figure(figsize=(WIDTH, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Add empty axes."""
        bottom = 1 - (top + height) / self.height
        box = (left / WIDTH, bottom, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(box, xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        return axes

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Write a string with this upper left corner; a $ in a name is a dollar sign."""
        place = (left / WIDTH, 1 - top / self.height)
        self.figure.text(*place, text, va="top", parse_math=False, **{"color": INK, **style})


def _draw_card(page: _Page, left: float, top: float, card: Card) -> None:
    name = next(iter(card.probabilities))
    right = name == card.truth
    colour = RIGHT if right else WRONG
    page.write(left, top, _short(name), fontsize=13, weight="bold", color=colour)
    if not right:
        page.write(left + CARD, top + 0.03, f"is {_short(card.truth)}", fontsize=11, ha="right")
    pictures = (square(card.image), overlay(card.image, card.heats), square(card.shot))
    for column, (picture, caption) in enumerate(zip(pictures, CAPTIONS, strict=True)):
        axes = page.axes(left + column * (PICTURE + 0.08), top + 0.28, PICTURE, PICTURE)
        axes.imshow(picture)
        axes.spines[:].set(visible=True, color=LINE)
        axes.set_xlabel(caption, fontsize=8, color=PALE, labelpad=3)
    axes = page.axes(left + 0.62, top + 0.28 + PICTURE + 0.27, CARD - 1.06, 0.56)
    top_classes = list(islice(card.probabilities.items(), TOP))
    _draw_bars(axes, [p for _, p in top_classes], colour)
    for place, (each, p) in enumerate(top_classes):
        style = {"va": "center", "fontsize": 9, "color": INK, "parse_math": False}
        axes.text(-0.03, place, _short(each), ha="right", **style)
        axes.text(1.03, place, f"{100 * p:.0f} %", ha="left", **style)


def _draw_chart(axes: Any, bars: Sequence[Bar]) -> None:
    _draw_bars(axes, [bar.value for bar in bars], RIGHT)
    for place, bar in enumerate(bars):
        axes.errorbar(bar.value, place, xerr=bar.half_width, ecolor=INK, capsize=3, linewidth=1.2)
        style = {"va": "center", "fontsize": 11, "color": INK}
        axes.text(-0.012, place, bar.name, ha="right", **style)
        score = f"{100 * bar.value:.1f} ± {100 * bar.half_width:.1f} %"
        axes.text(1.012, place, score, ha="left", **style)


def _draw_bars(axes: Any, values: Sequence[float], colour: str) -> None:
    """Draw horizontal bars from 0 to 1, the first one in colour."""
    places = range(len(values))
    axes.barh(places, [1.0] * len(values), height=0.64, color=TRACK)
    axes.barh(places, values, height=0.64, color=[colour] + [PALE] * (len(values) - 1))
    axes.set(xlim=(0, 1), ylim=(len(values) - 0.6, -0.4))


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:9]}...{name[-4:]}"
