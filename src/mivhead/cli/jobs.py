"""`--job`: what `miv predict` and `miv extract` do with any number of images."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.output import plural, print_json, seconds
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.batch.job import JobResult


def add_job(parser: options.Parser, formats: str) -> None:
    """Add the options of large jobs."""
    group = parser.add_argument_group(
        "large jobs",
        "With --job, sources may also be tars (WebDataset), Parquet files, lists of paths and\n"
        "addresses such as s3://bucket/photos; rows are streamed and written in parts.",
    )
    group.add_argument(
        "--job", dest="out", metavar="PATH", help=f"write rows to {formats}, in parts"
    )
    options.add_old_name(group, "--out", "--job", dest="out")
    group.add_argument(
        "--resume", action="store_true", help="complete a job that was interrupted or killed"
    )
    group.add_argument("--overwrite", action="store_true", help="replace an earlier output")
    group.add_argument(
        "--workers",
        type=options.positive,
        metavar="N",
        help="compute in N processes of one thread each (default: in this process)",
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="compute on a Ray cluster: HOST:PORT, ray://HOST:PORT or auto; without an address, "
        "start one on this computer. Name the sources before this option.",
    )
    group.add_argument(
        "--column",
        metavar="NAME",
        help="column of the images in Parquet files, or of the paths in a CSV file "
        "(default: found by type or name)",
    )
    group.add_argument(
        "--allow-remote",
        action="store_true",
        help="open addresses such as https://... that a list of paths names; by default, only "
        "those on the command line are opened",
    )
    group.add_argument(
        "--part-rows",
        type=options.positive,
        metavar="N",
        help="rows per part; after a kill, at most the parts in progress are computed again",
    )


def check_no_job(args: argparse.Namespace) -> None:
    """Raise an error for options of jobs without --job."""
    for name in (
        *("resume", "overwrite", "workers", "ray", "column", "allow_remote", "part_rows"),
    ):
        if getattr(args, name) not in (None, False):
            option = name.replace("_", "-")
            raise InputError(f"--{option} is for large jobs: name their output with --job.")


def run_predict(args: argparse.Namespace) -> int:
    """Run `miv predict --job`."""
    _refuse(args, ("csv", "output", "html", "sort_into", "write", "where", "skip_bad"))
    if args.top != 1:
        raise InputError("--top is not needed with --job, which writes all probabilities.")
    from mivhead import batch
    from mivhead.batch.work import Predicting
    from mivhead.cli.loading import check_exported_options

    if not check_exported_options(args.model, args):
        options.prepare(args)
    names = ("backbone", "weights", "device", "threads")
    work = Predicting.open(args.model, **{name: getattr(args, name) for name in names})
    # Errors of the model and of its options come before anything is written.
    decision = options.decision(args, work.loaded)
    result = batch.predict(
        work,
        args.images,
        args.out,
        raw=args.raw,
        excel=args.excel,
        boxes=args.boxes,
        box_margin=args.box_margin,
        box_confidence=args.box_confidence,
        **_shared(args),
        **decision,
    )
    return _report(args, result, "prediction")


def run_extract(args: argparse.Namespace) -> int:
    """Run `miv extract --job`."""
    _refuse(args, ("output", "label", "encoding", "skip_bad"))
    from mivhead import batch

    options.prepare(args)
    result = batch.extract(
        args.images,
        args.out,
        backbone=args.backbone,
        weights=args.weights,
        image_size=args.image_size,
        **_shared(args),
    )
    return _report(args, result, "row")


def _refuse(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(args, name) not in (None, False):
            option = {"output": "-o"}.get(name, "--" + name.replace("_", "-"))
            raise InputError(f"{option} cannot be used together with --job.")


def _shared(args: argparse.Namespace) -> Mapping[str, Any]:
    return {
        "device": args.device,
        "threads": args.threads,
        "column": args.column,
        "allow_remote": args.allow_remote,
        "part_rows": args.part_rows,
        "resume": args.resume,
        "overwrite": args.overwrite,
        "workers": args.workers or 0,
        "ray": False if args.ray is None else args.ray or True,
        "verbose": not args.quiet,
    }


def _report(args: argparse.Namespace, result: JobResult, noun: str) -> int:
    if args.json:
        print_json(asdict(result))
        return 0
    if args.quiet:
        return 0
    if result.complete:
        print(f"{result.out} is complete: there was nothing left to do.", file=sys.stderr)
        return 0
    earlier = f", {result.resumed:,} of them earlier" if result.resumed else ""
    written = f"Wrote {plural(result.rows, noun)} to {result.out}{earlier}"
    print(f"{written}, in {seconds(result.seconds)}.", file=sys.stderr)
    if result.errors:
        print(
            f"{plural(result.errors, 'image')} could not be read: see the column error.",
            file=sys.stderr,
        )
    return 0
