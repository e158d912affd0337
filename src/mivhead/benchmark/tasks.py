"""Few-shot tasks, the same for every method, and the file that stores them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mivhead._util.files import write_text
from mivhead._util.schema import from_json, parse_json, to_json
from mivhead.errors import InputError, reading

FORMAT = 1
EXTRA = ("unlabelled", "unknown", "foreign")  # parts that most tasks do not have


@dataclass(frozen=True)
class Task:
    """A few-shot task (an episode): a support set to learn from and queries to classify.

    Images are given by their ids in the data set, which are the same on every machine.

    Parameters
    ----------
    classes : tuple of str
        Names of the classes.
    support, queries : tuple of str
        Ids of the images.
    support_labels, query_labels : tuple of int
        The class of each image, as an index into `classes`.
    unlabelled : tuple of str, default=()
        Ids of images without labels, of which some show none of the classes.
    unknown, foreign : tuple of str, default=()
        In an open task: ids of queries of other classes of the set, and of other sets, the latter
        as `SET:ID`.
    """

    classes: tuple[str, ...]
    support: tuple[str, ...]
    support_labels: tuple[int, ...]
    queries: tuple[str, ...]
    query_labels: tuple[int, ...]
    unlabelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The ids of all images by their part: support, queries, unlabelled, unknown, foreign."""
        return self.support, self.queries, self.unlabelled, self.unknown, self.foreign

    @property
    def images(self) -> tuple[str, ...]:
        """The ids of all images."""
        return sum(self.parts, ())

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values, without parts that are empty.

        Returns
        -------
        dict
            Plain values for a JSON document.
        """
        # Not `asdict`, whose deep copies take longer than everything else.
        return {k: v for k, v in vars(self).items() if k not in EXTRA or v}


@dataclass(frozen=True)
class TaskSet:
    """The tasks of one data set under one protocol.

    Parameters
    ----------
    set : str
        Name of the data set.
    protocol : str
        How the tasks were sampled, such as `varying` or `5-way 1-shot`.
    seed : int
        Random seed of the sampler.
    tasks : tuple of Task
        In the order of their numbers.
    left_out : tuple of str, default=()
        Parts of the data set that no task uses, with the reason.
    """

    set: str
    protocol: str
    seed: int
    tasks: tuple[Task, ...]
    left_out: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values.

        Returns
        -------
        dict
            Plain values for a JSON document.
        """
        return {
            "set": self.set,
            "protocol": self.protocol,
            "seed": self.seed,
            "tasks": [task.as_json() for task in self.tasks],
            "left_out": self.left_out,
        }

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the contents: results with equal hashes come from the same tasks."""
        text = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the tasks to a JSON file, atomically.

        Parameters
        ----------
        path : str or Path
            The file; it is replaced if it exists.

        Examples
        --------
        >>> import tempfile
        >>> task = Task(("cat", "dog"), ("cat/1.jpg", "dog/1.jpg"), (0, 1), ("cat/2.jpg",), (0,))
        >>> tasks = TaskSet("pets", "varying", 0, (task,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tasks.save(f"{folder}/pets.json")
        ...     TaskSet.load(f"{folder}/pets.json") == tasks
        True
        """
        ids = sorted({each for task in self.tasks for each in task.images})
        place = {each: number for number, each in enumerate(ids)}
        stored = tuple(
            _StoredTask(
                task.classes,
                _by_class(task.support, task.support_labels, len(task.classes), place),
                _by_class(task.queries, task.query_labels, len(task.classes), place),
                **{part: tuple(place[each] for each in getattr(task, part)) for part in EXTRA},
            )
            for task in self.tasks
        )
        file = _File(
            FORMAT,
            self.hash,
            self.set,
            self.protocol,
            self.seed,
            self.left_out,
            tuple(ids),
            stored,
        )
        write_text(path, json.dumps(to_json(file), ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> TaskSet:
        """Read a file that `save` wrote; a corrupted or modified file is an error.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        TaskSet
        """
        with reading(f"The task file {path}", ValueError):
            document = parse_json(Path(path).read_text(encoding="utf-8"))
        newest = document.get("format") if isinstance(document, dict) else None
        if newest != FORMAT:
            raise InputError(
                f"The task file {path} has format {newest!r}, expected {FORMAT}: remove it, and "
                "the tasks are sampled again."
            )
        file = from_json(_File, document, str(path))
        tasks = tuple(_to_task(stored, file.images, path) for stored in file.tasks)
        read = cls(file.set, file.protocol, file.seed, tasks, file.left_out)
        if read.hash != file.hash:
            raise InputError(
                f"The task file {path} was modified after it was written: its hash is "
                f"{read.hash[:12]}, not {file.hash[:12]}; remove it, and the tasks are sampled "
                "again."
            )
        return read


@dataclass(frozen=True)
class _StoredTask:
    """A task in the file: per class, the places of its images in the file's list."""

    classes: tuple[str, ...]
    support: tuple[tuple[int, ...], ...]
    queries: tuple[tuple[int, ...], ...]
    unlabelled: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()


@dataclass(frozen=True)
class _File:
    """The file: each image id is written once, as an image occurs in many tasks."""

    format: int
    hash: str
    set: str
    protocol: str
    seed: int
    left_out: tuple[str, ...]
    images: tuple[str, ...]
    tasks: tuple[_StoredTask, ...]


def _by_class(
    ids: tuple[str, ...], labels: tuple[int, ...], ways: int, place: dict[str, int]
) -> tuple[tuple[int, ...], ...]:
    if list(labels) != sorted(labels):
        raise InputError("A task lists its images class by class, in the order of its classes.")
    groups: list[list[int]] = [[] for _ in range(ways)]
    for each, label in zip(ids, labels, strict=True):
        groups[label].append(place[each])
    return tuple(map(tuple, groups))


def _to_task(stored: _StoredTask, images: tuple[str, ...], path: str | Path) -> Task:
    places = [place for part in (stored.support, stored.queries) for row in part for place in row]
    places += [place for part in EXTRA for place in getattr(stored, part)]
    if not all(0 <= place < len(images) for place in places):
        raise InputError(f"The task file {path} refers to an image that it does not list.")
    if {len(stored.support), len(stored.queries)} != {len(stored.classes)}:
        raise InputError(f"The task file {path} has a task whose classes and images do not match.")
    support, support_labels = _flatten(stored.support, images)
    queries, query_labels = _flatten(stored.queries, images)
    extra = {part: tuple(images[place] for place in getattr(stored, part)) for part in EXTRA}
    return Task(stored.classes, support, support_labels, queries, query_labels, **extra)


def _flatten(
    rows: tuple[tuple[int, ...], ...], images: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    ids = tuple(images[place] for row in rows for place in row)
    return ids, tuple(label for label, row in enumerate(rows) for _ in row)
