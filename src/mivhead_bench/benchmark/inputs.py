"""What the tasks of a data set are given: its images, their augmented views, and the features.

Every image that a task needs, and every view of a support image, passes the backbone once. View
number i of an image is the same in every task and for every method. Extraction goes through
`mivhead.extraction`, so a run shares its features with other runs and with `miv fit`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, DecodedImage, to_picture
from mivhead.errors import InputError, NotAvailableError, reason_of
from mivhead.extraction.cache import CacheKeys, FeatureCache, entry_size
from mivhead.extraction.pipeline import BATCH, LoadedImage, extract_table, read_features
from mivhead.features import Features
from mivhead.images.augmentation import (
    Augmentation,
    ViewsRule,
    number_views,
    view_seed,
    views_per_image,
)
from mivhead.images.imageset import ImageSet
from mivhead_bench.benchmark.clock import Clock, Seconds
from mivhead_bench.benchmark.config import BackboneConfig
from mivhead_bench.benchmark.samplers import foreign_id
from mivhead_bench.benchmark.tasks import Task
from mivhead_bench.datasets.sets import open_set

CHUNK = 512  # images and views that one worker extracts at a time


@dataclass(frozen=True)
class Inputs:
    """Where the images and features of one data set come from.

    Workers receive this description and open images and backbone themselves.
    """

    # What to load; or a backbone, for calls that stay in the process that created it; or None, for
    # calls that only read features.
    backbone: BackboneConfig | Backbone | None
    set: str  # name of the data set
    data: Path  # folder of the data sets
    features: Path  # folder of the feature cache
    limit: int  # bytes that the cache may hold
    seed: int  # random seed of the views
    device: str | None = None  # where the backbone runs
    # Whether images are resized first as the paper's authors did (see `open_set`).
    paper_sizes: bool = False
    # Names of the other sets of the run, if a protocol is open: their images are there too.
    others: tuple[str, ...] = ()

    @property
    def cache(self) -> FeatureCache:
        """The feature cache, one object per process."""
        return _open_cache(self.features, self.limit)

    def open_backbone(self) -> Backbone:
        """Load the backbone, or return the one that this process loaded last."""
        if self.backbone is None:
            raise NotAvailableError(
                f"Features of {self.set} have disappeared from the cache {self.features}: run "
                "the same command again to extract them."
            )
        if isinstance(self.backbone, BackboneConfig):
            return load_once(self.backbone, self.device)
        return self.backbone

    def open_images(self) -> ImageSet:
        """Open all images that tasks may have, or return those that this process opened last."""
        return _open(self.set, self.data, self.paper_sizes, self.others)

    def open_set(self, name: str) -> ImageSet:
        """Open one set of the run."""
        return _open_one(name, self.data, self.paper_sizes)


@lru_cache(maxsize=1)
def load_once(config: BackboneConfig, device: str | None) -> Backbone:
    """Load a backbone, or return the one that this process loaded last."""
    return load_backbone(config.source, weights=config.weights, device=device, **config.settings)


@lru_cache(maxsize=1)
def _open(name: str, data: Path, paper_sizes: bool, others: Sequence[str]) -> ImageSet:
    images = _open_one(name, data, paper_sizes)
    more = (
        replace(source, id=foreign_id(other, source.id))
        for other in others
        for source in _open_one(other, data, paper_sizes).sources
    )
    return ImageSet((*images.sources, *more)) if others else images


@lru_cache(maxsize=32)  # an open protocol goes through all sets again and again
def _open_one(name: str, data: Path, paper_sizes: bool) -> ImageSet:
    return open_set(name, data, paper_sizes=paper_sizes)


@lru_cache(maxsize=2)
def _open_cache(folder: Path, limit: int) -> FeatureCache:
    return FeatureCache(folder, limit, strict=True)


@dataclass(frozen=True)
class ViewLimit:
    """How many views the shots of a class get: ceil(T / S) each, but at most `limit`."""

    threshold: int
    rule: ViewsRule
    limit: int

    def count(self, task: Task) -> list[int]:
        """Return the number of views of each support image of a task.

        >>> task = Task(("a", "b"), ("1", "2", "3"), (0, 0, 1), (), ())
        >>> ViewLimit(threshold=3, rule="ceil", limit=15).count(task)
        [2, 2, 3]
        """
        shots = np.bincount(task.support_labels)
        views = [min(self.limit, views_per_image(int(s), self.threshold, self.rule)) for s in shots]
        return [views[label] for label in task.support_labels]


def count_views(tasks: Iterable[Task], rules: Sequence[ViewLimit]) -> dict[str, int]:
    """Return all images that tasks need, each with its number of views under the rules.

    >>> task = Task(("a", "b"), ("1", "2"), (0, 1), ("3", "1"), (0, 1))
    >>> count_views([task], [ViewLimit(2, "ceil", limit=1)])
    {'1': 1, '2': 1, '3': 0}
    """
    views: dict[str, int] = {}
    for task in tasks:
        for id_ in task.images:
            views.setdefault(id_, 0)
        for rule in rules:
            for id_, count in zip(task.support, rule.count(task), strict=True):
                views[id_] = max(views[id_], count)
    return dict(sorted(views.items()))


class FeatureKeys:
    """Cache keys of a data set's images, those that tasks need, and of their views."""

    def __init__(
        self, backbone: Backbone, images: ImageSet, ids: Iterable[str], name: str, seed: int
    ) -> None:
        self._keys = CacheKeys(backbone, Augmentation())
        self._seed = seed
        self._known: dict[tuple[str, int | None], str] = {}  # an image occurs in many tasks
        sources = {source.id: source for source in images.sources}
        self._contents: dict[str, str] = {}
        for id_ in ids:
            if id_ not in sources:
                raise InputError(
                    f"A task needs the image {id_!r}, which {name} does not contain here: give the "
                    "data folder that the tasks were sampled from."
                )
            self._contents[id_] = LoadedImage(sources[id_]).hash

    def key(self, id_: str, view: int | None = None) -> str:
        """Return the key of an image, or of one of its views."""
        if (id_, view) not in self._known:
            content = self._contents[id_]
            seed = None if view is None else view_seed(self._seed, content, view)
            self._known[id_, view] = self._keys.key(content, seed)
        return self._known[id_, view]

    def of_task(self, task: Task, views: Sequence[int]) -> TaskKeys:
        """Return the keys of a task whose support images have this many views."""
        return TaskKeys(
            tuple(self.key(id_) for id_ in task.images),
            tuple(
                tuple(self.key(id_, view) for view in range(count))
                for id_, count in zip(task.support, views, strict=True)
            ),
        )


class TaskKeys(NamedTuple):
    """Cache keys of a task's images, and of the views of each support image."""

    images: tuple[str, ...]
    views: tuple[tuple[str, ...], ...]


class TaskFeatures:
    """Features of a task, in memory: read once for all methods.

    What the cache has lost in the meantime is extracted again.
    """

    def __init__(self, inputs: Inputs, task: Task, keys: TaskKeys | Sequence[int]) -> None:
        """Read the features of a task by their keys.

        Given the number of views of each support image instead, pass the images through the
        backbone and keep nothing of it, as the paper's authors do.
        """
        if isinstance(keys, TaskKeys):
            counts: Sequence[int] = [len(views) for views in keys.views]
            try:
                features, self.views = _read(inputs.cache, keys)
            except NotAvailableError:
                needed = dict.fromkeys(task.images, 0)
                needed |= dict(zip(task.support, counts, strict=True))
                Extraction(inputs, tuple(needed.items()))()
                features, self.views = _read(inputs.cache, keys)
        else:
            counts = keys
            features, self.views = _compute(inputs, task, counts)
        self._starts = np.cumsum([0, *counts])  # of the views of each support image
        ends = np.cumsum([len(part) for part in task.parts])
        self.support, self.queries, self.unlabelled, self.unknown, self.foreign = (
            features[end - len(part) : end] for part, end in zip(task.parts, ends, strict=True)
        )

    def take_views(self, counts: Sequence[int]) -> dict[str, Any]:
        """Return the first views of each support image as the arguments `views` and `view_of`."""
        view_of = np.repeat(np.arange(len(counts)), counts)
        if self.views is None or not len(view_of):
            return {}
        starts = self._starts[:-1]
        rows = [s + i for s, count in zip(starts, counts, strict=True) for i in range(count)]
        all_of_them = len(rows) == len(self.views)
        return {"views": self.views if all_of_them else self.views[rows], "view_of": view_of}


def _compute(inputs: Inputs, task: Task, counts: Sequence[int]) -> tuple[Features, Features | None]:
    images, ids = inputs.open_images(), task.images
    rows = {id_: row for row, id_ in enumerate(images.ids)}
    plan = number_views([*counts, *[0] * (len(ids) - len(counts))], inputs.seed)
    chosen = images.take(rows[id_] for id_ in ids)
    table = extract_table(inputs.open_backbone(), chosen, plan, verbose=False)
    return table.features, table.views


def _read(cache: FeatureCache, keys: TaskKeys) -> tuple[Features, Features | None]:
    views = [key for of_image in keys.views for key in of_image]
    features = read_features(cache, [*keys.images, *views])
    count = len(keys.images)
    return features[:count], features[count:] if views else None


@dataclass(frozen=True)
class Extraction:
    """Extracts features of some images and of their first views into the cache, when called."""

    inputs: Inputs
    views: tuple[tuple[str, int], ...]  # image ids, each with its number of views

    @property
    def size(self) -> int:
        """Number of images and views."""
        return sum(1 + count for _, count in self.views)

    def __call__(self) -> Seconds | None:
        """Return the time per image that the backbone took; None if it was not needed."""
        backbone = _Timed(self.inputs.open_backbone(), self.inputs.device)
        images = self.inputs.open_images()
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        plan = number_views([count for _, count in self.views], self.inputs.seed)
        chosen = images.take(rows[id_] for id_, _ in self.views)
        extract_table(backbone, chosen, plan, cache=self.inputs.cache, verbose=False)
        return backbone.seconds


class _Timed:
    """A backbone that records the time it takes per image, not counting their resizing.

    The fastest batch counts, so that other load on the machine matters little.
    """

    def __init__(self, backbone: Backbone, device: str | None) -> None:
        self._backbone = backbone
        self._device = device
        self.identity = backbone.identity
        self.preset = backbone.preset
        self.seconds: Seconds | None = None
        self._warm = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)  # `dtype`, if it has one

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Extract features of one batch."""
        if not self._warm:
            plain_features(self._backbone)  # what is loaded with the first image does not count
            self._warm = True
        size = self.preset.preprocessing.size
        resized = [to_picture(image, i, size) for i, image in enumerate(images)]
        clock = Clock(self._device, this_thread=True)
        features = self._backbone.extract(resized)
        per_image = clock.lap().times(1 / len(images))
        self.seconds = per_image if self.seconds is None else min(self.seconds, per_image)
        return features


def plain_features(backbone: Backbone) -> Features:
    """Extract features of one grey image: they show the layout and the size of all others."""
    return backbone.extract([_grey(backbone)])


def measure_seconds(backbone: Backbone, device: str | None) -> Seconds:
    """Measure the time per image of a backbone, for when nothing had to be extracted."""
    timed = _Timed(backbone, device)
    timed.extract([_grey(backbone)] * BATCH)
    assert timed.seconds is not None, "a batch was extracted"
    return timed.seconds


def _grey(backbone: Backbone) -> Image.Image:
    size = backbone.preset.preprocessing.size
    return Image.new("RGB", (size, size), "grey")


@dataclass(frozen=True)
class Missing:
    """What the cache lacks."""

    extractions: tuple[Extraction, ...] = ()  # calls that extract it
    images: int = 0  # number of missing images
    views: int = 0  # number of missing views
    bytes: int = 0  # size of their features
    bytes_needed: int = 0  # size of all features that the tasks need

    def find_obstacle(self, cache: FeatureCache, name: str) -> str | None:
        """Explain why the features of a set do not fit into the cache or onto the disk, if so."""
        if self.bytes_needed > cache.capacity:
            return (
                f"The features of {name} take {self.bytes_needed / 1e9:.3f} GB, and the feature "
                f"cache {cache.folder} holds {cache.limit / 1e9:.3f} GB: raise its limit with "
                "--cache-gb, or use fewer --views or --tasks."
            )
        try:
            cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(cache.folder).free
        except OSError as error:
            raise NotAvailableError(
                f"The feature cache {cache.folder} cannot be used: {reason_of(error)}."
            ) from error
        if self.bytes > free:
            return (
                f"The features of {name} need another {self.bytes / 1e9:.3f} GB in {cache.folder}, "
                f"but the disk has {free / 1e9:.3f} GB left."
            )
        return None


def find_missing(inputs: Inputs, keys: FeatureKeys, views: Mapping[str, int]) -> Missing:
    """Find out what the cache lacks of these images and their views, and how to extract it."""
    needed = {id_: [keys.key(id_, v) for v in (None, *range(n))] for id_, n in views.items()}
    absent = set(inputs.cache.missing(key for entries in needed.values() for key in entries))
    if not absent:
        return Missing()
    lacking = {id_: entries for id_, entries in needed.items() if not absent.isdisjoint(entries)}
    chunks: list[list[tuple[str, int]]] = []
    room = 0
    for id_, entries in lacking.items():
        if room < len(entries):
            chunks.append([])
            room = CHUNK
        chunks[-1].append((id_, views[id_]))
        room -= len(entries)
    layout = plain_features(inputs.open_backbone()).tensors
    size = entry_size({name: tensor[0] for name, tensor in layout.items()})
    # Images with the same content share an entry.
    total = len({key for entries in needed.values() for key in entries})
    return Missing(
        tuple(Extraction(inputs, tuple(chunk)) for chunk in chunks),
        sum(entries[0] in absent for entries in lacking.values()),
        sum(key in absent for entries in lacking.values() for key in entries[1:]),
        size * len(absent),
        size * total,
    )
