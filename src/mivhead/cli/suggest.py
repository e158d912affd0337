"""`miv suggest`: which images to label next."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.loading import kind_of, load_model
from mivhead.cli.output import check_output, plural, print_json, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.model.fewshot import FewShotClassifier

EXAMPLES = """
miv suggest unlabelled/ -n 20                 # no model yet: typical, different images
miv suggest birds.miv unlabelled/ -n 10
miv suggest birds.miv unlabelled/ --html label.html   # label them in the browser
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "suggest",
        "suggest which images to label next",
        "Suggest which unlabelled images to label next, so that the accuracy grows fastest: images "
        "that are typical of many others and unlike the shots and, once classes have three shots "
        "on average, images for which the model can hardly decide between two classes. "
        "Near-duplicates are suggested once. Images that look like none of the classes are "
        "suggested as possible new classes.",
        EXAMPLES,
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="[MODEL] IMAGES",
        help="the model, if there is one, and unlabelled images: folders, zip archives, patterns",
    )
    parser.add_argument(
        "-n",
        type=options.positive,
        default=10,
        dest="count",
        metavar="N",
        help="number of images to suggest",
    )
    parser.add_argument(
        "--html",
        metavar="PAGE",
        help="write a page that shows the images and takes their names, for `miv add`",
    )
    parser.add_argument(
        "--seed", type=options.not_negative, default=0, metavar="N", help="random seed"
    )
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv suggest`."""
    if args.html:
        if Path(args.html).suffix.lower() not in (".html", ".htm"):
            raise InputError(f"The page must be a .html file, got {args.html}.")
        check_output(args.html)
    options.prepare(args)
    from mivhead.diagnostics.suggestion import labels_for, suggest
    from mivhead.images.sources import open_unlabelled
    from mivhead.model.fewshot import FewShotClassifier

    model: FewShotClassifier | None = None
    if kind_of(args.images[0]) == "model":
        path, *paths = args.images
        model = load_model(path, args)
        model.check_takes(features=False)
    else:
        paths = args.images
    if not paths:
        raise InputError("Give a folder of unlabelled images.")
    images = open_unlabelled(paths)
    reader = model
    if reader is None:
        reader = FewShotClassifier(args.backbone, weights=args.weights, device=args.device)
        reader.verbose = not args.quiet
    found = suggest(reader.extract(images), args.count, model=model, seed=args.seed)
    reasons = labels_for(found)
    if args.html:
        from mivhead.diagnostics.pages import write_suggestions

        classes = [] if model is None else model.classes_.tolist()
        title = f"{plural(len(found), 'image')} to label next"
        write_suggestions(found, images, args.html, title=title, classes=classes)
    if args.json:
        print_json({"suggestions": [asdict(each) for each in found]})
        return 0
    rows = [
        (each.id, "-" if each.label is None else each.label, reason)
        for each, reason in zip(found, reasons, strict=True)
    ]
    print(table(["image", "looks like", "why"], rows))
    if args.html and not args.quiet:
        print(f"\nSaved {args.html}: name the images there, then `miv add MODEL corrections.csv`.")
    return 0
