"""`Writer`: puts features into a cache while the backbone goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from mivhead.cache.entry import Parts
from mivhead.cache.store import FeatureCache


class Writer:
    """Writes one batch of entries after the other, in a thread of its own, until it is left.

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
    ...     with Writer(cache) as writer:
    ...         writer.put({"0" * 64: {"block0.token": np.ones(2, np.float16)}})
    ...     print(cache.info().entries)
    1
    """

    def __init__(self, cache: FeatureCache | None) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._last: Future[None] | None = None

    def put(self, entries: Mapping[str, Parts]) -> None:
        """Store entries, by key; waits until those given before are stored, so none pile up.

        Their numbers must stay as they are until then.
        """
        if self._cache is None:
            return
        self._wait()
        self._last = self._thread.submit(self._write, self._cache, entries)

    @staticmethod
    def _write(cache: FeatureCache, entries: Mapping[str, Parts]) -> None:
        for key, parts in entries.items():
            cache.put(key, parts)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:  # an error of the writer must not hide another one
            self._wait()
