"""`miv backbones export`: a backbone as an ONNX file that needs no options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mivhead.cli import options
from mivhead.cli.files import check_output, print_json
from mivhead.cli.text import size
from mivhead.errors import InputError

EXAMPLES = """
miv backbones export efficientnet_lite0 -o lite0.onnx
miv backbones export timm:resnet18 --weights resnet18.safetensors -o resnet18.onnx
miv backbones export model.onnx --outputs relu_31 relu_40 -o tapped.onnx
miv fit shots/ -o birds.miv --backbone tapped.onnx
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "export",
        "write a backbone as an ONNX file",
        "Write a backbone as an ONNX file with its taps as outputs; its settings and "
        "preprocessing are recorded in the file. From another ONNX file, make one that names the "
        "tensors to tap.",
        EXAMPLES,
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
    from mivhead.backbones.onnx_export import export_onnx

    if args.outputs or args.size or args.mean or args.std:
        raise InputError("--outputs, --size, --mean and --std are for ONNX files only.")
    return export_onnx(args.name, args.output, weights=args.weights)


def _tap(args: argparse.Namespace) -> None:
    from mivhead.backbones.onnx_export import tap_onnx
    from mivhead.backbones.onnx_graph import image_input, read_graph
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
