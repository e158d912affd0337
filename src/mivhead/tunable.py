"""From a backbone to a network that a method may tune, and from images to its pixels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead.backbones.base import Backbone
from mivhead.backbones.images import preprocess, to_pixels
from mivhead.backbones.lazy import LazyBackbone
from mivhead.backbones.module import ModuleBackbone
from mivhead.data.augment import Augmentation, augment
from mivhead.data.imageset import ImageSet
from mivhead.errors import InputError
from mivhead.extraction import NO_VIEWS, PART, ViewPlan
from mivhead.methods import method_name
from mivhead.methods.tuning.base import TuningClassifier
from mivhead.methods.tuning.network import Network, Pixels
from mivhead.progress import progress_bar


def network_of(backbone: Backbone, method: str) -> Network:
    """Copy the backbone's module for a method that tunes it; the backbone stays as it is."""
    name = backbone.identity.name
    loaded = backbone.loaded() if isinstance(backbone, LazyBackbone) else backbone
    if not isinstance(loaded, ModuleBackbone):
        raise InputError(
            f"{method} tunes the backbone, so it needs a torch module that gradients can flow "
            f"through; {name} only gives features, as an ONNX file, a service or a function does: "
            "take a backbone of timm or `from_module`, or a method on features, such as miv."
        )
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
    view_of, seeds = plan
    pixels = np.empty((len(images), size, size, 3), np.uint8)
    views = np.empty((len(view_of), size, size, 3), np.uint8)
    with progress_bar("reading", len(images), show=verbose) as advance:
        for row in range(len(images)):
            picture = images.load(row)
            pixels[row] = to_pixels(picture, row, size)
            for view in np.flatnonzero(view_of == row):
                views[view] = np.asarray(augment(picture, size, int(seeds[view]), how))
            advance(1)
    return pixels, views


def tuned_probabilities(
    tuner: TuningClassifier, backbone: Backbone, images: ImageSet, verbose: bool
) -> Iterator[NDArray[np.floating[Any]]]:
    """Yield probabilities (image, class), `PART` images at a time, from a tuned copy.

    The copy of the backbone is made anew after loading.
    """
    if not tuner.attached:
        tuner.attach(network_of(backbone, method_name(tuner)))
    for start in range(0, max(1, len(images)), PART):
        part = images.take(range(start, min(start + PART, len(images))))
        pixels, _ = load_pixels(part, tuner.network_.size, verbose=verbose)
        yield tuner.predict_proba(pixels)
