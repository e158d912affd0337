"""Mathematics that many rooms share; functions on arrays work along the last axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

EPS = 1e-12  # smallest length


def softmax(logits: Floats) -> Floats:
    """Return probabilities, in the precision of the logits.

    >>> softmax(np.array([[0.0, 0.0]]))
    array([[0.5, 0.5]])
    """
    powers: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Return logarithms of probabilities, in double precision."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def unit(x: Floats) -> Floats:
    """Scale vectors to length 1; zeros stay zeros.

    >>> unit(np.array([[3.0, 4.0], [0.0, 0.0]]))
    array([[0.6, 0.8],
           [0. , 0. ]])
    """
    lengths = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
    scaled: Floats = x / np.maximum(lengths, lengths.dtype.type(EPS))
    return scaled


def wilson_interval(successes: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion, or NaNs if there were no trials.

    It remains valid for few trials and for proportions near 0 or 1 (Wilson 1927, "Probable
    inference, the law of succession, and statistical inference").

    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    # scipy's binomtest(...).proportion_ci("wilson") runs an exact test first: 5 ms per class.
    if trials == 0:
        return math.nan, math.nan
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low, high = (centre - half) / scale, (centre + half) / scale
    # Exact at the ends, where rounding would turn 100% into ">99%".
    return low if successes > 0 else 0.0, high if successes < trials else 1.0
