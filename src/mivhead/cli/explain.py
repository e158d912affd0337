"""`miv explain`: why a model predicts what it does."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from mivhead._util.text import percent
from mivhead.cli import options
from mivhead.cli.output import Output, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.explanation import Explanation

EXAMPLES = """
miv explain birds.miv new.jpg
miv explain birds.miv new.jpg -o why.png     # where it looked, the closest shots, the votes
miv explain birds.miv new.jpg --json         # every vote, in numbers
"""


@options.command(EXAMPLES)
@click.argument("model", metavar="MODEL", help="Model file of `miv fit`.")
@click.argument("images", nargs=-1, required=True, metavar="IMAGES...", help=options.UNLABELLED)
@options.output("Draw the reasons for one image to a .png, .svg or .pdf file.", *options.PICTURES)
@options.backbone
def explain(
    out: Output, model: str, images: Sequence[str], output: str | None, backbone: dict[str, Any]
) -> None:
    """Explain predictions.

    Shows the runner-up and what separates it from the predicted class, the shots that an image was
    compared with most, and, in a picture, where the model looked. `miv predict --html` makes a page
    of many images.
    """
    from mivhead.diagnostics.explanation import explain_images
    from mivhead.diagnostics.pictures import check_format
    from mivhead.images.sources import open_unlabelled

    if output:
        check_format(output)  # before the work
    loaded = options.load_model(model, out, **backbone)
    loaded.check_takes(features=False)
    image_set = open_unlabelled(images)
    if output and len(image_set) != 1:
        raise InputError(f"A picture explains one image, not {len(image_set)}.")
    explanations = list(explain_images(loaded, image_set, pictures=bool(output)))
    out.report(
        {"model": model, "explanations": [reasons.as_json() for reasons in explanations]},
        "\n\n".join(_describe(reasons) for reasons in explanations),
    )
    if output:
        explanations[0].plot(output)
        out.say(f"\nSaved {output}.")


def _describe(reasons: Explanation) -> str:
    """Say what separates a prediction from the runner-up, and list the closest shots."""
    best = reasons.prediction
    text = f"{best.id}\n  {reasons.title}"
    if reasons.words:
        text += f"\n  {reasons.words}"
    if reasons.shots:
        header = ["compared with", "class", "attention", "similarity"]
        rows = table(header, _shot_rows(reasons), right="attention similarity")
        text += f"\n\n{indent(rows, '  ')}"
    return text


def _shot_rows(reasons: Explanation) -> list[tuple[Any, ...]]:
    """Return the closest shots of both classes; the attention to each class adds up to 100%."""
    rows: list[tuple[Any, ...]] = []
    for label in (reasons.prediction.label, reasons.runner_up):
        for shot in reasons.shots:
            if shot.label == label:
                weight = "-" if shot.weight is None else percent(shot.weight)
                rows.append((shot.name, label, weight, f"{shot.similarity:.2f}"))
        rest = reasons.other_attention(label)
        if rest is not None and rest >= 0.005:
            rows.append(("other shots", label, percent(rest), ""))
    return rows
