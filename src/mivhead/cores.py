"""Who may use the processor cores: backbone and head, or the thread that decodes images."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Cores:
    """Shares the cores between PyTorch's work and the thread that decodes, or reads the cache.

    PyTorch's threads wait for each other after every layer: if one of them has to share its core
    with the decoder, all stand still, and extraction takes many times as long. So the backbone
    leaves a core to the decoder; or, where decoding takes less time than that core would save, the
    two take turns, and the backbone has all cores in its turn. The same holds for the head.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._turn = threading.Lock()
        self._decoded = False  # all there is
        self._decoding = _Mean()
        self._beside: defaultdict[str, _Mean] = defaultdict(_Mean)  # by kind, with a core less

    def decode(self, items: Iterable[T]) -> Iterator[T]:
        """Pass items on, each made in a turn of its own."""
        iterator = iter(items)
        while True:
            with self._turn, self._decoding.of(1):
                item = next(iterator, None)
            if item is None:
                self._decoded = True
                return
            yield item

    @contextmanager
    def work(self, kind: str, images: int) -> Iterator[None]:
        """Do work of one kind, such as the backbone's or the head's, on so many images."""
        beside = self._beside[kind]
        saved = beside.seconds / self._threads  # per image, by one core more
        if self._decoded or self._decoding.seconds < saved:
            with self._turn:
                yield
            return
        torch.set_num_threads(max(1, self._threads - 1))
        try:
            with beside.of(images):
                yield
        finally:
            torch.set_num_threads(self._threads)


class _Mean:
    """Mean seconds of something that is done many times."""

    def __init__(self) -> None:
        self._total, self._count = 0.0, 0

    @property
    def seconds(self) -> float:
        return self._total / max(1, self._count)

    @contextmanager
    def of(self, count: int) -> Iterator[None]:
        """Time what is done here so many times."""
        start = time.perf_counter()
        yield
        self._total += time.perf_counter() - start
        self._count += count
