"""`miv info`: the contents of a model file or a features file, and of this installation."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mivhead._util.files import is_exported
from mivhead._util.text import one_line
from mivhead._version import __version__
from mivhead.cli import options
from mivhead.cli.output import Output, plural, size, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.model.base import ModelInfo

EXAMPLES = """
miv info                       # version, and the size of the feature cache
miv info birds.miv
miv info birds.miv --shots     # names and classes of the shots, and all changes
miv info birds.onnx            # of `miv export`
miv info features.safetensors
"""


@options.command(EXAMPLES)
@click.argument("file", required=False, metavar="[FILE]", help="Model or features file.")
@click.option("--shots", is_flag=True, help="List the shots of a model, and how it was changed.")
@click.option("--details", is_flag=True, help="Show the seed, taps and hashes as well.")
def info(out: Output, file: str | None, shots: bool, details: bool) -> None:
    """Show the contents of a model file, an exported model or a features file.

    No code in the file is run. Without a file, show the version and the feature cache, which keeps
    the features of every image, so that each passes the backbone once (the variable MIV_CACHE names
    its folder, or `off`; MIV_CACHE_GB is its limit).
    """
    if file is None:
        _show_installation(out)
        return
    read = _model_facts
    if is_exported(file):
        read = _exported_facts
    elif options.kind_of(file) == "features":
        read = _features_facts
    facts = {**read(file), "file": file, "bytes": Path(file).stat().st_size}
    if shots and facts.get("shots") is None:
        raise InputError(f"{file} does not list its shots.")
    text = _describe(facts, details) + (_describe_shots(facts, details) if shots else "")
    if not shots:
        facts.pop("shots", None)
    out.result(facts, text)


def _show_installation(out: Output) -> None:
    """Show the version and the feature cache."""
    from mivhead.extraction.cache import open_cache

    stored, text = None, "disabled (MIV_CACHE=off)"
    if (cache := open_cache()) is not None:
        use = cache.info()
        stored = asdict(use) | {"folder": str(cache.folder)}
        text = f"{cache.folder}: {use.entries:,} images and views, {size(use.bytes)} of at most "
        text += size(use.limit)
    lines = _lines({"mivhead": __version__, "cache": text})
    out.result({"mivhead": __version__, "cache": stored}, lines)


def _model_facts(path: str) -> dict[str, Any]:
    """Return what a model file holds."""
    from mivhead.images.imageset import natural_key
    from mivhead.model.file import read_info

    model = options.load_model(path, Output())  # checks every tensor
    shots, use = model.shots_, model.classifier_.unlabelled_
    assert shots is not None, "it was fitted"
    listed = sorted(
        zip(shots.labels.tolist(), shots.names, shots.hashes, strict=True),
        key=lambda shot: (shot[0], natural_key(shot[1])),
    )
    return {
        "kind": "model",
        **_facts(read_info(path), model.shot_counts),
        "shots": [{"name": name, "class": label, "sha256": sha} for label, name, sha in listed],
        "views": shots.view_count,
        "pictures": any(picture is not None for picture in shots.pictures),
        "unlabelled": None if use is None else asdict(use),
        "estimate": None if model.estimate_ is None else asdict(model.estimate_),
        "names": model.names_used,
        "history": [
            {key: getattr(change, key) for key in ("when", "action", "text")}
            for change in model.history_
        ],
    }


def _exported_facts(path: str) -> dict[str, Any]:
    """Return what an exported model holds."""
    from mivhead.model.exported import ExportedClassifier

    model = ExportedClassifier(path)
    return {"kind": "exported", **_facts(model.info, model.shot_counts), "input": model.input}


def _facts(description: ModelInfo, counts: Mapping[Any, int] | None) -> dict[str, Any]:
    """Return what every model says of itself."""
    names = ("recipe", "config", "backbone", "seed", "library", "format")
    classes = {str(label): (counts or {}).get(label) for label in description.classes}
    return {"classes": classes, **{name: getattr(description, name) for name in names}}


def _features_facts(path: str) -> dict[str, Any]:
    """Return what a features file holds."""
    from mivhead.features import FeatureTable

    features = FeatureTable.load(path)
    return {
        "kind": "features",
        "images": len(features),
        "views": 0 if features.views is None else len(features.views),
        "blocks": {name: list(shape) for name, shape in features.features.layout.items()},
        "classes": dict(sorted(Counter(features.labels or ()).items())),
        "backbone": features.backbone,
    }


def _describe(facts: Mapping[str, Any], details: bool) -> str:
    """Describe a file: a line per fact that it has, and its classes."""
    lines = {"file": f"{facts['file']} ({size(facts['bytes'])})", "contents": _contents(facts)}
    if blocks := facts.get("blocks"):
        lines["blocks"] = ", ".join(f"{k} {'x'.join(map(str, v))}" for k, v in blocks.items())
    if estimate := facts.get("estimate"):
        from mivhead.model.base import Estimate

        lines["estimate"] = str(Estimate(**estimate)).replace("\n", " ")
    if (used := facts.get("names")) is not None:
        lines["class names"] = "used" if used else "not used: they did not help"
    if use := facts.get("unlabelled"):
        used = "used" if use["used"] else "not used"
        lines["unlabelled"] = f"{plural(use['images'], 'image')}, {used}"
    if history := facts.get("history"):
        changes, last = plural(len(history), "change"), history[-1]
        lines["history"] = f"{changes}, the last on {last['when'][:10]}: {last['text']}"
    if "library" in facts:
        lines["written by"] = f"mivhead {facts['library']} (format {facts['format']})"
    if (backbone := facts["backbone"]) is None:
        lines["backbone"] = "unknown"
    else:
        lines["backbone"] = backbone["name"]
        if details:
            lines |= {"weights": backbone["weights"], "taps": ", ".join(backbone["taps"])}
    if details and "seed" in facts:
        lines["seed"] = facts["seed"]
    if not facts["classes"]:
        return _lines(lines)
    rows = [[name, "-" if n is None else n] for name, n in facts["classes"].items()]
    return f"{_lines(lines)}\n\n{table(['class', 'shots'], rows, right='shots')}"


def _lines(facts: Mapping[str, Any]) -> str:
    """Write one line per fact."""
    return "\n".join(f"{name:<12}{one_line(str(value))}" for name, value in facts.items())


def _contents(facts: Mapping[str, Any]) -> str:
    classes = plural(len(facts["classes"]), "class")
    if facts["kind"] == "features":
        images, views = plural(facts["images"], "image"), plural(facts["views"], "view")
        return f"features of {images} and {views}, {classes if facts['classes'] else 'no labels'}"
    if facts["kind"] == "exported":
        return f"an exported model of {classes}, from {facts['input']}"
    images = plural(sum(facts["classes"].values()), "image")
    text = f"a model of {classes} and the features of their {images}"
    if facts["pictures"]:
        text += ", with small pictures"
    if facts["views"]:  # which need not be in the file
        text += f"; augmented views used in training: {facts['views']}"
    return text


def _describe_shots(facts: Mapping[str, Any], details: bool) -> str:
    columns = ["name", "class", "sha256"][: 3 if details else 2]
    rows = [[shot[column] for column in columns] for shot in facts["shots"]]
    text = "\n\n" + table(["shot", *columns[1:]], rows)
    if facts["history"]:
        changes = [(change["when"], change["text"]) for change in facts["history"]]
        text += "\n\n" + table(["when", "change"], changes, limit=sys.maxsize)
    return text
