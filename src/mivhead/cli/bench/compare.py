"""`miv bench compare`: two methods of a run, or of two runs, on the same tasks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.files import print_json
from mivhead.cli.text import table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.benchmark.pairs import Row, Side

EXAMPLES = """
miv bench compare run:miv run:ncc        # two methods of a run
miv bench compare before after           # all methods that two runs share
miv bench compare before:miv after:miv
"""


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        subparsers,
        "compare",
        "paired comparison of two runs, or of two methods",
        "Compare accuracies on the same tasks: mean difference with its interval, two-sided paired "
        "t-test, the same corrected for the number of rows (Holm), and Wilcoxon's signed-rank "
        "test. Results of different tasks are refused.",
        EXAMPLES,
    )
    parser.add_argument("first", metavar="A", help="a run, or RUN:METHOD")
    parser.add_argument("second", metavar="B", help="a run, or RUN:METHOD")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    from mivhead.benchmark.pairs import pair

    found = [(a, b, pair(a, b)) for a, b in _sides(args.first, args.second)]
    if args.json:
        print_json([_as_json(a, b, row) for a, b, rows in found for row in rows])
    else:
        print("\n\n".join(_as_text(a, b, rows) for a, b, rows in found))
    return 0


def _sides(first: str, second: str) -> list[tuple[Side, Side]]:
    """Two named methods; or each method that two runs share."""
    from mivhead.benchmark.journal import read_results
    from mivhead.benchmark.pairs import choose

    (folder_a, a), (folder_b, b) = map(_parse, (first, second))
    results = [read_results(folder_a), read_results(folder_b)]
    if a is None and b is None:
        shared = sorted(set.intersection(*({r.method for r in side} for side in results)))
        if Path(folder_a).resolve() == Path(folder_b).resolve():
            raise InputError(f"Name two methods of {first}, such as {first}:miv {first}:ncc.")
        if shared:
            return [
                (choose(results[0], m, folder_a), choose(results[1], m, folder_b)) for m in shared
            ]
    return [(choose(results[0], a, folder_a), choose(results[1], b, folder_b))]


def _parse(text: str) -> tuple[str, str | None]:
    """Split RUN:METHOD; a folder may have a colon in its name."""
    folder, colon, method = text.rpartition(":")
    if not colon or Path(text).is_dir():
        return text, None
    return folder, method


def _as_text(first: Side, second: Side, rows: list[Row]) -> str:
    from mivhead.benchmark.report.model import p_value

    lines = [
        (
            row.backbone,
            row.protocol,
            row.set,
            row.paired.difference.n,
            row.first,
            row.second,
            row.paired.difference.signed,
            p_value(row.paired.p),
            p_value(row.holm),
            p_value(row.paired.p_wilcoxon),
        )
        for row in rows
    ]
    header = ["backbone", "protocol", "set", "tasks", "A", "B", "A-B", "p", "Holm", "Wilcoxon"]
    right = "tasks A B A-B p Holm Wilcoxon"
    return f"A = {first.name}, B = {second.name}\n" + table(header, lines, right=right)


def _as_json(first: Side, second: Side, row: Row) -> dict[str, Any]:
    return {
        "first": first.name,
        "second": second.name,
        "backbone": row.backbone,
        "protocol": row.protocol,
        "set": row.set,
        "tasks": row.paired.difference.n,
        "accuracies": [row.first.mean, row.second.mean],
        "difference": row.paired.difference.mean,
        "half_width": row.paired.difference.half_width,
        "p": row.paired.p,
        "p_holm": row.holm,
        "p_wilcoxon": row.paired.p_wilcoxon,
    }
