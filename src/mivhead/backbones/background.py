"""Mean vectors of background images: pictures of nothing in particular, as a backbone sees them.

Decisions compare an image with them (`mivhead.model.decision`). The images are procedural, computed
by `benchmarks/background.py`; a file next to this module holds their vectors for the default
backbone. For other backbones there are none: decisions are a little worse without, and 240 more
images would have to pass the backbone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util import files
from mivhead.backbones.base import Identity


def background_vectors(identity: Identity) -> NDArray[np.floating[Any]] | None:
    """Return mean vectors (image, channel) of background images; None if there are none.

    >>> from mivhead.backbones import load_backbone
    >>> background_vectors(load_backbone("efficientnet_lite0").identity).shape
    (240, 1280)
    """
    if not identity.name.isidentifier():  # an address or a path
        return None
    path = Path(__file__).with_name(f"background_{identity.name}.safetensors")
    if not path.is_file():
        return None
    tensors, document = files.read(path)
    if document["backbone"] != identity.as_json():  # other weights or another preprocessing
        return None
    vectors: NDArray[np.floating[Any]] = tensors["vectors"].astype(np.float32)
    return vectors
