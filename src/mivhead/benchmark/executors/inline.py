"""Jobs in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mivhead.benchmark.executors import Died, Job, T


class InlineExecutor:
    """Runs jobs in this process: for backbones that cannot be sent to others, and for debugging.

    Examples
    --------
    >>> [outcome for _, outcome in InlineExecutor().run([lambda: 1, lambda: 2])]
    [1, 2]
    """

    workers = 1

    def run(self, jobs: Iterable[Job[T]]) -> Iterator[tuple[Job[T], T | Died]]:
        """Run jobs in their order, each in one thread, like every worker."""
        for job in jobs:
            with one_thread():
                outcome = job()
            yield job, outcome

    def close(self) -> None:
        """There is nothing to stop."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, as results may differ in the last digit with their number."""
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):  # NumPy's and scikit-learn's
            yield
    finally:
        torch.set_num_threads(threads)
