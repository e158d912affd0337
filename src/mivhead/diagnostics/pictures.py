"""Write a figure to a file: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from mivhead._optional import need
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150


def check_format(path: str | Path) -> None:
    """Raise an error if a picture cannot be drawn, or not be written under such a name.

    >>> check_format("confusion.gif")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: A picture's name ends in .png, .svg or .pdf, got confusion.gif.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(
            f"A picture's name ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {path}."
        )
    need("matplotlib", "plot")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix of the path decides the format."""
    path = Path(path)
    check_format(path)
    buffer = BytesIO()
    with warnings.catch_warnings():  # letters that matplotlib's font lacks are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)
    handle = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            handle = Path(file.name)
            file.write(buffer.getvalue())
        handle.chmod(0o644)
        os.replace(handle, path)  # noqa: PTH105  # the word says what happens
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write the picture {path}: {error.strerror or error}."
        ) from error
    finally:
        if handle is not None:
            handle.unlink(missing_ok=True)


# Where attention lies, as colour over an image.


SIDE = 224  # pixels of a drawn image
HEAT = "#e8590c"


def square(image: Image.Image) -> Image.Image:
    """Bring an image to the size it is drawn in."""
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def overlay(
    image: Image.Image, heats: Sequence[NDArray[np.floating[Any]]]
) -> NDArray[np.floating[Any]]:
    """Tint a paler, grey image where the attention is."""
    grey = np.asarray(square(image).convert("L"), dtype=np.float64)[:, :, None] / 255
    pale = 0.3 + 0.7 * grey  # (SIDE, SIDE, 1)
    weight = 0.85 * np.mean([_enlarge(heat) for heat in heats], axis=0)[:, :, None]
    colour = np.array([int(HEAT[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    blended: NDArray[np.floating[Any]] = pale * (1 - weight) + colour * weight  # (SIDE, SIDE, 3)
    return blended


def _enlarge(heat: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """(H, W) to (SIDE, SIDE), from 0 at the lowest to 1 at the highest weight."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = np.asarray(smooth, dtype=np.float64)
    spread = float(values.max() - values.min())
    scaled: NDArray[np.floating[Any]] = (values - values.min()) / (spread or 1.0)
    return scaled


# The confusion matrix as a picture.


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
    need("matplotlib", "plot")
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


# Pictures for people, drawn with matplotlib, which is imported only when one is drawn.
