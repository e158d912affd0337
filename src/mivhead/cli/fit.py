"""`miv fit`: labelled images, or their features, to a model file."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.output import (
    check_output,
    interval,
    is_features,
    is_table,
    percent,
    plural,
    print_json,
    report_skipped,
    seconds,
    size,
    table,
)
from mivhead.errors import InputError
from mivhead.methods import get_method

if TYPE_CHECKING:
    from mivhead.classifier import FeatureClassifier
    from mivhead.diagnostics.estimate import HeldOut
    from mivhead.features import FeatureTable
    from mivhead.fewshot import FewShotClassifier

MAX_CLASSES = 30  # listed one by one
MAX_SUSPECTS = 10
SURE = 0.5  # a shot is suspect if another class has more than half of the probability

EXAMPLES = """
miv fit shots/ -o birds.miv              # shots/robin/1.jpg, shots/wren/1.jpg, ...
miv fit shots.zip -o birds.miv --skip-bad
miv fit labels.csv -o birds.miv          # a path and a label per row
miv fit digits/ -o digits.miv --no-flip  # a mirrored digit is another thing
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
        "learn classes from a few images each",
        "Learn classes from a few images each, and write a model file. Afterwards every shot is "
        "predicted by a head that has not seen it: an estimate of the accuracy to expect, and a "
        "list of shots that look mislabelled. The model file contains features of the images.",
        EXAMPLES,
    )
    parser.add_argument(
        "shots",
        metavar="SHOTS",
        help="a folder with one folder per class, a zip of one, a CSV of path and label, "
        "a features file of `miv extract`, or a table in a database (lancedb://FOLDER/TABLE, "
        "postgresql://HOST/DATABASE?table=NAME, qdrant://FOLDER/COLLECTION)",
    )
    parser.add_argument("-o", "--output", required=True, metavar="MODEL", help="file to write")
    options.add_skip_bad(parser)
    group = options.add_table(parser)
    group.add_argument("--label", metavar="COLUMN", help="column of the labels (default: label)")
    options.add_extraction(parser)
    options.add_training(parser)
    options.add_device(parser)
    parser.add_argument("--no-check", action="store_true", help="leave the check of the shots out")
    parser.add_argument(
        "--folds", type=options.positive, default=5, metavar="K", help="trainings for the check"
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    started = time.perf_counter()
    _check_arguments(args)
    options.prepare(args)
    from mivhead.model_file import save

    classifier = options.classifier_from(args)
    if classifier.needs_images:
        return _run_tuning(classifier, args, started)
    shots = _read_features(args) if is_features(args.shots) else _read_images(args, classifier)
    extracted = time.perf_counter()
    model, on_features = _train(classifier, shots, args)
    save(model, args.output)
    trained = time.perf_counter()
    skipped = getattr(classifier, "skipped_", [])
    report_skipped(skipped)
    views = 0 if shots.views is None else len(shots.views)
    counts = Counter(shots.labels or ())
    if not args.quiet and not args.json:
        times = {"features": extracted - started, "training": trained - extracted}
        print(_describe_model(counts, views, times, args.output))
    check = _check(on_features, shots, args)
    if args.json:
        document = _as_json(counts, views, check, args.output)
        document["seconds"] = {"features": extracted - started, "training": trained - extracted}
        document["skipped"] = [asdict(each) for each in skipped]
        print_json(document)
    elif check is not None and not args.quiet:
        print(_describe_check(check))
    return 0


def _run_tuning(classifier: FewShotClassifier, args: argparse.Namespace, started: float) -> int:
    """Run the command for a method that tunes the backbone: there are no features in between."""
    if is_features(args.shots):
        raise InputError(
            f"{args.method} tunes the backbone: it needs images, {args.shots} holds features of a "
            "frozen one."
        )
    classifier.fit_folder(args.shots, skip_bad=args.skip_bad)
    classifier.save(args.output)
    times = {"training": time.perf_counter() - started}
    report_skipped(classifier.skipped_)
    tuner = classifier.classifier_
    counts = dict(zip(tuner.classes_.tolist(), tuner.shots_, strict=True))
    if args.json:
        document = _as_json(counts, tuner.views_, None, args.output)
        document["seconds"] = times
        document["skipped"] = [asdict(each) for each in classifier.skipped_]
        print_json(document)
    elif not args.quiet:
        print(_describe_model(counts, tuner.views_, times, args.output))
        print(
            f"\nNo check of the shots: {args.method} would have to be trained {args.folds} times "
            "more.\nMeasure it on other images, with `miv evaluate`."
        )
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    check_output(args.output, replaces="model")
    if args.folds < 2:
        raise InputError(f"--folds must be at least 2, got {args.folds}.")
    if args.recipe and args.method and not get_method(args.method).has_recipe:
        raise InputError(f"--recipe is for the MIV-head and its ablations, not for {args.method}.")
    if (args.label or args.where) and not is_features(args.shots):
        raise InputError("--label and --where are for tables in databases.")


def _read_images(args: argparse.Namespace, classifier: FewShotClassifier) -> FeatureTable:
    from mivhead.images.sources import open_labelled

    return classifier.extract(open_labelled(args.shots), skip_bad=args.skip_bad)


def _read_features(args: argparse.Namespace) -> FeatureTable:
    from mivhead import stores

    if args.threshold is not None:
        raise InputError(
            "--threshold is for images; a features file or table has its views already."
        )
    with stores.open(args.shots, label=args.label, where=args.where) as store:
        shots = store.read()
    if shots.labels is None:
        raise InputError(
            f"{store.name} has no labels to learn from: "
            + (
                "name their column with --label, and leave out rows without one with --where."
                if is_table(args.shots)
                else "extract a folder of class folders."
            )
        )
    return replace(shots, views=None, view_of=None) if args.no_augmentation else shots


def _train(
    classifier: FewShotClassifier, shots: FeatureTable, args: argparse.Namespace
) -> tuple[FewShotClassifier | FeatureClassifier, FeatureClassifier]:
    """Train; return what is saved, and the part of it that works on features."""
    from mivhead.backbones.base import Identity, named_by_file

    if shots.backbone is not None:
        if args.backbone is None:
            identity = Identity.from_json(shots.backbone)
            classifier.set_params(backbone=named_by_file(identity))
        classifier.fit_table(shots)
        return classifier, classifier.classifier_
    from mivhead.methods import make_method

    # Without a backbone there is no preset: the settings follow from the shapes.
    model = make_method(
        classifier.method,
        recipe=args.recipe,
        random_state=args.seed,
        device=args.device,
        **dict(args.params),
    )
    model.fit(shots.features, shots.labels or (), views=shots.views, view_of=shots.view_of)
    return model, model


def _check(
    model: FeatureClassifier, shots: FeatureTable, args: argparse.Namespace
) -> HeldOut | None:
    from mivhead.diagnostics.estimate import held_out

    if args.no_check:
        return None
    return held_out(model, shots, folds=args.folds, verbose=not args.quiet)


def _describe_model(
    counts: Mapping[str, int], views: int, times: Mapping[str, float], output: str
) -> str:
    spent = ", ".join(f"{what} {seconds(time)}" for what, time in times.items())
    with_views = f" and {plural(views, 'augmented view')}" if views else ""
    listed = sorted(counts.items())[:MAX_CLASSES]
    text = table(["class", "shots"], listed, right="shots")
    if len(counts) > MAX_CLASSES:
        text += f"\n... and {len(counts) - MAX_CLASSES} more (`miv info {output}` lists them)"
    return (
        f"Learned {plural(len(counts), 'class')} from "
        f"{plural(sum(counts.values()), 'image')}{with_views}: {spent}.\n\n{text}\n\n"
        f"Saved {output} ({size(Path(output).stat().st_size)})."
    )


def _describe_check(check: HeldOut) -> str:
    tested = len(check.correct)
    if not tested:
        return (
            "\nNo estimate of the accuracy: a class needs 2 shots or more, so that one can be "
            "left out."
        )
    right = int(check.correct.sum())
    untested = len(check.labels) - tested
    text = (
        f"\nLeave-one-out estimate: {right} of {tested} shots right, {percent(check.accuracy)} "
        f"(95 % interval {interval(check.interval)}).\n"
        "Each shot was predicted by a head trained without it. The model itself has all shots, so "
        "new\nimages of the same kind tend to do better, much better if shots are very few."
    )
    if untested:
        text += f"\n{plural(untested, 'shot')} could not be tested, as the only one of its class."
    suspects = [each for each in check.suspects if each.probability > SURE]
    if not suspects:
        return text + "\n\nNo shot looks mislabelled."
    rows = [[s.id, s.label, s.predicted, percent(s.probability)] for s in suspects[:MAX_SUSPECTS]]
    text += "\n\nThese shots look mislabelled, or are hard; please look at them:\n"
    text += table(["file", "label", "looks like", "probability"], rows, right="probability")
    if len(suspects) > MAX_SUSPECTS:
        text += f"\n... and {len(suspects) - MAX_SUSPECTS} more (--json lists all)"
    return text


def _as_json(
    counts: Mapping[str, int], views: int, check: HeldOut | None, output: str
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": output,
        "classes": dict(sorted(counts.items())),
        "images": sum(counts.values()),
        "views": views,
        "check": None,
    }
    if check is not None:
        known = not math.isnan(check.accuracy)
        document["check"] = {
            "tested": len(check.correct),
            "right": int(check.correct.sum()),
            "accuracy": check.accuracy if known else None,
            "interval": list(check.interval) if known else None,
            "suspects": [asdict(each) for each in check.suspects],
        }
    return document
