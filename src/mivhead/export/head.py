"""The MIV-head and its ridge experts as an ONNX graph: the formulas of `mivhead.head`, once more.

What depends on the support set alone is computed here, once: the graph holds the keys and values
of the shots as constants, and not their patches. Lines end in the shapes of their values, where n
is the number of query images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mivhead.classifier import MIVClassifier
from mivhead.ensemble.descriptors import COMPONENTS, SIDE, PatchPCA
from mivhead.ensemble.ridge import Expert
from mivhead.ensemble.stacking import Ensemble
from mivhead.export.graph import Graph, Value
from mivhead.features import Block
from mivhead.head.cap import Bags, CrossAttentionPooling, Projected
from mivhead.head.head import HeadBlock
from mivhead.head.pooling import LN_EPS, NORM_EPS, PoolingByAttention
from mivhead.head.recipe import Recipe


def head_logits(graph: Graph, features: Mapping[str, Value], model: MIVClassifier) -> Value:
    """Logits (n, class) of a fitted head; `features` by name, such as `block0.map`."""
    blocks = len({name.partition(".")[0] for name in model.layout_})
    first = blocks - len(model.support_.blocks)  # it may use the last ones only
    head, ensemble, cosines = model.head_, model.ensemble_, []
    for number, layer, support in zip(head.taken, head.layers, model.embedded_, strict=True):
        parts = _parts(features, first + number)
        vectors = image_vectors(graph, parts, layer.pooling)  # (n, C)
        cosines.append(block_cosines(vectors, layer, support, model.bags_))  # (n, class)
    if ensemble is None:
        return combine(graph, cosines, head.recipe)
    numbered = {i: _parts(features, first + i) for i in range(len(model.support_.blocks))}
    return ensemble_logits(cosines, numbered, model.support_.blocks, ensemble)


def _parts(features: Mapping[str, Value], block: int) -> dict[str, Value]:
    names = {part: f"block{block}.{part}" for part in ("map", "token")}
    return {part: features[name] for part, name in names.items() if name in features}


def array(tensor: Tensor) -> NDArray[Any]:
    """Values of a tensor as an array."""
    values: NDArray[Any] = tensor.detach().numpy(force=True)
    return values


# Component 1


def image_vectors(graph: Graph, parts: Mapping[str, Value], pooling: PoolingByAttention) -> Value:
    """Pool the candidates of an image by attention: (n, C)."""
    config, candidates = pooling.config, []  # (n, C, 1) each
    if pooling.theta is not None:
        assert config.grid is not None
        theta = array(pooling.theta).reshape(1, 1, -1)
        for size in config.candidate_sizes:
            x = max_pooled(parts["map"], config.grid, size).reshape(0, 0, -1)  # (n, C, patch)
            scores = x.after(theta) * pooling.factor  # (n, 1, patch)
            weights = (scores / _lengths(x, pooling)).softmax(2)
            pooled = x @ weights.reshape(0, -1, 1)  # equation 1: (n, C, 1)
            if config.form == "vit":
                pooled = pooled.normalised(1, config.channels, LN_EPS)
            candidates.append(pooled)
    if "token" in parts:
        candidates.append(parts["token"].reshape(0, -1, 1))
    stacked = graph.concat(candidates, axis=2)  # B_n: (n, C, candidate)
    if pooling.mu is None:
        return stacked.reshape(0, -1)
    scores = stacked.after(array(pooling.mu).reshape(1, 1, -1)) * pooling.factor
    weights = (scores / _lengths(stacked, pooling)).softmax(2)  # (n, 1, candidate)
    return (stacked @ weights.reshape(0, -1, 1)).reshape(0, -1)  # equation 2


def _lengths(x: Value, pooling: PoolingByAttention) -> Value | float:
    """Divisors of the scores of vectors (n, C, vector)."""
    return x.length(1, least=NORM_EPS) if pooling.length is None else pooling.length


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


def window(i: int, length: int, count: int) -> range:
    """Rows of window i of adaptive pooling, as PyTorch cuts them.

    >>> [list(window(i, 7, 5)) for i in range(5)]
    [[0, 1], [1, 2], [2, 3, 4], [4, 5], [5, 6]]
    """
    return range(i * length // count, -(-(i + 1) * length // count))


# Components 2 and 3


def block_cosines(vectors: Value, layer: HeadBlock, support: Projected, bags: Bags) -> Value:
    """Cosines (n, class) of one block."""
    cap, recipe = layer.cap, layer.cap.recipe
    if isinstance(cap, CrossAttentionPooling):
        v_q, v_p = prototypes(vectors, cap, support, bags)  # (n, h, 1, d), (n or 1, h, class, d)
    else:
        v_q = vectors.reshape(0, 1, 1, -1)
        weights = (bags.real / bags.shots[:, None]).to(support.value.dtype)  # (class, shot)
        means = torch.einsum("ls,lshd->hld", weights, support.value[bags.rows])
        v_p = v_q.graph.value(array(means)[None])
    if recipe.centres:
        m = v_p.sum(2, keepdims=True) * (1 / len(bags.real))
        v_q, v_p = v_q - m, v_p - m
    products = (v_q * v_p).sum(1, 3)  # (n, class)
    lengths = v_p.length(1, 3, least=NORM_EPS).reshape(0, -1)  # (n or 1, class)
    return products / (v_q.length(1, 3, least=NORM_EPS).reshape(0, 1) * lengths)


def prototypes(
    vectors: Value, cap: CrossAttentionPooling, support: Projected, bags: Bags
) -> tuple[Value, Value]:
    """Equation 3: v^Q (n, h, 1, d) and v^P (n, h, class, d)."""
    channels, heads = cap.norm.normalized_shape[0], cap.heads
    x = vectors.normalised(1, channels, LN_EPS) * array(cap.norm.weight) + array(cap.norm.bias)

    def project(layer: nn.Module) -> Value:
        out = x
        if isinstance(layer, nn.Linear):
            out = x @ array(layer.weight).T + array(layer.bias)  # (n, C)
        return out.reshape(0, heads, 1, -1)  # (n, h, 1, d)

    key, value = project(cap.key), project(cap.value)
    keys, values = (array(bags.collect(each)) for each in (support.key, support.value))
    v_q = value
    if cap.recipe.cross_attention:
        weights = _attention(key, cap, support, bags)  # (n, h, class, 1, shot)
        v_p = (weights @ values[None]).reshape(0, heads, len(bags.real), -1)  # (n, h, class, d)
        of_keys = (weights @ keys[None]).reshape(0, heads, len(bags.real), -1)
    else:
        equal = array(bags.real / bags.shots[:, None])  # (class, shot)
        graph = vectors.graph
        v_p, of_keys = (
            graph.value(mean[None].astype(np.float32))
            for mean in (np.einsum("ls,hlsd->hld", equal, each) for each in (values, keys))
        )
    if cap.excitation is not None:
        gate = project(cap.excitation).sigmoid()
        v_q, v_p = v_q * gate, v_p * gate
    if cap.recipe.skip:
        v_q, v_p = v_q + key, v_p + of_keys
    return v_q, v_p


def _attention(key: Value, cap: CrossAttentionPooling, support: Projected, bags: Bags) -> Value:
    """Equation 4: weights of the shots of each class, (n, h, class, 1, shot)."""
    shots = array(support.key.transpose(0, 1))[None]  # (1, h, shot, d)
    if cap.recipe.attention == "l1":  # written out: exporters get PyTorch's `cdist` wrong
        scores = (key - shots).abs().sum(3)  # (n, h, shot)
    else:
        scores = (key @ shots.swapaxes(2, 3)).reshape(0, cap.heads, -1)
    scores = scores * cap.factor
    classes, most = bags.real.shape
    if not bags.even:
        padding = np.where(array(bags.real).ravel(), 0, -np.inf)
        scores = scores.take(array(bags.rows).ravel(), 2) + padding
    return scores.reshape(0, cap.heads, classes, 1, most).softmax(4)


def combine(graph: Graph, cosines: Sequence[Value], recipe: Recipe) -> Value:
    """Logits (n, class) of a head without experts: the logsumexp of its blocks."""
    if recipe.temperature_order == "inside":
        cosines = [each / recipe.temperature for each in cosines]
    largest = graph.largest(cosines)
    total = _total([(each - largest).exp() for each in cosines])
    logits = total.log() + largest
    return logits if recipe.temperature_order == "inside" else logits / recipe.temperature


def _total(values: Sequence[Value]) -> Value:
    total = values[0]
    for each in values[1:]:
        total = total + each
    return total


# The ensemble


def ensemble_logits(
    cosines: Sequence[Value],
    features: Mapping[int, Mapping[str, Value]],
    blocks: Sequence[Block],
    ensemble: Ensemble,
) -> Value:
    """Logits (n, class): the weighted sum of the head's cosines and the experts' memberships."""
    weights = array(ensemble.weights.double())
    of_head, of_experts = weights[: len(cosines)], weights[len(cosines) :]
    members = [each * float(w) for each, w in zip(cosines, of_head, strict=True)]
    patches = {  # (n, component, patch)
        i: principal(parts["map"], ensemble.experts.pcas[i])
        for i, parts in features.items()
        if "map" in parts
    }
    intercepts = 0.0
    for (expert, ridge), weight in zip(ensemble.experts.ridges.items(), of_experts, strict=True):
        x = descriptor(expert, features[expert.block], patches, blocks[expert.block])
        members.append(x @ (weight * array(ridge.coefficients)))  # the weight is folded in
        intercepts = intercepts + weight * array(ridge.intercepts)
    return _total(members) + intercepts


def principal(map_: Value, pca: PatchPCA) -> Value:
    """Patches in the coordinates of the PCA: (n, component, patch)."""
    patches = map_.reshape(0, 0, -1)  # (n, C, patch)
    mean, components = array(pca.mean)[:, None], array(pca.components)
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
        x = (x @ average(grid)[None] if max(grid) > SIDE else x).reshape(0, -1)
    return x / x.length(1, least=NORM_EPS)


def average(grid: tuple[int, ...]) -> NDArray[np.floating[Any]]:
    """Adaptive average pooling to at most 7x7, as a matrix (patch, pooled patch)."""
    rows, columns = (
        np.stack([np.isin(np.arange(n), window(i, n, m)) / len(window(i, n, m)) for i in range(m)])
        for n, m in ((n, min(SIDE, n)) for n in grid)
    )
    return np.kron(rows, columns).T


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
