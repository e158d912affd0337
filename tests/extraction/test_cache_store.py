"""The store: misses, damage, size limit, disks that do not take anything."""

import errno
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from mivhead.errors import NotAvailableError
from mivhead.extraction.cache import DISK_BLOCK, FeatureCache


def key(i: int) -> str:
    return f"{i:064x}"[::-1]


def entry(i: int, size: int = 8) -> dict[str, np.ndarray]:
    return {"block0.token": np.full(size, i, np.float16)}


def age(cache: FeatureCache, i: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache._path(key(i)), (then, then))


def present(cache: FeatureCache, count: int) -> list[int]:
    return [i for i in range(count) if Path(cache._path(key(i))).exists()]


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "features")


def test_what_is_stored_is_found_by_every_instance(cache: FeatureCache) -> None:
    assert cache.get(key(1)) is None
    cache.put(key(1), entry(1))
    for each in (cache, FeatureCache(cache.folder)):
        found = each.get(key(1))
        assert found is not None
        np.testing.assert_array_equal(found["block0.token"], entry(1)["block0.token"])
    assert cache.get(key(2)) is None
    assert not list((cache.folder / "new").iterdir())


def test_found_arrays_cannot_be_changed_and_outlive_their_file(cache: FeatureCache) -> None:
    cache.put(key(1), entry(1))
    found = cache.get(key(1))
    assert found is not None
    cache.clear()
    assert found["block0.token"].tolist() == [1] * 8
    with pytest.raises(ValueError, match="read-only"):
        found["block0.token"][0] = 3


@pytest.mark.parametrize("damage", [b"", b"half", b"x" * 500])
def test_a_damaged_entry_is_a_miss_and_removed(cache: FeatureCache, damage: bytes) -> None:
    cache.put(key(1), entry(1))
    Path(cache._path(key(1))).write_bytes(damage)
    assert cache.get(key(1)) is None
    assert cache.info().entries == 0
    cache.put(key(1), entry(1))
    assert cache.get(key(1)) is not None


def test_an_entry_under_a_wrong_name_is_a_miss(cache: FeatureCache) -> None:
    cache.put(key(1), entry(1))
    cache.put(key(2), entry(2))
    Path(cache._path(key(1))).replace(cache._path(key(2)))
    assert cache.get(key(2)) is None


def test_info_counts_blocks_on_disk(cache: FeatureCache) -> None:
    assert (cache.info().entries, cache.info().bytes) == (0, 0)
    cache.put(key(1), entry(1))
    cache.put(key(2), entry(2, size=DISK_BLOCK))  # 2 bytes each, and a header
    assert (cache.info().entries, cache.info().bytes) == (2, 4 * DISK_BLOCK)


def test_above_the_limit_the_least_recently_used_go(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, limit=10 * DISK_BLOCK)
    for i in range(10):
        cache.put(key(i), entry(i))
        age(cache, i, 10_000 - i)
    assert present(cache, 10) == list(range(10))
    cache.get(key(0))  # used: now the youngest
    cache.put(key(10), entry(10))
    assert present(cache, 11) == [0, 3, 4, 5, 6, 7, 8, 9, 10]  # 90 % of the limit
    assert cache.info().bytes <= cache.limit


def test_a_writer_sees_what_others_have_written(tmp_path: Path) -> None:
    limit = 40 * DISK_BLOCK
    writers = [FeatureCache(tmp_path, limit) for _ in range(4)]
    for i in range(200):
        writers[i % 4].put(key(i), entry(i))
        assert writers[0].info().bytes <= limit * 1.3


def test_abandoned_temporary_files_are_removed_but_fresh_ones_are_not(cache: FeatureCache) -> None:
    cache.put(key(1), entry(1))
    old, fresh = (cache.folder / "new" / name for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    FeatureCache(cache.folder).put(key(2), entry(2))
    assert (old.exists(), fresh.exists()) == (False, True)


def test_clear_removes_entries_and_nothing_else(cache: FeatureCache) -> None:
    cache.put(key(1), entry(1))
    mine = [cache.folder / "mine.txt", Path(cache._path(key(1))).with_name("notes")]
    for path in mine:
        path.write_text("precious")
    assert cache.clear().entries == 1
    assert cache.info().entries == 0
    assert all(path.read_text() == "precious" for path in mine)


def test_clear_of_a_cache_that_is_not_there(cache: FeatureCache) -> None:
    assert cache.clear().entries == 0
    assert not cache.folder.exists()


def test_a_new_folder_is_private(cache: FeatureCache) -> None:
    cache.put(key(1), entry(1))
    assert cache.folder.stat().st_mode & 0o077 == 0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):  # two extractions of one process
        cache = FeatureCache(tmp_path / "file" / "cache")
        for i in range(3):
            cache.put(key(i), entry(i))
            assert cache.get(key(i)) is None
    (message,) = warnings_of(caplog)
    assert str(cache.folder) in message
    assert "MIV_CACHE" in message


def test_a_full_disk_is_said_once_and_leaves_nothing_half(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(key(0), entry(0))

    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        for i in range(1, 4):
            cache.put(key(i), entry(i))
    assert cache.info().entries == 1
    assert not list((cache.folder / "new").iterdir())
    assert cache.get(key(0)) is not None  # what is there still helps
    (message,) = warnings_of(caplog)
    assert "No space left" in message


def test_a_read_only_disk_is_still_read(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(key(1), entry(1))
    age(cache, 1, 1000)

    def refuse(*args: object, **settings: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    for name in ("write_bytes", "mkdir", "replace", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    cache.put(key(2), entry(2))
    assert cache.get(key(1)) is not None
    assert cache.get(key(2)) is None
    with pytest.raises(NotAvailableError, match=r"Cannot clear .*: Read-only file system\."):
        cache.clear()
    assert len(warnings_of(caplog)) == 1
