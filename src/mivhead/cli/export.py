"""`miv export`: one ONNX file that contains a whole model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mivhead._files import is_exported
from mivhead.cli import options
from mivhead.cli.inputs import kind_of, load_model
from mivhead.cli.output import check_output, print_json, size
from mivhead.errors import InputError

EXAMPLES = """
miv export birds.miv -o birds.onnx
miv predict birds.onnx new/                        # PyTorch is not needed
miv export birds.miv -o birds.onnx --half          # half the size
miv export birds.miv -o head.onnx --features       # from features to probabilities
miv export birds.miv -o birds.onnx --with-preprocessing   # from 8-bit images of any size
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "export",
        "write a model as one ONNX file, which runs without PyTorch",
        "Write a model as one ONNX file: backbone, head and probabilities, with the class names "
        "and the preprocessing in its metadata. The file runs wherever ONNX does; `miv predict`, "
        "`evaluate`, `info` and `serve` take it like a model file. It is compared with the model "
        "before it is written.",
        EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="model file")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.onnx", help="file to write")
    takes = parser.add_mutually_exclusive_group()
    takes.add_argument(
        "--with-preprocessing",
        action="store_true",
        help="take 8-bit RGB images of any size, and resize and normalise them in the graph",
    )
    takes.add_argument(
        "--features",
        action="store_true",
        help="leave out the backbone: from block features to probabilities",
    )
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument(
        "--half", action="store_true", help="store weights in 16 bits: half the size"
    )
    stored.add_argument(
        "--int8",
        action="store_true",
        help="store weights in 8 bits: a quarter of the size; probabilities change slightly",
    )
    options.add_model_backbone(parser)
    options.add_json(parser)
    parser.set_defaults(run=run, device="cpu")


def run(args: argparse.Namespace) -> int:
    """Run `miv export`."""
    if is_exported(args.model):
        raise InputError(f"{args.model} is an exported model already: give a model of `miv fit`.")
    if not is_exported(args.output):
        raise InputError(f"The output {args.output} must end in .onnx, by which it is recognised.")
    if Path(args.output).is_file() and kind_of(args.output) != "exported":
        raise InputError(
            f"The output {args.output} exists and is not an exported model, so it is not "
            "overwritten: choose another name or remove it."
        )
    check_output(args.output)
    options.prepare(args)
    from mivhead.export.model import export_model

    model = load_model(args.model, args)
    if not args.quiet and not args.features and sys.stderr.isatty():
        print("Exporting the backbone (about 20 seconds) ...", file=sys.stderr)
    export = export_model(
        model,
        args.output,
        input="features" if args.features else "pixels" if args.with_preprocessing else None,
        storage="half" if args.half else "int8" if args.int8 else "float32",
    )
    if args.json:
        print_json({"file": args.output, **vars(export)})
    elif not args.quiet:
        print(
            f"Saved {args.output} ({size(export.bytes)}, opset {export.opset}). Its probabilities "
            f"differ from the model's by at most {export.difference:.1g} on test inputs."
        )
    return 0
