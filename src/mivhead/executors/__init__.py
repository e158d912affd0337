"""Where a run computes: in this process, in worker processes, or on a Ray cluster.

An executor runs calls: objects without arguments that can be called and pickled. It returns every
call with its outcome, in the order in which they finish. A worker that dies is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from mivhead.errors import InputError, check_one_of

T = TypeVar("T")
Call: TypeAlias = Callable[[], T]


@dataclass(frozen=True)
class Died:
    """The outcome of a call whose worker died."""

    reason: str


class Executor(Protocol):
    """Runs calls somewhere."""

    @property
    def workers(self) -> int:
        """How many calls run at the same time."""
        ...

    def run(
        self, calls: Iterable[Call[T]], most: int | None = None
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls, at most `most` at a time, if the executor can limit them.

        An exception that a call raises is raised here and ends the iteration.
        """
        ...

    def close(self) -> None:
        """Stop all workers, even in the middle of a call."""
        ...


def make_executor(
    name: str, workers: int, address: str | None = None, *, device: str | None = None
) -> Executor:
    """Create an executor by name: `local` (0 workers: in this process) or `ray`.

    If the calls run on `device` "cuda", every worker sees one GPU, and on a Ray cluster every call
    asks for one.

    >>> make_executor("local", 0).workers
    1
    """
    check_one_of("executor", name, ("local", "ray"))
    if name == "ray":
        from mivhead.executors.ray_cluster import RayExecutor

        return RayExecutor(address, gpus=int(device == "cuda"))
    if address is not None:
        raise InputError("address is for the executor 'ray'; 'local' runs on this machine.")
    from mivhead.executors.local import InlineExecutor, LocalExecutor

    return InlineExecutor() if workers == 0 else LocalExecutor(workers, gpus=device == "cuda")
