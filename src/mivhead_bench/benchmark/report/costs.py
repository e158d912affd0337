"""Tables of cost: latency, GFLOPs, memory, and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller

import numpy as np

from mivhead_bench.benchmark.compare import Cell, Comparison
from mivhead_bench.benchmark.published import Published, published
from mivhead_bench.benchmark.report.accuracy import reference, set_title
from mivhead_bench.benchmark.report.formats import Table, number, plain_table, share
from mivhead_bench.benchmark.results import Result
from mivhead_bench.methods import METHODS


@dataclass(frozen=True)
class Latency:
    """Seconds per task for training and inference, including the passes through the backbone.

    `wall` is the total by the wall clock.
    """

    train: float
    infer: float
    wall: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.train + self.infer


def latency(cell: Cell) -> Latency:
    """Compute the mean latency of the tasks of a cell."""
    train, infer, wall = np.mean([_seconds(result) for result in cell.results], axis=0)
    return Latency(float(train), float(infer), float(wall))


def _seconds(result: Result) -> tuple[float, float, float]:
    """Return training, inference and the wall clock's total.

    Queries pass the frozen backbone at the support's rate.
    """
    images = max(1, result.shots + result.views)
    train = result.adapt_seconds + result.backbone_seconds
    infer = result.infer_seconds + result.backbone_seconds * result.queries / images
    passes = result.backbone_wall * (1 + result.queries / images)
    return train, infer, result.adapt_wall + result.infer_wall + passes


def costliest(comparison: Comparison) -> str | None:
    """Find the rival that takes the most time, whose cost is the basis of all percentages."""
    if comparison.rival is not None:
        return comparison.rival
    ours = reference(comparison)
    times = {
        m: float(np.mean([latency(comparison.cell(s, m)).total for s in done]))
        for m in comparison.methods
        if m != ours and (done := [s for s in comparison.sets if comparison.cell(s, m).results])
    }
    return max(times, key=lambda m: times[m]) if times else None


def rivals(comparison: Comparison) -> list[str]:
    """Return the methods whose cost is a basis of percentages, the most important first.

    These are the rival of the comparison and, as in the paper's table of LN-Tune, all others that
    tune the backbone; or only the costliest method, if no rival was named.
    """
    first = costliest(comparison)
    if first is None or comparison.rival is None:
        return [] if first is None else [first]
    tuning = {name for name, method in METHODS.items() if method.needs == "images"}
    tuned = [m for m in comparison.methods if m.partition("@")[0] in tuning]
    return list(dict.fromkeys([first, *tuned]))


def latency_table(comparison: Comparison) -> Table:
    """Tabulate seconds per task as in the paper: train, infer, total and percentages."""
    bases = rivals(comparison)
    header = [
        *("data set, method", "train", "infer", "total", "infer %"),
        *_percent(bases),
        *("wall clock", "paper: train", "paper: infer", "paper: total"),
    ]

    def row(cell: Cell, others: Sequence[Cell], printed: Published | None) -> list[str]:
        spent = latency(cell)
        times: tuple[float | None, ...] = (None, None, None)
        if printed is not None:
            times = (printed.train_seconds, printed.infer_seconds, printed.total_seconds)
        return [
            *map(number, (spent.train, spent.infer, spent.total)),
            share(spent.infer, spent.total),
            *(_share(spent.total, other, lambda cell: latency(cell).total) for other in others),
            number(spent.wall),
            *map(_known, times),
        ]

    return plain_table(
        f"Latency per task in seconds, {comparison.backbone}, {comparison.protocol}",
        header,
        _rows(comparison, bases, len(header), row),
        "Processor time in one thread, warmed up (on a GPU: wall time). The backbone's passes over "
        "support, views and queries are included; decoding, resizing and augmentation are not, for "
        "any method. The wall clock depends on what else the machine was doing. The paper's "
        "seconds were measured on a GPU: compare the percentages.",
    )


def adaptation_table(comparison: Comparison) -> Table | None:
    """Tabulate the seconds of adaptation, ours as a percentage of each rival's, and the paper's.

    None without a rival that the comparison names.
    """
    ours, bases = reference(comparison), rivals(comparison)
    if comparison.rival is None or ours in bases:
        return None
    methods = [*bases, ours]
    rows = []
    for name in comparison.sets:
        cells = {m: comparison.cell(name, m) for m in methods}
        in_paper = [published(comparison.backbone, comparison.protocol, m, name) for m in methods]
        printed = [None if result is None else result.train_seconds for result in in_paper]
        here = [latency(c).train if c.results else None for c in cells.values()]
        states = [c.state for c in cells.values()]
        rows.append(
            (
                set_title(name),
                *(
                    number(seconds) if seconds is not None else "OOM" if state == "OOM" else "-"
                    for seconds, state in zip(here, states, strict=True)
                ),
                *(_ratio(here[-1], seconds) for seconds in here[:-1]),
                *map(_known, printed),
                *(_ratio(printed[-1], seconds, "") for seconds in printed[:-1]),
            )
        )
    return plain_table(
        f"Adaptation per task in seconds, {comparison.backbone}, {comparison.protocol}",
        (
            "data set",
            *methods,
            *_percent(bases),
            *(f"paper: {method}" for method in methods),
            *(f"paper: {title}" for title in _percent(bases)),
        ),
        rows,
        f"Percentages: {ours} relative to the others. Training only, including the backbone's "
        "passes over support and views, without decoding and augmentation.",
    )


COUNTS = {  # fields of a result, and how the table calls them
    "gflops_paper": "this head, paper's rule",
    "gflops_authors": "authors' head, paper's rule",
}


def gflops_table(comparison: Comparison) -> Table:
    """Tabulate GFLOPs of adaptation per task by every count, and memory."""
    bases = rivals(comparison)
    counts = [title for count in COUNTS.values() for title in (count, *_percent(bases))]
    header = ["data set, method", *counts, "printed in the paper", "peak MB"]

    def row(cell: Cell, others: Sequence[Cell], printed: Published | None) -> list[str]:
        shown = []
        for field in COUNTS:
            value = cell.mean(field)
            shown.append(number(value))
            shown += [_share(value, other, methodcaller("mean", field)) for other in others]
        return [
            *shown,
            _known(None if printed is None else printed.gflops),
            number(cell.mean("peak_bytes") / 1e6),
        ]

    return plain_table(
        f"GFLOPs of adaptation per task, {comparison.backbone}, {comparison.protocol}",
        header,
        _rows(comparison, bases, len(header), row),
        "The paper's rule: multiply-adds of matrix products, three forward passes per step, in "
        "units of 2^30. The head of the paper's authors projects every query once per class and "
        "passes the support twice; the paper prints its count, and the charts show it. Both "
        "include the backbone.",
    )


def _percent(bases: Sequence[str]) -> list[str]:
    return [f"% of {base}" for base in bases]


def _known(value: float | None) -> str:
    return "" if value is None else number(value)


def _ratio(part: float | None, whole: float | None, unknown: str = "-") -> str:
    return unknown if part is None or whole is None else share(part, whole)


def _share(value: float, other: Cell, measure: Callable[[Cell], float]) -> str:
    return share(value, measure(other)) if other.results else "-"


def _rows(
    comparison: Comparison,
    bases: Sequence[str],
    width: int,
    make: Callable[[Cell, Sequence[Cell], Published | None], list[str]],
) -> list[list[str]]:
    """Make one row per set and method from its cell, those of the rivals, and the paper."""
    rows = []
    for name in comparison.sets:
        others = [comparison.cell(name, base) for base in bases]
        for method in comparison.methods:
            cell = comparison.cell(name, method)
            printed = published(comparison.backbone, comparison.protocol, method, name)
            shown = make(cell, others, printed) if cell.results else ["-"] * (width - 1)
            rows.append([f"{set_title(name)}, {method}", *shown])
    return rows


def error_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Count the failures by reason; None if there are none."""
    counts = Counter(
        (
            f"{comparison.backbone}, {comparison.protocol}, {set_title(result.set)}",
            result.method,
            result.error or "",
        )
        for comparison in comparisons
        for result in comparison.errors
    )
    if not counts:
        return None
    rows = [(where, method, n, reason) for (where, method, reason), n in counts.items()]
    return plain_table(
        "Failures, which are excluded everywhere", ("where", "method", "tasks", "reason"), rows
    )
