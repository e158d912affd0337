"""`Features`: what a frozen backbone returned for n images.

The only thing that passes from a backbone to a head. Per block (shallow to deep) it holds a patch
map `(n, C, H, W)`, a token `(n, C)` such as a ViT's [CLS], or both. It knows nothing of labels,
models or where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mivhead import safefile
from mivhead.blocks import FLOATS, Array, Block, describe, is_array, read_block
from mivhead.errors import InputError, ModelFileError

FILE_FORMAT = 1


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
        entries = [blocks] if is_array(blocks) or isinstance(blocks, Mapping | Block) else blocks
        if not isinstance(entries, Sequence) or not entries:
            raise InputError(
                "Features need an array or a non-empty list with one entry per block, "
                f"got {describe(blocks)}."
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
        if isinstance(index, slice) and (index.step or 1) < 0:  # PyTorch knows no negative steps
            index = range(len(self))[index]
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
        write_features_file(path, self.tensors, {})

    @classmethod
    def load(cls, path: str | Path) -> Features:
        """Read a file written by `save` (or by `miv extract`); runs no code from the file."""
        tensors, _ = read_features_file(path)
        return cls.from_tensors({k: v for k, v in tensors.items() if k.startswith("block")})

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


def write_features_file(
    path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write a features file; `meta` holds what goes with the features, such as labels."""
    safefile.write(path, tensors, {"format": FILE_FORMAT, "kind": "features", **meta})


def read_features_file(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the description of a features file."""
    tensors, meta = safefile.read(path)
    if meta.get("kind") != "features":
        raise ModelFileError(f"{path} does not hold features.")
    safefile.check_format(path, meta, FILE_FORMAT)
    return tensors, meta


def _layout_text(blocks: Iterable[Block]) -> str:
    def part(name: str, t: Tensor) -> str:
        return f"{name} {'x'.join(map(str, t.shape[1:]))} {str(t.dtype).removeprefix('torch.')}"

    return "; ".join(
        f"block{i}: " + " + ".join(part(k, t) for k, t in block.tensors.items())
        for i, block in enumerate(blocks)
    )
