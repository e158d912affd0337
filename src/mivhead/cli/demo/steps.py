"""The steps of the demo, each told in plain words while it happens."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mivhead.cli.demo.compare import METHODS, Comparison, compare
from mivhead.cli.demo.digits import NAMES, DigitFolders, write_digits
from mivhead.cli.demo.scale import Scale
from mivhead.cli.text import interval, percent, seconds, size, table
from mivhead.data.augment import Augmentation
from mivhead.data.folders import open_labelled, open_unlabelled
from mivhead.diagnostics import wilson_interval
from mivhead.errors import NotAvailableError
from mivhead.features import Features
from mivhead.fewshot import FewShotClassifier, Prediction
from mivhead.persistence import load
from mivhead.stores.table import FeatureTable


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
        self.say(
            f"   The frozen backbone {self.classifier.identity_.name} saw {len(self.shots)} images "
            f"and {views} augmented views\n   in {seconds(extracted - started)} (loading "
            f"included); training the head took {seconds(trained - extracted)}."
        )

    def predict(self) -> None:
        """Name the new images."""
        started = time.perf_counter()
        self.new = self.classifier.extract(open_unlabelled(self.folders.new))
        self.predictions = self.classifier.classify_table(self.new)
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
        same = (
            isinstance(loaded, FewShotClassifier)
            and loaded.classify_table(self.new) == self.predictions
            and loaded.classify(image) == self.classifier.classify(image)
        )
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
        from mivhead.cli.demo.picture import draw_demo

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
