"""How much each voice counts: weights that explain held-out images best."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PRIOR_STRENGTH = 0.1  # of the start, in held-out images that it is worth
LEAST = 0.001  # of its start, that a voice keeps: if all seem to harm, the start decides, unsurely


def stack(votes: Tensor, labels: Tensor, start: Tensor, strength: float = PRIOR_STRENGTH) -> Tensor:
    """Choose weights, all positive, for a sum of votes that is read as logits.

    They minimise the cross-entropy of held-out images plus a penalty on the distance from where
    they start: with few images they stay there. As the sum is made to fit images that no voice
    has seen, its probabilities are calibrated too.

    Parameters
    ----------
    votes
        What each voice says of images it has not seen: (voice, image, class).
    labels
        Class numbers of the images.
    start
        Weights (voice,) before any evidence.
    strength
        Of the penalty.

    Examples
    --------
    >>> right, wrong = torch.eye(2), 1 - torch.eye(2)
    >>> votes = torch.stack([right, wrong]).repeat_interleave(20, dim=1)
    >>> stack(votes, torch.arange(2).repeat_interleave(20), torch.ones(2)).gt(1).tolist()
    [True, False]
    """
    from scipy.optimize import minimize

    if not len(labels):
        return start
    z = votes.double().numpy(force=True)
    y, before = labels.numpy(force=True), start.double().numpy(force=True)
    images, unit = np.arange(len(y)), before.mean()

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits = np.tensordot(weights, z, axes=1)  # (image, class)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        moved = (weights - before) / unit
        expected = np.einsum("vnc,nc->v", z, np.exp(log_p))  # vote that the sum expects
        slope = expected - z[:, images, y].sum(axis=1) + 2 * strength * moved / unit
        return strength * (moved**2).sum() - log_p[images, y].sum(), slope

    bounds = [(LEAST * weight, None) for weight in before]
    found = minimize(loss, before, jac=True, method="L-BFGS-B", bounds=bounds)
    return torch.as_tensor(found.x).to(start)
