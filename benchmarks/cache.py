"""How fast the feature cache reads, compared with a plain memory-mapped array of the same values.

    python benchmarks/cache.py [--images 1000] [--threads 2] [--json cache.json]

Writes entries of the default backbone's size (169 kB), then reads all of them in random order and
copies the values, as extraction does. "Segment" is the alternative design: all entries in one
memory-mapped file, one after the other, with the same checksums. It is not worth an index and the
loss of removing old entries one by one, so each entry is a file. "Extraction" is `extract_table`
with a full cache: it reads and hashes image files, computes keys, finds and checks entries, and
collects the features. Everything is in the page cache; the best of five rounds counts. The second
column is per second of processor time, which depends less on other load. Takes ten seconds. Expect
about 1 GB/s from the cache, 50 % more from a segment, and half as much from extraction.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mivhead.backbones.base import Identity
from mivhead.backbones.preset import BlockPreset, Preset
from mivhead.extraction.cache import FeatureCache, decode, encode
from mivhead.extraction.pipeline import extract_table
from mivhead.features import Features
from mivhead.images.sources import open_unlabelled

SHAPES = {"block0.map": (112, 14, 14), "block1.map": (1280, 7, 7)}
ROUNDS = 5

Rate = tuple[float, float]
Arrays = dict[str, np.ndarray[Any, Any]]


class Constant:
    """A backbone whose features have the right shapes and cost nothing."""

    preset = Preset(("a", "b"), (BlockPreset(), BlockPreset()))
    identity = Identity("constant", "0" * 64, preset.preprocessing, preset.taps)

    def extract(self, images: Sequence[Any]) -> Features:
        """Return ones."""
        return Features([np.ones((len(images), *s), np.float16) for s in SHAPES.values()])


def rate(megabytes: float, call: Callable[[], object], rounds: int = ROUNDS) -> Rate:
    """Return MB per second, and per second of processor time, in the best round."""
    wall, cpu = [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return megabytes / min(wall), megabytes / min(cpu)


def measure(folder: Path, count: int, threads: int) -> dict[str, Rate]:
    """Return the rates of writing, and of reading in every way."""
    rng = np.random.default_rng(0)
    entry: Arrays = {k: rng.normal(size=shape).astype(np.float16) for k, shape in SHAPES.items()}
    keys = [rng.bytes(32).hex() for _ in range(count)]
    order = rng.permutation(count)
    megabytes = count * sum(part.nbytes for part in entry.values()) / 1e6
    out: Arrays = {k: np.zeros((count, *shape), np.float16) for k, shape in SHAPES.items()}

    def copy(row: int, parts: Arrays | None) -> None:
        assert parts is not None
        for name, part in parts.items():
            out[name][row] = part

    cache = FeatureCache(folder / "cache")
    rates = {"write": rate(megabytes, lambda: [cache.put(key, entry) for key in keys], rounds=1)}

    for name in SHAPES:
        np.save(folder / f"{name}.npy", np.broadcast_to(entry[name], out[name].shape))
    plain = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in SHAPES}
    size = len(encode(keys[0], entry))
    (folder / "segment").write_bytes(b"".join(encode(key, entry) for key in keys))
    segment = np.memmap(folder / "segment", mode="r").reshape(count, size)

    def from_plain(row: int) -> None:
        copy(row, {name: array[row] for name, array in plain.items()})

    def from_segment(row: int) -> None:
        copy(row, decode(keys[row], segment[row]))

    def from_cache(row: int) -> None:
        copy(row, cache.get(keys[row]))

    def in_threads(read: Callable[[int], None]) -> None:
        parts = np.array_split(order, threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda rows: [read(row) for row in rows], parts))

    for label, read in (("plain", from_plain), ("segment", from_segment), ("cache", from_cache)):
        rates[label] = rate(megabytes, lambda read=read: [read(row) for row in order])
        rates[f"{label}, {threads} threads"] = rate(megabytes, lambda read=read: in_threads(read))
    rates["extraction"] = rate(megabytes, warm_extraction(folder, count))
    return rates


def warm_extraction(folder: Path, count: int) -> Callable[[], object]:
    """Return a function that extracts images which are all in the cache."""
    rng = np.random.default_rng(1)
    (folder / "images").mkdir()
    for i in range(count):
        pixels = rng.integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.jpg")
    images = open_unlabelled([folder / "images"])
    cache = FeatureCache(folder / "extracted")
    extract_table(Constant(), images, cache=cache, verbose=False)
    return lambda: extract_table(Constant(), images, cache=cache, verbose=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(Path(folder), args.images, args.threads)
    print("                       MB/s   MB/s of processor time")
    for name, (wall, cpu) in rates.items():
        print(f"{name:20} {wall:6.0f} {cpu:8.0f}")
    if args.json:
        report = {"images": args.images, "megabytes_per_second": rates}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
