"""The picture of `miv demo`: images, predictions, attention, and a chart of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mivhead._util.text import percent
from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.attention import explain
from mivhead.diagnostics.pictures import overlay, square
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
HEADER, HEADING, CHART, CHART_WIDTH = 0.95, 0.5, 1.85, 9.0
DPI = 150

TOP = 3  # classes whose probabilities are shown
INK, PALE, TRACK, LINE = "#22303c", "#7b8894", "#e9edf1", "#cfd6dc"
RIGHT, WRONG = "#1f7a5c", "#c0392b"
CAPTIONS = ("image", "looked at", "closest shot")


@dataclass(frozen=True, eq=False)
class Card:
    """One classified image."""

    image: Image.Image  # the image
    heats: Sequence[NDArray[np.floating[Any]]]  # (H, W): the attention to every patch, per block
    shot: Image.Image  # the shot of the predicted class that received the most attention
    truth: str  # the true class
    probabilities: Mapping[str, float]  # by class, in descending order


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

    Names of the shots are paths relative to `shots_folder`, ids of the images are paths.
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

    A section without cards is omitted; the chart has ours first. The path ends in .png, or in
    another format that Pillow writes.
    """
    rows = [
        (heading if start == 0 else "", cards[start : start + COLUMNS])
        for heading, cards in sections.items()
        for start in range(0, len(cards), COLUMNS)
    ]
    headings = sum(bool(heading) for heading, _ in rows)
    page = _Page(HEADER + headings * HEADING + len(rows) * CARD_HEIGHT + CHART)
    page.write(MARGIN, 0.25, title, 21, bold=True)
    page.write(MARGIN, 0.66, subtitle, 12.5, PALE)
    top = HEADER
    for heading, cards in rows:
        if heading:
            page.write(MARGIN, top + 0.14, heading, 13, bold=True)
            top += HEADING
        for place, card in enumerate(cards):
            _draw_card(page, MARGIN + place * (CARD + GAP), top, card)
        top += CARD_HEIGHT
    page.write(MARGIN, top + 0.1, chart_title, 13, bold=True)
    _draw_chart(page, MARGIN + 1.7, top + 0.5, bars)
    page.image.save(path)


class _Page:
    """A white image whose parts are placed in inches from its upper left corner."""

    def __init__(self, height: float) -> None:
        self.image = Image.new("RGB", (round(WIDTH * DPI), round(height * DPI)), "white")
        self.draw = ImageDraw.Draw(self.image)

    def write(
        self,
        left: float,
        top: float,
        text: str,
        size: float,
        colour: str = INK,
        anchor: str = "la",
        *,
        bold: bool = False,
    ) -> None:
        """Write a string of a size in points; by default, its upper left corner is given."""
        font = ImageFont.load_default(size * DPI / 72)
        width = 0.5 if bold else 0  # the font has no bold letters
        self.draw.text(
            (left * DPI, top * DPI), text, colour, font, anchor=anchor, stroke_width=width
        )

    def box(self, left: float, top: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle."""
        corners = (left * DPI, top * DPI, (left + width) * DPI, (top + height) * DPI)
        self.draw.rectangle(corners, fill=colour)

    def paste(self, left: float, top: float, side: float, picture: Image.Image) -> None:
        """Show a square picture in a thin frame."""
        x, y, pixels = (round(each * DPI) for each in (left, top, side))
        self.image.paste(picture.resize((pixels, pixels), Image.Resampling.BICUBIC), (x, y))
        self.draw.rectangle((x, y, x + pixels, y + pixels), outline=LINE)


def _draw_card(page: _Page, left: float, top: float, card: Card) -> None:
    name = next(iter(card.probabilities))
    right = name == card.truth
    colour = RIGHT if right else WRONG
    page.write(left, top, _short(name), 13, colour, bold=True)
    if not right:
        page.write(left + CARD, top + 0.03, f"is {_short(card.truth)}", 11, anchor="ra")
    tinted = Image.fromarray((255 * overlay(card.image, card.heats)).round().astype(np.uint8))
    pictures = (square(card.image), tinted, square(card.shot))
    for column, (picture, caption) in enumerate(zip(pictures, CAPTIONS, strict=True)):
        x = left + column * (PICTURE + 0.08)
        page.paste(x, top + 0.28, PICTURE, picture)
        page.write(x + PICTURE / 2, top + 0.31 + PICTURE, caption, 8, PALE, "ma")
    shown = islice(card.probabilities.items(), TOP)
    for place, (each, p) in enumerate(shown):
        middle = top + 0.64 + PICTURE + 0.19 * place
        _draw_bar(page, left + 0.62, middle, CARD - 1.06, p, PALE if place else colour, 0.12)
        page.write(left + 0.56, middle, _short(each), 9, anchor="rm")
        page.write(left + CARD - 0.38, middle, percent(p), 9, anchor="lm")


def _draw_chart(page: _Page, left: float, top: float, bars: Sequence[Bar]) -> None:
    for place, bar in enumerate(bars):
        middle = top + 0.16 + 0.32 * place
        _draw_bar(page, left, middle, CHART_WIDTH, bar.value, PALE if place else RIGHT, 0.2)
        low, high = (CHART_WIDTH * (bar.value + s * bar.half_width) for s in (-1, 1))
        page.box(left + low, middle - 0.005, high - low, 0.01, INK)
        for end in (low, high):
            page.box(left + end, middle - 0.04, 0.01, 0.08, INK)
        page.write(left - 0.12, middle, bar.name, 11, anchor="rm")
        score = f"{100 * bar.value:.1f} ± {100 * bar.half_width:.1f} %"
        page.write(left + CHART_WIDTH + 0.12, middle, score, 11, anchor="lm")


def _draw_bar(
    page: _Page, left: float, middle: float, width: float, value: float, colour: str, height: float
) -> None:
    """Draw a horizontal bar from 0 to 1."""
    page.box(left, middle - height / 2, width, height, TRACK)
    page.box(left, middle - height / 2, width * value, height, colour)


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:9]}...{name[-4:]}"
