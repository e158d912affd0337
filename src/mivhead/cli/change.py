"""`miv add`, `remove`, `rename` and `relabel`: change a model without the images it came from."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mivhead._util.text import near_name, one_line
from mivhead.cli import options
from mivhead.cli.output import Output, plural, seconds
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.fewshot import FewShotClassifier
    from mivhead.images.imageset import ImageSet
    from mivhead.model.shots import Change

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
"""

model_file = click.argument("model", metavar="MODEL", help="Model file.")
how_to_write = options.together(
    options.output(
        "Write the changed model here (default: replace MODEL, and keep it as MODEL.bak).",
        replaces="model",
    ),
    options.no_check,
)


@options.command(ADD_EXAMPLES)
@model_file
@click.argument("source", metavar="SHOTS", help=options.LABELLED)
@options.skip_bad
@options.label
@click.option("--new-class", is_flag=True, help="A new class may be called nearly like another.")
@how_to_write
@options.backbone
def add(
    out: Output,
    model: str,
    source: str,
    skip_bad: bool,
    label: str | None,
    new_class: bool,
    **how: Any,
) -> None:
    """Add shots of new classes, or more shots of known ones, to a model.

    The old images are not needed; only the new ones pass the backbone. The result is exactly the
    model that `miv fit` would make from all images together. Images that the model already has are
    left out, and so are the folders "unsure" and "none of these" of `miv predict --sort-into`.
    """
    has_features = options.is_features(source)
    shots: Any = (options.read_features if has_features else options.open_images)(source, label)

    def add_shots(loaded: FewShotClassifier) -> Change:
        named = shots if has_features else _in_classes(shots, source, loaded, new_class)
        return loaded.add(named, skip_bad=skip_bad)

    _change(out, model, add_shots, **how)


def _in_classes(
    images: ImageSet, source: str, model: FewShotClassifier, new_class: bool
) -> ImageSet:
    """Return images of the model's classes or of new ones; a name that looks mistyped is an error.

    In a table, "none of these" is an answer: the class that stands for everything else.
    """
    from mivhead.decision import NONE, UNSURE

    known, labels = list(map(str, model.classes_)), list(images.labels or ())
    if Path(source).suffix.lower() in (".csv", ".tsv"):
        labels = [str(model.other) if name.casefold() == NONE else name for name in labels]
    kept = [row for row, name in enumerate(labels) if name not in (NONE, UNSURE)]
    if not kept:
        raise InputError(f"{source} has no images with the name of a class.")
    if left_out := len(labels) - len(kept):
        what = f"{plural(left_out, 'image')} in {NONE!r} and {UNSURE!r}"
        print(f"Left out {what}: nobody named them.", file=sys.stderr)
    for name in sorted({*labels} - {*known, NONE, UNSURE}):
        if not new_class and (near := near_name(name, known)):
            raise InputError(
                f"The model has no class {name!r}: did you mean {near!r}? Correct the name, or "
                "make a new class with --new-class."
            )
    return replace(images, labels=tuple(labels)).take(kept)


@options.command(REMOVE_EXAMPLES)
@model_file
@click.argument(
    "names",
    nargs=-1,
    required=True,
    metavar="NAME...",
    help="Classes, or shots as `miv info --shots` names them; the end of the name is enough if "
    "only one shot has it.",
)
@how_to_write
def remove(out: Output, model: str, names: Sequence[str], **how: Any) -> None:
    """Remove classes or single shots from a model."""
    _change(out, model, lambda loaded: loaded.remove(*names), **how)


@options.command(RENAME_EXAMPLES)
@model_file
@click.argument("old", metavar="OLD", help="The class.")
@click.argument("new", metavar="NEW", help="Its new name, or the class to merge it into.")
@click.option("--merge", is_flag=True, help="Merge OLD into the class NEW.")
@how_to_write
def rename(out: Output, model: str, old: str, new: str, merge: bool, **how: Any) -> None:
    """Rename a class of a model, or merge it into another one."""
    _change(out, model, lambda loaded: loaded.rename(old, new, merge=merge), **how)


@options.command(RELABEL_EXAMPLES)
@model_file
@click.argument("shot", metavar="SHOT", help="The shot, as `miv info --shots` names it.")
@click.argument("label", metavar="CLASS", help="The class it belongs to.")
@click.option("--new", is_flag=True, help="CLASS may be a new class.")
@how_to_write
def relabel(out: Output, model: str, shot: str, label: str, new: bool, **how: Any) -> None:
    """Move a shot of a model, such as a mislabelled one, to another class."""
    _change(out, model, lambda loaded: loaded.relabel({shot: label}, new=new), **how)


def _change(
    out: Output,
    path: str,
    change: Callable[[FewShotClassifier], Change],
    *,
    output: str | None,
    check: bool,
    backbone: Mapping[str, Any] | None = None,
) -> None:
    """Load the model, change it, write it and report."""
    from mivhead.fewshot import changing

    started = time.perf_counter()
    with changing(path, output, **(backbone or {})) as model:
        model.verbose = out.verbose
        before = len(model.history_)
        done = change(model)
        changed = len(model.history_) > before
        if changed and check and model.estimate_ is None:
            model.check()
    spent = time.perf_counter() - started
    out.skipped(getattr(model, "skipped_", []))
    assert model.shots_ is not None, "a model without shots cannot be changed"
    counts, estimate = model.shots_.counts, model.estimate_
    for note in done.notes:
        print(f"Note: {one_line(note)}", file=sys.stderr)
    text = f"{one_line(done.text[:1].upper() + done.text[1:])}.\n"
    if not changed:
        text += f"{path} was not changed."
    else:
        if estimate is not None:
            text += f"{estimate}\n"
        text += f"The model has {plural(len(counts), 'class')} and "
        text += f"{plural(sum(counts.values()), 'shot')} now ({seconds(spent)}).\n"
        text += f"Saved {output}." if output else f"Saved {path}; the old model is {path}.bak."
    out.report(
        {
            "model": output or path,
            "changed": changed,
            **done.as_json(),
            "classes": {str(label): count for label, count in counts.items()},
            "estimate": None if estimate is None else asdict(estimate),
            "seconds": spent,
        },
        text,
    )
