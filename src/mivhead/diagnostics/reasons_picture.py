"""The drawing of an `Explanation`: where the model looked, the closest shots, the votes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mivhead._util.optional import need
from mivhead._util.text import percent
from mivhead.diagnostics.pictures import INK, PALE, overlay, square
from mivhead.images.decoding import load_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mivhead.diagnostics.explanation import CloseShot, Explanation

FOR, AGAINST, FRAME = "#1f7a5c", "#c0392b", "#cfd6dc"
CELL = 1.9  # inches
LETTERS = 24


def draw_reasons(reasons: Explanation) -> Figure:
    """Draw an explanation, from `FewShotClassifier.explain`."""
    need("matplotlib", "plot")
    from matplotlib.figure import Figure

    maps = [] if reasons.heat is None else [("where it looked", reasons.heat)]
    maps += [(f"block {i + 1}", heat) for i, heat in reasons.blocks.items()]
    votes = reasons.totals
    columns = max(1 + len(maps), len(reasons.shots), 4)
    bars = 0.0 if not votes else 0.5 + 0.24 * len(votes)
    heights = [CELL, CELL, bars] if votes else [CELL, CELL]
    figure = Figure(figsize=(CELL * columns, 1.1 + sum(heights)), facecolor="white")
    grid = figure.add_gridspec(
        len(heights),
        columns,
        height_ratios=heights,
        left=0.02,
        right=0.98,
        top=1 - 0.75 / figure.get_figheight(),
        bottom=0.12 / figure.get_figheight() + (0.02 if votes else 0.06),
        hspace=0.6,
        wspace=0.08,
    )
    figure.suptitle(_title(reasons), color=INK, fontsize=12, parse_math=False)
    if reasons.image is not None:
        _show(figure.add_subplot(grid[0, 0]), square(reasons.image), "image")
        for column, (caption, heat) in enumerate(maps, start=1):
            _show(figure.add_subplot(grid[0, column]), overlay(reasons.image, [heat]), caption)
    for column, shot in enumerate(reasons.shots):
        _shot(figure.add_subplot(grid[1, column]), shot)
    if votes:
        _votes(figure.add_subplot(grid[2, :]), reasons)
    return figure


def _title(reasons: Explanation) -> str:
    best = reasons.prediction
    second = best.probabilities[reasons.runner_up]
    decision = "" if best.decision == best.label else f"{best.decision}; most likely "
    return (
        f"{decision}{_short(best.label)} {percent(best.probability)}, "
        f"then {_short(reasons.runner_up)} {percent(second)}"
    )


def _short(name: Any) -> str:
    text = str(name)
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 8]}...{text[-5:]}"


def _show(axes: Any, picture: Any, caption: str) -> None:
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(FRAME)
    axes.set_xlabel(caption, fontsize=8, color=PALE, labelpad=3, parse_math=False)


def _shot(axes: Any, shot: CloseShot) -> None:
    share = "" if shot.weight is None else f"{percent(shot.weight)} of the attention\n"
    caption = f"{_short(shot.label)}\n{share}{_short(shot.name)}"
    blank = np.full((8, 8, 3), 0.95)
    _show(axes, blank if shot.picture is None else square(load_image(shot.picture)), caption)


def _votes(axes: Any, reasons: Explanation) -> None:
    """Draw what speaks for the one class and for the other: what members add to the log-odds."""
    totals = reasons.totals
    votes = sorted(totals, key=lambda kind: -abs(totals[kind]))
    values = [totals[kind] for kind in votes]
    places = range(len(votes))
    axes.barh(places, values, color=[FOR if v >= 0 else AGAINST for v in values], height=0.65)
    axes.axvline(0, color=PALE, linewidth=0.8)
    axes.set_yticks(places, votes, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"what speaks for {_short(reasons.prediction.label)} (right) and for "
        f"{_short(reasons.runner_up)} (left)",
        fontsize=9,
        color=INK,
        parse_math=False,
    )
    box = axes.get_position()
    axes.set_position((0.24, box.y0, 0.72, box.height))
