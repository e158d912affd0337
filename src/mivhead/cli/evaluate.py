"""`miv evaluate`: accuracy of a model on labelled images, and which classes it confuses."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mivhead._util.text import one_line, percent, shorten, width
from mivhead.cli import options
from mivhead.cli.loading import (
    is_features,
    load_any_model,
)
from mivhead.cli.output import (
    check_output,
    describe_decisions,
    interval,
    plural,
    print_json,
    report_skipped,
    table,
)
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.evaluation import Evaluation
    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.fewshot import FewShotClassifier

MAX_MATRIX = 15  # classes of a matrix that is readable as text
MAX_CONFUSIONS = 15
MAX_MISTAKES = 50
MAX_NAME = 24

EXAMPLES = """
miv evaluate birds.miv test/                          # test/robin/7.jpg, ...
miv evaluate birds.miv test.zip --picture confusion.png --mistakes wrong.png
miv evaluate birds.miv test/ --foreign garden/        # how many of these are rejected
miv evaluate birds.miv test/ --foreign garden/ --tradeoff curves.png
miv evaluate birds.miv test/ --max-errors 5%          # fewer names, fewer of them wrong
miv evaluate birds.miv test/ --json > result.json     # lists every misclassified image
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "evaluate",
        "measure the accuracy of a model on labelled images",
        "Measure a model on labelled images that it was not trained on. The report shows the "
        "accuracy with a 95 % interval, overall and per class, how many images get a name and how "
        "many of the names are wrong, which classes the model confuses, and which images it gets "
        "wrong.",
        EXAMPLES,
    )
    parser.add_argument("model", type=options.model, metavar="MODEL", help="model file")
    parser.add_argument(
        "images",
        metavar="IMAGES",
        help="a folder with one folder per class, a zip archive of one, a CSV file of paths and "
        "labels, or a features file with labels",
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the confusion matrix to a .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--mistakes",
        metavar="FILE",
        help="draw the misclassified images to a .png, .svg or .pdf file",
    )
    parser.add_argument(
        "--tradeoff",
        metavar="FILE",
        help="draw how many names are wrong if fewer are given, and with --foreign the ROC curve",
    )
    parser.add_argument(
        "--foreign",
        metavar="IMAGES",
        help="a folder or zip archive of images of other things, to see how many are rejected",
    )
    parser.add_argument(
        "--include-shots",
        action="store_true",
        help="measure images that the model was trained on as well; by default they are left out",
    )
    options.add_decision(parser, sets=False)
    options.add_skip_bad(parser)
    options.add_csv(parser)
    options.add_boxes(parser)
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv evaluate`."""
    drawings = {
        "plot": args.picture,
        "plot_mistakes": args.mistakes,
        "plot_tradeoff": args.tradeoff,
    }
    drawings = {draw: path for draw, path in drawings.items() if path}
    if drawings:
        from mivhead.diagnostics.pictures import check_format

        for path in drawings.values():
            check_format(path)
            check_output(path)
    if args.mistakes and is_features(args.images):
        raise InputError("--mistakes draws images, so it cannot be used with features.")
    result = _evaluate(load_any_model(args.model, args), args)
    report_skipped(result.skipped)
    if result.shots:
        print(
            f"Left out {plural(len(result.shots), 'image')} that the model was trained on "
            "(--include-shots measures them as well).",
            file=sys.stderr,
        )
    for draw, path in drawings.items():
        getattr(result, draw)(path)
    if args.json:
        print_json({"model": args.model, **result.as_json()})
    else:
        print(_describe(result))
        if drawings and not args.quiet:
            print(f"\nSaved {' and '.join(drawings.values())}.")
    return 0


def _evaluate(
    model: FewShotClassifier | ExportedClassifier, args: argparse.Namespace
) -> Evaluation:
    from mivhead.diagnostics.evaluation import evaluate
    from mivhead.images.sources import open_labelled, open_unlabelled

    how = {"include_shots": args.include_shots, **options.decision(args, model, warn=False)}
    if args.boxes or not is_features(args.images):
        model.check_takes(features=False)
        if args.boxes:
            _, images = options.open_boxes(args, args.images, labelled=True)
        else:
            images = open_labelled(
                args.images, min_classes=1, label=args.label, encoding=args.encoding
            )
        foreign = None if args.foreign is None else open_unlabelled([args.foreign])
        return evaluate(model, images, skip_bad=args.skip_bad, foreign=foreign, **how)
    from mivhead import stores

    with stores.open(args.images, label=args.label) as store:
        features = store.read()
    if features.labels is None:
        raise InputError(f"{args.images} has no labels to compare the predictions with.")
    model.check_takes(features=True, backbone=features.backbone)
    return evaluate(model, features, foreign=_foreign_features(args), **how)


def _foreign_features(args: argparse.Namespace) -> Any:
    """Read the foreign images of an evaluation on features, which must be features too."""
    if args.foreign is None:
        return None
    if not is_features(args.foreign):
        raise InputError("With features, --foreign must be a features file, too (`miv extract`).")
    from mivhead import stores

    with stores.open(args.foreign) as store:
        return store.read()


def _describe(result: Evaluation) -> str:
    total = result.score
    rows = [
        [name, score.images, score.right, percent(score.accuracy), interval(score.interval)]
        for name, score in result.per_class.items()
    ]
    header = ["class", "images", "right", "accuracy", "95 % interval"]
    return (
        f"Accuracy {percent(total.accuracy, 1)}: {total.right:,} of "
        f"{plural(total.images, 'image')} right (95 % interval {interval(total.interval)}).\n"
        f"{_describe_names(result)}\n"
        f"{table(header, rows, right='images right accuracy')}\n\n{_describe_confusions(result)}"
        f"{_describe_mistakes(result)}"
    )


def _describe_names(result: Evaluation) -> str:
    """Describe how many images got a name, and how many images of other things did."""
    text = ""
    if (counts := result.decisions) is not None:
        text += f"{describe_decisions(counts)}.\n"
    if (counts := result.foreign) is not None:
        rejected = counts.none / counts.images
        text += (
            f"Of {plural(counts.images, 'foreign image')}, {counts.none:,} "
            f"{'was' if counts.none == 1 else 'were'} rejected as none of these "
            f"({percent(rejected)}), {counts.unsure:,} {'is' if counts.unsure == 1 else 'are'} "
            f"unsure, {counts.named:,} {'was' if counts.named == 1 else 'were'} named.\n"
        )
    return text


def _describe_mistakes(result: Evaluation) -> str:
    if not result.mistakes:
        return ""
    rows = [
        [m.id, m.label, m.predicted, percent(m.probability)] for m in result.mistakes[:MAX_MISTAKES]
    ]
    text = "\n\nMisclassified images, the most confident mistakes first:\n"
    text += table(["file", "true class", "predicted as", "probability"], rows, right="probability")
    if len(result.mistakes) > MAX_MISTAKES:
        text += f"\n... and {len(result.mistakes) - MAX_MISTAKES} more (--json lists all)"
    return text


def _describe_confusions(result: Evaluation) -> str:
    confusions = result.confusions
    if not confusions:
        return "No confusions."
    if len(result.classes) <= MAX_MATRIX:
        return _matrix(result)
    text = "Most frequent confusions:\n"
    text += table(
        ["images", "true class", "predicted as"], confusions[:MAX_CONFUSIONS], right="images"
    )
    if len(confusions) > MAX_CONFUSIONS:
        text += f"\n... and {len(confusions) - MAX_CONFUSIONS} more (--json lists all)"
    return text


def _matrix(result: Evaluation) -> str:
    """Format the confusion matrix, with letters as headings because names would not fit."""
    letters = [chr(ord("a") + i) for i in range(len(result.classes))]
    names = [shorten(one_line(name), MAX_NAME) for name in result.classes]
    size = max(map(width, names))
    cell = max(3, len(str(result.confusion.max())) + 1)
    lines = [" " * (size + 4) + "".join(letter.rjust(cell) for letter in letters)]
    for letter, name, row in zip(letters, names, result.confusion.tolist(), strict=True):
        counts = "".join((str(count) if count else ".").rjust(cell) for count in row)
        lines.append(f"{name}{' ' * (size - width(name))}  {letter} {counts}")
    return "Confusion matrix (rows: true class, columns: predicted class):\n" + "\n".join(lines)
