"""The confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from mivhead.pictures.saving import save_figure

MAX_NUMBERS = 40  # classes up to which the counts are written into the cells
MAX_NAMES = 80  # classes up to which all names are written
MAX_LETTERS = 28
INK, PALE = "#22303c", "#8a97a3"


def draw_confusion(
    matrix: ArrayLike, names: Sequence[str], path: str | Path, title: str | None = None
) -> None:
    """Draw counts of images by true class (rows) and predicted class (columns).

    Colours show the share of the true class, so that large classes do not drown small ones.

    Parameters
    ----------
    matrix
        (true class, predicted class) counts.
    names
        The classes.
    path
        A .png, .svg or .pdf.
    title
        By default the accuracy.
    """
    from matplotlib.figure import Figure

    counts = np.asarray(matrix)
    total = max(1, int(counts.sum()))
    n = len(names)
    side = 2.4 + min(14.0, max(2.6, 0.42 * n))
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    axes = figure.add_subplot()
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    right = int(np.trace(counts))
    axes.set_title(
        title or f"{right} of {total} right: {100 * right / total:.1f} %",
        color=INK,
        fontsize=12,
        loc="left",
        pad=12,
    )
    axes.set_xlabel("predicted", color=INK)
    axes.set_ylabel("true", color=INK)
    if n <= MAX_NAMES:
        labels = [_short(name) for name in names]
        size = 9 if n <= 30 else 6
        # parse_math: a $ in a class name is a dollar
        axes.set_xticks(
            range(n),
            labels,
            rotation=60,
            ha="right",
            rotation_mode="anchor",
            fontsize=size,
            parse_math=False,
        )
        axes.set_yticks(range(n), labels, fontsize=size, parse_math=False)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(n - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(n - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="minor", length=0)
    if n <= MAX_NUMBERS:
        for i, j in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[i, j] > 0.55 else INK
            axes.text(
                j,
                i,
                f"{counts[i, j]}",
                ha="center",
                va="center",
                color=colour,
                fontsize=8 if n <= 20 else 6,
            )
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=24, pad=0.02)
    bar.set_label("share of the true class", color=INK)
    bar.ax.tick_params(length=0, colors=INK)
    bar.outline.set_visible(False)
    save_figure(figure, path)


def _short(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else f"{name[: MAX_LETTERS - 9]}...{name[-6:]}"
