"""`miv bench`: backbones, methods and data sets compared; one module an action."""

from __future__ import annotations

from typing import Any

from mivhead.cli.bench import compare, report, run

ACTIONS = (run, report, compare)


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    parser = subparsers.add_parser(
        "bench",
        help="compare methods on many few-shot tasks",
        description="The benchmark: the same tasks for every method, with costs and intervals.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for action in ACTIONS:
        action.add_parser(actions)
