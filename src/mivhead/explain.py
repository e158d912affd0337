"""Where the head looked: which patches of an image, and which shots of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mivhead.classifier import MIVClassifier
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.head.cap import CrossAttentionPooling


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """What one block paid attention to, for n images.

    Parameters
    ----------
    patches
        (image, H, W): weight of every patch, summing to 1 per image; None if the block has no map.
    shots
        (image, shot): weight of every support image within its class, averaged over heads and in
        the order of `MIVClassifier.support_`; None without cross-attention.
    """

    patches: NDArray[np.floating[Any]] | None
    shots: NDArray[np.floating[Any]] | None


def explain(classifier: MIVClassifier, X: Any) -> list[BlockAttention]:
    """Attention of a fitted classifier for some images, block by block.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead import MIVClassifier
    >>> X = np.random.default_rng(0).normal(size=(6, 8, 4, 4)).astype(np.float32)
    >>> classifier = MIVClassifier(random_state=0).fit(X, [0, 0, 0, 1, 1, 1])
    >>> explain(classifier, X[:2])[0].patches.shape
    (2, 4, 4)
    """
    if not isinstance(classifier, MIVClassifier):
        raise InputError("Only the MIV-head has attention to look at.")
    features = classifier._as_features(X, reset=False)
    head = classifier.head_
    found = []
    with torch.inference_mode():
        prepared = head.prepare(features)
        embedded = head.embed(prepared)
        for i, layer in enumerate(head.layers):
            sizes = layer.config.candidate_sizes
            patches = None
            if sizes:
                weights = layer.pooling.patch_weights(prepared[i])[0]  # (image, patch)
                patches = weights.view(len(features), *sizes[0]).numpy(force=True)
            shots = None
            if isinstance(layer.cap, CrossAttentionPooling):
                bags = classifier.bags_
                attention = layer.cap.attention(embedded[i], classifier.embedded_[i], bags)
                mean = attention.mean(dim=0).transpose(0, 1)  # (query, class, shot)
                shots = _by_row(mean, classifier.support_, bags.rows, bags.real)
            found.append(BlockAttention(patches, shots))
    return found


def _by_row(
    weights: torch.Tensor, support: Features, rows: torch.Tensor, real: torch.Tensor
) -> NDArray[np.floating[Any]]:
    """(query, class, shot) to (query, support row)."""
    weights = weights.expand(-1, *rows.shape)  # without cross-attention it is one for all queries
    out = weights.new_zeros(len(weights), len(support))
    out[:, rows[real]] = weights[:, real]
    return out.numpy(force=True)
