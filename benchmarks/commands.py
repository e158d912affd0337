"""Whole commands of another version and of this one, in turns.

    git worktree add OLD c88bc93    # version 0.2.0
    python benchmarks/commands.py DATA --old OLD [--repeat 3]

DATA is a folder with one folder per class. `miv fit` (10 classes, 5 shots, with the features in the
cache) runs with the default number of threads, with one, and next to two processes that do nothing
but compute; `miv predict` names 100 images and one, without a cache. A row shows medians of both
versions and their ratio. Both run in the environment of this script, which needs PyTorch and timm
for version 0.2.0, and use the kernels in their folders. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from busy import busy_processes, copy_images, run

NEW = Path(__file__).resolve().parents[1]
FIT = ["fit", "shots", "-o", "model.miv", "--no-check"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--old", type=Path, required=True, help="folder of the other version")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        versions = []
        for name, tree in (("old", args.old), ("new", NEW)):
            work = Path(folder, name)
            work.mkdir()
            copy_images(args.data, work, queries=100)
            (work / "one").mkdir()
            shutil.copy(next((work / "new").iterdir()), work / "one")
            versions.append((work, {"PYTHONPATH": os.fspath(tree.resolve() / "src")}))
            run(FIT, work, "cache", versions[-1][1])  # fills the cache
        print("| | wall time, s | ratio | processor time, s | ratio | peak memory, MB |")
        print("|---|---:|---:|---:|---:|---:|")
        for title, command, cache, busy in (
            ("`miv fit`", FIT, "cache", 0),
            ("the same, one thread", [*FIT, "--threads", "1"], "cache", 0),
            ("the same, next to two busy processes", FIT, "cache", 2),
            ("`miv predict`, 100 images", ["predict", "model.miv", "new"], "off", 0),
            ("`miv predict`, one image", ["predict", "model.miv", "one"], "off", 0),
        ):
            with busy_processes(busy):
                rounds = [
                    [run(command, work, cache, environment) for work, environment in versions]
                    for _ in range(args.repeat)
                ]
            cells = []
            for index, digits in ((0, 2), (1, 2), (2, 0)):
                old, new = (
                    statistics.median(costs[version][index] for costs in rounds)
                    for version in (0, 1)
                )
                cells += [f"{old:.{digits}f} to {new:.{digits}f}", f"{new / old:.2f}"]
            print(f"| {title} | {' | '.join(cells[:-1])} |", flush=True)


if __name__ == "__main__":
    main()
