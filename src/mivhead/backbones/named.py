"""Backbones that a file names: loaded by that name, unless it is an address.

A model file may come from anyone. If it could name an address to which images are then sent,
loading it would not be safe: whoever wants that gives the address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, Identity
from mivhead.backbones.preprocessing import ImageLike
from mivhead.errors import InputError, NotAvailableError
from mivhead.preset import BlockPreset, Preset


def named_by_file(identity: Identity) -> str | Backbone:
    """Return what to use for the backbone of a file: its name, or one that sends nothing.

    >>> from mivhead.preset import Preprocessing
    >>> named_by_file(Identity("resnet50", "0" * 64, Preprocessing(), ("layer4",)))
    'resnet50'
    """
    return Unasked(identity) if "://" in identity.name else identity.name


def expected_preset(identity: Identity) -> Preset:
    """Make a backbone give the features a model expects, even if its suggested preset changed."""
    blocks = tuple(BlockPreset() for _ in identity.taps)  # the head has its own settings already
    return Preset(identity.taps, blocks, identity.preprocessing)


def backbone_of(
    given: str | Backbone,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | None,
) -> Backbone:
    """Load a backbone by name; one of the user's own is taken as it is."""
    if isinstance(given, str):
        return load_backbone(given, weights=weights, preset=preset, device=device)
    if weights is not None:
        raise InputError("weights are for a backbone by name; yours has its own already.")
    return given


def check_same(found: Identity, expected: Identity) -> None:
    """Raise an error if a backbone is not the one that a model was trained on."""
    if found != expected:
        raise NotAvailableError(
            f"The model was trained on the backbone {expected.name!r} (weights "
            f"{expected.weights[:12]}...), but {found.name!r} (weights {found.weights[:12]}...) "
            "with its taps and preprocessing is another: give the right one with "
            "`mivhead.load(path, backbone=..., weights=...)`, or with --backbone and --weights."
        )


def check_origin(backbone: Mapping[str, Any] | None, expected: Identity) -> None:
    """Raise an error if features name another backbone than the expected one as their origin."""
    if backbone is not None and Identity.from_json(backbone) != expected:
        raise InputError(
            f"The features come from the backbone {backbone.get('name')!r} with other weights, "
            f"taps or preprocessing than {expected.name!r} has here."
        )


class Unasked:
    """Stands for a service that nobody but a file has asked for."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.preset = expected_preset(identity)

    def extract(self, images: Sequence[ImageLike]) -> NoReturn:
        """Refuse to send the images."""
        raise NotAvailableError(
            f"The file names the service {self.identity.name} as its backbone, but a file alone "
            f"cannot have your {len(images)} images sent there: if you want that, give its address "
            "yourself, with `mivhead.load(path, backbone=...)` or --backbone."
        )
