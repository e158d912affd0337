"""Decode the next images while the backbone works on these."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T]:
    """Yield the items of an iterable, of which up to `depth` are made ahead in one other thread.

    The order stays, an exception appears where it would without the thread, and when the consumer
    stops (also by Ctrl-C) nothing but the item in work is finished.

    Examples
    --------
    >>> list(prefetch(range(4), depth=2))
    [0, 1, 2, 3]
    """
    iterator = iter(iterable)
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")  # one, so `next` never overlaps
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(max(1, depth)))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]  # `end` was told apart above
    finally:
        pool.shutdown(cancel_futures=True)
