"""The MIV-head and its ridge experts as an ONNX graph: the formulas of `mivhead.head`, once more.

What depends on the support set alone is computed here, once: the graph holds the keys and values
of the shots as constants, and not their patches. Lines end in the shapes of their values, where n
is the number of query images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from mivhead.classifier import MIVClassifier
from mivhead.decision import FAR, USUAL_FAR, DecisionRule
from mivhead.ensemble.constants import COMPONENTS, SIDE
from mivhead.ensemble.descriptors import PatchPCA, average_pooling
from mivhead.ensemble.names import Names
from mivhead.ensemble.ridge import Expert
from mivhead.ensemble.stacking import Ensemble
from mivhead.export.graph import Graph, Value
from mivhead.features import Block
from mivhead.head.components import HeadBlock
from mivhead.head.formulas import LN_EPS, NORM_EPS, Comparison, Projected, window
from mivhead.head.recipe import Recipe


def head_logits(graph: Graph, features: Mapping[str, Value], model: MIVClassifier) -> Value:
    """Logits (n, class) of a fitted head; `features` by name, such as `block0.map`."""
    head, ensemble, cosines = model.head_, model.ensemble_, []
    for number, layer, support in zip(head.taken, head.layers, model.embedded_, strict=True):
        parts = _parts(features, number)
        vectors = image_vectors(graph, parts, layer)  # (n, C)
        cosines.append(block_cosines(vectors, layer, support, model.starts_))  # (n, class)
    if ensemble is None:
        return combine(cosines, head.recipe)
    blocks = model.support_.blocks
    numbered = {i: _parts(features, i) for i in range(len(blocks))}
    logits = ensemble_logits(cosines, numbered, blocks, ensemble)
    if ensemble.names is None or not ensemble.names.used:
        return logits
    return with_names(logits, pooled(numbered[len(blocks) - 1], blocks[-1]), ensemble.names)


def _parts(features: Mapping[str, Value], block: int) -> dict[str, Value]:
    """Return the map and the token of a block, if it has them."""
    names = {part: f"block{block}.{part}" for part in ("map", "token")}
    return {part: features[name] for part, name in names.items() if name in features}


# Component 1


def image_vectors(graph: Graph, parts: Mapping[str, Value], layer: HeadBlock) -> Value:
    """Pool the candidates of an image by attention: (n, C)."""
    config, params, candidates = layer.config, layer.params, []  # (n, C, 1) each
    if "pooling.theta" in params:
        assert config.grid is not None
        theta = params["pooling.theta"].reshape(1, 1, -1)
        for size in config.candidate_sizes:
            x = max_pooled(parts["map"], config.grid, size).reshape(0, 0, -1)  # (n, C, patch)
            scores = x.after(theta) * layer.tau  # (n, 1, patch)
            weights = (scores / _lengths(x, layer)).softmax(axis=2)
            pooled = x @ weights.reshape(0, -1, 1)  # equation 1: (n, C, 1)
            if config.form == "vit":
                pooled = pooled.normalised(1, config.channels, LN_EPS)
            candidates.append(pooled)
    if "token" in parts:
        candidates.append(parts["token"].reshape(0, -1, 1))
    stacked = graph.concat(candidates, axis=2)  # B_n: (n, C, candidate)
    if "pooling.mu" not in params:
        return stacked.reshape(0, -1)
    scores = stacked.after(params["pooling.mu"].reshape(1, 1, -1)) * layer.tau
    weights = (scores / _lengths(stacked, layer)).softmax(axis=2)  # (n, 1, candidate)
    return (stacked @ weights.reshape(0, -1, 1)).reshape(0, -1)  # equation 2


def _lengths(x: Value, layer: HeadBlock) -> Value | float:
    """Divisors of the scores of vectors (n, C, vector)."""
    return x.length(1, least=NORM_EPS) if layer.length is None else layer.length


def max_pooled(x: Value, grid: tuple[int, int], size: tuple[int, int]) -> Value:
    """Adaptive max-pooling of maps (n, C, H, W) to (n, C, *size).

    Windows that are smaller than the largest one repeat their last row or column, which does not
    change a maximum; then all windows have the same size, as the operation of ONNX needs it.
    """
    if size == grid:
        return x
    kernel = []
    for axis, (length, count) in enumerate(zip(grid, size, strict=True), start=2):
        windows = [window(i, length, count) for i in range(count)]
        width = max(map(len, windows))
        rows = [row for w in windows for row in (*w, *[w[-1]] * (width - len(w)))]
        x = x.take(np.asarray(rows), axis)
        kernel.append(width)
    return x.unary("MaxPool", kernel_shape=kernel, strides=kernel)


# Components 2 and 3


def block_cosines(
    vectors: Value, layer: HeadBlock, support: Projected, starts: NDArray[np.int64]
) -> Value:
    """Cosines (n, class) of one block."""
    comparison = layer.comparison(support, support, starts)  # with the support's own constants
    shots = np.diff(starts)
    split = (x.reshape(0, comparison.heads, 1, -1) for x in project(vectors, layer))
    key, v_q, gate = split  # (n, h, 1, d)
    v_p, of_keys = prototypes(key, comparison, shots)  # (n, h, class, d)
    v_q, v_p = v_q * gate + key, v_p * gate + of_keys
    m = v_p.sum(2, keepdims=True) * (1 / len(shots))
    v_q, v_p = v_q - m, v_p - m
    products = (v_q * v_p).sum(1, 3)  # (n, class)
    lengths = v_p.length(1, 3, least=NORM_EPS).reshape(0, -1)  # (n, class)
    return products / (v_q.length(1, 3, least=NORM_EPS).reshape(0, 1) * lengths)


def project(vectors: Value, layer: HeadBlock) -> tuple[Value, Value, Value]:
    """Keys, values and gates (n, C) of queries."""
    p, channels = layer.params, layer.config.channels
    x = vectors.normalised(1, channels, LN_EPS) * p["cap.norm.weight"] + p["cap.norm.bias"]

    def linear(name: str) -> Value:
        return x @ p[f"cap.{name}.weight"].T + p[f"cap.{name}.bias"]

    return linear("key"), linear("value"), linear("excitation").sigmoid()


def prototypes(key: Value, comparison: Comparison, shots: NDArray[np.int64]) -> tuple[Value, Value]:
    """Equation 3: weighted sums of the values and of the keys, (n, h, class, d)."""
    rows, real = padded_rows(shots)  # (class, shot)
    of_shots = comparison.shots.value, comparison.shots.key
    of_heads = [x.reshape(len(x), comparison.heads, -1) for x in of_shots]  # (shot, h, d)
    by_class = [x[rows].transpose(2, 0, 1, 3) for x in of_heads]  # (h, class, shot, d)
    weights = _attention(key, comparison, rows, real)  # (n, h, class, 1, shot)
    values, keys = (
        (weights @ x[None]).reshape(0, comparison.heads, len(shots), -1) for x in by_class
    )
    return values, keys


def padded_rows(shots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows (class, shot) of images ordered by class, and whether there is such a shot."""
    place = np.arange(shots.max())
    real = place < shots[:, None]
    return np.where(real, (shots.cumsum() - shots)[:, None] + place, 0), real


def _attention(
    key: Value, comparison: Comparison, rows: NDArray[np.int64], real: NDArray[np.bool_]
) -> Value:
    """Equation 4: weights of the shots of each class, (n, h, class, 1, shot)."""
    shots = comparison.split(comparison.shots.key)[None]  # (1, h, shot, d)
    scores = (key - shots).abs().sum(3) * comparison.factor  # (n, h, shot)
    if not real.all():
        scores = scores.take(rows.ravel(), 2) + np.where(real.ravel(), 0, -np.inf)
    return scores.reshape(0, comparison.heads, len(rows), 1, -1).softmax(axis=4)


def combine(cosines: Sequence[Value], recipe: Recipe) -> Value:
    """Logits (n, class) of a head without experts: the logsumexp of its blocks."""
    if recipe.temperature_order == "inside":
        cosines = [x / recipe.temperature for x in cosines]
    largest = reduce(lambda x, y: x.at_least(y), cosines)
    logits = reduce(add, [(x - largest).exp() for x in cosines]).log() + largest
    return logits if recipe.temperature_order == "inside" else logits / recipe.temperature


# The ensemble


def ensemble_logits(
    cosines: Sequence[Value],
    features: Mapping[int, Mapping[str, Value]],
    blocks: Sequence[Block],
    ensemble: Ensemble,
) -> Value:
    """Logits (n, class): the weighted sum of the head's cosines and the experts' memberships."""
    weights = ensemble.weights_by_class.astype(np.float64)  # (member, class), or (member, 1)
    of_head, of_experts = weights[: len(cosines)], weights[len(cosines) :]
    members = [x * w.astype(np.float32) for x, w in zip(cosines, of_head, strict=True)]
    patches = {  # (n, component, patch)
        i: principal(parts["map"], ensemble.experts.pcas[i])
        for i, parts in features.items()
        if "map" in parts
    }
    intercepts = 0.0 if ensemble.offsets is None else ensemble.offsets.astype(np.float64)
    for (expert, ridge), weight in zip(ensemble.experts.ridges.items(), of_experts, strict=True):
        x = descriptor(expert, features[expert.block], patches, blocks[expert.block])
        members.append(x @ (weight * ridge.coefficients))  # the weight is folded in
        intercepts = intercepts + weight * ridge.intercepts
    total: Value = reduce(add, members)
    return total + intercepts


def with_names(logits: Value, x: Value, names: Names) -> Value:
    """Add the member of class names to logits (n, class), for images' vectors (n, C)."""
    factors = names.weight * names.vectors.astype(np.float64)
    by_name = (x / x.length(1, least=NORM_EPS)) @ factors.T.astype(np.float32)  # (n, class)
    return logits + by_name + (-names.weight * names.centres).astype(np.float32)


def principal(map_: Value, pca: PatchPCA) -> Value:
    """Patches in the coordinates of the PCA: (n, component, patch)."""
    patches = map_.reshape(0, 0, -1)  # (n, C, patch)
    mean, components = pca.mean[:, None], pca.components
    if components.shape[0] == components.shape[1]:
        return patches - mean
    return (patches - mean).after(components.T[None])


def descriptor(
    expert: Expert, parts: Mapping[str, Value], patches: Mapping[int, Value], block: Block
) -> Value:
    """Compute the descriptor that an expert looks at, of length 1: (n, dimension)."""
    if expert.kind == "mean":
        return mean_vector(parts, block)
    assert block.map is not None
    grid = tuple(block.map.shape[2:])
    x = patches[expert.block]  # (n, component, patch)
    if expert.kind == "second_order":
        x = x - x.sum(2, keepdims=True) * (1 / math.prod(grid))
        size = min(block.channels, COMPONENTS)
        row, column = np.triu_indices(size)
        pairs = (x @ x.transpose(0, 2, 1)).reshape(0, -1).take(row * size + column, 1)
        x = pairs.abs().sqrt() * pairs.sign()
    else:
        x = (x @ average_pooling(grid)[None] if max(grid) > SIDE else x).reshape(0, -1)
    return x / x.length(1, least=NORM_EPS)


def mean_vector(parts: Mapping[str, Value], block: Block) -> Value:
    """Return the mean patch, or the token, with mean 0 and length 1: (n, C)."""
    x = pooled(parts, block).normalised(1, block.channels, LN_EPS)
    return x / x.length(1, least=NORM_EPS)


def pooled(parts: Mapping[str, Value], block: Block) -> Value:
    """One vector per image, (n, C): the token, else the mean of the map."""
    if "token" in parts:
        return parts["token"]
    assert block.map is not None
    return parts["map"].sum(2, 3) * (1 / math.prod(block.map.shape[2:]))


# Decisions


def unknown(
    scores: Value, features: Mapping[str, Value], classifier: MIVClassifier, rule: DecisionRule
) -> Value:
    """Score (n, 1) of how unlike the shots an image is; see `mivhead.decision`."""
    blocks = classifier.support_.blocks
    vectors = mean_vector(_parts(features, len(blocks) - 1), blocks[-1])
    near = (vectors @ rule.shots.T).largest(1)  # (n, 1)
    if rule.other is not None:  # the energy is that of the named classes
        hidden = np.zeros(len(classifier.classes_), np.float32)
        hidden[rule.other] = -1e6
        scores = scores + hidden
    top = scores.largest(1)  # (n, 1)
    energy = ((scores - top).exp().sum(1, keepdims=True).log() + top).cast(np.float32)
    score = energy * -rule.weight - near
    if not len(rule.background):
        return score + FAR * USUAL_FAR
    return score + (vectors @ rule.background.T).largest(1) * FAR
