"""`miv info`: the contents of a model file or a features file."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from mivhead.cli import options
from mivhead.cli.inputs import kind_of
from mivhead.cli.output import plural, print_json, size, table

EXAMPLES = """
miv info birds.miv
miv info features.safetensors --json
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "info",
        "show the contents of a model or features file",
        "Show the contents of a model file or a features file. Nothing in the file is executed.",
        EXAMPLES,
    )
    parser.add_argument("file", metavar="FILE", help="model or features file")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv info`."""
    kind = kind_of(args.file)
    facts = _features_facts(args.file) if kind == "features" else _model_facts(args.file)
    facts["bytes"] = Path(args.file).stat().st_size
    if args.json:
        print_json(facts)
    else:
        print(_describe(facts))
    return 0


def _model_facts(path: str) -> dict[str, Any]:
    from mivhead.model_file import load, read_info

    load(path)  # checks every tensor
    description = read_info(path)
    shots = description.config.get("shots") or [None] * len(description.classes)
    return {
        "kind": "model",
        "file": path,
        "method": description.method,
        "classes": {str(n): s for n, s in zip(description.classes, shots, strict=True)},
        "recipe": description.recipe,
        "config": description.config,
        "backbone": description.backbone,
        "seed": description.seed,
        "library": description.library,
        "format": description.format,
    }


def _features_facts(path: str) -> dict[str, Any]:
    from mivhead.features import FeatureTable

    features = FeatureTable.load(path)
    labels = features.labels
    return {
        "kind": "features",
        "file": path,
        "images": len(features),
        "views": 0 if features.views is None else len(features.views),
        "blocks": {name: list(shape) for name, shape in features.features.layout.items()},
        "classes": None if labels is None else dict(sorted(Counter(labels).items())),
        "backbone": features.backbone,
    }


def _describe(facts: dict[str, Any]) -> str:
    backbone = facts["backbone"]
    lines = [("file", f"{facts['file']} ({size(facts['bytes'])})"), ("contents", _contents(facts))]
    if facts["kind"] == "model":
        lines.append(("method", facts["method"]))
        lines.append(("random seed", facts["seed"]))
        lines.append(("written by", f"mivhead {facts['library']} (format {facts['format']})"))
    else:
        blocks = (f"{k} {'x'.join(map(str, v))}" for k, v in facts["blocks"].items())
        lines.append(("blocks", ", ".join(blocks)))
    if backbone is None:
        lines.append(("backbone", "unknown"))
    else:
        lines.append(("backbone", f"{backbone['name']}, weights {backbone['weights'][:12]}"))
        lines.append(("taps", ", ".join(backbone["taps"])))
    text = "\n".join(f"{name:<12}{value}" for name, value in lines)
    if facts["classes"]:
        rows = [(n, "-" if s is None else s) for n, s in facts["classes"].items()]
        text += "\n\n" + table(["class", "shots"], rows, right="shots")
    return text


def _contents(facts: dict[str, Any]) -> str:
    classes = facts["classes"] or {}
    if facts["kind"] == "features":
        return (
            f"features of {plural(facts['images'], 'image')} and {plural(facts['views'], 'view')}"
            + (f", {plural(len(classes), 'class')}" if classes else ", no labels")
        )
    shots = [count for count in classes.values() if count is not None]
    of_images = f" and the features of their {plural(sum(shots), 'image')}" if shots else ""
    return f"a model of {plural(len(classes), 'class')}{of_images}"
