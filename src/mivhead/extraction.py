"""From images to a table of features: each image is decoded once and passes the backbone once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.backbones.base import Backbone, extract_all
from mivhead.data.augment import Augmentation, augment
from mivhead.data.imageset import ImageSet, iter_images
from mivhead.data.prefetch import prefetch
from mivhead.progress import progress_bar
from mivhead.stores.table import FeatureTable

BATCH = 32  # images per call of the backbone
AHEAD = 2 * BATCH  # images decoded and augmented while the backbone works

ViewPlan = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows of the originals, seeds
NO_VIEWS: ViewPlan = (np.empty(0, np.int64), np.empty(0, np.int64))


def extract_table(
    backbone: Backbone,
    images: ImageSet,
    plan: ViewPlan = NO_VIEWS,
    how: Augmentation | None = None,
    *,
    verbose: bool = True,
) -> FeatureTable:
    """Extract features of images and of their planned views (`plan_views`).

    Decoding and augmentation run in a second thread beside the backbone.
    """
    view_of, seeds = plan
    size = backbone.preset.preprocessing.size
    is_view: list[bool] = []  # of everything that was passed to the backbone, in its order

    def originals_and_views() -> Iterator[Image.Image]:
        """Yield each image, then its views, so that no decoded image is kept."""
        for row, image in iter_images(images):
            is_view.append(False)
            yield image
            for seed in seeds[view_of == row]:
                is_view.append(True)
                yield augment(image, size, int(seed), how)

    stream = prefetch(originals_and_views(), AHEAD)
    with progress_bar("backbone", len(images) + len(view_of), show=verbose) as advance:
        features = extract_all(backbone, stream, batch_size=BATCH, progress=advance)
    views = np.array(is_view)
    return FeatureTable(
        features[~views],
        images.ids,
        images.labels,
        features[views] if views.any() else None,
        np.sort(view_of) if views.any() else None,
        backbone.identity.as_json(),
    )
