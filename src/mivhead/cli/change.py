"""`miv add`, `remove`, `rename` and `relabel`: change a model without the images it came from."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import one_line
from mivhead.cli import options
from mivhead.cli.labels import check_class_names
from mivhead.cli.loading import is_features
from mivhead.cli.output import (
    check_output,
    expected_accuracy,
    plural,
    print_json,
    report_skipped,
    seconds,
)
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.shots import Change

COMMANDS = ("add", "remove", "rename", "relabel")
ADD_EXAMPLES = """
miv add birds.miv new/                 # new/robin/9.jpg, new/dunnock/1.jpg, ...
miv add birds.miv new/ -o more.miv     # birds.miv stays as it is
miv add birds.miv corrections.csv      # a path and a label per row
miv add birds.miv features.safetensors # from `miv extract`, with the model's backbone
"""
REMOVE_EXAMPLES = """
miv remove birds.miv robin             # a class
miv remove birds.miv robin/3.jpg wren  # a shot and a class
miv info birds.miv --shots             # lists the names
"""
RENAME_EXAMPLES = """
miv rename birds.miv robin "European robin"
miv rename birds.miv "Robin (juvenile)" robin --merge
"""
RELABEL_EXAMPLES = """
miv relabel birds.miv robin/3.jpg wren
miv relabel birds.miv corrections.csv  # a shot and a class per row, from `miv fit --html`
"""


def add_parser(subparsers: Any) -> None:
    """Add the commands."""
    add = _command(
        subparsers,
        "add",
        "add images to a model: new classes, or more shots",
        "Add shots of new classes, or more shots of known ones, to a model. The old images are not "
        "needed; only the new ones pass the backbone. The result is exactly the model that `miv "
        "fit` would make from all images together. Images that the model already has are left out.",
        ADD_EXAMPLES,
    )
    add.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder with one folder per class, a zip archive of one, a CSV file of paths and "
        "labels, a features file, or a database table",
    )
    add.add_argument("--label", metavar="COLUMN", help="column of the labels of a database table")
    add.add_argument("--where", metavar="FILTER", help="use only these rows of a database table")
    options.add_skip_bad(add)
    options.add_class_vectors(add)
    add.set_defaults(run=run_add)

    remove = _command(
        subparsers,
        "remove",
        "remove classes or single shots from a model",
        "Remove classes or single shots from a model.",
        REMOVE_EXAMPLES,
    )
    remove.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a class, or a shot as `miv info --shots` names it; the end of the name is enough if "
        "only one shot has it",
    )
    remove.set_defaults(run=run_remove)

    rename = _command(
        subparsers,
        "rename",
        "rename a class of a model, or merge two",
        "Rename a class of a model, or merge it into another one. A new name changes neither what "
        "the model learned nor its predictions, unless the model uses the names of its classes.",
        RENAME_EXAMPLES,
    )
    rename.add_argument("old", metavar="OLD", help="the class")
    rename.add_argument("new", metavar="NEW", help="its new name, or the class to merge it into")
    rename.add_argument("--merge", action="store_true", help="merge OLD into the class NEW")
    rename.set_defaults(run=run_rename)

    relabel = _command(
        subparsers,
        "relabel",
        "move a shot of a model to another class",
        "Move a shot of a model, such as a mislabelled one, to another class.",
        RELABEL_EXAMPLES,
    )
    relabel.add_argument(
        "shot", metavar="SHOT", help="name of the shot, or a CSV file of shots and classes"
    )
    relabel.add_argument("label", nargs="?", metavar="CLASS", help="the class it belongs to")
    relabel.add_argument("--new", action="store_true", help="CLASS may be a new class")
    relabel.set_defaults(run=run_relabel)


def _command(
    subparsers: Any, name: str, summary: str, description: str, examples: str
) -> options.Parser:
    parser = options.new_command(subparsers, name, summary, description, examples)
    parser.add_argument("model", metavar="MODEL", help="model file")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the changed model here (default: replace MODEL and keep the old one as "
        "MODEL.bak)",
    )
    parser.add_argument("--no-backup", action="store_true", help="do not keep the old model")
    parser.add_argument(
        "--no-check", action="store_true", help="do not estimate the accuracy of the changed model"
    )
    options.add_unlabelled(parser)
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)
    return parser


def run_add(args: argparse.Namespace) -> int:
    """Run `miv add`."""
    if (args.label or args.where) and not is_features(args.source):
        raise InputError("--label and --where are for database tables.")
    if Path(args.source).is_dir():
        check_class_names(each.name for each in Path(args.source).iterdir() if each.is_dir())

    def add(model: FewShotClassifier) -> Change:
        how: dict[str, Any] = {"class_vectors": options.read_class_vectors(args.class_vectors)}
        how |= _unlabelled(args)
        if not is_features(args.source):
            return model.add(args.source, skip_bad=args.skip_bad, **how)
        from mivhead import stores

        with stores.open(args.source, label=args.label, where=args.where) as store:
            return model.add(store.read(), **how)

    return _run(args, add)


def run_remove(args: argparse.Namespace) -> int:
    """Run `miv remove`."""
    return _run(args, lambda model: model.remove(*args.names, **_unlabelled(args)))


def run_rename(args: argparse.Namespace) -> int:
    """Run `miv rename`."""
    check_class_names([args.new])
    how = {"merge": args.merge}
    return _run(
        args,
        lambda model: model.rename(args.old, args.new, **how, **_unlabelled(args)),
        only_names=not args.merge,
    )


def run_relabel(args: argparse.Namespace) -> int:
    """Run `miv relabel`."""
    moves = _read_corrections(args.shot) if args.label is None else {args.shot: args.label}
    check_class_names(moves.values())
    return _run(args, lambda model: model.relabel(moves, new=args.new, **_unlabelled(args)))


def _unlabelled(args: argparse.Namespace) -> dict[str, Any]:
    return {"unlabelled": options.read_unlabelled(args.unlabelled)}


def _read_corrections(path: str) -> dict[str, str]:
    """Read a CSV file with a shot and a class per row, with or without a header."""
    if not path.lower().endswith(".csv"):
        raise InputError(f"Name the class that {path} belongs to, or a CSV file of corrections.")
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if any(row)]
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}.") from error
    if rows and [cell.strip().casefold() for cell in rows[0]][:2] in (
        ["shot", "class"],
        ["shot", "label"],
        ["path", "label"],
    ):
        rows = rows[1:]
    if not rows or any(len(row) < 2 or not row[0] or not row[1] for row in rows):
        raise InputError(f"{path} needs a shot and a class in every row.")
    return {row[0]: row[1].strip() for row in rows}


def _run(
    args: argparse.Namespace,
    change: Callable[[FewShotClassifier], Change],
    *,
    only_names: bool = False,
) -> int:
    """Load the model, change it, write it and report.

    A model without an estimate of its accuracy gets one, unless only names change.
    """
    output = args.output or args.model
    if args.output is not None:
        check_output(args.output, replaces="model")
    started = time.perf_counter()
    options.prepare(args)
    from mivhead.model.file import changing

    how = {"backbone": args.backbone, "weights": args.weights, "device": args.device}
    with changing(args.model, args.output, keep_old=not args.no_backup, **how) as model:
        model.verbose = not args.quiet
        before, wanted = len(model.history_), not args.no_check
        if only_names and model.estimate_ is None:
            wanted = False
        done = change(model)
        changed = len(model.history_) > before
        if changed and wanted and model.estimate_ is None:
            model.check()
    _report(args, model, done, output if changed else None, time.perf_counter() - started)
    return 0


def _report(
    args: argparse.Namespace,
    model: FewShotClassifier,
    change: Change,
    output: str | None,
    spent: float,
) -> None:
    skipped = getattr(model, "skipped_", [])
    report_skipped(skipped)
    assert model.shots_ is not None, "a model without shots cannot be changed"
    counts = model.shots_.counts
    if args.json:
        print_json(
            {
                "model": output or args.model,
                "changed": output is not None,
                **change.as_json(),
                "classes": {str(label): count for label, count in counts.items()},
                "estimate": None if model.estimate_ is None else asdict(model.estimate_),
                "seconds": spent,
            }
        )
        return
    for note in change.notes:
        print(f"Note: {one_line(note)}", file=sys.stderr)
    if args.quiet:
        return
    print(f"{one_line(change.text[:1].upper() + change.text[1:])}.")
    if output is None:
        print(f"{args.model} was not changed.")
        return
    kept = output == args.model and not args.no_backup
    if model.estimate_ is not None:
        expected = expected_accuracy(model.estimate_, counts.values())
        print(f"Expected accuracy on new images: {expected}.")
    print(
        f"The model has {plural(len(counts), 'class')} and {plural(sum(counts.values()), 'shot')} "
        f"now ({seconds(spent)}).\nSaved {output}"
        + (f"; the old model is {output}.bak." if kept else ".")
    )
