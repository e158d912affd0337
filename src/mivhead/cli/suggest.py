"""`miv suggest`: which images to label next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output, plural, table
from mivhead.errors import InputError

EXAMPLES = """
miv suggest unlabelled/ -n 20                 # no model yet: typical, different images
miv suggest birds.miv unlabelled/ -n 10
miv suggest birds.miv unlabelled/ --html label.html   # label them in the browser
"""


@options.command(EXAMPLES)
@click.argument(
    "images",
    nargs=-1,
    required=True,
    metavar="[MODEL] IMAGES...",
    help=f"The model, if there is one, and unlabelled images. {options.UNLABELLED}",
)
@click.option(
    "-n", "count", type=options.POSITIVE, default=10, metavar="N", help="How many to suggest."
)
@options.html("Write a page that shows the images and takes their names, for `miv add`.")
@options.backbone
def suggest(
    out: Output, images: Sequence[str], count: int, html: str | None, backbone: dict[str, Any]
) -> None:
    """Suggest which unlabelled images to label next, so that the accuracy grows fastest.

    Suggested are images that are typical of many others and unlike the shots and, once classes have
    three shots on average, images for which the model can hardly decide between two classes.
    Near-duplicates are suggested once. Images that look like none of the classes are suggested as
    possible new classes.
    """
    from mivhead.diagnostics.suggestion import suggest as choose
    from mivhead.images.sources import open_unlabelled

    model = None
    if options.kind_of(images[0]) == "model":
        model = options.load_model(images[0], out, **backbone)
    paths = images if model is None else images[1:]
    if not paths:
        raise InputError("Give a folder of unlabelled images.")
    unlabelled = open_unlabelled(paths)
    if model is not None:
        model.check_takes(features=False)
    reader = model or options.new_classifier(out, **backbone)
    chosen = choose(reader.extract(unlabelled), count, model=model)
    if html:
        from mivhead.diagnostics.pages import learning_command, write_suggestions

        file = None if model is None else images[0]
        classes = [] if model is None else model.classes_.tolist()
        title = f"{plural(len(chosen), 'photo')} to name next"
        write_suggestions(chosen, unlabelled, html, title=title, classes=classes, model=file)
    rows = [
        (image.id, "-" if image.label is None else image.label, image.reason) for image in chosen
    ]
    out.result(
        {"suggestions": [asdict(image) for image in chosen]},
        table(["file", "closest", "why"], rows, limit=sys.maxsize),
    )
    if html:
        out.say(f"\nSaved {html}: name the photos there, then `{learning_command(file)}`.")
