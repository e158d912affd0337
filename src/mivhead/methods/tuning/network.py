"""`Network`: a copy of a backbone's module that may be changed, one pooled vector per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Pixels: TypeAlias = NDArray[np.uint8]  # (image, R, R, 3), resized already
Tapped: TypeAlias = Callable[[Tensor], Sequence[Mapping[str, Tensor]]]


class Network(nn.Module):
    """A frozen module whose deepest tap gives one vector per image, with gradients.

    Parameters
    ----------
    model
        A copy that nobody else uses: methods change it.
    tapped
        Gives the parts (`map`, `token`) of the taps of that copy, the deepest last.
    prepare
        From pixels to the normalised batch `(n, 3, R, R)` that the model takes.
    size
        R, the side of its input.
    name
        What to call the backbone in errors.
    """

    def __init__(
        self,
        model: nn.Module,
        tapped: Tapped,
        prepare: Callable[[Pixels], Tensor],
        size: int,
        name: str,
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.head: nn.Module = nn.Identity()  # on the pooled vector
        self.size = size
        self.name = name
        self._tapped = tapped
        self._prepare = prepare

    def forward(self, x: Tensor) -> Tensor:
        """Pool a normalised batch (n, 3, R, R) to (n, channel)."""
        parts = self._tapped(x)[-1]
        pooled = parts["token"] if "token" in parts else parts["map"].mean(dim=(2, 3))
        embedded: Tensor = self.head(pooled)
        return embedded

    def batch(self, pixels: Pixels) -> Tensor:
        """Normalise pixels to the input (n, 3, R, R), where the module is."""
        return self._prepare(pixels).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self.model.parameters()).device

    @property
    def channels(self) -> int:
        """Length of the pooled vector."""
        with torch.no_grad():
            return int(self(self.blank()).shape[1])

    def map_features(self) -> nn.Parameter:
        """Put a linear map behind the pooled vector, the identity at first; return its matrix."""
        weight = nn.Parameter(torch.eye(self.channels, device=self.device))
        self.head = nn.Linear(len(weight), len(weight), bias=False, device="meta")
        self.head.weight = weight
        return weight

    def blank(self) -> Tensor:
        """One image of zeros (1, 3, R, R)."""
        return torch.zeros(1, 3, self.size, self.size, device=self.device)

    def used(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Leave out parameters that the pooled vector does not depend on, such as a classifier's.

        >>> model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
        >>> run = lambda x: [{"token": model["a"](x.mean(dim=(2, 3)))}]
        >>> network = Network(model, run, lambda pixels: pixels, 4, "two")
        >>> list(network.used(dict(model.requires_grad_().named_parameters())))
        ['a.weight', 'a.bias']
        """
        with torch.enable_grad():
            total = self(self.blank()).sum()
        found: Sequence[Any] = torch.autograd.grad(
            total, list(parameters.values()), allow_unused=True
        )
        pairs = zip(parameters.items(), found, strict=True)
        return {name: parameter for (name, parameter), grad in pairs if grad is not None}
