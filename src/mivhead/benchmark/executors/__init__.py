"""Where jobs run: in this process, in worker processes, on a Ray cluster; one interface.

A job is a callable without arguments that can be pickled. An executor gives back every job with
what it returned, in the order in which they finish. A worker that dies is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Job: TypeAlias = Callable[[], T]


@dataclass(frozen=True)
class Died:
    """What comes back instead of a result if the worker died in the middle of a job."""

    reason: str


class Executor(Protocol):
    """What the runner needs of a place to run jobs."""

    @property
    def workers(self) -> int:
        """How many jobs run at once."""
        ...

    def run(self, jobs: Iterable[Job[T]]) -> Iterator[tuple[Job[T], T | Died]]:
        """Run jobs; an exception that a job raises is raised here, and ends the iteration."""
        ...

    def close(self) -> None:
        """Stop all workers, also those in the middle of a job."""
        ...


def make_executor(name: str, workers: int, address: str | None = None) -> Executor:
    """Make an executor by name: `local` (0 workers: in this process) or `ray`.

    >>> make_executor("local", 0).workers
    1
    """
    from mivhead.errors import InputError, check_one_of

    check_one_of("executor", name, ("local", "ray"))
    if name == "ray":
        from mivhead.benchmark.executors.ray_cluster import RayExecutor

        return RayExecutor(address)
    if address is not None:
        raise InputError("address is for the executor 'ray'; 'local' runs on this machine.")
    if workers == 0:
        from mivhead.benchmark.executors.local import InlineExecutor

        return InlineExecutor()
    from mivhead.benchmark.executors.local import LocalExecutor

    return LocalExecutor(workers)


def call(job: Job[Any]) -> Any:
    """Run a job; a function of a module, so that every kind of worker can import it."""
    return job()
