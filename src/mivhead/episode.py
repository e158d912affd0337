"""The vectors of one episode, as the head compares them: shots, prototypes and the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mivhead.classifier import MIVClassifier
from mivhead.data.imageset import ImageSet
from mivhead.errors import InputError
from mivhead.features import Features
from mivhead.fewshot import FewShotClassifier
from mivhead.head.cap import CrossAttentionPooling, Projected
from mivhead.methods import method_name
from mivhead.methods.pooled import class_means, pooled
from mivhead.methods.tuning.base import PREDICTED, TuningClassifier
from mivhead.methods.tuning.training import embed
from mivhead.tunable import load_pixels

Vectors = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Episode:
    """A query and what it is compared with, in one space.

    Parameters
    ----------
    title
        Which vectors they are, such as `block 2 of 4`.
    shots
        (shot, channel), ordered by class.
    labels
        (shot,): class numbers.
    prototypes
        (class, channel).
    query
        (channel,).
    """

    title: str
    shots: Vectors
    labels: NDArray[np.integer[Any]]
    prototypes: Vectors
    query: Vectors


def miv_episodes(classifier: MIVClassifier, X: Any) -> list[Episode]:
    """Vectors of the MIV-head for one image, block by block, shallow to deep.

    All of them stand under the query's gate g: v^Q = V g + K of the query, V g + K of every shot,
    and v^P of every class, the mean of its shots weighted by attention.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    >>> classifier = MIVClassifier(random_state=0).fit(X, [0, 0, 0, 1, 1, 1])
    >>> [(e.shots.shape, e.prototypes.shape) for e in miv_episodes(classifier, X[:1])]
    [((6, 8), (2, 8))]
    """
    if not isinstance(classifier, MIVClassifier):
        raise InputError("Only the MIV-head has prototypes that depend on the query.")
    features = _one(classifier._as_features(X, reset=False))
    head, bags = classifier.head_, classifier.bags_
    labels = np.repeat(np.arange(len(classifier.shots_)), classifier.shots_)
    found = []
    with torch.inference_mode():
        embedded = head.embed(head.prepare(features))
        for i, layer in enumerate(head.layers):
            query, support = embedded[i], classifier.embedded_[i]
            gated = _gated(layer.cap, support, query)  # (shot, head, d)
            if isinstance(layer.cap, CrossAttentionPooling):
                weights = layer.cap.attention(query, support, bags)  # (head or 1, class, 1, shot)
                weights = weights.expand(gated.shape[1], -1, -1, -1)
            else:
                weights = (bags.real / bags.shots[:, None]).to(gated.dtype)[None, :, None]
            bagged = gated[bags.rows].permute(2, 0, 1, 3)  # (head, class, shot, d)
            prototypes = (weights @ bagged).squeeze(2).transpose(0, 1)  # (class, head, d)
            found.append(
                Episode(
                    f"block {i + 1} of {len(head.layers)}",
                    gated.flatten(1).numpy(force=True),
                    labels,
                    prototypes.flatten(1).numpy(force=True),
                    _gated(layer.cap, query, query).flatten().numpy(force=True),
                )
            )
    return found


def centroid_episode(classifier: MIVClassifier, X: Any) -> Episode:
    """Vectors of nearest centroids for one image, from the support of a fitted MIV-head."""
    features = _one(classifier._as_features(X, reset=False))
    labels = np.repeat(np.arange(len(classifier.shots_)), classifier.shots_)
    shots = pooled(classifier.support_)
    means = class_means(shots, torch.as_tensor(labels), len(classifier.shots_))
    return Episode(
        "nearest centroids",
        shots.numpy(force=True),
        labels,
        means.numpy(force=True),
        pooled(features)[0].numpy(force=True),
    )


def tuned_episode(model: FewShotClassifier, shots: ImageSet, image: ImageSet) -> Episode:
    """Vectors of a method that tunes the backbone, such as TSA, for one image.

    Parameters
    ----------
    model
        Fitted with such a method.
    shots
        The images it was trained on, with their labels, ordered by class.
    image
        One image.
    """
    tuner = model.classifier_
    if not isinstance(tuner, TuningClassifier):
        raise InputError("The model does not tune its backbone; its vectors are the features.")
    model.predict_proba(image)  # a loaded model makes its network with the first image
    network = tuner.network_
    vectors, query = (
        embed(network, load_pixels(images, network.size, verbose=False)[0], PREDICTED)
        for images in (shots, image)
    )
    names = [str(name) for name in tuner.classes_]
    return Episode(
        method_name(tuner),
        vectors.numpy(force=True),
        np.array([names.index(label) for label in shots.labels or ()]),
        tuner.means_.numpy(force=True),
        query[0].numpy(force=True),
    )


def _gated(cap: torch.nn.Module, images: Projected, query: Projected) -> torch.Tensor:
    """V g + K of images under the gate g of one query: (image, head, d)."""
    if isinstance(cap, CrossAttentionPooling) and cap.recipe.skip:
        return images.value * query.gate + images.key
    return images.value * query.gate


def _one(features: Features) -> Features:
    if len(features) != 1:
        raise InputError(f"An episode has one query, got {len(features)} images.")
    return features
