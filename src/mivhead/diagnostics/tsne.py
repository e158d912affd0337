"""The vectors that a method compares - shots, prototypes and a query - drawn by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.pictures import INK, PALE, new_figure, save_figure
from mivhead.engine.head import HeadBlock, Projected
from mivhead.ensemble.names import compared
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.images.imageset import ImageSet
from mivhead.methods import method_name
from mivhead.methods.base import class_means, pooled
from mivhead.model.fewshot import FewShotClassifier
from mivhead.model.readers import load_pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Vectors = NDArray[np.floating[Any]]

MAX_NAMED = 12  # classes with colours of their own, if there are more than colours
LETTERS = 36  # of a class name
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
    """A query, the shots and the prototypes it is compared with, as vectors of one space.

    Parameters
    ----------
    title : str
        The name of the space, such as `block 2 of 4`.
    shots : array of shape (shot, channel)
        The shots, ordered by class.
    labels : array of shape (shot,)
        The index of each shot's class.
    prototypes : array of shape (class, channel)
        One vector per class.
    query : array of shape (channel,)
        The query.
    """

    title: str
    shots: Vectors
    labels: NDArray[np.integer[Any]]
    prototypes: Vectors
    query: Vectors


def miv_embeddings(classifier: MIVClassifier, X: Any) -> list[Embeddings]:
    """Compute the vectors that the MIV-head compares for one image, block by block.

    All of them depend on the query through its gate g: v^Q = V g + K of the query, V g + K of every
    shot, and v^P of every class, the mean of its shots weighted by attention.

    Parameters
    ----------
    classifier : MIVClassifier
        A fitted classifier.
    X : Features or array-like
        Features of one image.

    Returns
    -------
    list of Embeddings
        One per block, shallow to deep.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    >>> classifier = MIVClassifier(random_state=0).fit(X, [0, 0, 0, 1, 1, 1])
    >>> [(e.shots.shape, e.prototypes.shape) for e in miv_embeddings(classifier, X[:1])]
    [((6, 8), (2, 8))]
    """
    if isinstance(classifier, MIVClassifier) and not len(compared(classifier.shots_)):
        raise InputError("The model knows its classes by name alone: there are no shots to draw.")
    if not isinstance(classifier, MIVClassifier) or not classifier.head_.layers:
        raise InputError("Only the MIV-head has prototypes that depend on the query.")
    features = _one(classifier._as_features(X))
    head, bags = classifier.head_, classifier.bags_
    labels = _labels(classifier)
    found = []
    for i, (layer, query) in enumerate(
        zip(head.layers, head.embed(head.prepare(features)), strict=True)
    ):
        support = classifier.embedded_[i]
        gated = _gated(layer, support, query)  # (shot, channel)
        comparison = layer.comparison(query, support, bags)
        prototypes = comparison.pool(comparison.weigh_shots(slice(None)), gated)[0]
        name = f"block {i + 1} of {len(head.layers)}"
        own = _gated(layer, query, query)[0]
        found.append(Embeddings(name, gated, labels, prototypes, own))
    return found


def _labels(classifier: MIVClassifier) -> NDArray[np.int64]:
    """Return the class numbers of the shots, counting only classes that have some."""
    counts = classifier.shots_[classifier.shots_ > 0]
    return np.repeat(np.arange(len(counts)), counts)


def centroid_embeddings(classifier: MIVClassifier, X: Any) -> Embeddings:
    """Compute the vectors that a nearest-centroid classifier compares for one image.

    The shots are the support of a fitted MIV-head.

    Parameters
    ----------
    classifier : MIVClassifier
        A fitted classifier.
    X : Features or array-like
        Features of one image.

    Returns
    -------
    Embeddings
        Pooled features of the deepest block, and their class means.
    """
    features = _one(classifier._as_features(X))
    labels, shots = _labels(classifier), pooled(classifier.support_)
    means = class_means(shots, labels, int(labels.max()) + 1)
    return Embeddings("nearest centroids", shots, labels, means, pooled(features)[0])


def tuned_embeddings(model: FewShotClassifier, shots: ImageSet, image: ImageSet) -> Embeddings:
    """Compute the vectors of a method that tunes the backbone, such as TSA, for one image.

    The shots are those that the model was trained on, ordered by class. Returns outputs of the
    tuned backbone, and the class means that the model keeps.
    """
    from mivhead.methods.tuning.base import TuningClassifier, embed, predicted_at_once

    tuner = model.classifier_
    if not isinstance(tuner, TuningClassifier):
        raise InputError("The model does not tune its backbone; its vectors are the features.")
    model.predict_proba(image)  # a loaded model copies its network when it gets the first image
    network = tuner.network_
    vectors, query = (
        embed(
            network,
            load_pixels(images, network.size, verbose=False)[0],
            predicted_at_once(network),
        )
        for images in (shots, image)
    )
    names = [str(name) for name in tuner.classes_]
    return Embeddings(
        method_name(tuner),
        vectors.numpy(force=True),
        np.array([names.index(label) for label in shots.labels or ()]),
        tuner.means_.numpy(force=True),
        query[0].numpy(force=True),
    )


def _gated(layer: HeadBlock, images: Projected, query: Projected) -> NDArray[np.float32]:
    """Compute V g + K of images, with the gate g of one query: (image, channel)."""
    values = images.value if query.gate is None else images.value * query.gate
    skips = layer.recipe.skip and layer.recipe.prototype == "cap"
    return values + images.key if skips else values


def _one(features: Features) -> Features:
    if len(features) != 1:
        raise InputError(f"X must hold the features of one image, got {len(features)}.")
    return features


def project(embeddings: Embeddings, seed: int) -> Vectors:
    """Project shots, prototypes and query, in this order, onto a plane by t-SNE: (vector, 2)."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

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

    Parameters
    ----------
    panels : sequence of Embeddings
        The vectors to draw.
    names : sequence of str
        The classes.
    path : str, Path or None, default=None
        The file to write: .png, .svg or .pdf. None writes nothing.
    title : str
        Title of the drawing.
    truth : str, default=None
        Class of the query, which gives the star its colour; None draws a black star.
    seed : int, default=0
        Random seed of t-SNE.
    ranked : sequence of str or None, default=None
        The classes, the most interesting first, such as the most probable; None: as in `names`.

    Returns
    -------
    matplotlib.figure.Figure
        A notebook shows it.
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
            own = shots[panel.labels == number]
            front = name in order  # grey classes stay behind the others
            axes.scatter(
                own[:, 0],
                own[:, 1],
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
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": "", "markeredgecolor": INK}
    shapes = {"shot": ("o", 6), "prototype": ("s", 8), "query": ("*", 13)}
    marks = {
        name: Line2D([], [], marker=mark, markersize=size, color=PALE, **style)
        for name, (mark, size) in shapes.items()
    }
    style["markeredgecolor"] = "none"
    for name, colour in colours.items():
        marks[_short(name)] = Line2D([], [], marker="o", markersize=6, color=colour, **style)
    if others := classes - len(colours):
        label = f"{others} other classes"
        marks[label] = Line2D([], [], marker="o", markersize=4, color=OTHER, **style)
    legend = figure.legend(
        marks.values(), marks.keys(), loc="outside right center", fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a class name is not a formula


def _short(name: str) -> str:
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 13]}...{name[-10:]}"
