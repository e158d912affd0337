"""Whatever holds images to predict, as an `ImageSet`."""

from __future__ import annotations

import os
from typing import Any

from PIL import Image

from mivhead.data.folders import open_unlabelled
from mivhead.data.imageset import ImageSet, from_images


def as_image_set(images: Any) -> ImageSet:
    """Read anything that holds images to predict: paths, folders, zips, pictures, arrays."""
    if isinstance(images, ImageSet):
        return images
    if isinstance(images, str | os.PathLike):
        return open_unlabelled([images])
    if isinstance(images, Image.Image | bytes) or getattr(images, "ndim", 4) in (2, 3):
        return from_images([images])
    listed = list(images)
    if listed and all(isinstance(each, str | os.PathLike) for each in listed):
        return open_unlabelled(listed)
    return from_images(listed)
