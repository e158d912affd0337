"""Requests of many clients, put together into batches.

While a batch is being computed, the images of other requests queue up and form the next one: no
request waits for others to come, and batches grow with the load. The queue is bounded.

A computation has one or two steps, such as the backbone and the head. While a batch is in its
second step, the next one is in its first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from mivhead.service.protection import busy

BATCH = 16  # images per call: larger ones cost memory and gain no speed on a CPU

# The first step takes the items, the next one what the step before returned; the last one returns
# a result per item.
Steps: TypeAlias = tuple[Callable[[Any], Any], ...]


@dataclass
class _Job:
    steps: Steps
    items: list[Any]
    result: asyncio.Future[list[Any]]


class Batcher:
    """Computes the items of many requests in batches, one batch per step at a time.

    Beyond `max_queue` items that wait or are being computed, `admit` refuses. A batch has at most
    BATCH items, unless a single request has more. `on_batch` is called with the number of items of
    each batch and the seconds that it took.
    """

    def __init__(
        self,
        max_queue: int,
        *,
        on_batch: Callable[[int, float], object] | None = None,
    ) -> None:
        self._max_queue, self._on_batch = max_queue, on_batch
        self.admitted = 0  # items
        self._pace = 0.05  # seconds per item, a moving average
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._first, self._second = threading.Lock(), threading.Lock()  # turns in the two steps
        self._threads = [
            threading.Thread(target=self._work, name="batches", daemon=True) for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()

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

    async def run(self, steps: Steps, items: Sequence[Any]) -> list[Any]:
        """Return one result per item; items of the same steps share calls."""
        job = _Job(steps, list(items), asyncio.get_running_loop().create_future())
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        return await job.result  # cancelling it drops the job

    def close(self) -> None:
        """Finish the batches in progress, and cancel what waits; called in the event loop."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.result.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with ExitStack() as turn:
                turn.enter_context(self._first)  # only then jobs are taken: others queue up
                if (jobs := self._next()) is None:
                    return
                if jobs:
                    self._compute(jobs, turn)

    def _next(self) -> list[_Job] | None:
        """Wait for the oldest job, and return it with others that fit into the same batch."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            jobs: list[_Job] = []
            rest: deque[_Job] = deque()
            room = BATCH
            for job in self._jobs:
                same = not jobs or (job.steps == jobs[0].steps and len(job.items) <= room)
                if not same:
                    rest.append(job)
                elif not job.result.cancelled():
                    jobs.append(job)
                    room -= len(job.items)
            self._jobs = rest
            return jobs

    def _compute(self, jobs: list[_Job], turn: ExitStack) -> None:
        found: Any = [item for job in jobs for item in job.items]
        count, seconds = len(found), 0.0
        try:
            for number, step in enumerate(jobs[0].steps):
                if number == 1:
                    turn.close()
                    turn.enter_context(self._second)
                start = time.perf_counter()
                found = step(found)
                seconds += time.perf_counter() - start
            results = list(found)
        # Any exception belongs to the request that caused it, and never ends the thread.
        except Exception as error:
            if len(jobs) == 1:
                _deliver(jobs, [error])
            else:  # the others must not suffer from one bad request
                for job in jobs:
                    self._compute([job], turn)
            return
        self._pace += 0.2 * (seconds / count - self._pace)
        if self._on_batch is not None:
            self._on_batch(count, seconds)
        rest = iter(results)
        _deliver(jobs, [list(islice(rest, len(job.items))) for job in jobs])


def _deliver(jobs: Sequence[_Job], found: Sequence[list[Any] | Exception]) -> None:
    """Give jobs their results, in the event loop.

    All at once: waking it is a system call, after which its thread runs first.
    """

    def deliver() -> None:
        for job, each in zip(jobs, found, strict=True):
            if job.result.done():  # cancelled meanwhile
                continue
            if isinstance(each, Exception):
                job.result.set_exception(each)
            else:
                job.result.set_result(each)

    with suppress(RuntimeError):  # the event loop is closed: nobody waits
        jobs[0].result.get_loop().call_soon_threadsafe(deliver)


class Budget:
    """An amount that tasks share; whoever needs more than is left waits, in the order of asking."""

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
