"""Two methods on the same tasks, from one run or from two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mivhead.benchmark.comparison import check_same_tasks
from mivhead.benchmark.results import Result
from mivhead.benchmark.statistics import Paired, Summary, holm, paired_test, summarise
from mivhead.errors import InputError


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
