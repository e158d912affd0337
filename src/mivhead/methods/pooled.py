"""One vector per image: what every rival on frozen features starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from mivhead.features import Features

NORM_EPS = 1e-12


def pooled(features: Features) -> Tensor:
    """Pool to (image, channel) in float32: the deepest block's token, else the mean of its map.

    >>> pooled(Features(torch.arange(8.0).view(1, 2, 2, 2)))
    tensor([[1.5000, 5.5000]])
    """
    block = features.blocks[-1]
    if block.token is not None:
        return block.token.float()
    return torch.as_tensor(block.map).mean(dim=(2, 3), dtype=torch.float32)


def unit(x: Tensor) -> Tensor:
    """Vectors (..., channel) of length 1; zero vectors stay zero."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / lengths.clamp_min(NORM_EPS)


def class_means(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean vector of every class: (image, channel) to (class, channel).

    >>> class_means(torch.tensor([[2.0], [4.0], [5.0]]), torch.tensor([0, 0, 1]), 2).T
    tensor([[3., 5.]])
    """
    return membership(labels, classes, x.dtype).T @ x / counts(labels, classes)[:, None]


def membership(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """One-hot rows (image, class)."""
    return torch.nn.functional.one_hot(labels, classes).to(dtype)


def counts(labels: Tensor, classes: int) -> Tensor:
    """Images per class."""
    return torch.bincount(labels, minlength=classes)
