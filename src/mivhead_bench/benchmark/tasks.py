"""Few-shot tasks, the same for every method, and the file that stores them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mivhead._util.files import write_text
from mivhead._util.schema import from_json, parse_json
from mivhead.errors import InputError, reading

EXTRA = ("unlabelled", "unknown", "foreign")  # parts that most tasks do not have
IMAGES = ("support", "queries", *EXTRA)  # fields of a task that hold ids of images


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
        """Return everything as plain values for a JSON document, without parts that are empty."""
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
        """Return everything as plain values for a JSON document."""
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
        """Write the tasks to a JSON file, atomically; an image id is written once.

        >>> import tempfile
        >>> task = Task(("cat", "dog"), ("cat/1.jpg", "dog/1.jpg"), (0, 1), ("cat/2.jpg",), (0,))
        >>> tasks = TaskSet("pets", "varying", 0, (task,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tasks.save(f"{folder}/pets.json")
        ...     TaskSet.load(f"{folder}/pets.json") == tasks
        True
        """
        ids = sorted({image for task in self.tasks for image in task.images})
        places = {image: place for place, image in enumerate(ids)}
        tasks = [
            {k: [places[i] for i in v] if k in IMAGES else v for k, v in task.as_json().items()}
            for task in self.tasks
        ]
        document = self.as_json() | {"hash": self.hash, "images": ids, "tasks": tasks}
        write_text(path, json.dumps(document, ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> TaskSet:
        """Read a file that `save` wrote; a corrupted or modified file is an error."""
        with reading(f"The task file {path}", ValueError, LookupError, TypeError, AttributeError):
            document = parse_json(Path(path).read_text(encoding="utf-8"))
            expected, images = document.pop("hash"), document.pop("images")
            for task in document["tasks"]:
                task |= {k: [images[place] for place in task[k]] for k in IMAGES if k in task}
            tasks = from_json(cls, document, str(path))
        if tasks.hash != expected:
            raise InputError(
                f"The task file {path} was modified after it was written; remove it, and the tasks "
                "are sampled again."
            )
        return tasks
