"""`miv demo`: make images, fit, predict, save, load, compare, draw."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mivhead._optional import need
from mivhead.cli import options
from mivhead.cli.output import check_folder, seconds
from mivhead.errors import InputError

EXAMPLES = """
miv demo
miv demo --quick -o try-it
miv demo --tasks 30 --seed 1
"""

NOTE = "made-by-miv-demo.txt"  # marks a folder that the next demo may write into
NOTE_TEXT = """`miv demo` made this folder and replaces what it made when it runs again.

shots/      images to learn from, one folder per class
new/        images to predict
digits.miv  the model: try `miv info`, or `miv predict digits.miv new/`
demo.png    images, predicted names, probabilities, attention, comparison
"""


@dataclass(frozen=True)
class Scale:
    """Numbers of classes, of images per class, and of comparisons."""

    classes: int = 10
    shots: int = 5  # to learn from
    new: int = 20  # to predict
    queries: int = 10  # to test on in each comparison
    tasks: int = 10  # comparisons


FULL = Scale()
QUICK = Scale(new=15, tasks=3)


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "demo",
        "see it work on handwritten digits, in about a minute",
        "Show the main job from end to end on handwritten digits that scikit-learn carries: make "
        "image folders, learn from 5 images per class, predict new ones, save and load the model, "
        "compare with plain classifiers on the same features, and draw a picture of it all.",
        EXAMPLES,
    )
    parser.add_argument(
        "-o", "--output", default="demo-output", metavar="DIR", help="folder for what is made"
    )
    parser.add_argument(
        "--tasks", type=options.positive, metavar="N", help=f"comparisons (default: {FULL.tasks})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer images and comparisons")
    parser.add_argument("--seed", type=options.not_negative, default=0, metavar="N", help="seed")
    options.add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    scale = QUICK if args.quick else FULL
    scale = replace(scale, tasks=args.tasks or scale.tasks)
    if scale.tasks < 2:
        raise InputError("--tasks must be at least 2, so that there is an interval.")
    folder = Path(args.output)
    _make_folder(folder)
    started = time.perf_counter()
    options.prepare(args)
    need("matplotlib", "plot")  # before the work, not after it
    from mivhead.cli._demo_steps import Demo

    demo = Demo(folder, scale, args.seed, args.device, args.quiet)
    demo.write_images()
    demo.fit()
    demo.predict()
    demo.save_and_load()
    demo.compare()
    demo.draw()
    demo.say(
        f"\nDone in {seconds(time.perf_counter() - started)}. Next, with your own images in one "
        "folder per class:\n   miv fit FOLDER -o model.miv"
    )
    return 0


def _make_folder(folder: Path) -> None:
    """Make the folder, or take one of an earlier demo; never touch anything else."""
    note = folder / NOTE
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; the demo needs a folder.")
    if folder.exists() and any(folder.iterdir()) and not note.is_file():
        raise InputError(
            f"The folder {folder} holds something else than a demo; choose another with -o."
        )
    if not folder.exists():
        check_folder(folder.absolute().parent)
        folder.mkdir()
    check_folder(folder)
    note.write_text(NOTE_TEXT, encoding="utf-8")
