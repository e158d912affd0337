"""How a method sees images: as features of a frozen backbone, or as pixels for a network it tunes.

`reader_for` chooses; whoever fits or predicts then needs no distinction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mivhead._util.progress import progress_bar
from mivhead._util.schema import to_json
from mivhead.backbones.base import Backbone, module_of
from mivhead.backbones.preprocessing import DecodedImage, preprocess, to_pixels
from mivhead.errors import InputError
from mivhead.extraction.cache import FeatureCache
from mivhead.extraction.pipeline import (
    PART,
    LoadedImage,
    extract_pictures,
    extract_table,
    extract_views,
    iter_features,
)
from mivhead.features import Features, FeatureTable
from mivhead.images.augmentation import NO_VIEWS, Augmentation, ViewPlan, ViewRule
from mivhead.images.imageset import ImageSet
from mivhead.methods.registry import method_name
from mivhead.model.shots import Shots
from mivhead.support import SupportSet

if TYPE_CHECKING:
    from mivhead.methods.tuning.base import Network, Pixels


class Reader(Protocol):
    """Turns images into what a method takes."""

    what: str  # the step is called, in reports of the time that it took

    def attach(self, classifier: Any) -> None:
        """Pass on what the classifier needs of the backbone; raise an error if they do not fit."""

    def read(
        self, images: ImageSet, labels: Sequence[Any], rule: ViewRule | None
    ) -> Shots | SupportSet:
        """Read labelled images and, by a rule, their views: as shots, if a model keeps them."""

    def parts(self, images: ImageSet) -> Iterator[Any]:
        """Yield one part of the images after another."""

    def pictures(self, pictures: Sequence[DecodedImage]) -> Any:
        """Read one batch of images that are decoded already."""


def reader_for(
    classifier: Any,
    backbone: Backbone,
    *,
    cache: FeatureCache | None,
    augmentation: Augmentation | None,
    verbose: bool,
) -> Reader:
    """Return the reader that a classifier needs."""
    if classifier.needs == "images":
        return PixelReader(backbone, augmentation, verbose)
    return FeatureReader(backbone, cache, verbose)


class FeatureReader:
    """Features of a frozen backbone, through the extraction pipeline and its cache."""

    what = "features"

    def __init__(self, backbone: Backbone, cache: FeatureCache | None, verbose: bool) -> None:
        self._backbone = backbone
        self._how: dict[str, Any] = {"cache": cache, "verbose": verbose}

    def attach(self, classifier: Any) -> None:
        """Accept every backbone: features are all that a method needs."""

    def read(self, images: ImageSet, labels: Sequence[Any], rule: ViewRule | None) -> Shots:
        """Read the images to learn from."""
        return Shots.from_table(self.table(images, rule), labels).in_order()

    def parts(self, images: ImageSet) -> Iterator[Features]:
        """Read images, some at a time."""
        return iter_features(self._backbone, images, **self._how)

    def pictures(self, pictures: Sequence[DecodedImage]) -> Features:
        """Pass one batch through the backbone, without the cache."""
        return extract_pictures(self._backbone, pictures)

    def table(self, images: ImageSet, rule: ViewRule | None) -> FeatureTable:
        """Read images and, by a rule, views of labelled ones."""
        how = {**self._how, "pictures": images.labels is not None}
        if rule is None:
            return extract_table(self._backbone, images, **how)
        plan = rule.plan(images.labels or ())
        table = extract_table(self._backbone, images, plan, rule.augmentation, **how)
        return replace(table, view_rule=to_json(rule))

    def views(
        self, pictures: Sequence[tuple[str, bytes]], plan: ViewPlan, how: Augmentation
    ) -> Features:
        """Make views of kept pictures."""
        return extract_views(self._backbone, pictures, plan, how, **self._how)


class PixelReader:
    """Pixels for a copy of the backbone's network, which the method tunes."""

    what = "reading"

    def __init__(self, backbone: Backbone, how: Augmentation | None, verbose: bool) -> None:
        self._backbone, self._augmentation, self._verbose = backbone, how, verbose
        self._size = backbone.preset.preprocessing.size

    def attach(self, classifier: Any) -> None:
        """Attach the backbone's network to a classifier that has none."""
        if not classifier.attached:
            classifier.attach(network_of(self._backbone, method_name(classifier)))

    def read(self, images: ImageSet, labels: Sequence[Any], rule: ViewRule | None) -> SupportSet:
        """Read the images to learn from."""
        plan = NO_VIEWS if rule is None else rule.plan(images.labels or ())
        pixels, views = load_pixels(images, self._size, plan, self._augmentation, self._verbose)
        return SupportSet.read(pixels, np.asarray(labels), views, plan.view_of)

    def parts(self, images: ImageSet) -> Iterator[Pixels]:
        """Read images, some at a time."""
        for start in range(0, max(1, len(images)), PART):
            part = images.take(range(start, min(start + PART, len(images))))
            yield load_pixels(part, self._size, verbose=self._verbose)[0]

    def pictures(self, pictures: Sequence[DecodedImage]) -> Pixels:
        """Resize one batch."""
        return np.stack([to_pixels(each, i, self._size) for i, each in enumerate(pictures)])


def network_of(backbone: Backbone, method: str) -> Network:
    """Copy the backbone's module for a method that tunes it; the backbone stays as it is."""
    name = backbone.identity.name
    loaded = module_of(backbone)
    if loaded is None:
        raise InputError(
            f"{method} tunes the backbone, so it needs a torch module that gradients can flow "
            f"through; {name} only gives features, as an ONNX file, a service or a function does: "
            "choose a backbone of timm or `from_module`, or a method on features, such as miv."
        )
    from mivhead.methods.tuning.base import Network

    preprocessing = loaded.preset.preprocessing
    model, tapped = loaded.copy_to_tune()
    prepare = partial(preprocess, preprocessing=preprocessing)
    return Network(model, tapped, prepare, preprocessing.size, name)


def load_pixels(
    images: ImageSet,
    size: int,
    plan: ViewPlan = NO_VIEWS,
    how: Augmentation | None = None,
    verbose: bool = True,
) -> tuple[Pixels, Pixels]:
    """Decode images and make their planned views: (image, R, R, 3) and (view, R, R, 3)."""
    if not len(images):
        raise InputError("There are no images: give at least one.")
    pixels = np.empty((len(images), size, size, 3), np.uint8)
    views = np.empty((len(plan.view_of), size, size, 3), np.uint8)
    with progress_bar("reading", len(images), show=verbose) as advance:
        for row, source in enumerate(images.sources):
            image = LoadedImage(source)
            pixels[row] = to_pixels(image.picture, row, size)
            for i in np.flatnonzero(plan.view_of == row):
                views[i] = np.asarray(image.view(int(plan.numbers[i]), plan.seed, size, how))
            advance(1)
    return pixels, views
