"""From the results of a run to the files of its report."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields
from io import StringIO
from pathlib import Path
from typing import TypeVar

from mivhead._files import write_text
from mivhead.benchmark.compare import Comparison, compare
from mivhead.benchmark.report import accuracy, charts, costs
from mivhead.benchmark.report.accuracy import find_series, interaction_tables, series_table
from mivhead.benchmark.report.formats import write_html, write_latex, write_markdown
from mivhead.benchmark.report.model import Chart, Section, Table
from mivhead.benchmark.results import Result

FILES = ("report.md", "tables.tex", "results.csv", "report.html")
T = TypeVar("T")
MOST_CURVES = 6  # methods in a calibration chart


def write_report(results: Sequence[Result], folder: str | Path, title: str) -> list[Path]:
    """Write `report.md`, `tables.tex`, `results.csv` and `report.html` into a folder.

    Parameters
    ----------
    results
        Of one run.
    folder
        Made if it is not there; files of an earlier report are replaced.
    title
        Of the report.

    Returns
    -------
    list of Path
        The files.
    """
    sections = make_sections(results)
    texts = (
        write_markdown(title, sections),
        write_latex(sections),
        results_csv(results),
        write_html(title, sections),
    )
    folder = Path(folder)
    paths = [folder / name for name in FILES]
    for path, text in zip(paths, texts, strict=True):
        write_text(path, text)
    return paths


def make_sections(results: Sequence[Result]) -> list[Section]:
    """Make all tables and charts."""
    comparisons = compare(results)
    sections = [
        _accuracy(comparisons),
        Section("Paired tests", tables=_each(accuracy.paired_table, comparisons)),
        Section("The paper's figures", tables=_each(accuracy.beside_table, comparisons)),
        _ablations(comparisons),
        _costs(comparisons),
        Section(
            "Calibration",
            tables=_each(accuracy.calibration_table, comparisons),
            charts=_each(_reliability, comparisons),
        ),
        Section("The full benchmark", tables=(costs.budget_table(comparisons),)),
    ]
    if (errors := costs.error_table(comparisons)) is not None:
        sections.append(Section("Failures", tables=(errors,)))
    return [section for section in sections if section.tables or section.charts]


def results_csv(results: Sequence[Result]) -> str:
    """One line a result, calibration bins left out."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in fields(Result)]
    last = names.index("calibration")
    writer.writerow(names[:last] + names[last + 1 :])
    for result in results:
        values = astuple(result)
        writer.writerow(values[:last] + values[last + 1 :])
    return out.getvalue()


def _accuracy(comparisons: Sequence[Comparison]) -> Section:
    by_protocol: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        by_protocol.setdefault(comparison.protocol, []).append(comparison)
    tables = [accuracy.accuracy_table(group) for group in by_protocol.values()]
    drawn = [
        *map(charts.accuracy_bars, comparisons),
        *_each(charts.accuracy_against_cost, comparisons),
        *_each(charts.task_scatter, comparisons),
    ]
    return Section(
        "Accuracy",
        tables=(*tables, accuracy.rank_table(comparisons)),
        charts=tuple(drawn),
    )


def _ablations(comparisons: Sequence[Comparison]) -> Section:
    found = [(c, series) for c in comparisons for series in find_series(c)]
    interactions = [table for c in comparisons for table in interaction_tables(c)]
    return Section(
        "Ablations",
        tables=(*(series_table(*each) for each in found), *interactions),
        charts=tuple(charts.series_chart(*each) for each in found),
    )


def _costs(comparisons: Sequence[Comparison]) -> Section:
    tables: Iterator[Table] = (
        table(c) for c in comparisons for table in (costs.latency_table, costs.gflops_table)
    )
    return Section("Cost", tables=tuple(tables), charts=_each(charts.cost_bars, comparisons))


def _reliability(comparison: Comparison) -> Chart | None:
    return charts.reliability(comparison, comparison.methods[:MOST_CURVES])


def _each(make: Callable[[Comparison], T | None], over: Sequence[Comparison]) -> tuple[T, ...]:
    """Leave out what there is nothing for."""
    return tuple(made for each in over if (made := make(each)) is not None)
