"""Adam, full batch.

Written out, because torch.optim costs two seconds of imports on its first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FIRST, SECOND, EPS = 0.9, 0.999, 1e-8  # decay of the two moments, and the usual guard


def minimise(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], *, rate: float, steps: int
) -> list[float]:
    """Change parameters in place so that the loss falls; return the loss before each step.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> losses = minimise(lambda: x**2, [x], rate=0.1, steps=200)
    >>> losses[0], abs(x.item()) < 0.01
    (9.0, True)
    """
    means = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    losses = []
    for step in range(1, steps + 1):
        with torch.enable_grad():
            value = loss()
            gradients = torch.autograd.grad(value, parameters)
        losses.append(value.item())
        scale = rate / (1 - FIRST**step)
        correction = math.sqrt(1 - SECOND**step)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, means, squares, strict=True):
                m.lerp_(g, 1 - FIRST)
                v.mul_(SECOND).addcmul_(g, g, value=1 - SECOND)
                p.addcdiv_(m, v.sqrt().div_(correction).add_(EPS), value=-scale)
    return losses
