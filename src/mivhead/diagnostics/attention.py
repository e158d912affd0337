"""Where the head looked: which patches of an image, and which shots of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mivhead._optional import need
from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.pictures import overlay, save_figure, square
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.head.cap import CrossAttentionPooling


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """What one block paid attention to, for n images.

    Parameters
    ----------
    patches
        (image, H, W): weight of every patch, summing to 1 per image; None if the block has no map.
    shots
        (image, shot): weight of every support image within its class, averaged over heads and in
        the order of `MIVClassifier.support_`; None without cross-attention.
    """

    patches: NDArray[np.floating[Any]] | None
    shots: NDArray[np.floating[Any]] | None


def explain(classifier: MIVClassifier, X: Any) -> list[BlockAttention]:
    """Attention of a fitted classifier for some images, block by block.

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
        raise InputError("Only the MIV-head has attention to look at.")
    features = classifier._as_features(X, reset=False)
    head = classifier.head_
    found = []
    with torch.inference_mode():
        prepared = head.prepare(features)
        embedded = head.embed(prepared)
        for i, layer in enumerate(head.layers):
            sizes = layer.config.candidate_sizes
            patches = None
            if sizes:
                weights = layer.pooling.patch_weights(prepared[i])[0]  # (image, patch)
                patches = weights.view(len(features), *sizes[0]).numpy(force=True)
            shots = None
            if isinstance(layer.cap, CrossAttentionPooling):
                bags = classifier.bags_
                attention = layer.cap.attention(embedded[i], classifier.embedded_[i], bags)
                mean = attention.mean(dim=0).transpose(0, 1)  # (query, class, shot)
                shots = _by_row(mean, classifier.support_, bags.rows, bags.real)
            found.append(BlockAttention(patches, shots))
    return found


def _by_row(
    weights: torch.Tensor, support: Features, rows: torch.Tensor, real: torch.Tensor
) -> NDArray[np.floating[Any]]:
    """(query, class, shot) to (query, support row)."""
    weights = weights.expand(-1, *rows.shape)  # without cross-attention it is one for all queries
    out = weights.new_zeros(len(weights), len(support))
    out[:, rows[real]] = weights[:, real]
    return out.numpy(force=True)


# Attention of the MIV-head: over the image, block by block, and over the shots of every class.


INK, PALE, TRACK, BAR = "#22303c", "#7b8894", "#e9edf1", "#1f7a5c"
MAX_CLASSES = 12  # drawn; the most probable ones
MAX_SHOTS = 8  # pictures of a class; those with most attention
CELL = 1.5  # inches


def draw_attention(
    image: Image.Image,
    attention: Sequence[BlockAttention],
    classes: Sequence[tuple[str, float, NDArray[np.integer[Any]]]],
    path: str | Path,
    *,
    title: str,
    pictures: Sequence[Image.Image] | None = None,
) -> None:
    """Draw where the head looked in an image, and how much each shot counted.

    Parameters
    ----------
    image
        The query.
    attention
        Of one image, by block (`mivhead.diagnostics.attention.explain`).
    classes
        Name, probability and support rows of every class, the most probable first.
    path
        A .png, .svg or .pdf.
    title
        Of the picture.
    pictures
        The shots, in the order of the support; None: bars are drawn instead.
    """
    need("matplotlib", "plot")
    from matplotlib.figure import Figure

    shown = classes[:MAX_CLASSES]
    weights = shot_weights(attention)
    maps = [(i, block.patches[0]) for i, block in enumerate(attention) if block.patches is not None]
    columns = max(len(maps) + 1, min(MAX_SHOTS, max(len(rows) for _, _, rows in shown)) + 1, 4)
    rows = 0 if weights is None else len(shown)
    height = CELL if pictures else 0.55
    figure = Figure(figsize=(CELL * columns, 0.6 + 1.25 * CELL + height * rows))
    figure.suptitle(title, color=INK, fontsize=12, parse_math=False)
    grid = figure.add_gridspec(
        1 + rows,
        columns,
        height_ratios=[1.25 * CELL] + [height] * rows,
        top=1 - 0.55 / figure.get_figheight(),
        bottom=0.3 / figure.get_figheight(),
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
        _label(figure.add_subplot(grid[row, 0]), name, probability)
        own = np.asarray(weights)[members]
        if pictures is None:
            axes = figure.add_subplot(grid[row, 1:])
            _bars(axes, own, limit, caption=row == len(shown))
            continue
        best = np.argsort(-own, kind="stable")[: columns - 1]
        for column, place in enumerate(best, start=1):
            picture = square(pictures[members[place]])
            _image(figure.add_subplot(grid[row, column]), picture, f"{100 * own[place]:.1f} %")
    save_figure(figure, path)


def shot_weights(attention: Sequence[BlockAttention]) -> NDArray[np.floating[Any]] | None:
    """Mean weight of every shot over the blocks; the shots of a class sum to 1."""
    weights = [block.shots[0] for block in attention if block.shots is not None]
    if not weights:
        return None
    mean: NDArray[np.floating[Any]] = np.mean(weights, axis=0)
    return mean


def _image(axes: Any, picture: Any, caption: str) -> None:
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color("#cfd6dc")
    axes.set_xlabel(caption, fontsize=8, color=PALE, labelpad=3)


def _label(axes: Any, name: str, probability: float) -> None:
    axes.axis("off")
    short = name if len(name) <= 18 else f"{name[:11]}...{name[-4:]}"
    text = f"{short}\n{100 * probability:.0f} %"
    axes.text(0, 0.5, text, va="center", fontsize=9, color=INK, parse_math=False)


def _excess(weights: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """How far weights are from an equal share, relative to it."""
    excess: NDArray[np.floating[Any]] = np.abs(weights * len(weights) - 1)
    return excess


def _bars(axes: Any, weights: NDArray[np.floating[Any]], limit: float, *, caption: bool) -> None:
    """Draw a bar a shot, up or down from where all would be equal."""
    bound = 1.1 * max(limit, 0.01)
    axes.bar(range(len(weights)), weights * len(weights) - 1, color=BAR, width=0.7)
    axes.axhline(0, color=PALE, linewidth=0.8)
    axes.set(xticks=[], yticks=[], xlim=(-0.6, len(weights) - 0.4), ylim=(-bound, bound))
    axes.spines[:].set_visible(False)
    axes.set_facecolor(TRACK)
    if caption:
        text = (
            f"attention to every shot: more or less than an equal share, up to {100 * limit:.0f} %"
        )
        axes.set_xlabel(text, fontsize=8, color=PALE)
