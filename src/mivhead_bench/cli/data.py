"""`miv bench data`: list the paper's image sets, prepare one from its download."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from mivhead._util.text import progress_bar
from mivhead.cli import options
from mivhead.cli.output import Output, plural, table
from mivhead_bench.datasets.catalogue import MORE_SETS, SETS, DataSet, find_declared, get_declared
from mivhead_bench.datasets.downloads import PER_CLASS
from mivhead_bench.datasets.prepare import prepare_set
from mivhead_bench.datasets.sets import find_sets

LIST_EXAMPLES = """
miv bench data list
miv bench data list --data ~/sets                # also show which sets are there
miv bench data list aircraft                     # where to get it, its licence, its preparation
"""
PREPARE_EXAMPLES = """
miv bench data prepare aircraft fgvc-aircraft-2013b/ -o ~/sets/aircraft
miv bench data prepare mnist downloads/ -o ~/sets/mnist
miv bench data prepare quickdraw numpy_bitmap/ --per-class 0 -o ~/sets/quickdraw    # all drawings
"""
DATA = click.option(
    "--data",
    envvar="MIV_DATA",
    metavar="DIR",
    help="Folder of data sets (default: the variable MIV_DATA).",
)


@click.group
def data() -> None:
    """List and prepare the image sets of the benchmark."""


@options.command(LIST_EXAMPLES)
@click.argument("name", required=False, help="Show only this set, in detail.")
@DATA
def list_sets(out: Output, name: str | None, data: str | None) -> None:
    """List the paper's image sets, and some more.

    Shows which of them a data folder contains; of one, where to get it, its licence, split and
    preparation.
    """
    folders: dict[str | None, list[str]] = {}  # by declared name
    for folder in find_sets(data) if data else ():
        declared = find_declared(folder)
        folders.setdefault(declared.name if declared else None, []).append(folder)
    chosen = SETS if name is None else (get_declared(name),)
    document = {
        "data": data,
        "sets": [{**asdict(info), "found": folders.get(info.name, [])} for info in chosen],
        "more": [] if name else [asdict(info) for info in MORE_SETS],
        "others": folders.get(None, []),
    }
    if name is not None:
        out.result(document, _describe(chosen[0], folders.get(chosen[0].name, [])))
        return
    rows = [
        [s.name, s.title, s.benchmark or "-", s.classes or "-", ", ".join(folders.get(s.name, "-"))]
        for s in (*SETS, *MORE_SETS)
    ]
    others = f"Other sets in {data}: {', '.join(folders[None])}.\n" if folders.get(None) else ""
    out.result(
        document,
        f"{table(['name', 'title', 'part of', 'classes', 'found'], rows, 'classes')}\n\n{others}"
        "`miv bench data list NAME` shows where to get a set.",
    )


def _describe(declared: DataSet, folders: list[str]) -> str:
    name, classes = declared.name, f" ({declared.classes} classes)" if declared.classes else ""
    rows = {
        "get": declared.source,
        "licence": declared.licence,
        "split": declared.split + classes,
        "prepared": declared.preparation,
        "how": f"unpack it, then run: miv bench data prepare {name} RAW_DIR -o DATA/{name}",
        "found as": ", ".join(folders) or "-",
    }
    lines = [f"{label + ':':<10}{text}" for label, text in rows.items()]
    return f"{name} ({declared.title}, {declared.benchmark or 'not in the paper'})\n" + "\n".join(
        lines
    )


@options.command(PREPARE_EXAMPLES)
@click.argument("name", help="Name of the set, as in `miv bench data list`.")
@click.argument("raw", metavar="RAW_DIR", help="Folder of the unpacked download.")
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder to create.")
@click.option(
    "--per-class",
    type=options.NOT_NEGATIVE,
    default=PER_CLASS,
    metavar="N",
    help="Maximum number of images per class, for quickdraw; 0: all.",
)
def prepare(out: Output, name: str, raw: str, output: str, per_class: int) -> None:
    """Make class folders from the download of a set.

    They are as the paper uses them: only test classes or test images, cropped to bounding boxes
    where there are any.
    """
    options.check_folder(Path(output).parent)
    with progress_bar("preparing", None, show=out.verbose) as advance:
        counts = prepare_set(name, raw, output, advance, per_class=per_class)
    expected = get_declared(name).classes
    lacking = "" if len(counts) == expected else f" The paper's set has {expected} classes."
    images = plural(sum(counts.values()), "image")
    out.report(
        {"folder": output, "classes": counts},
        f"Wrote {images} in {plural(len(counts), 'class')} to {output}.{lacking}",
    )


data.add_command(list_sets, "list")
data.add_command(prepare)
