"""The methods that the accuracy measurements compare, each on one task at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from sklearn.linear_model import LogisticRegression

from _tasks import Bank, Rows, Task
from mivhead import MIVClassifier, Preset

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class Method(Protocol):
    """Fits and predicts one task."""

    @property
    def key(self) -> str:
        """What it is called in result files: equal for equal settings."""
        ...

    @property
    def taps(self) -> tuple[str, ...]:
        """The blocks it needs."""
        ...

    @property
    def views(self) -> bool:
        """Whether it is given the augmented views of the shots."""
        ...

    def run(self, bank: Bank, task: Task) -> tuple[float, float]:
        """Accuracy on the task's queries, and seconds of processor time to fit."""
        ...


@dataclass(frozen=True)
class Miv:
    """The MIV-head with the paper's recipe; the task's number seeds its initial weights."""

    preset: Preset
    views: bool

    @property
    def key(self) -> str:
        """Taps and candidates ("n" is the native map), such as `bn2[n,6,5,4]`."""
        return "miv " + describe(self.preset) + _with_views(self.views)

    @property
    def taps(self) -> tuple[str, ...]:
        """The preset's."""
        return self.preset.taps

    def run(self, bank: Bank, task: Task) -> tuple[float, float]:
        """See `Method`."""
        support = bank.of_images(task.support, self.taps)
        views, view_of = bank.of_views(task.support, self.taps) if self.views else (None, None)
        start = time.process_time()
        head = MIVClassifier("paper", self.preset, random_state=task.number)
        head.fit(support, bank.labels[task.support], views=views, view_of=view_of)
        seconds = time.process_time() - start
        queries = bank.of_images(task.queries, self.taps)
        return head.score(queries, bank.labels[task.queries]), seconds


@dataclass(frozen=True)
class Logistic:
    """scikit-learn's logistic regression on a map's average, not scaled; views are more shots."""

    C: float
    views: bool
    taps: tuple[str] = ("bn2",)

    @property
    def key(self) -> str:
        """Its strength of regularisation."""
        return f"logistic C={self.C:g}" + _with_views(self.views)

    def run(self, bank: Bank, task: Task) -> tuple[float, float]:
        """See `Method`."""
        x, y = shots(bank, task, self.taps, views=self.views)
        start = time.process_time()
        head = LogisticRegression(C=self.C, max_iter=2000).fit(x, y)
        seconds = time.process_time() - start
        return head.score(pooled(bank, task.queries, self.taps), bank.labels[task.queries]), seconds


@dataclass(frozen=True)
class Centroid:
    """Cosine to the mean of each class's averaged maps, neither normalised nor centred."""

    views: bool
    taps: tuple[str] = ("bn2",)

    @property
    def key(self) -> str:
        """It has no settings."""
        return "centroid" + _with_views(self.views)

    def run(self, bank: Bank, task: Task) -> tuple[float, float]:
        """See `Method`."""
        x, y = shots(bank, task, self.taps, views=self.views)
        start = time.process_time()
        classes = np.unique(y)
        means = np.stack([x[y == name].mean(axis=0) for name in classes])  # (class, channel)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        seconds = time.process_time() - start
        # The length of a query does not change its nearest class.
        best = classes[(pooled(bank, task.queries, self.taps) @ means.T).argmax(axis=1)]
        return float((best == bank.labels[task.queries]).mean()), seconds


def shots(bank: Bank, task: Task, taps: tuple[str], *, views: bool) -> tuple[Vectors, Any]:
    """Pooled features and labels of the shots, and of their views if wanted."""
    x, y = pooled(bank, task.support, taps), bank.labels[task.support]
    if not views:
        return x, y
    features, view_of = bank.of_views(task.support, taps)
    return np.concatenate([x, average(features)]), np.concatenate([y, y[view_of]])


def pooled(bank: Bank, rows: Rows, taps: tuple[str]) -> Vectors:
    """Pooled features of images."""
    return average(bank.of_images(rows, taps))


def average(features: Any) -> Vectors:
    """Global average of the only block: (image, channel)."""
    mean: Vectors = features.blocks[0].map.float().mean(dim=(2, 3)).numpy()
    return mean


def describe(preset: Preset) -> str:
    """Taps and their candidates in one word; "n" is the native map."""
    parts = []
    for tap, block in zip(preset.taps, preset.blocks, strict=True):
        sizes = ["n"] * block.native + [str(size) for size in block.pool_sizes]
        parts.append(f"{tap}[{','.join(sizes)}]")
    return "+".join(parts)


def _with_views(views: bool) -> str:
    return " +views" if views else ""
