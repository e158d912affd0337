"""Rows of a results page: one per backbone, protocol, set and method, and how it was made.

`miv bench report` writes those of a run to `rows.csv`. In a page, rows of several runs stand side
by side; only rows with the same hash of the tasks may be compared in pairs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from scipy import stats

from mivhead_bench.benchmark.compare import summarise
from mivhead_bench.benchmark.results import Result

KEY = ("backbone", "protocol", "set", "method")
COLUMNS = (
    *(*KEY, "tasks", "accuracy", "half_width", "seconds"),
    *("library", "commit", "tasks_hash", "weights_hash", "command"),
)
PAGE = ("backbone", "protocol", "method", "sets", "tasks", "accuracy", "±", "seconds")
ORIGIN = ("library", "commit", "command")

Row = dict[str, str]


def score(accuracies: Iterable[float], seconds: Iterable[float]) -> Row:
    """Return the number of tasks, mean accuracy and half-width in %, and median seconds."""
    summary = summarise(list(accuracies))
    half = "" if math.isnan(summary.half_width) else f"{100 * summary.half_width:.2f}"
    return {
        "tasks": str(summary.n),
        "accuracy": f"{100 * summary.mean:.2f}",
        "half_width": half,
        "seconds": f"{np.median(list(seconds)):.3f}",
    }


def rows_of(
    results: Sequence[Result], origin: Mapping[str, str], weights: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the rows of a run."""
    groups: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.accuracy is not None:
            groups[result.backbone, result.protocol, result.set, result.method].append(result)
    for key, group in groups.items():
        yield {
            **dict(zip(KEY, key, strict=True)),
            **score((r.accuracy or 0.0 for r in group), (r.adapt_seconds for r in group)),
            "library": origin.get("version", "").partition(",")[0].removeprefix("mivhead "),
            "commit": origin.get("commit", ""),
            "tasks_hash": group[0].tasks[:12],
            "weights_hash": weights.get(group[0].backbone, "")[:12],
            "command": origin.get("command", ""),
        }


def page_rows(rows: Iterable[Mapping[str, str]], groups: Mapping[str, Iterable[str]]) -> list[Row]:
    """Average rows over the sets of each group that is complete, or else over all sets."""
    by_column: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = defaultdict(dict)
    for row in rows:
        by_column[row["backbone"], row["protocol"], row["method"]][row["set"]] = row
    averaged = []
    for (backbone, protocol, method), by_set in by_column.items():
        complete = {name: list(sets) for name, sets in groups.items() if by_set.keys() >= set(sets)}
        for name, sets in (complete or {"": list(by_set)}).items():
            set_rows = [by_set[set_name] for set_name in sets]
            averaged.append(
                {
                    "backbone": backbone,
                    "protocol": protocol,
                    "method": method,
                    "sets": f"{len(set_rows)} {name}".strip(),
                    "tasks": str(sum(int(row["tasks"]) for row in set_rows)),
                    "accuracy": f"{np.mean([float(row['accuracy']) for row in set_rows]):.1f}",
                    "±": f"{_half_width(set_rows):.1f}".replace("nan", ""),
                    "seconds": f"{np.mean([float(row['seconds']) for row in set_rows]):.2f}",
                    **{column: _joined(row[column] for row in set_rows) for column in ORIGIN},
                }
            )
    return averaged


def _half_width(set_rows: Sequence[Mapping[str, str]]) -> float:
    """Return that of the mean over these very sets, where only the tasks are a sample: Welch's."""
    freedom = np.array([int(row["tasks"]) - 1 for row in set_rows])
    halves = np.array([float(row["half_width"] or "nan") for row in set_rows])
    variances = (halves / stats.t.ppf(0.975, freedom)) ** 2
    total = variances.sum()
    if not total > 0:
        return float(total)
    joint = total**2 / (variances**2 / freedom).sum()
    return float(stats.t.ppf(0.975, joint) * math.sqrt(total) / len(set_rows))


def _joined(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))  # each once: sets may have been run separately
