"""`miv data`: check an image set, list the paper's sets, prepare one from its download."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import one_line
from mivhead.cli import options
from mivhead.cli.output import check_folder, plural, print_json, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.datasets.catalogue import DataSet
    from mivhead.images.check import DataReport, Duplicate

MAX_LISTED = 20
PROBLEMS = 1  # exit code of a check that found problems


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    actions = options.new_group(
        subparsers,
        "data",
        "check image sets; list or prepare those of the benchmark",
        "Check, list and prepare image sets for training and for the benchmark.",
        "miv data check shots/",
    )
    for add in (_add_check, _add_list, _add_prepare):
        add(actions)


# miv data check

CHECK_EXAMPLES = """
miv data check shots/
miv data check birds.zip --json > report.json
miv data check records/aircraft            # Meta-Dataset's records, test split
"""


def _add_check(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "check",
        "decode every image of a set and report problems",
        "Decode every image of a set and report its classes, image counts and sizes, the files "
        "that cannot be read, and duplicate images, within a class or across classes. The exit "
        "code is 1 if an image cannot be read or belongs to several classes, otherwise 0.",
        CHECK_EXAMPLES,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a folder with one folder per class, a zip of one, a CSV of paths and labels, or a "
        "folder of Meta-Dataset's records",
    )
    options.add_json(parser)
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Run `miv data check`."""
    from mivhead._util.progress import progress_bar
    from mivhead.images.check import check_set
    from mivhead.images.sources import open_labelled

    images = open_labelled(args.path, min_classes=1)
    with progress_bar("checking", len(images), show=not args.quiet) as advance:
        report = check_set(images, advance)
    if args.json:
        print_json({"path": args.path, **report.as_json()})
    else:
        print(_describe_report(args.path, report, brief=args.quiet))
    return 0 if report.good else PROBLEMS


def _describe_report(path: str, report: DataReport, *, brief: bool) -> str:
    counts = sorted(report.classes.values())
    parts = [
        f"{path}: {plural(report.images, 'image')} in {plural(len(counts), 'class')}, "
        f"{counts[0]:,} to {counts[-1]:,} per class (median {counts[len(counts) // 2]:,})."
    ]
    if report.sizes and report.most_common_size:
        least, median, most = report.sizes
        width, height, times = report.most_common_size
        parts.append(
            f"The short side has {least} to {most} pixels (median {median:.0f}); the most common "
            f"size is {width} x {height} ({plural(times, 'image')})."
        )
    if not brief:
        rows = list(report.classes.items())
        parts.append("\n" + table(["class", "images"], rows[:MAX_LISTED], right="images"))
        if len(rows) > MAX_LISTED:
            parts.append(f"... and {len(rows) - MAX_LISTED} more classes (--json lists all)")
    inside = [each for each in report.duplicates if len(each.labels) == 1]
    parts += _listed("Images that cannot be read", [each.reason for each in report.unreadable])
    parts += _listed("Duplicates across classes", [*map(_describe, report.contradictions)])
    parts += _listed("Duplicates within a class", [*map(_describe, inside)])
    if report.good and not inside:
        parts.append("\nAll images can be read, and there are no duplicates.")
    return "\n".join(parts)


def _listed(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = len(lines) - MAX_LISTED
    return [
        f"\n{title} ({len(lines)}):",
        *(f"  {one_line(line)}" for line in lines[:MAX_LISTED]),
        *([f"  ... and {more} more (--json lists all)"] if more > 0 else []),
    ]


def _describe(duplicate: Duplicate) -> str:
    same_files = "" if duplicate.same_files else " (same pixels, different files)"
    return " = ".join(duplicate.ids) + same_files


# miv data list

LIST_EXAMPLES = """
miv data list
miv data list --data ~/sets                # also show which sets are there
miv data list aircraft                     # where to get it, its licence, its preparation
"""


def _add_list(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "list",
        "list the benchmark's sets and those in a data folder",
        "List the 17 image sets of the paper, or show where to get one of them, its licence, split "
        "and preparation. With a data folder, also show which sets it contains.",
        LIST_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show only this set, in detail")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="data folder with one folder or zip per set (default: $MIV_DATA)",
    )
    options.add_json(parser)
    parser.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> int:
    """Run `miv data list`."""
    from mivhead.datasets.catalogue import MORE_SETS, SETS, find_declared
    from mivhead.datasets.sets import find_sets

    data = args.data or os.environ.get("MIV_DATA")
    present: dict[str | None, list[str]] = {}
    for found in find_sets(data) if data else ():
        info = find_declared(found)
        present.setdefault(info.name if info else None, []).append(found)
    chosen = SETS if args.name is None else (_find(args.name),)
    if args.json:
        sets = [{**_facts(each), "found": present.get(each.name, [])} for each in chosen]
        more = [] if args.name else [_facts(each) for each in MORE_SETS]
        print_json({"data": data, "sets": sets, "more": more, "others": present.get(None, [])})
    elif args.name is not None:
        print(_describe_set(chosen[0], present.get(chosen[0].name, [])))
    else:
        rows = [
            [s.name, s.title, s.benchmark or "-", s.classes, ", ".join(present.get(s.name, ["-"]))]
            for s in chosen
        ]
        print(table(["name", "in the paper", "part of", "classes", "found"], rows, "classes"))
        further = [[s.name, s.title, s.classes or "-", s.licence] for s in MORE_SETS]
        print("\nMore sets, which the paper does not use:\n")
        print(table(["name", "title", "classes", "licence"], further, "classes"))
        if others := present.get(None):
            print(f"\nOther sets in {data}: {', '.join(others)}.")
        where = "" if data else " Give a data folder with --data to see which sets it contains."
        print(f"\n`miv data list NAME` shows where to get a set.{where}")
    return 0


def _find(name: str) -> DataSet:
    from mivhead.datasets.catalogue import find_declared, unknown_set

    info = find_declared(name)
    if info is None:
        raise InputError(unknown_set(name))
    return info


def _facts(each: DataSet) -> dict[str, Any]:
    from mivhead.datasets.downloads import PREPARATIONS

    return {**asdict(each), "prepared_by_miv": each.name in PREPARATIONS}


def _describe_set(each: DataSet, found: list[str]) -> str:
    how = f"unpack it, then run: miv data prepare {each.name} RAW_DIR -o DATA/{each.name}"
    if each.paper_size is not None:
        how += f" (the paper's tables resize it to {each.paper_size} px when they read it)"
    rows = {
        "get": each.source,
        "licence": each.licence,
        "split": each.split + (f" ({each.classes} classes)" if each.classes else ""),
        "prepared": each.preparation,
        "how": how,
        "found as": ", ".join(found) or "-",
    }
    parts = {"MD": "Meta-Dataset", "MD+": "the eight additional sets of MD+"}
    part = parts.get(each.benchmark or "")
    where = f"{each.title} in the paper, one of {part}" if part else each.title
    lines = [f"{label + ':':<10}{text}" for label, text in rows.items()]
    return f"{each.name} ({where})\n" + "\n".join(lines)


# miv data prepare

PREPARE_EXAMPLES = """
miv data prepare aircraft fgvc-aircraft-2013b/ -o ~/sets/aircraft
miv data prepare mnist downloads/ -o ~/sets/mnist
miv data prepare mnist downloads/ --size 84 -o ~/sets/mnist84       # as the paper's authors
miv data prepare quickdraw numpy_bitmap/ --per-class 0 -o ~/sets/quickdraw    # all drawings
"""


def _add_prepare(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "prepare",
        "make class folders from the download of a set",
        "Make class folders from the unpacked download of one of the paper's sets, as the paper "
        "uses it: only test classes or test images, cropped to bounding boxes where there are any.",
        PREPARE_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="name of the set, as in `miv data list`")
    parser.add_argument("raw", metavar="RAW_DIR", help="folder of the unpacked download")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--size",
        type=options.positive,
        metavar="R",
        help="resize images to R x R pixels (Lanczos); not needed for the paper's tables, which "
        "resize MNIST and CIFAR to 84 themselves, as `miv bench run --paper-sizes` does "
        "(default: keep their sizes, which is more accurate)",
    )
    parser.add_argument(
        "--per-class",
        type=options.not_negative,
        metavar="N",
        help="maximum number of images per class, for quickdraw; 0: all (default: 1000)",
    )
    options.add_json(parser)
    parser.set_defaults(run=run_prepare)


def run_prepare(args: argparse.Namespace) -> int:
    """Run `miv data prepare`."""
    from mivhead._util.progress import progress_bar
    from mivhead.datasets.prepare import prepare_set

    check_folder(Path(args.output).parent)
    with progress_bar("preparing", None, show=not args.quiet) as advance:
        counts = prepare_set(
            args.name, args.raw, args.output, advance, size=args.size, per_class=args.per_class
        )
    if args.json:
        print_json({"folder": args.output, "classes": counts})
    elif not args.quiet:
        images = plural(sum(counts.values()), "image")
        print(f"Wrote {images} in {plural(len(counts), 'class')} to {args.output}.")
        expected = _find(args.name).classes
        if len(counts) != expected:
            print(f"The paper's set has {expected} classes: check that the download is complete.")
    return 0
