"""Where tasks run: in this process, or with the executors of jobs, each worker on its GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from threadpoolctl import threadpool_limits

from mivhead._util.threads import set_threads, wanted_threads
from mivhead.jobs.executors import Call, Died, LocalExecutor, RayExecutor, T


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, as results may differ in the last digit with the number of threads."""
    before = wanted_threads()
    set_threads(1)
    try:
        with threadpool_limits(1):  # of NumPy, scikit-learn and PyTorch
            yield
    finally:
        set_threads(before)


class InlineExecutor:
    """Runs calls in this process: for backbones that cannot be sent to others, and for debugging.

    >>> [outcome for _, outcome in InlineExecutor().run([lambda: 1, lambda: 2])]
    [1, 2]
    """

    workers = 1

    def run(
        self,
        calls: Iterable[Call[T]],
        most: int | None = None,  # noqa: ARG002
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls in their order, each in one thread, as workers do."""
        for call in calls:
            with one_thread():
                outcome = call()
            yield call, outcome

    def close(self) -> None:
        """Do nothing: there are no workers."""


Executor: TypeAlias = InlineExecutor | LocalExecutor | RayExecutor


def make_executor(workers: int, ray: str | None = None, device: str | None = None) -> Executor:
    """Create an executor: on the Ray cluster `ray`, or here, with 0 workers in this process.

    If the calls run on `device` "cuda", every worker sees one GPU.

    >>> make_executor(0).workers
    1
    """
    on_gpu = device == "cuda"
    if ray:
        return RayExecutor(ray, gpus=int(on_gpu))
    if not workers:
        return InlineExecutor()
    return LocalExecutor(workers, gpus=visible_gpus() if on_gpu else ())


def visible_gpus() -> list[str]:
    """Return the names by which a process may be given one of the GPUs that this one sees."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    count = torch.cuda.device_count()
    return names.split(",")[:count] if names else [str(i) for i in range(count)]
