"""Taps: outputs of named submodules from one forward pass, and how they become features.

`Taps` collects the outputs, `read_output` turns each into the parts of a block (a map, a token or
both) by its shape alone, and `join` makes `Features` of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mivhead.errors import InputError
from mivhead.features import Features


class _AllFound(Exception):  # noqa: N818  # control flow, not an error
    """Raised when the deepest tap has been reached, to skip the rest of the forward pass."""


class Taps:
    """Runs a model up to its deepest tap and returns copies of the tapped outputs.

    Parameters
    ----------
    model : nn.Module
        Any module.
    names : sequence of str
        Submodules, as in `model.named_modules()`, in the order in which they run.
    dtype : torch.dtype, default=torch.float32
        The type of the copies, which later in-place layers cannot change.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    >>> [out.shape for out in Taps(model, ["0", "1"])(torch.ones(2, 3))]
    [torch.Size([2, 4]), torch.Size([2, 4])]
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], dtype: torch.dtype = torch.float32
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
        found: dict[str, Tensor] = {}
        result = None

        def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple) and output:
                output = output[0]  # layers of transformers return their tokens first
            if not isinstance(output, Tensor):
                kind = type(output).__name__
                raise InputError(
                    f"The tap {name!r} returns a {kind}, not a tensor: tap another layer."
                )
            found[name] = output.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
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


Parts: TypeAlias = Mapping[str, Tensor]  # "map" (n, C, H, W) and/or "token" (n, C)

MAX_PREFIX = 5  # [CLS], or [CLS] and [DIST], or [CLS] and four registers


def read_output(output: Tensor, tap: str) -> Parts:
    """Turn the output of a tapped layer into the parts of a block.

    - `(n, C)` is a vector per image;
    - `(n, C, H, W)` and, as images are square, `(n, H, H, C)` are patch maps;
    - `(n, tokens, C)` is a square grid of patches after up to five prefix tokens, the first of
      which is [CLS]; if there is no such grid, the tokens are patches without neighbours.

    Examples
    --------
    >>> import torch
    >>> {k: tuple(v.shape) for k, v in read_output(torch.ones(2, 197, 384), "blocks.11").items()}
    {'map': (2, 384, 14, 14), 'token': (2, 384)}
    >>> read_output(torch.ones(2, 7, 7, 1024), "norm")["map"].shape
    torch.Size([2, 1024, 7, 7])
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
    return {"map": output.permute(0, 3, 1, 2) if channels_last else output}


def _read_tokens(tokens: Tensor) -> Parts:
    n, count, channels = tokens.shape
    side = math.isqrt(count)
    prefix = count - side * side
    if prefix > MAX_PREFIX or side < 2:
        return {"map": tokens.transpose(1, 2).unsqueeze(3)}  # (n, C, tokens, 1): no grid
    grid = tokens[:, prefix:].transpose(1, 2).reshape(n, channels, side, side)
    return {"map": grid, "token": tokens[:, 0]} if prefix else {"map": grid}


def join(chunks: Sequence[Sequence[Parts]], dtype: torch.dtype) -> Features:
    """Concatenate the blocks of consecutive chunks of images, on the CPU, rounded to `dtype`."""
    blocks = [
        {
            part: torch.cat([chunk[part] for chunk in block]).to("cpu", dtype).contiguous()
            for part in block[0]
        }
        for block in zip(*chunks, strict=True)
    ]
    try:
        return Features(blocks)
    except InputError as error:
        rounded = {dtype, *(part.dtype for block in chunks[0] for part in block.values())}
        if torch.float16 in rounded and "infinity" in str(error):
            raise InputError(
                f"{error} If the network itself is correct, its values are too large for float16: "
                'load it with dtype="float32".'
            ) from None
        raise
