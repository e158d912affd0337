"""Which images to label next, so that accuracy grows fastest.

Typical images of different kinds first (TypiClust): the images are clustered together with the
shots, and from each cluster without a shot, the largest first, the image in the densest place is
taken. With few labels this beats uncertainty by far, because an uncertain image is often an
untypical one. Once classes have several shots, only the images with the smallest margins are
clustered, and the one with the smallest margin of each cluster is taken. Near-duplicates are
suggested once. Images that the model calls "none of these" are clustered on their own and suggested
as possible new classes.

References
----------
Hacohen, Dekel and Weinshall, "Active learning on a budget: opposite strategies suit high and low
budgets", ICML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import Floats
from mivhead.decision import NONE
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.errors import InputError
from mivhead.features import FeatureTable
from mivhead.images.sources import as_image_set
from mivhead.model.model import Model

NEIGHBOURS = 20  # that typicality is measured on
DUPLICATE = 0.985  # cosine of mean vectors above which two images are nearly the same
MANY = 3  # mean shots per class from which on margins decide
CLOSE = 3  # how many times as many images with small margins are then clustered as are suggested
NEW_SHARE = 0.5  # of the suggestions that may go to possible new classes
MAX_CLUSTERS = 500
LLOYD = 50  # steps of the clustering, at most
AT_ONCE = 256  # images that are compared with all others


@dataclass(frozen=True)
class Suggestion:
    """An image to label next."""

    id: str
    label: Any  # what the model takes it for; None without a model
    represents: int  # number of images in its cluster
    new_class: int | None = None  # number of the possible new class that it belongs to, from 1
    # The second most probable class, if the model can hardly tell the two apart
    runner_up: Any = None

    @property
    def reason(self) -> str:
        """Why it is suggested, in words."""
        if self.runner_up is not None:
            return f"{self.label} or {self.runner_up}?"
        photos = f"{self.represents} photo{'' if self.represents == 1 else 's'}"
        if self.new_class is not None:
            return f"possible new class {self.new_class}, like {photos}"
        return f"typical of {photos}"


def suggest(
    images: Any, n: int = 10, *, model: Model | None = None, seed: int = 0
) -> list[Suggestion]:
    """Suggest which images to label next.

    Parameters
    ----------
    images : images or FeatureTable
        Unlabelled images: what `FewShotClassifier.predict` takes.
    n : int, default=10
        How many suggestions to make; fewer if there are not that many different images.
    model : FewShotClassifier or None, default=None
        The model that the labels are for. None: there is none yet, and the default backbone is
        used.
    seed : int, default=0
        Random seed of the clustering.

    Returns the best ones first.

    Examples
    --------
    >>> from mivhead import Features
    >>> X = Features(np.repeat(np.eye(3, 8), [5, 3, 2], axis=0) + 0.1 * np.eye(10, 8))
    >>> table = FeatureTable(X, tuple("abcdefghij"))
    >>> [suggestion.represents for suggestion in suggest(table, 3)]
    [5, 3, 2]
    """
    if n < 1:
        raise InputError(f"n must be at least 1, got {n}.")
    table = images
    if not isinstance(table, FeatureTable):
        unlabelled = replace(as_image_set(images), labels=None)
        table = (model or Model()).extract(unlabelled)
    vectors = mean_vectors(table.features.blocks[-1])
    if model is None:
        chosen = choose(vectors, n, seed=seed)
        return [Suggestion(table.ids[row], None, size) for row, size in chosen]
    predictions = model.classify(table)
    unknown = np.array([prediction.decision == NONE for prediction in predictions])
    new_classes: list[Suggestion] = []
    new_rows = np.flatnonzero(unknown)
    room = min(int(np.ceil(NEW_SHARE * n)), len(new_rows))
    if room:
        picked = choose(vectors[new_rows], room, seed=seed)
        new_classes = [
            Suggestion(table.ids[new_rows[row]], None, size, number)
            for number, (row, size) in enumerate(picked, start=1)
        ]
    known: list[Suggestion] = []
    rows, room = np.flatnonzero(~unknown), n - len(new_classes)
    if len(rows) and room:
        several = _mean_shots(model) >= MANY
        if several:
            top = np.array([[p for _, p in prediction.top(2)] for prediction in predictions])
            margins = top[:, 0] - top[:, 1]
            rows = rows[np.argsort(margins[rows], kind="stable")]
            rows = rows[_without_duplicates(vectors[rows])[: CLOSE * room]]
            picked = choose(vectors[rows], room, None, margins[rows], seed=seed)
        else:
            shots = None
            if model.shots_ is not None:
                shots = mean_vectors(model.shots_.features.blocks[-1])
            picked = choose(vectors[rows], room, shots, seed=seed)
        for row, size in picked:
            label, runner_up = islice(predictions[rows[row]].probabilities, 2)
            second = runner_up if several else None
            known.append(Suggestion(table.ids[rows[row]], label, size, runner_up=second))
    return known + new_classes


def _mean_shots(model: Model) -> float:
    """Return the mean number of shots of the classes with a name; 0 if the model kept none."""
    if model.shots_ is None:
        return 0.0
    counts = [count for label, count in model.shots_.counts.items() if label != model.other]
    return float(np.mean(counts)) if counts else 0.0


def choose(
    vectors: Floats,
    n: int,
    labelled: Floats | None = None,
    margins: Floats | None = None,
    *,
    seed: int = 0,
) -> list[tuple[int, int]]:
    """Choose n rows that stand for all others: the core of `suggest`, on vectors of length 1.

    Vectors are (image, channel). If margins are given, the smallest one of a cluster is chosen
    instead of the most typical image. Returns rows, and the number of images in their clusters; the
    most useful first.
    """
    kept = _without_duplicates(vectors)
    points = vectors[kept].astype(np.float64)
    old = np.empty((0, points.shape[1])) if labelled is None else labelled.astype(np.float64)
    everything = np.concatenate([points, old])
    count = min(len(old) + n, len(everything), MAX_CLUSTERS)
    centres = k_means(everything, count, np.random.default_rng(seed))
    assigned = _nearest(everything, centres)
    cluster = assigned[: len(points)]
    covered = np.bincount(assigned[len(points) :], minlength=count)
    sizes = np.bincount(_nearest(vectors.astype(np.float64), centres), minlength=count)
    taken: list[tuple[int, int]] = []
    left = np.ones(len(points), bool)
    while len(taken) < min(n, len(points)):
        # The cluster with the fewest labels, then the largest; then again, if there are too few.
        alive = np.bincount(cluster[left], minlength=count) > 0
        best = min(np.flatnonzero(alive), key=lambda c: (covered[c], -sizes[c]))
        members = np.flatnonzero((cluster == best) & left)
        if margins is None:
            row = members[_typicality(points[cluster == best], points[members]).argmax()]
        else:
            row = members[margins[kept][members].argmin()]
        taken.append((int(kept[row]), int(sizes[best])))
        left[row] = False
        covered[best] += 1
    return taken


def k_means(points: Floats, count: int, generator: np.random.Generator) -> Floats:
    """Cluster points by Lloyd's algorithm, from a start that is spread out (k-means++).

    Points are (point, channel). Returns `count` centres, at most as many as points; points that are
    all the same have equal centres.

    References
    ----------
    Arthur and Vassilvitskii 2007, "k-means++: The Advantages of Careful Seeding".

    Examples
    --------
    >>> points = np.array([[0.0], [1.0], [10.0], [11.0]])
    >>> sorted(k_means(points, 2, np.random.default_rng(0))[:, 0].tolist())
    [0.5, 10.5]
    """
    rows = [int(generator.integers(len(points)))]
    distance = np.full(len(points), np.inf)
    while len(rows) < count:  # a further one with a chance that grows with its distance
        distance = np.minimum(distance, _squares(points, points[rows[-1:]])[:, 0])
        total = float(distance.sum())
        shares = distance / total if total > 0 else np.full(len(points), 1 / len(points))
        rows.append(int(generator.choice(len(points), p=shares)))
    centres = points[rows]
    for _ in range(LLOYD):
        assigned = _nearest(points, centres)
        filled = np.unique(assigned)
        moved = centres.copy()
        moved[filled] = [points[assigned == c].mean(axis=0) for c in filled]
        if np.allclose(moved, centres, atol=1e-6):
            break
        centres = moved
    return centres


def _squares(points: Floats, centres: Floats) -> Floats:
    """Squared distances (point, centre)."""
    both = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)
    squares: Floats = np.maximum(both - 2 * points @ centres.T, 0.0)
    return squares


def _nearest(points: Floats, centres: Floats) -> NDArray[np.int64]:
    """Return the centre that each point is nearest to."""
    nearest: NDArray[np.int64] = _squares(points, centres).argmin(axis=1)
    return nearest


def _typicality(cluster: Floats, members: Floats) -> Floats:
    """Return the mean similarity of each member to its nearest neighbours in the cluster."""
    similarity = np.sort(members @ cluster.T, axis=1)[:, ::-1][:, 1 : 1 + NEIGHBOURS]
    if not similarity.shape[1]:
        return np.zeros(len(members))
    mean: Floats = similarity.mean(axis=1)
    return mean


def _without_duplicates(vectors: Floats) -> NDArray[np.int64]:
    """Return the rows that are not nearly the same as an earlier row."""
    kept: list[int] = []
    unlike = np.empty_like(vectors)  # those that are kept
    for start in range(0, len(vectors), AT_ONCE):
        part = vectors[start : start + AT_ONCE]
        before = (unlike[: len(kept)] @ part.T).max(axis=0, initial=-1.0)  # (row,)
        among = part @ part.T
        chosen: list[int] = []
        for i in np.flatnonzero(before < DUPLICATE).tolist():
            if among[i][chosen].max(initial=-1.0) < DUPLICATE:
                chosen.append(i)
        unlike[len(kept) : len(kept) + len(chosen)] = part[chosen]
        kept += [start + i for i in chosen]
    return np.array(kept, np.int64)
