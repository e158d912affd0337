"""Drawings of how a MIV-head classifies one image, from the model and the image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mivhead.diagnostics.explanation import attention_of
from mivhead.errors import InputError, check_one_of
from mivhead.fewshot import FewShotClassifier
from mivhead.images.decoding import load_image
from mivhead.images.sources import as_image_set
from mivhead_bench.figures.attention import draw_attention
from mivhead_bench.figures.tsne import Embeddings, centroid_embeddings, draw_tsne, miv_embeddings


class Case:
    """A fitted model, one image, and the prediction for it."""

    def __init__(self, model: FewShotClassifier, image: Any) -> None:
        self.model = model
        self.images = as_image_set(image)
        if len(self.images) != 1:
            raise InputError(f"{image} holds {len(self.images)} images; give one.")
        table = model.extract(self.images)
        self.classifier = model.classifier_
        self.features = table.features
        self.prediction = model.classify(table)[0]
        self.names = [str(name) for name in self.classifier.classes_]

    @property
    def title(self) -> str:
        """The predicted class and its probability."""
        return f"{self.prediction.label}: {100 * self.prediction.probability:.0f}%"

    def plot_attention(self, path: str | Path | None = None) -> Figure:
        """Draw the attention over the image and over the shots of every class."""
        ends = np.cumsum(self.classifier.shots_)
        starts = ends - self.classifier.shots_
        rows = {n: np.arange(a, b) for n, a, b in zip(self.names, starts, ends, strict=True)}
        ranked = self.prediction.probabilities.items()
        kept = () if self.model.shots_ is None else self.model.shots_.pictures
        pictures = [load_image(picture) for picture in kept if picture is not None]
        return draw_attention(
            self.images.load(0),
            attention_of(self.classifier, self.features),
            [(str(name), p, rows[str(name)]) for name, p in ranked],
            path,
            title=self.title,
            pictures=pictures if pictures and len(pictures) == len(kept) else None,
        )

    def plot_tsne(
        self,
        path: str | Path | None = None,
        *,
        truth: str | None = None,
        seed: int = 0,
        other: Embeddings | None = None,
    ) -> Figure:
        """Draw the vectors that are compared, and those of another method: nearest centroids."""
        if truth is not None:
            check_one_of("truth", truth, self.names)
        panels = miv_embeddings(self.classifier, self.features)
        panels.append(other or centroid_embeddings(self.classifier, self.features))
        ranked = [str(name) for name in self.prediction.probabilities]
        how: dict[str, Any] = {"title": self.title, "truth": truth, "seed": seed}
        return draw_tsne(panels, self.names, path, ranked=ranked, **how)
