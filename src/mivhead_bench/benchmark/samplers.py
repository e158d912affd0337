"""Samples tasks from a labelled image set: Meta-Dataset's sampler, or fixed ways and shots.

Task number i depends only on the random seed, the name of the set, the protocol and i: sampling
more tasks does not change the first ones. The images of a class are shuffled before they are
split, as neighbouring files may be nearly identical (frames of one traffic sign).

References
----------
Triantafillou et al. (2020). Meta-Dataset: A dataset of datasets for learning to learn from few
examples. ICLR. arXiv:1903.03096.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from mivhead.errors import InputError
from mivhead.images.imageset import ImageSet
from mivhead_bench.benchmark.tasks import Task, TaskSet
from mivhead_bench.datasets.catalogue import groups_of

TASKS = 600  # per set, as in the paper
MIN_WAYS = 5
MAX_CONTRIBUTION = 100  # images of one class that count towards the size of the support
MIN_LOG_WEIGHT, MAX_LOG_WEIGHT = math.log(0.5), math.log(2.0)

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_FIXED = re.compile(r"(\d+)-way (\d+)-shot")
_VARYING_OPTIONS = ("max_ways", "max_support", "max_queries")
_FIXED_OPTIONS = ("max_queries", "unlabelled", "open")

FOREIGN_CLASSES = 2  # that a task with unlabelled or unknown images leaves out, at least

# Of tasks with unlabelled images.
FOREIGN = 0.3  # share of images of other classes
CONCENTRATION = 2.0  # of the Dirichlet distribution of class frequencies: they are unbalanced


@dataclass(frozen=True)
class Protocol:
    """How the ways, shots and queries of a task are chosen.

    Parameters
    ----------
    kind : {"varying", "fixed"}, default="varying"
        `varying` samples ways and shots as Meta-Dataset does; `fixed` uses the same for all tasks.
    ways, shots : int, optional
        For a fixed protocol: number of classes, and of support images per class. Tasks of a set
        with fewer classes contain all of them.
    max_ways, max_support : int, default=50, 500
        For a varying protocol: maximum number of classes, and of support images per task.
    max_queries : int, default=10
        Maximum number of query images per class.
    unlabelled : int, default=0
        For a fixed protocol: number of unlabelled images per task, of which 30% show other classes
        of the set; the rest is distributed over the classes at random, unevenly. At least two
        classes of a set are then not in a task.
    open : bool, default=False
        For a fixed protocol: whether a task also has queries of unknown classes, as many of at
        least two other classes of the set, and as many of the other sets of the run.

    Examples
    --------
    >>> Protocol.parse("5-way 1-shot").shots
    1
    >>> Protocol.parse("5-way 1-shot, unlabelled 60").unlabelled
    60
    >>> Protocol.parse("10-way 5-shot, open").open
    True
    >>> Protocol(max_support=100).name
    'varying, max_support 100'
    """

    kind: Literal["varying", "fixed"] = "varying"
    ways: int | None = None
    shots: int | None = None
    max_ways: int = 50
    max_support: int = 500
    max_queries: int = 10
    unlabelled: int = 0
    open: bool = False

    def __post_init__(self) -> None:
        fixed = self.kind == "fixed"
        if fixed != (self.ways is not None) or fixed != (self.shots is not None):
            raise InputError("A fixed protocol needs ways and shots; a varying one has neither.")
        limits = {
            "ways": (2, self.ways),
            "shots": (1, self.shots),
            "max_ways": (MIN_WAYS, self.max_ways),
            "max_support": (self.max_ways, self.max_support),
            "max_queries": (1, self.max_queries),
        }
        for name, (least, value) in limits.items():
            if value is not None and value < least:
                raise InputError(f"The protocol's {name} is {value}; expected at least {least}.")
        if self.open and self.unlabelled:
            raise InputError("A protocol is either open or has unlabelled images, not both.")

    @property
    def name(self) -> str:
        """The protocol as a string, as `parse` reads it and task files and results contain it."""
        usual = Protocol()
        base = "varying" if self.kind == "varying" else f"{self.ways}-way {self.shots}-shot"
        options = _VARYING_OPTIONS if self.kind == "varying" else _FIXED_OPTIONS
        changed = [option for option in options if getattr(self, option) != getattr(usual, option)]
        return ", ".join(
            [base, *(o if o == "open" else f"{o} {getattr(self, o)}" for o in changed)]
        )

    @classmethod
    def parse(cls, text: str) -> Protocol:
        """Read a string such as `varying`, `5-way 1-shot, open` or `varying, max_support 100`."""
        base, *options = [part.strip() for part in text.split(",")]
        match = _FIXED.fullmatch(base)
        if match is None and base != "varying":
            raise InputError(
                f"The protocol {text!r} is not known; expected 'varying', or ways and shots such "
                "as '5-way 1-shot'."
            )
        allowed = _FIXED_OPTIONS if match else _VARYING_OPTIONS
        chosen: dict[str, Any] = {}
        for option in options:
            parsed = re.fullmatch(r"(open)|(?!open)(\w+) (\d+)", option)
            name = "" if parsed is None else parsed[1] or parsed[2]
            if parsed is None or name not in allowed or name in chosen:
                raise InputError(
                    f"The protocol {text!r} has the option {option!r}; {base!r} may be followed "
                    f"by {', '.join(allowed)}, each once, and with a number unless it is 'open'."
                )
            chosen[name] = True if name == "open" else int(parsed[3])
        if match is None:
            return cls("varying", None, None, **chosen)
        return cls("fixed", int(match[1]), int(match[2]), **chosen)

    @property
    def least_ways(self) -> int:
        """Minimum number of classes of a set."""
        fewest = min(MIN_WAYS, self.ways or MIN_WAYS)
        return fewest + self._left_out

    @property
    def _left_out(self) -> int:
        """Number of classes that a task leaves out, at least."""
        return FOREIGN_CLASSES if self.unlabelled or self.open else 0

    @property
    def least_images(self) -> int:
        """Minimum number of images of a class: its shots and one query."""
        return (self.shots or 1) + 1

    def sample_ways(self, rng: np.random.Generator, classes: int) -> int:
        """Sample the number of classes of a task, of a set with `classes` of them."""
        if self.ways is not None:
            return min(self.ways, classes - self._left_out)
        return int(rng.integers(MIN_WAYS, min(self.max_ways, classes) + 1))

    def queries_per_class(self, sizes: Counts) -> int:
        """Return the number of queries per class in a task whose classes have these sizes.

        At most half of the smallest class, as in Meta-Dataset, and what the shots leave of it; a
        third of that if there are unlabelled images too.

        >>> [Protocol.parse("5-way 1-shot").queries_per_class(np.array([n])) for n in (2, 7, 40)]
        [1, 3, 10]
        """
        smallest = int(sizes.min())
        if self.unlabelled:
            return min(self.max_queries, max(1, (smallest - (self.shots or 1)) // 3))
        return min(self.max_queries, smallest // 2, smallest - (self.shots or 1))

    def sample_shots(self, rng: np.random.Generator, sizes: Counts) -> Counts:
        """Sample the shots of each class in a task whose classes have these sizes."""
        if self.shots is not None:
            return np.full(len(sizes), self.shots)
        left = sizes - self.queries_per_class(sizes)  # (class)
        beta = rng.uniform()
        contributions = np.floor(beta * np.minimum(MAX_CONTRIBUTION, left)) + 1  # (class)
        support = min(self.max_support, int(contributions.sum()))
        weights = np.exp(rng.uniform(MIN_LOG_WEIGHT, MAX_LOG_WEIGHT, len(sizes)))  # (class)
        shares = sizes * weights / (sizes * weights).sum()  # (class)
        wanted = np.floor(shares * (support - len(sizes))).astype(np.int64) + 1  # (class)
        shots: Counts = np.minimum(wanted, left)  # (class)
        return shots


@dataclass(frozen=True)
class LeftOut:
    """A set from which a protocol cannot sample tasks, and what would have to change."""

    set: str
    protocol: str
    reason: str


def sample_tasks(
    images: ImageSet,
    name: str,
    protocol: Protocol,
    seed: int,
    count: int = TASKS,
    *,
    groups: Mapping[str, str] | None = None,
    others: Mapping[str, ImageSet] | None = None,
) -> TaskSet | LeftOut:
    """Sample the first `count` tasks of a set.

    Parameters
    ----------
    images : ImageSet
        With labels.
    name : str
        Name of the set; the tasks depend on it.
    protocol : Protocol
        How to sample tasks.
    seed : int
        Random seed.
    count : int, default=600
        Number of tasks.
    groups : mapping of str to str, optional
        Group of each class, such as its alphabet; the classes of a task then come from one group.
        By default as declared for the set of this name: alphabets for Omniglot, and a single group
        for all others.
    others : mapping of str to ImageSet, optional
        The other sets of the run, for an open protocol.

    Returns
    -------
    TaskSet or LeftOut

    Examples
    --------
    >>> from mivhead.images.imageset import from_images
    >>> pictures = from_images([np.zeros((2, 2), np.uint8)] * 30)
    >>> images = ImageSet(pictures.sources, tuple("abcde") * 6)
    >>> tasks = sample_tasks(images, "letters", Protocol.parse("5-way 1-shot"), seed=0, count=2)
    >>> [len(task.support) for task in tasks.tasks], len(tasks.tasks[0].queries)
    ([5, 5], 15)
    """
    if groups is None:
        groups = groups_of(name, images.classes)
    members: dict[str, list[str]] = {label: [] for label in images.classes}
    for id_, label in zip(images.ids, images.labels or (), strict=True):
        members[label].append(id_)
    few = [label for label, ids in members.items() if len(ids) < protocol.least_images]
    if few:
        return LeftOut(name, protocol.name, _too_few_images(name, few, members, protocol))
    pools: dict[str, list[str]] = {}
    for label in members:
        pools.setdefault(groups[label], []).append(label)
    large = [pool for pool in pools.values() if len(pool) >= protocol.least_ways]
    if not large:
        return LeftOut(name, protocol.name, _too_few_classes(name, pools, protocol))
    small = tuple(
        f"{group}: {len(pool)} classes, at least {protocol.least_ways} are needed"
        for group, pool in pools.items()
        if len(pool) < protocol.least_ways
    )
    foreign = {other: other_images.ids for other, other_images in (others or {}).items()}
    tasks = tuple(
        _sample(_generator(seed, name, protocol, number), large, members, protocol, foreign)
        for number in range(count)
    )
    return TaskSet(name, protocol.name, seed, tasks, small)


def _sample(
    rng: np.random.Generator,
    pools: list[list[str]],
    members: Mapping[str, list[str]],
    protocol: Protocol,
    others: Mapping[str, Sequence[str]],
) -> Task:
    pool = pools[rng.integers(len(pools))]
    ways = protocol.sample_ways(rng, len(pool))
    classes = [pool[place] for place in rng.choice(len(pool), ways, replace=False)]
    sizes = np.array([len(members[label]) for label in classes])
    queries = protocol.queries_per_class(sizes)
    shots = protocol.sample_shots(rng, sizes)
    query_ids: list[str] = []
    support_ids: list[str] = []
    left: list[list[str]] = []  # per class
    for label, class_shots in zip(classes, shots.tolist(), strict=True):
        shuffled = [members[label][place] for place in rng.permutation(len(members[label]))]
        query_ids += shuffled[:queries]
        support_ids += shuffled[queries : queries + class_shots]
        left.append(shuffled[queries + class_shots :])
    unknown: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    if protocol.open:
        of_others = [id_ for label in pool if label not in classes for id_ in members[label]]
        unknown = _choose(rng, of_others, len(query_ids))
        per_set = -(-len(query_ids) // max(1, len(others)))
        foreign = tuple(
            foreign_id(other, id_)
            for other in sorted(others)
            for id_ in _choose(rng, others[other], per_set)
        )
    return Task(
        tuple(classes),
        tuple(support_ids),
        tuple(np.repeat(np.arange(ways), shots).tolist()),
        tuple(query_ids),
        tuple(np.repeat(np.arange(ways), queries).tolist()),
        _sample_unlabelled(rng, left, members, classes, protocol.unlabelled),
        unknown,
        foreign,
    )


def _choose(rng: np.random.Generator, ids: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(ids[place] for place in rng.permutation(len(ids))[:count])


def foreign_id(name: str, id_: str) -> str:
    """Return the id of an image of another set in a task.

    >>> foreign_id("birds", "robin/1.jpg")
    'birds:robin/1.jpg'
    """
    return f"{name}:{id_}"


def _sample_unlabelled(
    rng: np.random.Generator,
    left: list[list[str]],
    members: Mapping[str, list[str]],
    classes: list[str],
    count: int,
) -> tuple[str, ...]:
    """Sample from what is left of the classes of a task, unevenly, and from other classes."""
    if not count:
        return ()
    foreign = [id_ for label, ids in members.items() if label not in classes for id_ in ids]
    number = min(round(FOREIGN * count), len(foreign))
    chosen = list(_choose(rng, foreign, number))
    shares = rng.dirichlet([CONCENTRATION] * len(classes))  # (class)
    for _ in range(count - number):
        open_ = np.array([bool(ids) for ids in left]) * shares  # classes that have images left
        if not open_.any():
            break
        chosen.append(left[rng.choice(len(left), p=open_ / open_.sum())].pop())
    return tuple(chosen[place] for place in rng.permutation(len(chosen)))


def _generator(seed: int, name: str, protocol: Protocol, number: int) -> np.random.Generator:
    key = json.dumps([seed, name, protocol.name, number]).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()))


def _too_few_images(
    name: str, few: list[str], members: Mapping[str, list[str]], protocol: Protocol
) -> str:
    more = f" and {len(few) - 1} more classes" if len(few) > 1 else ""
    shots = "" if protocol.shots is None else ", or use fewer shots"
    return (
        f"{name} has only {len(members[few[0]])} of the {protocol.least_images} images that "
        f"{protocol.name!r} needs in the class {few[0]!r}{more}: add images, remove these classes"
        f"{shots}."
    )


def _too_few_classes(name: str, pools: Mapping[str, list[str]], protocol: Protocol) -> str:
    most = max(map(len, pools.values()), default=0)
    where = "in any of its groups " if len(pools) > 1 else ""
    return (
        f"{name} has at most {most} classes {where}and {protocol.name!r} needs at least "
        f"{protocol.least_ways}: add classes, or use a fixed protocol with fewer ways, such as "
        "'2-way 1-shot'."
    )


def find_tasks(
    path: Path,
    open_images: Callable[[str], ImageSet],
    name: str,
    protocol: str,
    seed: int,
    count: int,
    others: Sequence[str] = (),
) -> TaskSet | LeftOut:
    """Read the tasks of a run from its folder; sample and save them if there are none yet."""
    if not path.exists():
        rules = Protocol.parse(protocol)
        more = {other: open_images(other) for other in others if rules.open}
        sampled = sample_tasks(open_images(name), name, rules, seed, count, others=more)
        if isinstance(sampled, TaskSet):
            sampled.save(path)
        return sampled
    tasks = TaskSet.load(path)
    expected = {"set": name, "protocol": protocol, "seed": seed, "number of tasks": count}
    stored = (tasks.set, tasks.protocol, tasks.seed, len(tasks.tasks))
    for (what, wanted), actual in zip(expected.items(), stored, strict=True):
        if actual != wanted:
            raise InputError(
                f"The task file {path} belongs to another run: its {what} is {actual!r}, not "
                f"{wanted!r}; choose another results folder."
            )
    return tasks
