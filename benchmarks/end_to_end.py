"""Where the time of `miv fit` and `miv predict` goes, from the start of the process to its end.

    python benchmarks/end_to_end.py DATA

DATA is a folder with one folder per class. A model is fitted on 50 images (10 classes, 5 shots) and
predicts up to 1,000 others, each command in a process of its own: first with an empty feature
cache, then with a full one. Every second of the main thread belongs to one category: Python's own
start and end, importing, loading weights, waiting for decoded images or cached features, copying
and storing features, the backbone, the head, or the rest. Images per second are compared with those
of the backbone alone, on decoded images, with all cores. `--queries N` predicts fewer images.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
HEADINGS = ("python", "import", "weights", "decoding", "cache", "backbone", "head", "rest")
CLASSES, SHOTS, QUERIES = 10, 5, 1000


class Stopwatch:
    """Adds up the time per category; the innermost one counts."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open, self._last = ["rest"], STARTED

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now

    @contextmanager
    def under(self, heading: str) -> Iterator[None]:
        """Count what happens here under a heading."""
        self._turn()
        self._open.append(heading)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrap(self, owner: Any, name: str, heading: str) -> None:
        """Count all calls of a function or method under a heading."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.under(heading):
                return inner(*args, **kwargs)

        setattr(owner, name, timed)


def run_command(arguments: list[str]) -> None:
    """Run `miv` in this process and print where the time went, as JSON."""
    watch = Stopwatch()
    plain_import = builtins.__import__

    def timed_import(name: str, *args: Any, **kwargs: Any) -> Any:
        known = name in sys.modules and not args[2:3]
        if known or threading.current_thread() is not threading.main_thread():
            return plain_import(name, *args, **kwargs)
        with watch.under("import"):
            return plain_import(name, *args, **kwargs)

    builtins.__import__ = timed_import
    from mivhead.backbones.base import LazyBackbone
    from mivhead.classifier import FeatureClassifier
    from mivhead.cli.main import main
    from mivhead.diagnostics import cross_validation as diagnostics
    from mivhead.extraction import pipeline as extraction
    from mivhead.extraction.pipeline import _Writer

    plain_prefetch = extraction.prefetch

    def prefetch(items: Any, depth: int) -> Generator[Any]:
        waiting = plain_prefetch(items, depth)
        while True:
            with watch.under("decoding"):
                item = next(waiting, None)
            if item is None:
                return
            yield item

    extraction.prefetch = prefetch
    watch.wrap(extraction._Rows, "put", "cache")
    watch.wrap(_Writer, "put", "cache")
    watch.wrap(_Writer, "__exit__", "cache")
    watch.wrap(LazyBackbone, "extract", "backbone")
    watch.wrap(LazyBackbone, "loaded", "weights")
    watch.wrap(diagnostics, "cross_validate", "head")
    for name in ("fit", "predict_proba"):
        watch.wrap(FeatureClassifier, name, "head")
    with watch.under("rest"):
        sys.argv[1:] = arguments
        code = main()
    watch._turn()
    print(json.dumps({"code": code, **watch.seconds}), file=sys.stderr)
    sys.exit(code)  # as the command does


def time_command(arguments: list[str], cache: Path) -> dict[str, float]:
    """Run `miv` in a process of its own: seconds under each heading."""
    environment = {**os.environ, "MIV_CACHE": str(cache)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--run", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    total = time.perf_counter() - start
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    if found.pop("code"):
        raise SystemExit(done.stderr)
    found["python"] = total - sum(found.values())
    return {"total": total, **{h: found.get(h, 0.0) for h in HEADINGS}}


def backbone_alone(files: list[Path]) -> float:
    """Images per second of the backbone on decoded images."""
    from mivhead.backbones import load_backbone
    from mivhead.images.decoding import load_image

    backbone = load_backbone("efficientnet_lite0")
    pictures = [load_image(file, name=file.name) for file in files]
    backbone.extract(pictures[:32])
    start = time.perf_counter()
    for first in range(0, len(pictures), 32):
        backbone.extract(pictures[first : first + 32])
    return len(pictures) / (time.perf_counter() - start)


def choose(data: Path, shots: Path, queries: Path, most: int) -> int:
    """Copy some images of ten classes; return the number of queries."""
    folders = sorted(folder for folder in data.iterdir() if folder.is_dir())[:CLASSES]
    each = most // len(folders)
    count = 0
    queries.mkdir()
    for folder in folders:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        (shots / folder.name).mkdir(parents=True)
        for file in files[:SHOTS]:
            shutil.copy(file, shots / folder.name)
        for file in files[SHOTS : SHOTS + each]:
            shutil.copy(file, queries / f"{count:04}{file.suffix}")
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a folder with one folder per class")
    parser.add_argument("--queries", type=int, default=QUERIES, help="images to predict")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shots, queries, model = folder / "shots", folder / "queries", folder / "model.miv"
        count = choose(args.data, shots, queries, args.queries)
        commands = {
            f"`miv fit`, {CLASSES * SHOTS} images": ["fit", str(shots), "-o", str(model)],
            f"`miv predict`, {count} images": ["predict", str(model), str(queries), "--csv"],
        }
        print("| command | cache | s | " + " | ".join(f"{h} %" for h in HEADINGS) + " |")
        print("|---|---|" + "---:|" * (1 + len(HEADINGS)))
        for state in ("empty", "full"):
            for name, arguments in commands.items():
                found = time_command([*arguments, "--quiet"], folder / "cache")
                total = found.pop("total")
                shares = " | ".join(f"{100 * found[h] / total:.0f}" for h in HEADINGS)
                print(f"| {name} | {state} | {total:.1f} | {shares} |", flush=True)
                if state == "empty":
                    speed = count / total, count / (total - found["import"])
        alone = backbone_alone(sorted(queries.iterdir())[:256])
    print(
        f"\nImages per second: {speed[0]:.0f} of the whole command, {speed[1]:.0f} without "
        f"importing, {alone:.0f} of the backbone alone."
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_command(sys.argv[2:])
    else:
        main()
