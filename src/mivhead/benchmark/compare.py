"""Results side by side: per data set the same tasks for every method, and averages over sets.

Failures are never counted. A method that ran out of memory on a set shows as OOM there, and the set
is left out of everybody's averages. A task on which a method failed otherwise, or which it has not
finished yet, is left out for everybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.benchmark.results import Result
from mivhead.datasets.catalogue import SETS
from mivhead.datasets.sets import declared
from mivhead.errors import InputError, check_one_of

State = Literal["done", "OOM", "failed", "missing"]
BENCHMARKS = {
    "MD": tuple(each.name for each in SETS if each.benchmark == "MD"),
    "MD+": tuple(each.name for each in SETS),
}


@dataclass(frozen=True)
class Cell:
    """What one method did on one set; `results` are of the tasks that count, in their order."""

    state: State
    results: tuple[Result, ...] = ()

    @property
    def accuracies(self) -> list[float]:
        """Accuracy of every task, 0 to 1."""
        return [r.accuracy for r in self.results if r.accuracy is not None]

    @cached_property
    def summary(self) -> Summary | None:
        """Mean accuracy; None if the method has none here."""
        return summarise(self.accuracies) if self.results else None

    def mean(self, name: str) -> float:
        """Mean of a number that results carry, such as `gflops`; NaN if it is not known."""
        values = [getattr(r, name) for r in self.results]
        return math.nan if None in values else float(np.mean(values))


@dataclass(frozen=True)
class Average:
    """Mean of the data sets' means.

    Parameters
    ----------
    title
        Such as `MD`.
    sets
        The sets it is made of, by the names of the run.
    lacking
        Declared names of the sets that belong to it, but are not in it, with the reason.
    means
        By method.
    best
        The method that is best with p < 0.01 over the tasks of all these sets; None: no such.
    """

    title: str
    sets: tuple[str, ...]
    lacking: dict[str, str]
    means: dict[str, float]
    best: str | None


class Comparison:
    """All methods on one backbone under one protocol.

    Parameters
    ----------
    backbone, protocol
        What it is about.
    results
        Of this backbone and protocol, from one run; sets and methods keep the order they come in.
    """

    def __init__(self, backbone: str, protocol: str, results: Sequence[Result]) -> None:
        self.backbone, self.protocol = backbone, protocol
        self.sets = _in_order(r.set for r in results)
        self.methods = tuple(dict.fromkeys(r.method for r in results))
        self.errors = [r for r in results if r.error is not None]
        self._cells: dict[tuple[str, str], Cell] = {}
        grouped: dict[str, dict[str, list[Result]]] = {
            name: {method: [] for method in self.methods} for name in self.sets
        }
        for result in results:
            grouped[result.set][result.method].append(result)
        for name, by_method in grouped.items():
            check_same_tasks(chain.from_iterable(by_method.values()))
            for method, cell in _align(by_method).items():
                self._cells[name, method] = cell

    def cell(self, name: str, method: str) -> Cell:
        """Look up one method on one set."""
        check_one_of("set", name, self.sets)
        check_one_of("method", method, self.methods)
        return self._cells[name, method]

    @property
    def complete(self) -> tuple[str, ...]:
        """Sets on which every method has results: those that averages are made of."""
        return tuple(s for s in self.sets if not self._reasons(s))

    def tasks(self, name: str) -> int:
        """Tasks of a set that count."""
        return max(len(self.cell(name, method).results) for method in self.methods)

    def paired(self, first: str, second: str, sets: Sequence[str]) -> Paired:
        """Two methods over the tasks of some sets."""
        a, b = (
            [x for name in sets for x in self.cell(name, m).accuracies] for m in (first, second)
        )
        return paired_test(a, b)

    def best(self, sets: Sequence[str]) -> str | None:
        """Find the method that is better than all others, p < 0.01; the paper prints it bold."""
        done = [m for m in self.methods if all(self.cell(s, m).results for s in sets)]
        if not sets or len(done) < 2:
            return None
        scores = {m: self._mean(m, sets) for m in done}
        first, second = sorted(scores, key=lambda m: -scores[m])[:2]
        test = self.paired(first, second, sets)
        return first if test.significant and test.difference.mean > 0 else None

    def averages(self) -> list[Average]:
        """Averages over MD, MD+ and all sets of the run; of equal ones the first."""
        here = {info.name: name for name in self.sets if (info := declared(name)) is not None}
        wanted = {t: {m: here.get(m) for m in members} for t, members in BENCHMARKS.items()}
        found: dict[tuple[str, ...], Average] = {}
        for title, members in (wanted | {"all sets": {s: s for s in self.sets}}).items():
            average = self._average(title, members)
            if average.sets:
                found.setdefault(average.sets, average)
        return list(found.values())

    def _average(self, title: str, members: dict[str, str | None]) -> Average:
        lacking = {}
        for name, own in members.items():
            if own is None:
                lacking[name] = "not run"
            elif reasons := self._reasons(own):
                lacking[name] = reasons[0]
        used = tuple(own for own in members.values() if own is not None and own in self.complete)
        means = {m: self._mean(m, used) for m in self.methods if used}
        return Average(title, used, lacking, means, self.best(used))

    def ranks(self) -> dict[str, float]:
        """Average rank of every method over the complete sets."""
        scores = {m: [self._mean(m, [s]) for s in self.complete] for m in self.methods}
        return average_ranks(scores)

    def _mean(self, method: str, sets: Sequence[str]) -> float:
        """Mean of the means of sets on which the method has results."""
        return float(np.mean([np.mean(self.cell(s, method).accuracies) for s in sets]))

    def _reasons(self, name: str) -> list[str]:
        """Why a set is left out of averages, if it is."""
        words = {"OOM": "OOM of {}", "failed": "{} failed", "missing": "{} not run"}
        states = {m: self.cell(name, m).state for m in self.methods}
        return [words[state].format(m) for m, state in states.items() if state != "done"]


def compare(results: Iterable[Result]) -> list[Comparison]:
    """Sort the results of a run into one comparison per backbone and protocol."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.backbone, result.protocol), []).append(result)
    if not groups:
        raise InputError("The run has no results yet.")
    return [Comparison(backbone, protocol, group) for (backbone, protocol), group in groups.items()]


def check_same_tasks(results: Iterable[Result]) -> None:
    """Raise an error if results of one set come from different task files."""
    hashes = {(r.set, r.protocol, r.tasks) for r in results}
    if len(hashes) > 1:
        name, protocol = min(hashes)[:2]
        shown = ", ".join(sorted(each[2][:12] for each in hashes))
        raise InputError(
            f"Results of {name} ({protocol}) come from different tasks ({shown}) and cannot be "
            "compared; run both methods on one task file."
        )


def _align(by_method: dict[str, list[Result]]) -> dict[str, Cell]:
    """Keep the tasks that all methods which work here have finished."""
    states = {method: _state(results) for method, results in by_method.items()}
    good = {
        method: {r.task: r for r in by_method[method] if r.accuracy is not None}
        for method, state in states.items()
        if state == "done"
    }
    common = sorted(set.intersection(*map(set, good.values()))) if good else []
    return {
        method: Cell("done", tuple(good[method][task] for task in common))
        if method in good and common
        else Cell("missing" if state == "done" else state)
        for method, state in states.items()
    }


def _state(results: Sequence[Result]) -> State:
    if not results:
        return "missing"
    if any(r.error is not None and r.error.startswith("memory:") for r in results):
        return "OOM"
    return "done" if any(r.accuracy is not None for r in results) else "failed"


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Put the paper's sets first, in its order, then the others as they come."""
    order = {each.name: place for place, each in enumerate(SETS)}

    def place(name: str) -> int:
        info = declared(name)
        return len(order) if info is None else order[info.name]

    return tuple(sorted(dict.fromkeys(names), key=place))


# Two methods on the same tasks, from one run or from two.


@dataclass(frozen=True)
class Side:
    """A method of a run: what it is called here, and its results."""

    name: str
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Row:
    """Two methods on one set; `holm` is the p-value corrected for all rows."""

    backbone: str
    protocol: str
    set: str
    first: Summary
    second: Summary
    paired: Paired
    holm: float


def pair(first: Side, second: Side) -> list[Row]:
    """Compare two sides on the tasks that both have finished.

    Results of one set that come from different tasks are an error. Backbones may differ if each
    side has one only: then backbones are compared.
    """
    one_each = all(len({r.backbone for r in side.results}) == 1 for side in (first, second))
    tables = [_by_task(side, ignore_backbone=one_each) for side in (first, second)]
    rows = []
    for key in tables[0]:
        if key not in tables[1]:
            continue
        a, b = (table[key] for table in tables)
        check_same_tasks([*a.values(), *b.values()])
        common = sorted(set(a) & set(b))
        if not common:
            continue
        x, y = (_accuracies(side, common) for side in (a, b))
        names = sorted({r.backbone for r in (*a.values(), *b.values())})
        test = paired_test(x, y)
        rows.append(
            Row(" / ".join(names), key[1], key[2], summarise(x), summarise(y), test, test.p)
        )
    if not rows:
        raise InputError(
            f"{first.name} and {second.name} have no finished task in common: "
            "they need the same backbone, protocol and data sets."
        )
    corrected = holm([row.paired.p for row in rows])
    return [replace(row, holm=p) for row, p in zip(rows, corrected, strict=True)]


def _accuracies(results: dict[int, Result], tasks: Sequence[int]) -> list[float]:
    return [x for task in tasks if (x := results[task].accuracy) is not None]


Key = tuple[str, str, str]  # backbone, protocol, set


def _by_task(side: Side, *, ignore_backbone: bool) -> dict[Key, dict[int, Result]]:
    """Sort finished results by what they are of, and by task."""
    found: dict[Key, dict[int, Result]] = {}
    for result in side.results:
        if result.accuracy is not None:
            backbone = "" if ignore_backbone else result.backbone
            found.setdefault((backbone, result.protocol, result.set), {})[result.task] = result
    return found


def choose(results: Sequence[Result], method: str | None, where: str) -> Side:
    """Take one method out of a run; None if there is only one to take."""
    methods = sorted({r.method for r in results})
    if method is None:
        if len(methods) != 1:
            raise InputError(
                f"{where} has several methods ({', '.join(methods)}); "
                f"say which one, such as {where}:{methods[0]}."
            )
        method = methods[0]
    if method not in methods:
        raise InputError(f"{where} has no method {method!r}; it has {', '.join(methods)}.")
    return Side(f"{where}:{method}", tuple(r for r in results if r.method == method))


# What numbers over tasks say: intervals, paired tests, corrections, ranks, calibration.


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
