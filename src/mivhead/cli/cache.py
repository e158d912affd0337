"""`miv cache`: what the feature cache holds, and away with it."""

from __future__ import annotations

import argparse
from typing import Any

from mivhead.cli import options
from mivhead.cli.output import print_json, size

EXAMPLES = """
miv cache info
miv cache clear
MIV_CACHE=/fast/disk miv fit shots/ -o birds.miv   # another folder; `off` for none
MIV_CACHE_GB=50 miv fit shots/ -o birds.miv        # let it grow to 50 GB (default: 10)
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "cache",
        "show or empty the feature cache",
        "Features of every image and view are kept on disk, so that the backbone sees each only "
        "once. Above the size limit, what was not used for the longest time is removed.",
        EXAMPLES,
    )
    parser.add_argument("action", choices=("info", "clear"), help="show it, or remove everything")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from mivhead.extraction.cache import open_cache

    cache = open_cache()
    if cache is None:
        facts: dict[str, Any] = {"folder": None}
        text = "The feature cache is switched off (MIV_CACHE=off)."
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
