"""`miv predict`: classes and probabilities of new images."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import percent, shorten
from mivhead.cli import jobs, options
from mivhead.cli.loading import (
    is_features,
    load_any_model,
)
from mivhead.cli.output import (
    as_json,
    check_folder,
    check_output,
    describe_decisions,
    other_max_errors,
    plural,
    report_skipped,
    size,
    table,
)
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.explanation import Explanation
    from mivhead.images.boxes import BoxFile
    from mivhead.images.imageset import ImageSet, Skipped
    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.prediction import DecisionCounts, Prediction

MAX_NAME = 24  # characters of a runner-up's name
MAX_CLASSES = 30  # counted one by one

EXAMPLES = """
miv predict birds.miv new/*.jpg
miv predict birds.miv new/ --top 3
miv predict birds.miv new/ --max-errors 5%       # more "unsure", fewer wrong names
miv predict birds.miv new/ --reject 20%          # more "none of these"
miv predict birds.miv new/ --coverage 90%        # sets that hold the right class
miv predict birds.miv new.zip -o names.csv       # or names.json
miv predict birds.miv new/ -o names.csv --excel  # opens in Excel with the right characters
miv predict birds.miv new/ --html results.html   # a page with reasons and corrections
miv predict birds.miv new/ --sort-into sorted/   # copies the images
miv predict birds.miv new.safetensors --json     # from `miv extract`
miv predict birds.miv archive/ --job predictions.parquet          # any number of images
miv predict birds.onnx s3://bucket/photos --job names.csv --resume  # after an interruption
miv predict birds.miv lancedb://data/birds --where "split = 'new'" --write species
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "predict",
        "classify new images",
        "Classify new images with a model from `miv fit`, and print a table of files, classes and "
        "probabilities. Then print how many images got a name, and how many would with another "
        "--max-errors.",
        EXAMPLES,
    )
    parser.add_argument("model", type=options.model, metavar="MODEL", help="model file")
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="images, folders, zip archives or patterns; or one features file or database table",
    )
    parser.add_argument(
        "--top",
        type=options.positive,
        default=1,
        metavar="K",
        help="show the K most probable classes",
    )
    options.add_decision(parser)
    form = parser.add_mutually_exclusive_group()
    options.add_json(form)
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to this file instead of printing: .csv or .json; with --boxes, a file (or a "
        "folder) in their format, with the decisions in it",
    )
    parser.add_argument(
        "--excel",
        action="store_true",
        help="write CSV that Excel opens with the right characters (default on Windows, with -o)",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="write names to CSV unchanged; by default formulas and control characters in them are "
        "made harmless",
    )
    parser.add_argument(
        "--html",
        metavar="PAGE",
        help="write a page with all images, where the model looked, the closest shots, and a way "
        "to mark corrections for `miv add`",
    )
    parser.add_argument(
        "--sort-into",
        metavar="DIR",
        help="copy each image into the folder of its class in DIR, or into 'unsure' or 'none of "
        "these'; never overwrites a file",
    )
    group = options.add_table(parser)
    group.add_argument(
        "--write",
        metavar="COLUMN",
        help="write the most probable classes to this column of the table, the decisions (a class, "
        "'unsure' or 'none of these') to COLUMN_decision, and the probabilities to "
        "COLUMN_probability",
    )
    options.add_skip_bad(parser)
    options.add_boxes(parser)
    jobs.add_job(parser, "this .parquet, .csv or .jsonl file or folder")
    options.add_model_backbone(parser)
    options.add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv predict`."""
    if args.out:
        return jobs.run_predict(args)
    jobs.check_no_job(args)
    _check_form(args)
    model = load_any_model(args.model, args)
    if not args.boxes and len(args.images) == 1 and is_features(args.images[0]):
        if args.sort_into:
            raise InputError("--sort-into copies images, so it cannot be used with features.")
        if args.html:
            raise InputError("--html shows images, so it cannot be used with features.")
        predictions = _predict_features(model, args)
        if not args.write or args.form != "table" or args.output:
            _show(model, predictions, [], args)
        return 0
    if args.write or args.where:
        raise InputError("--write and --where are for database tables.")
    if args.sort_into:
        _check_sort_folder(Path(args.sort_into))
    model.check_takes(features=False)
    boxes, images = _open(args)
    if args.html:
        predictions = _predict_to_page(model, images, args)
    else:
        decision = options.decision(args, model)
        predictions = model.classify(images, skip_bad=args.skip_bad, **decision)
    report_skipped(model.skipped_)
    if boxes is not None and args.output and args.form == "boxes":
        found = {e.id: (str(e.decision), str(e.label), e.probability) for e in predictions}
        boxes.write(args.output, found)
        _tell(args, f"Wrote {plural(len(predictions), 'decision')} to {args.output}.")
    else:
        _show(model, predictions, model.skipped_, args)
    if args.sort_into:
        from mivhead.cli.sorting import sort_images
        from mivhead.model.decision import NONE, UNSURE

        names = [str(name) for name in model.classes_.tolist()]
        names += [name for name in (UNSURE, NONE) if name not in names]
        decisions = [str(each.decision) for each in predictions]
        kept = images.without(model.skipped_)
        copies = sort_images(kept, decisions, names, args.sort_into)
        there = len(kept) - len(copies)
        more = f"; not copied again: {there}" if there else ""
        _tell(args, f"Copied {plural(len(copies), 'image')} into {args.sort_into}{more}.")
    return 0


def _open(args: argparse.Namespace) -> tuple[BoxFile | None, ImageSet]:
    """Return the images, and the boxes that they are the crops of."""
    from mivhead.images.sources import open_unlabelled

    if not args.boxes:
        return None, open_unlabelled(args.images)
    if len(args.images) != 1:
        raise InputError("With --boxes, give one folder: the one that their paths are relative to.")
    found: tuple[BoxFile, ImageSet] = options.open_boxes(args, args.images[0])
    return found


def _predict_to_page(
    model: FewShotClassifier | ExportedClassifier, images: ImageSet, args: argparse.Namespace
) -> list[Prediction]:
    """Predict and explain in one pass, and write the page."""
    from mivhead.model.exported import ExportedClassifier

    if isinstance(model, ExportedClassifier):
        raise InputError("An exported model gives no reasons: --html needs a model of `miv fit`.")
    from mivhead.diagnostics.explanation import explain_images
    from mivhead.diagnostics.pages import write_results

    images = model.readable(images, skip_bad=args.skip_bad)
    found: dict[str, Prediction] = {}

    def explanations() -> Iterator[Explanation]:
        for each in explain_images(model, images, **options.decision(args, model)):
            found[each.prediction.id] = each.prediction
            yield each

    title = f"{Path(args.model).name}: {plural(len(images), 'image')}"
    write_results(explanations(), args.html, title=title, classes=model.classes_.tolist())
    size_of = size(Path(args.html).stat().st_size)
    _tell(args, f"Wrote the page {args.html} ({size_of}).")
    return [found[each] for each in images.ids]


def _check_form(args: argparse.Namespace) -> None:
    """Choose the form of the output; raise an error now if it cannot be written."""
    suffix = Path(args.output).suffix.lower() if args.output else ""
    args.form = "json" if args.json else "csv" if args.csv or args.excel else "table"
    if args.json and args.excel:
        raise InputError("--excel is for CSV: omit --json.")
    if args.html:
        if Path(args.html).suffix.lower() not in (".html", ".htm"):
            raise InputError(f"The page must be a .html file, got {args.html}.")
        check_output(args.html)
    if not args.output:
        return
    if args.boxes and args.form == "table":
        args.form = "boxes"  # the format of the boxes, which may be a folder of files
        if Path(args.output).suffix:
            check_output(args.output)
        return
    if args.form == "table":
        if suffix not in (".csv", ".json"):
            raise InputError(
                f"The output {args.output} must be a .csv or .json file; to use another name, "
                "choose the format with --csv or --json."
            )
        args.form = suffix[1:]
    check_output(args.output)


def _tell(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(text, file=sys.stderr)


def _predict_features(
    model: FewShotClassifier | ExportedClassifier, args: argparse.Namespace
) -> list[Prediction]:
    from mivhead import stores

    predictions: list[Prediction] = []
    decision = options.decision(args, model)
    with stores.open(args.images[0], where=args.where) as store:
        for batch in store.iter_batches():
            model.check_takes(features=True, backbone=batch.backbone)
            predictions += model.classify(batch, **decision)
        if args.write:
            decisions = [str(each.decision) for each in predictions]
            values: dict[str, Sequence[str | float]] = {
                args.write: [str(each.label) for each in predictions],
                f"{args.write}_decision": decisions,
                f"{args.write}_probability": [each.probability for each in predictions],
            }
            store.annotate([each.id for each in predictions], values)
            counts = Counter(decisions).most_common()
            rows = table(["decision", "rows"], counts[:MAX_CLASSES], right="rows")
            if len(counts) > MAX_CLASSES:
                rows += f"\n... and {len(counts) - MAX_CLASSES} more classes"
            written = f"Wrote {', '.join(values)} of {plural(len(predictions), 'row')}"
            _tell(args, f"{written} to {store.name}.\n{rows}")
    return predictions


def _check_sort_folder(folder: Path) -> None:
    """Raise an error if folders cannot be created there; called before any expensive work."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --sort-into needs a folder.")
    check_folder(folder if folder.exists() else folder.absolute().parent)


def _show(
    model: FewShotClassifier | ExportedClassifier,
    predictions: list[Prediction],
    skipped: Sequence[Skipped],
    args: argparse.Namespace,
) -> None:
    """Print the predictions, or write them to a file; then say how many images got a name."""
    from mivhead.model.prediction import DecisionCounts

    counts = DecisionCounts.count(predictions)
    others = other_max_errors(model, predictions, args.max_errors)
    errors = "backslashreplace"  # of JSON: makes a valid escape of what UTF-8 cannot encode
    if args.form == "json":
        document = {
            "model": args.model,
            "predictions": [each.as_json(args.top) for each in predictions],
            "decisions": {
                **{name: getattr(counts, name) for name in ("named", "unsure", "none")},
                "named_by_max_errors": others,
            },
            "skipped": [asdict(each) for each in skipped],
        }
        text = as_json(document, ascii_only=False if args.output else None) + "\n"
    elif args.form == "csv":
        excel = args.excel or (bool(args.output) and _on_windows())
        text = _as_csv(predictions, args.top, raw=args.raw, excel=excel)
        errors = "surrogateescape"  # raw names of files as the system has them
    else:
        text = _as_table(predictions, args.top) + "\n"
    if args.output:
        from mivhead._util.files import write_text

        write_text(args.output, text, errors)
        _tell(args, f"Wrote {plural(len(predictions), 'prediction')} to {args.output}.")
    else:
        if args.excel and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8", newline="")
        print(text, end="", flush=True)
    if model.no_decision is None and args.form != "json":
        _tell(args, _closing_line(counts, others))


def _closing_line(counts: DecisionCounts, others: Mapping[str, int]) -> str:
    """Describe how many images got a name, and which `--max-errors` would name how many.

    >>> from mivhead.model.prediction import DecisionCounts
    >>> print(_closing_line(DecisionCounts(12, 9, 2, 1), {"5%": 7, "20%": 11}))
    9 of 12 images were named, 2 are unsure, 1 is none of these.
    With --max-errors 5% it would be 7 names, with 20% 11.
    """
    text = f"{describe_decisions(counts)}."
    if others:
        first, *rest = others.items()
        text += f"\nWith --max-errors {first[0]} it would be {plural(first[1], 'name')}"
        text += "".join(f", with {share} {count:,}" for share, count in rest) + "."
    return text


def _on_windows() -> bool:
    return os.name == "nt"


def _as_csv(predictions: list[Prediction], top: int, *, raw: bool, excel: bool) -> str:
    from mivhead.spreadsheets import number, to_csv

    top = min(top, len(predictions[0].probabilities)) if predictions else top
    header = ["file", "label", "probability", "decision", "unknown"]
    sets = bool(predictions) and predictions[0].prediction_set is not None
    header += ["set"] * sets
    for place in range(2, top + 1):
        header += [f"label_{place}", f"probability_{place}"]
    rows = []
    for each in predictions:
        ranked = [value for name, p in each.top(top) for value in (name, number(p))]
        unknown = None if each.unknown is None else number(each.unknown)
        chosen = [";".join(map(str, each.prediction_set or ()))] * sets
        rows.append([each.id, *ranked[:2], each.decision, unknown, *chosen, *ranked[2:]])
    return to_csv(header, rows, raw=raw, excel=excel)


def _as_table(predictions: list[Prediction], top: int) -> str:
    sets = bool(predictions) and predictions[0].prediction_set is not None
    header = ["file", "class", "probability"] + ["set"] * sets + ["runners-up"] * (top > 1)
    rows = []
    for each in predictions:
        row = [shorten(each.id), _name(each), percent(each.probability)]
        if sets:
            names = [shorten(str(name), MAX_NAME) for name in each.prediction_set or ()]
            row.append(", ".join(names))
        if top > 1:
            others = each.top(top)[1:]
            row.append(", ".join(f"{shorten(str(n), MAX_NAME)} {percent(p)}" for n, p in others))
        rows.append(row)
    return table(header, rows, right="probability", limit=sys.maxsize)


def _name(prediction: Prediction) -> str:
    """Return the class; if the decision is another one, in brackets after it."""
    name = shorten(str(prediction.label))
    if prediction.decision == prediction.label:
        return name
    return f"{prediction.decision} ({shorten(str(prediction.label), MAX_NAME)}?)"
