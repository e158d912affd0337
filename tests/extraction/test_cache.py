"""The feature cache: entries, misses, corruption, limits, several processes, settings."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import FeatureCache, decode, encode, entry_size, open_cache

KEY = "k" * 64
floats = st.sampled_from([np.float16, np.float32, np.float64])
all_parts = st.dictionaries(
    st.sampled_from(["block0.map", "block0.token", "block1.map"]),
    floats.flatmap(
        lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    ),
    min_size=1,
)


@given(all_parts)
def test_round_trip_is_exact(given_parts: dict[str, np.ndarray]) -> None:
    found = decode(KEY, encode(KEY, given_parts))
    assert found is not None
    assert found.keys() == given_parts.keys()
    for name, part in given_parts.items():
        assert found[name].dtype == part.dtype
        assert found[name].shape == part.shape
        assert found[name].tobytes() == part.tobytes()  # NaN and -0.0 too


@given(st.data())
def test_any_changed_byte_and_any_cut_is_found(data: st.DataObject) -> None:
    whole = encode(KEY, {"block0.token": np.arange(5, dtype=np.float16)})
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert decode(KEY, bytes(changed)) is None
    assert decode(KEY, whole[:at]) is None


def key(i: int) -> str:
    return f"{i:064x}"[::-1]


def entry(i: int, size: int = 8) -> dict[str, np.ndarray]:
    return {"block0.token": np.full(size, i, np.float16)}


SMALL = entry_size(entry(0))


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


@pytest.mark.parametrize("damage", [b"", b"half", b"x" * 500])
def test_a_corrupted_entry_is_a_miss_and_removed(cache: FeatureCache, damage: bytes) -> None:
    cache.put(key(1), entry(1))
    Path(cache._path(key(1))).write_bytes(damage)
    assert cache.get(key(1)) is None
    assert cache.info().entries == 0
    cache.put(key(1), entry(1))
    assert cache.get(key(1)) is not None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are for Unix")
def test_a_pipe_in_place_of_an_entry_is_a_miss_and_removed(cache: FeatureCache) -> None:
    cache.put(KEY, {"block0.token": np.ones(3)})
    path = cache.folder / KEY[:2] / KEY[2:]
    path.unlink()
    os.mkfifo(path)
    assert cache.get(KEY) is None
    assert not path.exists()


def test_above_the_limit_the_least_recently_used_go(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, limit=10 * SMALL)
    for i in range(10):
        cache.put(key(i), entry(i))
        age(cache, i, 10_000 - i)
    assert present(cache, 10) == list(range(10))
    cache.get(key(0))  # used: now the youngest
    cache.put(key(10), entry(10))
    assert present(cache, 11) == [0, 3, 4, 5, 6, 7, 8, 9, 10]  # 90% of the limit
    assert cache.info().bytes <= cache.limit


def test_a_writer_sees_what_others_have_written(tmp_path: Path) -> None:
    limit = 40 * SMALL
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


def test_a_new_folder_is_private(cache: FeatureCache) -> None:
    cache.put(key(1), entry(1))
    assert cache.folder.stat().st_mode & 0o077 == 0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_that_cannot_be_created_is_reported_once(
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


def test_a_full_disk_is_reported_once_and_leaves_no_partial_entry(
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


KEYS = [f"{i:02x}" + "0" * 62 for i in range(16)]
SIZE = 20_000


def read_all(cache: FeatureCache) -> int:
    """Check every entry that is there; return how many were."""
    found = 0
    for key in KEYS:
        was_there = Path(cache._path(key)).exists()
        parts = cache.get(key)
        assert parts is not None or not was_there, "a half-written entry was seen"
        if parts is not None:
            values = parts["block0.token"]
            assert values.shape == (SIZE,)
            assert np.ptp(values) == 0
            found += 1
    return found


def test_a_kill_at_any_moment_leaves_no_damage(tmp_path: Path) -> None:
    # Children are forked by a small process: quick, and without PyTorch's threads.
    launcher = f"""
import os, pathlib, random, signal, sys, time
from mivhead.extraction.cache import FeatureCache
import numpy as np
values = np.zeros({SIZE}, np.float32)
for round in range(150):
    rng = random.Random(round)
    pid = os.fork()
    if not pid:
        cache = FeatureCache(sys.argv[1])
        if round % 10 == 0:  # these are surely hit in the middle
            pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        while True:
            for key in rng.sample({KEYS}, {len(KEYS)}):
                values[:] = round
                cache.put(key, {{"block0.token": values}})
    if round % 10:
        time.sleep(rng.uniform(0.001, 0.01))
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(round, flush=True)
cache = FeatureCache(sys.argv[1])
for key in {KEYS}:  # one that is not killed, as a starved machine may not get to every key before
    cache.put(key, {{"block0.token": values}})
"""
    cache = FeatureCache(tmp_path)
    command = [sys.executable, "-c", launcher, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rounds = 0
        for _ in process.stdout:
            rounds += 1
            read_all(cache)
    assert (process.returncode, rounds) == (0, 150)
    assert read_all(cache) == len(KEYS)
    # Kills did hit writers in the middle of a file: what they left was never an entry.
    assert list((tmp_path / "new").iterdir())


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MIV_CACHE", "MIV_CACHE_GB", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def folder_of(given: str | None = None) -> Path:
    cache = open_cache(given)
    assert cache is not None
    return cache.folder


def test_the_folder(clean: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert folder_of() == tmp_path / ".cache" / "mivhead"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert folder_of() == Path("/somewhere/mivhead")
    monkeypatch.setenv("MIV_CACHE", "~/mine")
    assert folder_of() == tmp_path / "mine"
    assert folder_of("/given") == Path("/given")
    monkeypatch.setenv("MIV_CACHE", "off")
    assert open_cache() is None
    assert folder_of("/given") == Path("/given")  # asked for by name
    assert not list(tmp_path.iterdir())  # opening makes nothing


@pytest.mark.parametrize("text", ["much", "0", "inf"])
def test_a_wrong_limit(clean: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MIV_CACHE_GB", text)
    with pytest.raises(InputError, match="MIV_CACHE_GB"):
        open_cache()


def test_missing_entries_are_listed_and_others_marked_as_used(cache: FeatureCache) -> None:
    assert cache.missing([key(1)]) == [key(1)]  # there is no folder yet
    for i in range(3):
        cache.put(key(i), entry(i))
        age(cache, i, 10_000)
    assert cache.missing([key(0), key(5), key(2)]) == [key(5)]
    used = [time.time() - Path(cache._path(key(i))).stat().st_mtime < 1000 for i in range(3)]
    assert used == [True, False, True]


def test_a_strict_cache_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    strict = FeatureCache(tmp_path / "file" / "cache", strict=True)
    with pytest.raises(NotAvailableError, match="--cache"):
        strict.put(key(1), entry(1))
    assert strict.get(key(1)) is None
