"""`miv predict`: classes and probabilities of new images."""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from io import BytesIO
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.inputs import check_takes_features, check_takes_images, is_features, load_model
from mivhead.cli.output import (
    check_folder,
    percent,
    plural,
    print_json,
    report_skipped,
    shorten,
    table,
)
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from mivhead.fewshot import FewShotClassifier
    from mivhead.images.imageset import ImageSet, ImageSource, Skipped
    from mivhead.prediction import Prediction

MAX_NAME = 24  # characters of a runner-up's name
MAX_NAME_BYTES = 200  # file systems allow 255; this leaves room for suffix and number
MAX_SUFFIX = 10
_FORBIDDEN = '/\\:*?"<>|'
# Device names on Windows, in any folder and with any suffix.
_RESERVED = {"con", "prn", "aux", "nul"} | {f"{p}{n}" for p in ("com", "lpt") for n in range(1, 10)}

EXAMPLES = """
miv predict birds.miv new/*.jpg
miv predict birds.miv new/ --top 3
miv predict birds.miv new/ --max-errors 5%       # more "unsure", fewer wrong names
miv predict birds.miv new/ --reject 20%          # more "none of these"
miv predict birds.miv new/ --coverage 90%        # sets that hold the right class
miv predict birds.miv new.zip --csv > predictions.csv
miv predict birds.miv new/ --sort-into sorted/   # copies the images
miv predict birds.miv new.safetensors --json     # from `miv extract`
miv predict birds.miv lancedb://data/birds --where "split = 'new'" --write species
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "predict",
        "classify new images",
        "Classify new images with a model from `miv fit`, and print a table of files, classes and "
        "probabilities.",
        EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="model file")
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
        "--sort-into",
        metavar="DIR",
        help="copy each image into the folder of its class in DIR; never overwrites a file",
    )
    group = options.add_table(parser)
    group.add_argument(
        "--write",
        metavar="COLUMN",
        help="write the classes to this column of the table, and the probabilities to "
        "COLUMN_probability",
    )
    options.add_skip_bad(parser)
    options.add_model_backbone(parser)
    options.add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv predict`."""
    options.prepare(args)
    model = load_model(args.model, args)
    if len(args.images) == 1 and is_features(args.images[0]):
        if args.sort_into:
            raise InputError("--sort-into copies images, so it cannot be used with features.")
        _print(_predict_features(model, args), [], args)
        return 0
    if args.write or args.where:
        raise InputError("--write and --where are for database tables.")
    if args.sort_into:
        _check_sort_folder(Path(args.sort_into))
    check_takes_images(model, args.model)
    from mivhead.images.sources import open_unlabelled

    images = open_unlabelled(args.images)
    predictions = model.classify(images, skip_bad=args.skip_bad, **options.decision(args, model))
    report_skipped(model.skipped_)
    _print(predictions, model.skipped_, args)
    if args.sort_into:
        labels = [str(each.label) for each in predictions]
        names = [str(name) for name in model.classes_.tolist()]
        copies = sort_images(images.without(model.skipped_), labels, names, args.sort_into)
        if not args.quiet:
            print(f"Copied {plural(len(copies), 'image')} into {args.sort_into}.", file=sys.stderr)
    return 0


def _predict_features(model: FewShotClassifier, args: argparse.Namespace) -> list[Prediction]:
    from mivhead import stores

    predictions: list[Prediction] = []
    decision = options.decision(args, model)
    with stores.open(args.images[0], where=args.where) as store:
        for batch in store.iter_batches():
            check_takes_features(model, args.model, batch)
            predictions += model.classify(batch, **decision)
        if args.write:
            values: dict[str, Sequence[str | float]] = {
                args.write: [str(each.label) for each in predictions],
                f"{args.write}_probability": [each.probability for each in predictions],
            }
            store.annotate([each.id for each in predictions], values)
    return predictions


def _check_sort_folder(folder: Path) -> None:
    """Raise an error if folders cannot be created there; called before any expensive work."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --sort-into needs a folder.")
    check_folder(folder if folder.exists() else folder.absolute().parent)


def _print(
    predictions: list[Prediction], skipped: Sequence[Skipped], args: argparse.Namespace
) -> None:
    if args.json:
        print_json(
            {
                "model": args.model,
                "predictions": [_as_json(each, args.top) for each in predictions],
                "skipped": [asdict(each) for each in skipped],
            }
        )
    elif args.csv:
        _print_csv(predictions, args.top)
    else:
        print(_as_table(predictions, args.top))


def _top(prediction: Prediction, count: int) -> list[tuple[Any, float]]:
    return list(islice(prediction.probabilities.items(), count))


def _as_json(prediction: Prediction, top: int) -> dict[str, Any]:
    return {
        "file": prediction.id,
        "label": prediction.label,
        "probability": prediction.probability,
        "decision": prediction.decision,
        "unknown": prediction.unknown,
        **({} if prediction.prediction_set is None else {"set": list(prediction.prediction_set)}),
        "top": [{"label": name, "probability": p} for name, p in _top(prediction, top)],
    }


def _print_csv(predictions: list[Prediction], top: int) -> None:
    top = min(top, len(predictions[0].probabilities)) if predictions else top
    header = ["file", "label", "probability", "decision", "unknown"]
    sets = bool(predictions) and predictions[0].prediction_set is not None
    header += ["set"] * sets
    for place in range(2, top + 1):
        header += [f"label_{place}", f"probability_{place}"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(header)
    for each in predictions:
        ranked = [value for name, p in _top(each, top) for value in (name, f"{p:.6f}")]
        unknown = "" if each.unknown is None else f"{each.unknown:.6f}"
        chosen = [";".join(map(str, each.prediction_set or ()))] * sets
        writer.writerow([each.id, *ranked[:2], each.decision, unknown, *chosen, *ranked[2:]])


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
            others = _top(each, top)[1:]
            row.append(", ".join(f"{shorten(str(n), MAX_NAME)} {percent(p)}" for n, p in others))
        rows.append(row)
    return table(header, rows, right="probability", limit=sys.maxsize)


def _name(prediction: Prediction) -> str:
    """Return the class; if the decision is another one, in brackets after it."""
    name = shorten(str(prediction.label))
    if prediction.decision == prediction.label:
        return name
    return f"{prediction.decision} ({shorten(str(prediction.label), MAX_NAME)}?)"


def sort_images(
    images: ImageSet, labels: Sequence[str], names: Sequence[str], folder: str | Path
) -> list[Path]:
    """Copy every image into a folder named after its label; nothing is overwritten or moved.

    Parameters
    ----------
    images : ImageSet
        Image files or members of a zip archive.
    labels : sequence of str
        One per image.
    names : sequence of str
        All labels that may occur; each gets its own folder, whatever characters it contains.
    folder : str or Path
        Where the folders are created, if they are needed.

    Returns
    -------
    list of Path
        The copies.
    """
    folder_of = _folders(names)
    copies = []
    for source, label in zip(images.sources, labels, strict=True):
        target = Path(folder) / folder_of[label]
        try:
            target.mkdir(parents=True, exist_ok=True)
            copies.append(_copy(source, target))
        except OSError as error:
            raise NotAvailableError(
                f"Cannot copy {source.name} into {target}: {error.strerror or error}."
            ) from error
    return copies


def safe_name(name: str) -> str:
    """Make a file name that every file system accepts and that stays inside its folder.

    >>> safe_name("cat.jpg"), safe_name("../etc"), safe_name("a/b: c?"), safe_name("NUL")
    ('cat.jpg', '_._etc', 'a_b_ c_', 'NUL_')
    """
    text = "".join("_" if c in _FORBIDDEN or not c.isprintable() else c for c in name)
    stem, suffix = os.path.splitext(text)  # noqa: PTH122  # a name, not a path
    if len(suffix) > MAX_SUFFIX:
        stem, suffix = text, ""
    while len(stem.encode()) > MAX_NAME_BYTES:
        stem = stem[:-1]
    text = (stem + suffix).rstrip(". ")
    if text.startswith("."):
        text = "_" + text[1:]
    if not text or text.partition(".")[0].casefold() in _RESERVED:
        text += "_"
    return text


def _folders(names: Sequence[str]) -> dict[str, str]:
    """Choose a distinct folder name for every class, regardless of upper and lower case."""
    taken: set[str] = set()
    folders = {}
    for name in names:
        folders[name] = next(c for c in _numbered(safe_name(name)) if c.casefold() not in taken)
        taken.add(folders[name].casefold())
    return folders


def _numbered(name: str) -> Iterator[str]:
    """Yield a name, then the name with numbers before its suffix: a.jpg, a (2).jpg, ..."""
    yield name
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  # a name, not a path
    number = 2
    while True:
        yield f"{stem} ({number}){suffix}"
        number += 1


def _copy(source: ImageSource, folder: Path) -> Path:
    original = source.get()
    for name in _numbered(safe_name(PurePosixPath(source.id).name)):
        copy = folder / name
        try:
            file = copy.open("xb")  # fails if the file exists
        except FileExistsError:
            continue
        try:
            with file:
                _write(original, file)
            if isinstance(original, str | os.PathLike):
                shutil.copystat(original, copy)
        except BaseException:  # Ctrl-C too: leave no partial copies
            copy.unlink(missing_ok=True)
            raise
        return copy
    raise AssertionError("unreachable: numbers do not end")


def _write(original: object, file: IO[bytes]) -> None:
    if isinstance(original, str | os.PathLike):
        with Path(original).open("rb") as opened:
            shutil.copyfileobj(opened, file)
    elif isinstance(original, bytes):
        shutil.copyfileobj(BytesIO(original), file)
    else:
        raise TypeError(f"expected an image from a file or a zip archive, got {type(original)}")
