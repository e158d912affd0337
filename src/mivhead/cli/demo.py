"""`miv demo`: the whole workflow from end to end, on handwritten digits that scikit-learn ships."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import click

from mivhead.cli import options
from mivhead.cli.output import Output, seconds, size
from mivhead.errors import InputError, NotAvailableError

EXAMPLES = """
miv demo
miv predict demo-output/digits.miv demo-output/new/
"""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHOTS, NEW = 5, 20  # images per class, to learn from and to classify
SHOWN = 2  # images per class on the page

NOTE = "made-by-miv-demo.txt"  # marks a folder that the next demo may write into
NOTE_TEXT = """`miv demo` made this folder and replaces its contents when it runs again.

shots/        images to learn from, one folder per class
new/          images to classify
digits.miv    the model: try `miv info`, or `miv predict digits.miv new/`
results.html  some of the new images: names, where the model looked, the closest shots
"""


@options.command(EXAMPLES)
@click.option(
    "-o", "--output", type=options.NEW_FOLDER, default="demo-output", help="Folder to write."
)
def demo(out: Output, output: str) -> None:
    """Run the whole workflow from end to end on handwritten digits that scikit-learn ships.

    Writes image folders, learns from 5 images per class, names new ones and compares the names with
    the truth, saves and loads the model, and writes a page of results.
    """
    from mivhead.diagnostics.explanation import explain_images
    from mivhead.diagnostics.pages import write_results
    from mivhead.fewshot import FewShotClassifier, load
    from mivhead.images.augmentation import Augmentation
    from mivhead.images.sources import open_unlabelled

    started = time.perf_counter()
    folder = Path(output)
    _make_folder(folder)
    _write_images(folder)
    out.say(
        f"1. Images: handwritten digits, {SHOTS} per class to learn from in {folder / 'shots'}\n"
        f"   and {NEW} per class to classify in {folder / 'new'}."
    )
    flip = Augmentation(flip=0.0)  # a mirrored digit is not the same digit
    model = FewShotClassifier(augmentation=flip, verbose=out.verbose and not out.json)
    model.fit(folder / "shots")
    spent = ", ".join(f"{what} {seconds(time)}" for what, time in model.fit_seconds_.items())
    out.say(f"2. Fit: learned {len(NAMES)} classes from {SHOTS} images each ({spent}).")

    result = model.evaluate(folder / "new")
    score = result.score
    out.say("3. Predict and evaluate: " + str(result).replace("\n", "\n   "))

    path, page = folder / "digits.miv", folder / "results.html"
    model.save(path)
    some = [folder / "new" / name / f"{i + 1}.png" for name in NAMES for i in range(SHOWN)]
    images = open_unlabelled(some)
    if load(path).classify(images) != model.classify(images):
        raise NotAvailableError(f"The model {path} predicts differently after loading.")
    out.say(f"4. Save and load: {path} ({size(path.stat().st_size)}) predicts the same.")

    explained = explain_images(model, images)
    write_results(explained, page, title="Digits", classes=model.classes_.tolist(), model=path)
    out.say(f"5. Explain: {page} shows where the model looked, and the closest shots.")
    miv = "miv" if shutil.which("miv") else Path(sys.executable).with_name("miv")
    out.say(
        f"\nDone in {seconds(time.perf_counter() - started)}. Next, with your own images in one "
        f"folder per class:\n   {miv} fit FOLDER"
    )
    if out.json:
        out.result({"folder": output, "right": score.right, "images": score.images}, "")


def _make_folder(folder: Path) -> None:
    """Create the folder, or reuse that of an earlier demo; never touch anything else."""
    note = folder / NOTE
    if folder.exists() and any(folder.iterdir()) and not note.is_file():
        raise InputError(
            f"The folder {folder} contains something other than a demo; choose another with -o."
        )
    folder.mkdir(exist_ok=True)
    note.write_text(NOTE_TEXT, encoding="utf-8")


def _write_images(folder: Path) -> None:
    """Write folders of images to learn from and to classify."""
    import numpy as np

    from mivhead.images.example import enlarge_scan, load_scans

    scans, labels = load_scans()
    generator = np.random.default_rng(0)
    for label, name in enumerate(NAMES):
        rows = generator.permutation(np.flatnonzero(labels == label))[: SHOTS + NEW]
        for part, chosen in (("shots", rows[:SHOTS]), ("new", rows[SHOTS:])):
            target = folder / part / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for number, row in enumerate(chosen, start=1):
                enlarge_scan(scans[row]).save(target / f"{number}.png")
