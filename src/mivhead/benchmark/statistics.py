"""What numbers over tasks say: intervals, paired tests, corrections, ranks, calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.errors import InputError

LEVEL = 0.01  # of the paper's tests
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Summary:
    """A mean over tasks with half of its 95 % interval."""

    mean: float
    half_width: float
    n: int

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half_width:.1f}"

    @property
    def signed(self) -> str:
        """The same with a sign, for differences."""
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f}"


def summarise(values: ArrayLike) -> Summary:
    """Mean and 1.96 std / sqrt(n), with the std of the values themselves (ddof 0), as the paper.

    >>> str(summarise([0.5, 0.7, 0.9]))
    '70.0 ± 18.5'
    """
    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        raise InputError("There is no result to summarise.")
    return Summary(float(x.mean()), float(NORMAL_95 * x.std() / math.sqrt(x.size)), x.size)


@dataclass(frozen=True)
class Paired:
    """One method minus another over the same tasks.

    Parameters
    ----------
    difference
        Mean of the differences, with its interval.
    p
        Of the two-sided paired t-test; 1 with fewer than two tasks.
    p_wilcoxon
        Of the two-sided signed-rank test, which assumes no normal distribution.
    """

    difference: Summary
    p: float
    p_wilcoxon: float

    @property
    def significant(self) -> bool:
        """Whether the t-test is below the paper's level."""
        return self.p < LEVEL


def paired_test(first: ArrayLike, second: ArrayLike) -> Paired:
    """Compare two methods on the same tasks, given in the same order.

    >>> paired_test([0.8, 0.9, 0.7, 0.8], [0.6, 0.8, 0.6, 0.5]).difference.mean.__round__(3)
    0.175
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise InputError(f"A paired test needs equal tasks, got {a.size} and {b.size} results.")
    # Accuracies are ratios of small numbers: what differs less is rounding, not a difference.
    differences = np.round(a - b, 12)
    return Paired(summarise(differences), _t_test(differences), _wilcoxon(differences))


def _t_test(differences: NDArray[np.float64]) -> float:
    from scipy.special import stdtr

    n = differences.size
    if n < 2 or not differences.any():
        return 1.0
    if np.ptp(differences) == 0:  # the same difference in all tasks
        return 0.0
    t = float(differences.mean()) / (float(differences.std(ddof=1)) / math.sqrt(n))
    return float(2 * stdtr(n - 1, -abs(t)))


def _wilcoxon(differences: NDArray[np.float64]) -> float:
    from scipy.stats import wilcoxon

    if not differences.any():
        return 1.0
    return float(wilcoxon(differences).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for being many (Holm 1979), in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    m = len(p_values)
    corrected, highest = [0.0] * m, 0.0
    for rank, place in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (m - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def average_ranks(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean rank of every method over data sets, 1 for the best; equals share their ranks.

    >>> average_ranks({"miv": [0.9, 0.8], "ncc": [0.7, 0.8]})
    {'miv': 1.25, 'ncc': 1.75}
    """
    from scipy.stats import rankdata

    if len({len(values) for values in scores.values()}) > 1:
        raise InputError("Ranks need the same data sets for every method.")
    table = np.asarray(list(scores.values()), dtype=np.float64)  # (method, set)
    if not table.size:
        return {}
    ranks = rankdata(-table.round(12), axis=0).mean(axis=1)
    return {name: float(rank) for name, rank in zip(scores, ranks, strict=True)}


Bins = tuple[tuple[float, float, float], ...]


def merge_bins(bins: Iterable[Bins]) -> NDArray[np.float64]:
    """Sum calibration bins of many tasks: (bin, [queries, sum of confidences, rightly named])."""
    tables = [np.asarray(each, dtype=np.float64).reshape(-1, 3) for each in bins if each]
    if not tables:
        return np.zeros((0, 3))
    if len({len(table) for table in tables}) > 1:
        raise InputError("Results have different numbers of confidence bins: of different runs?")
    total: NDArray[np.float64] = np.sum(tables, axis=0)
    return total


def calibration_error(bins: Iterable[Bins]) -> float:
    """Return the expected calibration error: |accuracy - confidence| of a bin, over all queries.

    NaN if no confidences were kept.

    >>> calibration_error([((2, 1.8, 1), (2, 1.2, 1))])
    0.25
    """
    table = merge_bins(bins)
    queries = float(table[:, 0].sum())
    if not queries:
        return math.nan
    return float(np.abs(table[:, 2] - table[:, 1]).sum() / queries)
