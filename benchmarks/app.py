"""How long the app takes to learn from one more photo.

    python benchmarks/app.py DATA [--cache FOLDER]

DATA is a folder with one folder per class. Photos are added to projects of two sizes; the first
fit, which passes all photos through the backbone, is not measured. Prints processor seconds of one
thread, and elapsed seconds, until the new model is there, and until its accuracy has been estimated
too. Takes about a minute.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from mivhead import FewShotClassifier
from mivhead.app.learner import CHECKING, FITTING, NAMING, READY, Learner
from mivhead.app.project import opened

SIZES = ((4, 5), (6, 8))  # classes, and photos of each
ADDED = 2
STAGES = {FITTING, NAMING, CHECKING, READY}  # in which the new model may be there already


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for ways, shots in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            measure(args.data, Path(folder) / "project", ways, shots, args.cache)


def measure(data: Path, folder: Path, ways: int, shots: int, cache: Path | None) -> None:
    classes = sorted(path for path in data.iterdir() if path.is_dir())[:ways]
    files = {each.name: sorted(p for p in each.iterdir() if p.is_file()) for each in classes}
    for name, photos in files.items():
        (folder / name).mkdir(parents=True)
        for photo in photos[:shots]:
            shutil.copy(photo, folder / name)
    with opened(folder) as project:
        model = FewShotClassifier(verbose=False, cache=cache or folder.parent / "cache")
        learner = Learner(project, model)
        learner.start()
        count = ways * shots
        wait(learner, count, {READY})
        for name in list(files)[:ADDED]:
            photo = files[name][shots]
            count += 1
            wall, processor = time.perf_counter(), time.process_time()
            project.add_photo(photo.read_bytes(), "added.jpg", name)
            print(f"{ways} classes, {count} photos:", end="")
            for what, stages in (("model", STAGES), ("estimate", {READY})):
                wait(learner, count, stages)
                spent = time.process_time() - processor
                print(f" {what} {spent:.1f} s ({time.perf_counter() - wall:.1f} s elapsed)", end="")
            print(flush=True)
        learner.stop()
        learner._thread.join()


def wait(learner: Learner, count: int, stages: set[str]) -> None:
    while len(learner.known.shots) != count or learner.known.stage not in stages:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
