"""The training loop of methods that tune the backbone: full batch, in memory that stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from mivhead.errors import InputError
from mivhead.methods.tuning.network import Network, Pixels

# Pixels whose activations are kept at once: 32 images at 224 px, about 3 GB with a ResNet-50.
MAX_PIXELS = 32 * 224 * 224

Loss = Callable[[Tensor], Tensor]  # features (image, channel) of the whole batch to a number


def chunk_size(network: Network, images: int | None) -> int:
    """Images whose activations are kept at once: as asked, or by the size of the input."""
    return images or max(1, MAX_PIXELS // network.size**2)


def train(
    network: Network,
    pixels: Pixels,
    loss: Loss,
    optimiser: Optimizer,
    *,
    steps: int,
    chunk: int,
    advance: Callable[[int], object],
) -> list[float]:
    """Change the optimiser's parameters so that the loss falls; return the loss before each step.

    One pass of the network a step. If the images are more than a chunk, two: the first, without a
    graph, gives all features and the gradient of the loss with respect to them; the second passes
    that gradient on, chunk by chunk. The sum is the gradient of the whole batch, not an estimate.
    """
    losses: list[float] = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.enable_grad():
            value = _backward(network, pixels, loss, chunk)
        if not torch.isfinite(value):
            raise InputError(
                f"Training diverged at step {len(losses)}: the loss is {value.item()}. "
                "Lower learning_rate."
            )
        losses.append(value.item())
        optimiser.step()
        advance(1)
    return losses


def embed(network: Network, pixels: Pixels, chunk: int) -> Tensor:
    """Features (image, channel) without gradients."""
    with torch.no_grad():
        return torch.cat([network(network.batch(part)) for part in _split(pixels, chunk)])


def _backward(network: Network, pixels: Pixels, loss: Loss, chunk: int) -> Tensor:
    if len(pixels) <= chunk:
        value = loss(network(network.batch(pixels)))
        value.backward()
        return value.detach()
    features = embed(network, pixels, chunk).requires_grad_()
    value = loss(features)
    value.backward()
    gradient = torch.as_tensor(features.grad)  # (image, channel)
    for part, flow in zip(_split(pixels, chunk), gradient.split(chunk), strict=True):
        network(network.batch(part)).backward(flow)
    return value.detach()


def _split(pixels: Pixels, chunk: int) -> Sequence[Pixels]:
    return [pixels[start : start + chunk] for start in range(0, len(pixels), chunk)]
