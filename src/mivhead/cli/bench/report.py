"""`miv bench report`: the tables and charts of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mivhead.cli import options
from mivhead.cli.files import print_json

EXAMPLES = """
miv bench report run                  # writes run/report/report.html and others
miv bench report run -o docs/results --title "Heads on Lite0"
"""


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        subparsers,
        "report",
        "tables and charts of a run",
        "Write report.html (one page that needs no network), report.md, tables.tex (the paper's "
        "layout) and results.csv. A run may be reported while it goes on.",
        EXAMPLES,
    )
    parser.add_argument("folder", metavar="RUN", help="folder of `miv bench run`")
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="folder for the report (default: RUN/report)"
    )
    parser.add_argument("--title", help="of the report (default: the name of the run)")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    from mivhead.benchmark.journal import read_results
    from mivhead.benchmark.report.writing import write_report

    folder = Path(args.folder)
    title = args.title or f"Benchmark: {folder.resolve().name}"
    paths = write_report(read_results(folder), args.output or folder / "report", title)
    if args.json:
        print_json({"files": [str(path) for path in paths]})
    elif not args.quiet:
        print("Wrote " + ", ".join(str(path) for path in paths))
    return 0
