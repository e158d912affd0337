"""`miv export`: one ONNX file that contains a whole model, or a page for the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output, size
from mivhead.errors import InputError

EXAMPLES = """
miv export birds.miv                       # birds.onnx
miv predict birds.onnx new/                # PyTorch is not needed
miv export birds.miv -o head.onnx --features    # from features to probabilities
miv export birds.miv --web site/           # a page that runs it in the browser
"""


@options.command(EXAMPLES)
@click.argument("model", metavar="MODEL", help="Model file of `miv fit`.")
@options.output(
    "File to write (default: MODEL with the suffix .onnx).", ".onnx", replaces="exported"
)
@click.option(
    "--features", is_flag=True, help="Leave out the backbone: from block features to probabilities."
)
@click.option(
    "--web",
    metavar="FOLDER",
    help="Write a page instead that classifies images in the browser: one file, index.html, to "
    "open from disk or from any web server.",
)
@options.backbone
def export(
    out: Output,
    model: str,
    output: str | None,
    features: bool,
    web: str | None,
    backbone: dict[str, Any],
) -> None:
    """Write a model as one ONNX file: backbone, head and probabilities.

    The class names and the preprocessing are in its metadata. The file runs wherever ONNX does;
    `miv predict`, `evaluate`, `info` and `serve` take it like a model file. It is compared with the
    model before it is written.
    """
    if web and (features or output):
        raise InputError("--web writes a page of a whole model: omit -o and --features.")
    if web:
        from mivhead.export.web import PAGE, check_folder, export_web, find_runtime

        check_folder(Path(web))
        find_runtime()  # both before the work
        loaded = options.load_model(model, out, **backbone)
        written = str(Path(web, PAGE))
        exported = export_web(loaded, web, title=Path(model).stem)
    else:
        from mivhead.export.model import export_model

        written = output or str(Path(model).with_suffix(".onnx"))
        options.check_output(written, replaces="exported")
        loaded = options.load_model(model, out, **backbone)
        exported = export_model(loaded, written, input="features" if features else None)
    out.report(
        {"file": written, **vars(exported)},
        f"Saved {written} ({size(exported.bytes)}). Its probabilities differ from the model's by "
        f"at most {exported.difference:.1g} on test inputs.",
    )
