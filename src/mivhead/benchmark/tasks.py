"""Sampled tasks: what every method is given alike, kept in a file that any machine can read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mivhead._files import write_text
from mivhead._schema import from_json, to_json
from mivhead.errors import InputError

FORMAT = 1


@dataclass(frozen=True)
class Task:
    """One episode; images are named by their ids in the data set, not by paths of one machine."""

    classes: tuple[str, ...]
    support: tuple[str, ...]  # image ids
    support_labels: tuple[int, ...]  # places in `classes`
    queries: tuple[str, ...]  # image ids
    query_labels: tuple[int, ...]  # places in `classes`


@dataclass(frozen=True)
class TaskSet:
    """The tasks of one data set under one protocol.

    Parameters
    ----------
    set
        Name of the data set.
    protocol
        How they were drawn, such as `varying` or `5-way 1-shot`.
    seed
        Of the sampler.
    tasks
        In the order of their numbers.
    left_out
        Parts of the set that no task is drawn from, and why, for people.
    """

    set: str
    protocol: str
    seed: int
    tasks: tuple[Task, ...]
    left_out: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Describe it in full."""
        # Not `asdict`, whose deep copies take longer than all the rest.
        return {
            "set": self.set,
            "protocol": self.protocol,
            "seed": self.seed,
            "tasks": [vars(task) for task in self.tasks],
            "left_out": self.left_out,
        }

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all of it: results with equal hashes come from the same tasks."""
        text = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, whole or not at all.

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
        ids = sorted({each for task in self.tasks for each in (*task.support, *task.queries)})
        place = {each: number for number, each in enumerate(ids)}
        episodes = tuple(
            _Episode(
                task.classes,
                _by_class(task.support, task.support_labels, len(task.classes), place),
                _by_class(task.queries, task.query_labels, len(task.classes), place),
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
            episodes,
        )
        write_text(path, json.dumps(to_json(file), ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> TaskSet:
        """Read a file that `save` wrote; a damaged or changed one is an error."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"The task file {path} cannot be read: {error}.") from error
        newest = document.get("format") if isinstance(document, dict) else None
        if newest != FORMAT:
            raise InputError(
                f"The task file {path} has format {newest!r}, expected {FORMAT}: "
                "sample the tasks anew."
            )
        file = from_json(_File, document, str(path))
        tasks = tuple(_to_task(episode, file.images, path) for episode in file.tasks)
        read = cls(file.set, file.protocol, file.seed, tasks, file.left_out)
        if read.hash != file.hash:
            raise InputError(
                f"The task file {path} was changed after it was written: its hash is "
                f"{read.hash[:12]}, not {file.hash[:12]}; sample the tasks anew."
            )
        return read


@dataclass(frozen=True)
class _Episode:
    """A task in the file: per class the places of its images in the file's list."""

    classes: tuple[str, ...]
    support: tuple[tuple[int, ...], ...]
    queries: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _File:
    """The file: each image's id is written once, as an image serves in many tasks."""

    format: int
    hash: str
    set: str
    protocol: str
    seed: int
    left_out: tuple[str, ...]
    images: tuple[str, ...]
    tasks: tuple[_Episode, ...]


def _by_class(
    ids: tuple[str, ...], labels: tuple[int, ...], ways: int, place: dict[str, int]
) -> tuple[tuple[int, ...], ...]:
    if list(labels) != sorted(labels):
        raise InputError("A task lists its images class by class, in the order of its classes.")
    groups: list[list[int]] = [[] for _ in range(ways)]
    for each, label in zip(ids, labels, strict=True):
        groups[label].append(place[each])
    return tuple(map(tuple, groups))


def _to_task(episode: _Episode, images: tuple[str, ...], path: str | Path) -> Task:
    places = [place for part in (episode.support, episode.queries) for row in part for place in row]
    if not all(0 <= place < len(images) for place in places):
        raise InputError(f"The task file {path} names an image that it does not list.")
    if {len(episode.support), len(episode.queries)} != {len(episode.classes)}:
        raise InputError(f"The task file {path} has a task whose classes and images do not match.")
    support, support_labels = _flatten(episode.support, images)
    queries, query_labels = _flatten(episode.queries, images)
    return Task(episode.classes, support, support_labels, queries, query_labels)


def _flatten(
    rows: tuple[tuple[int, ...], ...], images: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    ids = tuple(images[place] for row in rows for place in row)
    return ids, tuple(label for label, row in enumerate(rows) for _ in row)
