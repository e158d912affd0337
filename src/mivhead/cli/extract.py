"""`miv extract`: from images to a features file or a database table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output, plural, seconds, size
from mivhead.errors import InputError

EXAMPLES = """
miv extract shots/ -o shots.safetensors                # for `miv fit`
miv extract new/*.jpg -o new.safetensors --no-labels   # for `miv predict`
miv extract shots/ -o lancedb://data/birds             # to a database table
"""


@options.command(EXAMPLES)
@click.argument(
    "images",
    nargs=-1,
    required=True,
    metavar="IMAGES...",
    help="A folder with one folder per class, a zip archive of one, or a CSV file of paths and "
    "labels; with --no-labels any images, folders, zip archives or patterns.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    help="Features file or database table to write.",
)
@click.option("--no-labels", is_flag=True, help="Extract images without labels, not augmented.")
@options.skip_bad
@options.label
@options.classifier
@options.image_size
def extract(
    out: Output,
    images: Sequence[str],
    output: str,
    no_labels: bool,
    skip_bad: bool,
    label: str | None,
    classifier: dict[str, Any],
) -> None:
    """Pass images through the backbone once and write their features.

    Labels are written with them, to a file or database table that `miv fit`, `predict` and
    `evaluate` accept; a .safetensors file holds augmented views, too.
    """
    from mivhead import stores
    from mivhead.images.sources import open_labelled, open_unlabelled

    started = time.perf_counter()
    if "://" not in str(output):
        options.check_output(output, replaces="features")
    if no_labels:
        image_set = open_unlabelled(images)
    elif len(images) == 1:
        image_set = open_labelled(images[0], min_classes=1, label=label)
    else:
        raise InputError("Labelled images come from one folder, zip or CSV; or use --no-labels.")
    model = options.new_classifier(out, **classifier)
    features = model.extract(image_set, skip_bad=skip_bad)
    store = stores.open(output)
    store.write(features)
    out.skipped(model.skipped_)
    views = len(features.views) if features.views is not None and store.keeps_views else 0
    spent = time.perf_counter() - started
    with_views = f" and {plural(views, 'augmented view')}" if views else ""
    out.report(
        {
            "features": store.name,
            "images": len(features),
            "views": views,
            "bytes": features.nbytes,
            "seconds": spent,
            "skipped": [asdict(image) for image in model.skipped_],
        },
        f"Saved features of {plural(len(features), 'image')}{with_views} to {store.name} "
        f"({size(features.nbytes)}) in {seconds(spent)}.",
    )
