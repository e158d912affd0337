"""`miv fit`: from labelled images, or their features, to a model file."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mivhead._util.text import one_line, percent
from mivhead.cli import options
from mivhead.cli.output import Output, plural, seconds, size, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.cross_validation import CrossValidation
    from mivhead.fewshot import FewShotClassifier

MAX_CLASSES = 30  # listed one by one
MAX_WRONG = 100  # wrong shots, listed one by one
MAX_NOTES = 5  # of a kind, about single images

EXAMPLES = """
miv fit birds/                           # birds/robin/1.jpg, birds/wren/1.jpg, ...: birds.miv
miv fit shots.zip -o birds.miv --skip-bad
miv fit labels.csv --label species       # a path and a label per row
miv fit birds/ --unlabelled new/         # learns from photos without names as well
miv fit digits/ --no-flip                # a mirrored digit is not the same digit
miv fit photos/ --boxes annotations.json # crops of the boxes, with their classes
miv fit features.safetensors -o birds.miv
"""


@options.command(EXAMPLES)
@click.argument("shots", metavar="SHOTS", help=options.LABELLED)
@options.output("Model file to write (default: SHOTS.miv, beside SHOTS).", replaces="model")
@options.unlabelled
@options.skip_bad
@options.label
@options.boxes
@options.classifier
@options.image_size
@options.no_flip
@options.in_group("classifier")(
    "--recipe",
    type=click.Choice(("mivhead", "experts", "paper")),
    default="mivhead",
    help="How to learn; experts does without the trained head, and is faster.",
)
@options.in_group("classifier")(
    "--seed", "random_state", type=options.NOT_NEGATIVE, default=0, metavar="N", help="Random seed."
)
@click.option(
    "--no-pictures", is_flag=True, help="Keep no small pictures of the shots in the model file."
)
@options.no_check
def fit(
    out: Output,
    shots: str,
    output: str | None,
    unlabelled: str | None,
    skip_bad: bool,
    label: str | None,
    boxes: str | None,
    classifier: dict[str, Any],
    no_pictures: bool,
    check: bool,
) -> None:
    """Learn classes from a few images each and write a model file.

    Cross-validation on these images (the shots) then says what to expect of new ones, and which
    shots to look at again. The model file contains features and small pictures of the shots.
    """
    output = output or _beside(shots)
    model = options.new_classifier(out, **classifier)
    support, notes = _open(shots, label, boxes)
    others: Any = unlabelled
    if unlabelled and options.is_features(unlabelled):
        others = options.read_features(unlabelled)
    model.fit(support, skip_bad=skip_bad, unlabelled=others)
    assert model.shots_ is not None, "it was fitted"
    model.save(output, pictures=not no_pictures)
    notes += _notes_on_shots(model)
    skipped = getattr(model, "skipped_", [])
    out.skipped(skipped)
    for note in notes:
        print(one_line(note), file=sys.stderr)
    out.say(_describe_model(model, output))
    suspects: Sequence[Any] = ()
    if check:
        result = model.check()
        suspects = result.suspects
        model.save(output, pictures=not no_pictures)  # again, with the estimate
        out.say(_describe_estimate(result))
    if out.json:
        use, counts = model.classifier_.unlabelled_, model.shot_counts
        document = {
            "model": output,
            "classes": {str(label): count for label, count in counts.items()},
            "images": sum(counts.values()),
            "views": model.kept_shots().view_count,
            "seconds": dict(model.fit_seconds_),
            "names": model.names_used,
            "unlabelled": None if use is None else asdict(use),
            "estimate": None if model.estimate_ is None else asdict(model.estimate_),
            "suspects": [asdict(shot) for shot in suspects],
            "skipped": [asdict(image) for image in skipped],
            "notes": notes,
        }
        out.result(document, "")


def _beside(shots: str) -> str:
    """Return the model file to write if none is named.

    >>> _beside("birds"), _beside("birds.zip")
    ('birds.miv', 'birds.miv')
    """
    path = Path(shots)
    if "://" in shots:
        raise InputError("Name the model file to write with -o.")
    path = path if path.name not in ("", "..") else path.resolve()
    name = path.name if path.is_dir() else path.stem
    path = path.with_name(f"{name}.miv")
    options.check_output(path, replaces="model")
    return str(path)


def _open(shots: str, label: str | None, boxes: str | None) -> tuple[Any, list[str]]:
    """Return the labelled images or features, and what the user should know about them."""
    if options.is_features(shots) and boxes is None:
        features = options.read_features(shots, label)
        if features.labels is None:
            raise InputError(f"{shots} has no labels to learn from: name their column (--label).")
        return features, []
    images = options.open_images(shots, label, boxes, min_classes=2)
    if not (names := images.ignored):
        return images, []
    others = f"{plural(len(names), 'file')} outside the class folders or not an image"
    return images, [f"Ignored {others}, such as {names[0]}."]


def _notes_on_shots(model: FewShotClassifier) -> list[str]:
    """Say which class stands for everything else, and which images are there twice."""
    from mivhead.decision import NONE

    notes, shots = [], model.shots_
    assert shots is not None, "it was fitted"
    if model.other in model.classes_:
        notes.append(f"The class {model.other!r} stands for everything else: it is named {NONE!r}.")
    shots_of = defaultdict(list)
    for name, content in zip(shots.names, shots.hashes, strict=True):
        shots_of[content].append(name)
    several = [" = ".join(same) for same in shots_of.values() if len(same) > 1]
    again = [f"{copy} = {shot}" for copy, shot in model.copies_.items()]
    notes += [f"One image has several labels, some wrong: {same}." for same in several[:MAX_NOTES]]
    notes += [f"One image is there twice, and counts once: {same}." for same in again[:MAX_NOTES]]
    return notes


def _describe_model(model: FewShotClassifier, output: str) -> str:
    """Say what was learned, from how many images, and where it is saved."""
    shots = model.shot_counts or {}
    spent = ", ".join(f"{what} {seconds(time)}" for what, time in model.fit_seconds_.items())
    views = model.kept_shots().view_count
    with_views = f" and {plural(views, 'augmented view')}" if views else ""
    photos = plural(sum(shots.values()), "photo")
    text = f"Learned {plural(len(shots), 'class')} from {photos}{with_views}: {spent}.\n"
    if (use := model.classifier_.unlabelled_) is not None:
        unlabelled = plural(use.images, "unlabelled image")
        text += (
            f"Learned from {unlabelled}, too; the estimate is without them.\n"
            if use.used
            else f"Did not use {unlabelled}: they made predictions of shots worse.\n"
        )
    if model.names_used is not None:
        used = "used, too" if model.names_used else "not used, because they did not help"
        text += f"The names of the classes are {used}.\n"
    return f"{text}\nSaved {output} ({size(Path(output).stat().st_size)})."


def _describe_estimate(result: CrossValidation) -> str:
    """Say what to expect of new photos, which classes are hard, and which shots look wrong."""
    if math.isnan(result.accuracy):
        return f"\n{result.estimate} Add photos, or measure the model with `miv evaluate`."
    score, shots = result.score, Counter(result.labels)
    text = (
        f"\n{result.estimate}\nFrom {result.folds}-fold cross-validation: {score.right} of "
        f"{score.images} shots were predicted right by a model that had not seen them.\n"
    )
    if single := sum(count == 1 for name, count in shots.items() if name != result.other):
        text += (
            f"{plural(single, 'class')} with one shot could not be tested: the estimate assumes "
            "what is usual\nfor one shot in this task. A second shot makes it more certain.\n"
        )
    tested = Counter(compress(result.labels, result.tested))
    wrong = Counter(mistake.label for mistake in result.suspects)
    rows = [
        (name, shots[name], f"{tested[name] - wrong[name]} of {tested[name]}")
        for name in sorted(shots, key=lambda name: (-wrong[name] / max(tested[name], 1), name))
        if name != result.other
    ]
    classes = table(["class", "shots", "right"], rows, right="shots", most=MAX_CLASSES)
    return f"{text}\n{classes}\n\n{_describe_suspects(result)}"


def _describe_suspects(estimate: CrossValidation) -> str:
    """List the shots that were predicted as another class."""
    wrong = estimate.suspects
    if not wrong:
        return "All shots were predicted as their class."
    again = [w.mislabelled for w in wrong]
    rows = [
        (w.id, w.label, w.predicted, percent(w.probability), "look at it again" * w.mislabelled)
        for w in wrong
    ]
    header = ["file", "label", "looks like", "probability", ""]
    text = f"{plural(len(wrong), 'shot')} predicted as another class"
    text += f"; look at {plural(sum(again), 'label')} again.\n" if any(again) else ".\n"
    return text + table(header, rows, right="probability", most=MAX_WRONG)
