"""`miv bench report` and `miv bench compare`: what the results of runs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output, table
from mivhead.errors import InputError
from mivhead_bench.benchmark.compare import MethodResults, Row, choose, pair
from mivhead_bench.benchmark.config import RunConfig
from mivhead_bench.benchmark.report import write_report
from mivhead_bench.benchmark.report.formats import p_value
from mivhead_bench.benchmark.results import (
    CONFIG,
    check_no_links,
    describe_process,
    read_origin,
    read_results,
    read_run_config,
    read_weights,
)

REPORT_EXAMPLES = """
miv bench report run                  # writes run/report/report.html and other files
miv bench report run -o report --title "Heads on Lite0"
"""
COMPARE_EXAMPLES = """
miv bench compare run:miv run:ncc        # two methods of a run
miv bench compare before after           # all methods that both runs share
miv bench compare run:miv@dino_vits8 run:ett@dino_vits16     # across backbones
"""


@options.command(REPORT_EXAMPLES)
@click.argument("folder", metavar="RUN", help="Folder of `miv bench run`.")
@click.option("-o", "--output", metavar="DIR", help="Folder for the report (default: RUN/report).")
@click.option("--title", help="Title of the report (default: the name of the run).")
def report(out: Output, folder: str, output: str | None, title: str | None) -> None:
    """Write tables and charts of a run, which may still be in progress.

    These are report.html (a single page that works offline), report.md, tables.tex (the paper's
    layout), results.csv (one line per task), summary.csv (one per set and method, with the paper's
    values), rows.csv (the same for a results page), and the charts as PDF and PNG files.
    """
    run = Path(folder)
    if output is None:
        check_no_links(run)
    results = read_results(run)
    known = (run / CONFIG).exists()  # results may have been copied without it
    config = read_run_config(run) if known else RunConfig()
    paths = write_report(
        results,
        output or run / "report",
        title or f"Benchmark: {run.resolve().name}",
        config.comparisons,
        origin={**read_origin(run), "report": describe_process()["time"]},
        weights=read_weights(run),
        interval=config.interval,
    )
    shown = ", ".join(str(path) for path in paths if path.parent.name != "figures")
    out.report({"files": [str(path) for path in paths]}, f"Wrote {shown}, and charts in figures")


@options.command(COMPARE_EXAMPLES)
@click.argument("first", metavar="A", help="A run, RUN:METHOD, or RUN:METHOD@BACKBONE.")
@click.argument("second", metavar="B", help="The same for the other side.")
def compare(out: Output, first: str, second: str) -> None:
    """Compare two runs, or two methods, task by task.

    Shows the mean difference of accuracies on the same tasks with its interval, a two-sided paired
    t-test, its p-value corrected for the number of rows (Holm), and Wilcoxon's signed-rank test.
    Results of different tasks cannot be compared.
    """
    compared = [(a, b, pair(a, b)) for a, b in _choose_pairs(first, second)]
    out.result(
        {"rows": [_as_json(a, b, row) for a, b, rows in compared for row in rows]},
        "\n\n".join(_as_text(a, b, rows) for a, b, rows in compared),
    )


def _choose_pairs(first: str, second: str) -> list[tuple[MethodResults, MethodResults]]:
    """Return the two named methods, or each method that the runs share."""
    (folder_a, a), (folder_b, b) = map(_parse, (first, second))
    results = [read_results(folder_a), read_results(folder_b)]
    pairs = [(a, b)]
    if a is None and b is None:
        if Path(folder_a).resolve() == Path(folder_b).resolve():
            raise InputError(f"Name two methods of {first}, such as {first}:miv {first}:ncc.")
        shared = set.intersection(*({r.method for r in run} for run in results))
        pairs = [(method, method) for method in sorted(shared)] or pairs
    return [(choose(results[0], a, folder_a), choose(results[1], b, folder_b)) for a, b in pairs]


def _parse(text: str) -> tuple[str, str | None]:
    """Split RUN:METHOD; a folder may have a colon in its name, and a method, as module:Class.

    >>> _parse("run"), _parse("run:ncc"), _parse("run:my_module:MyHead")
    (('run', None), ('run', 'ncc'), ('run', 'my_module:MyHead'))
    """
    if Path(text).is_dir() or ":" not in text:
        return text, None
    parts = text.split(":")
    splits = [(":".join(parts[:i]), ":".join(parts[i:])) for i in range(1, len(parts))]
    return next((split for split in splits if Path(split[0]).is_dir()), splits[0])


def _as_text(first: MethodResults, second: MethodResults, rows: list[Row]) -> str:
    lines = [
        (
            row.backbone,
            row.protocol,
            row.set,
            row.paired.difference.n,
            row.first,
            row.second,
            row.paired.difference.signed,
            *map(p_value, (row.paired.p, row.holm, row.paired.p_wilcoxon)),
        )
        for row in rows
    ]
    header = ["backbone", "protocol", "set", "tasks", "A", "B", "A-B", "p", "Holm", "Wilcoxon"]
    right = "tasks A B A-B p Holm Wilcoxon"
    return f"A = {first.name}, B = {second.name}\n" + table(header, lines, right=right)


def _as_json(first: MethodResults, second: MethodResults, row: Row) -> dict[str, Any]:
    difference = row.paired.difference
    return {
        "first": first.name,
        "second": second.name,
        "backbone": row.backbone,
        "protocol": row.protocol,
        "set": row.set,
        "tasks": difference.n,
        "accuracies": [row.first.mean, row.second.mean],
        "difference": difference.mean,
        "half_width": None if difference.n == 1 else difference.half_width,
        "p": row.paired.p,
        "p_holm": row.holm,
        "p_wilcoxon": row.paired.p_wilcoxon,
    }
