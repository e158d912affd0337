"""The paper's formulas again, in plain loops and float64: what the fast head is checked against.

Nothing here is shared with the package. One image, one query, one class, one attention head at a
time; the support is visited again for every query.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def softmax(x: list[float]) -> list[float]:
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def max_pool(map_: Array, size: int) -> Array:
    """Adaptive max pooling of (C, H, W) to (C, size, size): windows floor/ceil."""
    channels, height, width = map_.shape
    out = np.empty((channels, size, size))
    for i in range(size):
        for j in range(size):
            rows = slice(i * height // size, -(-(i + 1) * height // size))
            cols = slice(j * width // size, -(-(j + 1) * width // size))
            out[:, i, j] = map_[:, rows, cols].max(axis=(1, 2))
    return out


def attend(query: Array, vectors: list[Array], form: str, tau: float) -> Array:
    """Equation 1 or 2: one vector from several."""
    channels = len(query)
    scores = []
    for v in vectors:
        if form == "cnn":
            normalised = v / max(np.linalg.norm(v), 1e-12)
            scores.append(tau / math.sqrt(channels) * float(query @ normalised))
        else:
            scores.append(tau / channels * float(query @ v))
    return sum(w * v for w, v in zip(softmax(scores), vectors, strict=True))


def layer_norm(x: Array, weight: Array | float = 1.0, bias: Array | float = 0.0) -> Array:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weight + bias


def image_vector(
    map_: Array | None, token: Array | None, config: dict, theta: Array | None, mu: Array | None
) -> Array:
    """Component 1 for one image."""
    candidates = []
    if map_ is not None:
        maps = [map_] if config["native"] else []
        maps += [max_pool(map_, size) for size in config["pool_sizes"]]
        for candidate in maps:
            patches = list(candidate.reshape(len(candidate), -1).T)
            pooled = attend(theta, patches, config["form"], config["tau"])
            candidates.append(layer_norm(pooled) if config["form"] == "vit" else pooled)
    if token is not None:
        candidates.append(token)
    if len(candidates) == 1:
        return candidates[0]
    return attend(mu, candidates, config["form"], config["tau"])


def cap(
    query: Array, bag: list[Array], params: dict[str, Array], heads: int, **recipe
) -> tuple[Array, Array]:
    """Component 2 for one query and one class: (v^P, v^Q)."""
    eta = recipe.get("eta", 0.1)
    use_attention = recipe.get("cross_attention", True)
    ln = [layer_norm(x, params["norm.weight"], params["norm.bias"]) for x in (query, *bag)]
    q, shots = ln[0], ln[1:]
    channels = len(q)
    d = channels // heads

    def project(name: str, x: Array) -> Array:
        return params[f"{name}.weight"] @ x + params[f"{name}.bias"]

    key = (lambda x: project("key", x)) if use_attention else (lambda x: x)
    gate = np.ones(channels)
    if recipe.get("co_excitation", True):
        gate = 1 / (1 + np.exp(-project("excitation", q)))

    def full(x: Array) -> Array:
        out = project("value", x) * gate
        return out + key(x) if recipe.get("skip", True) else out

    prototype = np.empty(channels)
    for j in range(heads):
        part = slice(j * d, (j + 1) * d)
        if use_attention:
            scores = []
            for s in shots:
                y, z = key(q)[part], key(s)[part]
                if recipe.get("attention", "l1") == "l1":
                    c = 1.12838 * d
                    spread = math.sqrt(0.72676 * d)
                    scores.append((c - np.abs(y - z).sum()) / spread * eta)
                else:
                    scores.append(float(y @ z) / math.sqrt(d) * eta)
            weights = softmax(scores)
        else:
            weights = [1 / len(shots)] * len(shots)
        prototype[part] = sum(w * full(s)[part] for w, s in zip(weights, shots, strict=True))
    return prototype, full(q)


def centred_cosine(query: Array, prototypes: list[Array], centred: bool = True) -> list[float]:
    m = sum(prototypes) / len(prototypes) if centred else np.zeros_like(query)
    out = []
    for p in prototypes:
        a, b = query - m, p - m
        out.append(float(a @ b) / (max(np.linalg.norm(a), 1e-12) * max(np.linalg.norm(b), 1e-12)))
    return out


def combine(per_block: list[list[float]], temperature: float, order: str) -> list[float]:
    """Component 3 for one query: per block a list of cosines over classes."""
    out = []
    for cosines in zip(*per_block, strict=True):
        if order == "inside":
            out.append(math.log(sum(math.exp(c / temperature) for c in cosines)))
        else:
            out.append(math.log(sum(math.exp(c) for c in cosines)) / temperature)
    return out
