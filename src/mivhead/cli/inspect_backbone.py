"""`miv backbones inspect`: what a backbone gives, and what can be tapped in an ONNX file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.files import print_json
from mivhead.cli.text import plural, table

if TYPE_CHECKING:
    from mivhead.backbones.onnx_graph import Candidate

EXAMPLES = """
miv backbones inspect model.onnx                  # the last tensor of every shape
miv backbones inspect model.onnx --all            # every tensor
miv backbones inspect efficientnet_lite0
miv backbones inspect resnet50 --weights random   # its shapes, without its weights
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "inspect",
        "what a backbone gives, or what an ONNX file could",
        "Show the blocks that a backbone gives and its settings; for an ONNX file, the tensors "
        "that can be tapped, with their shapes for one image: C x H x W is a map, tokens x C are "
        "patches of a transformer, C a vector.",
        EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="an .onnx file, or as for --backbone")
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint for it, or `random`")
    parser.add_argument("--all", action="store_true", help="list every tensor of an ONNX file")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    options.prepare(args)
    facts = _onnx_facts(args) if args.name.endswith(".onnx") else _backbone_facts(args)
    if args.json:
        print_json(facts)
    else:
        print(_describe(facts))
    return 0


def _onnx_facts(args: argparse.Namespace) -> dict[str, Any]:
    from mivhead.backbones.onnx_graph import candidates, described_preset, image_input, read_graph
    from mivhead.preset import Preprocessing

    model, sha256 = read_graph(args.name)
    source = image_input(model, args.name)
    if described_preset(model, args.name) is not None and not args.all:
        return _backbone_facts(args)
    size = source.size or Preprocessing().size
    found = candidates(model, source, size)
    return {
        "name": args.name,
        "weights": sha256,
        "size": size,
        "batch": source.batch,
        "tensors": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "operation": each.operation,
                "output": each.is_output,
            }
            for each in (found if args.all else _last_of_each_shape(found))
        ],
        "left_out": 0 if args.all else len(found) - len(_last_of_each_shape(found)),
    }


def _last_of_each_shape(found: list[Candidate]) -> list[Candidate]:
    last = {each.shape: each for each in found}
    return [each for each in found if each.is_output or last[each.shape] is each]


def _backbone_facts(args: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    from mivhead.backbones import load_backbone
    from mivhead.head.config import resolve_blocks

    backbone = load_backbone(args.name, weights=args.weights)
    features = backbone.extract([np.zeros((8, 8, 3), np.uint8)])
    preset = backbone.preset
    blocks = resolve_blocks(features, preset.blocks)
    return {
        "name": backbone.identity.name,
        "weights": backbone.identity.weights,
        "size": preset.preprocessing.size,
        "mean": list(preset.preprocessing.mean),
        "std": list(preset.preprocessing.std),
        "threshold": preset.threshold,
        "blocks": [
            {
                "tap": tap,
                **{part: list(shape) for part, shape in block.layout.items()},
                "pool_sizes": list(block.pool_sizes),
                "native": block.native and block.grid is not None,
                "form": block.form,
                "tau": block.tau,
                "heads": block.heads,
            }
            for tap, block in zip(preset.taps, blocks, strict=True)
        ],
    }


def _describe(facts: dict[str, Any]) -> str:
    if "tensors" in facts:
        return _describe_tensors(facts)
    lines = [
        ("name", facts["name"]),
        ("weights", facts["weights"][:12]),
        ("input", f"{facts['size']} px"),
        ("mean", ", ".join(f"{each:.3f}" for each in facts["mean"])),
        ("std", ", ".join(f"{each:.3f}" for each in facts["std"])),
        ("threshold", facts["threshold"]),
    ]
    text = "\n".join(f"{name:<11}{value}" for name, value in lines)
    rows = [
        (
            block["tap"],
            _times(block.get("map")),
            _times(block.get("token")),
            ", ".join(["native"] * block["native"] + [str(s) for s in block["pool_sizes"]]) or "-",
            block["form"],
            f"{block['tau']:g}",
            block["heads"],
        )
        for block in facts["blocks"]
    ]
    header = ["tap", "map", "token", "pooled to", "form", "tau", "heads"]
    return f"{text}\n\n{table(header, rows, right='tau heads')}"


def _describe_tensors(facts: dict[str, Any]) -> str:
    rows = [
        (each["name"], _times(each["shape"]), each["operation"], "yes" if each["output"] else "")
        for each in facts["tensors"]
    ]
    text = f"{facts['name']}, {facts['size']} px\n\n"
    text += table(["tensor", "shape", "made by", "output"], rows)
    if facts["left_out"]:
        text += f"\n... and {plural(facts['left_out'], 'tensor')} of the same shapes (--all)"
    return (
        f"{text}\n\nTap some of them, shallow to deep, with\n"
        f"  miv backbones export {facts['name']} --outputs TENSOR ... -o tapped.onnx"
    )


def _times(shape: list[int] | None) -> str:
    return "x".join(map(str, shape)) if shape else "-"
