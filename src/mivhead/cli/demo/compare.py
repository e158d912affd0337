"""The MIV-head against plain heads, on the same features and the same seeded tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead.progress import progress_bar

if TYPE_CHECKING:
    from mivhead.cli.demo.scale import Scale
    from mivhead.features import Features
    from mivhead.preset import Preset

METHODS = {"miv": "MIV-head", "logistic": "logistic regression", "ncc": "nearest centroid"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Accuracies of each method, task by task."""

    accuracies: dict[str, NDArray[np.floating[Any]]]  # by method: (task,)

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(next(iter(self.accuracies.values())))

    def mean(self, method: str) -> float:
        """Mean accuracy over the tasks."""
        return float(self.accuracies[method].mean())

    def half_width(self, method: str) -> float:
        """Half of the 95 % interval of the mean, by Student's t."""
        from scipy import stats

        values = self.accuracies[method]
        quantile = stats.t.ppf(0.975, self.tasks - 1)
        return float(quantile * values.std(ddof=1) / math.sqrt(self.tasks))

    def difference(self, method: str, rival: str) -> tuple[float, float]:
        """Mean difference of two methods, and the p-value of a paired t-test (1 if all tie)."""
        from scipy import stats

        gaps = self.accuracies[method] - self.accuracies[rival]
        if not gaps.any():
            return 0.0, 1.0
        if np.ptp(gaps) == 0:
            return float(gaps.mean()), 0.0
        return float(gaps.mean()), float(stats.ttest_1samp(gaps, 0.0).pvalue)


def compare(
    features: Features,
    labels: NDArray[Any],
    preset: Preset,
    scale: Scale,
    *,
    seed: int,
    verbose: bool,
) -> Comparison:
    """Draw tasks from a pool of images; every method learns and is tested on the same ones.

    Parameters
    ----------
    features, labels
        The pool: each image has passed the backbone once.
    preset
        The backbone's settings for the MIV-head.
    scale
        How many tasks, and images per class to learn from and to test on in each.
    seed
        Of the tasks and the initial weights.
    verbose
        Show a progress bar.
    """
    from mivhead.methods import make_method

    found: dict[str, list[float]] = {name: [] for name in METHODS}
    with progress_bar("tasks", scale.tasks, show=verbose, unit="task") as advance:
        for task in range(scale.tasks):
            generator = np.random.default_rng([seed, task])
            support, query = _draw(labels, scale, generator)
            for name, scores in found.items():
                model = make_method(name, preset=preset, random_state=task)
                model.fit(features[support], labels[support])
                scores.append(model.score(features[query], labels[query]))
            advance(1)
    return Comparison({name: np.array(scores) for name, scores in found.items()})


def _draw(
    labels: NDArray[Any], scale: Scale, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of a task's support and query images."""
    support, query = [], []
    for name in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == name))
        support.append(rows[: scale.shots])
        query.append(rows[scale.shots : scale.shots + scale.queries])
    return np.concatenate(support), np.concatenate(query)
