"""Taps: outputs of named submodules from one forward pass, and how they become features.

`Taps` collects the outputs of a PyTorch module, `read_output` turns each into the parts of a block
(a map, a token or both) by its shape alone, and `join` makes `Features` of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead.errors import InputError

if TYPE_CHECKING:  # backbones in onnxruntime do without PyTorch
    import torch
    from torch import Tensor, nn

    from mivhead.features import Features


EMBEDDING = "embedding"  # a tap: the vector in the space that images share with texts
POOLED = "pooled"  # a tap: what the model's own classifier would see


class _AllFound(Exception):  # noqa: N818  # control flow, not an error
    """Raised when the deepest tap has been reached, to skip the rest of the forward pass."""


class Taps:
    """Runs a model up to its deepest tap and returns copies of the tapped outputs.

    Taps are submodules, as in `model.named_modules()`, in the order in which they run. Later
    in-place layers cannot change the copies, which are of type float32 by default.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    >>> [out.shape for out in Taps(model, ["0", "1"])(torch.ones(2, 3))]
    [torch.Size([2, 4]), torch.Size([2, 4])]
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._names = tuple(names)
        self._dtype = dtype
        self._lock = Lock()  # hooks belong to the model, so one pass at a time

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the taps for one batch, in the order of `names`."""
        return self.run(x)[0]

    def run(self, x: Tensor, *, whole: bool = False) -> tuple[list[Tensor], Any]:
        """Return the outputs of the taps and, after a whole pass, what the model returns."""
        import torch

        found: dict[str, Tensor] = {}
        result = None

        def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple) and output:
                output = output[0]  # layers of transformers return their tokens first
            if not isinstance(output, torch.Tensor):
                kind = type(output).__name__
                raise InputError(
                    f"The tap {name!r} returns a {kind}, not a tensor: tap another layer."
                )
            dtype = self._dtype or torch.float32
            found[name] = output.to(dtype, copy=True, memory_format=torch.contiguous_format)
            # Exporting a graph drops the rest anyway, and cannot trace an exception.
            done = len(found) == len(self._names) and not whole
            if done and not torch.compiler.is_compiling():
                raise _AllFound

        with self._lock, ExitStack() as hooks:
            for name in self._names:
                module = self._model.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
            with suppress(_AllFound):
                result = self._model(x)
        if tuple(found) != self._names:
            raise InputError(
                "Taps must be listed once each, in the order in which they run: requested "
                f"{', '.join(self._names)}, found {', '.join(found)}."
            )
        return list(found.values()), result


def check_taps(backbone: str, taps: Iterable[str], valid: Sequence[str]) -> None:
    """Raise an error that names the first unknown tap and some similar ones."""
    for tap in taps:
        if tap not in valid:
            nearest = difflib.get_close_matches(tap, valid, n=3) or valid[-3:]
            raise InputError(
                f"{backbone} has no tap {tap!r}; similar names are {', '.join(nearest)}."
            )


# "map" (n, C, H, W) and/or "token" (n, C), both arrays or both tensors
Parts: TypeAlias = Mapping[str, Any]

MAX_PREFIX = 5  # [CLS], or [CLS] and [DIST], or [CLS] and four registers


def read_output(output: NDArray[Any] | Tensor, tap: str) -> Parts:
    """Turn the output of a tapped layer, an array or a tensor, into the parts of a block.

    - `(n, C)` is a vector per image;
    - `(n, C, H, W)` and, as images are square, `(n, H, H, C)` are patch maps;
    - `(n, tokens, C)` is a square grid of patches after up to five prefix tokens, the first of
      which is [CLS]; if there is no such grid, the tokens are patches without neighbours.

    Examples
    --------
    >>> {k: v.shape for k, v in read_output(np.ones((2, 197, 384)), "blocks.11").items()}
    {'map': (2, 384, 14, 14), 'token': (2, 384)}
    >>> read_output(np.ones((2, 7, 7, 1024)), "norm")["map"].shape
    (2, 1024, 7, 7)
    """
    if output.ndim == 2:
        return {"token": output}
    if output.ndim == 3:
        return _read_tokens(output)
    if output.ndim != 4:
        raise InputError(
            f"The tap {tap!r} returns the shape {tuple(output.shape)}, expected (n, C), "
            "(n, tokens, C) or (n, C, H, W): tap another layer."
        )
    _, first, second, third = output.shape
    channels_last = first == second != third
    return {"map": output.swapaxes(1, 3).swapaxes(2, 3) if channels_last else output}


def _read_tokens(tokens: NDArray[Any] | Tensor) -> Parts:
    n, count, channels = tokens.shape
    side = math.isqrt(count)
    prefix = count - side * side
    if prefix > MAX_PREFIX or side < 2:
        return {"map": tokens.swapaxes(1, 2)[..., None]}  # (n, C, tokens, 1): no grid
    grid = tokens[:, prefix:].swapaxes(1, 2).reshape(n, channels, side, side)
    return {"map": grid, "token": tokens[:, 0]} if prefix else {"map": grid}


def join(chunks: Sequence[Sequence[Parts]], dtype: np.dtype[Any]) -> Features:
    """Concatenate the blocks of consecutive chunks of images, on the CPU, rounded to `dtype`."""
    from mivhead.features import Features

    parts = [part for block in chunks[0] for part in block.values()]
    half = np.float16 in (dtype, *(_numpy(part[:0]).dtype for part in parts))
    with np.errstate(over="ignore"):  # `Features` refuse infinity
        blocks = [
            {
                name: np.concatenate([_numpy(chunk[name]) for chunk in block], dtype=dtype)
                for name in block[0]
            }
            for block in zip(*chunks, strict=True)
        ]
    try:
        return Features(blocks)
    except InputError as error:
        if half and "infinity" in str(error):
            raise InputError(
                f"{error} If the network itself is correct, its values are too large for float16: "
                'load it with dtype="float32".'
            ) from None
        raise


def _numpy(part: Any) -> NDArray[Any]:
    """Return an array, or a tensor on any device, as an array."""
    array: NDArray[Any] = part if isinstance(part, np.ndarray) else part.numpy(force=True)
    return array
