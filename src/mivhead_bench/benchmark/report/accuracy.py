"""Tables of accuracy: all methods, paired tests, ranks, calibration, the paper's, ablations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mivhead_bench.benchmark.compare import (
    LEVEL,
    OURS,
    Average,
    Comparison,
    Interval,
    calibration_error,
    holm,
)
from mivhead_bench.benchmark.open_set import OpenResult, Separation
from mivhead_bench.benchmark.published import literature, published, published_average
from mivhead_bench.benchmark.report.formats import (
    Entry,
    Table,
    entries,
    number,
    p_value,
    plain_table,
)
from mivhead_bench.datasets.catalogue import BENCHMARKS, find_declared

HALF_WIDTHS: dict[Interval, str] = {
    "student": "± is half the width of the 95% interval by Student's t.",
    "normal": "± is 1.96 standard errors, as in the paper.",
}


def reference(comparison: Comparison) -> str:
    """Choose the method that others are compared with: the MIV-head, or else the best one."""
    for method in comparison.methods:
        if method.partition("@")[0] == OURS[0]:
            return method
    ranks = comparison.ranks()
    return min(comparison.methods, key=lambda m: ranks.get(m, math.inf))


def set_title(name: str) -> str:
    """Return a set's title in the paper's tables, followed by its own name if that differs.

    >>> set_title("cu_birds"), set_title("cub200_birds"), set_title("my_photos")
    ('Birds', 'Birds (cub200_birds)', 'my_photos')
    """
    info = find_declared(name)
    if info is None:
        return name
    return info.title if name in (info.name, info.title) else f"{info.title} ({name})"


def accuracy_table(comparisons: Sequence[Comparison]) -> Table:
    """Tabulate all backbones and methods of one protocol in the paper's layout."""
    names = list(dict.fromkeys(name for c in comparisons for name in c.sets))
    rows = [
        (Entry(set_title(name)), *(e for c in comparisons for e in _accuracies(c, name)))
        for name in names
    ]
    rules = set()
    missing: dict[str, list[str]] = {}  # backbones by their note
    averages = [(c, {a.title: a for a in c.averages()}) for c in comparisons]
    for title in dict.fromkeys(title for _, by_title in averages for title in by_title):
        rules.add(len(rows))
        means = (e for c, by_title in averages for e in _means(c, by_title.get(title)))
        rows.append((Entry(f"Average ({title})"), *means))
        for c, by_title in averages:
            if title in by_title and by_title[title].missing:
                missing.setdefault(_missing_note(by_title[title]), []).append(c.backbone)
    counts = [c.tasks(s) for c in comparisons for s in c.sets]
    least, most = min(counts), max(counts)
    tasks = f"{most}" if least == most else f"{least} to {most}"
    tasks += " task" if most == 1 else " tasks"
    return Table(
        f"Accuracy in %, {comparisons[0].protocol}, {tasks} per set",
        ("data set", *(m for c in comparisons for m in c.methods)),
        tuple(rows),
        (("", 1), *((c.backbone, len(c.methods)) for c in comparisons)),
        frozenset(rules),
        (
            HALF_WIDTHS[comparisons[0].interval],
            *dict.fromkeys(map(_bold_note, comparisons)),
            *(note.format(", ".join(backbones)) for note, backbones in missing.items()),
        ),
    )


def _bold_note(comparison: Comparison) -> str:
    test = f"two-sided paired t-test over the same tasks, p < {LEVEL}"
    if comparison.bold == "highest":
        return "Bold: the highest of its group, without a test, as in the paper's table."
    if comparison.rival is None:
        return f"Bold: better than all others in its group, {test}."
    several = len([m for m in comparison.methods if m.partition("@")[0] in OURS]) > 1
    rival = comparison.rival.partition("@")[0]
    return f"Bold: the better of {rival} and miv, {test}." + (
        f" Underlined: {rival} is not better than the first miv, but better than another one."
        if several
        else ""
    )


def _accuracies(comparison: Comparison, name: str) -> Iterator[Entry]:
    if name not in comparison.sets:
        yield from entries("-" for _ in comparison.methods)
        return
    emphasis = comparison.emphasis([name])
    for method in comparison.methods:
        cell = comparison.cell(name, method)
        state = cell.state if cell.state in ("OOM", "failed") else "-"
        text = state if cell.summary is None else str(cell.summary)
        yield Entry(text, method in emphasis.bold, method in emphasis.underlined)


def _means(comparison: Comparison, average: Average | None) -> Iterator[Entry]:
    for method in comparison.methods:
        if average is None:
            yield Entry("-")
        else:
            text, emphasis = f"{100 * average.means[method]:.1f}", average.emphasis
            yield Entry(text, method in emphasis.bold, method in emphasis.underlined)


def _missing_note(average: Average) -> str:
    """Name the sets that an average lacks, with a place for the names of backbones."""
    total = len(average.sets) + len(average.missing)
    reasons: dict[str, list[str]] = {}
    for name, reason in average.missing.items():
        reasons.setdefault(reason, []).append(name)
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    note = f"{len(average.sets)} of {total} sets; missing: {listed}."
    return f"Average ({average.title}) of {{}}: " + note.replace("{", "{{").replace("}", "}}")


def rank_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Tabulate average ranks over the sets that all methods with results have finished."""
    rows, notes = [], []
    for comparison in comparisons:
        where = f"{comparison.backbone}, {comparison.protocol}"
        methods, sets = comparison.ranked()
        ranks = sorted(comparison.ranks().items(), key=lambda item: item[1])
        if ranks:
            listed = ", ".join(f"{method} {rank:.2f}" for method, rank in ranks)
            rows.append((where, len(sets), listed))
        if failed := [method for method in comparison.methods if method not in methods]:
            notes.append(f"{where}: {', '.join(failed)} finished no set.")
    if not rows:
        return None
    return plain_table(
        "Average ranks over data sets (1 is best)",
        ("backbone, protocol", "sets", "ranks"),
        rows,
        *notes,
    )


def paired_table(comparison: Comparison) -> Table | None:
    """Compare the MIV-head with every other method on every set; None if there is no other."""
    ours = reference(comparison)
    rows = []
    for rival in comparison.methods:
        if rival == ours:
            continue
        shared = [
            s for s in comparison.sets if all(comparison.cell(s, m).results for m in (ours, rival))
        ]
        for sets in [[s] for s in shared] + ([shared] if len(shared) > 1 else []):
            title = set_title(sets[0]) if len(sets) == 1 else f"all tasks of {len(sets)} sets"
            test = comparison.paired(ours, rival, sets)
            rows.append((f"{title}: {ours} - {rival}", test))
    if not rows:
        return None
    corrected = holm([test.p for _, test in rows])
    return Table(
        f"Paired differences, {comparison.backbone}, {comparison.protocol}",
        ("difference", "tasks", "points", "t-test p", "Holm p", "Wilcoxon p"),
        tuple(
            (
                *entries((title, test.difference.n)),
                Entry(test.difference.signed, test.significant),
                *entries(map(p_value, (test.p, p_holm, test.p_wilcoxon))),
            )
            for (title, test), p_holm in zip(rows, corrected, strict=True)
        ),
        notes=(
            f"Bold: t-test p < {LEVEL}. Holm: corrected for all {len(rows)} comparisons of this "
            f"table. All tests are two-sided, over the same tasks. "
            f"{HALF_WIDTHS[comparison.interval]}",
        ),
    )


def calibration_table(comparison: Comparison) -> Table:
    """Tabulate the expected calibration error by set and method."""

    def error(name: str, method: str) -> str:
        value = calibration_error(r.calibration for r in comparison.cell(name, method).results)
        return "-" if math.isnan(value) else f"{100 * value:.1f}"

    return plain_table(
        f"Expected calibration error in %, {comparison.backbone}, {comparison.protocol}",
        ("data set", *comparison.methods),
        [(set_title(s), *(error(s, m) for m in comparison.methods)) for s in comparison.sets],
        "The distance between confidence and accuracy over all queries of a set: 0 is perfect.",
    )


DECISIONS = {
    "known_rejected": "known rejected",
    "same_rejected": "same set rejected",
    "other_rejected": "other sets rejected",
    "named": "named",
    "named_wrong": "of these wrong",
}
SEPARATION = {  # measures of a score, and how the table calls them
    "auroc_same": "AUROC same set",
    "auroc_other": "AUROC other sets",
    "fpr_same": "FPR same set",
    "fpr_other": "FPR other sets",
    "accuracy_80": "accuracy at 80%",
}


def separation_table(comparison: Comparison) -> Table | None:
    """Tabulate how well each score of each method separates unknown queries, in open tasks."""
    rows = []
    for method in comparison.methods:
        separations: dict[str, dict[str, list[Separation]]] = {}  # by score and set
        for name in comparison.complete:
            for result in comparison.cell(name, method).results:
                for separation in result.open.scores if result.open else ():
                    separations.setdefault(separation.score, {}).setdefault(name, []).append(
                        separation
                    )
        for score, by_set in separations.items():
            means = [
                np.mean(
                    [np.mean([getattr(s, field) for s in per_task]) for per_task in by_set.values()]
                )
                for field in SEPARATION
            ]
            rows.append((method, score, *(f"{mean:.3f}" for mean in means)))
    if not rows:
        return None
    return plain_table(
        f"Unknown images, {comparison.backbone}, {comparison.protocol}",
        ("method", "score", *SEPARATION.values()),
        rows,
        f"Means over tasks, then over {len(comparison.complete)} sets. AUROC: known queries "
        "against queries of other classes of the same set, and of other sets. FPR: share of these "
        "that is accepted if 95% of the known ones are. Accuracy at 80%: of the known queries "
        "with the smallest scores.",
    )


def decision_table(comparison: Comparison) -> Table | None:
    """Tabulate the decisions of one method with its default thresholds, in open tasks."""
    method = reference(comparison)

    def row(title: str, sets: Sequence[Sequence[OpenResult]]) -> tuple[str, ...]:
        def mean(field: str) -> str:
            known = [
                [v for r in results if (v := getattr(r, field)) is not None] for results in sets
            ]
            means = [np.mean(values) for values in known if values]
            return f"{np.mean(means):.3f}" if means else "-"

        return (title, *map(mean, DECISIONS))

    all_sets = {
        name: [r.open for r in comparison.cell(name, method).results if r.open]
        for name in comparison.complete
    }
    by_set = {name: results for name, results in all_sets.items() if results}
    if not any(r.named is not None for results in by_set.values() for r in results):
        return None
    return plain_table(
        f"Decisions of {method}, {comparison.backbone}, {comparison.protocol}",
        ("data set", *DECISIONS.values()),
        [
            *(row(set_title(name), [results]) for name, results in by_set.items()),
            row("Average", list(by_set.values())),
        ],
        'Rejected: "none of these", with the default thresholds.',
    )


def published_table(comparison: Comparison) -> Table | None:
    """Tabulate our accuracies next to the paper's; None if no result corresponds."""
    rows: list[tuple[object, ...]] = []
    for name in comparison.sets:
        for method in comparison.methods:
            summary = comparison.cell(name, method).summary
            printed = published(comparison.backbone, comparison.protocol, method, name)
            if summary is None or printed is None:
                continue
            interval = "" if printed.half_width is None else f" ± {printed.half_width}"
            rows.append(
                (
                    f"{set_title(name)}, {method}",
                    summary,
                    f"{printed.accuracy}{interval}",
                    f"{100 * summary.mean - printed.accuracy:+.1f}",
                )
            )
    if not rows:
        return None
    for average in comparison.averages():
        for method in comparison.methods:
            if (paper_mean := _published_mean(comparison, method, average)) is not None:
                here, (value, remark) = 100 * average.means[method], paper_mean
                rows.append(
                    (
                        f"Average ({average.title}), {method}",
                        f"{here:.1f}",
                        f"{value:.1f}{remark}",
                        f"{here - value:+.1f}",
                    )
                )
    return plain_table(
        f"Compared with the paper's figures, {comparison.backbone}, {comparison.protocol}",
        ("data set, method", "here", "paper", "difference"),
        rows,
        "The paper's tasks are different, and the images may be: its sets are the test splits of "
        "Meta-Dataset, with 600 tasks each. Only the names correspond: the paper's miv has its own "
        "recipe, ours the one that the run specifies.",
    )


def _published_mean(
    comparison: Comparison, method: str, average: Average
) -> tuple[float, str] | None:
    """Return the paper's average over the same sets, and a remark if it does not print it."""
    if average.title not in BENCHMARKS:
        return None
    column = comparison.backbone, comparison.protocol, method
    printed = published_average(*column, average.title)
    if printed is not None and not average.missing:
        return printed.accuracy, ""
    of_sets = [published(*column, name) for name in average.sets]
    values = [result.accuracy for result in of_sets if result is not None]
    if len(values) < len(of_sets) or not values:
        return None
    return float(np.mean(values)), f" (of {len(values)} sets)"


def literature_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Tabulate the MIV-head here next to results that the paper quotes from the literature.

    None unless a comparison samples tasks as Meta-Dataset does, from one of its sets.
    """
    columns = [
        (comparison, method)
        for comparison in comparisons
        if comparison.protocol == "varying"
        for method in comparison.methods
        if method in OURS
    ]
    quoted = literature()
    known = list(next(iter(quoted.values())))

    def ours(comparison: Comparison, method: str, name: str) -> str:
        for folder in comparison.sets:
            info = find_declared(folder)
            if info is not None and info.name == name:
                return str(comparison.cell(folder, method).summary or "-")
        return "-"

    here = {name: [ours(c, method, name) for c, method in columns] for name in known}
    if {text for texts in here.values() for text in texts} <= {"-"}:
        return None
    rows: list[tuple[str, ...]] = [
        (
            set_title(name),
            *(f"{by_set[name].accuracy} ± {by_set[name].half_width}" for by_set in quoted.values()),
            *here[name],
        )
        for name in known
    ]
    means = [np.mean([p.accuracy for p in by_set.values()]) for by_set in quoted.values()]
    rows.append(("Average (MD)", *(f"{mean:.1f}" for mean in means), *("" for _ in columns)))
    return plain_table(
        "Results from the literature, as the paper quotes them, and this run",
        (
            "data set",
            *(f"{method}, {backbone}" for method, backbone in quoted),
            *(f"{method}, {c.backbone} (here)" for c, method in columns),
        ),
        rows,
        "Every quoted method has its own, specially trained backbone, and its tasks and images "
        "differ from those of this run: a broader perspective, not a comparison.",
    )


# Ablations: series over the number of blocks or candidates, and 2x2 tables of interactions.

SERIES = {
    "N, blocks of the backbone": re.compile(r"^miv-blocks(\d+)$"),
    "D, candidates per block": re.compile(r"^miv-d(\d+)$"),
}
# Methods without and with a component, as the ready-made configurations name them; {} is either
# empty or selects one block.
INTERACTIONS = {
    "Pooling by attention": ("miv-gap{}", "miv{}"),
    "Pooling by attention and CAP": ("miv-gap-mean{}", "miv{}"),
}


@dataclass(frozen=True)
class Point:
    """One variant in a series: its number, its mean accuracy in %, and its GFLOPs as printed."""

    number: int
    accuracy: float
    gflops: float


@dataclass(frozen=True)
class Series:
    """Variants of the head that differ in one number."""

    title: str
    points: tuple[Point, ...]


def find_series(comparison: Comparison) -> list[Series]:
    """Collect the variants of each ablation, averaged over the sets of MD as in the paper."""
    series = []
    for title, pattern in SERIES.items():
        numbered = {int(hit[1]): m for m in comparison.methods if (hit := pattern.match(m))}
        if len(numbered) > 1 and (sets := comparison.averaged):
            points = tuple(
                Point(n, 100 * comparison.mean(method, sets), _gflops(comparison, method))
                for n, method in sorted(numbered.items())
            )
            series.append(Series(title, points))
    return series


def _gflops(comparison: Comparison, method: str) -> float:
    cells = [comparison.cell(s, method) for s in comparison.averaged]
    return float(np.mean([cell.mean("gflops_authors") for cell in cells]))


def series_table(comparison: Comparison, series: Series) -> Table:
    """Tabulate the values that the chart of a series shows."""
    return plain_table(
        f"Accuracy and GFLOPs over {series.title}, {comparison.backbone}, {comparison.protocol}",
        (series.title, "accuracy in %", "GFLOPs"),
        [(p.number, f"{p.accuracy:.1f}", number(p.gflops)) for p in series.points],
        f"Mean of {_described(comparison)}. GFLOPs of adaptation as the paper counts them: by its "
        "rule, for the implementation of its authors.",
    )


def _described(comparison: Comparison) -> str:
    """Name the sets that an ablation averages."""
    sets = comparison.averaged
    declared = {info.name for name in sets if (info := find_declared(name))}
    total = len(BENCHMARKS["MD"])
    of_md = len(declared) == len(sets) and declared <= set(BENCHMARKS["MD"])
    return f"{len(sets)} of the {total} sets of MD" if of_md else f"{len(sets)} sets"


def interaction_tables(comparison: Comparison) -> list[Table]:
    """Make 2x2 tables: a component off and on, with one block and with all blocks."""
    tables = []
    for suffix, views in (("-no-views", "without views"), ("", "with views")):
        for title, (without, with_it) in INTERACTIONS.items():
            names = [
                pattern.format(blocks) + suffix
                for blocks in ("-blocks1", "")
                for pattern in (without, with_it)
            ]
            if comparison.complete and set(names) <= set(comparison.methods):
                where = f"the number of blocks, {views}, {comparison.backbone}"
                tables.append(_interaction(comparison, f"{title} and {where}", names))
    return tables


def _interaction(comparison: Comparison, title: str, names: Sequence[str]) -> Table:
    a, b, c, d = (100 * comparison.mean(method, comparison.averaged) for method in names)
    return plain_table(
        f"Interaction: {title}",
        ("", "disabled", "gain", "enabled"),
        [
            ("one block", f"{a:.1f}", f"{b - a:+.1f}", f"{b:.1f}"),
            ("gain of more blocks", f"{c - a:+.1f}", "", f"{d - b:+.1f}"),
            ("all blocks", f"{c:.1f}", f"{d - c:+.1f}", f"{d:.1f}"),
        ],
        f"Accuracy in %, mean of {_described(comparison)}. Together they gain "
        f"{d - a:+.1f}, alone {b - a:+.1f} and {c - a:+.1f}: {d - b - c + a:+.1f} come from "
        "their interaction.",
    )
