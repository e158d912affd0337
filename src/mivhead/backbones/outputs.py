"""From whatever shape a tapped layer gives to the parts of a block, by shape alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mivhead.errors import InputError
from mivhead.features import Features

Parts: TypeAlias = Mapping[str, Tensor]  # "map" (n, C, H, W) and/or "token" (n, C)

MAX_PREFIX = 5  # [CLS], or [CLS] and [DIST], or [CLS] and four registers


def read_output(output: Tensor, tap: str) -> Parts:
    """Read the output of a tapped layer.

    - `(n, C)` is a vector per image;
    - `(n, C, H, W)` and, as images are square, `(n, H, H, C)` are patch maps;
    - `(n, tokens, C)` is a square grid of patches behind up to five prefix tokens, the first of
      which is [CLS]; without such a grid the tokens are patches without neighbours.

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
            f"The tap {tap!r} gives the shape {tuple(output.shape)}, expected (n, C), "
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
    """Join the blocks of consecutive chunks of images, on the CPU, rounded to the storage type."""
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
                f"{error} If the network itself is sound, its values are too large for float16: "
                'load it with dtype="float32".'
            ) from None
        raise
