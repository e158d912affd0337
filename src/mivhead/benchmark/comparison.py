"""Results side by side: per data set the same tasks for every method, and averages over sets.

Failures are never counted. A method that ran out of memory on a set shows as OOM there, and the set
is left out of everybody's averages. A task on which a method failed otherwise, or which it has not
finished yet, is left out for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np

from mivhead.benchmark.catalogue import SETS
from mivhead.benchmark.results import Result
from mivhead.benchmark.sets import declared
from mivhead.benchmark.statistics import Paired, Summary, average_ranks, paired_test, summarise
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
        """Mean of a number that results carry, such as `gflops`."""
        return float(np.mean([getattr(r, name) for r in self.results]))


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
