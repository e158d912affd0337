"""Attention of the MIV-head: over the patches of an image, and over the shots of each class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.pictures import INK, PALE, new_figure, overlay, save_figure, square
from mivhead.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACK, BAR, FRAME = "#e9edf1", "#1f7a5c", "#cfd6dc"
MAX_CLASSES = 12  # classes drawn: the most probable ones
MAX_SHOTS = 8  # shots drawn per class: those with the most attention
CELL = 1.5  # inches
LETTERS = 19  # of a line of a class name, in a cell


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention of one block for some images.

    Parameters
    ----------
    patches : array of shape (image, H, W) or None
        Weight of every patch; the weights of an image sum to 1. None if the block has no map.
    shots : array of shape (image, shot) or None
        Weight of every shot within its class, averaged over the attention heads, in the order of
        `MIVClassifier.support_`. None for a head without cross-attention.
    """

    patches: NDArray[np.floating[Any]] | None
    shots: NDArray[np.floating[Any]] | None


def explain(classifier: MIVClassifier, X: Any) -> list[BlockAttention]:
    """Compute the attention of a fitted classifier for some images.

    Parameters
    ----------
    classifier : MIVClassifier
        A fitted classifier.
    X : Features or array-like
        Features of the images.

    Returns
    -------
    list of BlockAttention
        One per block, shallow to deep.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import MIVClassifier
    >>> X = np.random.default_rng(0).normal(size=(6, 8, 4, 4)).astype(np.float32)
    >>> classifier = MIVClassifier(random_state=0).fit(X, [0, 0, 0, 1, 1, 1])
    >>> explain(classifier, X[:2])[0].patches.shape
    (2, 4, 4)
    """
    if not isinstance(classifier, MIVClassifier):
        raise InputError("Only the MIV-head has attention weights to show.")
    features = classifier._as_features(X)
    head = classifier.head_
    found = []
    rows = np.arange(len(features))
    for i, (layer, candidates) in enumerate(zip(head.layers, head.prepare(features), strict=True)):
        sizes = layer.config.candidate_sizes
        embedded, tape = layer.embed_with_tape(candidates, rows)
        patches = None
        if sizes and tape.weights is not None:
            height, width = sizes[0]
            patches = tape.weights[:, : height * width].reshape(-1, height, width)
        shots = None
        if layer.recipe.prototype == "cap":
            support = classifier.embedded_[i]
            comparison = layer.comparison(embedded, support, classifier.bags_)
            shots = comparison.weigh_shots(slice(None)).mean(axis=0)  # (image, shot)
        found.append(BlockAttention(patches, shots))
    return found


def draw_attention(
    image: Image.Image,
    attention: Sequence[BlockAttention],
    classes: Sequence[tuple[str, float, NDArray[np.integer[Any]]]],
    path: str | Path | None = None,
    *,
    title: str,
    pictures: Sequence[Image.Image] | None = None,
) -> Figure:
    """Draw the attention over an image, block by block, and the weight of every shot.

    Parameters
    ----------
    image : PIL.Image.Image
        The query.
    attention : sequence of BlockAttention
        The attention for this image, from `explain`.
    classes : sequence of (str, float, array)
        Name, probability and support rows of every class, the most probable first.
    path : str, Path or None, default=None
        The file to write: .png, .svg or .pdf. None writes nothing.
    title : str
        Title of the drawing.
    pictures : sequence of PIL.Image.Image, default=None
        The shots, in the order of the support; None draws bars instead.

    Returns
    -------
    matplotlib.figure.Figure
        A notebook shows it.
    """
    shown = classes[:MAX_CLASSES]
    weights = shot_weights(attention)
    maps = [(i, block.patches[0]) for i, block in enumerate(attention) if block.patches is not None]
    columns = max(len(maps) + 1, min(MAX_SHOTS, max(len(rows) for _, _, rows in shown)) + 1, 4)
    rows = 0 if weights is None else len(shown)
    height = CELL if pictures else 0.55
    figure = new_figure(CELL * columns, 0.8 + 1.25 * CELL + height * rows)
    figure.suptitle(title, color=INK, fontsize=12, parse_math=False)
    notes = _notes(classes, columns - 1, weights, pictures is not None)
    figure.text(0.02, 0.08 / figure.get_figheight(), notes, fontsize=8, color=INK)
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
    _image(figure.add_subplot(grid[0, 0]), square(image), "image")
    for column, (block, heat) in enumerate(maps, start=1):
        label = f"block {block + 1} of {len(attention)}"
        _image(figure.add_subplot(grid[0, column]), overlay(image, [heat]), label)
    limit = 0.0 if weights is None else max(_excess(weights[m]).max() for _, _, m in shown)
    for row, (name, probability, members) in enumerate(shown if weights is not None else (), 1):
        _label(figure.add_subplot(grid[row, 0]), name, probability, 4 if pictures else 2)
        own = np.asarray(weights)[members]
        if pictures is None:
            axes = figure.add_subplot(grid[row, 1:])
            _bars(axes, own, limit)
            continue
        best = np.argsort(-own, kind="stable")[: columns - 1]
        for column, place in enumerate(best, start=1):
            picture = square(pictures[members[place]])
            _image(figure.add_subplot(grid[row, column]), picture, f"{100 * own[place]:.1f} %")
    return save_figure(figure, path)


def _notes(
    classes: Sequence[tuple[str, float, NDArray[np.integer[Any]]]],
    places: int,
    weights: NDArray[np.floating[Any]] | None,
    drawn: bool,
) -> str:
    """Explain the rows below the image, and say what is not drawn."""
    if weights is None:
        return ""
    shown = classes[:MAX_CLASSES]
    shots = "the shots and their shares of the attention within their class"
    if not drawn:
        largest = max(float(weights[rows].max()) * len(rows) for _, _, rows in shown)
        shots = (
            "a bar per shot: its attention, above or below an equal share (the line); "
            f"at most {largest:.1f} times that"
        )
    elif max(len(rows) for _, _, rows in shown) > places:
        shots = f"the {places} shots of each class with the most attention, and their shares"
    if len(classes) > len(shown):
        shots = f"the {len(shown)} most probable of {len(classes)} classes; {shots}"
    return f"Below the image: {shots}."


def shot_weights(attention: Sequence[BlockAttention]) -> NDArray[np.floating[Any]] | None:
    """Average the weight of every shot over the blocks; the shots of a class sum to 1."""
    weights = [block.shots[0] for block in attention if block.shots is not None]
    if not weights:
        return None
    mean: NDArray[np.floating[Any]] = np.mean(weights, axis=0)
    return mean


def _image(axes: Any, picture: Any, caption: str) -> None:
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(FRAME)
    axes.set_xlabel(caption, fontsize=8, color=PALE, labelpad=3)


def _label(axes: Any, name: str, probability: float, most: int) -> None:
    axes.axis("off")
    text = "\n".join([*_lines(name, most), f"{100 * probability:.0f} %"])
    axes.text(0, 0.5, text, va="center", fontsize=9, color=INK, parse_math=False)


def _lines(name: str, most: int) -> list[str]:
    """Break a class name into lines, after a separator if possible.

    >>> _lines("class_012_yellow_headed_blackbird", 3)
    ['class_012_yellow_', 'headed_blackbird']
    >>> _lines("a" * 30 + " " + "b" * 30, 3)
    ['aaaaaaaaaaaaaaaaaaa', 'aaaaaaaaaaa', 'bbbbbbbbbbbbbbbb...']
    """
    parts = re.findall(rf"[^\s_./-]{{1,{LETTERS}}}[\s_./-]?|[\s_./-]", name)
    lines = [""]
    for part in parts:
        if lines[-1] and len((lines[-1] + part).rstrip()) > LETTERS:
            lines.append("")
        lines[-1] += part
    lines = [line.rstrip() for line in lines]
    if len(lines) > most:
        lines[most - 1 :] = [lines[most - 1][: LETTERS - 3] + "..."]
    return lines


def _excess(weights: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Compute how far weights are from equal shares, relative to such a share."""
    excess: NDArray[np.floating[Any]] = np.abs(weights * len(weights) - 1)
    return excess


def _bars(axes: Any, weights: NDArray[np.floating[Any]], limit: float) -> None:
    """Draw one bar per shot, up or down from an equal share."""
    bound = 1.1 * max(limit, 0.01)
    axes.bar(range(len(weights)), weights * len(weights) - 1, color=BAR, width=0.7)
    axes.axhline(0, color=PALE, linewidth=0.8)
    axes.set(xticks=[], yticks=[], xlim=(-0.6, len(weights) - 0.4), ylim=(-bound, bound))
    axes.spines[:].set_visible(False)
    axes.set_facecolor(TRACK)
