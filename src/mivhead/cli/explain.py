"""`miv explain`: why a model predicts what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import percent
from mivhead.cli import options
from mivhead.cli.loading import load_model
from mivhead.cli.output import check_output, plural, print_json, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.diagnostics.explanation import Explanation

PICTURES = (".png", ".svg", ".pdf")
EXAMPLES = """
miv explain birds.miv new.jpg
miv explain birds.miv new.jpg -o why.png     # where it looked, the closest shots, the votes
miv explain birds.miv new/ -o why.html       # a page of all images
miv explain birds.miv new.jpg --details      # every vote, in numbers
miv explain birds.miv new.jpg --json
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "explain",
        "explain why a model predicts what it does",
        "Explain predictions: show the runner-up and what separates it from the predicted class, "
        "the shots that an image was compared with most, and, in a picture or page, where the "
        "model looked.",
        EXAMPLES,
    )
    parser.add_argument("model", type=options.model, metavar="MODEL", help="model file")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="images, folders, zip archives or patterns"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="draw one image to a .png, .svg or .pdf file, or all to a .html page",
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="show how every member of the ensemble votes, and what it adds to the log-odds",
    )
    options.add_decision(parser)
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv explain`."""
    suffix = Path(args.output).suffix.lower() if args.output else ""
    if args.output:
        if suffix not in (*PICTURES, ".html"):
            raise InputError(
                f"The output must be a {', '.join(PICTURES)} or .html file, got {args.output}."
            )
        check_output(args.output)
    if suffix in PICTURES:
        from mivhead.diagnostics.pictures import check_format

        check_format(args.output)
    options.prepare(args)
    model = load_model(args.model, args)
    model.check_takes(features=False)
    from mivhead.diagnostics.explanation import explain_images
    from mivhead.images.sources import open_unlabelled

    images = open_unlabelled(args.images)
    if suffix in PICTURES and len(images) != 1:
        raise InputError(
            f"A picture explains one image, but {plural(len(images), 'image')} were given: write "
            "a .html page instead."
        )
    decision = options.decision(args, model)
    found = list(explain_images(model, images, pictures=bool(args.output), **decision))
    if suffix == ".html":
        from mivhead.diagnostics.pages import write_results

        title = f"{Path(args.model).name}: {plural(len(found), 'image')}"
        write_results(found, args.output, title=title, classes=model.classes_.tolist())
    elif args.output:
        found[0].plot(args.output)
    if args.json:
        print_json({"model": args.model, "explanations": [each.as_json() for each in found]})
        return 0
    if not args.quiet:
        print("\n\n".join(_describe(each, details=args.details) for each in found))
        if args.output:
            print(f"\nSaved {args.output}.")
    return 0


def _describe(reasons: Explanation, *, details: bool) -> str:
    best = reasons.prediction
    second = best.probabilities[reasons.runner_up]
    decided = "" if best.decision == best.label else f" ({best.decision})"
    text = (
        f"{best.id}\n  {best.label} {percent(best.probability)}{decided}, "
        f"then {reasons.runner_up} {percent(second)}"
    )
    if reasons.words:
        text += f"\n  {reasons.words}"
    if reasons.shots:
        header = ["compared with", "class", "attention", "similarity"]
        text += "\n\n" + _indent(table(header, _shot_rows(reasons), right="attention similarity"))
    if details and reasons.votes:
        heading = f"{best.label} - {reasons.runner_up}"
        votes = [
            (vote.member, vote.label, "-" if vote.separates is None else f"{vote.separates:+.2f}")
            for vote in reasons.votes
        ]
        text += "\n\n" + _indent(table(["member", "votes for", "log-odds"], votes, "log-odds"))
        total = sum(vote.separates or 0.0 for vote in reasons.votes)
        if any(vote.separates is not None for vote in reasons.votes):
            text += f"\n  log-odds of {heading}: {total:+.2f}"
    return text


def _shot_rows(reasons: Explanation) -> list[tuple[Any, ...]]:
    """Return the closest shots of both classes; the attention to each class adds up to 100 %."""
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


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
