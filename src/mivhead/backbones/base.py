"""The small protocol that every backbone follows: images in, `Features` out.

A backbone also has an identity, which goes into model files and cache keys, and the preset it
suggests for the head. Nothing else is asked of it: an adapter is any class with these three
members; there is nothing to inherit from.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from mivhead.backbones.images import ImageLike
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
        return {
            "name": self.name,
            "weights": self.weights,
            "preprocessing": {
                "size": self.preprocessing.size,
                "mean": [float(v) for v in self.preprocessing.mean],
                "std": [float(v) for v in self.preprocessing.std],
            },
            "taps": list(self.taps),
        }

    @classmethod
    def from_json(cls, document: Any) -> Identity:
        """Read what `as_json` wrote; anything else is refused."""
        outer = _checked(
            document,
            "backbone",
            {"name": _is_text, "weights": _is_text, "preprocessing": _is_dict, "taps": _is_texts},
        )
        inner = _checked(
            outer["preprocessing"],
            "backbone.preprocessing",
            {"size": _is_size, "mean": _is_colour, "std": _is_colour},
        )
        preprocessing = Preprocessing(inner["size"], tuple(inner["mean"]), tuple(inner["std"]))
        return cls(outer["name"], outer["weights"], preprocessing, tuple(outer["taps"]))


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


def _checked(document: Any, where: str, checks: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """Return the document if it has exactly these keys and every value passes its check."""
    if not isinstance(document, dict) or document.keys() != checks.keys():
        raise InputError(f"{where} must have exactly the keys {', '.join(checks)}.")
    for key, check in checks.items():
        if not check(document[key]):
            raise InputError(f"{where}.{key} is not valid: {document[key]!r:.80}.")
    return document


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 4096  # type(): True is an int too


def _is_colour(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(v, float) and math.isfinite(v) for v in value)
    )
