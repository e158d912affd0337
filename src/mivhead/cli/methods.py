"""`miv methods`: the MIV-head, its rivals and its ablations, by name."""

from __future__ import annotations

import argparse
from typing import Any

from mivhead.cli import options
from mivhead.cli.output import print_json, table
from mivhead.methods import Method, get_method, list_methods

EXAMPLES = """
miv methods
miv methods knn                          # its paper and hyperparameters
miv methods my_module:MyHead             # a class of your own
miv methods --json
miv fit shots/ -o plain.miv --method ncc
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "methods",
        "list methods: the MIV-head, its rivals and its ablations",
        "List the methods that `miv fit --method` takes, with what they need and where they come "
        "from; or show one of them with its hyperparameters. Methods of installed packages are "
        "listed too; name a class of your own as module:Class.",
        EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show only this method")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    chosen = list_methods() if args.name is None else [get_method(args.name)]
    if args.json:
        facts = [_facts(method, with_parameters=args.name is not None) for method in chosen]
        print_json({"methods": facts})
    elif args.name is not None:
        print(_describe(chosen[0]))
    else:
        rows = [[m.name, m.needs, "yes" if m.uses_views else "no", m.summary] for m in chosen]
        print(table(["method", "needs", "views", "summary"], rows, limit=80))
        print("\n`miv methods NAME` shows the paper and the hyperparameters of a method.")
    return 0


def _facts(method: Method, *, with_parameters: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": method.name,
        "summary": method.summary,
        "needs": method.needs,
        "uses_views": method.uses_views,
        "paper": method.paper,
    }
    if with_parameters:
        facts["hyperparameters"] = method.hyperparameters()
    return facts


def _describe(method: Method) -> str:
    rows = [[name, repr(value)] for name, value in sorted(method.hyperparameters().items())]
    return (
        f"{method.name}: {method.summary}.\n"
        + (f"Reference: {method.paper}.\n" if method.paper else "")
        + f"Needs {method.needs}; trains on augmented views: "
        f"{'yes' if method.uses_views else 'no'}.\n\n{table(['parameter', 'value'], rows)}"
    )
