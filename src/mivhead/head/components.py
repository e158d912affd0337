"""The MIV-head: its parameters, and the way from features to the cosines of each block and back.

Patches are frozen, so what depends on them alone (`Candidates`) is computed once per task. Each
image is pooled and projected once per step, as a query and as a shot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead._util.schema import check_tensors
from mivhead._util.threads import run_parts
from mivhead.features import Block, Features, to_single
from mivhead.head.formulas import (
    NORM_EPS,
    Array,
    Comparison,
    Gradient,
    Ints,
    Projected,
    normalise,
    normalise_backward,
    pool_candidates,
    pool_candidates_backward,
)
from mivhead.head.kernels import fast
from mivhead.head.recipe import BlockConfig, Recipe, taken_blocks

PREDICT = 64  # query images pooled at once in prediction
LINEAR = ("key", "value", "excitation")  # layers of Component 2: W^K, W^V and kappa


class Candidates(NamedTuple):
    """The candidates A_n of n images of one block, ready for pooling."""

    maps: list[NDArray[Any]]  # of every map candidate: (image, patch, channel)
    scale: Array | None  # tau / sqrt(C) / |patch|: (image, patches of all maps)
    token: Array | None  # (image, channel)


def bag_starts(shots: Sequence[int] | Ints) -> Ints:
    """Return where the shots of each class start, (class + 1,), if they are ordered by class."""
    return np.concatenate([[0], np.cumsum(shots)]).astype(np.int64)


class Tape(NamedTuple):
    """What a forward pass of one block leaves for the backward pass."""

    rows: Ints
    weights: Array | None  # of patches: (image, patches of all maps)
    pooled: Array | None  # I_n: (image, candidate, channel)
    stacked: Array  # B_n: (image, candidate, channel)
    choice: tuple[Array, Array, Array] | None  # of `pool_candidates`
    normal: Array  # M_n, normalised: (image, channel)
    scale: Array  # 1 / deviation of M_n: (image, 1)
    x: Array  # LN(M_n): (image, channel)


class HeadBlock:
    """The three components for one block of the backbone, up to its cosines."""

    def __init__(
        self, config: BlockConfig, recipe: Recipe, params: Mapping[str, NDArray[Any]]
    ) -> None:
        self.config, self.recipe = config, recipe
        self.params = {k: np.ascontiguousarray(v, np.float32) for k, v in params.items()}
        self.tau = config.tau / math.sqrt(config.channels)  # factor of the scores of Component 1
        self.length = math.sqrt(config.channels) if config.form == "vit" else None  # else |patch|

    @staticmethod
    def shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters; `theta` and `mu` exist where they have a choice."""
        vector, matrix = (config.channels,), (config.channels, config.channels)
        shapes: dict[str, tuple[int, ...]] = {}
        if config.candidate_sizes:
            shapes["pooling.theta"] = vector
        if config.candidates > 1:
            shapes["pooling.mu"] = vector
        shapes |= {"cap.norm.weight": vector, "cap.norm.bias": vector}
        for layer in LINEAR:
            shapes |= {f"cap.{layer}.weight": matrix, f"cap.{layer}.bias": vector}
        return shapes

    @classmethod
    def initial(
        cls, config: BlockConfig, recipe: Recipe, generator: np.random.RandomState
    ) -> HeadBlock:
        """Make a block before training: `theta` and `mu` are zero, which is average pooling.

        With `start="identity"` keys and values are the vectors themselves and gates are equal, a
        nearest centroid; with `"random"` linear layers are drawn as PyTorch draws them.
        """
        params = {name: np.zeros(shape, np.float32) for name, shape in cls.shapes(config).items()}
        params["cap.norm.weight"] += 1
        for name, value in params.items():
            if recipe.start == "random" and name.split(".")[1] in LINEAR:
                bound, drawn = 1 / math.sqrt(config.channels), torch_uniform(generator, value.shape)
                params[name] = drawn * np.float32(2 * bound) - np.float32(bound)
            elif name in ("cap.key.weight", "cap.value.weight"):
                np.fill_diagonal(value, 1)
        return cls(config, recipe, params)

    def prepare(self, *parts: Block) -> Candidates:
        """Derive the candidates of a block, such as that of shots and that of their views."""
        maps: list[NDArray[Any]] = []
        scale = None
        full = [part.map for part in parts if part.map is not None]
        if full and self.config.candidate_sizes:
            if any(map_.dtype != np.float16 for map_ in full):
                full = [to_single(map_) for map_ in full]
            maps, norms = fast().derive_candidates(full, self.config.candidate_sizes)
            if self.length is not None:
                norms[:] = self.length
            scale = np.float32(self.tau) / np.maximum(norms, np.float32(NORM_EPS), out=norms)
        tokens = [to_single(part.token) for part in parts if part.token is not None]
        return Candidates(maps, scale, np.concatenate(tokens) if tokens else None)

    def embed(self, candidates: Candidates, rows: Ints) -> tuple[Projected, Tape]:
        """Component 1, and the projections of Component 2; also return what gradients need."""
        stacked, weights, pooled = [], None, None
        if candidates.scale is not None:
            theta = self.params["pooling.theta"]
            pooled, weights = fast().pool_patches(theta, candidates.maps, candidates.scale, rows)
            stacked.append(normalise(pooled)[0] if self.config.form == "vit" else pooled)
        if candidates.token is not None:
            stacked.append(candidates.token[rows][:, None])  # [CLS]
        b = np.concatenate(stacked, axis=1) if len(stacked) > 1 else stacked[0]
        vectors, choice = b[:, 0], None
        if "pooling.mu" in self.params:
            vectors, choice = pool_candidates(self.params["pooling.mu"], b, self.tau, self.length)
        normal, scale = normalise(vectors)
        x = normal * self.params["cap.norm.weight"]
        x += self.params["cap.norm.bias"]  # v^query or v^target: (image, channel)
        with np.errstate(over="ignore"):  # 1 / (1 + infinity) is 0, as it should be
            gate: Array = np.reciprocal(1 + np.exp(-self._linear("excitation", x)))  # equation 5
        projected = Projected(self._linear("key", x), self._linear("value", x), gate)
        return projected, Tape(rows, weights, pooled, b, choice, normal, scale, x)

    def _linear(self, layer: str, x: Array) -> Array:
        # BLAS rounds the product of a single row differently from that of several, so there are
        # always several. A prediction still depends on its batch by a few millionths, because
        # OpenBLAS rounds the products of few and of many rows differently.
        rows = np.repeat(x, 2, axis=0) if len(x) == 1 else x
        with np.errstate(over="ignore", invalid="ignore"):  # of a forged model: seen in the answer
            y: Array = (rows @ self.params[f"cap.{layer}.weight"].T)[: len(x)]
        y += self.params[f"cap.{layer}.bias"]
        return y

    def backward(
        self, candidates: Candidates, tape: Tape, projected: Projected, d_projected: Projected
    ) -> Iterator[tuple[str, Gradient]]:
        """Yield the gradients of all parameters, given those of keys, values and gates."""
        d_key, d_value, d_gate = d_projected
        d_gate = d_gate * projected.gate * (1 - projected.gate)  # through the sigmoid
        d_x = np.zeros_like(tape.x)  # (image, channel)
        for layer, d in (("value", d_value), ("key", d_key), ("excitation", d_gate)):
            d_x += d @ self.params[f"cap.{layer}.weight"]
            yield f"cap.{layer}.weight", (d.T, tape.x)
            yield f"cap.{layer}.bias", d.sum(axis=0)
        yield "cap.norm.weight", (d_x * tape.normal).sum(axis=0)
        yield "cap.norm.bias", d_x.sum(axis=0)
        d_x *= self.params["cap.norm.weight"]
        d_vectors = normalise_backward(d_x, tape.normal, tape.scale)
        d_b = d_vectors[:, None]  # (image, candidate, channel)
        if tape.choice is not None:
            mu = self.params["pooling.mu"]
            d_mu, d_b = pool_candidates_backward(
                mu, tape.stacked, d_vectors, tape.choice, self.tau, self.length
            )
            yield "pooling.mu", d_mu
        if tape.pooled is not None:
            d_pooled = d_b[:, : tape.pooled.shape[1]]  # without the token
            if self.config.form == "vit":
                d_pooled = normalise_backward(d_pooled, *normalise(tape.pooled))
            passed = candidates.maps, candidates.scale, tape.rows, tape.weights, tape.pooled
            yield "pooling.theta", fast().pool_patches_backward(d_pooled, *passed)

    def comparison(
        self, query: Projected, shots: Projected, starts: Ints, hidden: Ints | None = None
    ) -> Comparison:
        """Describe the comparison of queries with bags of shots."""
        return Comparison(query, shots, starts, hidden, self.config.heads, self.recipe.eta)


def torch_uniform(generator: np.random.RandomState, shape: tuple[int, ...]) -> Array:
    """Draw from [0, 1) what PyTorch's generator of the same seed would draw.

    >>> torch_uniform(np.random.RandomState(0), (2,)).round(4)
    array([0.4963, 0.7682], dtype=float32)
    """
    bits = generator.randint(0, 2**32, size=shape, dtype=np.uint32)
    return (bits & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


@dataclass(eq=False)
class Head:
    """The MIV-head: compares queries with the bags of a support set."""

    layers: Sequence[HeadBlock]  # shallow to deep
    recipe: Recipe
    taken: Sequence[int]  # the blocks of the features that the layers belong to

    @classmethod
    def from_params(
        cls, blocks: Sequence[BlockConfig], recipe: Recipe, params: Mapping[str, NDArray[Any]]
    ) -> Head:
        """Make a head from the parameters in a model file, checking them."""
        taken = taken_blocks(blocks, recipe)
        shapes = {
            f"blocks.{place}.{name}": shape
            for place, i in enumerate(taken)
            for name, shape in HeadBlock.shapes(blocks[i]).items()
        }
        check_tensors(params, shapes)
        layers = []
        for place, i in enumerate(taken):
            names = HeadBlock.shapes(blocks[i])
            of_layer = {name: params[f"blocks.{place}.{name}"] for name in names}
            layers.append(HeadBlock(blocks[i], recipe, of_layer))
        return cls(layers, recipe, taken)

    @property
    def params(self) -> dict[str, Array]:
        """All parameters by name, as in a model file."""
        return {
            f"blocks.{place}.{name}": value
            for place, layer in enumerate(self.layers)
            for name, value in layer.params.items()
        }

    def embed(self, features: Features) -> list[Projected]:
        """Compute what Component 2 needs of each image, per block."""
        rows, pairs = np.arange(len(features)), zip(self.layers, self.taken, strict=True)
        return [layer.embed(layer.prepare(features.blocks[i]), rows)[0] for layer, i in pairs]

    def cosines(self, shots: Sequence[Projected], starts: Ints, queries: Features) -> Array:
        """Cosines (block, query, class) of features with bags, some images at a time."""
        out = np.empty((len(self.layers), len(queries), len(starts) - 1), np.float32)

        def predict(number: int) -> None:
            part = slice(number * PREDICT, (number + 1) * PREDICT)
            embedded = self.embed(queries[part])
            for i, layer in enumerate(self.layers):
                how = layer.comparison(embedded[i], shots[i], starts)
                out[i, part], _ = fast().cosines(how, keep=False)

        run_parts(predict, -(-len(queries) // PREDICT) if self.layers else 0)
        return out
