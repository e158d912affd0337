"""Features: what a frozen backbone returned for n images.

`Features` is the only thing that passes from a backbone to a head. Per block, shallow to deep, it
holds a patch map `(n, C, H, W)`, a token `(n, C)` such as a ViT's [CLS], or both (`Block`). With
labels it becomes a `mivhead.support.SupportSet`, with the names of the images a `FeatureTable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util import files
from mivhead.errors import InputError, ModelFileError

FILE_FORMAT = 1
FILE_KEYS = {"format", "kind", "ids", "labels", "backbone", "hashes", "view_rule", "pictures"}
MAX_DIMENSION = 2**20  # values; keeps a forged file from overflowing
LARGE = 2.0**40  # values from 1 / LARGE to LARGE can be squared and summed in float32
MAX_POWER = {"float32": 120, "float64": 1000}  # of two, with a finite inverse
FLOATS = ("float16", "float32", "float64")
AT_ONCE = 64  # images in single precision
_HALF_BITS = np.int32(-0x70002000)  # 0x8FFFE000: what a half fills of a single

Array: TypeAlias = NDArray[Any]


class Features:
    """Features of n images from one or more blocks of a backbone, ordered shallow to deep.

    Parameters
    ----------
    blocks : array, Block, mapping or list of these
        One entry, or a list with one entry per block. An array (of NumPy, or anything that offers
        `__array__` or DLPack, such as a PyTorch tensor; float16, float32 or float64) is read by its
        shape: `(n, C)` is a vector per image, `(n, patches, C)` patch
        vectors (a square number of patches is taken as a grid), `(n, C, H, W)` a patch map. A
        mapping has the keys `map`, `token` or both.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import Features
    >>> f = Features([np.ones((5, 8, 4, 4), np.float16), {"token": np.ones((5, 16))}])
    >>> f
    Features(n=5, block0: map 8x4x4 float16; block1: token 16 float64)
    >>> len(f[[0, 3]])
    2
    """

    def __init__(self, blocks: Any) -> None:
        if isinstance(blocks, Features):
            self.blocks: tuple[Block, ...] = blocks.blocks
            return
        entries = [blocks] if is_array(blocks) or isinstance(blocks, Mapping | Block) else blocks
        if not isinstance(entries, Sequence) or not entries:
            raise InputError(
                "Features need an array or a non-empty list with one entry per block, "
                f"got {_type_and_shape(blocks)}."
            )
        self.blocks = tuple(read_block(entry, f"block{i}") for i, entry in enumerate(entries))
        self._check_counts()

    @classmethod
    def _of(cls, blocks: Iterable[Block]) -> Features:
        """Wrap blocks that are known to be valid."""
        new = cls.__new__(cls)
        new.blocks = tuple(blocks)
        return new

    def _check_counts(self) -> None:
        if len({len(t) for t in self.tensors.values()}) > 1:
            names = [f"{name} {tuple(t.shape)}" for name, t in self.tensors.items()]
            raise InputError(
                "All blocks must hold the same number of images (the first dimension), "
                f"got {', '.join(names)}."
            )

    def __len__(self) -> int:
        return len(self._first)

    @property
    def _first(self) -> Array:
        return next(iter(self.blocks[0].tensors.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """(images, values per image): what scikit-learn's splitters look at."""
        return len(self), sum(math.prod(t.shape[1:]) for t in self.tensors.values())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The widest floating-point type of the parts."""
        return np.result_type(*(t.dtype for t in self.tensors.values()))

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Array]:
        """All parts by name: `block0.map`, `block0.token`, `block1.map`, ..."""
        return {
            f"block{i}.{part}": tensor
            for i, block in enumerate(self.blocks)
            for part, tensor in block.tensors.items()
        }

    def __getitem__(self, index: Any) -> Features:
        """Select images by integer, slice, integer array or mask; always returns Features."""
        if isinstance(index, tuple):  # scikit-learn's X[indices, ...]
            if len(index) != 2 or index[1] is not Ellipsis:
                raise InputError(f"Features are indexed by image only, got {len(index)} indices.")
            index = index[0]
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):  # also ends plain iteration
                raise IndexError(f"image {index} is out of range: there are {len(self)}")
            index = slice(index, index + 1 or None)
        if not isinstance(index, slice):
            index = np.asarray(index)
            if not len(index):
                index = index.astype(np.int64)
        return self._map(lambda t: t[index])

    def to(self, target: Any) -> Features:
        """Convert to another floating-point type.

        Parameters
        ----------
        target : dtype or str
            `float16`, `float32` or `float64`, of NumPy or of PyTorch.

        Returns
        -------
        Features
            Converted; this object is not changed.
        """
        dtype = float_type(target)
        return self._map(lambda t: t.astype(dtype, copy=False))

    @property
    def exponents(self) -> tuple[int, ...]:
        """Per block, the power of two that makes its values safe to square, if divided by it.

        >>> import numpy as np
        >>> Features([np.ones((2, 3)), np.full((2, 3), 1e150)]).exponents
        (0, 499)
        """
        return tuple(_exponent(block) for block in self.blocks)

    def divide(self, exponents: Sequence[int]) -> Features:
        """Divide the values of every block by a power of two, which loses no digit.

        Parameters
        ----------
        exponents : sequence of int
            One per block: a block with exponent e is divided by 2^e.

        Returns
        -------
        Features
        """
        if not any(exponents):
            return self
        if len(exponents) != len(self.blocks) or max(map(abs, exponents)) > max(MAX_POWER.values()):
            raise InputError(f"{self} cannot be divided by the powers of two {list(exponents)}.")
        pairs = zip(self.blocks, exponents, strict=True)
        return Features._of(block.apply(partial(_times, factor=2.0**-n)) for block, n in pairs)

    def _map(self, change: Callable[[Array], Array]) -> Features:
        return Features._of(block.apply(change) for block in self.blocks)

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Per-image shape of every part: `{"block0.map": (112, 14, 14), ...}`."""
        return {name: tuple(t.shape[1:]) for name, t in self.tensors.items()}

    @staticmethod
    def concat(parts: Sequence[Features]) -> Features:
        """Join the images of several Features of one layout.

        Parameters
        ----------
        parts : sequence of Features
            At least one; all of the same layout.

        Returns
        -------
        Features
            The images of all parts, in their order.

        Examples
        --------
        >>> import numpy as np
        >>> len(Features.concat([Features(np.ones((2, 3))), Features(np.ones((4, 3)))]))
        6
        """
        if not parts:
            raise InputError("There is nothing to concatenate.")
        first = parts[0]
        for part in parts[1:]:
            if part.layout != first.layout:
                raise InputError(
                    f"Features of different layouts cannot be joined: {first} and {part}."
                )
        if len(parts) == 1:
            return first
        columns = zip(*(part.blocks for part in parts), strict=True)
        return Features._of(
            Block(**{k: np.concatenate([b.tensors[k] for b in blocks]) for k in blocks[0].tensors})
            for blocks in columns
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Features):
            return NotImplemented
        mine, theirs = self.tensors, other.tensors
        return self is other or (
            mine.keys() == theirs.keys()
            and all(
                t.dtype == theirs[k].dtype and np.array_equal(t, theirs[k]) for k, t in mine.items()
            )
        )

    __hash__ = None  # type: ignore[assignment]  # like an array

    def __repr__(self) -> str:
        return f"Features(n={len(self)}, {_layout_text(self.blocks)})"

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically.

        Parameters
        ----------
        path : str or Path
            The file; it is replaced if it exists.
        """
        write_features_file(path, self.tensors, {})

    @classmethod
    def load(cls, path: str | Path) -> Features:
        """Read a file that `save` or `miv extract` wrote; no code from the file is run.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        Features
        """
        tensors, _ = read_features_file(path)
        return cls.from_tensors({k: v for k, v in tensors.items() if k.startswith("block")})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array]) -> Features:
        """Make Features from tensors named `block{i}.map` and `block{i}.token`.

        Parameters
        ----------
        tensors : mapping of str to array or tensor
            Maps of shape (n, C, H, W) and tokens of shape (n, C).

        Returns
        -------
        Features
        """
        blocks: list[dict[str, Array]] = []
        left = dict(tensors)
        while True:
            names = {part: f"block{len(blocks)}.{part}" for part in ("map", "token")}
            found = {part: left.pop(name) for part, name in names.items() if name in left}
            if not found:
                break
            blocks.append(found)
        if left:
            raise InputError(f"Unknown tensor {sorted(left)[0]!r} among features.")
        return cls(blocks)


def float_type(given: Any) -> np.dtype[Any]:
    """Return the floating-point type that is meant: NumPy's, PyTorch's or its name.

    >>> float_type("float16"), float_type(np.float32)
    (dtype('float16'), dtype('float32'))
    """
    name = str(given).removeprefix("torch.")
    try:
        dtype = np.dtype(name if name in FLOATS else given)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name not in FLOATS:
        raise InputError(f"Features hold float16, float32 or float64, not {given}.")
    return dtype


def write_features_file(
    path: str | Path, tensors: Mapping[str, Array], meta: Mapping[str, Any]
) -> None:
    """Write a features file; `meta` holds what belongs to the features, such as labels."""
    files.write(path, tensors, {"format": FILE_FORMAT, "kind": "features", **meta})


def read_features_file(path: str | Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the tensors and the metadata of a features file."""
    tensors, meta = files.read(path)
    if meta.get("kind") != "features":
        raise ModelFileError(f"{path} does not hold features.")
    files.check_format(path, meta, FILE_FORMAT)
    if unknown := sorted(meta.keys() - FILE_KEYS):
        raise ModelFileError(
            f"{path} is corrupted, or was written by a newer version of mivhead: its key "
            f"{unknown[0]!r} is unknown."
        )
    return tensors, meta


def _layout_text(blocks: Iterable[Block]) -> str:
    def part(name: str, t: Array) -> str:
        return f"{name} {'x'.join(map(str, t.shape[1:]))} {t.dtype}"

    return "; ".join(
        f"block{i}: " + " + ".join(part(k, t) for k, t in block.tensors.items())
        for i, block in enumerate(blocks)
    )


@dataclass(frozen=True, eq=False)
class Block:
    """One block's output: a patch map `(n, C, H, W)`, a token `(n, C)`, or both."""

    map: Array | None = None
    token: Array | None = None

    @property
    def tensors(self) -> dict[str, Array]:
        """The parts that exist, by name."""
        return {k: v for k, v in (("map", self.map), ("token", self.token)) if v is not None}

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return int(next(iter(self.tensors.values())).shape[1])

    def apply(self, change: Callable[[Array], Array]) -> Block:
        """Change every part in the same way."""
        return Block(**{k: change(v) for k, v in self.tensors.items()})


def _times(x: Array, factor: float) -> Array:
    scaled: Array = x * x.dtype.type(factor)
    return scaled


def _exponent(block: Block) -> int:
    tensors = [t for t in block.tensors.values() if t.dtype.name in MAX_POWER and t.size]
    largest = max((float(max(-t.min(), t.max())) for t in tensors), default=0.0)
    if not largest or 1 / LARGE <= largest <= LARGE:
        return 0
    most = min(MAX_POWER[t.dtype.name] for t in tensors)
    return max(-most, min(math.frexp(largest)[1], most))


def is_array(x: object) -> bool:
    """Whether x is an array: of NumPy, or something that can be turned into one at once.

    >>> is_array(np.ones(3)), is_array([1.0, 2.0])
    (True, False)
    """
    convertible = hasattr(x, "__array__") or hasattr(x, "__dlpack__")
    return isinstance(x, np.ndarray) or (convertible and hasattr(x, "ndim"))


def _type_and_shape(x: object) -> str:
    """Type and shape of anything, for errors."""
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def read_block(entry: Any, name: str) -> Block:
    """Read one entry of a list of blocks, which is called `name` in errors."""
    if isinstance(entry, Block):
        entry = entry.tensors
    if isinstance(entry, Mapping):
        if not entry or set(entry) - {"map", "token"}:
            raise InputError(
                f"{name}: a block has the keys 'map' and/or 'token', got {sorted(entry)}."
            )
        parts = {k: read_array(v, f"{name}.{k}") for k, v in entry.items() if v is not None}
    else:
        tensor = read_array(entry, name)
        if tensor.ndim == 2:
            parts = {"token": tensor}
        elif tensor.ndim == 3:
            parts = {"map": _patches_to_map(tensor)}
        else:
            parts = {"map": tensor}
    if not parts:
        raise InputError(f"{name}: a block needs a map, a token or both.")
    for part, ndim, expected in (("map", 4, "(n, C, H, W)"), ("token", 2, "(n, C)")):
        if part in parts and (parts[part].ndim != ndim or 0 in parts[part].shape[1:]):
            raise InputError(
                f"{name}.{part} has shape {tuple(parts[part].shape)}, expected {expected} "
                "with no empty dimension."
            )
    if len({t.shape[1] for t in parts.values()}) > 1:
        shapes = ", ".join(f"{k} {tuple(t.shape)}" for k, t in parts.items())
        raise InputError(f"{name}: map and token must have the same channels, got {shapes}.")
    return Block(**parts)


def read_array(x: Any, name: str) -> Array:
    """Read an array of floating-point numbers of any library; it is called `name` in errors."""
    if not is_array(x):
        raise InputError(f"{name}: expected an array, got {_type_and_shape(x)}.")
    try:
        array = to_numpy(x)
    except (TypeError, ValueError, RuntimeError, BufferError):
        raise InputError(f"{name}: arrays of type {x.dtype} cannot be used.") from None
    if array.dtype.name not in FLOATS:
        raise InputError(f"{name} has type {array.dtype}, expected float16, float32 or float64.")
    if array.ndim not in (2, 3, 4):
        raise InputError(
            f"{name} has shape {array.shape}, expected (n, C), (n, patches, C) or (n, C, H, W)."
        )
    if not is_finite(array):
        bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))[0]
        raise InputError(
            f"{name} of shape {array.shape} holds NaN or infinity (first in image {bad})."
        )
    return array


def to_numpy(x: Any) -> Array:
    """Turn an array of any library into one of NumPy, in the machine's byte order.

    PyTorch's tensors are detached from their graph and copied from their device.
    """
    if hasattr(x, "detach"):
        x = x.detach().cpu()
    array = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def to_single(array: Array) -> NDArray[np.float32]:
    """Convert finite values to single precision; halves 20 times as fast as NumPy's `astype` does.

    >>> to_single(np.array([1.5, -6e-8], np.float16)).dtype
    dtype('float32')
    """
    if array.dtype != np.float16:
        return array.astype(np.float32)
    # The bits of sign, exponent and fraction at their new places, and the exponent's new bias.
    bits = array.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _HALF_BITS
    values = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return values


def mean_patches(map_: Array) -> NDArray[np.float32]:
    """Average maps (n, C, H, W) over their patches, to (n, C) in single precision.

    >>> mean_patches(np.arange(8.0).reshape(1, 2, 2, 2))
    array([[1.5, 5.5]], dtype=float32)
    """
    starts = range(0, max(1, len(map_)), AT_ONCE)
    return np.concatenate([to_single(map_[i : i + AT_ONCE]).mean(axis=(2, 3)) for i in starts])


def is_finite(array: Array) -> bool:
    """Whether an array holds neither NaN nor infinity.

    >>> is_finite(np.ones(3, np.float16)), is_finite(np.array([np.inf]))
    (True, False)
    """
    if not array.size:
        return True
    if array.dtype == np.float16:  # much faster than comparing halves: the bits of the exponent
        return not ((array.view(np.uint16) & 0x7C00) == 0x7C00).any()
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _patches_to_map(patches: Array) -> Array:
    """(n, P, C) to (n, C, s, s) for P = s * s; otherwise (n, C, P, 1), which has no grid."""
    n, count, channels = patches.shape
    side = math.isqrt(count)
    height, width = (side, side) if side * side == count else (count, 1)
    return patches.transpose(0, 2, 1).reshape(n, channels, height, width)


def blocks_of(layout: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the names of the blocks in a layout.

    >>> blocks_of({"block0.map": (8, 2, 2), "block0.token": (8,), "block1.token": (8,)})
    ['block0', 'block1']
    """
    return list(dict.fromkeys(name.partition(".")[0] for name in layout))


def layout_to_json(layout: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Write a layout of features as plain values."""
    return {name: list(shape) for name, shape in layout.items()}


def read_layout(document: Any) -> Features:
    """Check a stored layout, and return it as Features without images.

    >>> read_layout({"block0.map": [8, 2, 2]})
    Features(n=0, block0: map 8x2x2 float32)
    """
    if not isinstance(document, Mapping):
        raise InputError(f"config.layout must be an object, got {document!r:.80}.")
    for name, shape in document.items():
        integers = isinstance(shape, list) and all(type(size) is int for size in shape)
        if not integers or len(shape) > 3 or not all(0 < size <= MAX_DIMENSION for size in shape):
            raise InputError(f"config.layout.{name} is not valid: {shape!r:.80}.")
    # Features check the names and the numbers of dimensions.
    return Features.from_tensors({k: np.empty((0, *v), np.float32) for k, v in document.items()})


_VIEWS = "views."
_VIEW_OF = "view_of"
_PICTURES = "pictures"


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Features with the names, labels and views of the images.

    `miv extract` writes it and `miv fit` reads it.

    Parameters
    ----------
    features : Features
        One row per image.
    ids : tuple of str
        A name per image, such as its relative path.
    labels : tuple of str or None, default=None
        A label per image.
    views : Features or None, default=None
        Features of augmented views.
    view_of : array of int or None, default=None
        For each view, the row of the image that it was made from.
    backbone : dict or None, default=None
        Identity of the backbone as JSON, if it is known.
    hashes : tuple of str or None, default=None
        SHA-256 of the content of each image.
    pictures : tuple of bytes or None, default=None
        Each image as the backbone sees it: a small square, in a lossless format.
    view_rule : dict or None, default=None
        How the views were made: a `mivhead.images.augmentation.ViewRule` as JSON.

    Examples
    --------
    >>> import numpy as np
    >>> table = FeatureTable(Features(np.ones((2, 8))), ids=("a.jpg", "b.jpg"))
    >>> len(table)
    2
    """

    features: Features
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    views: Features | None = None
    view_of: NDArray[np.int64] | None = None
    backbone: dict[str, Any] | None = None
    hashes: tuple[str, ...] | None = None
    pictures: tuple[bytes, ...] | None = None
    view_rule: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "labels", "hashes", "pictures"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.features):
                raise InputError(f"{len(self.features)} images, but {len(column)} {name}.")
        if self.views is None or self.view_of is None:
            if self.views is not None or self.view_of is not None:
                raise InputError("views and view_of must be given together.")
            return
        _check_rows(np.asarray(self.view_of), len(self.views), len(self.features))
        if self.views.layout != self.features.layout:
            raise InputError(f"The views {self.views} do not fit the images {self.features}.")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def nbytes(self) -> int:
        """Size in memory, views included."""
        return self.features.nbytes + (0 if self.views is None else self.views.nbytes)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically.

        Parameters
        ----------
        path : str or Path
            The file; it is replaced if it exists.
        """
        tensors = dict(self.features.tensors)
        if self.views is not None and self.view_of is not None:
            tensors |= {_VIEWS + name: tensor for name, tensor in self.views.tensors.items()}
            tensors[_VIEW_OF] = np.asarray(self.view_of)
        meta: dict[str, Any] = {
            "ids": self.ids,
            "labels": self.labels,
            "backbone": self.backbone,
        }
        for name in ("hashes", "view_rule"):
            if getattr(self, name) is not None:
                meta[name] = getattr(self, name)
        if self.pictures is not None:
            tensors[_PICTURES] = join_bytes(self.pictures)
            meta["pictures"] = [len(each) for each in self.pictures]
        write_features_file(path, tensors, meta)

    @classmethod
    def load(cls, path: str | Path) -> FeatureTable:
        """Read a file that `save` wrote; no code from the file is run.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        FeatureTable
        """
        tensors, meta = read_features_file(path)
        try:
            view_of = tensors.pop(_VIEW_OF, None)
            pictures = tensors.pop(_PICTURES, None)
            views = {k.removeprefix(_VIEWS): tensors.pop(k) for k in list(tensors) if _VIEWS in k}
            features = Features.from_tensors(tensors)
            default_ids = [str(row) for row in range(len(features))]
            return cls(
                features,
                _strings(meta.get("ids", default_ids), "ids"),
                None if meta.get("labels") is None else _strings(meta["labels"], "labels"),
                Features.from_tensors(views) if views else None,
                view_of,
                meta.get("backbone"),
                None if meta.get("hashes") is None else _strings(meta["hashes"], "hashes"),
                None if pictures is None else _bytes(pictures, meta.get("pictures")),
                meta.get("view_rule"),
            )
        except InputError as error:
            raise ModelFileError(f"{path} is corrupted: {error}") from error


def _strings(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InputError(f"{name} must be a list of strings.")
    return tuple(value)


def join_bytes(parts: Iterable[bytes]) -> NDArray[np.uint8]:
    """Join files, such as small pictures, to one array."""
    return np.frombuffer(b"".join(parts), np.uint8)


def split_bytes(data: Array, lengths: Iterable[int]) -> list[bytes]:
    """Split what `join_bytes` joined; raise an error if the lengths do not fit.

    >>> split_bytes(join_bytes([b"cat", b"", b"dog"]), [3, 0, 3])
    [b'cat', b'', b'dog']
    """
    ends = np.cumsum([0, *lengths]).tolist()
    if data.dtype != np.uint8 or data.shape != (ends[-1],) or sorted(ends) != ends:
        raise InputError("The pictures do not fit their lengths.")
    joined = data.tobytes()
    return [joined[start:end] for start, end in pairwise(ends)]


def _bytes(data: Array, lengths: Any) -> tuple[bytes, ...]:
    if not isinstance(lengths, list) or not all(type(each) is int for each in lengths):
        raise InputError("pictures must be a list of lengths.")
    return tuple(split_bytes(data, lengths))


def _check_rows(rows: Array, views: int, images: int) -> None:
    """Raise an error if rows do not name the image of each view."""
    if rows.shape != (views,) or (views and rows.dtype.kind not in "iu"):
        raise InputError(f"view_of must be a list of integers, one for each of {views} views.")
    if len(rows) and not (rows.min() >= 0 and rows.max() < images):
        raise InputError(f"view_of must hold rows 0 to {images - 1}.")
