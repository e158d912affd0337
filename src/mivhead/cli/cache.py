"""`miv cache`: show or clear the feature cache."""

from __future__ import annotations

import argparse
from typing import Any

from mivhead.cli import options
from mivhead.cli.output import print_json, size

INFO_EXAMPLES = """
miv cache info
MIV_CACHE=/fast/disk miv fit shots/ -o birds.miv   # use another folder; `off` for none
MIV_CACHE_GB=50 miv fit shots/ -o birds.miv        # let it grow to 50 GB (default: 10)
"""
CLEAR_EXAMPLES = """
miv cache clear
MIV_CACHE=/fast/disk miv cache clear
"""


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    actions = options.new_group(
        subparsers,
        "cache",
        "show or clear the feature cache",
        "The feature cache keeps the features of every image and view on disk, so that each passes "
        "through the backbone only once.",
        "miv cache info",
    )
    info = options.new_command(
        actions,
        "info",
        "show the folder and the size of the cache",
        "Show where the feature cache is, how much it holds, and its limit, above which the least "
        "recently used features are removed.",
        INFO_EXAMPLES,
    )
    clear = options.new_command(
        actions,
        "clear",
        "remove all cached features",
        "Remove all features from the cache; they are extracted again when they are needed.",
        CLEAR_EXAMPLES,
    )
    for action in (info, clear):
        options.add_json(action)
        action.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run either action."""
    from mivhead.extraction.cache import open_cache

    cache = open_cache()
    if cache is None:
        facts: dict[str, Any] = {"folder": None}
        text = "The feature cache is disabled (MIV_CACHE=off)."
    else:
        found = cache.clear() if args.action == "clear" else cache.info()
        facts = {
            "folder": str(found.folder),
            "entries": found.entries,
            "bytes": found.bytes,
            "limit": found.limit,
        }
        stored = f"features of {found.entries:,} images and views, {size(found.bytes)}"
        if args.action == "clear":
            text = f"Removed from {found.folder}: {stored}."
        else:
            text = f"{found.folder}: {stored} (limit {size(found.limit)})."
    if args.json:
        print_json(facts)
    elif not args.quiet:
        print(text)
    return 0
