"""`miv bench methods`: the MIV-head, its rivals and its ablations, by name."""

from __future__ import annotations

from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output, table
from mivhead_bench.methods import Method, get_method, list_methods

EXAMPLES = """
miv bench methods
miv bench methods knn                          # its paper and hyperparameters
miv bench methods my_module:MyHead             # a class of your own
"""


@options.command(EXAMPLES)
@click.argument("name", required=False, help="Show only this method.")
def methods(out: Output, name: str | None) -> None:
    """List the methods that `miv bench run --methods` takes.

    They are listed with what they need and where they come from; one of them is shown with its
    hyperparameters. Name a class of your own as module:Class.
    """
    if name is not None:
        method = get_method(name)
        facts = _facts(method) | {"hyperparameters": method.hyperparameters()}
        out.result({"methods": [facts]}, _describe(method))
        return
    listed = list_methods()
    rows = [[m.name, m.needs, "yes" if m.uses_views else "no", m.summary] for m in listed]
    text = table(["method", "needs", "views", "summary"], rows, limit=80)
    hint = "`miv bench methods NAME` shows the paper and the hyperparameters of a method."
    out.result({"methods": [_facts(method) for method in listed]}, f"{text}\n\n{hint}")


def _facts(method: Method) -> dict[str, Any]:
    return {
        key: getattr(method, key)
        for key in ("name", "summary", "needs", "uses_views", "optimiser", "paper")
    }


def _describe(method: Method) -> str:
    rows = [[name, repr(value)] for name, value in sorted(method.hyperparameters().items())]
    paper = f"Reference: {method.paper}.\n" if method.paper else ""
    by = f", by {method.optimiser}" if method.optimiser else ""
    views = "on augmented views, too" if method.uses_views else "without augmented views"
    return (
        f"{method.name}: {method.summary}.\n{paper}Needs {method.needs}; trains {views}{by}.\n\n"
        + table(["parameter", "value"], rows)
    )
