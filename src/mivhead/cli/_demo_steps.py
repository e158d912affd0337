"""The steps of the demo, each told in plain words while it happens."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead._optional import need
from mivhead._progress import progress_bar
from mivhead.classifier import MIVClassifier
from mivhead.cli.demo import Scale
from mivhead.cli.output import interval, percent, seconds, size, table
from mivhead.diagnostics.attention import explain
from mivhead.diagnostics.evaluation import wilson_interval
from mivhead.diagnostics.pictures import overlay, save_figure, square
from mivhead.errors import NotAvailableError
from mivhead.features import Features, FeatureTable
from mivhead.fewshot import FewShotClassifier, Prediction
from mivhead.images.augmentation import Augmentation
from mivhead.images.decoding import load_image
from mivhead.images.sources import open_labelled, open_unlabelled
from mivhead.model_file import load

if TYPE_CHECKING:
    from mivhead.features import Features
    from mivhead.preset import Preset


# The steps of the demo, each told in plain words while it happens.


class Demo:
    """What the steps hand on; they are called in the order in which they are written."""

    folders: DigitFolders
    classifier: FewShotClassifier
    shots: FeatureTable
    new: FeatureTable
    predictions: list[Prediction]
    comparison: Comparison

    def __init__(
        self, folder: Path, scale: Scale, seed: int, device: str | None, quiet: bool
    ) -> None:
        self.folder, self.scale, self.seed = folder, scale, seed
        self.device, self.quiet = device, quiet
        self.names = NAMES[: scale.classes]

    def say(self, text: str) -> None:
        """Tell what happens, at once."""
        if not self.quiet:
            print(text, flush=True)

    def write_images(self) -> None:
        """Write folders of images to learn from and to predict."""
        shots, new = self.scale.shots, self.scale.new
        self.say(
            "1. Images: handwritten digits of scikit-learn (8 x 8 scans, enlarged),\n"
            f"   {shots} per class to learn from and {new} per class to predict."
        )
        self.folders = write_digits(self.folder, self.names, shots, new, self.seed)
        self.say(f"   Wrote {self.folders.shots}/ and {self.folders.new}/.")

    def fit(self) -> None:
        """Learn from the few images, as `miv fit` does."""
        self.say(f"\n2. Fit: learn {len(self.names)} classes from {self.scale.shots} images each.")
        started = time.perf_counter()
        self.classifier = FewShotClassifier(
            augmentation=Augmentation(flip=0.0),  # a mirrored digit is another thing
            random_state=self.seed,
            device=self.device,
            verbose=not self.quiet,
        )
        self.shots = self.classifier.extract(open_labelled(self.folders.shots))
        extracted = time.perf_counter()
        self.classifier.fit_table(self.shots)
        trained = time.perf_counter()
        views = 0 if self.shots.views is None else len(self.shots.views)
        identity = self.classifier.identity_
        assert identity is not None, "it was fitted on images"
        self.say(
            f"   The frozen backbone {identity.name} saw {len(self.shots)} images "
            f"and {views} augmented views\n   in {seconds(extracted - started)} (loading "
            f"included); training the head took {seconds(trained - extracted)}."
        )

    def predict(self) -> None:
        """Name the new images."""
        started = time.perf_counter()
        self.new = self.classifier.extract(open_unlabelled(self.folders.new))
        self.predictions = self.classifier.classify(self.new)
        labels = self.new_labels
        right = sum(p.label == label for p, label in zip(self.predictions, labels, strict=True))
        total = len(labels)
        self.say(
            f"\n3. Predict: {right} of {total} new images are named right: "
            f"{percent(right / total)} (95 % interval {interval(wilson_interval(right, total))}),\n"
            f"   in {seconds(time.perf_counter() - started)}."
        )

    def save_and_load(self) -> None:
        """Write the model, read it back, and see that nothing changed."""
        path = self.folder / "digits.miv"
        self.classifier.save(path)
        loaded = load(path, device=self.device)
        image = self.folder / "new" / self.names[0] / "1.png"
        same = loaded.classify(self.new) == self.predictions and loaded.classify(
            image
        ) == self.classifier.classify(image)
        if not same:
            raise NotAvailableError(f"The model {path} answers differently after loading.")
        self.say(
            f"\n4. Save and load: {path} ({size(path.stat().st_size)}) gives exactly the same "
            "answers after loading."
        )

    def compare(self) -> None:
        """Compare with plain heads on the same features."""
        scale = self.scale
        self.say(
            f"\n5. Compare: {scale.tasks} random tasks of {len(self.names)} classes with "
            f"{scale.shots} shots and {scale.queries} test images each;\n   all methods get the "
            "same features, without augmented views."
        )
        started = time.perf_counter()
        self.comparison = result = compare(
            Features.concat([self.shots.features, self.new.features]),
            np.concatenate([np.asarray(self.shots.labels), self.new_labels]),
            self.classifier._load_backbone().preset,
            scale,
            seed=self.seed,
            verbose=not self.quiet,
        )
        rows = []
        for method, name in METHODS.items():
            score = f"{100 * result.mean(method):.1f} ± {100 * result.half_width(method):.1f} %"
            if method == "miv":
                rows.append([name, score, "", ""])
            else:
                gap, p = result.difference("miv", method)
                rows.append([name, score, f"{100 * gap:+.1f}", f"{p:.2g}"])
        header = ["method", "accuracy (95 %)", "MIV-head gains", "p (paired t-test)"]
        text = table(header, rows).replace("\n", "\n   ")
        self.say(f"   {text}\n   ({seconds(time.perf_counter() - started)})")

    def draw(self) -> None:
        """Draw the picture."""
        path = self.folder / "demo.png"
        draw_demo(self, path)
        self.say(
            f"\n6. Picture: {path} shows new images with their names and probabilities, where\n"
            "   the head looked, and which shot it found most alike."
        )

    @property
    def new_labels(self) -> NDArray[np.str_]:
        """True names of the new images: their folders."""
        return np.array([Path(each).parent.name for each in self.new.ids])


# The MIV-head against plain heads, on the same features and the same seeded tasks.


METHODS = {"miv": "MIV-head", "logistic": "logistic regression", "ncc": "nearest centroid"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Accuracies of each method, task by task."""

    accuracies: dict[str, NDArray[np.floating[Any]]]  # by method: (task,)

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(next(iter(self.accuracies.values())))

    def mean(self, method: str) -> float:
        """Mean accuracy over the tasks."""
        return float(self.accuracies[method].mean())

    def half_width(self, method: str) -> float:
        """Half of the 95 % interval of the mean, by Student's t."""
        from scipy import stats

        values = self.accuracies[method]
        quantile = stats.t.ppf(0.975, self.tasks - 1)
        return float(quantile * values.std(ddof=1) / math.sqrt(self.tasks))

    def difference(self, method: str, rival: str) -> tuple[float, float]:
        """Mean difference of two methods, and the p-value of a paired t-test (1 if all tie)."""
        from scipy import stats

        gaps = self.accuracies[method] - self.accuracies[rival]
        if not gaps.any():
            return 0.0, 1.0
        if np.ptp(gaps) == 0:
            return float(gaps.mean()), 0.0
        return float(gaps.mean()), float(stats.ttest_1samp(gaps, 0.0).pvalue)


def compare(
    features: Features,
    labels: NDArray[Any],
    preset: Preset,
    scale: Scale,
    *,
    seed: int,
    verbose: bool,
) -> Comparison:
    """Draw tasks from a pool of images; every method learns and is tested on the same ones.

    Parameters
    ----------
    features, labels
        The pool: each image has passed the backbone once.
    preset
        The backbone's settings for the MIV-head.
    scale
        How many tasks, and images per class to learn from and to test on in each.
    seed
        Of the tasks and the initial weights.
    verbose
        Show a progress bar.
    """
    from mivhead.methods import make_method

    found: dict[str, list[float]] = {name: [] for name in METHODS}
    with progress_bar("tasks", scale.tasks, show=verbose, unit="task") as advance:
        for task in range(scale.tasks):
            generator = np.random.default_rng([seed, task])
            support, query = _draw(labels, scale, generator)
            for name, scores in found.items():
                model = make_method(name, preset=preset, random_state=task)
                model.fit(features[support], labels[support])
                scores.append(model.score(features[query], labels[query]))
            advance(1)
    return Comparison({name: np.array(scores) for name, scores in found.items()})


def _draw(
    labels: NDArray[Any], scale: Scale, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of a task's support and query images."""
    support, query = [], []
    for name in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == name))
        support.append(rows[: scale.shots])
        query.append(rows[scale.shots : scale.shots + scale.queries])
    return np.concatenate(support), np.concatenate(query)


# Images for the demo: handwritten digits that scikit-learn carries, as folders of PNG files.


NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = 64  # pixels of a side; the scans have 8
MARGIN = 1  # pixels of paper around a scan


@dataclass(frozen=True)
class DigitFolders:
    """Two folders with one folder per class: to learn from, and to predict."""

    shots: Path
    new: Path


def write_digits(
    folder: Path, names: Sequence[str], shots: int, new: int, seed: int
) -> DigitFolders:
    """Write so many digits per class, drawn at random; replaces what an earlier demo wrote."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    ink = np.round(255 * (1 - scans.reshape(-1, 8, 8) / 16)).astype(np.uint8)  # dark on light
    ink = np.pad(ink, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)), constant_values=255)
    generator = np.random.default_rng(seed)
    folders = DigitFolders(folder / "shots", folder / "new")
    for label, name in enumerate(names):
        rows = generator.permutation(np.flatnonzero(labels == label))[: shots + new]
        for target, chosen in ((folders.shots, rows[:shots]), (folders.new, rows[shots:])):
            shutil.rmtree(target / name, ignore_errors=True)
            (target / name).mkdir(parents=True)
            for number, row in enumerate(chosen, start=1):
                image = Image.fromarray(ink[row]).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
                image.save(target / name / f"{number}.png")
    return folders


# How much the demo does.


# What the demo's picture shows: one card per class, and the comparison.


MISTAKES = 5  # shown at most


def draw_demo(demo: Demo, path: Path) -> None:
    """Draw the first new image of every class, some mistakes, and the comparison."""
    labels = demo.new_labels
    firsts = [int(np.flatnonzero(labels == name)[0]) for name in demo.names]
    wrong = [row for row, each in enumerate(demo.predictions) if each.label != labels[row]]
    mistakes = [row for row in wrong if row not in firsts][:MISTAKES]
    result = demo.comparison
    total = len(labels)
    draw_report(
        {
            "The first new image of every class": _cards(demo, firsts),
            "Mistakes": _cards(demo, mistakes) if mistakes else [],
        },
        [Bar(name, result.mean(key), result.half_width(key)) for key, name in METHODS.items()],
        path,
        title=f"{len(demo.names)} classes learned from {demo.scale.shots} images each",
        subtitle=f"{total - len(wrong)} of {total} new images are named right. Orange: what the "
        "MIV-head looked at. Closest shot: the training image it paid most attention to.",
        chart_title=f"Accuracy over {result.tasks} random tasks on the same features "
        "(mean, 95 % interval)",
    )


def _cards(demo: Demo, rows: list[int]) -> list[Card]:
    classifier = demo.classifier.classifier_
    if not isinstance(classifier, MIVClassifier):
        raise TypeError("only the MIV-head has attention to draw")
    attention = explain(classifier, demo.new.features[rows])
    labels = np.asarray(demo.shots.labels)
    order = np.argsort(labels, kind="stable")  # the classifier keeps its shots ordered by class
    cards = []
    for place, row in enumerate(rows):
        prediction = demo.predictions[row]
        weights = np.sum([b.shots[place] for b in attention if b.shots is not None], axis=0)
        of_class = np.where(labels[order] == prediction.label, weights, -1.0)
        closest = demo.shots.ids[order[of_class.argmax()]]
        cards.append(
            Card(
                image=load_image(demo.new.ids[row]),
                heats=[b.patches[place] for b in attention if b.patches is not None],
                shot=load_image(demo.folders.shots / closest),
                truth=str(demo.new_labels[row]),
                probabilities=prediction.probabilities,
            )
        )
    return cards


# A picture of predictions: images, names, probabilities, where the head looked, and a chart.


# Lengths are in inches, from the upper left corner of the page.
WIDTH, PICTURE_MARGIN = 15.0, 0.5
COLUMNS, GAP = 5, 0.42
CARD = (WIDTH - 2 * PICTURE_MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
CARD_HEIGHT = 2.25
PICTURE = (CARD - 2 * 0.08) / 3  # three side by side
HEADER, HEADING, CHART = 0.95, 0.5, 1.85

TOP = 3  # classes whose probabilities are shown
INK, PALE, TRACK, LINE = "#22303c", "#7b8894", "#e9edf1", "#cfd6dc"
RIGHT, WRONG = "#1f7a5c", "#c0392b"
CAPTIONS = ("image", "looked at", "closest shot")


@dataclass(frozen=True, eq=False)
class Card:
    """One predicted image.

    Parameters
    ----------
    image
        The image.
    heats
        Per block (H, W): the weight of every patch.
    shot
        The shot of the predicted class that got most attention.
    truth
        Its true class.
    probabilities
        By class, falling.
    """

    image: Image.Image
    heats: Sequence[NDArray[np.floating[Any]]]
    shot: Image.Image
    truth: str
    probabilities: Mapping[str, float]


@dataclass(frozen=True)
class Bar:
    """The accuracy of one method, 0 to 1, with half of its interval."""

    name: str
    value: float
    half_width: float


class Page:
    """A figure whose parts are placed in inches from its upper left corner."""

    def __init__(self, height: float) -> None:
        need("matplotlib", "plot")
        from matplotlib.figure import Figure

        self.height = height
        self.figure = Figure(figsize=(WIDTH, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Add an empty frame."""
        bottom = 1 - (top + height) / self.height
        box = (left / WIDTH, bottom, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(box, xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        return axes

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Write a text whose upper left corner is here; a $ in a name is a dollar."""
        place = (left / WIDTH, 1 - top / self.height)
        self.figure.text(*place, text, va="top", parse_math=False, **{"color": INK, **style})


def draw_report(
    sections: Mapping[str, Sequence[Card]],
    bars: Sequence[Bar],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    chart_title: str,
) -> None:
    """Draw cards in rows under the headings of their sections, and a chart of methods below."""
    rows = [
        (heading if start == 0 else "", cards[start : start + COLUMNS])
        for heading, cards in sections.items()
        for start in range(0, len(cards), COLUMNS)
    ]
    headings = sum(bool(heading) for heading, _ in rows)
    page = Page(HEADER + headings * HEADING + len(rows) * CARD_HEIGHT + CHART)
    page.write(PICTURE_MARGIN, 0.25, title, fontsize=21, weight="bold")
    page.write(PICTURE_MARGIN, 0.66, subtitle, fontsize=12.5, color=PALE)
    top = HEADER
    for heading, cards in rows:
        if heading:
            page.write(PICTURE_MARGIN, top + 0.14, heading, fontsize=13, weight="bold")
            top += HEADING
        for place, card in enumerate(cards):
            _draw_card(page, PICTURE_MARGIN + place * (CARD + GAP), top, card)
        top += CARD_HEIGHT
    page.write(PICTURE_MARGIN, top + 0.1, chart_title, fontsize=13, weight="bold")
    _draw_chart(page.axes(PICTURE_MARGIN + 1.7, top + 0.5, 9.0, 0.95), bars)
    save_figure(page.figure, path)


def _draw_card(page: Page, left: float, top: float, card: Card) -> None:
    name = next(iter(card.probabilities))
    right = name == card.truth
    colour = RIGHT if right else WRONG
    page.write(left, top, _short(name), fontsize=13, weight="bold", color=colour)
    if not right:
        page.write(left + CARD, top + 0.03, f"is {_short(card.truth)}", fontsize=11, ha="right")
    pictures = (square(card.image), overlay(card.image, card.heats), square(card.shot))
    for column, (picture, caption) in enumerate(zip(pictures, CAPTIONS, strict=True)):
        axes = page.axes(left + column * (PICTURE + 0.08), top + 0.28, PICTURE, PICTURE)
        axes.imshow(picture)
        axes.spines[:].set(visible=True, color=LINE)
        axes.set_xlabel(caption, fontsize=8, color=PALE, labelpad=3)
    axes = page.axes(left + 0.62, top + 0.28 + PICTURE + 0.27, CARD - 1.06, 0.56)
    top_classes = list(islice(card.probabilities.items(), TOP))
    _draw_bars(axes, [p for _, p in top_classes], colour)
    for place, (each, p) in enumerate(top_classes):
        style = {"va": "center", "fontsize": 9, "color": INK, "parse_math": False}
        axes.text(-0.03, place, _short(each), ha="right", **style)
        axes.text(1.03, place, f"{100 * p:.0f} %", ha="left", **style)


def _draw_chart(axes: Any, bars: Sequence[Bar]) -> None:
    _draw_bars(axes, [bar.value for bar in bars], RIGHT)
    for place, bar in enumerate(bars):
        axes.errorbar(bar.value, place, xerr=bar.half_width, ecolor=INK, capsize=3, linewidth=1.2)
        style = {"va": "center", "fontsize": 11, "color": INK}
        axes.text(-0.012, place, bar.name, ha="right", **style)
        score = f"{100 * bar.value:.1f} ± {100 * bar.half_width:.1f} %"
        axes.text(1.012, place, score, ha="left", **style)


def _draw_bars(axes: Any, values: Sequence[float], colour: str) -> None:
    """Draw horizontal bars on a scale from 0 to 1; the first one matters most."""
    places = range(len(values))
    axes.barh(places, [1.0] * len(values), height=0.64, color=TRACK)
    axes.barh(places, values, height=0.64, color=[colour] + [PALE] * (len(values) - 1))
    axes.set(xlim=(0, 1), ylim=(len(values) - 0.6, -0.4))


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:9]}...{name[-4:]}"


# `miv demo`: the main job from end to end, on real images that pip carries.
