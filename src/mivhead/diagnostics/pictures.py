"""Drawings: the confusion matrix, and the reasons for a prediction.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from mivhead._util.arrays import Floats
from mivhead._util.files import replacing
from mivhead._util.imports import need
from mivhead._util.text import percent
from mivhead.errors import InputError
from mivhead.images.decoding import load_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mivhead.diagnostics.explanation import Explanation

FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150
NOTEBOOK_DPI = 72
SIDE = 224  # pixels of a drawn image
# The light colours of palette.css
INK, PALE = "#171a1d", "#5b6470"
HEAT = (232, 89, 12)
FOR, AGAINST, FRAME, TRACK = "#14785a", "#b3261e", "#e2e6ea", "#eef0f3"
MAX_COUNTS = 40  # classes up to which the counts are written into the cells
MAX_NAMES = 80  # classes up to which all names are written
LETTERS = 26  # of a name
CELL = 1.9  # inches of an image in a drawing of reasons


def check_format(path: str | Path) -> None:
    """Raise an error if a picture cannot be drawn, or not in the format of its path."""
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"A picture must be a {', '.join(FORMATS)} file, got {path}.")
    need("matplotlib")


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """Make an empty figure of a size in inches, which notebooks show by themselves."""
    need("matplotlib")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that shows itself in a notebook, without pyplot."""

        def _repr_png_(self) -> bytes:
            return _render(self, "png", NOTEBOOK_DPI)

    return Picture(figsize=(width, height), **options)


def _render(figure: Figure, kind: str, dpi: int = DOTS_PER_INCH) -> bytes:
    """Return the file of a figure."""
    buffer = BytesIO()
    with warnings.catch_warnings():  # characters missing from the font become boxes
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        program = {"Software" if kind == "png" else "Creator": "mivhead"}
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=program)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path | None) -> Figure:
    """Write a figure, if there is a path, in the format that its suffix names; return it."""
    if path is not None:
        check_format(path)
        with replacing(path) as unfinished:
            unfinished.write_bytes(_render(figure, Path(path).suffix[1:].lower()))
    return figure


def short(name: Any) -> str:
    """Shorten a name in its middle."""
    text = str(name)
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 11]}...{text[-8:]}"


def square(image: Image.Image) -> Image.Image:
    """Resize an image to the square it is drawn in."""
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def overlay(image: Image.Image, heats: Sequence[Floats]) -> Floats:
    """Tint a pale grey copy of an image by the mean of some heat maps (H, W)."""
    grey = np.asarray(square(image).convert("L"), dtype=np.float64)[:, :, None] / 255
    pale = 0.3 + 0.7 * grey  # (SIDE, SIDE, 1)
    weight = 0.85 * np.mean([_enlarge(heat) for heat in heats], axis=0)[:, :, None]
    colour = np.array(HEAT) / 255
    blended: Floats = pale * (1 - weight) + colour * weight  # (SIDE, SIDE, 3)
    return blended


def _enlarge(heat: Floats) -> Floats:
    """Scale a heat map from (H, W) to (SIDE, SIDE) and its values to the range 0 to 1."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = np.asarray(smooth, dtype=np.float64)
    spread = float(values.max() - values.min())
    scaled: Floats = (values - values.min()) / (spread or 1.0)
    return scaled


def draw_confusion(
    matrix: ArrayLike, names: Sequence[str], path: str | Path | None = None
) -> Figure:
    """Draw a confusion matrix: true classes as rows, predicted classes as columns.

    Colours show percentages of the true class, so that small classes are as visible as large ones.

    Parameters
    ----------
    matrix : array-like of shape (class, class)
        Number of images by true class and predicted class.
    names : sequence of str
        The classes.
    path : str, Path or None, default=None
        The file to write: .png, .svg or .pdf. None writes nothing.
    """
    counts, n = np.asarray(matrix), len(names)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    side = 2.4 + min(14.0, max(2.6, 0.42 * n))
    figure = new_figure(side + 0.6, side, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    right, total = int(np.trace(counts)), int(counts.sum())
    axes.set_title(f"{right} of {total} right: {percent(right / max(1, total))}", color=INK)
    axes.set(xlabel="predicted", ylabel="true", xticks=[], yticks=[])
    if n <= MAX_NAMES:
        style: dict[str, Any] = {"fontsize": 9 if n <= 30 else 6, "parse_math": False}
        labels = [short(name) for name in names]
        turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(n), labels, **turned, **style)
        axes.set_yticks(range(n), labels, **style)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    if n <= MAX_COUNTS:
        for i, j in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[i, j] > 0.55 else INK
            size = 8 if n <= 20 else 6
            axes.text(j, i, f"{counts[i, j]}", ha="center", va="center", color=colour, size=size)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=24, pad=0.02)
    bar.set_label("of the true class", color=INK)
    bar.outline.set_visible(False)
    return save_figure(figure, path)


def draw_reasons(reasons: Explanation, path: str | Path | None = None) -> Figure:
    """Draw an explanation: where the model looked, the closest shots, the votes."""
    maps = [] if reasons.heat is None else [("where it looked", reasons.heat)]
    maps += [(f"block {i + 1}", heat) for i, heat in reasons.blocks.items()]
    votes = reasons.totals
    columns = max(1 + len(maps), len(reasons.shots), 4)
    heights = [CELL, CELL] + [0.5 + 0.24 * len(votes)] * bool(votes)
    figure = new_figure(CELL * columns, 1.1 + sum(heights), facecolor="white")
    height = figure.get_figheight()
    grid = figure.add_gridspec(
        len(heights),
        columns,
        height_ratios=heights,
        left=0.02,
        right=0.98,
        top=1 - 0.75 / height,
        bottom=0.12 / height + (0.02 if votes else 0.06),
        hspace=0.6,
        wspace=0.08,
    )
    figure.suptitle(reasons.title, color=INK, fontsize=12, parse_math=False)
    if reasons.image is not None:
        show(figure.add_subplot(grid[0, 0]), square(reasons.image), "image")
        for column, (caption, heat) in enumerate(maps, start=1):
            show(figure.add_subplot(grid[0, column]), overlay(reasons.image, [heat]), caption)
    blank = np.full((8, 8, 3), 0.95)
    for column, shot in enumerate(reasons.shots):
        attention = "" if shot.weight is None else f"{percent(shot.weight)} of the attention\n"
        picture = blank if shot.picture is None else square(load_image(shot.picture))
        caption = f"{short(shot.label)}\n{attention}{short(shot.name)}"
        show(figure.add_subplot(grid[1, column]), picture, caption)
    if votes:
        _draw_votes(figure.add_subplot(grid[2, :]), reasons)
    return save_figure(figure, path)


def show(axes: Any, picture: Any, caption: str) -> None:
    """Draw a picture in a frame, with its caption below."""
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(FRAME)
    axes.set_xlabel(caption, fontsize=8, color=PALE, labelpad=3, parse_math=False)


def _draw_votes(axes: Any, reasons: Explanation) -> None:
    """Draw what points to the one class and to the other: what members add to the log-odds."""
    votes = dict(sorted(reasons.totals.items(), key=lambda vote: -abs(vote[1])))
    colours = [FOR if value >= 0 else AGAINST for value in votes.values()]
    axes.barh(range(len(votes)), list(votes.values()), color=colours, height=0.65)
    axes.axvline(0, color=PALE, linewidth=0.8)
    axes.set_yticks(range(len(votes)), list(votes), fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.spines[:].set_visible(False)
    first, second = short(reasons.prediction.label), short(reasons.runner_up)
    title = f"what points to {first} (right) and to {second} (left)"
    axes.set_title(title, fontsize=9, color=INK, parse_math=False)
    box = axes.get_position()
    axes.set_position((0.24, box.y0, 0.72, box.height))
