"""Compare methods on the same tasks: intervals, paired tests, averages over data sets, ranks.

`compare` sorts the results of a run into one `Comparison` per backbone and protocol; `pair`
compares two methods, from one run or from two. Failures never count as an accuracy. A set on which
a method runs out of memory is excluded from the averages of all methods. A task that a method fails
for another reason, or has not finished yet, is excluded for all methods.
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
from scipy import stats

from mivhead.errors import InputError, check_one_of
from mivhead_bench.benchmark.results import Result
from mivhead_bench.datasets.catalogue import BENCHMARKS, find_declared

LEVEL = 0.01  # significance level of the paper's tests
OURS = ("miv", "miv-paper")  # the methods that the paper calls ours
NORMAL_95 = 1.96
PRINTED = (  # the order of the paper's tables
    *("omniglot", "aircraft", "cu_birds", "dtd", "quickdraw", "fungi", "vgg_flower"),
    *("traffic_sign", "mscoco", "mnist", "cifar10", "cifar100", "CropDisease", "EuroSAT"),
    *("ISIC", "ChestX", "Food101"),
)
Interval = Literal["student", "normal"]  # the rule for half-widths; the paper's is the second
Bold = Literal["test", "highest"]  # what the paper prints in bold: differs from table to table


@dataclass(frozen=True)
class Summary:
    """A mean over tasks with half the width of its 95% interval; NaN if one task has none."""

    mean: float
    half_width: float
    n: int

    def __str__(self) -> str:
        # A share lies between 0 and 1, but the interval of two tasks may be wider than that.
        return f"{100 * self.mean:.1f}{self._within(max(self.mean, 1 - self.mean))}"

    @property
    def signed(self) -> str:
        """The same with an explicit sign, for differences."""
        return f"{100 * self.mean:+.1f}{self._within(1 + abs(self.mean))}"

    def _within(self, most: float) -> str:
        shown = min(self.half_width, most)
        return "" if math.isnan(self.half_width) else f" ± {100 * shown:.1f}"


def summarise(values: ArrayLike, interval: Interval = "student") -> Summary:
    """Compute the mean of some values, one per task, and its 95% interval.

    The interval is `"student"`: Student's t with the sample standard deviation, which is correct
    for few tasks too; or `"normal"`: 1.96 std / sqrt(n) with the standard deviation of the values
    themselves (`ddof=0`), as in the paper.

    >>> str(summarise([0.5, 0.7, 0.9]))
    '70.0 ± 49.7'
    >>> str(summarise([0.5, 0.7, 0.9], "normal"))
    '70.0 ± 18.5'
    >>> str(summarise([0.5]))
    '50.0'
    >>> str(summarise([0.5, 0.7]))  # Student's interval of two tasks is wider than all shares
    '60.0 ± 60.0'
    """
    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        raise InputError("There are no results to summarise.")
    half_width = NORMAL_95 * x.std() / math.sqrt(x.size)
    if interval == "student" and x.size == 1:
        half_width = math.nan
    elif interval == "student":
        half_width = stats.t.ppf(0.975, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size)
    return Summary(float(x.mean()), float(half_width), x.size)


@dataclass(frozen=True)
class Paired:
    """One method minus another on the same tasks."""

    difference: Summary  # mean difference and its interval
    p: float  # of the two-sided paired t-test; 1 with fewer than two tasks
    # Of the two-sided signed-rank test, which does not assume a normal distribution.
    p_wilcoxon: float

    @property
    def significant(self) -> bool:
        """Whether the p-value of the t-test is below the paper's level."""
        return self.p < LEVEL


def paired_test(first: ArrayLike, second: ArrayLike, interval: Interval = "student") -> Paired:
    """Compare the accuracies of two methods on the same tasks, in the same order.

    >>> test = paired_test([0.8, 0.9, 0.7, 0.8], [0.6, 0.8, 0.6, 0.5])
    >>> test.difference.signed, round(test.p, 3)
    ('+17.5 ± 15.2', 0.035)
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise InputError(f"A paired test needs the same tasks, got {a.size} and {b.size} results.")
    # Accuracies are ratios of small integers: smaller differences are rounding errors.
    differences = np.round(a - b, 12)
    return Paired(summarise(differences, interval), *_p_values(differences))


def _p_values(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Return the p-values of the t-test and the signed-rank test; scipy's are NaN in edge cases."""
    if not differences.any():
        return 1.0, 1.0
    wilcoxon = float(stats.wilcoxon(differences).pvalue)
    if differences.size < 2:
        return 1.0, wilcoxon
    if np.ptp(differences) == 0:  # the same difference in every task
        return 0.0, wilcoxon
    return float(stats.ttest_1samp(differences, 0.0).pvalue), wilcoxon


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons, in their order (Holm 1979; SciPy lacks it).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    m = len(p_values)
    corrected, highest = [0.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (m - rank) * p_values[i]))
        corrected[i] = highest
    return corrected


def average_ranks(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compute the mean rank of every method over data sets; 1 is best, ties share their ranks.

    Each method has one score per data set, in the same order.

    >>> average_ranks({"miv": [0.9, 0.8], "ncc": [0.7, 0.8]})
    {'miv': 1.25, 'ncc': 1.75}
    """
    if len({len(values) for values in scores.values()}) > 1:
        raise InputError("Ranks need scores on the same data sets for every method.")
    table = np.asarray(list(scores.values()), dtype=np.float64)  # (method, set)
    if not table.size:
        return {}
    ranks = stats.rankdata(-table.round(12), axis=0).mean(axis=1)
    return {name: float(rank) for name, rank in zip(scores, ranks, strict=True)}


Bins = tuple[tuple[float, float, float], ...]


def merge_bins(bins: Iterable[Bins]) -> NDArray[np.float64]:
    """Sum the calibration bins of many tasks: (bin, [queries, sum of confidences, correct])."""
    tables = [
        np.asarray(task_bins, dtype=np.float64).reshape(-1, 3) for task_bins in bins if task_bins
    ]
    if not tables:
        return np.zeros((0, 3))
    if len({len(table) for table in tables}) > 1:
        raise InputError("The results have different numbers of confidence bins.")
    total: NDArray[np.float64] = np.sum(tables, axis=0)
    return total


def calibration_error(bins: Iterable[Bins]) -> float:
    """Compute the expected calibration error over all queries; NaN without confidences.

    >>> calibration_error([((2, 1.8, 1), (2, 1.2, 1))])
    0.25
    """
    table = merge_bins(bins)
    queries = float(table[:, 0].sum())
    if not queries:
        return math.nan
    return float(np.abs(table[:, 2] - table[:, 1]).sum() / queries)


# All methods of a run.

State = Literal["done", "OOM", "failed", "missing"]


@dataclass(frozen=True)
class Cell:
    """The results of one method on one set, restricted to the tasks that count, in task order."""

    state: State
    results: tuple[Result, ...] = ()
    interval: Interval = "student"

    @property
    def accuracies(self) -> list[float]:
        """Accuracy of every task, 0 to 1."""
        return [r.accuracy for r in self.results if r.accuracy is not None]

    @cached_property
    def summary(self) -> Summary | None:
        """Mean accuracy; None if there are no results."""
        return summarise(self.accuracies, self.interval) if self.results else None

    def mean(self, name: str) -> float:
        """Compute the mean of a field of the results, such as `peak_bytes`."""
        return float(np.mean([getattr(r, name) for r in self.results]))


@dataclass(frozen=True)
class Emphasis:
    """The methods that a row of a table shows in bold, and underlined."""

    bold: frozenset[str] = frozenset()
    underlined: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Average:
    """The mean of the means of several data sets."""

    title: str  # such as `MD`
    sets: tuple[str, ...]  # the sets that are averaged, by their names in the run
    # The other sets of this benchmark, by their declared names, with the reason.
    missing: dict[str, str]
    means: dict[str, float]  # by method
    emphasis: Emphasis  # what to emphasise, by the tasks of these sets


class Comparison:
    """All methods on one backbone under one protocol, from the results of one run.

    Methods keep the order in which they first occur; sets are in the paper's order, followed by all
    others. `rival` is the method that ours is compared with, and whose cost is the basis of
    percentages: None is every other method, and the costliest one. `interval` is the rule for
    half-widths (`summarise`), `bold` what is printed in bold (`emphasis`). `errors` are failures.
    """

    def __init__(
        self,
        backbone: str,
        protocol: str,
        results: Sequence[Result],
        rival: str | None = None,
        *,
        interval: Interval = "student",
        bold: Bold = "test",
    ) -> None:
        self.backbone, self.protocol = backbone, protocol
        self.rival, self.interval, self.bold = rival, interval, bold
        self.sets = _in_paper_order(r.set for r in results)
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
                self._cells[name, method] = replace(cell, interval=interval)

    def cell(self, name: str, method: str) -> Cell:
        """Return the results of one method on one set."""
        check_one_of("set", name, self.sets)
        check_one_of("method", method, self.methods)
        return self._cells[name, method]

    @property
    def complete(self) -> tuple[str, ...]:
        """The sets on which every method has results; averages are computed from these."""
        return tuple(s for s in self.sets if not self._reasons(s))

    @property
    def averaged(self) -> tuple[str, ...]:
        """The sets that ablations average: the complete ones of MD, or all if none is of MD."""
        known = {name: find_declared(name) for name in self.complete}
        of_md = tuple(n for n, info in known.items() if info and info.name in BENCHMARKS["MD"])
        return of_md or self.complete

    def tasks(self, name: str) -> int:
        """Return the number of tasks of a set that count."""
        return max(len(self.cell(name, method).results) for method in self.methods)

    def mean(self, method: str, sets: Sequence[str] | None = None) -> float:
        """Average the mean accuracies of a method over some sets, by default the complete ones."""
        chosen = self.complete if sets is None else sets
        return float(np.mean([np.mean(self.cell(s, method).accuracies) for s in chosen]))

    def paired(self, first: str, second: str, sets: Sequence[str]) -> Paired:
        """Compare two methods on all tasks of some sets."""
        a, b = (
            [x for name in sets for x in self.cell(name, m).accuracies] for m in (first, second)
        )
        return paired_test(a, b, self.interval)

    def emphasis(self, sets: Sequence[str]) -> Emphasis:
        """Choose what a row of the paper's tables emphasises.

        With a rival, ours is bold where it is significantly better than the rival, the rival where
        it is better than all of ours, and other columns never. If there are several of ours, the
        rival is underlined where it is not better than the first but better than another one.
        Without a rival, the best method is bold if it is significantly better than all others.
        With `bold="highest"`, the highest mean is bold, as printed and without a test, and only
        averages are underlined.
        """
        done = [m for m in self.methods if sets and all(self.cell(s, m).results for s in sets)]
        ours = [m for m in done if m.partition("@")[0] in OURS]
        if self.bold == "highest" and len(done) > 1:
            printed = {m: round(100 * self.mean(m, sets), 1) for m in done}
            top = frozenset(m for m in done if printed[m] == max(printed.values()))
            our_scores = [printed[m] for m in ours]
            rivals = [m for m in done if m == self.rival and our_scores and len(sets) > 1]
            beaten = [m for m in rivals if min(our_scores) < printed[m] <= our_scores[0]]
            return Emphasis(top, frozenset(beaten))
        if self.rival is None or self.rival not in done or not ours:
            best = self.best(sets)
            return Emphasis(frozenset([best] if best else []))
        tests = {m: self.paired(m, self.rival, sets) for m in ours}
        signs = {m: t.significant * np.sign(t.difference.mean) for m, t in tests.items()}
        bold = {m for m in ours if signs[m] > 0}
        if all(sign < 0 for sign in signs.values()):
            bold.add(self.rival)
        worse = [m for m in ours[1:] if signs[m] < 0]
        underlined = [self.rival] if worse and signs[ours[0]] >= 0 else []
        return Emphasis(frozenset(bold), frozenset(underlined))

    def best(self, sets: Sequence[str]) -> str | None:
        """Find the method that is better than all others, p < 0.01."""
        done = [m for m in self.methods if all(self.cell(s, m).results for s in sets)]
        if not sets or len(done) < 2:
            return None
        scores = {m: self.mean(m, sets) for m in done}
        first, second = sorted(scores, key=lambda m: -scores[m])[:2]
        test = self.paired(first, second, sets)
        return first if test.significant and test.difference.mean > 0 else None

    def averages(self) -> list[Average]:
        """Average over MD, MD+ and all sets of the run, without repeating the same sets."""
        here = {info.name: name for name in self.sets if (info := find_declared(name)) is not None}
        wanted = {title: {m: here.get(m) for m in names} for title, names in BENCHMARKS.items()}
        averages: dict[frozenset[str], Average] = {}
        for title, members in (wanted | {"all sets": {s: s for s in self.sets}}).items():
            average = self._average(title, members)
            if average.sets:
                averages.setdefault(frozenset(average.sets), average)
        return list(averages.values())

    def _average(self, title: str, members: dict[str, str | None]) -> Average:
        missing = {}
        for declared, name in members.items():
            if name is None:
                missing[declared] = "not run"
            elif reasons := self._reasons(name):
                missing[declared] = reasons[0]
        used = tuple(s for s in members.values() if s is not None and s in self.complete)
        means = {m: self.mean(m, used) for m in self.methods if used}
        return Average(title, used, missing, means, self.emphasis(used))

    def ranked(self) -> tuple[list[str], list[str]]:
        """Return the methods that have results, and the sets on which all of these have some."""
        methods = [m for m in self.methods if any(self.cell(s, m).results for s in self.sets)]
        sets = [s for s in self.sets if all(self.cell(s, m).state == "done" for m in methods)]
        return methods, sets

    def ranks(self) -> dict[str, float]:
        """Compute the average rank of the methods that have results, over the sets of `ranked`."""
        methods, sets = self.ranked()
        return average_ranks({m: [self.mean(m, [s]) for s in sets] for m in methods})

    def _reasons(self, name: str) -> list[str]:
        """Return the reasons for which a set is excluded from averages, if any."""
        phrases = {"OOM": "OOM of {}", "failed": "{} failed", "missing": "{} not run"}
        states = {m: self.cell(name, m).state for m in self.methods}
        return [phrases[state].format(m) for m, state in states.items() if state != "done"]


def compare(results: Iterable[Result], interval: Interval = "student") -> list[Comparison]:
    """Sort the results of a run into one comparison per backbone and protocol.

    They are in the order in which backbones and protocols first occur.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.backbone, result.protocol), []).append(result)
    if not groups:
        raise InputError("The run has no results yet.")
    return [
        Comparison(backbone, protocol, group, interval=interval)
        for (backbone, protocol), group in groups.items()
    ]


def compare_columns(
    results: Iterable[Result],
    title: str,
    columns: Sequence[str],
    rival: str | None = None,
    *,
    interval: Interval = "student",
    bold: Bold = "test",
) -> list[Comparison]:
    """Compare methods on different backbones: one comparison per protocol.

    Columns are `METHOD@BACKBONE`, in order, and take the place of methods; those without results
    are left out. `title` takes the place of the backbone, `rival` is the column that ours is
    compared with.
    """
    places = {column: place for place, column in enumerate(columns)}
    renamed = [replace(r, method=f"{r.method}@{r.backbone}") for r in results]
    groups: dict[str, list[Result]] = {}
    for result in sorted(
        (r for r in renamed if r.method in places), key=lambda r: places[r.method]
    ):
        groups.setdefault(result.protocol, []).append(result)
    return [
        Comparison(
            title,
            protocol,
            group,
            rival if rival in {r.method for r in group} else None,
            interval=interval,
            bold=bold,
        )
        for protocol, group in groups.items()
    ]


def check_same_tasks(results: Iterable[Result]) -> None:
    """Raise an error if the results of one set come from different task files."""
    hashes = {(r.set, r.protocol, r.tasks) for r in results}
    if len(hashes) > 1:
        name, protocol = min(hashes)[:2]
        shown = ", ".join(sorted(tasks[:12] for _, _, tasks in hashes))
        raise InputError(
            f"The results of {name} ({protocol}) come from different tasks ({shown}) and cannot be "
            "compared; run both methods on the same task file."
        )


def _align(by_method: dict[str, list[Result]]) -> dict[str, Cell]:
    """Keep the tasks that every method with results on this set has finished."""
    states = {method: _state(results) for method, results in by_method.items()}
    finished = {
        method: {r.task: r for r in by_method[method] if r.accuracy is not None}
        for method, state in states.items()
        if state == "done"
    }
    common = sorted(set.intersection(*map(set, finished.values()))) if finished else []
    return {
        method: Cell("done", tuple(finished[method][task] for task in common))
        if method in finished and common
        else Cell("missing" if state == "done" else state)
        for method, state in states.items()
    }


def _state(results: Sequence[Result]) -> State:
    if not results:
        return "missing"
    if any(r.error is not None and r.error.startswith("memory:") for r in results):
        return "OOM"
    return "done" if any(r.accuracy is not None for r in results) else "failed"


def _in_paper_order(names: Iterable[str]) -> tuple[str, ...]:
    """Put the paper's sets first, in the order of its tables; keep the order of the others."""
    order = {name: place for place, name in enumerate(PRINTED)}

    def place(name: str) -> int:
        info = find_declared(name)
        return len(order) if info is None else order[info.name]

    return tuple(sorted(dict.fromkeys(names), key=place))


# Two methods, from one run or from two.


@dataclass(frozen=True)
class MethodResults:
    """The results of one method in a run, and how to refer to it."""

    name: str
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Row:
    """Two methods on one set; `holm` is the p-value corrected for the number of rows."""

    backbone: str
    protocol: str
    set: str
    first: Summary
    second: Summary
    paired: Paired
    holm: float


def choose(results: Sequence[Result], method: str | None, run: str) -> MethodResults:
    """Select one method of a run, whose name is for messages.

    `METHOD`, or `METHOD@BACKBONE` for one of several backbones; None if the run has only one
    method.
    """
    methods = sorted({r.method for r in results})
    if method is None:
        if len(methods) != 1:
            raise InputError(
                f"{run} has several methods ({', '.join(methods)}); "
                f"name one, for example {run}:{methods[0]}."
            )
        method = methods[0]
    name, _, backbone = method.partition("@")
    if method not in methods and name in methods and backbone:
        backbones = sorted({r.backbone for r in results if r.method == name})
        check_one_of(f"backbone of {name} in {run}", backbone, backbones)
        chosen = tuple(r for r in results if (r.method, r.backbone) == (name, backbone))
        return MethodResults(f"{run}:{method}", chosen)
    if method not in methods:
        raise InputError(f"{run} has no method {method!r}; it has {', '.join(methods)}.")
    return MethodResults(f"{run}:{method}", tuple(r for r in results if r.method == method))


def pair(first: MethodResults, second: MethodResults) -> list[Row]:
    """Compare two methods on the tasks that both have finished.

    Their backbones may differ if each method has only one: then backbones are compared. Results of
    one set from different tasks, and methods without a common task, are an error.
    """
    single = all(len({r.backbone for r in method.results}) == 1 for method in (first, second))
    groups = [_by_task(method, ignore_backbone=single) for method in (first, second)]
    rows = []
    for key, a in groups[0].items():
        b = groups[1].get(key, {})
        check_same_tasks([*a.values(), *b.values()])
        common = sorted(set(a) & set(b))
        if not common:
            continue
        x, y = (Cell("done", tuple(results[t] for t in common)).accuracies for results in (a, b))
        backbones = sorted({r.backbone for r in (*a.values(), *b.values())})
        _, protocol, name = key
        test = paired_test(x, y)
        rows.append(
            Row(" / ".join(backbones), protocol, name, summarise(x), summarise(y), test, test.p)
        )
    if not rows:
        raise InputError(
            f"{first.name} and {second.name} have no finished task in common: "
            "they need the same backbone, protocol and data sets."
        )
    corrected = holm([row.paired.p for row in rows])
    return [replace(row, holm=p) for row, p in zip(rows, corrected, strict=True)]


_Key = tuple[str, str, str]  # backbone, protocol, set


def _by_task(method: MethodResults, *, ignore_backbone: bool) -> dict[_Key, dict[int, Result]]:
    """Group the finished results by backbone, protocol and set, and then by task."""
    groups: dict[_Key, dict[int, Result]] = {}
    for result in method.results:
        if result.accuracy is not None:
            backbone = "" if ignore_backbone else result.backbone
            groups.setdefault((backbone, result.protocol, result.set), {})[result.task] = result
    return groups
