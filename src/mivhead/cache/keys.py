"""What an entry is called: a hash of everything that its features depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.data.augment import Augmentation

# Raise it when decoding, resizing or augmentation gives other pixels than before, or when the
# layout of an entry changes: older entries are then never found, and removed in time.
VERSION = 1
DEFAULT_TYPE = "float16"


def content_hash(image: bytes | Image.Image) -> str:
    """Hash an image file, or the pixels of a picture that is in memory.

    >>> red = Image.new("RGB", (2, 3), "red")
    >>> content_hash(red) == content_hash(red.copy()) != content_hash(red.rotate(90, expand=True))
    True
    """
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    head = f"{image.mode} {image.width} {image.height}:".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


class Keys:
    """Keys of the features that one backbone gives.

    Parameters
    ----------
    backbone
        Its identity and the type that it rounds features to (an attribute `dtype`, if it has one;
        two types must not share an entry) are part of every key.
    how
        How views are made; part of the key of a view.
    """

    def __init__(self, backbone: Backbone, how: Augmentation) -> None:
        kind = str(getattr(backbone, "dtype", DEFAULT_TYPE)).removeprefix("torch.")
        self._common = [VERSION, backbone.identity.key, kind]
        self._how = asdict(how)

    def key(self, content: str, seed: int | None) -> str:
        """Name the features of an image (`content_hash`), or of its view with this seed."""
        view = "original" if seed is None else [seed, self._how]
        text = json.dumps([*self._common, content, view], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
