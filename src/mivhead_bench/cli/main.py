"""`miv bench`: the commands of the laboratory."""

from __future__ import annotations

import click

from mivhead.cli.main import invoke, miv
from mivhead_bench.cli.data import data
from mivhead_bench.cli.methods import methods
from mivhead_bench.cli.plot import plot
from mivhead_bench.cli.report import compare, report
from mivhead_bench.cli.run import run, tables

HELP = """Compare methods on the same few-shot tasks, with costs and intervals.

\b
  miv bench run small -o try     # on images that pip packages contain
  miv bench report try
"""


@click.group(
    help=HELP,
    commands=[run, report, compare, tables, methods, data, plot],
    context_settings=miv.context_settings,
)
def bench() -> None:
    """Run `miv bench`: its commands do everything."""


def main(arguments: list[str]) -> int:
    """Run `miv bench` with these arguments and return its exit code."""
    return invoke(bench, "miv bench", arguments)
