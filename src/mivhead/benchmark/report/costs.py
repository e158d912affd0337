"""Tables of cost: latency, GFLOPs, memory, the budget of the full benchmark, and failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mivhead.benchmark.compare import Cell, Comparison
from mivhead.benchmark.published import Published, published
from mivhead.benchmark.report.accuracy import reference, set_title
from mivhead.benchmark.report.formats import Table, number, plain_table, share
from mivhead.benchmark.results import Result

FULL_SETS, FULL_TASKS = 17, 600
MACHINES = (1, 100)
CORES = 8  # per machine
PERCENT = "% of {rival}"  # heads a column


@dataclass(frozen=True)
class Latency:
    """Seconds per task for training and inference, including the passes through the backbone.

    `wall` is the total by the wall clock; NaN if it was not recorded.
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
    if result.adapt_wall is None or result.infer_wall is None:
        return train, infer, math.nan
    passes = (result.backbone_wall or 0.0) * (1 + result.queries / images)
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


def latency_table(comparison: Comparison) -> Table:
    """Tabulate seconds per task as in the paper: train, infer, total and percentages."""

    def row(cell: Cell, base: Cell, printed: Published | None) -> list[str]:
        spent = latency(cell)
        return [
            *map(number, (spent.train, spent.infer, spent.total)),
            share(spent.infer, spent.total),
            share(spent.total, latency(base).total) if base.results else "-",
            number(spent.wall),
            number(printed.total_seconds) if printed and printed.total_seconds else "",
        ]

    header = ("data set, method", "train", "infer", "total", "infer %", PERCENT, "wall clock")
    return plain_table(
        f"Latency per task in seconds, {comparison.backbone}, {comparison.protocol}",
        *_header_and_rows(comparison, (*header, "paper: total"), row),
        "Processor time in one thread, warmed up (on a GPU: wall time). The backbone's passes over "
        "support, views and queries are included; decoding, resizing and augmentation are not, for "
        "any method. The wall clock depends on what else the machine was doing. The paper's "
        "seconds were measured on a GPU: compare the percentages.",
    )


def gflops_table(comparison: Comparison) -> Table:
    """Tabulate GFLOPs of adaptation per task, counted in two ways, and memory."""

    def row(cell: Cell, base: Cell, printed: Published | None) -> list[str]:
        shown = []
        for field in ("gflops", "gflops_paper"):
            value = cell.mean(field)
            shown += [number(value), share(value, base.mean(field)) if base.results else "-"]
        paper = number(printed.gflops) if printed and printed.gflops else ""
        return [*shown, paper, number(cell.mean("peak_bytes") / 1e6)]

    header = ("data set, method", "all operations", PERCENT, "paper's rule", PERCENT, "paper")
    return plain_table(
        f"GFLOPs of adaptation per task, {comparison.backbone}, {comparison.protocol}",
        *_header_and_rows(comparison, (*header, "peak MB"), row),
        "All operations: multiplications and additions of all products, attention, L1 distances "
        "and cosines. The paper's rule: multiply-adds of matrix products, three forward passes per "
        "step, in units of 2^30. Both include the backbone.",
    )


def _header_and_rows(
    comparison: Comparison,
    header: Sequence[str],
    make: Callable[[Cell, Cell, Published | None], list[str]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Make one row per set and method from its cell, that of the costliest rival, and the paper.

    Columns of percentages are left out if no rival has a result.
    """
    rival = costliest(comparison)
    rows = []
    for name in comparison.sets:
        base = comparison.cell(name, rival) if rival else Cell("missing")
        for method in comparison.methods:
            cell = comparison.cell(name, method)
            printed = published(comparison.backbone, comparison.protocol, method, name)
            shown = make(cell, base, printed) if cell.results else ["-"] * (len(header) - 1)
            rows.append([f"{set_title(name)}, {method}", *shown])
    kept = [i for i, title in enumerate(header) if rival or title != PERCENT]
    titles = tuple(header[i].format(rival=rival) for i in kept)
    return titles, [tuple(row[i] for i in kept) for row in rows]


def budget_table(comparisons: Sequence[Comparison]) -> Table:
    """Estimate what 17 sets x 600 tasks would take, from the measured seconds."""
    rows, rates = [], {}
    for comparison in comparisons:
        everything = []
        for method in comparison.methods:
            cells = [comparison.cell(s, method) for s in comparison.sets]
            results = [r for cell in cells for r in cell.results]
            everything += results
            if not results:
                continue
            per_task = float(np.mean([r.adapt_seconds + r.infer_seconds for r in results]))
            hours = per_task * FULL_SETS * FULL_TASKS / 3600
            rows.append(
                (
                    f"{comparison.backbone}, {comparison.protocol}, {method}",
                    number(per_task),
                    number(hours),
                    *(number(hours / (CORES * machines)) for machines in MACHINES),
                )
            )
        if rate := _seconds_per_image(everything):
            rates[comparison.backbone] = f"{number(1000 * rate)} ms ({comparison.backbone})"
    extraction = ", ".join(rates.values())
    notes = [f"Features are extracted once per set; per image or view and core: {extraction}."]
    return plain_table(
        f"The full benchmark, {FULL_SETS} sets x {FULL_TASKS} tasks, from seconds measured here",
        (
            "method",
            "s per task",
            "core hours",
            *(f"hours on {n} machine{'s' if n > 1 else ''}" for n in MACHINES),
        ),
        rows,
        f"Hours on machines with {CORES} cores, one thread per task. The estimate holds for tasks "
        "as large as those of this run.",
        *(notes if extraction else []),
    )


def _seconds_per_image(results: Sequence[Result]) -> float:
    """Return the time of one image in the backbone; 0 if it was not measured."""
    images = sum(r.shots + r.views for r in results if r.backbone_seconds)
    return sum(r.backbone_seconds for r in results) / images if images else 0.0


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
