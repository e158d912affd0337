"""Images: safe decoding; folders, zips, tables and boxes as an `ImageSet`; augmented views."""

from typing import TYPE_CHECKING

from mivhead._util.imports import lazy

if TYPE_CHECKING:
    from mivhead.images.augmentation import Augmentation as Augmentation
    from mivhead.images.boxes import open_boxes as open_boxes
    from mivhead.images.imageset import ImageSet as ImageSet
    from mivhead.images.sources import open_labelled as open_labelled
    from mivhead.images.sources import open_unlabelled as open_unlabelled

__getattr__, __dir__ = lazy(
    __name__,
    {
        "augmentation": "Augmentation",
        "boxes": "open_boxes",
        "imageset": "ImageSet",
        "sources": "open_labelled open_unlabelled",
    },
)
