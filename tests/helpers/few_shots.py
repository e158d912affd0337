"""Small support sets for the tests of methods."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead import Features
from mivhead_bench.methods import METHODS

RIVALS = (
    "ncc",
    "baseline",
    "baseline++",
    "fit-lda",
    "fit-qda",
    "fit-protonets",
    "logistic",
    "svm",
    "knn",
    "ridge",
    "ridge-all",
    "logistic-all",
    "laplacianshot",
    "simpleshot",
    "tip-adapter",
)

# Without `miv+unlabelled` and the like, which are the estimators of `miv` and the like.
ON_FEATURES = [
    name
    for name, method in METHODS.items()
    if method.needs == "features" and not method.uses_unlabelled
]


def quick(name: str) -> dict[str, Any]:
    """Parameters that keep training short, where there is any."""
    return {"steps": 5} if "steps" in METHODS[name].hyperparameters() else {}


def clusters(
    shots: list[int], channels: int, seed: int = 0, spread: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Positive vectors around a random centre per class, some shots each, in mixed order."""
    centres = 3 * np.random.default_rng(99).random((len(shots), channels))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(shots)), shots))
    vectors = centres[labels] + spread * rng.random((len(labels), channels))
    return vectors.astype(np.float32), labels


def maps(
    labels: NDArray[np.int64], seed: int = 0, *, token: bool = False, spread: float = 1.0
) -> Features:
    """Two blocks of patch maps whose brightness follows the label."""
    rng = np.random.default_rng(seed)
    blocks = []
    for channels, side in ((8, 4), (16, 2)):
        centres = 3 * np.random.default_rng(7).random((labels.max() + 1, channels))
        noise = spread * rng.random((len(labels), channels, side, side))
        block = {"map": (centres[labels][:, :, None, None] + noise).astype(np.float32)}
        if token:
            block["token"] = block["map"].mean(axis=(2, 3)) + 1
        blocks.append(block)
    return Features(blocks)
