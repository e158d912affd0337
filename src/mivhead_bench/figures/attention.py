"""Attention of the MIV-head, drawn: over the patches of an image, and over the shots."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from mivhead.diagnostics.explanation import BlockAttention
from mivhead.diagnostics.pictures import (
    FOR,
    INK,
    PALE,
    TRACK,
    new_figure,
    overlay,
    save_figure,
    show,
    square,
)

MAX_CLASSES = 12  # classes drawn: the most probable ones
MAX_SHOTS = 8  # shots drawn per class: those with the most attention
CELL = 1.5  # inches
LETTERS = 19  # of a line of a class name, in a cell

Weights = NDArray[np.floating[Any]]
RankedClass = tuple[str, float, NDArray[np.integer[Any]]]  # name, probability, rows of its shots


def draw_attention(
    image: Image.Image,
    attention: Sequence[BlockAttention],
    classes: Sequence[RankedClass],
    path: str | Path | None = None,
    *,
    title: str,
    pictures: Sequence[Image.Image] | None = None,
) -> Figure:
    """Draw the attention over an image, block by block, and the weight of every shot.

    `attention` is that of this image (`attention_of`); `classes` are the most
    probable first; `pictures` are those of the shots, without which bars are drawn instead.
    """
    shown = classes[:MAX_CLASSES]
    weights = shot_weights(attention)
    maps = [(i, block.patches[0]) for i, block in enumerate(attention) if block.patches is not None]
    columns = max(len(maps) + 1, min(MAX_SHOTS, max(len(rows) for _, _, rows in shown)) + 1, 4)
    rows = 0 if weights is None else len(shown)
    height = CELL if pictures else 0.55
    figure = new_figure(CELL * columns, 0.8 + 1.25 * CELL + height * rows)
    figure.suptitle(title, color=INK, fontsize=12, parse_math=False)
    if weights is not None:
        drawn = "shots with the most attention, and" if pictures else "a bar per shot:"
        note = f"Below, for up to {MAX_CLASSES} classes: {drawn} the attention within its class."
        figure.text(0.02, 0.08 / figure.get_figheight(), note, fontsize=8, color=INK)
    grid = figure.add_gridspec(
        1 + rows,
        columns,
        height_ratios=[1.25 * CELL] + [height] * rows,
        top=1 - 0.55 / figure.get_figheight(),
        bottom=0.5 / figure.get_figheight(),
        left=0.02,
        right=0.98,
        hspace=0.35,
    )
    show(figure.add_subplot(grid[0, 0]), square(image), "image")
    for column, (block, heat) in enumerate(maps, start=1):
        label = f"block {block + 1} of {len(attention)}"
        show(figure.add_subplot(grid[0, column]), overlay(image, [heat]), label)
    if weights is None:
        return save_figure(figure, path)
    excess = {name: weights[members] * len(members) - 1 for name, _, members in shown}
    limit = max(float(np.abs(values).max()) for values in excess.values())
    for row, (name, probability, members) in enumerate(shown, start=1):
        _label(figure.add_subplot(grid[row, 0]), name, probability, 4 if pictures else 2)
        if pictures is None:
            _bars(figure.add_subplot(grid[row, 1:]), excess[name], 1.1 * max(limit, 0.01))
            continue
        best = np.argsort(-weights[members], kind="stable")[: columns - 1]
        for column, shot in enumerate(members[best], start=1):
            caption = f"{100 * weights[shot]:.1f}%"
            show(figure.add_subplot(grid[row, column]), square(pictures[shot]), caption)
    return save_figure(figure, path)


def shot_weights(attention: Sequence[BlockAttention]) -> Weights | None:
    """Average the weight of every shot over the blocks; the shots of a class sum to 1."""
    weights = [block.shots[0] for block in attention if block.shots is not None]
    mean: Weights | None = np.mean(weights, axis=0) if weights else None
    return mean


def _label(axes: Any, name: str, probability: float, most: int) -> None:
    axes.axis("off")
    lines = textwrap.wrap(name, LETTERS, max_lines=most, placeholder="...")
    text = "\n".join([*lines, f"{100 * probability:.0f}%"])
    axes.text(0, 0.5, text, va="center", fontsize=9, color=INK, parse_math=False)


def _bars(axes: Any, excess: Weights, bound: float) -> None:
    """Draw one bar per shot, up or down from an equal weight."""
    axes.bar(range(len(excess)), excess, color=FOR, width=0.7)
    axes.axhline(0, color=PALE, linewidth=0.8)
    axes.set(xticks=[], yticks=[], xlim=(-0.6, len(excess) - 0.4), ylim=(-bound, bound))
    axes.spines[:].set_visible(False)
    axes.set_facecolor(TRACK)
