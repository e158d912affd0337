"""A method that is about to be run on a task: on features of the bank, or on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mivhead.benchmark.bank import Bank
from mivhead.benchmark.config import MethodConfig
from mivhead.benchmark.extracting import grey_features
from mivhead.benchmark.source import Source
from mivhead.benchmark.tasks import Task
from mivhead.features import Features
from mivhead.fewshot import FewShotClassifier
from mivhead.methods.registry import get_method, make_method
from mivhead.preset import Preset

Probabilities = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Keys:
    """Rows of a bank: of the support images, of the views of each, and of the queries."""

    support: tuple[str, ...]
    views: tuple[tuple[str, ...], ...]
    queries: tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """What every method on a task is given: images and backbone, its settings, task and seed."""

    source: Source
    preset: Preset
    task: Task
    seed: int


class Trial(Protocol):
    """A method that is about to be run on a task."""

    def warm_up(self) -> None:
        """Run it on a few images, so that what is loaded or set up once is not timed."""
        ...

    def fit(self) -> None:
        """Adapt to the support set."""
        ...

    def predict(self) -> Probabilities:
        """Classify the queries."""
        ...

    def sample(self) -> Features:
        """Give some features, for their shapes."""
        ...

    @property
    def iterations(self) -> int | None:
        """How many steps a solver took."""
        ...


class Gathered:
    """Features of a task, in memory: read once for all methods."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        bank = _open_bank(folder)
        self.support = bank.take(keys.support)
        self.queries = bank.take(keys.queries)
        views = [key for own in keys.views for key in own]
        self.views = bank.take(views) if views else None
        # Where the views of each support image begin among all views.
        self.starts = np.cumsum([0, *map(len, keys.views)])
        self.seconds = bank.seconds

    def take_views(self, counts: Sequence[int]) -> tuple[Features, NDArray[np.int64]] | None:
        """Return the first views of each support image, and the image that each belongs to."""
        view_of = np.repeat(np.arange(len(counts)), counts)
        if self.views is None or not len(view_of):
            return None
        starts = self.starts[:-1]
        rows = [s + i for s, count in zip(starts, counts, strict=True) for i in range(count)]
        all_of_them = len(rows) == len(self.views)
        return (self.views if all_of_them else self.views[rows]), view_of


@lru_cache(maxsize=2)
def _open_bank(folder: Path) -> Bank:
    return Bank(folder)


class FeatureTrial:
    """A method on features of the bank."""

    def __init__(
        self, given: Given, method: MethodConfig, counts: Sequence[int], shared: Gathered
    ) -> None:
        self._given, self._method, self._shared = given, method, shared
        self._labels = np.asarray(given.task.support_labels)
        self._views = shared.take_views(counts)
        self._classifier = self._make()

    def _make(self, **changes: Any) -> Any:
        return make_method(
            self._method.kind,
            preset=self._given.preset,
            recipe=self._method.recipe,
            random_state=self._given.seed,
            device=self._given.source.device,
            **self._method.params | changes,
        )

    def warm_up(self) -> None:
        """See `Trial`."""
        rows = few_rows(self._labels)
        classifier = self._make(**one_step(self._method))
        classifier.fit(self._shared.support[rows], self._labels[rows])
        classifier.predict_proba(self._shared.queries[:2])

    def fit(self) -> None:
        """See `Trial`."""
        views, view_of = self._views or (None, None)
        self._classifier.fit(self._shared.support, self._labels, views=views, view_of=view_of)

    def predict(self) -> Probabilities:
        """See `Trial`."""
        probabilities: Probabilities = self._classifier.predict_proba(self._shared.queries)
        return probabilities

    def sample(self) -> Features:
        """See `Trial`."""
        return self._shared.queries[:1]

    @property
    def iterations(self) -> int | None:
        """See `Trial`."""
        taken = getattr(self._classifier, "n_iter_", None)
        return None if taken is None else int(np.max(taken))


class ImageTrial:
    """A method that tunes the backbone, on decoded images."""

    def __init__(self, given: Given, method: MethodConfig) -> None:
        self._given, self._method = given, method
        images = given.source.open_images()
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        self._support = [images.load(rows[id_]) for id_ in given.task.support]
        self._queries = [images.load(rows[id_]) for id_ in given.task.queries]
        self._backbone = given.source.open_backbone()
        self._classifier = self._make()

    def _make(self, **changes: Any) -> FewShotClassifier:
        return FewShotClassifier(
            self._backbone,
            method=self._method.kind,
            method_params=self._method.params | changes,
            recipe=self._method.recipe,
            threshold=self._method.threshold,
            random_state=self._given.seed,
            device=self._given.source.device,
            cache=False,
            verbose=False,
        )

    def warm_up(self) -> None:
        """See `Trial`."""
        labels = np.asarray(self._given.task.support_labels)
        rows = few_rows(labels)
        classifier = self._make(**one_step(self._method))
        classifier.fit([self._support[row] for row in rows], labels[rows].tolist())
        classifier.predict_proba(self._queries[:2])

    def fit(self) -> None:
        """See `Trial`."""
        self._classifier.fit(self._support, list(self._given.task.support_labels))

    def predict(self) -> Probabilities:
        """See `Trial`."""
        return self._classifier.predict_proba(self._queries)

    def sample(self) -> Features:
        """See `Trial`."""
        return grey_features(self._backbone)

    @property
    def iterations(self) -> int | None:
        """See `Trial`."""
        return None


def few_rows(labels: NDArray[np.int64]) -> list[int]:
    """Rows of two images of each of the first two classes.

    >>> few_rows(np.array([0, 0, 0, 1, 2, 2]))
    [0, 1, 3]
    """
    return [int(row) for label in (0, 1) for row in np.flatnonzero(labels == label)[:2]]


def one_step(method: MethodConfig) -> dict[str, int]:
    """Shorten the training of a method, where it can be."""
    return {"steps": 1} if "steps" in get_method(method.kind).hyperparameters() else {}
