"""`miv backbones`: what concerns backbones themselves; one module an action."""

from __future__ import annotations

from typing import Any

from mivhead.cli import export_backbone, inspect_backbone, list_backbones, serve_backbone

ACTIONS = (list_backbones, inspect_backbone, export_backbone, serve_backbone)


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    parser = subparsers.add_parser(
        "backbones",
        help="list, inspect, export or serve backbones",
        description="Frozen image models, by name, file or address.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for action in ACTIONS:
        action.add_parser(actions)
