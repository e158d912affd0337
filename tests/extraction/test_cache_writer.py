"""Writing beside the backbone: everything arrives, little waits, no error is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from mivhead.extraction.cache import FeatureCache, Parts
from mivhead.extraction.pipeline import _Writer


def batch(number: int) -> dict[str, Parts]:
    return {f"{number:02}{i:062}": {"block0.token": np.full(2, i, np.float16)} for i in range(3)}


def put_all(cache: FeatureCache, batches: int, error: BaseException | None = None) -> None:
    with _Writer(cache) as writer:
        for number in range(batches):
            writer.put(batch(number))
        if error is not None:
            raise error


def test_all_entries_are_there_after_closing(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    put_all(cache, 4)
    for key, parts in (entry for number in range(4) for entry in batch(number).items()):
        found = cache.get(key)
        assert found is not None
        np.testing.assert_array_equal(found["block0.token"], parts["block0.token"])


def test_no_more_than_one_batch_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, stored = threading.Event(), []

    def slow(_: FeatureCache, key: str, parts: Parts) -> None:
        assert go.wait(10)
        stored.append(key)

    monkeypatch.setattr(FeatureCache, "put", slow)
    with _Writer(FeatureCache(tmp_path)) as writer:
        writer.put(batch(0))  # returns, though nothing is stored yet
        assert not stored
        threading.Timer(0.05, go.set).start()
        writer.put(batch(1))
        assert stored[:3] == list(batch(0))
    assert len(stored) == 6


@pytest.mark.parametrize("batches", [1, 2])
def test_an_error_is_told_but_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FeatureCache, "put", fail)
    with pytest.raises(MemoryError):
        put_all(FeatureCache(tmp_path), batches)
    with pytest.raises(KeyboardInterrupt):
        put_all(FeatureCache(tmp_path), 1, KeyboardInterrupt())


def test_without_a_cache_nothing_is_done() -> None:
    with _Writer(None) as writer:
        writer.put(batch(0))
