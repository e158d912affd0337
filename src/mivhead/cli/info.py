"""`miv info`: the contents of a model file or a features file."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.files import is_exported
from mivhead.cli import options
from mivhead.cli.loading import kind_of
from mivhead.cli.output import expected_accuracy, plural, print_json, size, table
from mivhead.errors import InputError
from mivhead.methods import METHODS

if TYPE_CHECKING:
    from mivhead.model.info import ModelInfo

EXAMPLES = """
miv info birds.miv
miv info birds.miv --shots               # names and classes of the shots, and all changes
miv info birds.onnx                  # of `miv export`
miv info features.safetensors --json
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "info",
        "show the contents of a model, an exported model or a features file",
        "Show the contents of a model file, an exported model or a features file. No code in the "
        "file is run.",
        EXAMPLES,
    )
    parser.add_argument("file", type=options.model, metavar="FILE", help="model or features file")
    parser.add_argument(
        "--shots", action="store_true", help="list the shots of a model, and how it was changed"
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv info`."""
    facts = read_facts(args.file)
    if args.shots and facts.get("shots") is None:
        raise InputError(f"{args.file} does not list its shots.")
    if args.json:
        print_json(facts if args.shots else {k: v for k, v in facts.items() if k != "shots"})
    else:
        print(_describe(facts))
        if args.shots:
            print(_describe_shots(facts))
    return 0


def read_facts(path: str) -> dict[str, Any]:
    """Return what a file says about itself, as `miv info --json --shots` prints it."""
    if is_exported(path):
        facts = _exported_facts(path)
    elif kind_of(path) == "features":
        facts = _features_facts(path)
    else:
        facts = _model_facts(path)
    return {**facts, "bytes": Path(path).stat().st_size}


def _model_facts(path: str) -> dict[str, Any]:
    from mivhead.images.imageset import natural_key
    from mivhead.model.file import load, read_info

    model = load(path)  # checks every tensor
    description = read_info(path)
    kept = model.shots_
    listed = None
    if kept is not None:
        rows = sorted(
            zip(kept.names, kept.labels.tolist(), kept.hashes, strict=True),
            key=lambda row: (row[1], natural_key(row[0])),
        )
        listed = [{"name": name, "class": label, "sha256": sha} for name, label, sha in rows]
    facts = _facts(path, description, model.shot_counts or {})
    facts["shots"] = listed
    facts["views"] = model.view_count
    facts["pictures"] = kept is not None and any(each is not None for each in kept.pictures)
    use = model.classifier_.unlabelled_
    facts["unlabelled"] = None if use is None else asdict(use)
    facts["estimate"] = None if model.estimate_ is None else asdict(model.estimate_)
    facts["names"] = model.names_used
    facts["history"] = [
        {"when": each.when, "action": each.action, "text": each.text} for each in model.history_
    ]
    return facts


def _exported_facts(path: str) -> dict[str, Any]:
    from mivhead.model.exported import ExportedClassifier

    model = ExportedClassifier(path)
    facts = _facts(path, model.info, model.shot_counts or {})
    return {**facts, "kind": "exported", **model.export_facts}


def _facts(path: str, description: ModelInfo, counts: Mapping[Any, int]) -> dict[str, Any]:
    return {
        "kind": "model",
        "file": path,
        "method": description.method,
        "classes": {str(label): counts.get(label) for label in description.classes},
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
    if facts["kind"] == "exported":
        lines.append(("exported", f"from {facts['input']}, weights in {facts['storage']}"))
    if facts["kind"] in ("model", "exported"):
        lines.append(("method", facts["method"]))
        if _is_random(facts):
            lines.append(("weights", f"initialised by seed {facts['seed']}, drawn from --seed"))
        if found := facts.get("estimate"):
            from mivhead.model.info import Estimate

            expected = expected_accuracy(Estimate(**found), facts["classes"].values())
            lines.append(("accuracy", f"expected on new images: {expected}"))
        if facts["config"].get("class_prior") == "shots":
            lines.append(("prior", "classes are as frequent as their shots"))
        if (used := facts.get("names")) is not None:
            lines.append(("class names", "used" if used else "not used: they did not help"))
        if use := facts.get("unlabelled"):
            images = plural(use["images"], "image")
            lines.append(("unlabelled", f"{images}, {'used' if use['used'] else 'not used'}"))
        if facts.get("history"):
            last = facts["history"][-1]
            changes = plural(len(facts["history"]), "change")
            lines.append(("history", f"{changes}, the last on {last['when'][:10]}: {last['text']}"))
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
        rows = [[n, "-" if s is None else s] for n, s in facts["classes"].items()]
        columns = ["class", "shots"]
        if prior := facts.get("config", {}).get("frequencies"):
            columns.append("frequency")
            rows = [[*row, f"{share:g}"] for row, share in zip(rows, prior, strict=True)]
        text += "\n\n" + table(columns, rows, right="shots frequency")
    return text


def _describe_shots(facts: dict[str, Any]) -> str:
    rows = [(each["name"], each["class"], each["sha256"][:12]) for each in facts["shots"]]
    text = "\n" + table(["shot", "class", "sha256"], rows)
    if facts["history"]:
        changes = [(each["when"], each["text"]) for each in facts["history"]]
        text += "\n\n" + table(["when", "change"], changes, limit=sys.maxsize)
    return text


def _is_random(facts: dict[str, Any]) -> bool:
    """Return whether the method starts from random weights: a head, or a tuned backbone."""
    recipe: dict[str, object] | None = facts["recipe"]
    if recipe is not None:
        return recipe.get("vote") != "experts"
    return facts["method"] in METHODS and METHODS[facts["method"]].needs == "images"


def _contents(facts: dict[str, Any]) -> str:
    classes = facts["classes"] or {}
    if facts["kind"] == "features":
        return (
            f"features of {plural(facts['images'], 'image')} and {plural(facts['views'], 'view')}"
            + (f", {plural(len(classes), 'class')}" if classes else ", no labels")
        )
    shots = [count for count in classes.values() if count is not None]
    if facts["kind"] == "exported":
        return f"an exported model of {plural(len(classes), 'class')}"
    text = f"a model of {plural(len(classes), 'class')}"
    if shots:
        text += f" and the features of their {plural(sum(shots), 'image')}"
    if facts["pictures"]:
        text += ", with small pictures"
    if facts["views"]:  # which need not be in the file
        text += f"; augmented views used in training: {facts['views']}"
    return text
