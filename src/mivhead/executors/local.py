"""Executors on this machine: in this process, or in worker processes of one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from mivhead._util.threads import set_threads, wanted_threads
from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Call, Died, T

# Numerical libraries read these variables when they are imported.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
PATIENCE = 5.0  # seconds that a worker gets to exit by itself


class InlineExecutor:
    """Runs calls in this process: for backbones that cannot be sent to others, and for debugging.

    Examples
    --------
    >>> [outcome for _, outcome in InlineExecutor().run([lambda: 1, lambda: 2])]
    [1, 2]
    """

    workers = 1

    def run(
        self, calls: Iterable[Call[T]], most: int | None = None
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls in their order, each in one thread, as workers do."""
        del most  # one at a time anyway
        for call in calls:
            with one_thread():
                outcome = call()
            yield call, outcome

    def close(self) -> None:
        """Do nothing: there are no workers."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, as results may differ in the last digit with the number of threads."""
    with ExitStack() as stack:
        stack.callback(set_threads, wanted_threads())
        set_threads(1)
        with suppress(ModuleNotFoundError):  # exported models run without it
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(1))  # of NumPy, scikit-learn and PyTorch
        yield


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    slot: int  # which of the GPUs it sees
    call: Call[Any] | None = None  # that is running


def visible_gpus() -> list[str]:
    """Return the names by which a process may be given one of the GPUs that this one sees."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


class LocalExecutor:
    """Runs calls in worker processes, which are reused.

    Not `ProcessPoolExecutor`: when one of its workers is killed, for example for lack of memory, it
    stops altogether and does not say which call was to blame. Here each worker has its own pipe.

    Parameters
    ----------
    workers : int
        Number of processes.
    gpus : bool, default=False
        Whether each worker sees one GPU, in turn, instead of all.
    """

    def __init__(self, workers: int, *, gpus: bool = False) -> None:
        if workers < 1:
            raise InputError(f"workers is {workers}; expected at least 1.")
        self.workers = workers
        self._gpus = visible_gpus() if gpus else []
        self._pool: list[_Worker] = []

    def run(
        self, calls: Iterable[Call[T]], most: int | None = None
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls; a worker that dies is replaced, and the outcome of its call is `Died`.

        Parameters
        ----------
        calls : iterable of Call
            Functions and their arguments.
        most : int, optional
            How many may run at the same time, if fewer than there are workers.

        Yields
        ------
        call : Call
            One of the calls, in the order in which they finish.
        outcome : object
            What it returned, or `Died` if its process ended without a result.
        """
        waiting, limit = iter(calls), min(self.workers, most or self.workers)
        self._hand_out(waiting, limit)
        while busy := {worker.pipe: worker for worker in self._pool if worker.call is not None}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # `wait` returns what it was given
                call = worker.call
                assert call is not None
                worker.call = None
                outcome = self._receive(worker)
                self._hand_out(waiting, limit)  # before the caller takes its time with the outcome
                yield call, outcome

    def close(self) -> None:
        """Stop all workers, even in the middle of a call."""
        for worker in self._pool:
            worker.pipe.close()
            if worker.call is not None:
                worker.process.kill()
        for worker in self._pool:
            worker.process.join(PATIENCE)
            worker.process.kill()
            worker.process.join()
        self._pool.clear()

    def _hand_out(self, waiting: Iterator[Call[Any]], limit: int) -> None:
        """Send calls until so many run; start workers only for calls that exist."""
        idle = [worker for worker in self._pool if worker.call is None]
        while sum(worker.call is not None for worker in self._pool) < limit:
            call = next(waiting, None)
            if call is None:
                return
            worker = idle.pop() if idle else self._start()
            worker.call = call
            try:
                worker.pipe.send(call)
            except OSError:  # it died between two calls; `_receive` will find out
                continue

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        slot = min(set(range(self.workers)) - {worker.slot for worker in self._pool})
        settings = dict(ONE_THREAD)
        if self._gpus:
            settings["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()  # so that its end of the pipe closes when it dies
        worker = _Worker(process, ours, slot)
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
        memory = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{memory}"
    return f"the worker exited with code {code}"


def _work(pipe: Connection) -> None:
    """Run calls until the other end of the pipe is closed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the main process, which stops this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    set_threads(1)
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, call())
        # Whatever it is, the main process raises it again.
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
        text = f"A worker cannot return its outcome: {type(error).__name__}: {error}"
        pipe.send((False, NotAvailableError(text)))


def _exit_with_parent() -> None:
    """Exit at once when the main process dies, even in the middle of a call."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
