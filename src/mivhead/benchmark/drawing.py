"""The tasks of a run: drawn by its first command, read from its folder by all later ones."""

from __future__ import annotations

from pathlib import Path

from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.benchmark.tasks import TaskSet
from mivhead.data.imageset import ImageSet
from mivhead.errors import InputError


def find_tasks(
    path: Path, images: ImageSet, name: str, protocol: str, seed: int, count: int
) -> TaskSet | LeftOut:
    """Read a task file, which must be of this set, protocol, seed and number; or draw and save."""
    if not path.exists():
        drawn = sample_tasks(images, name, Protocol.parse(protocol), seed, count)
        if isinstance(drawn, TaskSet):
            drawn.save(path)
        return drawn
    tasks = TaskSet.load(path)
    expected = {"set": name, "protocol": protocol, "seed": seed, "number of tasks": count}
    found = (tasks.set, tasks.protocol, tasks.seed, len(tasks.tasks))
    for (what, wanted), there in zip(expected.items(), found, strict=True):
        if there != wanted:
            raise InputError(
                f"The task file {path} belongs to another run: its {what} is {there!r}, not "
                f"{wanted!r}; choose another results folder."
            )
    return tasks
