"""Several processes at once, and processes that are killed at any moment."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mivhead.extraction.cache import FeatureCache

KEYS = [f"{i:02x}" + "0" * 62 for i in range(16)]
SIZE = 20_000

# Writes the same keys for ever; every value of an entry is the same, so that a mixture is seen.
WRITER = f"""
import sys, numpy as np
from itertools import count
from mivhead.extraction.cache import FeatureCache
cache = FeatureCache(sys.argv[1])
print("ready", flush=True)
for n in count():
    for key in {KEYS}:
        cache.put(key, {{"block0.token": np.full({SIZE}, n % 1000 + int(sys.argv[2]), np.float32)}})
"""


def start(folder: Path, offset: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(folder), str(offset)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


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


def test_readers_see_whole_entries_while_two_processes_write_the_same_keys(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    writers = [start(tmp_path, 0), start(tmp_path, 5000)]
    try:
        end = time.monotonic() + 2
        seen = 0
        while time.monotonic() < end:
            seen += read_all(cache)
        assert seen > 100
    finally:
        for writer in writers:
            kill(writer)
    assert read_all(cache) == len(KEYS)


def test_a_kill_at_any_moment_leaves_no_damage(tmp_path: Path) -> None:
    # Children are forked by a small process: quick, and without PyTorch's threads.
    launcher = f"""
import os, random, signal, sys, time
from mivhead.extraction.cache import FeatureCache
import numpy as np
values = np.zeros({SIZE}, np.float32)
for round in range(150):
    rng = random.Random(round)
    pid = os.fork()
    if not pid:
        cache = FeatureCache(sys.argv[1])
        while True:
            for key in rng.sample({KEYS}, {len(KEYS)}):
                values[:] = round
                cache.put(key, {{"block0.token": values}})
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
