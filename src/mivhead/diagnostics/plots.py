"""Drawings of how a MIV-head classifies one image, from the model and the image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.Image import Image

from mivhead.classifier import MIVClassifier
from mivhead.diagnostics.attention import draw_attention, explain
from mivhead.diagnostics.tsne import (
    centroid_embeddings,
    draw_tsne,
    miv_embeddings,
    tuned_embeddings,
)
from mivhead.errors import InputError, check_one_of
from mivhead.extraction.pipeline import LoadedImage
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSet
from mivhead.images.sources import as_image_set, open_labelled
from mivhead.model.fewshot import FewShotClassifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Case:
    """A MIV-head, one image, and the prediction for it.

    Parameters
    ----------
    model : FewShotClassifier
        A fitted model of the method `miv` or one of its ablations.
    image : path, PIL image, array or binary file
        One image.
    """

    def __init__(self, model: FewShotClassifier, image: Any) -> None:
        if not isinstance(model.classifier_, MIVClassifier):
            raise InputError("The model is not a MIV-head; only those can be drawn.")
        self.model = model
        self.images = as_image_set(image)
        if len(self.images) != 1:
            raise InputError(f"{image} holds {len(self.images)} images; give one.")
        table = model.extract(self.images)
        self.classifier: MIVClassifier = model.classifier_
        self.features = table.features
        self.prediction = model.classify(table)[0]
        # Classes that are known by name only have nothing to draw.
        seen = self.classifier.shots_ > 0
        self.names = [str(name) for name in self.classifier.classes_[seen]]
        self.counts = self.classifier.shots_[seen]

    @property
    def title(self) -> str:
        """The predicted class and its probability."""
        return f"{self.prediction.label}: {100 * self.prediction.probability:.0f} %"

    def plot_attention(
        self, path: str | Path | None = None, *, shots: str | Path | None = None
    ) -> Figure:
        """Draw the attention over the image and over the shots of every class."""
        ends = np.cumsum(self.counts)
        starts = ends - self.counts
        rows = {n: np.arange(a, b) for n, a, b in zip(self.names, starts, ends, strict=True)}
        ranked = self.prediction.probabilities.items()
        classes = [(str(n), p, rows[str(n)]) for n, p in ranked if str(n) in rows]
        return draw_attention(
            self.images.load(0),
            explain(self.classifier, self.features),
            classes,
            path,
            title=self.title,
            pictures=self._pictures(shots),
        )

    def plot_tsne(
        self,
        path: str | Path | None = None,
        *,
        truth: str | None = None,
        seed: int = 0,
        compare: FewShotClassifier | None = None,
        shots: str | Path | ImageSet | None = None,
    ) -> Figure:
        """Draw the vectors that are compared; `compare` is a model that tunes the backbone."""
        if truth is not None:
            check_one_of("truth", truth, self.names)
        panels = miv_embeddings(self.classifier, self.features)
        if compare is None:
            panels.append(centroid_embeddings(self.classifier, self.features))
        else:
            if shots is None:
                raise InputError("A tuned backbone embeds the shots again: pass their folder.")
            if [str(name) for name in compare.classes_] != self.names:
                raise InputError("The two models have different classes.")
            panels.append(tuned_embeddings(compare, self._shots(shots), self.images))
        ranked = [str(name) for name in self.prediction.probabilities]
        how: dict[str, Any] = {"title": self.title, "truth": truth, "seed": seed}
        return draw_tsne(panels, self.names, path, ranked=ranked, **how)

    def _pictures(self, folder: str | Path | None) -> list[Image] | None:
        """Load the pictures of the shots, in the order of the model's support."""
        if folder is not None:
            images = self._shots(folder)
            return [images.load(row) for row in range(len(images))]
        pictures = () if self.model.shots_ is None else self.model.shots_.pictures
        kept = [load_image(each) for each in pictures if each is not None]
        return kept if kept and len(kept) == len(pictures) else None

    def _shots(self, folder: str | Path | ImageSet) -> ImageSet:
        """Open the images of the shots, in the order of the model's support."""
        images = folder if isinstance(folder, ImageSet) else open_labelled(folder)
        labels = images.labels or ()
        counts = [labels.count(name) for name in self.names]
        if counts != self.counts.tolist() or len(labels) != sum(counts):
            raise InputError(
                f"{folder} does not hold the images that the model was trained on: the model has "
                f"{self.counts.sum()} shots in {len(self.names)} classes, the folder "
                f"{len(labels)} in {len(set(labels))}."
            )
        hashes = [LoadedImage(source).hash for source in images.sources]
        known = () if self.model.shots_ is None else self.model.shots_.hashes
        if sorted(hashes) == sorted(known):
            rows = dict(zip(hashes, range(len(hashes)), strict=True))
            return images.take(rows[each] for each in known)
        # A model of an earlier version does not know its images: they are in the folder's order.
        order = sorted(range(len(labels)), key=lambda row: self.names.index(labels[row]))
        return images.take(order)
