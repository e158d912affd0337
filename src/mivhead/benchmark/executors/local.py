"""Jobs in processes of one thread each on this machine.

Not `ProcessPoolExecutor`: when one of its workers is killed, as for want of memory, it gives up
altogether and cannot tell which job was to blame. Here each worker has a pipe of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from mivhead.benchmark.executors import Died, Job, T, call
from mivhead.errors import InputError, NotAvailableError

# Read by the numerical libraries when they are imported, so they are set before.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
PATIENCE = 5.0  # seconds that a worker gets to end by itself


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job[Any] | None = None  # in work


class LocalExecutor:
    """Runs jobs in worker processes, which stay for the next jobs.

    Parameters
    ----------
    workers
        Number of processes.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise InputError(f"workers is {workers}; at least 1 is needed.")
        self.workers = workers
        self._pool: list[_Worker] = []

    def run(self, jobs: Iterable[Job[T]]) -> Iterator[tuple[Job[T], T | Died]]:
        """Run jobs; a worker that dies is replaced, and its job is given back with `Died`."""
        waiting = iter(jobs)
        self._hand_out(waiting)
        while busy := {worker.pipe: worker for worker in self._pool if worker.job is not None}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # `wait` gives back what it was given
                job = worker.job
                assert job is not None
                worker.job = None
                outcome = self._receive(worker)
                self._hand_out(waiting)  # before the caller takes its time with the outcome
                yield job, outcome

    def close(self) -> None:
        """Stop all workers, also those in the middle of a job."""
        for worker in self._pool:
            worker.pipe.close()
            if worker.job is not None:
                worker.process.kill()
        for worker in self._pool:
            worker.process.join(PATIENCE)
            worker.process.kill()
            worker.process.join()
        self._pool.clear()

    def _hand_out(self, waiting: Iterator[Job[Any]]) -> None:
        """Give a job to every worker that has none; start workers only for jobs that exist."""
        idle = [worker for worker in self._pool if worker.job is None]
        while idle or len(self._pool) < self.workers:
            job = next(waiting, None)
            if job is None:
                return
            worker = idle.pop() if idle else self._start()
            worker.job = job
            try:
                worker.pipe.send(job)
            except OSError:  # it died between two jobs; `_receive` will find out
                continue

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)
        try:
            process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()  # so that its end of the pipe closes when it dies
        worker = _Worker(process, ours)
        self._pool.append(worker)
        return worker

    def _receive(self, worker: _Worker) -> Any:
        try:
            succeeded, outcome = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            worker.pipe.close()
            self._pool.remove(worker)
            return Died(_describe(worker.process.exitcode))
        if succeeded:
            return outcome
        raise outcome


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return f"the worker was ended by {name}{memory}"
    return f"the worker ended with code {code}"


def _work(pipe: Connection) -> None:
    """Run jobs until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which stops us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, call(job))
        # Whatever it is, it is raised again in the main process.
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = (False, error)
        _send(pipe, answer)


def _send(pipe: Connection, answer: tuple[bool, Any]) -> None:
    try:
        pipe.send(answer)
    except OSError:  # the main process is gone
        return
    except Exception as error:  # what cannot be pickled
        text = f"A worker cannot send its answer: {type(error).__name__}: {error}"
        pipe.send((False, NotAvailableError(text)))


def _end_with_parent() -> None:
    """End at once when the main process dies, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# Jobs in this process, one after the other.


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
