"""Reports: the tables and charts of a run as Markdown, LaTeX, CSV and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TypeVar

from mivhead._util.files import replacing, write_text
from mivhead._util.tables import to_csv
from mivhead._util.text import one_line
from mivhead_bench.benchmark.compare import Comparison, Interval, compare, compare_columns
from mivhead_bench.benchmark.config import ComparisonConfig
from mivhead_bench.benchmark.leaderboard import COLUMNS, rows_of
from mivhead_bench.benchmark.open_set import OpenResult
from mivhead_bench.benchmark.published import published
from mivhead_bench.benchmark.report import accuracy, charts, costs
from mivhead_bench.benchmark.report.formats import (
    ReportSection,
    render_html,
    render_latex,
    render_markdown,
)
from mivhead_bench.benchmark.results import Result

A = TypeVar("A")
T = TypeVar("T")


def write_report(
    results: Sequence[Result],
    folder: str | Path,
    title: str,
    comparisons: Sequence[ComparisonConfig] = (),
    *,
    origin: Mapping[str, str] | None = None,
    weights: Mapping[str, str] | None = None,
    interval: Interval = "student",
) -> list[Path]:
    """Write `report.md`, `tables.tex`, `report.html`, CSV files, and every chart as a file.

    `results.csv` has a line per task and method, `summary.csv` one per set and method, with the
    paper's values, and `rows.csv` one per set and method for a results page.

    The charts are in the folder `figures`, as PDF and PNG, for a paper.

    Parameters
    ----------
    results : sequence of Result
        The results of one run.
    folder : str or Path
        Created if it does not exist; files of an earlier report are replaced.
    title : str
        Title of the report.
    comparisons : sequence of ComparisonConfig, optional
        What to compare across backbones; by default everything, if there are several backbones.
    origin : mapping of str to str, optional
        How the results were made, for the page: see `mivhead_bench.benchmark.results.read_origin`.
    weights : mapping of str to str, optional
        SHA-256 of the weights of each backbone.
    interval : {"student", "normal"}, default="student"
        The rule for half-widths, as for `mivhead_bench.benchmark.compare.summarise`.

    Returns
    -------
    list of Path
        The files that were written.
    """
    results = [_printable(result) for result in results]
    sections = make_sections(results, comparisons, interval)
    contents = {
        "report.md": render_markdown(title, sections),
        "tables.tex": render_latex(sections),
        "results.csv": results_csv(results),
        "summary.csv": summary_csv(results, interval),
        "rows.csv": to_csv(
            COLUMNS, ([*row.values()] for row in rows_of(results, origin or {}, weights or {}))
        ),
        "report.html": render_html(title, sections, origin),
    }
    paths = []
    for name, text in contents.items():
        paths.append(Path(folder, name))
        write_text(paths[-1], text)
    charts_made = [chart for section in sections for chart in section.charts]
    for number, chart in enumerate(charts_made, start=1):
        for suffix, data in chart.files.items():
            path = Path(folder, "figures", f"{number:02}-{chart.name}.{suffix}")
            with replacing(path, make_folders=True) as part:
                part.write_bytes(data)
            paths.append(path)
    return paths


def _printable(result: Result) -> Result:
    """Replace control characters in names, which may be a stranger's."""
    return replace(
        result,
        backbone=one_line(result.backbone),
        set=one_line(result.set),
        method=one_line(result.method),
    )


def make_sections(
    results: Sequence[Result],
    comparisons: Sequence[ComparisonConfig] = (),
    interval: Interval = "student",
) -> list[ReportSection]:
    """Make all tables and charts; sections without content are omitted."""
    per_backbone = compare(results, interval)
    by_protocol: dict[str, list[Comparison]] = {}
    for comparison in per_backbone:
        by_protocol.setdefault(comparison.protocol, []).append(comparison)
    ablations = [(c, series) for c in per_backbone for series in accuracy.find_series(c)]
    across = _across_backbones(results, comparisons, interval)
    sections = [
        *([across] if comparisons else []),  # the table that was asked for comes first
        ReportSection(
            "Accuracy",
            (
                *map(accuracy.accuracy_table, by_protocol.values()),
                *_apply(accuracy.rank_table, [per_backbone]),
            ),
            tuple(map(charts.accuracy_bars, per_backbone)),
        ),
        *([] if comparisons else [across]),
        ReportSection("Paired tests", _apply(accuracy.paired_table, per_backbone)),
        ReportSection(
            "The paper's figures",
            (
                *_apply(accuracy.published_table, per_backbone),
                *_apply(accuracy.literature_table, [per_backbone]),
            ),
        ),
        ReportSection(
            "Ablations",
            (
                *(accuracy.series_table(*ablation) for ablation in ablations),
                *(table for c in per_backbone for table in accuracy.interaction_tables(c)),
            ),
            tuple(charts.series_chart(*ablation) for ablation in ablations),
        ),
        ReportSection(
            "Unknown images",
            (
                *_apply(accuracy.separation_table, per_backbone),
                *_apply(accuracy.decision_table, per_backbone),
            ),
        ),
        ReportSection(
            "Cost",
            tuple(
                make(c) for c in per_backbone for make in (costs.latency_table, costs.gflops_table)
            ),
            _apply(charts.cost_bars, per_backbone),
        ),
        ReportSection(
            "Calibration",
            tuple(map(accuracy.calibration_table, per_backbone)),
            _apply(charts.reliability, per_backbone),
        ),
        ReportSection("Failures", _apply(costs.error_table, [per_backbone])),
    ]
    return [section for section in sections if section.tables or section.charts]


def _across_backbones(
    results: Sequence[Result], comparisons: Sequence[ComparisonConfig], interval: Interval
) -> ReportSection:
    """Compare columns of several backbones: the tables of the paper, if the run is one of them."""
    if not comparisons and len({r.backbone for r in results}) > 1:
        columns = tuple(dict.fromkeys(f"{r.method}@{r.backbone}" for r in results))
        comparisons = [ComparisonConfig("all backbones", columns)]
    by_protocol: dict[str, list[Comparison]] = {}
    for config in comparisons:
        for comparison in compare_columns(
            results, config.title, config.columns, config.rival, interval=interval, bold=config.bold
        ):
            by_protocol.setdefault(comparison.protocol, []).append(comparison)
    together = [comparison for group in by_protocol.values() for comparison in group]
    return ReportSection(
        "Across backbones",
        (
            *map(accuracy.accuracy_table, by_protocol.values()),
            *_apply(accuracy.paired_table, together),
            *_apply(accuracy.published_table, together),
            *_apply(costs.adaptation_table, together),
            *map(costs.latency_table, together),
            *map(costs.gflops_table, together),
        ),
        _apply(charts.cost_bars, together),
    )


def results_csv(results: Sequence[Result]) -> str:
    """Write one line per result, without the calibration bins."""
    names = [f.name for f in fields(Result) if f.name not in ("calibration", "open")]
    opened = [_flatten(result.open) for result in results]
    more = list(dict.fromkeys(name for measures in opened for name in measures))
    rows = [
        [*(getattr(r, name) for name in names), *(measures.get(name) for name in more)]
        for r, measures in zip(results, opened, strict=True)
    ]
    return to_csv([*names, *more], rows)


def _flatten(open_result: OpenResult | None) -> dict[str, object]:
    """Return the measures of an open task by the names of their columns."""
    if open_result is None:
        return {}
    scores = {
        f"{name}_{separation.score}": value
        for separation in open_result.scores
        for name, value in vars(separation).items()
        if name != "score"
    }
    return scores | {name: value for name, value in vars(open_result).items() if name != "scores"}


SUMMARY = (
    *("backbone", "protocol", "set", "method", "state", "tasks", "accuracy", "half_width"),
    *("train_seconds", "infer_seconds", *costs.COUNTS, "peak_bytes"),
    *("paper_accuracy", "paper_half_width", "paper_gflops", "paper_train_seconds"),
    "paper_infer_seconds",
)


def summary_csv(results: Sequence[Result], interval: Interval = "student") -> str:
    """Write one line per set and method: means, and what the paper prints; accuracies in %."""
    cells = (
        (comparison, name, method, comparison.cell(name, method))
        for comparison in compare(results, interval)
        for name in comparison.sets
        for method in comparison.methods
    )
    rows = []
    for comparison, name, method, cell in cells:
        values: list[object] = [""] * 8
        if cell.summary is not None:
            spent = costs.latency(cell)
            values = [
                100 * cell.summary.mean,
                100 * cell.summary.half_width,
                spent.train,
                spent.infer,
                *map(cell.mean, (*costs.COUNTS, "peak_bytes")),
            ]
        printed = published(comparison.backbone, comparison.protocol, method, name)
        paper = [""] * 5 if printed is None else ["" if x is None else x for x in astuple(printed)]
        place = (comparison.backbone, comparison.protocol, name, method)
        cleaned = ["" if isinstance(v, float) and v != v else v for v in values]
        rows.append([*place, cell.state, len(cell.results), *cleaned, *paper])
    return to_csv(SUMMARY, rows)


def _apply(make: Callable[[A], T | None], arguments: Sequence[A]) -> tuple[T, ...]:
    """Apply a function that returns None where there is nothing to show."""
    return tuple(made for argument in arguments if (made := make(argument)) is not None)
