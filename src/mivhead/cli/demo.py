"""`miv demo`: the whole workflow from end to end, on handwritten digits that scikit-learn ships."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.text import percent
from mivhead.cli import options
from mivhead.cli.output import check_folder, interval, print_json, seconds, size, table
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from mivhead.diagnostics.demo_picture import Card
    from mivhead.features import FeatureTable
    from mivhead.images.imageset import ImageSet
    from mivhead.model.fewshot import FewShotClassifier
    from mivhead.model.prediction import Prediction

EXAMPLES = """
miv demo
miv demo --quick -o try-it
miv demo --tasks 30 --seed 1
"""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
METHODS = {"miv": "MIV-head", "ridge": "ridge regression", "ncc": "nearest centroid"}
MISTAKES = 5  # in the picture at most

NOTE = "made-by-miv-demo.txt"  # marks a folder that the next demo may write into
NOTE_TEXT = """`miv demo` made this folder and replaces its contents when it runs again.

shots/      images to learn from, one folder per class
new/        images to classify
digits.miv  the model: try `miv info`, or `miv predict digits.miv new/`
demo.png    images, predicted names, probabilities, attention, comparison
"""


@dataclass(frozen=True)
class Scale:
    """The size of the demo: numbers of classes, of images per class, and of tasks."""

    classes: int = 10
    shots: int = 5  # to learn from
    new: int = 20  # to classify
    queries: int = 10  # to test on in each task of the comparison
    tasks: int = 10  # of the comparison


FULL = Scale()
QUICK = Scale(new=15, tasks=3)


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "demo",
        "see it work on handwritten digits, in about a minute",
        "Run the whole workflow from end to end on handwritten digits that scikit-learn ships: "
        "write image folders, learn from 5 images per class, classify new ones, save and load the "
        "model, compare it with plain classifiers on the same features, and draw a picture of the "
        "results.",
        EXAMPLES,
    )
    parser.add_argument(
        "-o",
        "--output",
        default="demo-output",
        metavar="DIR",
        help="output folder (default: demo-output)",
    )
    parser.add_argument(
        "--tasks",
        type=options.positive,
        metavar="N",
        help=f"number of tasks in the comparison (default: {FULL.tasks})",
    )
    parser.add_argument("--quick", action="store_true", help="use fewer images and tasks")
    parser.add_argument(
        "--seed",
        type=options.not_negative,
        default=0,
        metavar="N",
        help="random seed (default: 0)",
    )
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    scale = QUICK if args.quick else FULL
    scale = replace(scale, tasks=args.tasks or scale.tasks)
    if scale.tasks < 2:
        raise InputError(f"--tasks is {scale.tasks}; at least 2 are needed to compute an interval.")
    folder = Path(args.output)
    _make_folder(folder)
    options.prepare(args)
    demo = _Demo(folder, scale, args.seed, args.device, quiet=args.quiet or args.json)
    started = time.perf_counter()
    demo.write_images()
    demo.fit()
    demo.predict()
    demo.save_and_load()
    demo.compare()
    demo.draw()
    demo.say(
        f"\nDone in {seconds(time.perf_counter() - started)}. Next, with your own images in one "
        f"folder per class:\n   {_miv()} fit FOLDER -o model.miv"
    )
    if args.json:
        print_json(
            {
                "folder": str(folder),
                "right": demo.right,
                "images": len(demo.truths),
                "accuracies": demo.accuracies,
            }
        )
    return 0


def _miv() -> str:
    """Return how to call `miv`: with its path, where it is not on the PATH."""
    return "miv" if shutil.which("miv") else str(Path(sys.executable).with_name("miv"))


def _make_folder(folder: Path) -> None:
    """Create the folder, or reuse that of an earlier demo; never touch anything else."""
    note = folder / NOTE
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; the demo needs a folder.")
    if folder.exists() and any(folder.iterdir()) and not note.is_file():
        raise InputError(
            f"The folder {folder} contains something other than a demo; choose another with -o."
        )
    if not folder.exists():
        check_folder(folder.absolute().parent)
        folder.mkdir()
    check_folder(folder)
    note.write_text(NOTE_TEXT, encoding="utf-8")


class _Demo:
    """The steps of the demo, in the order in which they are called; each reports what it does."""

    classifier: FewShotClassifier
    images: tuple[ImageSet, ImageSet]  # the shots and the new images
    shots: FeatureTable
    new: FeatureTable
    predictions: list[Prediction]
    accuracies: dict[str, list[float]]  # per task, by method

    def __init__(
        self, folder: Path, scale: Scale, seed: int, device: str | None, *, quiet: bool
    ) -> None:
        self.folder, self.scale, self.seed = folder, scale, seed
        self.device, self.quiet = device, quiet
        self.names = NAMES[: scale.classes]

    def say(self, text: str) -> None:
        """Report what happens."""
        if not self.quiet:
            print(text, flush=True)

    def write_images(self) -> None:
        """Write folders of images to learn from and to classify."""
        import numpy as np

        from mivhead.datasets.bundled import enlarge_scan, load_scans

        shots, new = self.scale.shots, self.scale.new
        self.say(
            "1. Images: handwritten digits of scikit-learn (8 x 8 scans, enlarged),\n"
            f"   {shots} per class to learn from and {new} per class to classify."
        )
        scans, labels = load_scans()
        generator = np.random.default_rng(self.seed)
        for label, name in enumerate(self.names):
            rows = generator.permutation(np.flatnonzero(labels == label))[: shots + new]
            for part, chosen in (("shots", rows[:shots]), ("new", rows[shots:])):
                folder = self.folder / part / name
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                for number, row in enumerate(chosen, start=1):
                    enlarge_scan(scans[row]).save(folder / f"{number}.png")
        self.say(f"   Wrote {self.folder / 'shots'}/ and {self.folder / 'new'}/.")

    def fit(self) -> None:
        """Learn from the few images, as `miv fit` does."""
        from mivhead.images.augmentation import Augmentation
        from mivhead.images.sources import open_labelled, open_unlabelled
        from mivhead.model.fewshot import FewShotClassifier

        self.say(f"\n2. Fit: learn {len(self.names)} classes from {self.scale.shots} images each.")
        started = time.perf_counter()
        self.classifier = FewShotClassifier(
            augmentation=Augmentation(flip=0.0),  # a mirrored digit is not the same digit
            random_state=self.seed,
            device=self.device,
            verbose=not self.quiet,
        )
        self.images = open_labelled(self.folder / "shots"), open_unlabelled(self.folder / "new")
        self.shots = self.classifier.extract(self.images[0])
        extracted = time.perf_counter()
        self.classifier.fit_table(self.shots)
        trained = time.perf_counter()
        views = 0 if self.shots.views is None else len(self.shots.views)
        identity = self.classifier.identity_
        assert identity is not None, "it was fitted on images"
        self.say(
            f"   The frozen backbone {identity.name} processed {len(self.shots)} "
            f"images and {views} augmented views\n   in {seconds(extracted - started)} (including "
            f"loading); training the head took {seconds(trained - extracted)}."
        )

    def predict(self) -> None:
        """Classify the new images."""
        from mivhead.diagnostics.evaluation import wilson_interval

        started = time.perf_counter()
        self.new = self.classifier.extract(self.images[1])
        self.predictions = self.classifier.classify(self.new)
        total = len(self.new)
        self.say(
            f"\n3. Predict: {self.right} of {total} new images are classified correctly: "
            f"{percent(self.right / total)}\n"
            f"   (95 % interval {interval(wilson_interval(self.right, total))}), "
            f"in {seconds(time.perf_counter() - started)}."
        )

    @property
    def truths(self) -> list[str]:
        """The true classes of the new images: the names of their folders."""
        return [Path(each).parent.name for each in self.new.ids]

    @property
    def right(self) -> int:
        """The number of new images that are classified correctly."""
        return sum(p.label == truth for p, truth in zip(self.predictions, self.truths, strict=True))

    def save_and_load(self) -> None:
        """Write the model, read it back, and check that nothing changed."""
        from mivhead.model.file import load

        path = self.folder / "digits.miv"
        self.classifier.save(path)
        loaded = load(path, device=self.device)
        image = self.folder / "new" / self.names[0] / "1.png"
        same = loaded.classify(self.new) == self.predictions
        same &= loaded.classify(image) == self.classifier.classify(image)
        if not same:
            raise NotAvailableError(f"The model {path} predicts differently after loading.")
        self.say(
            f"\n4. Save and load: {path} ({size(path.stat().st_size)}) gives exactly the same "
            "predictions after loading."
        )

    def compare(self) -> None:
        """Compare with plain classifiers on the same features and tasks."""
        from mivhead.benchmark.compare import summarise

        scale = self.scale
        self.say(
            f"\n5. Compare: {scale.tasks} random tasks of {len(self.names)} classes with "
            f"{scale.shots} shots and {scale.queries} queries per class;\n   all methods get the "
            "same features, without augmented views."
        )
        started = time.perf_counter()
        self.accuracies = self._run_tasks()
        ours, *others = METHODS
        rows = []
        for method, name in METHODS.items():
            scores = self.accuracies[method]
            gains = [a - b for a, b in zip(self.accuracies[ours], scores, strict=True)]
            gain = f"{summarise(gains).signed} points" if method in others else ""
            rows.append([name, f"{summarise(scores)} %", gain])
        header = ["method", "accuracy (95 %)", "MIV-head gains (95 %)"]
        text = table(header, rows).replace("\n", "\n   ")
        self.say(f"   {text}\n   ({seconds(time.perf_counter() - started)})")

    def _run_tasks(self) -> dict[str, list[float]]:
        """Fit and score every method on the same tasks, sampled from all images of the demo."""
        import numpy as np

        from mivhead._util.progress import progress_bar
        from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
        from mivhead.features import Features
        from mivhead.images.imageset import ImageSet
        from mivhead.methods import make_method

        scale, preset = self.scale, self.classifier.classifier_.preset
        sources = tuple(source for images in self.images for source in images.sources)
        pool = ImageSet(sources, (*(self.shots.labels or ()), *self.truths))
        protocol = Protocol("fixed", len(self.names), scale.shots, max_queries=scale.queries)
        tasks = sample_tasks(pool, "demo", protocol, self.seed, scale.tasks)
        if isinstance(tasks, LeftOut):
            raise InputError(tasks.reason)
        features = Features.concat([self.shots.features, self.new.features])
        row_of = {image: row for row, image in enumerate(pool.ids)}
        accuracies: dict[str, list[float]] = {name: [] for name in METHODS}
        with progress_bar("tasks", scale.tasks, show=not self.quiet, unit="task") as advance:
            for number, task in enumerate(tasks.tasks):
                support, queries = (
                    features[[row_of[image] for image in images]]
                    for images in (task.support, task.queries)
                )
                for name, scores in accuracies.items():
                    model = make_method(name, preset=preset, random_state=number)
                    model.fit(support, np.asarray(task.support_labels))
                    scores.append(model.score(queries, np.asarray(task.query_labels)))
                advance(1)
        return accuracies

    def draw(self) -> None:
        """Draw the first new image of every class, some mistakes, and the comparison."""
        from mivhead.benchmark.compare import summarise
        from mivhead.diagnostics.demo_picture import Bar, draw_demo

        truths = self.truths
        firsts = [truths.index(name) for name in self.names]
        wrong = [row for row, p in enumerate(self.predictions) if p.label != truths[row]]
        mistakes = [row for row in wrong if row not in firsts][:MISTAKES]
        summaries = {m: summarise(x) for m, x in self.accuracies.items()}
        path = self.folder / "demo.png"
        draw_demo(
            {
                "The first new image of every class": self._cards(firsts),
                "Mistakes": self._cards(mistakes),
            },
            [Bar(name, summaries[m].mean, summaries[m].half_width) for m, name in METHODS.items()],
            path,
            title=f"{len(self.names)} classes learned from {self.scale.shots} images each",
            subtitle=f"{self.right} of {len(truths)} new images are classified correctly. Orange: "
            "where the MIV-head looked. Closest shot: the training image with most attention.",
            chart_title=f"Accuracy over {self.scale.tasks} random tasks on the same features "
            "(mean, 95 % interval)",
        )
        self.say(
            f"\n6. Picture: {path} shows new images with their predicted names and\n"
            "   probabilities, where the head looked, and which shot it found most similar."
        )

    def _cards(self, rows: list[int]) -> list[Card]:
        from mivhead.diagnostics.demo_picture import make_cards
        from mivhead.features import FeatureTable

        if not rows:
            return []
        assert self.classifier.shots_ is not None, "it was fitted on images"
        return make_cards(
            self.classifier.classifier_,
            self.classifier.shots_,
            self.folder / "shots",
            FeatureTable(self.new.features[rows], tuple(self.new.ids[row] for row in rows)),
            [self.predictions[row] for row in rows],
            [self.truths[row] for row in rows],
        )
