"""`miv extract`: images to a features file."""

from __future__ import annotations

import argparse
import time
from typing import Any

from mivhead.cli import options
from mivhead.cli.output import check_output, is_table, plural, report_skipped, seconds, size
from mivhead.errors import InputError

EXAMPLES = """
miv extract shots/ -o shots.safetensors          # with labels and augmented views, for `miv fit`
miv extract new/*.jpg -o new.safetensors --unlabelled   # for `miv predict`
miv extract shots/ -o lancedb://data/birds       # into a table of a database
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "extract",
        "images to a features file",
        "Pass images through the backbone once and write their features, with labels and "
        "augmented views, to a file that `miv fit`, `predict` and `evaluate` take.",
        EXAMPLES,
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="a folder with one folder per class, a zip of one, or a CSV of path and label; "
        "with --unlabelled any images, folders, zips or patterns",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="file or table to write"
    )
    parser.add_argument(
        "--unlabelled", action="store_true", help="images without labels, and no views"
    )
    options.add_skip_bad(parser)
    options.add_extraction(parser)
    options.add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    started = time.perf_counter()
    if not is_table(args.output):
        check_output(args.output, replaces="features")
    if len(args.images) > 1 and not args.unlabelled:
        raise InputError(
            "Labelled images come from one folder, zip or CSV; "
            "give --unlabelled for several, without labels."
        )
    options.prepare(args)
    from mivhead import stores
    from mivhead.images.sources import open_labelled, open_unlabelled

    images = (
        open_unlabelled(args.images)
        if args.unlabelled
        else open_labelled(args.images[0], min_classes=1)
    )
    classifier = options.classifier_from(args)
    features = classifier.extract(images, skip_bad=args.skip_bad)
    with stores.open(args.output) as store:
        store.write(features)
    report_skipped(classifier.skipped_)
    if not args.quiet:
        views = 0 if features.views is None else len(features.views)
        with_views = f" and {plural(views, 'augmented view')}" if views else ""
        print(
            f"Wrote features of {plural(len(features), 'image')}{with_views} to {store.name} "
            f"({size(features.nbytes)}) in {seconds(time.perf_counter() - started)}."
        )
    return 0
