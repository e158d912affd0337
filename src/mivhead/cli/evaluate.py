"""`miv evaluate`: how often a model is right on labelled images, and what it confuses."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.inputs import Model, classify_images, classify_table, drop_bad, load_model
from mivhead.cli.output import (
    check_output,
    interval,
    is_features,
    one_line,
    percent,
    plural,
    print_json,
    report_skipped,
    shorten,
    table,
    width,
)
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.images.imageset import Skipped

MAX_MATRIX = 15  # classes of a matrix that is readable as text
MAX_CONFUSIONS = 15
MAX_NAME = 24

EXAMPLES = """
miv evaluate birds.miv test/                          # test/robin/7.jpg, ...
miv evaluate birds.miv test.zip --picture confusion.png
miv evaluate birds.miv test/ --json > result.json
"""


@dataclass(frozen=True)
class Score:
    """How many of some images were right."""

    images: int
    right: int

    @property
    def accuracy(self) -> float:
        """Share of images that were right."""
        return self.right / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        from mivhead.diagnostics.estimate import wilson_interval

        return wilson_interval(self.right, self.images)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "accuracy": self.accuracy, "interval": list(self.interval)}


@dataclass(frozen=True)
class Result:
    """What a model made of labelled images."""

    names: list[str]
    matrix: list[list[int]]  # images of [true class][predicted class]

    @property
    def score(self) -> Score:
        """All classes together."""
        right = sum(row[i] for i, row in enumerate(self.matrix))
        return Score(sum(map(sum, self.matrix)), right)

    @property
    def classes(self) -> dict[str, Score]:
        """Every class that has images."""
        rows = enumerate(zip(self.names, self.matrix, strict=True))
        return {name: Score(sum(row), row[i]) for i, (name, row) in rows if any(row)}

    @property
    def confusions(self) -> list[tuple[int, str, str]]:
        """How often, true class, predicted class: the most frequent first."""
        found = [
            (count, self.names[i], self.names[j])
            for i, row in enumerate(self.matrix)
            for j, count in enumerate(row)
            if count and i != j
        ]
        return sorted(found, key=lambda each: -each[0])


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "evaluate",
        "measure a model on labelled images",
        "Measure a model on labelled images that it was not trained on: accuracy with a 95 % "
        "interval, for all and per class, and which classes are taken for which.",
        EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="model file")
    parser.add_argument(
        "images",
        metavar="IMAGES",
        help="a folder with one folder per class, a zip of one, a CSV of path and label, "
        "or a features file with labels",
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the confusion matrix (.png, .svg or .pdf)"
    )
    options.add_skip_bad(parser)
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.picture:
        from mivhead.diagnostics.pictures import check_format

        check_format(args.picture)
        check_output(args.picture)
    options.prepare(args)
    model = load_model(args.model, device=args.device, backbone=args.backbone, weights=args.weights)
    result, skipped = _evaluate(model, args)
    report_skipped(skipped)
    if args.picture:
        from mivhead.diagnostics.pictures import draw_confusion

        draw_confusion(result.matrix, result.names, args.picture)
    if args.json:
        print_json(
            {"model": args.model, **_as_json(result), "skipped": [asdict(s) for s in skipped]}
        )
    else:
        print(_describe(result))
        if args.picture and not args.quiet:
            print(f"\nWrote {args.picture}.")
    return 0


def _evaluate(model: Model, args: argparse.Namespace) -> tuple[Result, list[Skipped]]:
    if is_features(args.images):
        from mivhead import stores

        with stores.open(args.images) as store:
            features = store.read()
        if features.labels is None:
            raise InputError(f"{args.images} has no labels to compare with.")
        _check_labels(features.labels, model, args.images)
        return _count(features.labels, classify_table(model, features), model.names), []
    from mivhead.images.sources import open_labelled

    images = open_labelled(args.images, min_classes=1)
    _check_labels(images.labels or (), model, args.images)
    images, skipped = drop_bad(images, args.skip_bad)
    predictions = classify_images(model, images, verbose=not args.quiet)
    return _count(images.labels or (), predictions, model.names), skipped


def _check_labels(labels: tuple[str, ...], model: Model, path: str) -> None:
    unknown = sorted(set(labels) - set(model.names))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        known = ", ".join(model.names[:5]) + (", ..." if len(model.names) > 5 else "")
        raise InputError(
            f"{path} has the class {unknown[0]!r}{more}, which the model {model.path} does not "
            f"know (it knows {known}): rename the folder, or leave it out."
        )


def _count(labels: tuple[str, ...], predictions: list[Any], names: list[str]) -> Result:
    pairs = Counter(zip(labels, (str(each.label) for each in predictions), strict=True))
    return Result(names, [[pairs[true, predicted] for predicted in names] for true in names])


def _describe(result: Result) -> str:
    whole = result.score
    rows = [
        [name, score.images, score.right, percent(score.accuracy), interval(score.interval)]
        for name, score in result.classes.items()
    ]
    header = ["class", "images", "right", "accuracy", "95 % interval"]
    return (
        f"Accuracy {percent(whole.accuracy, 1)}: {whole.right:,} of "
        f"{plural(whole.images, 'image')} right (95 % interval {interval(whole.interval)}).\n\n"
        f"{table(header, rows, right='images right accuracy')}\n\n{_describe_confusions(result)}"
    )


def _describe_confusions(result: Result) -> str:
    if not result.confusions:
        return "No confusions."
    if len(result.names) <= MAX_MATRIX:
        return _matrix(result)
    listed = result.confusions[:MAX_CONFUSIONS]
    text = "Most frequent confusions:\n"
    text += table(["images", "true class", "taken for"], listed, right="images")
    if len(result.confusions) > MAX_CONFUSIONS:
        text += f"\n... and {len(result.confusions) - MAX_CONFUSIONS} more (--json lists all)"
    return text


def _matrix(result: Result) -> str:
    """Lay out the matrix with letters for its columns, as names would not fit."""
    letters = [chr(ord("a") + i) for i in range(len(result.names))]
    names = [shorten(one_line(name), MAX_NAME) for name in result.names]
    size = max(map(width, names))
    cell = max(3, *(len(str(count)) + 1 for row in result.matrix for count in row))
    lines = [" " * (size + 4) + "".join(letter.rjust(cell) for letter in letters)]
    for letter, name, row in zip(letters, names, result.matrix, strict=True):
        counts = "".join((str(count) if count else ".").rjust(cell) for count in row)
        lines.append(f"{name}{' ' * (size - width(name))}  {letter} {counts}")
    return "Confusion matrix (row: true class, column: predicted):\n" + "\n".join(lines)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        **result.score.as_json(),
        "classes": {name: score.as_json() for name, score in result.classes.items()},
        "confusions": [
            {"count": count, "label": true, "predicted": predicted}
            for count, true, predicted in result.confusions
        ],
    }
