"""Features: what a frozen backbone returned for n images, and what a classifier is fitted to.

`Features` is the only thing that passes from a backbone to a head. Per block, shallow to deep, it
holds a patch map `(n, C, H, W)`, a token `(n, C)` such as a ViT's [CLS], or both (`Block`). With
the names of the images it is a `FeatureTable`, with labels, ordered by class, a `SupportSet`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead._util import files
from mivhead._util.estimator import read_labels
from mivhead._util.schema import from_json, to_json
from mivhead.errors import InputError, ModelFileError, check_no_missing

FILE_FORMAT = 1
COLUMNS = ("ids", "labels", "hashes", "pictures")  # of a table, with an entry per image
LARGEST = 1e12  # value: can be squared and summed in float32
SMALLEST = 1e-8  # largest value of a block that lengths of vectors, at least 1e-12, do not distort
FLOATS = ("float16", "float32", "float64")
AT_ONCE = 64  # images in single precision
_HALF_BITS = np.int32(-0x70002000)  # 0x8FFFE000: what a half fills of a single

Array: TypeAlias = NDArray[Any]


class Features:
    """Features of n images from one or more blocks of a backbone, ordered shallow to deep.

    Parameters
    ----------
    blocks : array, Block, mapping or list of these
        One entry, or a list with one entry per block. An array of floats, of NumPy, PyTorch or
        another library, is read by its shape: `(n, C)` is a vector per image, `(n, patches, C)`
        patch vectors (a square number is taken as a grid), `(n, C, H, W)` a patch map. A mapping
        has the keys `map`, `token` or both.

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
                f"got {type(blocks).__name__}."
            )
        self.blocks = tuple(read_block(entry, f"block{i}") for i, entry in enumerate(entries))
        if len({len(t) for t in self.tensors.values()}) > 1:
            shapes = {name: tuple(t.shape) for name, t in self.tensors.items()}
            raise InputError(f"All blocks must hold the same number of images, got {shapes}.")

    @classmethod
    def _of(cls, blocks: Iterable[Block]) -> Features:
        """Wrap blocks that are known to be valid."""
        new = cls.__new__(cls)
        new.blocks = tuple(blocks)
        return new

    def __len__(self) -> int:
        return len(next(iter(self.blocks[0].tensors.values())))

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
        if isinstance(index, tuple) and len(index) == 2 and index[1] is Ellipsis:
            index = index[0]  # scikit-learn's X[indices, ...]
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):  # also ends plain iteration
                raise IndexError(f"image {index} is out of range: there are {len(self)}")
            index = slice(index, index + 1 or None)
        if not isinstance(index, slice):
            index = np.asarray(index)
            if not len(index):
                index = index.astype(np.int64)
        return Features._of(
            Block(**{part: t[index] for part, t in block.tensors.items()}) for block in self.blocks
        )

    def to(self, target: Any) -> Features:
        """Convert to `float16`, `float32` or `float64`, of NumPy or of PyTorch."""
        dtype = str(np.dtype(target) if isinstance(target, type) else target)
        dtype = dtype.removeprefix("torch.")
        if dtype not in FLOATS:
            raise InputError(f"Features hold float16, float32 or float64, not {target}.")
        return Features._of(
            Block(**{part: t.astype(dtype, copy=False) for part, t in block.tensors.items()})
            for block in self.blocks
        )

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Per-image shape of every part: `{"block0.map": (112, 14, 14), ...}`."""
        return {name: tuple(t.shape[1:]) for name, t in self.tensors.items()}

    @staticmethod
    def concat(parts: Sequence[Features]) -> Features:
        """Join the images of several Features of one layout."""
        if not parts:
            raise InputError("There is nothing to concatenate.")
        first = parts[0]
        for part in parts[1:]:
            if part.layout != first.layout:
                raise InputError(f"Features of two layouts cannot be joined: {first}, {part}.")
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
        texts = (
            " + ".join(
                f"{part} {'x'.join(map(str, t.shape[1:]))} {t.dtype}"
                for part, t in block.tensors.items()
            )
            for block in self.blocks
        )
        blocks = "; ".join(f"block{i}: {text}" for i, text in enumerate(texts))
        return f"Features(n={len(self)}, {blocks})"

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        files.write(path, self.tensors, {"format": FILE_FORMAT, "kind": "features"})

    @classmethod
    def load(cls, path: str | Path) -> Features:
        """Read a file that `save` or `miv extract` wrote; no code from the file is run."""
        return FeatureTable.load(path).features

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array]) -> Features:
        """Make Features from tensors named `block{i}.map` and `block{i}.token`."""
        blocks: list[dict[str, Array]] = []
        left = dict(tensors)
        while True:
            names = {part: f"block{len(blocks)}.{part}" for part in ("map", "token")}
            block = {part: left.pop(name) for part, name in names.items() if name in left}
            if not block:
                break
            blocks.append(block)
        if left:
            raise InputError(f"Unknown tensor {sorted(left)[0]!r} among features.")
        return cls(blocks)


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


def is_array(x: object) -> bool:
    """Whether x is an array: of NumPy, or something that can be turned into one at once."""
    convertible = hasattr(x, "__array__") or hasattr(x, "__dlpack__")
    return isinstance(x, np.ndarray) or (convertible and hasattr(x, "ndim"))


def read_block(entry: Any, name: str) -> Block:
    """Read one entry of a list of blocks, which is called `name` in errors."""
    if isinstance(entry, Block):
        entry = entry.tensors
    if isinstance(entry, Mapping):
        if not entry or set(entry) - {"map", "token"}:
            raise InputError(f"{name}: a block has a map, a token or both, not {sorted(entry)}.")
        parts = {k: read_array(v, f"{name}.{k}") for k, v in entry.items()}
    else:
        tensor = read_array(entry, name)
        if tensor.ndim == 2:
            parts = {"token": tensor}
        elif tensor.ndim == 3:
            parts = {"map": _patches_to_map(tensor)}
        else:
            parts = {"map": tensor}
    for part, ndim, expected in (("map", 4, "(n, C, H, W)"), ("token", 2, "(n, C)")):
        if part in parts and (parts[part].ndim != ndim or 0 in parts[part].shape[1:]):
            raise InputError(
                f"{name}.{part} has shape {tuple(parts[part].shape)}, expected {expected} "
                "with no empty dimension."
            )
    _, channels, height, width = parts["map"].shape if "map" in parts else (0, 0, 0, 0)
    if channels == height < width:
        raise InputError(
            f"{name} of shape {parts['map'].shape} seems to have its channels last: bring them "
            "forward, to (n, C, H, W), with `numpy.moveaxis(maps, -1, 1)`."
        )
    if len({t.shape[1] for t in parts.values()}) > 1:
        shapes = ", ".join(f"{k} {tuple(t.shape)}" for k, t in parts.items())
        raise InputError(f"{name}: map and token must have the same channels, got {shapes}.")
    return Block(**parts)


def read_array(x: Any, name: str) -> Array:
    """Read an array of floating-point numbers of any library; it is called `name` in errors.

    PyTorch's tensors are detached from their graph and copied from their device.
    """
    if not is_array(x):
        raise InputError(f"{name}: expected an array, got {type(x).__name__}.")
    try:
        x = x.detach().cpu() if hasattr(x, "detach") else x
        array = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    except (TypeError, ValueError, RuntimeError, BufferError):
        raise InputError(f"{name}: arrays of type {x.dtype} cannot be used.") from None
    if array.dtype.name not in FLOATS:
        raise InputError(f"{name} has type {array.dtype}, expected float16, float32 or float64.")
    if array.ndim not in (2, 3, 4):
        raise InputError(
            f"{name} has shape {array.shape}, expected (n, C), (n, patches, C) or (n, C, H, W)."
        )
    if not is_usable(array):
        usable = (np.abs(array.astype(np.float64)) <= LARGEST).reshape(len(array), -1).all(axis=1)
        raise InputError(
            f"{name} of shape {array.shape} holds NaN, infinity or values beyond {LARGEST:g} "
            f"(first in image {int(usable.argmin())})."
        )
    return array


def to_single(array: Array) -> NDArray[np.float32]:
    """Convert finite values to single precision; halves 20 times as fast as NumPy's `astype`."""
    if array.dtype != np.float16:
        return array.astype(np.float32)
    # The bits of sign, exponent and fraction at their new places, and the exponent's new bias.
    bits = array.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _HALF_BITS
    values = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return values


def image_vectors(block: Block) -> NDArray[np.float32]:
    """One vector (n, C) per image in single precision: the token, or else the mean patch."""
    if block.token is not None:
        return to_single(block.token)
    assert block.map is not None
    starts = range(0, max(1, len(block.map)), AT_ONCE)
    parts = [block.map[start : start + AT_ONCE] for start in starts]
    return np.concatenate([to_single(part).mean(axis=(2, 3)) for part in parts])


def is_usable(array: Array) -> bool:
    """Whether an array holds no NaN, no infinity and no value beyond `LARGEST`."""
    if not array.size:
        return True
    if array.dtype == np.float16:  # much faster than comparing halves: the bits of the exponent
        return not ((array.view(np.uint16) & 0x7C00) == 0x7C00).any()
    return bool(array.min() >= -LARGEST and array.max() <= LARGEST)


def _patches_to_map(patches: Array) -> Array:
    """(n, P, C) to (n, C, s, s) for P = s * s; otherwise (n, C, P, 1), which has no grid."""
    n, count, channels = patches.shape
    side = math.isqrt(count)
    height, width = (side, side) if side * side == count else (count, 1)
    return patches.transpose(0, 2, 1).reshape(n, channels, height, width)


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
        for name in COLUMNS:
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

    def __getitem__(self, rows: slice | Sequence[int]) -> FeatureTable:
        """Return some rows, without views.

        >>> table = FeatureTable(Features(np.ones((3, 8))), ids=("a", "b", "c"))
        >>> table[1:].ids, table[[2, 0]].ids
        (('b', 'c'), ('c', 'a'))
        """
        places = np.arange(len(self))[rows]
        columns: dict[str, Any] = {
            name: tuple(getattr(self, name)[place] for place in places)
            for name in COLUMNS
            if getattr(self, name) is not None
        }
        without: dict[str, Any] = {"views": None, "view_of": None, "view_rule": None}
        return replace(self, features=self.features[places], **columns, **without)

    @property
    def nbytes(self) -> int:
        """Size in memory, views included."""
        return self.features.nbytes + (0 if self.views is None else self.views.nbytes)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        tensors = dict(self.features.tensors)
        if self.views is not None and self.view_of is not None:
            tensors |= {f"views.{name}": tensor for name, tensor in self.views.tensors.items()}
            tensors["view_of"] = np.asarray(self.view_of)
        lengths = None
        if self.pictures is not None:
            tensors["pictures"] = np.frombuffer(b"".join(self.pictures), np.uint8)
            lengths = tuple(map(len, self.pictures))
        columns = self.ids, self.labels, self.hashes, lengths
        document = _Document(FILE_FORMAT, "features", *columns, self.backbone, self.view_rule)
        files.write(path, tensors, to_json(document))

    @classmethod
    def load(cls, path: str | Path) -> FeatureTable:
        """Read a file that `save` wrote; no code from the file is run."""
        tensors, meta = files.read(path)
        if meta.get("kind") != "features":
            raise ModelFileError(f"{path} does not hold features.")
        if meta.get("format") != FILE_FORMAT:
            raise ModelFileError(f"{path} was written by another version of mivhead.")
        try:
            saved = from_json(_Document, meta, "the description")
            view_of, pictures = tensors.pop("view_of", None), tensors.pop("pictures", None)
            of_views = [name for name in tensors if name.startswith("views.")]
            views = {name.removeprefix("views."): tensors.pop(name) for name in of_views}
            features = Features.from_tensors(tensors)
            return cls(
                features,
                saved.ids or tuple(map(str, range(len(features)))),
                saved.labels,
                Features.from_tensors(views) if views else None,
                view_of,
                saved.backbone,
                saved.hashes,
                None if pictures is None else tuple(split_bytes(pictures, saved.pictures or ())),
                saved.view_rule,
            )
        except InputError as error:
            raise ModelFileError(f"{path} is corrupted: {error}") from error


@dataclass(frozen=True)
class _Document:
    """The JSON document of a features file."""

    format: int
    kind: str
    ids: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    hashes: tuple[str, ...] | None = None
    pictures: tuple[int, ...] | None = None  # their lengths
    backbone: dict[str, Any] | None = None
    view_rule: dict[str, Any] | None = None


def split_bytes(data: Array, lengths: Iterable[int]) -> list[bytes]:
    """Split joined files, such as small pictures; raise an error if the lengths do not fit."""
    ends = np.cumsum([0, *lengths]).tolist()
    if data.dtype != np.uint8 or data.shape != (ends[-1],) or sorted(ends) != ends:
        raise InputError("The pictures do not fit their lengths.")
    joined = data.tobytes()
    return [joined[start:end] for start, end in pairwise(ends)]


def _check_rows(rows: Array, views: int, images: int) -> None:
    """Raise an error if rows do not name the image of each view."""
    if rows.shape != (views,) or (views and rows.dtype.kind not in "iu"):
        raise InputError(f"view_of must be a list of integers, one for each of {views} views.")
    if len(rows) and not (rows.min() >= 0 and rows.max() < images):
        raise InputError(f"view_of must hold rows 0 to {images - 1}.")


@dataclass(frozen=True, eq=False)
class SupportSet:
    """What a classifier is fitted to: checked, its images ordered by class."""

    features: Features
    labels: NDArray[np.int64]  # numbers of the classes, ascending
    views: Features | None = None  # augmented views of the images
    view_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # of whom
    unlabelled: Features | None = None  # images without labels
    # (class, channel): vectors of the names of the classes, of length 1, in the space of the last
    # block
    class_vectors: NDArray[np.float32] | None = None
    classes: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.int64))  # labels, sorted

    @classmethod
    def read(
        cls,
        features: Features,
        y: ArrayLike,
        views: Any = None,
        view_of: ArrayLike | None = None,
        unlabelled: Any = None,
        class_vectors: ArrayLike | Mapping[Any, ArrayLike] | None = None,
    ) -> Self:
        """Check what `MIVClassifier.fit` takes, and order it by class."""
        classes, labels = encode(y, len(features))
        for number, block in enumerate(features.blocks):
            for name, array in block.tensors.items():
                if 0 < max(-float(array.min()), float(array.max())) < SMALLEST:
                    raise InputError(
                        f"All values of blocks[{number}].{name} are below {SMALLEST:g}: multiply "
                        "your features by a constant."
                    )
        if (views is None) != (view_of is None):
            raise InputError("views and view_of must be given together.")
        extra = None if views is None else _read_others(views, "views", features)
        rows = np.asarray([] if view_of is None else view_of)
        _check_rows(rows, 0 if extra is None else len(extra), len(features))
        order = np.argsort(labels, kind="stable")
        place = np.argsort(order)  # position of each image in that order
        width = features.blocks[-1].channels
        return cls(
            features[order],
            labels[order],
            extra if len(rows) else None,
            place[rows.astype(np.int64)],
            None if unlabelled is None else _read_others(unlabelled, "unlabelled", features),
            None if class_vectors is None else read_class_vectors(class_vectors, classes, width),
            classes,
        )

    def take(self, kept: NDArray[np.bool_]) -> SupportSet:
        """Keep some images of every class, and the views of these."""
        place = np.cumsum(kept) - 1  # position of each kept image among them
        used = kept[self.view_rows]
        views = self.views[np.flatnonzero(used)] if self.views is not None and used.any() else None
        rows, view_rows = np.flatnonzero(kept), place[self.view_rows[used]]
        return SupportSet(
            self.features[rows], self.labels[rows], views, view_rows, classes=self.classes
        )

    @property
    def shots(self) -> list[int]:
        """Images per class."""
        counts: list[int] = np.bincount(self.labels).tolist()
        return counts

    @property
    def sources(self) -> NDArray[np.int64]:
        """The image that each of `everything` was made from, so that it has the same label."""
        return np.concatenate([np.arange(len(self.labels)), self.view_rows])

    @property
    def everything(self) -> Features:
        """Images and views, the images first."""
        parts = [self.features] if self.views is None else [self.features, self.views]
        return Features.concat(parts)


def encode(y: ArrayLike, n: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Check the labels of n images; return the classes, sorted, and each image's class number."""
    if y is None:
        raise InputError("This classifier requires y to be passed, but the target y is None.")
    if isinstance(y, Iterable):  # before NumPy makes strings of None and NaN
        check_no_missing("y", y)
    values = read_labels(y)
    if len(values) != n:
        raise InputError(f"X holds {n} images, but y has {len(values)} labels.")
    classes, labels = np.unique(values, return_inverse=True)
    if len(classes) < 2:
        raise InputError(f"A classifier needs at least 2 classes; y holds {len(classes)} class.")
    return classes, labels.astype(np.int64)


def _read_others(values: Any, name: str, features: Features) -> Features:
    """Check features of other images, whose layout must be that of the shots."""
    others = Features(values)
    if not len(others) and name == "unlabelled":
        raise InputError("There are no unlabelled images: give at least one, or omit them.")
    if others.layout != features.layout:
        raise InputError(f"{name} have other blocks than X: {others} and {features}.")
    return others


def read_class_vectors(
    values: ArrayLike | Mapping[Any, ArrayLike], classes: NDArray[Any], width: int
) -> NDArray[np.float32]:
    """Check vectors of classes, by name or in their order, and scale them to length 1."""
    rows: Any = values
    if isinstance(values, Mapping):
        if different := {str(label) for label in values} ^ set(map(str, classes.tolist())):
            raise InputError(f"class_vectors and the classes differ: {sorted(different)[0]!r}.")
        rows = [values[label] for label in classes.tolist()]
    try:
        vectors = np.asarray(rows, np.float64)
    except (TypeError, ValueError):  # words, or a ragged list
        vectors = np.empty(0)
    if vectors.shape != (len(classes), width):
        raise InputError(
            f"class_vectors must be numbers of shape ({len(classes)}, {width}): one vector per "
            "class, in the space of the last block of the features, such as a text embedding of "
            "the same model."
        )
    with np.errstate(all="ignore"):
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        raise InputError("A class vector has no direction: it holds NaN, infinity or only zeros.")
    unit: NDArray[np.float32] = (vectors / lengths).astype(np.float32)
    return unit
