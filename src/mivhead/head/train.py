"""Training: a head is fitted to a support set by full-batch gradient descent on pseudo-queries.

Pseudo-queries are the support images and their augmented views; bags hold the original images only.
Blocks whose losses are apart (`objective="blocks"`) are trained side by side, and so are heads on
different parts of the support set, as stacking and cross-validation need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mivhead._util.threads import run_parts
from mivhead.features import SupportSet
from mivhead.head.components import Candidates, Head, HeadBlock, bag_starts
from mivhead.head.formulas import Array, Gradient, Ints, Projected, chunks, cross_entropy
from mivhead.head.kernels import fast
from mivhead.head.recipe import BlockConfig, Recipe, taken_blocks

LARGEST_VELOCITY = 1e3  # norm per parameter; below 20 on five real image sets
SLAB = 2**18  # values of a large matrix that are updated at a time, in the processor's cache: 1 MB


class Trained(NamedTuple):
    """What training on some of the images gives."""

    head: Head
    losses: list[float]  # of every step, taken before its update
    cosines: Array  # (block, image, class) of the other images, which the head has not seen


@dataclass(frozen=True, eq=False)
class HeadTask:
    """Which images of a support set a head is trained on."""

    rows: Ints  # pseudo-queries, the shots first, then views
    labels: Ints  # their class numbers
    shots: slice  # those that are shots
    starts: Ints  # (class + 1,): where the shots of each class start
    hidden: Ints | None  # the shot that each pseudo-query does not see, or -1

    @classmethod
    def of(cls, support: SupportSet, recipe: Recipe, kept: NDArray[np.bool_] | None) -> HeadTask:
        """Take all images and their views, or those that are kept."""
        images = len(support.labels)
        kept = np.ones(images, bool) if kept is None else kept
        views = np.flatnonzero(kept[support.view_rows])
        rows = np.concatenate([np.flatnonzero(kept), images + views])
        sources = support.sources[rows]
        labels, classes = support.labels[sources], int(support.labels[-1]) + 1
        shots = np.bincount(support.labels[kept], minlength=classes)
        hidden = None
        if recipe.self_mask:
            place = np.cumsum(kept) - 1  # of each image among those that are kept
            hidden = np.where(shots[labels] == 1, -1, place[sources])
        return cls(rows, labels, slice(int(kept.sum())), bag_starts(shots), hidden)


@dataclass(frozen=True, eq=False)
class _Run:
    """A head in training."""

    task: HeadTask
    others: Ints  # images that it does not see
    keep: bool  # whether its layers are needed afterwards
    layers: dict[int, HeadBlock]  # those that are trained
    losses: NDArray[np.float64]  # (block, step)
    cosines: Array  # (block, image, class) of the others


class Trainer:
    """Trains heads on a support set.

    The candidates of a block exist only while its heads are trained. Blocks whose losses are apart
    are trained side by side as long as their candidates together are not larger than the features.
    `on_step` gets the part of a head that a step was about, such as 0.5 for one of two blocks.
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
        self.on_step, self.taken = on_step, taken_blocks(blocks, recipe)

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
            runs.append(_Run(task, others, keep or kept is None, {}, losses, cosines))
        generator = np.random.RandomState(self.seed % 2**32)
        for places in self._side_by_side():
            self._fit_blocks(places, runs, generator)
        trained = []
        for run in runs:
            layers = [run.layers[i] for i in sorted(run.layers)]
            losses = run.losses.sum(axis=0).tolist() if count else []
            trained.append(Trained(Head(layers, self.recipe, self.taken), losses, run.cosines))
        return trained

    def _side_by_side(self) -> list[list[int]]:
        """List the blocks, as places in `taken`, that are trained at the same time."""
        if self.recipe.objective == "joint":
            return [[*range(len(self.taken))]] if self.taken else []
        room = sum(part[0].size for part in self.support.features.tensors.values())
        together: list[list[int]] = []
        left = 0
        for place, i in enumerate(self.taken):
            block = self.blocks[i]
            values = block.channels * sum(h * w for h, w in block.candidate_sizes)
            if not together or values > left:
                together.append([])
                left = room
            together[-1].append(place)
            left -= values
        return together

    def _fit_blocks(
        self, places: Sequence[int], runs: Sequence[_Run], generator: np.random.RandomState
    ) -> None:
        """Train blocks of all heads; their candidates are derived once."""
        views = [] if self.support.views is None else [self.support.views]
        generators, candidates = {}, {}
        for place in places:
            i = self.taken[place]
            generators[place] = deepcopy(generator)
            block = HeadBlock.initial(self.blocks[i], self.recipe, generator)
            parts = [features.blocks[i] for features in (self.support.features, *views)]
            candidates[place] = block.prepare(*parts)

        joint = self.recipe.objective == "joint"
        groups = [list(places)] if joint else [[place] for place in places]
        # The largest blocks first, so that no thread is left with one of them at the end.
        groups.sort(key=lambda group: -max(self.blocks[self.taken[i]].channels for i in group))

        def work(number: int) -> None:
            which, whose = divmod(number, len(runs))
            group, run = groups[which], runs[whose]
            layers = {}
            for place in group:  # made once more: copies would take memory
                config, again = self.blocks[self.taken[place]], deepcopy(generators[place])
                layers[place] = HeadBlock.initial(config, self.recipe, again)
            on_step = partial(self.on_step, len(group) / len(self.taken))
            known = [candidates[place] for place in group]
            run.losses[group[0]] = train([*layers.values()], known, run.task, self.recipe, on_step)
            for place, layer in layers.items() if len(run.others) else ():
                shots, _ = layer.embed(candidates[place], run.task.rows[run.task.shots])
                queries, _ = layer.embed(candidates[place], run.others)
                how = layer.comparison(queries, shots, run.task.starts)
                run.cosines[place], _ = fast().cosines(how, keep=False)
            if run.keep:
                run.layers.update(layers)

        run_parts(work, len(groups) * len(runs))


class Descent:
    """Gradient descent with momentum on the parameters of a block; large ones, row by row."""

    def __init__(self, params: dict[str, Array], recipe: Recipe) -> None:
        self.params, self.recipe = params, recipe
        self.velocity = {name: np.zeros_like(value) for name, value in params.items()}

    def add(self, name: str, gradient: Gradient) -> None:
        """Let the velocity of a parameter decay, and add its gradient."""
        velocity, momentum = self.velocity[name], np.float32(self.recipe.momentum)
        if not isinstance(gradient, tuple):
            velocity *= momentum
            velocity += gradient
            return
        a, b = gradient
        for part in chunks(len(velocity), velocity[0].size, SLAB):
            velocity[part] *= momentum
            velocity[part] += a[part] @ b

    def step(self) -> None:
        """Move the parameters."""
        for name, velocity in self.velocity.items():
            # Of images that look the same to the backbone, centred vectors are almost zero, and
            # the gradient of a cosine explodes there.
            norm = float(np.linalg.norm(velocity))
            if not np.isfinite(norm):
                velocity[:] = 0
            elif norm > LARGEST_VELOCITY:
                velocity *= np.float32(LARGEST_VELOCITY / norm)
            pools, recipe = name.startswith("pooling."), self.recipe
            rate = np.float32(recipe.pooling_learning_rate if pools else recipe.learning_rate)
            for part in chunks(len(velocity), velocity[0].size, SLAB):
                self.params[name][part] -= rate * velocity[part]


def train(
    layers: Sequence[HeadBlock],
    candidates: Sequence[Candidates],
    task: HeadTask,
    recipe: Recipe,
    on_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train blocks in place; return the loss of every step."""
    descents = [Descent(layer.params, recipe) for layer in layers]
    losses = []
    for _ in range(recipe.steps):
        losses.append(add_gradients(layers, candidates, task, recipe, descents))
        for descent in descents:
            descent.step()
        on_step()
    return losses


def add_gradients(
    layers: Sequence[HeadBlock],
    candidates: Sequence[Candidates],
    task: HeadTask,
    recipe: Recipe,
    descents: Sequence[Descent],
) -> float:
    """Return the mean cross-entropy over the pseudo-queries; hand its gradients to `descents`."""
    pairs = zip(layers, candidates, strict=True)
    passed = [layer.embed(c, task.rows) for layer, c in pairs]
    embedded = [projected for projected, _ in passed]
    gradients = [Projected(*(np.empty_like(x) for x in projected)) for projected in embedded]
    of_shots = [Projected(*(np.zeros_like(x) for x in p.rows(task.shots))) for p in embedded]
    total = 0.0
    values = task.starts[-1] * max(layer.config.heads for layer in layers)
    for part in chunks(len(task.rows), values):  # comparing needs memory for queries x shots
        hidden = None if task.hidden is None else task.hidden[part]
        comparisons = [
            layer.comparison(projected.rows(part), projected.rows(task.shots), task.starts, hidden)
            for layer, projected in zip(layers, embedded, strict=True)
        ]
        results = [fast().cosines(how, keep=True) for how in comparisons]
        cosines = np.stack([cosine for cosine, _ in results])  # (block, query, class)
        loss, d_cosines = cross_entropy(cosines, task.labels[part], recipe)
        d_cosines /= np.float32(len(task.rows))
        for i, (cosine, kept) in enumerate(results):
            changes = fast().cosines_backward(comparisons[i], kept, cosine, d_cosines[i])
            for gradient, change in zip(gradients[i].rows(part), changes[0], strict=True):
                gradient[:] = change
            for gradient, change in zip(of_shots[i], changes[1:], strict=False):
                gradient += change
        total += loss

    def backward(i: int) -> None:
        gradients[i].key[task.shots] += of_shots[i].key
        gradients[i].value[task.shots] += of_shots[i].value
        tape = passed[i][1]
        for name, gradient in layers[i].backward(candidates[i], tape, embedded[i], gradients[i]):
            descents[i].add(name, gradient)

    run_parts(backward, len(layers))
    return total / len(task.rows)
