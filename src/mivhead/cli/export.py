"""`miv export`: one ONNX file that contains a whole model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.files import is_exported
from mivhead.cli import options
from mivhead.cli.loading import kind_of, load_model
from mivhead.cli.output import check_output, print_json, size
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.export.model import Export
    from mivhead.export.storage import Storage

EXAMPLES = """
miv export birds.miv -o birds.onnx
miv predict birds.onnx new/                        # PyTorch is not needed
miv export birds.miv -o birds.onnx --half          # half the size
miv export birds.miv -o head.onnx --features       # from features to probabilities
miv export birds.miv -o birds.onnx --with-preprocessing   # from 8-bit images of any size
miv export birds.miv --web site/ --half            # a page that runs it in the browser
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
    parser.add_argument("model", type=options.model, metavar="MODEL", help="model file")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("-o", "--output", metavar="FILE.onnx", help="file to write")
    target.add_argument(
        "--web",
        metavar="FOLDER",
        help="write a page that classifies images in the browser: one file, index.html, that "
        "works by double-click and on any web host",
    )
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
    page = parser.add_argument_group("options of --web")
    page.add_argument(
        "--runtime",
        metavar="FOLDER",
        help="folder of the npm package onnxruntime-web (default: what came with mivhead, or in "
        "node_modules)",
    )
    page.add_argument(
        "--title", metavar="TEXT", help="title of the page (default: the model's name)"
    )
    options.add_model_backbone(parser)
    options.add_json(parser)
    parser.set_defaults(run=run, device="cpu")


def run(args: argparse.Namespace) -> int:
    """Run `miv export`."""
    if is_exported(args.model):
        raise InputError(f"{args.model} is already an exported model: name a model of `miv fit`.")
    storage: Storage = "half" if args.half else "int8" if args.int8 else "float32"
    if args.web:
        return _export_web(args, storage)
    if args.runtime or args.title:
        raise InputError("--runtime and --title belong to --web.")
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
    if not args.features:
        _announce(args)
    export = export_model(
        model,
        args.output,
        input="features" if args.features else "pixels" if args.with_preprocessing else None,
        storage=storage,
    )
    return _report(args, args.output, export)


def _export_web(args: argparse.Namespace, storage: Storage) -> int:
    if args.features or args.with_preprocessing:
        raise InputError("The page takes images and resizes them itself: omit other inputs.")
    options.prepare(args)
    from mivhead.export.web import PAGE, check_folder, export_web, find_runtime

    check_folder(Path(args.web))
    find_runtime(args.runtime)  # both before the work
    model = load_model(args.model, args)
    _announce(args)
    title = args.title or Path(args.model).stem
    export = export_web(model, args.web, runtime=args.runtime, title=title, storage=storage)
    _report(args, str(Path(args.web, PAGE)), export)
    if not (args.json or args.quiet):
        print("Open it by double-click, send it to somebody, or put it on any web host.")
        if storage == "float32":
            print("--half makes it smaller.")
    return 0


def _announce(args: argparse.Namespace) -> None:
    if not args.quiet and sys.stderr.isatty():
        print("Exporting the backbone (about 20 seconds) ...", file=sys.stderr)


def _report(args: argparse.Namespace, target: str, export: Export) -> int:
    if args.json:
        print_json({"file": target, **vars(export)})
    elif not args.quiet:
        print(
            f"Saved {target} ({size(export.bytes)}, opset {export.opset}). Its probabilities "
            f"differ from the model's by at most {export.difference:.1g} on test inputs."
        )
    return 0
