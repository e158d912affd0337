"""Tables of accuracy: all methods, paired tests, ranks, calibration, and beside the paper's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mivhead.benchmark.compare import LEVEL, Average, Cell, Comparison, calibration_error, holm
from mivhead.benchmark.published import published
from mivhead.benchmark.report.model import Entry, Table, entries, number, p_value, plain_table
from mivhead.datasets.catalogue import find_declared

OURS = "miv"


def reference(comparison: Comparison) -> str:
    """Choose the method that others are compared with: the MIV-head, or else the best one."""
    if OURS in comparison.methods:
        return OURS
    ranks = comparison.ranks()
    return min(comparison.methods, key=lambda m: ranks.get(m, 0.0))


def set_title(name: str) -> str:
    """Write a set's name as in the paper's tables, with its own name if that is another.

    >>> set_title("cu_birds"), set_title("cub200_birds"), set_title("my_photos")
    ('Birds', 'Birds (cub200_birds)', 'my_photos')
    """
    info = find_declared(name)
    if info is None:
        return name
    return info.title if name in (info.name, info.title) else f"{info.title} ({name})"


def accuracy_table(comparisons: Sequence[Comparison]) -> Table:
    """All backbones and methods of one protocol, in the paper's layout."""
    names = list(dict.fromkeys(name for c in comparisons for name in c.sets))
    rows = [
        (Entry(set_title(name)), *(e for c in comparisons for e in _cells(c, name)))
        for name in names
    ]
    rules, notes = set(), []
    averages = [{a.title: a for a in c.averages()} for c in comparisons]
    for title in dict.fromkeys(t for each in averages for t in each):
        rules.add(len(rows))
        pairs = list(zip(comparisons, averages, strict=True))
        rows.append(
            (
                Entry(f"Average ({title})"),
                *(e for c, a in pairs for e in _average(c, a.get(title))),
            )
        )
        notes += [_note(c, a[title]) for c, a in pairs if title in a]
    least = min(c.tasks(s) for c in comparisons for s in c.sets)
    most = max(c.tasks(s) for c in comparisons for s in c.sets)
    tasks = f"{most}" if least == most else f"{least} to {most}"
    return Table(
        f"Accuracy in %, {comparisons[0].protocol}, {tasks} tasks a set",
        ("data set", *(m for c in comparisons for m in c.methods)),
        tuple(rows),
        (("", 1), *((c.backbone, len(c.methods)) for c in comparisons)),
        frozenset(rules),
        (
            "± is half of the 95 % interval. Bold: better than all others on this backbone, "
            f"two-sided paired t-test over the same tasks, p < {LEVEL}.",
            *(note for note in notes if note),
        ),
    )


def _cells(comparison: Comparison, name: str) -> Iterator[Entry]:
    best = comparison.best([name]) if name in comparison.sets else None
    for method in comparison.methods:
        if name not in comparison.sets:
            yield Entry("-")
        else:
            yield Entry(_shown(comparison.cell(name, method)), method == best)


def _shown(cell: Cell) -> str:
    if cell.summary is not None:
        return str(cell.summary)
    return {"OOM": "OOM", "failed": "failed"}.get(cell.state, "-")


def _average(comparison: Comparison, average: Average | None) -> Iterator[Entry]:
    for method in comparison.methods:
        if average is None:
            yield Entry("-")
        else:
            yield Entry(f"{100 * average.means[method]:.1f}", method == average.best)


def _note(comparison: Comparison, average: Average) -> str:
    if not average.lacking:
        return ""
    total = len(average.sets) + len(average.lacking)
    reasons: dict[str, list[str]] = {}
    for name, reason in average.lacking.items():
        reasons.setdefault(reason, []).append(name)
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    return (
        f"Average ({average.title}) of {comparison.backbone}: {len(average.sets)} of {total} sets; "
        f"lacking {listed}."
    )


def paired_table(comparison: Comparison) -> Table | None:
    """Compare the MIV-head with every other method, set by set; None if there is no other."""
    ours = reference(comparison)
    rows, p_values = [], []
    for rival in comparison.methods:
        if rival == ours:
            continue
        shared = [
            s for s in comparison.sets if all(comparison.cell(s, m).results for m in (ours, rival))
        ]
        for sets in [[s] for s in shared] + ([shared] if len(shared) > 1 else []):
            test = comparison.paired(ours, rival, sets)
            title = set_title(sets[0]) if len(sets) == 1 else f"all tasks of {len(sets)} sets"
            rows.append((f"{title}: {ours} - {rival}", test))
            p_values.append(test.p)
    if not rows:
        return None
    corrected = holm(p_values)
    return Table(
        f"Paired differences, {comparison.backbone}, {comparison.protocol}",
        ("difference", "tasks", "points", "t-test p", "Holm p", "Wilcoxon p"),
        tuple(
            (
                Entry(title),
                Entry(str(test.difference.n)),
                Entry(test.difference.signed, test.significant),
                *entries(map(p_value, (test.p, p_holm, test.p_wilcoxon))),
            )
            for (title, test), p_holm in zip(rows, corrected, strict=True)
        ),
        notes=(
            f"Bold: t-test p < {LEVEL}. Holm: corrected for all {len(rows)} comparisons of this "
            "table. All tests are two-sided, over the same tasks.",
        ),
    )


def rank_table(comparisons: Sequence[Comparison]) -> Table:
    """Average ranks over the sets that every method has finished."""
    rows = []
    for comparison in comparisons:
        ranks = sorted(comparison.ranks().items(), key=lambda item: item[1])
        listed = ", ".join(f"{method} {rank:.2f}" for method, rank in ranks)
        where = f"{comparison.backbone}, {comparison.protocol}"
        rows.append((where, len(comparison.complete), listed or "-"))
    return plain_table(
        "Average ranks over data sets (1 is best)", ("backbone, protocol", "sets", "ranks"), rows
    )


def calibration_table(comparison: Comparison) -> Table:
    """Tabulate the expected calibration error by set and method."""
    rows: list[tuple[str, ...]] = []
    for name in comparison.sets:
        bins = (
            [r.calibration for r in comparison.cell(name, m).results] for m in comparison.methods
        )
        errors = [calibration_error(each) for each in bins]
        rows.append(
            (set_title(name), *("-" if math.isnan(e) else f"{100 * e:.1f}" for e in errors))
        )
    return plain_table(
        f"Expected calibration error in %, {comparison.backbone}, {comparison.protocol}",
        ("data set", *comparison.methods),
        rows,
        "How far confidence is from accuracy: 0 is perfect. Over all queries of a set.",
    )


def beside_table(comparison: Comparison) -> Table | None:
    """Ours beside the paper's figures; None if nothing corresponds."""
    rows = []
    for name in comparison.sets:
        for method in comparison.methods:
            summary = comparison.cell(name, method).summary
            printed = published(comparison.backbone, comparison.protocol, method, name)
            if summary is None or printed is None:
                continue
            interval = "" if printed.half_width is None else f" ± {printed.half_width}"
            difference = 100 * summary.mean - printed.accuracy
            rows.append(
                (
                    f"{set_title(name)}, {method}",
                    str(summary),
                    f"{printed.accuracy}{interval}",
                    f"{difference:+.1f}",
                )
            )
    if not rows:
        return None
    return plain_table(
        f"Beside the paper's figures, {comparison.backbone}, {comparison.protocol}",
        ("data set, method", "here", "paper", "difference"),
        rows,
        "The paper's tasks are others, and so may be the images: its sets are the test splits of "
        "Meta-Dataset, 600 tasks each. Only the names correspond: the paper's miv has its own "
        "recipe, ours the one that the run gave it.",
    )


# Ablations: figures over the number of blocks or candidates, and 2x2 tables of interactions.


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
