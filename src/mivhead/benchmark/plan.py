"""Which pictures the tasks of a set need: every image once, and views of the shots.

The views of an image are numbered, and view number i is the same in every task and for every
method: its seed depends on the run's seed, the image's id and i alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mivhead.backbones.base import Backbone
from mivhead.benchmark.tasks import Task
from mivhead.errors import InputError
from mivhead.extraction.cache import Keys, content_hash
from mivhead.extraction.pipeline import read_content
from mivhead.images.augmentation import Augmentation, ViewsRule, views_per_image
from mivhead.images.imageset import ImageSet


class Picture(NamedTuple):
    """An image as it is (`view` None), or one of its views."""

    id: str
    view: int | None


@dataclass(frozen=True)
class ViewRule:
    """How many views the shots of a class get: ceil(T / S) each, but at most V."""

    threshold: int
    rule: ViewsRule
    cap: int

    def count(self, task: Task) -> list[int]:
        """Tell the views of each support image of a task.

        >>> task = Task(("a", "b"), ("1", "2", "3"), (0, 0, 1), (), ())
        >>> ViewRule(threshold=3, rule="ceil", cap=15).count(task)
        [2, 2, 3]
        """
        shots = np.bincount(task.support_labels)
        views = [min(self.cap, views_per_image(int(s), self.threshold, self.rule)) for s in shots]
        return [views[label] for label in task.support_labels]


def view_seed(seed: int, id_: str, number: int) -> int:
    """Seed of view `number` of an image.

    >>> view_seed(0, "cat/1.jpg", 0) == view_seed(0, "cat/1.jpg", 0) != view_seed(0, "cat/1.jpg", 1)
    True
    """
    digest = hashlib.sha256(f"{seed} {number} {id_}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def needed_pictures(tasks: Iterable[Task], rules: Sequence[ViewRule]) -> list[Picture]:
    """List all pictures that tasks need under any of these rules, the views after their image.

    >>> task = Task(("a", "b"), ("1", "2"), (0, 1), ("3", "1"), (0, 1))
    >>> [tuple(each) for each in needed_pictures([task], [ViewRule(2, "ceil", cap=1)])]
    [('1', None), ('1', 0), ('2', None), ('2', 0), ('3', None)]
    """
    views: dict[str, int] = {}
    for task in tasks:
        for id_ in (*task.support, *task.queries):
            views.setdefault(id_, 0)
        for rule in rules:
            for id_, count in zip(task.support, rule.count(task), strict=True):
                views[id_] = max(views[id_], count)
    return [Picture(id_, view) for id_ in sorted(views) for view in (None, *range(views[id_]))]


class PictureKeys:
    """Keys of pictures in a bank: hashes of content, backbone and view.

    Parameters
    ----------
    backbone
        Whose features are kept.
    contents
        Hash of every image, by id (`hash_images`).
    seed
        Of the views.
    """

    def __init__(self, backbone: Backbone, contents: Mapping[str, str], seed: int) -> None:
        self._keys = Keys(backbone, Augmentation())
        self._contents = contents
        self._seed = seed
        self._known: dict[Picture, str] = {}  # a picture serves in many tasks

    def key(self, picture: Picture) -> str:
        """Name a picture's row."""
        if picture not in self._known:
            id_, view = picture
            seed = None if view is None else view_seed(self._seed, id_, view)
            self._known[picture] = self._keys.key(self._contents[id_], seed)
        return self._known[picture]


def hash_images(images: ImageSet, ids: Iterable[str], name: str) -> dict[str, str]:
    """Hash the contents of images; one that a task names and the set lacks is an error."""
    rows = {id_: row for row, id_ in enumerate(images.ids)}
    hashes = {}
    for id_ in ids:
        if id_ not in rows:
            raise InputError(
                f"A task needs the image {id_!r}, which the data set {name} lacks here: give the "
                "data folder that the tasks were drawn from, or choose another results folder."
            )
        hashes[id_] = content_hash(read_content(images.sources[rows[id_]]))
    return hashes
