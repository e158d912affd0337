"""The protocol that every backbone follows: images in, `Features` out.

A backbone also has an identity, which is stored in model files and cache keys, and a preset, which
suggests settings for the head. Nothing else is required: an adapter is any class with these three
members, and there is no base class to inherit from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from mivhead._util.schema import from_json, to_json
from mivhead.backbones.preprocessing import DecodedImage
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:  # most backbones run without PyTorch
    import torch

    from mivhead.backbones.module import ModuleBackbone
    from mivhead.features import Features


@dataclass(frozen=True)
class Identity:
    """What determines the features of a backbone: equal identities give equal features.

    Parameters
    ----------
    name : str
        The name that the backbone is loaded by.
    weights : str
        SHA-256 of the weights, 64 hexadecimal digits.
    preprocessing : Preprocessing
        How an image becomes the backbone's input.
    taps : tuple of str
        The blocks whose outputs are the features, shallow to deep.

    Examples
    --------
    >>> from mivhead.backbones.preset import Preprocessing
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
                "weights of an Identity must be a SHA-256 (64 hexadecimal digits), "
                f"got {self.weights!r}."
            )

    @property
    def key(self) -> str:
        """A hash that is the same for equal identities in every process."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document.

        Returns
        -------
        dict
            What `from_json` reads.
        """
        return to_json(self)

    @classmethod
    def from_json(cls, document: Any) -> Identity:
        """Read what `as_json` wrote.

        Parameters
        ----------
        document : dict
            Parsed JSON.

        Returns
        -------
        Identity

        Raises
        ------
        InputError
            If the document is anything else.
        """
        found = from_json(cls, document, "backbone")
        if not 0 < len(found.name) <= MAX_NAME or not found.name.isprintable():
            raise InputError(f"the name of the backbone is not valid: {found.name!r:.80}.")
        return found


MAX_NAME = 1000  # characters of a backbone's name in a file


@runtime_checkable
class Backbone(Protocol):
    """A frozen image model, seen from outside."""

    @property
    def identity(self) -> Identity:
        """What it is; stored in model files and cache keys."""
        ...

    @property
    def preset(self) -> Preset:
        """The settings it suggests for the head."""
        ...

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order.

        The values are rounded to the storage type (float16 unless the backbone was loaded with
        another `dtype`), so that cached features equal freshly extracted ones. Matrix products of
        other sizes round differently: in a batch with other images, the last digit may differ.

        Parameters
        ----------
        images : sequence of PIL.Image.Image or uint8 arrays of shape (H, W, 3)
            Decoded RGB images of any size.

        Returns
        -------
        Features
            One row per image.
        """
        ...


class LazyBackbone:
    """A backbone whose identity is known before its network is loaded.

    If all features are in the cache, the weights are never read and the library is never imported,
    which would take longer than training on a few images. `identity` and `dtype` are those that the
    loaded backbone will have.
    """

    def __init__(
        self, identity: Identity, preset: Preset, dtype: np.dtype[Any], load: Callable[[], Backbone]
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self._load = load
        self._loaded: Backbone | None = None

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        return self.loaded().extract(images)

    def loaded(self) -> Backbone:
        """Load the backbone on the first call, and return it."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded


def default_device(device: str | torch.device | None) -> torch.device:
    """Return the requested device, or by default a GPU if there is one."""
    import torch

    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def storage_type(dtype: DTypeLike | torch.dtype) -> np.dtype[Any]:
    """Return the type that features are rounded to, given as NumPy or PyTorch name it.

    >>> storage_type("float16")
    dtype('float16')
    """
    name = str(dtype).removeprefix("torch.")  # of PyTorch's types
    with suppress(TypeError):
        name = np.dtype(dtype).name  # type: ignore[arg-type]  # PyTorch's types are not NumPy's
    if name not in ("float16", "float32", "float64"):
        raise InputError(f"dtype must be float16, float32 or float64, got {str(dtype)!r}.")
    return np.dtype(name)


def module_of(backbone: Backbone) -> ModuleBackbone | None:
    """Return a backbone in PyTorch, so that it can be tuned or traced; None if it cannot be had.

    A `ModuleBackbone` is returned as it is. One that runs elsewhere, but has the same network as a
    PyTorch module, has a method `as_module` that loads it.
    """
    found: Any = backbone
    while isinstance(found, LazyBackbone):
        found = found.loaded()
    if hasattr(found, "as_module"):
        found = found.as_module()
    module: ModuleBackbone | None = found if hasattr(found, "copy_to_tune") else None
    return module


# The backbone of a model file. A file may come from anyone, so its backbone is loaded by name only
# where loading a name is safe: no file can make mivhead send images to a service, run code, or
# download what anybody may have put on the hub.

_SAFE_PREFIXES = ("timm:", "open_clip:", "hf:", "hf-onnx:")
_ANYBODYS = ("hf:", "hf-onnx:")  # repositories of the hub; the others know theirs by name


def may_be_named_by_file(name: str, *, paths: bool = False) -> bool:
    """Return whether loading this name is safe: it is neither code, nor an address, nor elsewhere.

    `paths` tells whether it may be in another folder; on another computer it may never be.

    >>> may_be_named_by_file("timm:resnet50"), may_be_named_by_file("my.onnx")
    (True, True)
    >>> any(map(may_be_named_by_file, ("my.py:net", "https://host/v1", "/home/me/my.onnx")))
    False
    >>> may_be_named_by_file("nets/my.onnx", paths=True), may_be_named_by_file("//host/my.onnx")
    (True, False)
    """
    from mivhead.backbones import hub, split_names

    for each in split_names(name) or [name]:  # of several backbones, or of one
        public = each.startswith(_SAFE_PREFIXES)
        place = each.partition(":")[2] if public else each
        if each.startswith(_ANYBODYS) and hub.is_repository(place):
            if not Path(place).is_dir() and hub.find(place, "config.json") is None:
                return False
            continue
        is_share = len(place) > 1 and set(place[:2]) <= set("/\\")
        is_path = bool(set(place) & set("/\\")) and not public
        if is_share or (is_path and not paths) or (":" in each and not public):
            return False
    return True


def named_by_file(identity: Identity) -> str | Backbone:
    """Return the backbone to use for a model file: its name, or a stand-in that refuses to run.

    >>> from mivhead.backbones.preset import Preprocessing
    >>> named_by_file(Identity("resnet50", "0" * 64, Preprocessing(), ("layer4",)))
    'resnet50'
    """
    return identity.name if may_be_named_by_file(identity.name) else UnconfirmedBackbone(identity)


def expected_preset(identity: Identity) -> Preset:
    """Return a preset with the taps and preprocessing that a model was trained on.

    With it a backbone gives the same features even if its suggested preset has changed since.
    """
    blocks = tuple(BlockPreset() for _ in identity.taps)  # the fitted head has its own settings
    return Preset(identity.taps, blocks, identity.preprocessing)


def check_same(found: Identity, expected: Identity) -> None:
    """Raise an error if a backbone is not the one that a model was trained on."""
    if found != expected:
        raise NotAvailableError(
            f"The model was trained on the backbone {expected.name!r} (weights "
            f"{expected.weights[:12]}...), but {found.name!r} (weights {found.weights[:12]}...) "
            "has other weights, taps or preprocessing: pass the right one with "
            "`mivhead.load(path, backbone=..., weights=...)`, or with --backbone and --weights."
        )


def check_origin(backbone: Mapping[str, Any] | None, expected: Identity) -> None:
    """Raise an error if features were extracted by another backbone than the expected one."""
    if backbone is not None and Identity.from_json(backbone) != expected:
        raise InputError(
            f"The features come from the backbone {backbone.get('name')!r} with other weights, "
            f"taps or preprocessing than {expected.name!r} has here: extract the features with the "
            "model's backbone."
        )


class UnconfirmedBackbone:
    """Stands for a service, code or a download that only a model file has named."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.preset = expected_preset(identity)

    def extract(self, images: Sequence[DecodedImage]) -> NoReturn:
        """Refuse to extract features."""
        raise NotAvailableError(
            f"The file names {self.identity.name} as its backbone, but a file alone must not send "
            f"your {len(images)} images to a service, run code or download a model: if you trust "
            "it, name the backbone yourself, with `mivhead.load(path, backbone=...)` or --backbone."
        )
