"""t-SNE pictures of an episode: shots are circles, prototypes squares, the query a star."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.episode import Episode
from mivhead.pictures.saving import save_figure

INK, PALE = "#22303c", "#8a97a3"
MAX_LEGEND = 24  # classes that are named
PERPLEXITY = 30.0


def place(episode: Episode, seed: int) -> NDArray[np.floating[Any]]:
    """Lay all vectors of an episode out on a plane: shots, prototypes, query, (vector, 2)."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    stacked = np.concatenate([episode.shots, episode.prototypes, episode.query[None]])
    perplexity = max(1.0, min(PERPLEXITY, (len(stacked) - 1) / 3))
    # Its threads wait for each other at every step: with fewer cores than threads it stalls.
    with threadpool_limits(1):
        plane: NDArray[np.floating[Any]] = TSNE(
            init="pca" if len(stacked) > 2 else "random",
            perplexity=perplexity,
            random_state=seed,
            learning_rate="auto",
        ).fit_transform(stacked.astype(np.float32))
    return plane


def draw_tsne(
    episodes: Sequence[Episode],
    names: Sequence[str],
    path: str | Path,
    *,
    title: str,
    truth: str | None = None,
    seed: int = 0,
) -> None:
    """Draw one panel for each set of vectors, side by side.

    Parameters
    ----------
    episodes
        Vectors, each with a title (`mivhead.episode`).
    names
        The classes.
    path
        A .png, .svg or .pdf.
    title
        Of the whole picture.
    truth
        Class of the query, whose colour the star has; None: the star is black.
    seed
        Of t-SNE.
    """
    from matplotlib.figure import Figure

    colours = _colours(len(names))
    width = 3.9 * len(episodes) + 2.2
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    figure.suptitle(title, color=INK, fontsize=12, parse_math=False)
    for column, episode in enumerate(episodes):
        axes = figure.add_subplot(1, len(episodes), column + 1, xticks=[], yticks=[])
        axes.set_title(episode.title, fontsize=10, color=INK)
        axes.spines[:].set_color(PALE)
        axes.margins(0.08)
        points = place(episode, seed)
        shots, rest = np.split(points, [len(episode.shots)])
        for number, (name, colour) in enumerate(zip(names, colours, strict=True)):
            own = shots[episode.labels == number]
            axes.scatter(
                own[:, 0], own[:, 1], s=34, color=colour, alpha=0.75, linewidth=0, label=name
            )
            x, y = rest[number]
            axes.scatter(x, y, s=95, color=colour, marker="s", edgecolor=INK, linewidth=1)
        star = "black" if truth is None else colours[list(names).index(truth)]
        x, y = rest[-1]
        axes.scatter(x, y, s=330, color=star, marker="*", edgecolor="black", linewidth=1.1)
    _legend(figure, axes, len(names))
    save_figure(figure, path)


def _legend(figure: Any, axes: Any, classes: int) -> None:
    """Name the classes, as many as fit, and the three shapes."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    style: dict[str, Any] = {"color": PALE, "linestyle": "", "markeredgecolor": INK}
    shapes = {"shot": ("o", 6), "prototype": ("s", 8), "query": ("*", 13)}
    marks = [Line2D([], [], marker=m, markersize=size, **style) for m, size in shapes.values()]
    shown = min(classes, MAX_LEGEND)
    more = [] if shown == classes else [f"and {classes - shown} more"]
    blank = [Line2D([], [], linestyle="")] * len(more)
    legend = figure.legend(
        marks + handles[:shown] + blank,
        [*shapes, *labels[:shown], *more],
        loc="outside right center",
        fontsize=8,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a class name is a dollar


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    if count <= 20:
        palette = colormaps["tab10" if count <= 10 else "tab20"]
        return [palette(i) for i in range(count)]
    return [colormaps["hsv"](i / count) for i in range(count)]
