"""Ablations: figures over the number of blocks or candidates, and 2x2 tables of interactions."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from mivhead.benchmark.comparison import Comparison
from mivhead.benchmark.report.model import Table, number, plain_table

SERIES = {
    "blocks": ("N, blocks of the backbone", re.compile(r"^miv-blocks(\d+)$")),
    "candidates": ("D, candidates per block", re.compile(r"^miv-d(\d+)$")),
}
# Without and with a component, by the names of the ready-made configurations; {} is one block.
INTERACTIONS = {
    "Pooling by attention": ("miv-gap{}", "miv{}"),
    "Pooling by attention and CAP": ("miv-gap-mean{}", "miv{}"),
}


@dataclass(frozen=True)
class Point:
    """A variant of the head: its number, mean accuracy in % and GFLOPs."""

    number: int
    accuracy: float
    gflops: float


@dataclass(frozen=True)
class Series:
    """The same head with more and more of something."""

    title: str
    points: tuple[Point, ...]


def find_series(comparison: Comparison) -> list[Series]:
    """Collect the variants of an ablation, averaged over the sets that all methods have."""
    found = []
    for title, pattern in SERIES.values():
        numbered = {m: int(hit[1]) for m in comparison.methods if (hit := pattern.match(m))}
        if len(numbered) > 1 and comparison.complete:
            ordered = sorted(numbered, key=lambda m: numbered[m])
            points = tuple(
                Point(numbered[m], 100 * _mean(comparison, m), _gflops(comparison, m))
                for m in ordered
            )
            found.append(Series(title, points))
    return found


def series_table(comparison: Comparison, series: Series) -> Table:
    """Tabulate a series: what its figure draws."""
    return plain_table(
        f"Accuracy and GFLOPs over {series.title}, {comparison.backbone}, {comparison.protocol}",
        (series.title, "accuracy in %", "GFLOPs"),
        [(p.number, f"{p.accuracy:.1f}", number(p.gflops)) for p in series.points],
        f"Mean of {len(comparison.complete)} sets. GFLOPs of adaptation, counted honestly.",
    )


def interaction_tables(comparison: Comparison) -> list[Table]:
    """2x2 summaries: a component off and on, with one block and with all."""
    tables = []
    for views in ("-no-views", ""):
        for title, (without, with_it) in INTERACTIONS.items():
            names = [
                [pattern.format(blocks) + views for pattern in (without, with_it)]
                for blocks in ("-blocks1", "")
            ]
            if all(m in comparison.methods for row in names for m in row) and comparison.complete:
                tables.append(_two_by_two(comparison, title, names, bool(views)))
    return tables


def _two_by_two(
    comparison: Comparison, title: str, names: list[list[str]], no_views: bool
) -> Table:
    (a, b), (c, d) = [[100 * _mean(comparison, m) for m in row] for row in names]
    rows = [
        ("one block", f"{a:.1f}", f"{b - a:+.1f}", f"{b:.1f}"),
        ("more blocks bring", f"{c - a:+.1f}", "", f"{d - b:+.1f}"),
        ("all blocks", f"{c:.1f}", f"{d - c:+.1f}", f"{d:.1f}"),
    ]
    views = "without views" if no_views else "with views"
    return plain_table(
        f"Interaction: {title} and the number of blocks, {views}, {comparison.backbone}",
        ("", "disabled", "brings", "enabled"),
        rows,
        f"Accuracy in %, mean of {len(comparison.complete)} sets. Together they bring "
        f"{d - a:+.1f}, alone {b - a:+.1f} and {c - a:+.1f}: {d - b - c + a:+.1f} come from "
        "their being together.",
    )


def _mean(comparison: Comparison, method: str) -> float:
    cells = [comparison.cell(s, method) for s in comparison.complete]
    return float(np.mean([np.mean(cell.accuracies) for cell in cells]))


def _gflops(comparison: Comparison, method: str) -> float:
    return float(np.mean([comparison.cell(s, method).mean("gflops") for s in comparison.complete]))
