"""Training: a head is fitted to a support set by full-batch gradient descent on pseudo-queries.

Pseudo-queries are the support images and their augmented views; bags hold the original images only.
Blocks whose losses are apart (`objective="blocks"`) are trained side by side, and so are heads on
different parts of the support set, as stacking and cross-validation need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead._util.threads import run_parts
from mivhead.engine.head import (
    Array,
    Bags,
    Candidates,
    Gradients,
    Head,
    HeadBlock,
    Projected,
    functions,
    slabs,
    taken_blocks,
)
from mivhead.engine.plain import chunks
from mivhead.head.blocks import BlockConfig
from mivhead.head.recipe import Recipe
from mivhead.support import SupportSet

LARGEST_VELOCITY = 1e3  # norm per parameter; below 20 on five real image sets


@dataclass(frozen=True, eq=False)
class HeadTask:
    """Which images of a support set a head is trained on."""

    rows: NDArray[np.int64]  # pseudo-queries, the shots first, then views
    labels: NDArray[np.int64]  # their class numbers
    bags: Bags
    hidden: NDArray[np.int64] | None  # the shot that each pseudo-query does not see, or -1

    @property
    def shots(self) -> int:
        """How many of the pseudo-queries are shots."""
        return int(self.bags.starts[-1])

    @classmethod
    def of(cls, support: SupportSet, recipe: Recipe, kept: NDArray[np.bool_] | None) -> HeadTask:
        """Take all images and their views, or those that are kept."""
        images = len(support.labels)
        kept = np.ones(images, bool) if kept is None else kept
        views = np.flatnonzero(kept[support.view_rows])
        rows = np.concatenate([np.flatnonzero(kept), images + views])
        classes = int(support.labels[-1]) + 1
        bags = Bags.from_shots(np.bincount(support.labels[kept], minlength=classes))
        hidden = None
        if recipe.self_mask:
            place = np.cumsum(kept) - 1  # of each image among those that are kept
            hidden = bags.own(place[support.sources[rows]])
        return cls(rows, support.all_labels[rows], bags, hidden)


class Trained(NamedTuple):
    """What training on some of the images gives."""

    head: Head
    losses: list[float]  # of every step, taken before its update
    cosines: Array  # (block, image, class) of the other images, which the head has not seen


@dataclass(frozen=True, eq=False)
class _Training:
    """A head in training."""

    task: HeadTask
    others: NDArray[np.int64]  # images that it does not see
    keep: bool  # whether its layers are needed afterwards
    layers: dict[int, HeadBlock]  # those that are trained
    losses: NDArray[np.float64]  # (block, step)
    cosines: Array  # (block, image, class) of the others


class Trainer:
    """Trains heads on a support set.

    The candidates of a block exist only while its heads are trained. Blocks whose losses are apart
    are trained side by side as long as their candidates together are not larger than the features.

    `on_step` is called after every step of every head with the part of the head that has been
    trained, such as 0.5 for one of two blocks.
    """

    def __init__(
        self,
        support: SupportSet,
        blocks: Sequence[BlockConfig],
        recipe: Recipe,
        seed: int,
        on_step: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.support, self.blocks, self.recipe, self.seed = support, blocks, recipe, seed
        self.on_step = on_step
        self.taken = taken_blocks(blocks, recipe)

    def fit(
        self, subsets: Sequence[NDArray[np.bool_] | None] = (None,), *, keep: bool = True
    ) -> list[Trained]:
        """Train one head per subset of the images, of which None is all.

        Without `keep`, heads that were trained on some of the images have no layers afterwards:
        only their cosines remain.
        """
        count, classes = len(self.taken), int(self.support.labels[-1]) + 1
        runs = []
        for kept in subsets:
            others = np.empty(0, np.int64) if kept is None else np.flatnonzero(~kept)
            losses = np.zeros((count, self.recipe.steps))
            cosines = np.zeros((count, len(others), classes), np.float32)
            task = HeadTask.of(self.support, self.recipe, kept)
            runs.append(_Training(task, others, keep or kept is None, {}, losses, cosines))
        generator = np.random.RandomState(self.seed % 2**32)
        for places in self._side_by_side():
            self._fit_blocks(places, runs, generator)
        return [
            Trained(
                Head([run.layers[i] for i in sorted(run.layers)], self.recipe, self.taken),
                run.losses.sum(axis=0).tolist() if count else [],
                run.cosines,
            )
            for run in runs
        ]

    def _side_by_side(self) -> list[list[int]]:
        """List the blocks, as places in `taken`, that are trained at the same time."""
        count = len(self.taken)
        if self.recipe.objective != "blocks" or not count:
            return [[*range(count)]] if count else []
        room = sum(each[0].size for each in self.support.features.tensors.values())
        together: list[list[int]] = [[]]
        left = room
        for i, number in enumerate(self.taken):
            block = self.blocks[number]
            values = block.channels * sum(h * w for h, w in block.candidate_sizes)
            if together[-1] and values > left:
                together.append([])
                left = room
            together[-1].append(i)
            left -= values
        return together

    def _fit_blocks(
        self, places: Sequence[int], runs: Sequence[_Training], generator: np.random.RandomState
    ) -> None:
        """Train blocks of all heads; their candidates are derived once."""
        configs = {i: self.blocks[self.taken[i]] for i in places}
        views = [] if self.support.views is None else [self.support.views]
        parts = [self.support.features, *views]
        states, candidates = {}, {}
        for i, config in configs.items():
            states[i] = generator.get_state()
            candidates[i] = HeadBlock.initial(config, self.recipe, generator).prepare(
                *(each.blocks[self.taken[i]] for each in parts)
            )

        def start(i: int) -> HeadBlock:
            """Make a block again instead of keeping a copy."""
            again = np.random.RandomState()
            again.set_state(states[i])
            return HeadBlock.initial(configs[i], self.recipe, again)

        groups = [[i] for i in places] if self.recipe.objective == "blocks" else [list(places)]
        # The largest blocks first, so that no thread is left with one of them at the end.
        groups.sort(key=lambda group: -max(configs[i].channels for i in group))

        def work(number: int) -> None:
            which, place = divmod(number, len(runs))
            group, run = groups[which], runs[place]
            layers = {i: start(i) for i in group}
            run.losses[group[0]] = train(
                list(layers.values()),
                [candidates[i] for i in group],
                run.task,
                self.recipe,
                lambda: self.on_step(len(group) / len(self.taken)),
            )
            for i, layer in layers.items() if len(run.others) else ():
                shots = layer.embed(candidates[i], run.task.rows[: run.task.shots])
                queries = layer.embed(candidates[i], run.others)
                how = layer.comparison(queries, shots, run.task.bags)
                run.cosines[i], _ = functions().cap_forward(how, keep=False)
            if run.keep:
                run.layers.update(layers)

        run_parts(work, len(groups) * len(runs))


def train(
    layers: Sequence[HeadBlock],
    candidates: Sequence[Candidates],
    task: HeadTask,
    recipe: Recipe,
    on_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train blocks in place, by gradient descent with momentum; return the loss of every step."""
    velocities = [{k: np.zeros_like(v) for k, v in layer.params.items()} for layer in layers]
    losses = []
    for _ in range(recipe.steps):
        losses.append(add_gradients(layers, candidates, task, recipe, velocities))
        for layer, velocity in zip(layers, velocities, strict=True):
            for name, value in velocity.items():
                _limit(value)
                pools = name.startswith("pooling.")
                rate = np.float32(recipe.pooling_learning_rate if pools else recipe.learning_rate)
                param = layer.params[name]
                for part in slabs(value):
                    param[part] -= rate * value[part]
        on_step()
    return losses


def _limit(velocity: Array) -> None:
    """Scale down what is far too long, in place: images that look the same to the backbone.

    Their centred vectors are almost zero, and the gradient of a cosine explodes there.
    """
    norm = float(np.linalg.norm(velocity))
    if not np.isfinite(norm):
        velocity[:] = 0
    elif norm > LARGEST_VELOCITY:
        velocity *= np.float32(LARGEST_VELOCITY / norm)


def add_gradients(
    layers: Sequence[HeadBlock],
    candidates: Sequence[Candidates],
    task: HeadTask,
    recipe: Recipe,
    velocities: Sequence[dict[str, Array]],
) -> float:
    """Return the mean cross-entropy over the pseudo-queries; add its gradient to `velocities`.

    The velocities decay before.
    """
    pairs = zip(layers, candidates, strict=True)
    passed = [layer.embed_with_tape(c, task.rows) for layer, c in pairs]
    embedded = [projected for projected, _ in passed]
    gradients = [
        Projected(*(None if x is None else np.zeros_like(x) for x in each))  # type: ignore[arg-type]
        for each in embedded
    ]
    total = 0.0
    values = task.shots * max(layer.config.heads for layer in layers)
    for part in chunks(len(task.rows), values):  # comparing needs memory for queries x shots
        total += _compare_with_gradients(layers, embedded, gradients, task, part, recipe)

    def backward(i: int) -> None:
        _, tape = passed[i]
        add = Gradients(velocities[i], np.float32(recipe.momentum))
        layers[i].backward(candidates[i], tape, embedded[i], gradients[i], add)

    run_parts(backward, len(layers))
    return total / len(task.rows)


def _compare_with_gradients(
    layers: Sequence[HeadBlock],
    embedded: Sequence[Projected],
    gradients: Sequence[Projected],
    task: HeadTask,
    part: slice,
    recipe: Recipe,
) -> float:
    """Sum the loss of some pseudo-queries; add its gradients by keys, values and gates."""
    compute, shots = functions(), slice(task.shots)
    hidden = None if task.hidden is None else task.hidden[part]
    comparisons = [
        layer.comparison(each.rows(part), each.rows(shots), task.bags, hidden)
        for layer, each in zip(layers, embedded, strict=True)
    ]
    results = [compute.cap_forward(each, keep=True) for each in comparisons]
    cosines = np.stack([cosines for cosines, _ in results])  # (block, query, class)
    total, d_cosines = loss(cosines, task.labels[part], recipe)
    d_cosines /= np.float32(len(task.rows))
    for i, (own, weights) in enumerate(results):
        d_y, d_v, d_gate, d_z, d_w = compute.cap_backward(
            comparisons[i], weights, own, d_cosines[i]
        )
        gradient = gradients[i]
        gradient.key[part] += d_y
        gradient.value[part] += d_v
        if gradient.gate is not None:
            gradient.gate[part] += d_gate
        gradient.key[shots] += d_z
        gradient.value[shots] += d_w
    return total


def loss(cosines: Array, labels: NDArray[np.int64], recipe: Recipe) -> tuple[float, Array]:
    """Cross-entropy, summed over queries, and its gradient by the cosines (block, query, class).

    It is that of the combined logits (`objective="joint"`), or of each block on its own.
    """
    t = np.float32(recipe.temperature)
    if recipe.objective == "blocks":
        total, d_logits = _cross_entropy(cosines / t, labels)
        return total, d_logits / t
    x = cosines / t if recipe.temperature_order == "inside" else cosines
    top = x.max(axis=0)
    share = np.exp(x - top)
    sums = share.sum(axis=0)
    share /= sums  # of each block in the logsumexp
    logits = top + np.log(sums)
    # Either way, the gradient of the logits by the cosines is share / t.
    scaled = logits if recipe.temperature_order == "inside" else logits / t
    total, d_logits = _cross_entropy(scaled[None], labels)
    return total, share * d_logits / t


def _cross_entropy(logits: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
    """Sum over blocks and queries of logits (block, query, class), and the gradient."""
    shifted = logits - logits.max(axis=2, keepdims=True)
    e = np.exp(shifted)
    sums = e.sum(axis=2, keepdims=True)
    queries = np.arange(len(labels))
    total = float((np.log(sums[..., 0]) - shifted[:, queries, labels]).sum())
    e /= sums
    e[:, queries, labels] -= 1
    return total, e
