"""The MIV-head as its formulas read: the yardstick of `adapt.py`, slow on purpose.

The support is pooled and projected again for every chunk of queries and repeated for each of them,
classes come one after the other, and autograd keeps everything. It runs in PyTorch. Parameters are
those of mivhead's own head, so that both compute the same loss; recipe "paper" only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.features import Block, Features
from mivhead.head.components import Head
from mivhead.head.components import HeadBlock as Layer
from mivhead.head.recipe import BlockConfig, Recipe
from mivhead_bench.head.head import HeadBlock, MIVHead

CHUNK = 50  # queries at once, or the repeated support would not fit into memory


def initial_head(blocks: Sequence[BlockConfig], recipe: Recipe) -> Head:
    """Make a head before training."""
    generator = np.random.RandomState(0)
    layers = [Layer.initial(block, recipe, generator) for block in blocks]
    return Head(layers, recipe, range(len(blocks)))


def plain_head(head: Head) -> MIVHead:
    """Copy the parameters of a head."""
    blocks = [layer.config for layer in head.layers]
    plain = MIVHead(blocks, head.recipe, None)
    plain.load_arrays(head.params)
    return plain


def image_vectors(layer: HeadBlock, block: Block) -> Tensor:
    """Component 1: (image, channel)."""
    map_, token = (
        None if part is None else torch.as_tensor(part).float() for part in (block.map, block.token)
    )
    config, pooling = layer.config, layer.pooling
    vit = config.form == "vit"
    scale = config.tau / math.sqrt(config.channels)

    def scores(vectors: Tensor, query: Tensor) -> Tensor:
        if vit:
            return vectors @ query * (scale / math.sqrt(config.channels))
        return F.normalize(vectors, dim=-1) @ query * scale

    candidates = []
    for size in config.candidate_sizes:
        pooled = F.adaptive_max_pool2d(map_, size)
        patches = pooled.flatten(2).transpose(1, 2)  # (image, patch, channel)
        weights = torch.softmax(scores(patches, pooling.theta), dim=1)
        vector = (weights.unsqueeze(2) * patches).sum(dim=1)
        candidates.append(F.layer_norm(vector, vector.shape[1:]) if vit else vector)
    if token is not None:
        candidates.append(token)
    if len(candidates) == 1:
        return candidates[0]
    stacked = torch.stack(candidates, dim=1)  # (image, candidate, channel)
    weights = torch.softmax(scores(stacked, pooling.mu), dim=1)
    return (weights.unsqueeze(2) * stacked).sum(dim=1)


def block_cosines(layer: HeadBlock, query: Tensor, support: Tensor, labels: Tensor) -> Tensor:
    """Components 2 and 3 of one block: (query, class)."""
    cap, heads = layer.cap, layer.config.heads
    n, channels = query.shape
    d = channels // heads
    x = cap.norm(query)
    key, value, gate = cap.key(x), cap.value(x), torch.sigmoid(cap.excitation(x))
    vector = value * gate + key  # v^Q: (query, channel)
    prototypes = []
    for label in range(int(labels.max()) + 1):
        bag = cap.norm(support[labels == label]).repeat(n, 1, 1)  # (query, shot, channel)
        keys, values = cap.key(bag), cap.value(bag) * gate.unsqueeze(1) + cap.key(bag)
        apart = (key.unsqueeze(1) - keys).abs().view(n, -1, heads, d).sum(dim=3)
        weights = torch.softmax(-0.1 * (apart - 1.12838 * d) / math.sqrt(0.72676 * d), dim=1)
        pooled = (weights.unsqueeze(3) * values.view(n, -1, heads, d)).sum(dim=1)
        prototypes.append(pooled.flatten(1))  # v^P: (query, channel)
    stacked = torch.stack(prototypes, dim=1)  # (query, class, channel)
    mean = stacked.mean(dim=1, keepdim=True)
    return F.cosine_similarity(stacked - mean, vector.unsqueeze(1) - mean, dim=2)


def logits(head: MIVHead, query: Features, support: Features, labels: Tensor) -> Tensor:
    """Logits (query, class)."""
    cosines = []
    for layer, q, s in zip(head.layers, query.blocks, support.blocks, strict=True):
        cosines.append(
            block_cosines(
                layer,
                image_vectors(layer, q),
                image_vectors(layer, s),
                labels,
            )
        )
    return torch.logsumexp(torch.stack(cosines), dim=0) / 0.1


def train(head: MIVHead, features: Features, labels: Tensor, shots: int, steps: int) -> list[float]:
    """Train in place and return the loss of every step; the first `shots` rows are the support."""
    optimizer = torch.optim.SGD(
        [{"params": layer.pooling.parameters(), "lr": 0.015} for layer in head.layers]
        + [{"params": layer.cap.parameters(), "lr": 0.3} for layer in head.layers],
        momentum=0.9,
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            out = logits(head, features[rows], features[:shots], labels[:shots])
            loss = F.cross_entropy(out, labels[rows], reduction="sum") / len(labels)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses
