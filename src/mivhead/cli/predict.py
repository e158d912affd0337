"""`miv predict`: names and probabilities of images."""

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
from mivhead.cli.inputs import Model, classify_images, classify_table, drop_bad, load_model
from mivhead.cli.output import (
    check_folder,
    is_features,
    percent,
    plural,
    print_json,
    report_skipped,
    shorten,
    table,
)
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from mivhead.fewshot import Prediction
    from mivhead.images.imageset import ImageSet, ImageSource, Skipped


MAX_NAME = 24  # characters of a runner-up's name

EXAMPLES = """
miv predict birds.miv new/*.jpg
miv predict birds.miv new/ --top 3
miv predict birds.miv new.zip --csv > names.csv
miv predict birds.miv new/ --sort-into sorted/   # copies; the originals stay
miv predict birds.miv new.safetensors --json     # features of `miv extract`
miv predict birds.miv lancedb://data/birds --where "split = 'new'" --write species
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "predict",
        "name new images",
        "Name new images with a model of `miv fit`: a table of file, class and probability.",
        EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="model file")
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="images, folders, zips or patterns; or one features file, or table in a database",
    )
    parser.add_argument(
        "--top", type=options.positive, default=1, metavar="K", help="show the K likeliest classes"
    )
    form = parser.add_mutually_exclusive_group()
    options.add_json(form)
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    parser.add_argument(
        "--sort-into",
        metavar="DIR",
        help="copy the images into folders of DIR named after their classes; "
        "nothing is overwritten or moved",
    )
    group = options.add_table(parser)
    group.add_argument(
        "--write",
        metavar="COLUMN",
        help="write the classes into this column of the table, and their probabilities into "
        "COLUMN_probability",
    )
    options.add_skip_bad(parser)
    options.add_model_backbone(parser)
    options.add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    options.prepare(args)
    model = load_model(args.model, device=args.device, backbone=args.backbone, weights=args.weights)
    skipped: list[Skipped] = []
    if len(args.images) == 1 and is_features(args.images[0]):
        if args.sort_into:
            raise InputError("--sort-into needs images; features are none to copy.")
        predictions = _predict_features(model, args)
    else:
        from mivhead.images.sources import open_unlabelled

        if args.write or args.where:
            raise InputError("--write and --where are for tables in databases.")
        if args.sort_into:
            _check_sort_folder(Path(args.sort_into))
        images, skipped = drop_bad(open_unlabelled(args.images), args.skip_bad)
        predictions = classify_images(model, images, verbose=not args.quiet)
    report_skipped(skipped)
    _print(predictions, skipped, args)
    if args.sort_into:
        _sort(images, predictions, model.names, args)
    return 0


def _predict_features(model: Model, args: argparse.Namespace) -> list[Prediction]:
    from mivhead import stores

    predictions: list[Prediction] = []
    with stores.open(args.images[0], where=args.where) as store:
        for batch in store.iter_batches():
            predictions += classify_table(model, batch)
        if args.write:
            values: dict[str, Sequence[str | float]] = {
                args.write: [str(each.label) for each in predictions],
                f"{args.write}_probability": [each.probability for each in predictions],
            }
            store.annotate([each.id for each in predictions], values)
    return predictions


def _check_sort_folder(folder: Path) -> None:
    """Find out before the work whether folders can be made there."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --sort-into needs a folder.")
    check_folder(folder if folder.exists() else folder.absolute().parent)


def _print(predictions: list[Prediction], skipped: list[Skipped], args: argparse.Namespace) -> None:
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
        "top": [{"label": name, "probability": p} for name, p in _top(prediction, top)],
    }


def _print_csv(predictions: list[Prediction], top: int) -> None:
    top = min(top, len(predictions[0].probabilities)) if predictions else top
    header = ["file", "label", "probability"]
    for place in range(2, top + 1):
        header += [f"label_{place}", f"probability_{place}"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(header)
    for each in predictions:
        ranked = [value for name, p in _top(each, top) for value in (name, f"{p:.6f}")]
        writer.writerow([each.id, *ranked])


def _as_table(predictions: list[Prediction], top: int) -> str:
    header = ["file", "class", "probability"] + ["runners-up"] * (top > 1)
    rows = []
    for each in predictions:
        row = [shorten(each.id), shorten(str(each.label)), percent(each.probability)]
        if top > 1:
            others = _top(each, top)[1:]
            row.append(", ".join(f"{shorten(str(n), MAX_NAME)} {percent(p)}" for n, p in others))
        rows.append(row)
    return table(header, rows, right="probability", limit=sys.maxsize)


def _sort(
    images: ImageSet, predictions: list[Prediction], names: list[str], args: argparse.Namespace
) -> None:

    copies = sort_images(images, [str(each.label) for each in predictions], names, args.sort_into)
    if not args.quiet:
        print(f"Copied {plural(len(copies), 'image')} into {args.sort_into}.", file=sys.stderr)


# Copy images into one folder per predicted class; nothing is ever overwritten or moved.


MAX_NAME_BYTES = 200  # file systems allow 255; some room for suffix and number
MAX_SUFFIX = 10
_FORBIDDEN = '/\\:*?"<>|'
# Devices on Windows, in any folder and with any suffix.
_RESERVED = {"con", "prn", "aux", "nul"} | {f"{p}{n}" for p in ("com", "lpt") for n in range(1, 10)}


def sort_images(
    images: ImageSet, labels: Sequence[str], names: Sequence[str], folder: str | Path
) -> list[Path]:
    """Copy every image into the folder of its label and return the copies.

    Parameters
    ----------
    images
        Files, or members of a zip.
    labels
        One per image.
    names
        All labels that may occur; each gets a folder of its own, whatever characters it holds.
    folder
        Where the folders of the classes are made, if they are needed.
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
    """Make a name that every file system takes, and that stays inside its folder.

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
    """Give every class a folder name; two names must not meet, not even in small letters."""
    taken: set[str] = set()
    folders = {}
    for name in names:
        folders[name] = next(c for c in _numbered(safe_name(name)) if c.casefold() not in taken)
        taken.add(folders[name].casefold())
    return folders


def _numbered(name: str) -> Iterator[str]:
    """Yield a name, then with numbers before its suffix: a.jpg, a (2).jpg, a (3).jpg."""
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
            file = copy.open("xb")  # fails if there is such a file
        except FileExistsError:
            continue
        try:
            with file:
                _write(original, file)
            if isinstance(original, str | os.PathLike):
                shutil.copystat(original, copy)
        except BaseException:  # Ctrl-C too: no half copies
            copy.unlink(missing_ok=True)
            raise
        return copy
    raise AssertionError("numbers do not end")


def _write(original: object, file: IO[bytes]) -> None:
    if isinstance(original, str | os.PathLike):
        with Path(original).open("rb") as opened:
            shutil.copyfileobj(opened, file)
    elif isinstance(original, bytes):
        shutil.copyfileobj(BytesIO(original), file)
    else:
        raise TypeError(f"an image from a file or a zip was expected, got {type(original)}")
