"""Tables of cost: latency, GFLOPs, memory, and what the full benchmark would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mivhead.benchmark.compare import Cell, Comparison
from mivhead.benchmark.published import published
from mivhead.benchmark.report.accuracy import reference, set_title
from mivhead.benchmark.report.model import Table, number, plain_table, share
from mivhead.benchmark.results import Result

FULL_SETS, FULL_TASKS = 17, 600
MACHINES = (1, 100)
CORES = 8  # of a machine


@dataclass(frozen=True)
class Latency:
    """Seconds of a task: adaptation and prediction, the backbone's passes included."""

    train: float
    infer: float

    @property
    def total(self) -> float:
        """Both."""
        return self.train + self.infer


def latency(cell: Cell) -> Latency:
    """Mean seconds of the tasks of a cell."""
    pairs = np.array([_seconds(result) for result in cell.results])
    train, infer = pairs.mean(axis=0)
    return Latency(float(train), float(infer))


def _seconds(result: Result) -> tuple[float, float]:
    """Training and inference; queries pass the frozen backbone at the rate of the support."""
    rate = result.backbone_seconds / max(1, result.shots + result.views)
    return (
        result.adapt_seconds + result.backbone_seconds,
        result.infer_seconds + rate * result.queries,
    )


def costliest(comparison: Comparison) -> str | None:
    """Find the rival that takes most time: shares are shares of its cost."""
    ours = reference(comparison)
    times = {
        m: float(np.mean([latency(comparison.cell(s, m)).total for s in done]))
        for m in comparison.methods
        if m != ours and (done := [s for s in comparison.sets if comparison.cell(s, m).results])
    }
    return max(times, key=lambda m: times[m]) if times else None


def latency_table(comparison: Comparison) -> Table:
    """Seconds per task as in the paper: train, infer, total and shares."""
    rival = costliest(comparison)
    rows: list[tuple[str, ...]] = []
    for name in comparison.sets:
        base = comparison.cell(name, rival) if rival else Cell("missing")
        for method in comparison.methods:
            cell = comparison.cell(name, method)
            if not cell.results:
                rows.append((f"{set_title(name)}, {method}", *("-",) * 6))
                continue
            spent = latency(cell)
            rows.append(
                (
                    f"{set_title(name)}, {method}",
                    *(number(x) for x in (spent.train, spent.infer, spent.total)),
                    share(spent.infer, spent.total),
                    share(spent.total, latency(base).total) if base.results else "-",
                    _printed_seconds(comparison, method, name),
                )
            )
    return plain_table(
        f"Latency per task in seconds, {comparison.backbone}, {comparison.protocol}",
        ("data set, method", "train", "infer", "total", "infer %", f"% of {rival}", "paper: total"),
        rows,
        "One thread, warmed up. The backbone's passes over support, views and queries are part of "
        "it, decoding and augmentation are not. The paper's seconds are of a GPU: compare shares.",
    )


def _printed_seconds(comparison: Comparison, method: str, name: str) -> str:
    printed = published(comparison.backbone, comparison.protocol, method, name)
    if printed is None or printed.train_seconds is None or printed.infer_seconds is None:
        return ""
    return number(printed.train_seconds + printed.infer_seconds)


def gflops_table(comparison: Comparison) -> Table:
    """GFLOPs of adaptation per task, both ways of counting, and memory."""
    rival = costliest(comparison)
    rows: list[tuple[str, ...]] = []
    for name in comparison.sets:
        base = comparison.cell(name, rival) if rival else Cell("missing")
        for method in comparison.methods:
            cell = comparison.cell(name, method)
            if not cell.results:
                rows.append((f"{set_title(name)}, {method}", *("-",) * 6))
                continue
            printed = published(comparison.backbone, comparison.protocol, method, name)
            honest, paper = cell.mean("gflops"), cell.mean("gflops_paper")
            rows.append(
                (
                    f"{set_title(name)}, {method}",
                    number(honest),
                    share(honest, base.mean("gflops")) if base.results else "-",
                    number(paper),
                    share(paper, base.mean("gflops_paper")) if base.results else "-",
                    number(printed.gflops) if printed and printed.gflops else "",
                    number(cell.mean("peak_bytes") / 1e6),
                )
            )
    return plain_table(
        f"GFLOPs of adaptation per task, {comparison.backbone}, {comparison.protocol}",
        (
            "data set, method",
            "honest",
            f"% of {rival}",
            "paper's rule",
            f"% of {rival}",
            "paper",
            "peak MB",
        ),
        rows,
        "Honest: multiplications and additions of all products, attention, L1 distances and "
        "cosines. The paper's rule: multiply-adds of matrix products, three forward passes a step, "
        "in units of 2^30. Both include the backbone.",
    )


def budget_table(comparisons: Sequence[Comparison]) -> Table:
    """Tell what 17 sets x 600 tasks would take, from measured seconds."""
    rows = []
    for comparison in comparisons:
        for method in comparison.methods:
            done = [s for s in comparison.sets if comparison.cell(s, method).results]
            if not done:
                continue
            results = [r for s in done for r in comparison.cell(s, method).results]
            a_task = float(np.mean([r.adapt_seconds + r.infer_seconds for r in results]))
            hours = a_task * FULL_SETS * FULL_TASKS / 3600
            rows.append(
                (
                    f"{comparison.backbone}, {comparison.protocol}, {method}",
                    number(a_task),
                    number(hours),
                    *(number(hours / (CORES * machines)) for machines in MACHINES),
                )
            )
    rates = {
        c.backbone: number(1000 * rate)
        for c in comparisons
        if (rate := _rate([r for s in c.sets for m in c.methods for r in c.cell(s, m).results]))
    }
    extraction = ", ".join(f"{rate} ms ({backbone})" for backbone, rate in rates.items())
    return plain_table(
        f"The full benchmark, {FULL_SETS} sets x {FULL_TASKS} tasks, from seconds measured here",
        ("method", "s a task", "core hours", *(_machines(m) for m in MACHINES)),
        rows,
        f"Hours on machines of {CORES} cores, one thread a task. It holds for tasks as large as "
        "those of this run.",
        *(
            [f"Features come once a set on top of it, per image or view and core: {extraction}."]
            if extraction
            else []
        ),
    )


def _machines(count: int) -> str:
    return f"hours on {count} machine{'s' if count > 1 else ''}"


def _rate(results: Sequence[Result]) -> float:
    """Seconds of the backbone for one picture."""
    pictures = sum(r.shots + r.views for r in results if r.backbone_seconds)
    return sum(r.backbone_seconds for r in results) / pictures if pictures else 0.0


def error_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Count the failures by reason; None if all went well."""
    counts: dict[tuple[str, str, str], int] = {}
    for comparison in comparisons:
        where = f"{comparison.backbone}, {comparison.protocol}"
        for result in comparison.errors:
            key = (f"{where}, {set_title(result.set)}", result.method, result.error or "")
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return None
    rows = [(*key[:2], str(n), key[2]) for key, n in counts.items()]
    return plain_table(
        "Failures, which count nowhere", ("where", "method", "tasks", "reason"), rows
    )
