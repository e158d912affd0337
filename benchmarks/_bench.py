"""What the accuracy measurements share: image sets, options, and a run with its report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mivhead.backbones.base import Backbone
from mivhead.benchmark.config import read_config
from mivhead.benchmark.live import LiveView
from mivhead.benchmark.report import write_report
from mivhead.benchmark.results import Result
from mivhead.benchmark.runner import Place, run
from mivhead.executors import make_executor

TUNING = (  # choices are made on these sets
    "cub200_birds",
    "gtsrb_traffic_signs",
    "cifar10",
    "omniglot",
    "fgvc_aircraft",
    "dtd_textures10",
    "eurosat",
    "plantvillage_cropdisease",
)
CONFIRMATION = (  # and confirmed on these
    "quickdraw345",
    "vgg_flower102",
    "mnist",
    "isic_skin_lesions",
    "chestx_nih",
    "food101_small",
    "mushrooms7",
    "mscoco_crops",
)
SETS = {"tuning": TUNING, "confirmation": CONFIRMATION, "all": TUNING + CONFIRMATION}


def names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def arguments(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Make a parser with the options that all measurements share; `defaults` replaces theirs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    data = os.environ.get("MIV_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        default=data,
        required=data is None,
        help="folder that holds the sets as folders or zips; $MIV_DATA if set",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="run folder")
    parser.add_argument(
        "--sets",
        type=lambda text: SETS.get(text) or names(text),
        default="all",
        help=f"{', '.join(SETS)}, or names separated by commas",
    )
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--tasks", type=int, default=10, help="tasks per set")
    parser.add_argument("--views", type=int, default=3, help="views per shot at most")
    parser.add_argument("--seed", type=int, default=0, help="random seed of tasks and views")
    parser.add_argument("--workers", type=int, default=2, help="processes with one thread each")
    parser.set_defaults(**defaults)
    return parser


def measure(
    what: Mapping[str, Any],
    args: argparse.Namespace,
    backbones: Mapping[str, Backbone] | None = None,
) -> list[Result]:
    """Run methods and backbones on the sets and tasks of the options, and write the report.

    A run that was stopped resumes when the same command is given again.
    """
    config = read_config(
        {
            "sets": list(args.sets),
            "protocols": [args.protocol],
            "tasks": args.tasks,
            "views": args.views,
            "seed": args.seed,
            **what,
        }
    )
    # Backbones of our own cannot be sent to other processes.
    executor = make_executor("local", 0 if backbones else args.workers)
    try:
        place = Place(args.output, args.data)
        results = run(config, place, executor, backbones=backbones, view=LiveView())
    finally:
        executor.close()
    paths = write_report(results, args.output / "report", f"Benchmark: {args.output.name}")
    print("Wrote " + ", ".join(map(str, paths)))
    return results
