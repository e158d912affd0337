"""Requests of many clients, put together into batches for one thread that computes.

While a batch is being computed, the images of other requests queue up and form the next one: no
request waits for others to come, and batches grow with the load. The queue is bounded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from mivhead.service.protection import busy

BATCH = 32  # images per call


@dataclass
class _Job:
    compute: Callable[[list[Any]], Sequence[Any]]
    items: list[Any]
    result: Future[list[Any]] = field(default_factory=Future)


class Batcher:
    """Computes the items of many requests in batches, one batch at a time, in its own thread.

    Parameters
    ----------
    max_queue : int
        Items that wait or are being computed; beyond it, `admit` refuses.
    batch : int, default=32
        Maximum number of items per call, unless a single request has more.
    on_batch : callable, optional
        Called with the number of items of each batch and the seconds that it took.
    """

    def __init__(
        self,
        max_queue: int,
        *,
        batch: int = BATCH,
        on_batch: Callable[[int, float], object] | None = None,
    ) -> None:
        self._max_queue, self._batch, self._on_batch = max_queue, batch, on_batch
        self.admitted = 0  # items
        self._pace = 0.05  # seconds per item, a moving average
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Hold places in the queue for the items of a request, or refuse it.

        Called in the event loop only. An idle server accepts a request of any size.
        """
        if self._closed:
            raise busy("The server is stopping.")
        if self.admitted and self.admitted + count > self._max_queue:
            raise busy("The server is busy: try again.", self.admitted * self._pace)
        self.admitted += count
        try:
            yield
        finally:
            self.admitted -= count

    async def run(
        self, compute: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]
    ) -> list[Any]:
        """Return one result per item; items of the same `compute` share calls."""
        job = _Job(compute, list(items))
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        return await asyncio.wrap_future(job.result)  # cancelling it drops the job

    def close(self) -> None:
        """Finish the batch in progress, and cancel what waits."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.result.cancel()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            if jobs:
                self._compute(jobs)

    def _next(self) -> list[_Job] | None:
        """Wait for the oldest job, and return it with others that fit into the same batch."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            jobs: list[_Job] = []
            rest: deque[_Job] = deque()
            room = self._batch
            for job in self._jobs:
                same = not jobs or (job.compute == jobs[0].compute and len(job.items) <= room)
                if not same:
                    rest.append(job)
                elif job.result.set_running_or_notify_cancel():
                    jobs.append(job)
                    room -= len(job.items)
            self._jobs = rest
            return jobs

    def _compute(self, jobs: list[_Job]) -> None:
        items = [item for job in jobs for item in job.items]
        start = time.perf_counter()
        try:
            results = list(jobs[0].compute(items))
        # Any exception belongs to the request that caused it, and never ends the thread.
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].result.set_exception(error)
            else:  # the others must not suffer from one bad request
                for job in jobs:
                    self._compute([job])
            return
        seconds = time.perf_counter() - start
        self._pace += 0.2 * (seconds / len(items) - self._pace)
        if self._on_batch is not None:
            self._on_batch(len(items), seconds)
        for job in jobs:
            job.result.set_result(results[: len(job.items)])
            results = results[len(job.items) :]


class Budget:
    """An amount that tasks share; whoever needs more than is left waits, in the order of asking.

    Parameters
    ----------
    limit : int
        The whole amount.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.free = limit, limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, amount: int) -> AsyncIterator[None]:
        """Hold a part of the amount, at most all of it."""
        amount = min(amount, self.limit)
        if self._waiting or amount > self.free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((amount, turn))
            try:
                await turn
            except asyncio.CancelledError:
                came = turn.done() and not turn.cancelled()  # its turn, in the same moment
                self._give_back(amount if came else 0)
                raise
        else:
            self.free -= amount
        try:
            yield
        finally:
            self._give_back(amount)

    def _give_back(self, amount: int) -> None:
        self.free += amount
        while self._waiting:
            asked, turn = self._waiting[0]
            if not turn.done():  # it is, if its task was cancelled
                if asked > self.free:
                    return
                self.free -= asked
                turn.set_result(None)
            self._waiting.popleft()
