"""Sampled tasks: what every method is given alike, kept in a file that any machine can read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any


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
    """

    set: str
    protocol: str
    seed: int
    tasks: tuple[Task, ...]

    def as_json(self) -> dict[str, Any]:
        """Describe it for a file."""
        return asdict(self)

    @property
    def hash(self) -> str:
        """SHA-256 of all of it: results with equal hashes come from the same tasks."""
        text = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
