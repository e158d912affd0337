"""`miv predict`: classes and probabilities of new images."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mivhead._util.text import percent, shorten
from mivhead.cli import options
from mivhead.cli.output import Output, as_json, describe_decisions, plural, seconds, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.explanation import Explanation
    from mivhead.fewshot import FewShotClassifier
    from mivhead.images.imageset import ImageSet
    from mivhead.model.exported import ExportedClassifier
    from mivhead.prediction import Prediction

    AnyModel = FewShotClassifier | ExportedClassifier

MAX_NAME = 24  # characters of a runner-up's name

EXAMPLES = """
miv predict birds.miv new/*.jpg
miv predict birds.miv new/ --top 3
miv predict birds.miv new/ --max-errors 5%       # more "unsure", fewer wrong names
miv predict birds.miv new.zip -o names.csv       # or names.json
miv predict birds.miv new/ --html results.html   # a page with reasons and corrections
miv predict birds.miv new/ --sort-into sorted/   # copies the images
miv predict birds.miv new.safetensors --json     # from `miv extract`
miv predict birds.miv archive/ --job predictions.parquet   # any number of images
"""

_job = options.in_group("job")
job_options = options.together(
    _job(
        "--job",
        "out",
        metavar="PATH",
        help="Write rows to this .parquet file or folder, in parts. Sources may then also be tars "
        "(WebDataset), lists of paths (CSV, Parquet) and URLs such as s3://bucket/photos.",
    ),
    _job("--resume", is_flag=True, default=None, help="Complete a job that was interrupted."),
    _job("--overwrite", is_flag=True, default=None, help="Replace an earlier output of a job."),
    _job(
        "--workers",
        type=options.POSITIVE,
        metavar="N",
        help="Compute a job in N processes of one thread (default: in this one).",
    ),
    _job(
        "--ray",
        is_flag=False,
        flag_value="",
        metavar="[ADDRESS]",
        help="Compute a job on a Ray cluster (HOST:PORT, ray://HOST:PORT or auto; by default on "
        "one that is started here). Name the sources before this option.",
    ),
    _job(
        "--column",
        metavar="NAME",
        help="Column of the paths in a job's list (default: found by its name).",
    ),
    _job(
        "--allow-remote",
        is_flag=True,
        default=None,
        help="Let a job open URLs that a list of paths names, too.",
    ),
)


@options.command(EXAMPLES)
@click.argument("model", metavar="MODEL", help="Model file of `miv fit` or `miv export`.")
@click.argument(
    "images",
    nargs=-1,
    required=True,
    metavar="IMAGES...",
    help=f"{options.UNLABELLED} Or one features file or database table.",
)
@click.option(
    "--top", type=options.POSITIVE, default=1, metavar="K", help="Show the K most probable classes."
)
@options.decision
@options.output(
    "Write to this .csv or .json file instead of printing; with --boxes, in their format.",
    *(".csv", ".json"),
)
@click.option("--excel", is_flag=True, help="Write CSV that Excel opens with the right characters.")
@options.html("Write a page of all images, with reasons and a way to mark corrections.")
@click.option(
    "--sort-into",
    type=options.NEW_FOLDER,
    help="Copy each image into the folder of its name in DIR; never overwrites a file.",
)
@options.skip_bad
@options.boxes
@options.backbone
@job_options
def predict(
    out: Output,
    model: str,
    images: Sequence[str],
    top: int,
    decision: dict[str, Any],
    output: str | None,
    excel: bool,
    html: str | None,
    sort_into: str | None,
    skip_bad: bool,
    boxes: str | None,
    backbone: dict[str, Any],
    job: dict[str, Any],
) -> None:
    """Classify new images with a model from `miv fit`.

    Prints a table of files, classes and probabilities, and how many images got a name; with --html
    or --sort-into, how many got each name.
    """
    from mivhead._util.files import write_text
    from mivhead.prediction import DecisionCounts

    if "out" in job:
        for_few: dict[str, object] = {"-o": output, "--html": html, "--sort-into": sort_into}
        for_few |= {"--boxes": boxes, "--top": top > 1, "--excel": excel, "--skip-bad": skip_bad}
        for name, value in for_few.items():
            if value:
                raise InputError(f"{name} cannot be used together with --job.")
        _run_job(out, model, images, {**job, **backbone, **decision})
        return
    if job:
        option = next(iter(job)).replace("_", "-")
        raise InputError(f"--{option} is for large jobs: name their output with --job.")
    loaded = options.load_any_model(model, out, **backbone)
    loaded.thresholds(**decision)  # an error now, not after the images have been read
    skipped: Sequence[Any] = ()
    box_file = None
    if not boxes and len(images) == 1 and options.is_features(images[0]):
        if html or sort_into:
            raise InputError("--html and --sort-into need images, and not features.")
        predictions = _classify_features(loaded, images[0], decision)
    else:
        loaded.check_takes(features=False)
        if boxes is None:
            from mivhead.images.sources import open_unlabelled

            image_set = open_unlabelled(images)
        else:
            from mivhead.images.boxes import open_boxes

            if len(images) != 1:
                raise InputError("With --boxes, give the one folder that paths are relative to.")
            box_file = open_boxes(boxes, images[0])
            image_set = box_file.images(images[0])
        if html:
            title = f"{Path(model).stem}: {plural(len(image_set), 'photo')}"
            predictions = _write_page(loaded, model, image_set, html, title, skip_bad, decision)
            out.note(f"Wrote the page {html}.")
        else:
            predictions = loaded.classify(image_set, skip_bad=skip_bad, **decision)
        skipped = loaded.skipped_
        out.skipped(skipped)
        if sort_into is not None:
            from mivhead.decision import NONE, UNSURE
            from mivhead.images.imageset import sort_images

            names = [*map(str, loaded.classes_.tolist()), UNSURE, NONE]
            decisions = [str(prediction.decision) for prediction in predictions]
            copies = sort_images(image_set.without(skipped), decisions, names, sort_into)
            before = len(predictions) - len(copies)
            more = f"; not copied again: {before}" if before else ""
            out.note(f"Copied {plural(len(copies), 'photo')} into {sort_into}{more}.")
    counts = DecisionCounts.count(predictions)
    document = {
        "model": model,
        "predictions": [prediction.as_json(top) for prediction in predictions],
        "decisions": asdict(counts),
        "skipped": [asdict(image) for image in skipped],
    }
    if output is None:
        is_elsewhere = html or sort_into
        text = _as_counts(predictions) if is_elsewhere else _as_table(predictions, top)
        out.result(document, text)
    else:
        if box_file is not None:
            named = {p.id: (str(p.decision), str(p.label), p.probability) for p in predictions}
            box_file.write(output, named)
        elif output.lower().endswith(".json"):
            # What UTF-8 cannot encode becomes a valid escape of JSON.
            write_text(output, as_json(document, ascii_only=False) + "\n", "backslashreplace")
        else:
            write_text(output, _as_csv(predictions, top, excel=excel), "surrogateescape")
        out.note(f"Wrote {plural(len(predictions), 'prediction')} to {output}.")
    if not out.json:
        out.note(describe_decisions(counts))


def _run_job(out: Output, model: str, images: Sequence[str], settings: dict[str, Any]) -> None:
    """Predict any number of images, and print what was done."""
    from mivhead import jobs

    if "ray" in settings:
        settings["ray"] = settings["ray"] or True
    result = jobs.predict(model, images, settings.pop("out"), verbose=out.verbose, **settings)
    if out.json:
        out.result(asdict(result), "")
    elif result.resumed == result.rows:
        out.note(f"{result.out} is complete: there was nothing left to do.")
    else:
        earlier = f", {result.resumed:,} of them earlier" if result.resumed else ""
        written = f"Wrote {plural(result.rows, 'prediction')} to {result.out}{earlier}"
        out.note(f"{written}, in {seconds(result.seconds)}.")
        if result.errors:
            out.note(f"{plural(result.errors, 'image')} could not be read: see the column error.")
        if result.skipped:
            out.note(f"Skipped files that are not images: {result.skipped:,}.")


def _classify_features(model: AnyModel, path: str, decision: Mapping[str, Any]) -> list[Prediction]:
    from mivhead import stores

    predictions: list[Prediction] = []
    for batch in stores.open(path).iter_batches():
        model.check_takes(features=True, backbone=batch.backbone)
        predictions += model.classify(batch, **decision)
    return predictions


def _write_page(
    model: AnyModel,
    path: str,
    images: ImageSet,
    page: str,
    title: str,
    skip_bad: bool,
    decision: Mapping[str, Any],
) -> list[Prediction]:
    """Predict and explain in one pass, and write the page."""
    from mivhead.diagnostics.explanation import explain_images
    from mivhead.diagnostics.pages import write_results
    from mivhead.fewshot import FewShotClassifier

    if not isinstance(model, FewShotClassifier):
        raise InputError("An exported model gives no reasons: --html needs a model of `miv fit`.")
    images = model.readable(images, skip_bad=skip_bad)
    predictions: dict[str, Prediction] = {}

    def explanations() -> Iterator[Explanation]:
        for reasons in explain_images(model, images, **decision):
            predictions[reasons.prediction.id] = reasons.prediction
            yield reasons

    classes = [name for name in model.classes_.tolist() if name != model.other]
    write_results(explanations(), page, title=title, classes=classes, model=path)
    return [predictions[image] for image in images.ids]


def _as_csv(predictions: Sequence[Prediction], top: int, *, excel: bool) -> str:
    """Return a row per image; the most probable classes are columns."""
    from mivhead._util.tables import number, to_csv

    top = min(top, len(predictions[0].probabilities)) if predictions else top
    header = ["file", "decision", "closest", "probability", "unknown"]
    for place in range(2, top + 1):
        header += [f"class_{place}", f"probability_{place}"]
    rows = []
    for p in predictions:
        others = [(name, number(q)) for name, q in p.top(top) if name != p.label][: top - 1]
        unknown = None if p.unknown is None else number(p.unknown)
        rows.append([p.id, p.decision, p.label, number(p.probability), unknown, *chain(*others)])
    return to_csv(header, rows, excel=excel)


def _as_counts(predictions: Sequence[Prediction]) -> str:
    """Return how many images got each name."""
    counts = Counter(str(prediction.decision) for prediction in predictions)
    return table(["decision", "photos"], counts.most_common(), right="photos")


def _as_table(predictions: Sequence[Prediction], top: int) -> str:
    """Return a row per image: the decision, and what it is based on."""
    from mivhead.decision import NONE

    rows = []
    for p in predictions:
        closest = shorten(str(p.label), MAX_NAME)
        ranked = [
            f"{shorten(str(label), MAX_NAME)} {percent(q)}" for label, q in p.top(max(top, 2))
        ]
        reason = percent(p.probability)
        if p.decision == NONE:
            reason = f"unlike all your photos; closest: {closest}"
        elif p.decision != p.label or top > 1:
            reason = ", ".join(ranked)
        rows.append([shorten(p.id), shorten(str(p.decision)), reason])
    return table(["file", "decision", ""], rows, limit=sys.maxsize)
