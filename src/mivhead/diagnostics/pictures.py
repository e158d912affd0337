"""What the drawings share: files, colours and heat maps; and the confusion matrix.

matplotlib is imported only when something is drawn.
"""

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

from mivhead._util.optional import need
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mivhead.diagnostics.evaluation import Mistake, Tradeoff

FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150
NOTEBOOK_DPI = 72
SIDE = 224  # pixels of a drawn image
INK, PALE, HEAT = "#22303c", "#8a97a3", "#e8590c"
MAX_COUNTS = 40  # classes up to which the counts are written into the cells
MAX_NAMES = 80  # classes up to which all names are written
MAX_LETTERS = 28  # of a class name


def check_format(path: str | Path) -> None:
    """Raise an error if a picture cannot be drawn, or not in the format of its path.

    >>> check_format("matrix.gif")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: A picture must be a .png, .svg or .pdf file, got matrix.gif.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(
            f"A picture must be a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, got {path}."
        )
    need("matplotlib", "plot")


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """Make an empty figure of a size in inches, which notebooks show by themselves."""
    need("matplotlib", "plot")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that shows itself in a notebook, without pyplot."""

        def _repr_png_(self) -> bytes:
            return _render(self, "png", NOTEBOOK_DPI)

    return Picture(figsize=(width, height), **options)


def _render(figure: Figure, kind: str, dpi: int = DOTS_PER_INCH) -> bytes:
    buffer = BytesIO()
    with warnings.catch_warnings():  # characters missing from the font become boxes
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(buffer, format=kind, dpi=dpi)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path | None) -> Figure:
    """Write a figure atomically, in the format that the suffix of the path names, and return it.

    None writes nothing.
    """
    if path is None:
        return figure
    path = Path(path)
    check_format(path)
    data = _render(figure, path.suffix[1:].lower())
    handle = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            handle = Path(file.name)
            file.write(data)
        handle.chmod(0o644)
        os.replace(handle, path)  # noqa: PTH105
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write the picture {path}: {error.strerror or error}."
        ) from error
    finally:
        if handle is not None:
            handle.unlink(missing_ok=True)
    return figure


def square(image: Image.Image) -> Image.Image:
    """Resize an image to the square it is drawn in."""
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def overlay(
    image: Image.Image, heats: Sequence[NDArray[np.floating[Any]]]
) -> NDArray[np.floating[Any]]:
    """Tint a pale grey copy of an image by the mean of some heat maps (H, W)."""
    grey = np.asarray(square(image).convert("L"), dtype=np.float64)[:, :, None] / 255
    pale = 0.3 + 0.7 * grey  # (SIDE, SIDE, 1)
    weight = 0.85 * np.mean([_enlarge(heat) for heat in heats], axis=0)[:, :, None]
    colour = np.array([int(HEAT[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    blended: NDArray[np.floating[Any]] = pale * (1 - weight) + colour * weight  # (SIDE, SIDE, 3)
    return blended


def _enlarge(heat: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Scale a heat map from (H, W) to (SIDE, SIDE) and its values to the range 0 to 1."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = np.asarray(smooth, dtype=np.float64)
    spread = float(values.max() - values.min())
    scaled: NDArray[np.floating[Any]] = (values - values.min()) / (spread or 1.0)
    return scaled


def draw_confusion(
    matrix: ArrayLike,
    names: Sequence[str],
    path: str | Path | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a confusion matrix: true classes as rows, predicted classes as columns.

    Colours show the share of the true class, so that small classes are as visible as large ones.

    Parameters
    ----------
    matrix : array-like of shape (class, class)
        Number of images by true class and predicted class.
    names : sequence of str
        The classes.
    path : str, Path or None, default=None
        The file to write: .png, .svg or .pdf. None writes nothing.
    title : str, default=None
        Title of the drawing; None shows the accuracy.

    Returns
    -------
    matplotlib.figure.Figure
    """
    counts = np.asarray(matrix)
    total = max(1, int(counts.sum()))
    n = len(names)
    side = 2.4 + min(14.0, max(2.6, 0.42 * n))
    figure = new_figure(side + 0.6, side, layout="constrained")
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
        # parse_math=False: a $ in a class name is not a formula
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
    if n <= MAX_COUNTS:
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
    return save_figure(figure, path)


def draw_mistakes(
    mistakes: Sequence[Mistake],
    pictures: Sequence[Image.Image],
    path: str | Path | None = None,
    *,
    total: int | None = None,
) -> Figure:
    """Draw misclassified images, each with its label and the predicted class.

    `total` is the number of mistakes, if not all are drawn. Without a path nothing is written.
    """
    columns = max(3, min(6, len(pictures)))
    rows = max(1, -(-len(pictures) // columns))
    figure = new_figure(1.75 * columns, 0.5 + 2.35 * rows, layout="constrained")
    count = len(mistakes) if total is None else total
    noun = "image" if count == 1 else "images"
    left_out = "" if count == len(pictures) else f", the {len(pictures)} most confident mistakes"
    figure.suptitle(f"{count} misclassified {noun}{left_out}", color=INK, fontsize=12)
    for place, (mistake, picture) in enumerate(zip(mistakes, pictures, strict=True), start=1):
        axes = figure.add_subplot(rows, columns, place, xticks=[], yticks=[])
        axes.imshow(square(picture))
        axes.spines[:].set_color(PALE)
        lines = (
            f"is {_short(mistake.label, 22)}",
            f"taken for {_short(mistake.predicted, 16)}, {100 * mistake.probability:.0f} %",
            _short(mistake.id, 26),
        )
        axes.set_xlabel("\n".join(lines), fontsize=7, color=INK, parse_math=False)
    return save_figure(figure, path)


def _short(name: str, letters: int = MAX_LETTERS) -> str:
    return name if len(name) <= letters else f"{name[: letters - 11]}...{name[-8:]}"


def draw_tradeoff(tradeoff: Tradeoff, path: str | Path | None = None) -> Figure:
    """Draw what thresholds trade: errors for names, and unknown images for known ones.

    These are the risk-coverage curve and, if there are images of other things, the ROC curve. Dots
    mark the default thresholds. Without a path nothing is written.
    """
    both = tradeoff.unknown is not None and len(tradeoff.foreign) > 0
    figure = new_figure(10.0 if both else 5.2, 4.6, layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0] if both else [figure.add_subplot()]
    coverage, risk = tradeoff.risk_coverage()
    named = tradeoff.probabilities >= tradeoff.thresholds.probability
    _curve(
        panels[0],
        "Wrong names among the names given",
        ("share of known images that get a name", "share of these names that are wrong"),
        (coverage, risk),
        (named.mean(), (~tradeoff.right[named]).mean() if named.any() else 0.0),
    )
    panels[0].set_ylim(-0.02, max(0.1, 1.15 * float(risk.max())))
    if both:
        assert tradeoff.unknown is not None
        cut = tradeoff.thresholds.unknown
        _curve(
            panels[1],
            f"Images of other things: AUROC {tradeoff.auroc:.2f}",
            ("share of known images rejected", "share of other images rejected"),
            tradeoff.roc(),
            ((tradeoff.unknown > cut).mean(), (tradeoff.foreign > cut).mean()),
        )
        panels[1].plot([0, 1], [0, 1], color=PALE, linewidth=1, linestyle=":")
        panels[1].set_ylim(-0.02, 1.02)
    return save_figure(figure, path)


def _curve(
    axes: Any,
    title: str,
    names: tuple[str, str],
    curve: tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]],
    point: tuple[float, float],
) -> None:
    """Draw a curve and the point of the default threshold."""
    axes.plot(*curve, color=INK, linewidth=1.8)
    axes.plot(*point, "o", color=HEAT, markersize=8, label="default threshold")
    axes.set_title(title, color=INK, fontsize=12, loc="left", pad=10)
    axes.set_xlabel(names[0], color=INK)
    axes.set_ylabel(names[1], color=INK)
    axes.set_xlim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
