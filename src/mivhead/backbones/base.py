"""What all backbones share: protocol and identity, from images to the network and to `Features`.

An adapter is any class with the three members of `Backbone`: there is no base class. Below are also
the backbones that a model file may name.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from mivhead._util.schema import from_json, to_json
from mivhead._util.threads import shared_cores
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:  # most backbones run without PyTorch
    import torch

    from mivhead.features import Features

MAX_NAME = 1000  # characters of a backbone's name in a file
MAX_PREFIX = 5  # [CLS], or [CLS] and [DIST], or [CLS] and four registers

# What a backbone takes: `mivhead.images.decoding.load_image` turns files and bytes into it.
DecodedImage: TypeAlias = "Image.Image | np.ndarray[Any, Any]"
# A block: "map" (n, C, H, W) and/or "token" (n, C), both arrays or both tensors
Parts: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Identity:
    """What determines the features of a backbone: equal identities give equal features.

    Parameters
    ----------
    weights : str
        SHA-256 of the weights, 64 hexadecimal digits.
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
            raise InputError(f"weights of an Identity must be a SHA-256, got {self.weights!r}.")

    @property
    def key(self) -> str:
        """A hash that is the same for equal identities in every process."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        return dict(to_json(self))

    @classmethod
    def from_json(cls, document: Any) -> Identity:
        """Read what `as_json` wrote; raise an `InputError` for anything else."""
        identity = from_json(cls, document, "backbone")
        if not 0 < len(identity.name) <= MAX_NAME or not identity.name.isprintable():
            raise InputError(f"the name of the backbone is not valid: {identity.name!r:.80}.")
        return identity


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

        Images are PIL images or uint8 arrays (H, W, 3). The values are rounded to the storage type
        (float16 unless the backbone was loaded with another `dtype`), so that cached features equal
        freshly extracted ones. In a batch with other images, the last digit may differ.
        """
        ...


class LazyBackbone:
    """A backbone that loads its network on first use: never, if all features are in the cache."""

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
        self._loaded = self._loaded or self._load()
        return self._loaded


def extract_pictures(backbone: Backbone, pictures: Sequence[DecodedImage]) -> Features:
    """Pass one batch of decoded images through the backbone, without a cache."""
    with shared_cores():
        return backbone.extract(pictures)


def default_device(device: str | torch.device | None) -> torch.device:
    """Return the requested device, or by default a GPU if there is one."""
    import torch

    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def storage_type(dtype: DTypeLike | torch.dtype) -> np.dtype[Any]:
    """Return the type that features are rounded to, given as NumPy or PyTorch name it."""
    name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    if name not in ("float16", "float32", "float64"):
        raise InputError(f"dtype must be float16, float32 or float64, got {str(dtype)!r}.")
    return np.dtype(name)


# Into the network: an image is resized directly to R x R, bicubic, without cropping.


def preprocess(images: Sequence[DecodedImage], preprocessing: Preprocessing) -> torch.Tensor:
    """Resize, scale and normalise images.

    An image that already has the size R x R is used unchanged. The result is `(n, 3, R, R)`,
    float32, in channels-last memory.

    >>> import numpy as np
    >>> white = np.full((30, 40, 3), 255, np.uint8)
    >>> x = preprocess([white], Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3))
    >>> x.shape, x.max().item()
    (torch.Size([1, 3, 8, 8]), 1.0)
    """
    import torch

    return torch.from_numpy(normalise(images, preprocessing)).permute(0, 3, 1, 2)


def normalise(
    images: Sequence[DecodedImage], preprocessing: Preprocessing, *, channels_first: bool = False
) -> NDArray[np.float32]:
    """Resize, scale and normalise images to an array `(n, R, R, 3)` or `(n, 3, R, R)`."""
    pixels = np.stack([np.asarray(picture) for picture in to_pictures(images, preprocessing.size)])
    mean = np.asarray(preprocessing.mean, np.float32)
    std = np.asarray(preprocessing.std, np.float32)
    if channels_first:
        pixels = pixels.transpose(0, 3, 1, 2)
        mean, std = mean[:, None, None], std[:, None, None]
    x = pixels.astype(np.float32, order="C")
    x /= np.float32(255)
    x -= mean
    x /= std
    return x


def to_pictures(images: Sequence[DecodedImage], size: int) -> list[Image.Image]:
    """Return at least one image as RGB pictures of `size` x `size`."""
    if not len(images):
        raise InputError("There are no images: give at least one.")
    return [to_picture(image, i, size) for i, image in enumerate(images)]


def to_picture(image: DecodedImage, position: int, size: int) -> Image.Image:
    """Return an image as an RGB picture of `size` x `size`; errors name it by its position."""
    if not isinstance(image, Image.Image):
        shape: tuple[int, ...] = getattr(image, "shape", ())
        dtype = getattr(image, "dtype", type(image).__name__)
        fits = len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)
        if dtype != np.uint8 or not fits or 0 in shape or not isinstance(image, np.ndarray):
            raise InputError(
                f"Image {position} is {dtype} of shape {tuple(shape)}, expected a PIL image, or "
                "uint8 of shape (height, width, 3) or (height, width)."
            )
        image = Image.fromarray(image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return image


# Out of the network: outputs of tapped layers become the blocks of `Features`.


def check_taps(backbone: str, taps: Iterable[str], valid: Sequence[str]) -> None:
    """Raise an error that names the first unknown tap and some similar ones."""
    for tap in taps:
        if tap not in valid:
            nearest = difflib.get_close_matches(tap, valid, n=3) or valid[-3:]
            raise InputError(
                f"{backbone} has no tap {tap!r}; similar names are {', '.join(nearest)}."
            )


def read_output(output: NDArray[Any] | torch.Tensor, tap: str) -> Parts:
    """Turn the output of a tapped layer, an array or a tensor, into the parts of a block.

    - `(n, C)` is a vector per image;
    - `(n, C, H, W)` and, as images are square, `(n, H, H, C)` are patch maps;
    - `(n, tokens, C)` is a square grid of patches after up to five prefix tokens, the first of
      which is [CLS]; if there is no such grid, the tokens are patches without neighbours.
    """
    if output.ndim == 2:
        return {"token": output}
    if output.ndim == 4:
        _, first, second, third = output.shape
        channels_last = first == second != third
        return {"map": output.swapaxes(1, 3).swapaxes(2, 3) if channels_last else output}
    if output.ndim != 3:
        raise InputError(f"The tap {tap!r} has the shape {tuple(output.shape)}: tap another layer.")
    n, count, channels = output.shape
    side = math.isqrt(count)
    prefix = count - side * side
    if prefix > MAX_PREFIX or side < 2:
        return {"map": output.swapaxes(1, 2)[..., None]}  # (n, C, tokens, 1): no grid
    grid = output[:, prefix:].swapaxes(1, 2).reshape(n, channels, side, side)
    return {"map": grid, "token": output[:, 0]} if prefix else {"map": grid}


def join(chunks: Sequence[Sequence[Parts]], dtype: np.dtype[Any]) -> Features:
    """Concatenate the blocks of consecutive chunks of images, on the CPU, rounded to `dtype`."""
    from mivhead.features import Features

    def concat(parts: Sequence[Any]) -> NDArray[Any]:
        arrays = [p if isinstance(p, np.ndarray) else p.numpy(force=True) for p in parts]
        return np.concatenate(arrays, dtype=dtype)

    with np.errstate(over="ignore"):  # `Features` refuse infinity
        blocks = [
            {name: concat([chunk[name] for chunk in block]) for name in block[0]}
            for block in zip(*chunks, strict=True)
        ]
    try:
        return Features(blocks)
    except InputError as error:
        if dtype == np.float16 and "infinity" in str(error):
            raise InputError(
                f"{error} If the network itself is correct, its values are too large for float16: "
                'load it with dtype="float32".'
            ) from None
        raise


# A model file may come from anyone, so it names only what is safe to load: it cannot have a folder
# looked into, images sent to a service, code run, or anybody's model of the hub downloaded.

_TIMM = re.compile(r"timm:\w[\w.-]*", re.ASCII)


def may_be_named_by_file(name: str) -> bool:
    """Return whether a file of unknown origin may name this backbone."""
    from mivhead.backbones import list_backbones
    from mivhead.backbones.hub import find, is_repository

    scheme, _, place = name.partition(":")
    if scheme == "hf-onnx":  # anybody's: only if the user has downloaded it
        return is_repository(place) and find(place, "config.json") is not None
    if scheme == "open_clip":
        return is_repository(place)
    return name in list_backbones() or (_TIMM.fullmatch(name) is not None and ".." not in name)


def named_by_file(identity: Identity) -> str | Backbone:
    """Return the backbone to use for a model file: its name, or a stand-in that refuses to run."""
    return identity.name if may_be_named_by_file(identity.name) else UnconfirmedBackbone(identity)


class UnconfirmedBackbone:
    """Stands for a file, a service, code or a download that only a model file has named."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.preset = expected_preset(identity)

    def extract(self, images: Sequence[DecodedImage]) -> NoReturn:
        """Refuse to extract features."""
        raise NotAvailableError(
            f"The file names {self.identity.name} as its backbone, but a file alone must not open "
            f"other files, run code or send your {len(images)} images elsewhere: if you trust it, "
            "name the backbone yourself, with `mivhead.load(path, backbone=...)` or --backbone."
        )


def expected_preset(identity: Identity) -> Preset:
    """Return a preset with the taps and preprocessing of a model; its head has its own settings."""
    blocks = (BlockPreset(),) * len(identity.taps)
    return Preset(identity.taps, blocks, identity.preprocessing)


def check_same(loaded: Identity, expected: Identity) -> None:
    """Raise an error if a backbone is not the one that a model was trained on."""
    if loaded != expected:
        raise NotAvailableError(
            f"The model was trained on the backbone {expected.name!r}, and {loaded.name!r} has "
            "other weights, taps or preprocessing: give the right --backbone and --weights."
        )


def check_origin(backbone: Mapping[str, Any] | None, expected: Identity) -> None:
    """Raise an error if features were extracted by another backbone than the expected one."""
    if backbone is not None and Identity.from_json(backbone) != expected:
        raise InputError(
            f"The features come from the backbone {backbone.get('name')!r}, and {expected.name!r} "
            "has other weights, taps or preprocessing: extract them with the model's backbone."
        )
