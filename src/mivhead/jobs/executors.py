"""Where calls run: in worker processes of one thread each, or on a Ray cluster.

A call is an object that takes no arguments and can be pickled. An executor yields every call with
its outcome, in the order in which they finish. The outcome of a call whose worker dies is `Died`,
and an exception that a call raises is raised here and ends the iteration.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from mivhead._util.imports import need
from mivhead._util.threads import set_threads
from mivhead.errors import InputError, NotAvailableError, reason_of

T = TypeVar("T")
Call: TypeAlias = Callable[[], T]

# Numerical libraries read these variables when they are imported.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
CONNECT_SECONDS = 5.0  # that a Ray cluster gets to accept a connection
CALLS_AHEAD = 2  # per processor, submitted to Ray at once
POLL_SECONDS = 2.0  # after which new and lost nodes of a Ray cluster are noticed


@dataclass(frozen=True)
class Died:
    """The outcome of a call whose worker died."""

    reason: str


class LocalExecutor:
    """Runs calls in worker processes, which are reused.

    Each worker is a pool of its own: when a worker of a larger pool is killed, for example for lack
    of memory, the whole pool stops and does not say which call was to blame. Of `gpus`, the names
    of some, each worker sees one.
    """

    def __init__(self, workers: int, *, gpus: Sequence[str] = ()) -> None:
        if workers < 1:
            raise InputError(f"workers is {workers}; expected at least 1.")
        self.workers, self._gpus = workers, gpus
        self._pools: dict[int, ProcessPoolExecutor] = {}  # by slot

    def run(
        self, calls: Iterable[Call[T]], most: int | None = None
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls; a worker that dies is replaced, and the outcome of its call is `Died`."""
        waiting = iter(calls)
        free = list(range(min(self.workers, most or self.workers)))
        running: dict[Future[T], tuple[Call[T], int]] = {}
        while True:
            while free and (call := next(waiting, None)) is not None:
                slot = free.pop(0)
                running[self._submit(slot, call)] = call, slot
            if not running:
                return
            future = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            call, slot = running.pop(future)
            free.append(slot)
            try:
                outcome: T | Died = future.result()
            except BrokenProcessPool:
                self._pools.pop(slot).shutdown()
                outcome = Died("the worker was killed, perhaps for lack of memory")
            yield call, outcome

    def close(self) -> None:
        """Stop all workers, even in the middle of a call."""
        for pool in self._pools.values():
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(cancel_futures=True)
        self._pools.clear()

    def _submit(self, slot: int, call: Call[T]) -> Future[T]:
        settings = dict(ONE_THREAD)
        if self._gpus:
            settings["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        before = dict(os.environ)
        os.environ.update(settings)
        try:  # the process starts with the first call, and inherits the environment
            if slot not in self._pools:
                context = multiprocessing.get_context("spawn")  # threads do not survive a fork
                self._pools[slot] = ProcessPoolExecutor(1, context, _start_worker)
            return self._pools[slot].submit(call)
        finally:
            for name in settings:
                os.environ.pop(name)
            os.environ.update({name: before[name] for name in settings if name in before})


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    set_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:  # even in the middle of a call
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


class RayExecutor:
    """Runs calls on a Ray cluster, one processor each; its machines share data and models.

    The address is `HOST:PORT`, `ray://HOST:PORT`, or `auto` for the cluster that this machine
    belongs to; by default a cluster is started on this machine. Ray shows a call only the GPUs that
    it needs.
    """

    def __init__(self, address: str | None = None, *, gpus: int = 0) -> None:
        if address not in (None, "auto"):
            _check_answers(address)  # before Ray is imported, which takes seconds
        self._ray = need("ray")
        where = address or "on this machine"
        try:
            self._ray.init(
                address=address or "local",
                runtime_env={"env_vars": dict(ONE_THREAD)},
                log_to_driver=False,
                logging_level="ERROR",
            )
        except Exception as error:  # Ray raises all kinds
            reason = reason_of(error)
            raise NotAvailableError(f"The Ray cluster {where} cannot be used: {reason}.") from error
        self._gpus = gpus
        if gpus and not self._ray.cluster_resources().get("GPU"):
            self._ray.shutdown()
            raise NotAvailableError(f"The Ray cluster {where} has no GPU: use --device cpu.")
        # Whoever runs calls decides about retries, as with every executor: Ray retries nothing.
        self._remote = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_in_one_thread)
        self._calls: dict[Any, Call[Any]] = {}  # that are submitted

    @property
    def workers(self) -> int:
        """Number of processors of the cluster at this moment, or of GPUs if calls need them."""
        resources = self._ray.cluster_resources()
        count = resources.get("GPU", 1) / self._gpus if self._gpus else resources.get("CPU", 1)
        return max(1, int(count))

    def run(
        self,
        calls: Iterable[Call[T]],
        most: int | None = None,  # noqa: ARG002  # says nothing about other machines
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls; if a worker or node dies, the outcome of its call is `Died`."""
        waiting = iter(calls)
        while True:
            room = max(0, CALLS_AHEAD * self.workers - len(self._calls))
            for call in islice(waiting, room):
                self._calls[self._remote.remote(call)] = call
            if not self._calls:
                return
            finished, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=POLL_SECONDS)
            for handle in finished:
                yield self._calls.pop(handle), self._result(handle)

    def _result(self, handle: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(handle)
        except errors.RayTaskError as error:
            raise error.cause from error  # what the call itself raised
        except errors.RayError as error:
            return Died(f"the worker or its node is gone ({type(error).__name__})")

    def close(self) -> None:
        """Cancel running calls and leave the cluster."""
        for handle in self._calls:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(handle, force=True)
        self._calls.clear()
        self._ray.shutdown()


def _in_one_thread(call: Call[T]) -> T:
    set_threads(1)
    return call()


def _check_answers(address: str) -> None:
    """Raise an error within seconds if nothing answers; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NotAvailableError(
            f"No Ray cluster answers at {address} ({reason_of(error)}): name it as HOST:PORT, "
            "ray://HOST:PORT or auto; `ray start --head` on its first machine prints the address."
        ) from error
