"""Tables of accuracy: all methods, paired tests, ranks, calibration, and beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mivhead.benchmark.comparison import Average, Cell, Comparison
from mivhead.benchmark.published import published
from mivhead.benchmark.report.model import Entry, Table, entries, p_value, plain_table
from mivhead.benchmark.sets import declared
from mivhead.benchmark.statistics import LEVEL, calibration_error, holm

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
    info = declared(name)
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
