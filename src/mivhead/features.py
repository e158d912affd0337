"""`Features`: what a frozen backbone returned for n images.

The only thing that passes from a backbone to a head. Per block (shallow to deep) it holds a patch
map `(n, C, H, W)`, a token `(n, C)` such as a ViT's [CLS], or both. It knows nothing of labels,
models or where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mivhead import safefile
from mivhead.errors import InputError, ModelFileError

Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"

FLOATS = (torch.float16, torch.float32, torch.float64)
_FILE_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Block:
    """One block's output: a patch map `(n, C, H, W)`, a token `(n, C)`, or both."""

    map: Tensor | None = None
    token: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parts that are there, by name."""
        return {k: v for k, v in (("map", self.map), ("token", self.token)) if v is not None}

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return next(iter(self.tensors.values())).shape[1]

    def apply(self, change: Callable[[Tensor], Tensor]) -> Block:
        """Change every part in the same way."""
        return Block(**{k: change(v) for k, v in self.tensors.items()})


class Features:
    """Features of n images from one or more blocks of a backbone, ordered shallow to deep.

    Parameters
    ----------
    blocks
        One array, or a list with one entry per block. An array (NumPy or PyTorch, float16, 32 or
        64) is read by its shape: `(n, C)` a vector per image, `(n, patches, C)` patch vectors (a
        square number of patches is taken as a grid), `(n, C, H, W)` a patch map. A list entry may
        also be a mapping with the keys `map` and/or `token`, or a `Block`.

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
        entries = [blocks] if _is_array(blocks) or isinstance(blocks, Mapping | Block) else blocks
        if not isinstance(entries, Sequence) or not entries:
            raise InputError(
                "Features need an array or a non-empty list with one entry per block, "
                f"got {_describe(blocks)}."
            )
        self.blocks = tuple(_block(entry, f"block{i}") for i, entry in enumerate(entries))
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
    def _first(self) -> Tensor:
        return next(iter(self.blocks[0].tensors.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """(images, values per image): what scikit-learn's splitters look at."""
        return len(self), sum(math.prod(t.shape[1:]) for t in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The widest float type of the parts."""
        widest = torch.float16
        for tensor in self.tensors.values():
            widest = torch.promote_types(widest, tensor.dtype)
        return widest

    @property
    def device(self) -> torch.device:
        """Where the first part lives."""
        return self._first.device

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
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
            index = torch.as_tensor(np.asarray(index), device=self.device)
            if not len(index):
                index = index.long()
            elif index.dtype != torch.bool:
                index = torch.where(index < 0, index + len(self), index)
        return self._map(lambda t: t[index])

    def to(self, target: torch.dtype | torch.device | str) -> Features:
        """Convert to a float dtype or move to a device."""
        if isinstance(target, torch.dtype) and target not in FLOATS:
            raise InputError(f"Features hold float16, float32 or float64, not {target}.")
        return self._map(lambda t: t.to(target))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Features:
        return Features._of(block.apply(change) for block in self.blocks)

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Per-image shape of every part: `{"block0.map": (112, 14, 14), ...}`."""
        return {name: tuple(t.shape[1:]) for name, t in self.tensors.items()}

    @staticmethod
    def concat(parts: Sequence[Features]) -> Features:
        """Join the images of several Features of one layout.

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
            Block(**{k: torch.cat([b.tensors[k] for b in blocks]) for k in blocks[0].tensors})
            for blocks in columns
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Features):
            return NotImplemented
        mine, theirs = self.tensors, other.tensors
        return mine.keys() == theirs.keys() and all(
            t.dtype == theirs[k].dtype and torch.equal(t, theirs[k]) for k, t in mine.items()
        )

    __hash__ = None  # type: ignore[assignment]  # holds tensors, like an array

    def __repr__(self) -> str:
        return f"Features(n={len(self)}, {_layout_text(self.blocks)})"

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        safefile.write(path, self.tensors, {"format": _FILE_FORMAT, "kind": "features"})

    @classmethod
    def load(cls, path: str | Path) -> Features:
        """Read a file written by `save` (or by `miv extract`); runs no code from the file."""
        tensors, meta = safefile.read(path)
        if meta.get("kind") != "features":
            raise ModelFileError(f"{path} does not hold features.")
        safefile.check_format(path, meta, _FILE_FORMAT)
        return cls.from_tensors(tensors)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array]) -> Features:
        """Make Features from tensors named `block{i}.map` and `block{i}.token`."""
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


def _is_array(x: object) -> bool:
    return isinstance(x, np.ndarray | Tensor)


def _describe(x: object) -> str:
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _layout_text(blocks: Iterable[Block]) -> str:
    def part(name: str, t: Tensor) -> str:
        return f"{name} {'x'.join(map(str, t.shape[1:]))} {str(t.dtype).removeprefix('torch.')}"

    return "; ".join(
        f"block{i}: " + " + ".join(part(k, t) for k, t in block.tensors.items())
        for i, block in enumerate(blocks)
    )


def _block(entry: Any, name: str) -> Block:
    if isinstance(entry, Block):
        entry = entry.tensors
    if isinstance(entry, Mapping):
        if not entry or set(entry) - {"map", "token"}:
            raise InputError(
                f"{name}: a block has the keys 'map' and/or 'token', got {sorted(entry)}."
            )
        parts = {k: _tensor(v, f"{name}.{k}") for k, v in entry.items() if v is not None}
    else:
        tensor = _tensor(entry, name)
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


def _tensor(x: Any, name: str) -> Tensor:
    if not _is_array(x):
        raise InputError(f"{name}: expected a NumPy array or a PyTorch tensor, got {_describe(x)}.")
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        x = x.copy()  # PyTorch knows no read-only tensors
    try:
        tensor = torch.as_tensor(x).detach()
    except TypeError:
        raise InputError(f"{name}: arrays of type {x.dtype} cannot be used.") from None
    if tensor.dtype not in FLOATS:
        raise InputError(
            f"{name} has type {str(tensor.dtype).removeprefix('torch.')}, "
            "expected float16, float32 or float64."
        )
    if tensor.ndim not in (2, 3, 4):
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}, expected (n, C), (n, patches, C) "
            "or (n, C, H, W)."
        )
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        bad = (~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0, 0]
        raise InputError(
            f"{name} of shape {tuple(tensor.shape)} holds NaN or infinity (first in image {bad})."
        )
    return tensor


def _patches_to_map(patches: Tensor) -> Tensor:
    """(n, P, C) to (n, C, s, s) for P = s * s; otherwise (n, C, P, 1), which has no grid."""
    n, count, channels = patches.shape
    side = math.isqrt(count)
    height, width = (side, side) if side * side == count else (count, 1)
    return patches.transpose(1, 2).reshape(n, channels, height, width)
