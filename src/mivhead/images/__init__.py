"""Images: safe decoding; folders, zips and tables as an `ImageSet`; augmentation; checks.

`sources` lists images as an `ImageSet` (`imageset`), and `places` reads files at any address;
`boxes` are crops of photos. `decoding` makes a picture of a file, `augmentation` a view of a
picture, and `check` looks through a whole set.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.images.augmentation import Augmentation as Augmentation
    from mivhead.images.boxes import open_boxes as open_boxes
    from mivhead.images.check import DataReport as DataReport
    from mivhead.images.check import check_set as check_set
    from mivhead.images.imageset import ImageSet as ImageSet
    from mivhead.images.sources import open_labelled as open_labelled
    from mivhead.images.sources import open_unlabelled as open_unlabelled

__getattr__, __dir__ = lazy(
    __name__,
    {
        "augmentation": "Augmentation",
        "boxes": "open_boxes",
        "check": "DataReport check_set",
        "imageset": "ImageSet",
        "sources": "open_labelled open_unlabelled",
    },
)
