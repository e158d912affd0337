"""`Writer`: puts features into a cache while the backbone goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from mivhead.cache.entry import Parts
from mivhead.cache.store import FeatureCache


class Writer:
    """Writes one batch of entries after the other, in a thread of its own.

    Parameters
    ----------
    cache
        Where to; None: nowhere.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = FeatureCache(folder)
    ...     writer = Writer(cache)
    ...     writer.put({"0" * 64: {"block0.token": np.ones(2, np.float16)}})
    ...     writer.close()
    ...     print(cache.info().entries)
    1
    """

    def __init__(self, cache: FeatureCache | None) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._last: Future[None] | None = None

    def put(self, entries: Mapping[str, Parts]) -> None:
        """Store entries, by key; waits until those given before are stored, so none pile up."""
        if self._cache is None:
            return
        self._wait()
        self._last = self._thread.submit(self._write, self._cache, entries)

    @staticmethod
    def _write(cache: FeatureCache, entries: Mapping[str, Parts]) -> None:
        for key, parts in entries.items():
            cache.put(key, parts)

    def close(self) -> None:
        """Wait until everything is stored."""
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
