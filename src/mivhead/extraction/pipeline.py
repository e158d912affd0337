"""The path from images to features: each image is decoded and passes through the backbone once.

Decoding, augmentation and cache lookups run in a second thread while the backbone computes, and new
features are written to the cache in a third. What is in the cache is not even decoded.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead._util.text import progress_bar
from mivhead.backbones.base import Backbone, extract_pictures
from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import PICTURE, CacheKeys, FeatureCache, Parts, content_hash
from mivhead.features import Features, FeatureTable
from mivhead.images.augmentation import NO_VIEWS, Augmentation, ViewPlan, augment, view_seed
from mivhead.images.decoding import encode_square, load_image, read_capped, read_file
from mivhead.images.imageset import ImageSet, ImageSource, given

BATCH = 32  # images per call of the backbone
AHEAD = 2 * BATCH  # images that are decoded and augmented while the backbone computes
PART = 4 * BATCH  # images whose features `iter_features` holds in memory

T = TypeVar("T")


def extract_table(
    backbone: Backbone,
    images: ImageSet,
    plan: ViewPlan = NO_VIEWS,
    augmentation: Augmentation | None = None,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
    pictures: bool = False,
) -> FeatureTable:
    """Extract features of images and of their augmented views.

    Parameters
    ----------
    plan : ViewPlan, default=NO_VIEWS
        Views to make, such as `ViewRule.plan` returns.
    augmentation : Augmentation, optional
        How views are made; by default as in the paper.
    verbose : bool, default=True
        Show a progress bar if it takes more than two seconds.
    pictures : bool, default=False
        Also keep the hash of every image, and a picture of it that views can be made of.
    """
    loaders = [partial(LoadedImage, source) for source in images.sources]
    work = _Work(backbone, loaders, plan, augmentation or Augmentation(), cache, pictures=pictures)
    (features,) = work.run(verbose=verbose)
    count = len(images)  # the images, then the views
    has_views = len(plan.view_of) > 0
    return FeatureTable(
        features[:count],
        images.ids,
        images.labels,
        features[count:] if has_views else None,
        plan.view_of if has_views else None,
        backbone.identity.as_json(),
        tuple(work.hashes) if pictures else None,
        tuple(work.kept) if pictures else None,
    )


def extract_views(
    backbone: Backbone,
    pictures: Sequence[tuple[str, bytes]],
    plan: ViewPlan,
    augmentation: Augmentation,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
) -> Features:
    """Extract the views of a plan from hashes and pictures as in a table of `extract_table`."""
    name = "a picture in the model file"
    loaders = [
        partial(LoadedImage, ImageSource(name, given(picture), name), content)
        for content, picture in pictures
    ]
    work = _Work(backbone, loaders, plan, augmentation, cache, originals=False)
    (features,) = work.run(verbose=verbose)
    return features


def iter_features(
    backbone: Backbone,
    images: ImageSet,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
) -> Iterator[Features]:
    """Yield the features of any number of images, `PART` at a time, in constant memory.

    The next images are decoded while the caller processes a part.
    """
    loaders = [partial(LoadedImage, source) for source in images.sources]
    return _Work(backbone, loaders, NO_VIEWS, Augmentation(), cache).run(PART, verbose=verbose)


def read_features(cache: FeatureCache, keys: Sequence[str]) -> Features:
    """Read features that were extracted before, in the order of their keys."""
    rows = _Rows(len(keys))
    absent = False
    for row, parts in enumerate(map(cache.get, keys)):
        if parts is None:
            absent = True  # read on, so that every corrupted entry is found now
        else:
            rows.put(row, parts)
    if absent:
        raise NotAvailableError(f"The feature cache {cache.folder} lost features: run this again.")
    return rows.features


class LoadedImage:
    """An image that was read, or a kept picture of a known hash; decoded when it is needed."""

    def __init__(self, source: ImageSource, known: str | None = None) -> None:
        self._name = source.name
        opened = source.get()
        self._content: bytes | Image.Image
        if isinstance(opened, bytes):
            self._content = opened
        elif isinstance(opened, str | os.PathLike):
            self._content = read_file(Path(opened), source.name)
        elif isinstance(opened, Image.Image | np.ndarray):
            self._content = load_image(opened, name=source.name)
        else:
            self._content = read_capped(opened, source.name)
        if known is not None:
            self.hash = known

    @cached_property
    def hash(self) -> str:
        """Hash of the image file, or of the pixels of an image that was given in memory."""
        return content_hash(self._content)

    @cached_property
    def picture(self) -> Image.Image:
        """The decoded image."""
        content = self._content
        return content if isinstance(content, Image.Image) else load_image(content, name=self._name)


@dataclass(frozen=True)
class _Item:
    """An image or view: its row in the result, and its features or a picture to compute them of."""

    row: int
    key: str  # in the cache
    parts: Parts | None  # found in the cache
    picture: Image.Image | None = None
    kept: bytes | None = None  # a picture to store with the features


@dataclass
class _Work:
    """Images on their way through decoder, cache and backbone."""

    backbone: Backbone
    loaders: Sequence[Callable[[], LoadedImage]]
    plan: ViewPlan
    augmentation: Augmentation
    cache: FeatureCache | None
    originals: bool = True  # whether the images themselves pass, not only their views
    pictures: bool = False  # whether hashes and pictures of the images are kept
    hashes: list[str] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)

    def run(self, step: int | None = None, *, verbose: bool) -> Iterator[Features]:
        """Yield the features of the images, then of the views, `step` rows at a time or all."""
        if not self.loaders:
            raise InputError("There are no images: give at least one.")
        count = len(self.loaders) * self.originals + len(self.plan.view_of)
        written: Future[None] | None = None
        with (
            closing(prefetch(self._items(), AHEAD)) as items,
            ThreadPoolExecutor(1, thread_name_prefix="cache") as writer,
            progress_bar("backbone", count, show=verbose) as advance,
        ):
            for start in range(0, count, step or count):
                rows = _Rows(min(step or count, count - start))
                for batch in _batches(islice(items, rows.count), rows, start, advance):
                    entries = self._compute(batch, rows, start)
                    advance(len(batch))
                    if written is not None:
                        written.result()  # so that entries cannot pile up
                    if self.cache is not None:
                        written = writer.submit(_write, self.cache, entries)
                yield rows.features
            if written is not None:
                written.result()

    def _compute(self, batch: list[_Item], rows: _Rows, start: int) -> dict[str, Parts]:
        """Pass a batch through the backbone; return what to store in the cache."""
        pictures = [item.picture for item in batch if item.picture is not None]
        tensors = extract_pictures(self.backbone, pictures).tensors
        entries: dict[str, Parts] = {}
        for i, item in enumerate(batch):
            # Store the copy: the backbone may reuse the memory of its output.
            stored = rows.put(item.row - start, {name: t[i] for name, t in tensors.items()})
            if item.kept is not None:
                stored = {**stored, PICTURE: np.frombuffer(item.kept, np.uint8)}
            entries[item.key] = stored
        return entries

    def _items(self) -> Iterator[_Item]:
        """Yield each image, followed by its views, so that no decoded image is kept."""
        size = self.backbone.preset.preprocessing.size
        keys = CacheKeys(self.backbone, self.augmentation)
        views_of: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # row and number
        first = len(self.loaders) * self.originals  # row of the first view
        for i, (row, number) in enumerate(zip(self.plan.view_of, self.plan.numbers, strict=True)):
            views_of[int(row)].append((first + i, int(number)))

        def look_up(image: LoadedImage, seed: int | None) -> tuple[str, Parts | None]:
            if self.cache is None:
                return "", None
            key = keys.key(image.hash, seed)
            return key, self.cache.get(key)

        for i, load in enumerate(self.loaders):
            image = load()
            if self.originals:
                key, parts = look_up(image, None)
                kept = None
                if self.pictures:
                    stored = (parts or {}).get(PICTURE)  # entries of a benchmark have none
                    kept = stored.tobytes() if stored is not None else None
                    kept = kept or encode_square(image.picture, size)
                    self.hashes.append(image.hash)
                    self.kept.append(kept)
                yield _Item(i, key, parts, None if parts else image.picture, kept)
            for row, number in views_of[i]:
                seed = view_seed(self.plan.seed, image.hash, number)
                key, parts = look_up(image, seed)
                view = None if parts else augment(image.picture, size, seed, self.augmentation)
                yield _Item(row, key, parts, view)


def _batches(
    items: Iterable[_Item], rows: _Rows, start: int, advance: Callable[[int], None]
) -> Iterator[list[_Item]]:
    """Put what was found in the cache into its row; yield the other items in batches."""
    batch: list[_Item] = []
    for item in items:
        if item.parts is not None:
            rows.put(item.row - start, item.parts)
            advance(1)
            continue
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _write(cache: FeatureCache, entries: Mapping[str, Parts]) -> None:
    for key, parts in entries.items():
        cache.put(key, parts)


class _Rows:
    """Features of images that arrive in any order, copied into one array per part.

    Training then rounds the same way, whether features come from a backbone or from the cache.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._arrays: dict[str, NDArray[np.floating]] = {}

    def put(self, row: int, parts: Parts) -> Parts:
        """Copy the features of an image to their row and return the copy."""
        parts = {name: part for name, part in parts.items() if name != PICTURE}
        layout = {name: (part.shape, part.dtype) for name, part in parts.items()}
        if not self._arrays:
            shapes = {name: (self.count, *shape) for name, (shape, _) in layout.items()}
            self._arrays = {name: np.empty(shapes[name], layout[name][1]) for name in layout}
        if layout != {name: (rows.shape[1:], rows.dtype) for name, rows in self._arrays.items()}:
            raise InputError(
                "The backbone extracts features of different shapes from different images, or has "
                "extracted others under the same identity: use another cache folder (MIV_CACHE)."
            )
        for name, part in parts.items():
            self._arrays[name][row] = part
        return {name: array[row] for name, array in self._arrays.items()}

    @property
    def features(self) -> Features:
        """All rows."""
        return Features.from_tensors(self._arrays)


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T]:
    """Yield the items of an iterable, while another thread prepares up to `depth` in advance.

    When the consumer stops (also by Ctrl-C), only the item in progress is finished.
    """
    iterator = iter(iterable)
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")  # one, so `next` never overlaps
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(max(1, depth)))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]  # it is not `end`
    finally:
        pool.shutdown(cancel_futures=True)
