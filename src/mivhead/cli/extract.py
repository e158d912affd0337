"""`miv extract`: from images to a features file or a database table."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from mivhead.cli import jobs, options
from mivhead.cli.output import check_output, plural, print_json, report_skipped, seconds, size
from mivhead.errors import InputError

EXAMPLES = """
miv extract shots/ -o shots.safetensors                 # for `miv fit`
miv extract new/*.jpg -o new.safetensors --no-labels   # for `miv predict`
miv extract archive/ --job features/                    # any number of images, in parts
miv extract shots/ -o lancedb://data/birds              # to a database table
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "extract",
        "write features of images to a file or database",
        "Pass images through the backbone once and write their features, labels and augmented "
        "views to a file or database table that `miv fit`, `predict` and `evaluate` accept.",
        EXAMPLES,
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="a folder with one folder per class, a zip archive of one, or a CSV file of paths and "
        "labels; with --no-labels any images, folders, zip archives or patterns",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="features file or table to write; for large jobs, use --job instead",
    )
    parser.add_argument(
        "--no-labels", action="store_true", help="extract images without labels, not augmented"
    )
    options.add_old_name(parser, "--unlabelled", "--no-labels", dest="no_labels", nargs=0)
    options.add_skip_bad(parser)
    jobs.add_job(parser, "this .parquet file or folder, without labels and augmented views")
    options.add_csv(parser)
    options.add_extraction(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv extract`."""
    started = time.perf_counter()
    if args.out:
        return jobs.run_extract(args)
    jobs.check_no_job(args)
    if not args.output:
        raise InputError("Name the output with -o FILE or --job PATH.")
    from mivhead import stores
    from mivhead.images.sources import open_labelled, open_unlabelled

    if not stores.is_store(args.output):
        check_output(args.output, replaces="features")
    if len(args.images) > 1 and not args.no_labels:
        raise InputError(
            "Labelled images must come from one folder, zip archive or CSV file; for several "
            "sources of images without labels, use --no-labels."
        )
    options.prepare(args)
    if args.no_labels:
        images = open_unlabelled(args.images)
    else:
        how = {"label": args.label, "encoding": args.encoding}
        images = open_labelled(args.images[0], min_classes=1, **how)
    model = options.classifier_from(args)
    features = model.extract(images, skip_bad=args.skip_bad)
    with stores.open(args.output) as store:
        store.write(features)
    report_skipped(model.skipped_)
    views = 0 if features.views is None else len(features.views)
    spent = time.perf_counter() - started
    if args.json:
        print_json(
            {
                "features": store.name,
                "images": len(features),
                "views": views,
                "bytes": features.nbytes,
                "seconds": spent,
                "skipped": [asdict(each) for each in model.skipped_],
            }
        )
    elif not args.quiet:
        with_views = f" and {plural(views, 'augmented view')}" if views else ""
        print(
            f"Saved features of {plural(len(features), 'image')}{with_views} to {store.name} "
            f"({size(features.nbytes)}) in {seconds(spent)}."
        )
    return 0
