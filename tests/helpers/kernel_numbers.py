"""Random numbers, and how close to double precision single precision has to come."""

import torch
from torch import Tensor


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, expected: Tensor) -> None:
    scale = max(0.1, float(expected.detach().abs().max()))
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-5 * scale)
