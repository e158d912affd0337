"""`miv evaluate`: accuracy of a model on labelled images, and which classes it confuses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from mivhead._util.text import percent
from mivhead.cli import options
from mivhead.cli.output import Output, describe_decisions, interval, plural, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.evaluation import Evaluation

MAX_CONFUSIONS = 15
MAX_MISTAKES = 50

EXAMPLES = """
miv evaluate birds.miv test/                       # test/robin/7.jpg, ...
miv evaluate birds.miv test/ --foreign garden/     # how many of these are rejected
miv evaluate birds.miv test/ --max-errors 5%       # fewer names, fewer of them wrong
miv evaluate birds.miv test/ --json > result.json  # lists every misclassified image
"""


@options.command(EXAMPLES)
@click.argument("model", metavar="MODEL", help="Model file of `miv fit` or `miv export`.")
@click.argument("images", metavar="IMAGES", help=options.LABELLED)
@click.option(
    "--picture",
    type=options.output_file(*options.PICTURES),
    help="Draw the confusion matrix to a .png, .svg or .pdf file.",
)
@click.option(
    "--foreign",
    metavar="IMAGES",
    help="Images of other things (a folder or zip archive), to see how many are rejected.",
)
@options.decision
@options.skip_bad
@options.label
@options.boxes
@options.backbone
def evaluate(
    out: Output,
    model: str,
    images: str,
    picture: str | None,
    foreign: str | None,
    decision: dict[str, Any],
    skip_bad: bool,
    label: str | None,
    boxes: str | None,
    backbone: dict[str, Any],
) -> None:
    """Measure a model on labelled images that it was not trained on.

    The report shows the accuracy with a 95% interval, overall and per class, how many images get a
    name and how many of the names are wrong, which classes the model confuses, and which images it
    gets wrong. Shots of the model are left out.
    """
    from mivhead.diagnostics.evaluation import evaluate as measure
    from mivhead.diagnostics.pictures import check_format
    from mivhead.images.sources import open_unlabelled

    if picture:
        check_format(picture)  # before the work
    loaded = options.load_any_model(model, out, **backbone)
    loaded.thresholds(**decision)  # an error now, not after the images have been read
    if not boxes and options.is_features(images):
        features = options.read_features(images, label)
        if features.labels is None:
            raise InputError(f"{images} has no labels to compare the predictions with.")
        loaded.check_takes(features=True, backbone=features.backbone)
        others: Any = None if foreign is None else options.read_features(foreign)
        result = measure(loaded, features, foreign=others, **decision)
    else:
        loaded.check_takes(features=False)
        labelled = options.open_images(images, label, boxes)
        others = None if foreign is None else open_unlabelled([foreign])
        result = measure(loaded, labelled, skip_bad=skip_bad, foreign=others, **decision)
    out.skipped(result.skipped)
    if result.shots:
        shots = plural(len(result.shots), "photo")
        print(f"Left out {shots} that the model was trained on.", file=sys.stderr)
    out.result({"model": model, **result.as_json()}, _describe(result))
    if picture:
        result.plot(picture)
        out.say(f"\nSaved {picture}.")


def _describe(result: Evaluation) -> str:
    """Report the decisions, accuracy, classes, confusions and mistakes."""
    text = f"{result}\n"
    if result.decisions is not None:
        text += f"{describe_decisions(result.decisions)}\n"
    if (counts := result.foreign) is not None:
        rejected = percent(counts.none / counts.images)
        text += f"Foreign photos: {describe_decisions(counts)} Rejected: {rejected}.\n"
    rows: list[Any] = [
        [name, score.images, score.right, percent(score.accuracy), interval(score.interval)]
        for name, score in result.per_class.items()
    ]
    header = ["class", "photos", "right", "accuracy", "95% interval"]
    text += f"\n{table(header, rows, right='photos right accuracy')}\n\n"
    if not result.confusions:
        return f"{text}No confusions."
    header = ["photos", "true class", "predicted as"]
    confusions = table(header, result.confusions, right="photos", most=MAX_CONFUSIONS)
    rows = [(m.id, m.label, m.predicted, percent(m.probability)) for m in result.mistakes]
    header = ["file", "true class", "predicted as", "probability"]
    mistakes = table(header, rows, right="probability", most=MAX_MISTAKES)
    return (
        f"{text}Most frequent confusions:\n{confusions}\n\n"
        f"Misclassified photos, the most confident mistakes first:\n{mistakes}"
    )
