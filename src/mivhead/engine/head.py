"""The MIV-head on arrays: the three components of the paper, each followed by its gradient.

Read it beside `mivhead.head`, which states the same formulas for PyTorch. Patches are frozen, so
what depends on them alone (`Candidates`) is computed once per task. Each image is pooled and
projected once per step, as a query and as a shot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead._util.threads import run_parts
from mivhead.engine import compiled, plain
from mivhead.engine.library import library
from mivhead.engine.plain import NORM_EPS, BagComparison
from mivhead.features import Block, Features, to_single
from mivhead.head.blocks import BlockConfig
from mivhead.head.recipe import Recipe

Array = NDArray[np.float32]

LN_EPS = 1e-5  # of LayerNorms
SPREAD = math.sqrt(0.72676)  # of |x - y| for standard normal x and y, so s = SPREAD * sqrt(d)
SLAB = 2**18  # values of a large matrix that are updated at a time: 1 MB
PREDICT = 64  # query images pooled at once in prediction
LINEAR = {"key": "W^K", "value": "W^V", "excitation": "kappa"}  # layers of Component 2


def functions() -> ModuleType:
    """Return the module whose functions compute: `compiled` if there is a library for it."""
    return plain if library() is None else compiled


class Candidates(NamedTuple):
    """The candidates A_n of n images of one block, ready for pooling."""

    maps: list[NDArray[Any]]  # of every map candidate: (image, patch, channel)
    scale: Array | None  # tau / sqrt(C) / |patch|: (image, patches of all maps)
    token: Array | None  # (image, channel)

    def __len__(self) -> int:
        return len(self.maps[0] if self.maps else self.token)  # type: ignore[arg-type]


class Projected(NamedTuple):
    """What Component 2 needs of images: keys, values and, as queries, gates: (image, channel)."""

    key: Array
    value: Array
    gate: Array | None  # None without co-excitation

    def rows(self, index: slice) -> Projected:
        """Select images."""
        gate = None if self.gate is None else self.gate[index]
        return Projected(self.key[index], self.value[index], gate)


@dataclass(frozen=True, eq=False)
class Bags:
    """The shots of each class: support rows, class after class."""

    starts: NDArray[np.int64]  # (class + 1,): where the shots of each class start

    @classmethod
    def from_shots(cls, shots: Sequence[int] | NDArray[np.int64]) -> Bags:
        """Make the bags of a support set that is ordered by class.

        >>> Bags.from_shots([2, 1]).starts
        array([0, 2, 3])
        """
        return cls(np.concatenate([[0], np.cumsum(shots)]).astype(np.int64))

    def own(self, sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the shot that each query was made from, or -1 if it is the only one of its class.

        >>> Bags.from_shots([2, 1]).own(np.array([1, 2, 0]))
        array([ 1, -1,  0])
        """
        shots = np.diff(self.starts)
        alone = np.repeat(shots == 1, shots)  # (shot,)
        return np.where(alone[sources], -1, sources)


class Tape(NamedTuple):
    """What a forward pass of one block leaves for the backward pass."""

    rows: NDArray[np.int64]
    weights: Array | None  # attention over patches
    pooled: Array | None  # I_n
    stacked: Array  # B_n
    vectors: Array  # M_n
    x: Array  # LN(M_n)


class HeadBlock:
    """The three components for one block of the backbone, up to its cosines.

    For its parameters see `shapes`.
    """

    def __init__(
        self, config: BlockConfig, recipe: Recipe, params: Mapping[str, NDArray[Any]]
    ) -> None:
        self.config, self.recipe = config, recipe
        self.params = {k: np.ascontiguousarray(v, np.float32) for k, v in params.items()}
        self.tau = config.tau / math.sqrt(config.channels)  # factor of the scores of Component 1
        self.length = math.sqrt(config.channels) if config.form == "vit" else None  # else |patch|

    @staticmethod
    def shapes(config: BlockConfig, recipe: Recipe) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters; `theta` and `mu` exist where they have a choice."""
        channels = config.channels
        shapes: dict[str, tuple[int, ...]] = {}
        if config.candidate_sizes:
            shapes["pooling.theta"] = (channels,)
        if config.candidates > 1:
            shapes["pooling.mu"] = (channels,)
        if recipe.prototype == "mean":
            return shapes
        shapes |= {"cap.norm.weight": (channels,), "cap.norm.bias": (channels,)}
        for layer in LINEAR:
            if (layer == "key" and not recipe.cross_attention) or (
                layer == "excitation" and not recipe.co_excitation
            ):
                continue
            shapes[f"cap.{layer}.weight"] = (channels, channels)
            shapes[f"cap.{layer}.bias"] = (channels,)
        return shapes

    @classmethod
    def initial(
        cls, config: BlockConfig, recipe: Recipe, generator: np.random.RandomState
    ) -> HeadBlock:
        """Make a block before training: `theta` and `mu` are zero, which is average pooling.

        With `start="identity"` keys and values are the vectors themselves and gates are equal, a
        nearest centroid; with `"random"` linear layers are drawn as PyTorch draws them.
        """
        params = {}
        bound = 1 / math.sqrt(config.channels)
        for name, shape in cls.shapes(config, recipe).items():
            if name == "cap.norm.weight":
                params[name] = np.ones(shape, np.float32)
            elif name.startswith("pooling.") or name == "cap.norm.bias":
                params[name] = np.zeros(shape, np.float32)
            elif recipe.start == "random":
                params[name] = torch_uniform(generator, shape, bound)
            elif name in ("cap.key.weight", "cap.value.weight"):
                params[name] = np.eye(config.channels, dtype=np.float32)
            else:
                params[name] = np.zeros(shape, np.float32)
        return cls(config, recipe, params)

    # Component 1: pooling by attention, from patches to one vector per image.

    def prepare(self, *parts: Block) -> Candidates:
        """Derive the candidates of a block; patches stay float16 if the features are."""
        maps: list[NDArray[Any]] = []
        scale = None
        given = [part.map for part in parts if part.map is not None]
        if given and self.config.candidate_sizes:
            if any(map_.dtype != np.float16 for map_ in given):
                given = [to_single(map_) for map_ in given]
            maps, norms = functions().derive(given, self.config.candidate_sizes)
            if self.length is not None:
                norms[:] = self.length
            scale = np.float32(self.tau) / np.maximum(norms, np.float32(NORM_EPS), out=norms)
        tokens = [to_single(part.token) for part in parts if part.token is not None]
        return Candidates(maps, scale, np.concatenate(tokens) if tokens else None)

    def pool(self, candidates: Candidates, rows: NDArray[np.int64]) -> tuple[Array, Tape]:
        """Image vectors M_n, (image, channel), of some images, and what their gradients need."""
        parts, weights, pooled = [], None, None
        if "pooling.theta" in self.params:
            assert candidates.scale is not None
            theta = self.params["pooling.theta"]
            pooled, weights = functions().pool_forward(
                theta, candidates.maps, candidates.scale, rows
            )  # equation 1: I_n, (image, candidate, channel)
            parts.append(normalise(pooled)[0] if self.config.form == "vit" else pooled)
        if candidates.token is not None:
            parts.append(candidates.token[rows][:, None])  # [CLS]
        stacked = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]  # B_n
        if "pooling.mu" in self.params:  # equation 2
            given = self.params["pooling.mu"], stacked, self.tau, self.length
            vectors = functions().candidates_forward(*given)
        else:
            vectors = stacked[:, 0]
        return vectors, Tape(rows, weights, pooled, stacked, vectors, vectors)

    def _pool_backward(
        self, candidates: Candidates, tape: Tape, d_vectors: Array, add: Gradients
    ) -> None:
        """Add the gradients of mu and theta."""
        if "pooling.mu" in self.params:
            mu = self.params["pooling.mu"]
            d_mu, d_stacked = functions().candidates_backward(
                mu, tape.stacked, d_vectors, self.tau, self.length
            )
            add("pooling.mu", d_mu)
        else:
            d_stacked = d_vectors[:, None]
        if tape.pooled is None or tape.weights is None or candidates.scale is None:
            return
        d_pooled = d_stacked[:, : tape.pooled.shape[1]]
        if self.config.form == "vit":
            d_pooled = _through_norm(d_pooled, *normalise(tape.pooled))
        d_theta = functions().pool_backward(
            d_pooled, candidates.maps, candidates.scale, tape.rows, tape.weights, tape.pooled
        )
        add("pooling.theta", d_theta)

    # Component 2: keys, values and gates.

    def embed(self, candidates: Candidates, rows: NDArray[np.int64] | None = None) -> Projected:
        """Compute what Component 2 needs of each image."""
        if rows is None:
            rows = np.arange(len(candidates))
        return self.embed_with_tape(candidates, rows)[0]

    def embed_with_tape(
        self, candidates: Candidates, rows: NDArray[np.int64]
    ) -> tuple[Projected, Tape]:
        """Like `embed`; also return what gradients need."""
        vectors, tape = self.pool(candidates, rows)
        if self.recipe.prototype == "mean":
            return Projected(vectors, vectors, None), tape
        p = self.params
        x, _ = normalise(vectors)
        x *= p["cap.norm.weight"]
        x += p["cap.norm.bias"]  # v^query or v^target: (image, channel)
        key = self._linear("key", x) if "cap.key.weight" in p else x  # x W^K
        value = self._linear("value", x)  # x W^V
        gate = None
        if "cap.excitation.weight" in p:  # MHCE, equation 5
            gate = self._linear("excitation", x)
            np.negative(gate, out=gate)
            with np.errstate(over="ignore"):  # 1 / (1 + infinity) is 0, as it should be
                np.exp(gate, out=gate)
            gate += 1
            np.reciprocal(gate, out=gate)
        return Projected(key, value, gate), tape._replace(x=x)

    def _linear(self, layer: str, x: Array) -> Array:
        # BLAS rounds the product of a single row differently from that of several: so that a
        # prediction does not depend on its batch, there are always several.
        rows = np.repeat(x, 2, axis=0) if len(x) == 1 else x
        with np.errstate(over="ignore", invalid="ignore"):  # of a forged model: seen in the answer
            y: Array = (rows @ self.params[f"cap.{layer}.weight"].T)[: len(x)]
        y += self.params[f"cap.{layer}.bias"]
        return y

    def backward(
        self,
        candidates: Candidates,
        tape: Tape,
        projected: Projected,
        gradients: Projected,
        add: Gradients,
    ) -> None:
        """Add the gradients of all parameters, given those of keys, values and gates."""
        if self.recipe.prototype == "mean":
            self._pool_backward(candidates, tape, gradients.value, add)
            return
        p, x = self.params, tape.x
        outputs = {"value": gradients.value}
        d_x = np.zeros_like(x)
        if "cap.key.weight" in p:
            outputs["key"] = gradients.key
        else:
            d_x += gradients.key
        if gradients.gate is not None and projected.gate is not None:
            outputs["excitation"] = gradients.gate * projected.gate * (1 - projected.gate)
        for layer, grad in outputs.items():
            d_x += grad @ p[f"cap.{layer}.weight"]
            add.product(f"cap.{layer}.weight", grad.T, x)
            add(f"cap.{layer}.bias", grad.sum(axis=0))
        normal, scale = normalise(tape.vectors)
        add("cap.norm.weight", (d_x * normal).sum(axis=0))
        add("cap.norm.bias", d_x.sum(axis=0))
        d_x *= p["cap.norm.weight"]
        self._pool_backward(candidates, tape, _through_norm(d_x, normal, scale), add)

    # Component 2 and the cosines of Component 3.

    def comparison(
        self,
        query: Projected,
        support: Projected,
        bags: Bags,
        hidden: NDArray[np.int64] | None = None,
    ) -> BagComparison:
        """Describe the comparison of queries with the bags of a support set."""
        recipe, mean = self.recipe, self.recipe.prototype == "mean"
        heads = 1 if mean else self.config.heads
        scale = recipe.eta / math.sqrt(self.config.channels / heads)
        l1 = recipe.attention == "l1"
        return BagComparison(
            y=query.key,
            v=query.value,
            gate=query.gate,
            z=support.key,
            w=support.value,
            starts=bags.starts,
            hidden=hidden,
            heads=heads,
            attention=recipe.attention if recipe.cross_attention and not mean else "uniform",
            factor=-scale / SPREAD if l1 else scale,  # equation 4; its c cancels in the softmax
            skip=recipe.skip and not mean,
            centred=recipe.centres,
        )


class Gradients:
    """Gradients of a block, each added once per step to the velocity of its parameter.

    Velocities decay first. Those of large matrices are updated some rows at a time, which stay in
    the processor's cache meanwhile.
    """

    def __init__(self, velocity: dict[str, Array], momentum: np.float32) -> None:
        self.velocity, self.momentum = velocity, momentum

    def __call__(self, name: str, gradient: Array) -> None:
        """Add a gradient."""
        self.velocity[name] *= self.momentum
        self.velocity[name] += gradient

    def product(self, name: str, a: Array, b: Array) -> None:
        """Add a matrix product."""
        velocity = self.velocity[name]
        for part in slabs(velocity):
            velocity[part] *= self.momentum
            velocity[part] += a[part] @ b


def slabs(x: Array) -> Iterator[slice]:
    """Split an array into groups of rows that fit into a processor's cache.

    >>> list(slabs(np.empty((3, SLAB // 2), np.float32)))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    size = max(1, SLAB // max(1, x[0].size))
    return (slice(start, start + size) for start in range(0, len(x), size))


def normalise(x: Array) -> tuple[Array, Array]:
    """LayerNorm without parameters along the last axis; also return 1 / deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    scale = np.reciprocal(np.sqrt(variance + np.float32(LN_EPS)))
    centred *= scale
    return centred, scale


def _through_norm(grad: Array, normal: Array, scale: Array) -> Array:
    """Gradient of the input of `normalise`, given that of its output."""
    inner = (grad * normal).mean(axis=-1, keepdims=True)
    out: Array = scale * (grad - grad.mean(axis=-1, keepdims=True) - normal * inner)
    return out


def torch_uniform(generator: np.random.RandomState, shape: tuple[int, ...], bound: float) -> Array:
    """Draw from [-bound, bound) what PyTorch's generator of the same seed would draw.

    >>> torch_uniform(np.random.RandomState(0), (2,), 1.0).round(4)
    array([-0.0075,  0.5364], dtype=float32)
    """
    bits = generator.randint(0, 2**32, size=shape, dtype=np.uint32)
    unit = (bits & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
    drawn: Array = unit * np.float32(2 * bound) - np.float32(bound)
    return drawn


def taken_blocks(blocks: Sequence[BlockConfig], recipe: Recipe) -> list[int]:
    """List the blocks of the features that the head uses.

    A block that is marked `pooled` is left to other heads and, with ridge experts in the recipe,
    those that are marked `plain` to them, unless there are no others.
    """
    if not recipe.has_head:
        return []
    own = [i for i, config in enumerate(blocks) if not config.pooled] or [*range(len(blocks))]
    spared = recipe.has_experts and not all(blocks[i].plain for i in own)
    return [i for i in own if not (spared and blocks[i].plain)]


class Head:
    """The MIV-head: compares queries with the bags of a support set.

    `layers` are shallow to deep, `taken` the blocks of the features that they belong to.
    """

    def __init__(self, layers: Sequence[HeadBlock], recipe: Recipe, taken: Sequence[int]) -> None:
        self.layers, self.recipe, self.taken = list(layers), recipe, list(taken)

    @classmethod
    def initial(cls, blocks: Sequence[BlockConfig], recipe: Recipe, seed: int) -> Head:
        """Make a head before training."""
        generator = np.random.RandomState(seed % 2**32)
        taken = taken_blocks(blocks, recipe)
        layers = [HeadBlock.initial(blocks[i], recipe, generator) for i in taken]
        return cls(layers, recipe, taken)

    @staticmethod
    def shapes(blocks: Sequence[BlockConfig], recipe: Recipe) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `params`."""
        return {
            f"blocks.{place}.{name}": shape
            for place, i in enumerate(taken_blocks(blocks, recipe))
            for name, shape in HeadBlock.shapes(blocks[i], recipe).items()
        }

    @classmethod
    def from_params(
        cls,
        blocks: Sequence[BlockConfig],
        recipe: Recipe,
        params: Mapping[str, NDArray[Any]],
    ) -> Head:
        """Make a head from its parameters, as in a model file."""
        taken = taken_blocks(blocks, recipe)
        layers = []
        for place, i in enumerate(taken):
            names = HeadBlock.shapes(blocks[i], recipe)
            own = {name: params[f"blocks.{place}.{name}"] for name in names}
            layers.append(HeadBlock(blocks[i], recipe, own))
        return cls(layers, recipe, taken)

    @property
    def params(self) -> dict[str, Array]:
        """All parameters by name, as in a model file."""
        return {
            f"blocks.{place}.{name}": value
            for place, layer in enumerate(self.layers)
            for name, value in layer.params.items()
        }

    def prepare(self, *parts: Features) -> list[Candidates]:
        """Derive the candidates of all images, which do not change during training."""
        pairs = zip(self.layers, self.taken, strict=True)
        return [layer.prepare(*(part.blocks[i] for part in parts)) for layer, i in pairs]

    def embed(self, candidates: Sequence[Candidates]) -> list[Projected]:
        """Compute what Component 2 needs of each image, per block."""
        return [layer.embed(c) for layer, c in zip(self.layers, candidates, strict=True)]

    def compare(
        self, query: Sequence[Projected], support: Sequence[Projected], bags: Bags
    ) -> Array:
        """Cosines (block, query, class) of queries with the bags of a support set."""
        triples = zip(self.layers, query, support, strict=True)
        comparisons = [layer.comparison(q, s, bags) for layer, q, s in triples]
        return np.stack([functions().cap_forward(each, keep=False)[0] for each in comparisons])

    def cosines(self, support: Sequence[Projected], bags: Bags, queries: Features) -> Array:
        """Cosines (block, query, class) of features, some images at a time."""
        out = np.empty((len(self.layers), len(queries), len(bags.starts) - 1), np.float32)
        starts = range(0, len(queries) if self.layers else 0, PREDICT)

        def predict(number: int) -> None:
            part = slice(starts[number], starts[number] + PREDICT)
            embedded = self.embed(self.prepare(queries[part]))
            out[:, part] = self.compare(embedded, support, bags)

        run_parts(predict, len(starts))
        return out


class Trained(NamedTuple):
    """What training on some of the images gives."""

    head: Head
    losses: list[float]  # of every step, taken before its update
    cosines: Array  # (block, image, class) of the other images, which the head has not seen


def combine(cosines: Array, recipe: Recipe) -> Array:
    """Component 3: logits (query, class) from the cosines of all blocks, (block, query, class)."""
    inside = recipe.temperature_order == "inside"
    x = cosines / np.float32(recipe.temperature) if inside else cosines
    top = x.max(axis=0)
    logits: Array = top + np.log(np.exp(x - top).sum(axis=0))
    return logits if inside else logits / np.float32(recipe.temperature)
