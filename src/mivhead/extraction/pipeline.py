"""From images to a table of features: each image is decoded once and passes the backbone once.

With a cache, an image or view that passed the backbone before is not even decoded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mivhead._progress import progress_bar
from mivhead.backbones.base import Backbone
from mivhead.errors import InputError
from mivhead.extraction.cache import FeatureCache, Keys, Parts, content_hash
from mivhead.features import Features, FeatureTable
from mivhead.images.augmentation import Augmentation, augment
from mivhead.images.decoding import load_image, read_capped, read_file
from mivhead.images.imageset import ImageSet, ImageSource

BATCH = 32  # images per call of the backbone
AHEAD = 2 * BATCH  # images decoded and augmented while the backbone works
PART = 4 * BATCH  # images whose features are in memory at once, where they are not kept

ViewPlan = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows of the originals, seeds
NO_VIEWS: ViewPlan = (np.empty(0, np.int64), np.empty(0, np.int64))


def extract_table(
    backbone: Backbone,
    images: ImageSet,
    plan: ViewPlan = NO_VIEWS,
    how: Augmentation | None = None,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
) -> FeatureTable:
    """Extract features of images and of their planned views (`plan_views`).

    Decoding, augmentation and the search in the cache run in a second thread, beside the backbone
    or, if they are quick, in turns with it.
    """
    view_of = plan[0]
    count = len(images) + len(view_of)  # the images, then the views
    flow = _Flow(backbone, images, plan, how or Augmentation(), cache)
    with flow, progress_bar("backbone", count, show=verbose) as advance:
        features = flow.take(0, count, advance)
    return FeatureTable(
        features[: len(images)],
        images.ids,
        images.labels,
        features[len(images) :] if len(view_of) else None,
        view_of if len(view_of) else None,
        backbone.identity.as_json(),
    )


def iter_features(
    backbone: Backbone,
    images: ImageSet,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
) -> Iterator[Features]:
    """Yield the features of any number of images, `PART` at a time, in little memory.

    Images are decoded ahead while the caller works on a part, where that does not slow it down.
    """
    flow = _Flow(backbone, images, NO_VIEWS, Augmentation(), cache)
    with flow, progress_bar("backbone", len(images), show=verbose) as advance:
        for start in range(0, len(images), PART):
            features = flow.take(start, min(PART, len(images) - start), advance)
            with flow.cores.work("head", len(features)):
                yield features


class _Flow:
    """Images on their way through decoder, cache and backbone."""

    def __init__(
        self,
        backbone: Backbone,
        images: ImageSet,
        plan: ViewPlan,
        how: Augmentation,
        cache: FeatureCache | None,
    ) -> None:
        if not len(images):
            raise InputError("There are no images: give at least one.")
        self._backbone, self._writer = backbone, Writer(cache)
        self.cores = Cores()
        items = _items(images, plan, how, backbone, cache)
        self._items = prefetch(self.cores.decode(items), AHEAD)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._items.close()
        finally:
            self._writer.__exit__(kind)

    def take(self, start: int, count: int, advance: Callable[[int], object]) -> Features:
        """Features of the next items, whose places in the result are `start` and those after."""
        rows = _Rows(count)
        missing: list[_Item] = []

        def compute() -> None:
            """Pass everything that is missing through the backbone."""
            with self.cores.work("backbone", len(missing)):
                tensors = self._backbone.extract([item.picture for item in missing]).tensors
            found: dict[str, Parts] = {}
            for i, item in enumerate(missing):
                parts = {name: tensor[i].numpy() for name, tensor in tensors.items()}
                # The copy is stored: the backbone may write its next answer where this one was.
                found[item.key] = rows.put(item.place - start, parts)
            self._writer.put(found)
            advance(len(missing))
            missing.clear()

        for item in islice(self._items, count):
            if isinstance(item, _Found):
                rows.put(item.place - start, item.parts)
                advance(1)
            else:
                missing.append(item)
            if len(missing) == BATCH:
                compute()
        if missing:
            compute()
        return Features.from_tensors(rows.tensors)


@dataclass(frozen=True)
class _Found:
    """Features that were in the cache, and their row in the result."""

    place: int
    parts: Parts


@dataclass(frozen=True)
class _Item:
    """A picture to pass through the backbone, its row in the result, its key in the cache."""

    place: int
    key: str
    picture: Image.Image


def _items(
    images: ImageSet,
    plan: ViewPlan,
    how: Augmentation,
    backbone: Backbone,
    cache: FeatureCache | None,
) -> Iterator[_Found | _Item]:
    """Yield each image, then its views, so that no decoded image is kept."""
    view_of, seeds = plan
    size = backbone.preset.preprocessing.size
    keys = Keys(backbone, how)
    for row, source in enumerate(images.sources):
        content = read_content(source)
        hashed = "" if cache is None else content_hash(content)
        picture = None
        wanted: list[tuple[int, int | None]] = [(row, None)]
        wanted += [(len(images) + int(i), int(seeds[i])) for i in np.flatnonzero(view_of == row)]
        for place, seed in wanted:
            key = keys.key(hashed, seed)
            if cache is not None and (parts := cache.get(key)) is not None:
                yield _Found(place, parts)
                continue
            picture = picture or _picture(content, source)
            view = picture if seed is None else augment(picture, size, seed, how)
            yield _Item(place, key, view)


def read_content(source: ImageSource) -> bytes | Image.Image:
    """Bytes of an image file, or the picture if it is in memory: what the cache's key hashes."""
    given = source.get()
    if isinstance(given, bytes):
        return given
    if isinstance(given, str | os.PathLike):
        return read_file(Path(given), source.name)
    if isinstance(given, Image.Image | np.ndarray):
        return load_image(given, name=source.name)
    return read_capped(given, source.name)


def _picture(content: bytes | Image.Image, source: ImageSource) -> Image.Image:
    return content if isinstance(content, Image.Image) else load_image(content, name=source.name)


class _Rows:
    """Features of images that arrive in any order.

    All are copied into one array per part, so that memory is laid out alike, and training rounds
    alike, whether features come from a backbone or from the cache.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._arrays: dict[str, NDArray[np.floating]] = {}

    def put(self, place: int, parts: Parts) -> Parts:
        """Copy the features of an image to their place; returns the copy."""
        if not self._arrays:
            self._arrays = {k: np.empty((self.count, *v.shape), v.dtype) for k, v in parts.items()}
        layout = {name: (array.shape[1:], array.dtype) for name, array in self._arrays.items()}
        if {name: (part.shape, part.dtype) for name, part in parts.items()} != layout:
            raise InputError(
                "The backbone gives features of different shapes for different images, or gave "
                "other ones under the same identity before; for the latter, run `miv cache clear`."
            )
        for name, part in parts.items():
            self._arrays[name][place] = part
        return {name: array[place] for name, array in self._arrays.items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._arrays.items()}


# Who may use the processor cores: backbone and head, or the thread that decodes images.


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


# Decode the next images while the backbone works on these.


U = TypeVar("U")


def prefetch(iterable: Iterable[U], depth: int = 2) -> Generator[U]:
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


# `Writer`: puts features into a cache while the backbone goes on.


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
