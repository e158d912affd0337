"""`miv fit`: from labelled images, or their features, to a model file."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import one_line, percent
from mivhead.cli import options
from mivhead.cli.labels import (
    check_class_names,
    notes_on_duplicates,
    notes_on_ignored,
    notes_on_names,
)
from mivhead.cli.loading import is_features
from mivhead.cli.output import (
    check_output,
    interval,
    plural,
    print_json,
    report_skipped,
    seconds,
    size,
    table,
)
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.cross_validation import CrossValidation
    from mivhead.ensemble.unlabelled import UnlabelledUse
    from mivhead.features import FeatureTable
    from mivhead.model.fewshot import FewShotClassifier

MAX_CLASSES = 30  # listed one by one
MAX_WRONG = 100  # wrong shots, listed one by one
UNEVEN = 3  # times as many shots in the largest class as in the smallest: worth a word
MAX_NEEDY = 5  # classes to add shots to

EXAMPLES = """
miv fit shots/ -o birds.miv              # shots/robin/1.jpg, shots/wren/1.jpg, ...
miv fit shots.zip -o birds.miv --skip-bad
miv fit labels.csv -o birds.miv          # a path and a label per row
miv fit labels.csv -o birds.miv --label species --encoding cp1252
miv fit shots/ -o birds.miv --unlabelled new/   # learns from photos without names as well
miv fit digits/ -o digits.miv --no-flip  # a mirrored digit is not the same digit
miv fit shots/ -o birds.miv --backbone efficientnet_lite0 --backbone efficientnet_lite2  # both
miv fit photos/ -o animals.miv --boxes annotations.json   # crops of the boxes, with their classes
miv fit shots/ -o birds.miv --backbone clip_vitb32 --template "a photo of a {}, a bird"
miv fit shots/ -o birds.miv --backbone bioclip2 --classes rare.txt   # names without photos, too
miv fit shots/ -o birds.miv --prior robin=10,wren=1   # ten times as many robins as wrens
miv fit features.safetensors -o birds.miv
miv fit lancedb://data/birds -o birds.miv --label species --where "split = 'train'"
miv fit shots/ -o plain.miv --method logistic --param use_views=true --param C=10
miv fit shots/ -o tuned.miv --method finetune   # tunes the backbone: takes minutes
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "fit",
        "train a classifier on a few images per class",
        "Learn classes from a few images each and write a model file. Cross-validation on these "
        "images (the shots) then estimates the accuracy on new images and finds shots that look "
        "mislabelled. The model file contains features and small pictures of the shots.",
        EXAMPLES,
    )
    parser.add_argument(
        "shots",
        metavar="SHOTS",
        nargs="?",
        help="a folder with one folder per class, a zip archive of one, a CSV file of paths and "
        "labels, a features file written by `miv extract`, or a database table "
        "(lancedb://FOLDER/TABLE, postgresql://HOST/DATABASE?table=NAME, "
        "qdrant://FOLDER/COLLECTION); may be left out if --classes or --class-vectors names all "
        "classes",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="MODEL", help="model file to write"
    )
    options.add_unlabelled(parser)
    options.add_names(parser)
    options.add_skip_bad(parser)
    options.add_csv(parser)
    options.add_boxes(parser)
    options.add_table(parser)
    options.add_extraction(parser)
    options.add_training(parser)
    options.add_prior(parser)
    options.add_device(parser)
    parser.add_argument(
        "--compact",
        action="store_true",
        help="write a smaller file, without pictures of the shots and features of their views; "
        "later changes (`miv add`, ...) and a later `check()` are then less exact",
    )
    parser.add_argument(
        "--html",
        metavar="PAGE",
        help="write a page of the shots that look mislabelled, next to shots of both classes",
    )
    parser.add_argument("--no-check", action="store_true", help="skip the cross-validation")
    parser.add_argument(
        "--folds", type=options.positive, default=5, metavar="K", help="folds of cross-validation"
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv fit`."""
    _check_arguments(args)
    model = options.classifier_from(args)
    notes = _check_classes(model, args)
    times = _fit(model, args)
    if model.shots_ is not None:
        notes += notes_on_duplicates(model.shots_, model.copies_)
    skipped = getattr(model, "skipped_", [])
    report_skipped(skipped)
    for note in notes:
        print(one_line(note), file=sys.stderr)
    for_people = not args.quiet and not args.json
    if for_people:
        print(_describe_model(model, times, args.output))
    estimate = None
    if not model.needs_images and not args.no_check:
        estimate = model.check(folds=args.folds)
        model.save(args.output, compact=args.compact)  # again, with the estimate
    if args.html and estimate is not None and model.shots_ is not None:
        from mivhead.diagnostics.pages import write_suspects

        name = f"{Path(args.output).name}: suspicious shots"
        write_suspects(estimate, model.shots_, args.html, title=name)
    if args.json:
        document = _as_json(model, times, estimate, args.output)
        left_out = [asdict(each) for each in skipped]
        print_json({**document, "skipped": left_out, "notes": notes})
    elif for_people and estimate is not None:
        print(_describe_estimate(estimate, model.shot_counts))
        if (use := _unlabelled_use(model)) is not None and use.used:
            print("\nThe estimate is that of a model without the unlabelled images.")
        if args.html:
            print(f"\nSaved {args.html}.")
    elif for_people and model.needs_images:
        print(
            f"\nNo cross-validation: {args.method} would have to be trained {args.folds} more "
            "times.\nMeasure the model on other images with `miv evaluate`."
        )
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work before any image is read."""
    check_output(args.output, replaces="model")
    if args.shots is None:
        if not args.classes and not args.class_vectors:
            raise InputError(
                "Name the shots, such as a folder with one folder per class, or use --classes and "
                "a text-and-image backbone to learn from names alone."
            )
        for name in ("boxes", "label", "encoding"):
            if getattr(args, name):
                raise InputError(f"--{name} is about the shots, which are missing: name them, too.")
    if args.html:
        if args.no_check:
            raise InputError("--html shows what cross-validation finds: omit --no-check.")
        if Path(args.html).suffix.lower() not in (".html", ".htm"):
            raise InputError(f"The page must be a .html file, got {args.html}.")
        check_output(args.html)
    if args.folds < 2:
        raise InputError(f"--folds must be at least 2, got {args.folds}.")
    if args.where and not _are_features(args):
        raise InputError("--where is for database tables.")
    if args.encoding and _are_features(args):
        raise InputError("--encoding is for CSV files.")
    options.prepare(args)


def _are_features(args: argparse.Namespace) -> bool:
    return args.shots is not None and is_features(args.shots)


def _check_classes(model: FewShotClassifier, args: argparse.Namespace) -> list[str]:
    """Refuse names that no class can have; return what the user should know about the others."""
    further, names = options.read_classes(args.classes), ()
    ignored: list[str] = []
    if args.shots is not None and not is_features(args.shots):
        from mivhead.images.sources import list_ignored, open_labelled

        fewest = _fewest_classes(args)
        if args.boxes:
            _, images = options.open_boxes(args, args.shots, labelled=True, min_classes=fewest)
        else:
            how = {"label": args.label, "encoding": args.encoding}
            images = open_labelled(args.shots, **how, min_classes=fewest)
            ignored = notes_on_ignored(list_ignored(args.shots))
        names = images.classes
        check_class_names(names)
    return notes_on_names({*names, *further}, model.other) + ignored


def _fewest_classes(args: argparse.Namespace) -> int:
    """Return how many classes need shots: one will do if others are known by their names."""
    return 1 if args.classes or args.class_vectors else 2


def _fit(model: FewShotClassifier, args: argparse.Namespace) -> dict[str, float]:
    """Fit to images or features, and write the model; return the seconds that the parts took."""
    how: dict[str, Any] = {
        "unlabelled": options.read_unlabelled(args.unlabelled),
        "classes": options.read_classes(args.classes),
        "class_vectors": options.read_class_vectors(args.class_vectors),
    }
    if args.shots is None:
        times = model.fit(**how).fit_seconds_
    elif args.boxes:
        _, images = options.open_boxes(
            args, args.shots, labelled=True, min_classes=_fewest_classes(args)
        )
        model.fit_folder(images, skip_bad=args.skip_bad, **how)
        times = model.fit_seconds_
    elif not is_features(args.shots):
        how |= {"label": args.label, "encoding": args.encoding}
        model.fit_folder(args.shots, skip_bad=args.skip_bad, **how)
        times = model.fit_seconds_
    else:
        started = time.perf_counter()
        shots = _read_features(args)
        times = {"features": time.perf_counter() - started}
        times |= model.fit_table(shots, **how).fit_seconds_
    model.save(args.output, compact=args.compact)
    return times


def _read_features(args: argparse.Namespace) -> FeatureTable:
    from mivhead import stores

    if args.threshold is not None:
        raise InputError("--threshold is for images; features already come with their views.")
    with stores.open(args.shots, label=args.label, where=args.where) as store:
        shots = store.read()
    if shots.labels is None:
        hint = (
            "name their column with --label, and exclude rows without a label with --where."
            if stores.is_store(args.shots)
            else "extract a folder with one folder per class."
        )
        raise InputError(f"{store.name} has no labels to learn from: {hint}")
    return replace(shots, views=None, view_of=None) if args.no_augmentation else shots


def _describe_model(model: FewShotClassifier, times: Mapping[str, float], output: str) -> str:
    shots = model.shot_counts or {}
    learned = sum(count > 0 for count in shots.values())
    spent = ", ".join(f"{what} {seconds(time)}" for what, time in times.items())
    with_views = f" and {plural(model.view_count, 'augmented view')}" if model.view_count else ""
    text = table(["class", "shots"], sorted(shots.items())[:MAX_CLASSES], right="shots")
    if len(shots) > MAX_CLASSES:
        text += f"\n... and {len(shots) - MAX_CLASSES} more (`miv info {output}` lists them)"
    what = (
        f"Learned {plural(learned, 'class')} from "
        f"{plural(sum(shots.values()), 'image')}{with_views}: {spent}.\n"
        f"{_describe_unlabelled(_unlabelled_use(model))}"
        f"{_describe_names(model.names_used, len(shots) - learned)}"
    )
    if learned < 2:
        what = (
            f"Names alone tell the {plural(len(shots), 'class')} apart: {spent}.\n"
            "Shots are used as soon as two classes have some (`miv add`).\n"
        )
    return f"{what}\n{text}\n\nSaved {output} ({size(Path(output).stat().st_size)})."


def _unlabelled_use(model: FewShotClassifier) -> UnlabelledUse | None:
    use: UnlabelledUse | None = model.classifier_.unlabelled_
    return use


def _describe_unlabelled(use: UnlabelledUse | None) -> str:
    if use is None:
        return ""
    images = plural(use.images, "unlabelled image")
    if use.used:
        return f"Learned from {images}, too.\n"
    return (
        f"Not used: {images}, because they made the predictions of shots that were left out "
        "worse.\n"
    )


def _describe_names(used: bool | None, without_shots: int) -> str:
    if used is None:
        return ""
    if not used:
        return "Not used: the names of the classes, because they did not help.\n"
    more = f"; {plural(without_shots, 'class')} known by name only" if without_shots else ""
    return f"The names of the classes are used, too{more}.\n"


def _describe_estimate(
    estimate: CrossValidation, every_class: Mapping[Any, int] | None = None
) -> str:
    """Describe an estimate; `every_class` has the shots of classes without any, too."""
    score = estimate.score
    if math.isnan(estimate.accuracy):
        return (
            "\nNo estimate of the accuracy: it needs two classes with at least 2 shots each, so "
            "that some can be\nleft out to test the model. Add a second image to each class, or "
            "measure the model with `miv evaluate`."
        )
    name = "leave-one-out" if estimate.leave_one_out else f"{estimate.folds}-fold"
    text = (
        f"\nExpected accuracy on new images: {percent(estimate.accuracy)} (95 % interval "
        f"{interval(estimate.interval)}),\nif every class is equally frequent and new images are "
        f"like the shots. From {name} cross-validation:\n{score.right} of {score.images} shots "
        "were predicted correctly by a model that had not seen them."
    )
    shots = Counter(estimate.labels)
    counts = every_class or shots
    if single := sum(count == 1 for count in shots.values()):
        text += (
            f"\n{plural(single, 'class')} with one shot could not be tested: the estimate assumes "
            "what is usual\nfor one shot in this task. A second shot makes it more certain."
        )
    if unseen := sum(not count for count in counts.values()):
        text += (
            f"\n{plural(unseen, 'class')} without shots could not be tested: the estimate covers "
            "only the others."
        )
    if min(shots.values()) < max(shots.values()) or len(shots) <= MAX_CLASSES:
        text += "\n\n" + _class_table(estimate, shots)
    fewest, most = min(counts.values()), max(counts.values())
    if most > UNEVEN * fewest:
        needy = [str(name) for name, count in counts.items() if count == fewest]
        text += (
            f"\n\nThe classes have {fewest} to {most} shots. It would help most to add shots of "
            f"{', '.join(needy[:MAX_NEEDY])}{' and others' if len(needy) > MAX_NEEDY else ''}."
        )
    return text + _describe_suspects(estimate)


def _describe_suspects(estimate: CrossValidation) -> str:
    """List the shots that were predicted as another class: mislabelled, or hard."""
    wrong = estimate.suspects
    if not wrong:
        return "\n\nNo shot looks mislabelled: all were predicted as their class."
    likely = sum(each.mislabelled for each in wrong)
    text = f"\n\n{_all_of(len(wrong))} predicted as another class. "
    if not likely:
        text += (
            "It does not look mislabelled, only hard.\n"
            if len(wrong) == 1
            else "None looks mislabelled; they are only hard.\n"
        )
    else:
        text += (
            f"{'It is' if len(wrong) == 1 else '1 is' if likely == 1 else f'{likely} are'} likely "
            f"to be mislabelled{'' if likely == len(wrong) else ', the others are hard'}:\n"
        )
    rows = [
        [w.id, w.label, w.predicted, percent(w.probability), "mislabelled?" * w.mislabelled]
        for w in wrong[:MAX_WRONG]
    ]
    text += table(["file", "label", "looks like", "probability", ""], rows, right="probability")
    if len(wrong) > MAX_WRONG:
        text += f"\n... and {len(wrong) - MAX_WRONG} more (--json lists all)"
    return text


def _class_table(estimate: CrossValidation, shots: Mapping[str, int]) -> str:
    """List the classes, those that are expected to do worst first."""
    expected = estimate.expected
    names = [str(name) for name in estimate.classes]
    order = sorted(range(len(names)), key=lambda i: expected.per_class[i])[:MAX_CLASSES]
    rows = [
        [
            names[i],
            shots[names[i]],
            f"{expected.right[i]} of {expected.tested[i]}" if expected.tested[i] else "not tested",
            percent(float(expected.per_class[i])) if expected.tested[i] else "unknown",
        ]
        for i in order
    ]
    text = table(["class", "shots", "right", "expected"], rows, right="shots expected")
    more = len(names) - len(order)
    return text + (f"\n... and {plural(more, 'class')} expected to do better" if more else "")


def _all_of(count: int) -> str:
    return "1 shot was" if count == 1 else f"{count} shots were"


def _as_json(
    model: FewShotClassifier,
    times: Mapping[str, float],
    estimate: CrossValidation | None,
    output: str,
) -> dict[str, Any]:
    shots = model.shot_counts or {}
    document: dict[str, Any] = {
        "model": output,
        "classes": {str(label): count for label, count in shots.items()},
        "images": sum(shots.values()),
        "views": model.view_count,
        "seconds": dict(times),
        "names": model.names_used,
        "unlabelled": None if (use := _unlabelled_use(model)) is None else asdict(use),
        "check": None,
    }
    if estimate is not None:
        score = estimate.score
        known = not math.isnan(estimate.accuracy)
        document["check"] = {
            "folds": estimate.folds,
            "tested": score.images,
            "right": score.right,
            "accuracy": estimate.accuracy if known else None,
            "interval": list(estimate.interval) if known else None,
            "per_class": {
                name: None if math.isnan(value) else value
                for name, value in estimate.per_class.items()
            },
            "suspects": [asdict(each) for each in estimate.suspects],
        }
    return document
