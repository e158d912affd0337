"""How `miv` behaves while other processes need the cores.

    python benchmarks/busy.py DATA [--busy 0 1 2 4] [--repeat 3] [--json busy.json]

DATA is a folder with one folder per class. `miv fit` (10 classes, 5 shots, with the features in the
cache), `miv predict` (60 images) and `miv extract` (50 images), both without a cache, run in
processes of their own next to 0, 1, 2 and 4 processes that do nothing but compute: with the default
number of threads, with one, and with two. A row shows the median wall time and processor time
of each, and the default's as a multiple of the best of one and two threads, and of one thread's
processor time.
`--spinning` adds a column for threads that wait in a busy loop, as PyTorch's do by default; with
many busy processes it can take minutes. Takes about five minutes without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CLASSES, SHOTS, QUERIES = 10, 5, 60
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--spinning", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = {
        "default": ([], {}),
        "1 thread": (["--threads", "1"], {}),
        "2 threads": (["--threads", "2"], {}),
    }
    if args.spinning:
        settings["spinning"] = ([], {"OMP_WAIT_POLICY": "active"})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        copy_images(args.data, work)
        commands = {
            "fit": ["fit", "shots", "-o", "model.miv", "--no-check"],
            "predict": ["predict", "model.miv", "new"],
            "extract": ["extract", "shots", "-o", "f.safetensors", "--no-augmentation"],
        }
        run(commands["fit"], work, cache="cache")  # fills the cache
        print("busy  command   " + "".join(f"{name:>18}" for name in settings) + "   wall    cpu")
        for busy in args.busy:
            for name, command in commands.items():
                cache = "cache" if name == "fit" else "off"
                found: dict[str, tuple[float, float]] = {}
                with busy_processes(busy):
                    rounds = [
                        {
                            key: run([*command, *options], work, cache, environment)
                            for key, (options, environment) in settings.items()
                        }
                        for _ in range(args.repeat)
                    ]
                for key in settings:
                    found[key] = (
                        statistics.median(each[key].wall for each in rounds),
                        statistics.median(each[key].cpu for each in rounds),
                    )
                wall = found["default"][0] / min(found["1 thread"][0], found["2 threads"][0])
                cpu = found["default"][1] / found["1 thread"][1]
                cells = "".join(f"{w:>9.2f} ({c:5.2f})" for w, c in found.values())
                print(f"{busy:>4}  {name:<9} {cells} {wall:>6.2f} {cpu:>6.2f}", flush=True)
                rows.append(
                    {"busy": busy, "command": name, "seconds": found, "wall": wall, "cpu": cpu}
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def copy_images(data: Path, work: Path, queries: int = QUERIES) -> None:
    draw = random.Random(0)
    classes = draw.sample(sorted(path for path in data.iterdir() if path.is_dir()), CLASSES)
    (work / "new").mkdir()
    for folder in classes:
        files = draw.sample(sorted(folder.iterdir()), SHOTS + queries // CLASSES)
        (work / "shots" / folder.name).mkdir(parents=True)
        for i, file in enumerate(files):
            new = work / "new" / f"{folder.name} {file.name}"
            shutil.copy(file, work / "shots" / folder.name / file.name if i < SHOTS else new)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Cost(NamedTuple):
    """What a command took: seconds by the wall clock and of the processor, and peak memory."""

    wall: float
    cpu: float
    megabytes: float


def run(
    command: list[str], work: Path, cache: str, environment: dict[str, str] | None = None
) -> Cost:
    """Run `miv` and return what it took."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))}
    folder = "off" if cache == "off" else str(work / cache)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mivhead", *command, "--quiet"],
        cwd=work,
        env=kept | {"MIV_CACHE": folder} | (environment or {}),
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    wall, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"miv {' '.join(command)} failed")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


if __name__ == "__main__":
    main()
