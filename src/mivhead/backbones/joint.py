"""Several backbones at once: the blocks of all of them are the features of an image.

Different networks make different mistakes. The MIV-head weighs the blocks of all backbones by
stacking, as it weighs those of one. Extraction takes as long as that of all backbones together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from mivhead.backbones.base import Backbone, Identity
from mivhead.backbones.preprocessing import DecodedImage
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.errors import InputError
from mivhead.features import Block, Features

SEPARATOR = "+"  # between the names


class JointBackbone:
    """Two or more backbones whose blocks are joined, those of the first backbone first.

    The vector that plain heads use is that of the last backbone. Augmented views have the size of
    the largest input, and each backbone resizes them to its own.

    >>> from mivhead.backbones import from_callable
    >>> import numpy as np
    >>> def mean_colour(images):
    ...     return np.stack([np.asarray(image).mean((0, 1)) for image in images])
    >>> def spread(images):
    ...     return np.stack([np.asarray(image).std((0, 1)) for image in images])
    >>> parts = [from_callable(f, name=f.__name__) for f in (mean_colour, spread)]
    >>> joint = JointBackbone(parts)
    >>> joint.identity.name, joint.extract([np.zeros((8, 8, 3), np.uint8)]).layout
    ('mean_colour+spread', {'block0.token': (3,), 'block1.token': (3,)})
    """

    def __init__(self, parts: Sequence[Backbone]) -> None:
        names = [part.identity.name for part in parts]
        if len(parts) < 2 or len({part.identity.key for part in parts}) < len(parts):
            raise InputError(
                f"Several backbones must be different ones, got {', '.join(names) or 'none'}."
            )
        self.parts = tuple(parts)
        self._kept = [_own_blocks(part.preset, part is parts[-1]) for part in parts]
        largest = max((part.preset.preprocessing for part in parts), key=lambda each: each.size)
        self.preset = Preset(
            tuple(
                f"{number}:{part.preset.taps[i]}"
                for number, (part, kept) in enumerate(zip(parts, self._kept, strict=True))
                for i in range(len(kept))
            ),
            tuple(block for kept in self._kept for block in kept),
            largest,
            max(part.preset.threshold for part in parts),
        )
        keys = "".join(part.identity.key for part in parts)  # all that features depend on
        self.identity = Identity(
            SEPARATOR.join(names),
            hashlib.sha256(keys.encode()).hexdigest(),
            largest,
            self.preset.taps,
        )
        types = [str(getattr(part, "dtype", "float16")).removeprefix("torch.") for part in parts]
        self.dtype = SEPARATOR.join(dict.fromkeys(types))  # for the keys of the cache

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        blocks: list[Block] = []
        for part, kept in zip(self.parts, self._kept, strict=True):
            blocks += part.extract(images).blocks[: len(kept)]
        return Features(blocks)


def _own_blocks(preset: Preset, last: bool) -> list[BlockPreset]:
    """Return the blocks of a backbone that are used; all but the last leave out a pooled vector."""
    blocks = list(preset.blocks)
    if last:
        return blocks
    blocks = [block for block in blocks if not block.pooled]
    return [*blocks[:-1], replace(blocks[-1], deepest=True)]


def split_taps(taps: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    """Return the taps of each backbone from those of a joint one.

    >>> split_taps(("0:layer3", "0:layer4", "1:blocks.11"), 2)
    [('layer3', 'layer4'), ('blocks.11',)]
    """
    pairs = [tap.partition(":") for tap in taps]
    return [tuple(tap for number, _, tap in pairs if number == str(i)) for i in range(parts)]
