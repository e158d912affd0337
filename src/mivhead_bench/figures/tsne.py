"""The vectors that a method compares - shots, prototypes and a query - drawn by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.pictures import INK, PALE, new_figure, save_figure, short
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.head.formulas import Projected
from mivhead_bench.methods.base import class_means, pooled

Vectors = NDArray[np.floating[Any]]

MAX_NAMED = 12  # classes with colours of their own, if there are more than colours
# Hues that differ, in two lightnesses (matplotlib's tab20 without its greys, and two more).
COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22"),
    *("#17becf", "#003f5c", "#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94"),
    *("#f7b6d2", "#dbdb8d", "#9edae5", "#ffd92f"),
)
OTHER = "#d5dbe1"
PERPLEXITY = 30.0


@dataclass(frozen=True, eq=False)
class Embeddings:
    """A query, the shots and the prototypes it is compared with, as vectors of one space."""

    title: str  # name of the space, such as `block 2 of 4`
    shots: Vectors  # (shot, channel), ordered by class
    labels: NDArray[np.integer[Any]]  # (shot), numbers of classes
    prototypes: Vectors  # (class, channel)
    query: Vectors  # (channel)


def miv_embeddings(classifier: MIVClassifier, X: Any) -> list[Embeddings]:
    """Compute the vectors that the MIV-head compares for one image, block by block.

    All of them depend on the query through its gate g: v^Q = V g + K of the query, V g + K of every
    shot, and v^P of every class, the mean of its shots weighted by attention.

    >>> X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    >>> classifier = MIVClassifier(random_state=0).fit(X, [0, 0, 0, 1, 1, 1])
    >>> [(e.shots.shape, e.prototypes.shape) for e in miv_embeddings(classifier, X[:1])]
    [((6, 8), (2, 8))]
    """
    if not classifier.head_.layers:
        raise InputError("Only a head has prototypes that depend on the query.")
    features = _one(classifier.as_features(X))
    head, starts = classifier.head_, classifier.starts_
    labels = _labels(classifier)
    panels = []
    for i, (layer, query) in enumerate(zip(head.layers, head.embed(features), strict=True)):
        support = classifier.embedded_[i]
        gated = _gated(support, query)  # (shot, channel)
        comparison = layer.comparison(query, support, starts)
        prototypes = comparison.pool(comparison.attention(), gated)[0]
        name = f"block {i + 1} of {len(head.layers)}"
        panels.append(Embeddings(name, gated, labels, prototypes, _gated(query, query)[0]))
    return panels


def _labels(classifier: MIVClassifier) -> NDArray[np.int64]:
    """Return the class numbers of the shots."""
    return np.repeat(np.arange(len(classifier.shots_)), classifier.shots_)


def centroid_embeddings(classifier: MIVClassifier, X: Any) -> Embeddings:
    """Compute what a nearest-centroid classifier compares for one image, with the same shots.

    These are pooled features of the deepest block, and their class means.
    """
    features = _one(classifier.as_features(X))
    labels, shots = _labels(classifier), pooled(classifier.support_)
    means = class_means(shots.astype(np.float64), labels)
    return Embeddings("nearest centroids", shots, labels, means, pooled(features)[0])


def _gated(images: Projected, query: Projected) -> NDArray[np.float32]:
    """Compute V g + K of images, with the gate g of one query: (image, channel)."""
    return images.value * query.gate + images.key


def _one(features: Features) -> Features:
    if len(features) != 1:
        raise InputError(f"X must hold the features of one image, got {len(features)}.")
    return features


def project(embeddings: Embeddings, seed: int) -> Vectors:
    """Project shots, prototypes and query, in this order, onto a plane by t-SNE: (vector, 2)."""
    stacked = np.concatenate([embeddings.shots, embeddings.prototypes, embeddings.query[None]])
    perplexity = max(1.0, min(PERPLEXITY, (len(stacked) - 1) / 3))
    # Its threads synchronize at every step: with fewer cores than threads it stalls.
    with threadpool_limits(1):
        plane: Vectors = TSNE(
            init="pca" if len(stacked) > 2 else "random",
            perplexity=perplexity,
            random_state=seed,
            learning_rate="auto",
        ).fit_transform(stacked.astype(np.float32))
    return plane


def draw_tsne(
    panels: Sequence[Embeddings],
    names: Sequence[str],
    path: str | Path | None = None,
    *,
    title: str,
    truth: str | None = None,
    seed: int = 0,
    ranked: Sequence[str] | None = None,
) -> Figure:
    """Draw panels side by side: shots are circles, prototypes squares, the query a star.

    Up to 20 classes have colours of their own. Of more classes, only the first of `ranked` do, and
    the others are grey.
    The star has the colour of the class `truth`, or is black. Without a path nothing is written.
    """
    named = list(names if ranked is None else ranked)
    if truth is not None:
        named = sorted(named, key=lambda name: name != truth)  # the true class first
    if len(names) > len(COLOURS):
        named = named[:MAX_NAMED]
    order = {name: place for place, name in enumerate(n for n in names if n in set(named))}
    colours = [COLOURS[order[name]] if name in order else OTHER for name in names]
    width = 3.9 * len(panels) + 2.4
    figure = new_figure(width, max(4.6, 0.6 + 0.2 * (len(order) + 5)), layout="constrained")
    figure.suptitle(title, color=INK, fontsize=12, parse_math=False)
    for column, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), column + 1, xticks=[], yticks=[])
        axes.set_title(panel.title, fontsize=10, color=INK)
        axes.spines[:].set_color(PALE)
        axes.margins(0.08)
        points = project(panel, seed)
        shots, rest = np.split(points, [len(panel.shots)])
        for number, (name, colour) in enumerate(zip(names, colours, strict=True)):
            members = shots[panel.labels == number]
            front = name in order  # grey classes stay behind the others
            axes.scatter(
                members[:, 0],
                members[:, 1],
                s=34 if front else 14,
                color=colour,
                alpha=0.75,
                linewidth=0,
                zorder=2 if front else 1,
            )
            x, y = rest[number]
            axes.scatter(
                x,
                y,
                s=95 if front else 30,
                color=colour,
                marker="s",
                edgecolor=INK if front else PALE,
                linewidth=1 if front else 0.5,
                zorder=3 if front else 1,
            )
        star = "black" if truth is None else colours[list(names).index(truth)]
        x, y = rest[-1]
        axes.scatter(
            x, y, s=330, color=star, marker="*", edgecolor="black", linewidth=1.1, zorder=4
        )
    _legend(figure, {name: COLOURS[place] for name, place in order.items()}, len(names))
    return save_figure(figure, path)


def _legend(figure: Any, colours: Mapping[str, str], classes: int) -> None:
    """Explain the three shapes, name the coloured classes, and say how many others are grey."""
    style: dict[str, Any] = {"linestyle": "", "markeredgecolor": INK}
    shapes = {"shot": ("o", 6), "prototype": ("s", 8), "query": ("*", 13)}
    marks = {
        name: Line2D([], [], marker=mark, markersize=size, color=PALE, **style)
        for name, (mark, size) in shapes.items()
    }
    style["markeredgecolor"] = "none"
    for name, colour in colours.items():
        marks[short(name)] = Line2D([], [], marker="o", markersize=6, color=colour, **style)
    if others := classes - len(colours):
        label = f"{others} other classes"
        marks[label] = Line2D([], [], marker="o", markersize=4, color=OTHER, **style)
    legend = figure.legend(
        marks.values(), marks.keys(), loc="outside right center", fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a class name is not a formula
