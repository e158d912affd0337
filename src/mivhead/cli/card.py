"""`miv card`: what others should know about a model, as the README of the place that shares it."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from mivhead._util.files import is_exported, replacing
from mivhead._util.text import one_line, percent
from mivhead.backbones.presets import FACTS, NAMED
from mivhead.cli import options
from mivhead.cli.info import read_facts
from mivhead.cli.output import check_output, interval, plural, print_json, size
from mivhead.errors import InputError

MAX_CLASSES = 200  # listed one by one
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
EXAMPLES = """
miv card birds.miv
miv card birds.miv -o README.md --license cc-by-4.0
miv card birds.onnx                   # of `miv export`
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "card",
        "write a model card: what a model knows, how good it is, what it contains",
        "Write a model card in Markdown, from what is in the model file: its classes, the accuracy "
        "to expect, its backbone with the licence of the weights, how to use it, and what the file "
        "reveals about the images. Read it and add where the images come from before you share it.",
        EXAMPLES,
    )
    parser.add_argument("model", type=options.model, metavar="MODEL", help="model file")
    parser.add_argument(
        "-o", "--output", metavar="FILE.md", help="file to write (default: print the card)"
    )
    add_license(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def add_license(parser: options.Parser) -> None:
    """Add `--license`."""
    parser.add_argument(
        "--license",
        type=_licence,
        metavar="NAME",
        help="licence under which you share the model, as the hub calls it, such as cc-by-4.0 "
        "(default: none is stated)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `miv card`."""
    if args.output:
        check_output(args.output)
    facts = read_facts(args.model)
    text = make_card(facts, expected_accuracy(args.model), licence=args.license)
    if args.output:
        with replacing(args.output) as part:
            part.write_text(text, encoding="utf-8")
    if args.json:
        print_json({"model": args.model, "output": args.output, "card": text})
    elif not args.output:
        print(text, end="")
    elif not args.quiet:
        print(f"Saved {args.output}. Add where the images come from before you share it.")
    return 0


def expected_accuracy(path: str) -> str | None:
    """Return what the model's estimate says, or a new one; None if there can be none."""
    if is_exported(path):
        return None
    from mivhead.model.file import load

    model = load(path)
    if model.estimate_ is None and model.shots_ is not None:
        model.check()
    found = model.estimate_
    if found is None or found.accuracy is None or found.low is None or found.high is None:
        return None
    unseen = list((model.shot_counts or {}).values()).count(0)
    untested = f" {plural(unseen, 'class')} without images could not be tested." if unseen else ""
    return (
        f"Expected accuracy on new images: **{percent(found.accuracy)}** (95 % interval "
        f"{interval((found.low, found.high))}), if every class is equally frequent and new images "
        f"are like those that it learned from. From cross-validation: {found.right} of "
        f"{found.tested} images were named correctly by a model that had not seen them.{untested}"
    )


def make_card(
    facts: dict[str, Any],
    accuracy: str | None,
    *,
    licence: str | None = None,
    address: str | None = None,
) -> str:
    """Return the card of a model: Markdown, with a header as the hub reads it.

    `facts` are what `miv info --json` prints; `address` is where it is shared, hf://OWNER/NAME.
    """
    if facts["kind"] == "features":
        raise InputError(f"{facts['file']} holds features, not a model.")
    name = Path(facts["file"]).name
    images = [count for count in facts["classes"].values() if count is not None]
    unseen = images.count(0)
    known = [f"knows {plural(unseen, 'class')} by name only"] if unseen else []
    if (seen := len(facts["classes"]) - unseen) > 0:
        of = f" from {plural(sum(images), 'image')}" if images else ""
        known.insert(0, f"learned {plural(seen, 'class')}{of}")
    header = ["library_name: mivhead", "pipeline_tag: image-classification"]
    header += [f"license: {licence}"] if licence else []
    sections = [
        f"# {plain(Path(name).stem)}",
        f"An image classifier that {' and '.join(known)}, made by mivhead "
        f"{plain(facts['library'])}.",
        "## Classes",
        _classes(facts["classes"]),
        "## How good it is",
        accuracy or "Not measured: run `miv evaluate` with labelled images of your own.",
        "It can be confidently wrong about images that are unlike those that it learned from. "
        "Check it on images from where it will be used, and do not let it make decisions about "
        "people.",
        "## How to use it",
        _usage(address or re.sub(r"[^\w.-]", "_", name)),
        "## Backbone",
        _backbone(facts["backbone"]),
        "## What the file contains",
        _privacy(facts),
    ]
    return "---\n" + "\n".join(header) + "\n---\n\n" + "\n\n".join(sections) + "\n"


def plain(text: object) -> str:
    r"""Return text that Markdown shows as it is: a name may come from a stranger.

    >>> print(plain("a|b <script> [x](y)\n# c"))
    a\|b \<script\> \[x\]\(y\) \# c
    >>> print(plain("www.evil.example a@b.example 0.3.0"))  # which some sites make links of
    www\.evil.example a\@b.example 0.3.0
    """
    marks = r"([\\`*_{}\[\]()<>#+!|~&:@-]|(?<=www)\.)"
    return re.sub(marks, r"\\\1", one_line(str(text)), flags=re.IGNORECASE)


def _classes(classes: dict[str, int | None]) -> str:
    rows = [
        f"| {plain(name)} | {'' if count is None else count} |"
        for name, count in list(classes.items())[:MAX_CLASSES]
    ]
    more = len(classes) - len(rows)
    text = "\n".join(["| class | images |", "|---|---:|", *rows])
    return text + (f"\n\nAnd {plural(more, 'more class')}." if more else "")


def _install() -> str:
    """Return how others get mivhead: from an index only if this copy was built to be published."""
    try:
        urls = metadata("mivhead").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    if any(url.startswith("Source,") for url in urls):
        return "pip install mivhead"
    return "pip install path/to/mivhead      # a copy of its repository"


def _usage(model: str) -> str:
    return (
        f"```sh\n{_install()}\nmiv predict {model} photo.jpg\n```\n\n"
        f'```python\nimport mivhead\n\nmodel = mivhead.load("{model}")\n'
        'print(model.classify(["photo.jpg"]))\n```\n\n'
        "It runs on your computer; images are not sent anywhere."
    )


def _backbone(backbone: dict[str, Any] | None) -> str:
    if backbone is None:
        return "Unknown: it was trained on features, and takes features."
    short = {spec: name for name, spec in NAMED.items()}
    lines = []
    for name in str(backbone["name"]).split("+"):
        facts = FACTS.get(name) or FACTS.get(short.get(name, ""))
        licence = facts.licence if facts else "not known to mivhead"
        lines.append(f"- {plain(name)}, frozen; licence of the weights: {licence}")
    return "\n".join(lines) + "\n\nThe licence of a backbone's weights applies to their use here."


def _privacy(facts: dict[str, Any]) -> str:
    items = [f"{size(facts['bytes'])} in all"]
    if facts["kind"] == "exported":
        items.append(
            "the classifier's weights, some of which are vectors of the images that it learned "
            "from, and the names of the classes"
        )
    elif facts["classes"] and not any(count != 0 for count in facts["classes"].values()):
        items.append("vectors of the names of the classes")
    else:
        items.append(
            "features of the images that it learned from, from which some of their content can be "
            "reconstructed"
        )
        if facts.get("shots"):
            items.append("the file names of these images")
        if facts.get("pictures"):
            items.append("**small copies of these images**; `miv fit --compact` leaves them out")
    listed = "\n".join(f"- {item}" for item in items)
    return (
        f"{listed}\n\nShare it only with people you would give the images to. The file is "
        "data: loading it with mivhead runs no code from it."
    )


def _licence(text: str) -> str:
    if not _LICENCE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a licence, like cc-by-4.0")
    return text
