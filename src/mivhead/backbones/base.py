"""The small protocol that every backbone follows: images in, `Features` out.

A backbone also has an identity, which goes into model files and cache keys, and the preset it
suggests for the head. Nothing else is asked of it: an adapter is any class with these three
members; there is nothing to inherit from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch

from mivhead._schema import from_json, to_json
from mivhead.backbones.preprocessing import ImageLike
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.preset import Preprocessing, Preset


@dataclass(frozen=True)
class Identity:
    """What makes two backbones give the same features.

    Parameters
    ----------
    name
        The name it is loaded by.
    weights
        SHA-256 of the weights, 64 hexadecimal digits.
    preprocessing
        How an image becomes the backbone's input.
    taps
        The blocks whose outputs are the features, shallow to deep.

    Examples
    --------
    >>> from mivhead.preset import Preprocessing
    >>> me = Identity("mine", "0" * 64, Preprocessing(), ("layer4",))
    >>> Identity.from_json(me.as_json()) == me
    True
    """

    name: str
    weights: str
    preprocessing: Preprocessing
    taps: tuple[str, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.weights):
            raise InputError(
                "A backbone's weights are named by their SHA-256 (64 hexadecimal digits), "
                f"got {self.weights!r}."
            )

    @property
    def key(self) -> str:
        """A text that is equal for equal identities, in every process."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return to_json(self)

    @classmethod
    def from_json(cls, document: Any) -> Identity:
        """Read what `as_json` wrote; anything else is refused."""
        return from_json(cls, document, "backbone")


@runtime_checkable
class Backbone(Protocol):
    """A frozen image model behind a curtain."""

    @property
    def identity(self) -> Identity:
        """What it is; goes into model files and cache keys."""
        ...

    @property
    def preset(self) -> Preset:
        """The settings it suggests for the head."""
        ...

    def extract(self, images: Sequence[ImageLike]) -> Features:
        """Features of one batch of decoded images, on the CPU, in their order.

        The values are rounded to the storage type (float16 unless the backbone was asked for
        another), so that features from a cache equal features from a first pass.
        """
        ...


def extract_all(
    backbone: Backbone,
    images: Iterable[ImageLike],
    *,
    batch_size: int = 32,
    progress: Callable[[int], object] | None = None,
) -> Features:
    """Extract features of any number of images, batch by batch.

    Parameters
    ----------
    backbone
        Any `Backbone`.
    images
        Decoded images; a generator is read lazily, one batch at a time.
    batch_size
        Images per call of the backbone; changes memory and speed, not results.
    progress
        Called after every batch with its number of images, such as a tqdm bar's `update`.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}.")
    remaining = iter(images)
    parts = []
    while batch := list(islice(remaining, batch_size)):
        parts.append(backbone.extract(batch))
        if progress is not None:
            progress(len(batch))
    if not parts:
        raise InputError("There are no images: give at least one.")
    return Features.concat(parts)


def default_device(device: str | torch.device | None) -> torch.device:
    """Where to run: the device that was asked for, else a GPU if there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def storage_type(dtype: str | torch.dtype) -> torch.dtype:
    """Type that features are rounded to, by name or as it is.

    >>> storage_type("float16")
    torch.float16
    """
    known = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise InputError(f"dtype must be float16, float32 or float64, got {str(dtype)!r}.")
    return known[name]


# A backbone that is loaded when the first image comes.


class LazyBackbone:
    """A backbone whose identity is known before it is loaded.

    If all features are in the cache, its weights are not read and its library is not imported,
    which takes longer than training on a few images.

    Parameters
    ----------
    identity
        What the loaded backbone will be.
    preset
        The settings it suggests for the head.
    dtype
        The type that features are rounded to.
    load
        Loads it.
    """

    def __init__(
        self, identity: Identity, preset: Preset, dtype: torch.dtype, load: Callable[[], Backbone]
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self._load = load
        self._loaded: Backbone | None = None

    def extract(self, images: Sequence[ImageLike]) -> Features:
        """Features of one batch of decoded images, on the CPU, in their order."""
        return self.loaded().extract(images)

    def loaded(self) -> Backbone:
        """Load the backbone, the first time, and return it."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded
