"""Ridge regression onto class memberships, with what it would say of images it had not seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ridge:
    """A linear map of vectors to class memberships: near 1 for the right class, near 0 else."""

    coefficients: Tensor  # (dimension, class)
    intercepts: Tensor  # (class,)

    def __call__(self, x: Tensor) -> Tensor:
        """Memberships (image, class) of vectors (image, dimension)."""
        # In double precision, so that an image's answer does not depend on its place in a batch.
        votes = x.double() @ self.coefficients.double() + self.intercepts.double()
        return votes.to(x.dtype)


def fit_ridge(x: Tensor, targets: Tensor, alpha: float) -> tuple[Ridge, Tensor]:
    """Least squares with a penalty alpha |W|^2 and a free intercept, in closed form.

    Parameters
    ----------
    x
        Vectors (image, dimension).
    targets
        Memberships (image, class).
    alpha
        Weight of the penalty.

    Returns
    -------
    ridge, held_out
        The fitted map, and for every image what a map fitted on all others says: (image, class).

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge, held_out = fit_ridge(x, 2 * x + 1, alpha=1e-6)
    >>> ridge(torch.tensor([[10.0]])).round(decimals=3), held_out[3].round(decimals=3)
    (tensor([[21.]]), tensor([7.]))
    """
    x64, targets64 = x.double(), targets.double()
    middle, rates = x64.mean(dim=0), targets64.mean(dim=0)
    centred, wanted = x64 - middle, targets64 - rates
    n, dimensions = x.shape
    if n <= dimensions:  # the dual system is the smaller one
        gram = centred @ centred.T  # (image, image)
        inverse = torch.linalg.inv(gram + alpha * _eye(gram))
        weights = centred.T @ (inverse @ wanted)  # (dimension, class)
        leverage = (gram * inverse).sum(dim=1)  # diagonal of gram (gram + alpha)^-1
    else:
        scatter = centred.T @ centred  # (dimension, dimension)
        inverse = torch.linalg.inv(scatter + alpha * _eye(scatter))
        weights = inverse @ (centred.T @ wanted)
        leverage = ((centred @ inverse) * centred).sum(dim=1)
    # Leaving an image out multiplies its residual by 1 / (1 - its leverage), that of the mean too.
    residuals = wanted - centred @ weights
    rest = (1 - leverage - 1 / n).clamp_min(1e-9)
    held_out = targets64 - residuals / rest.unsqueeze(1)
    ridge = Ridge(weights.to(x.dtype), (rates - middle @ weights).to(x.dtype))
    return ridge, held_out.to(x.dtype)


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
