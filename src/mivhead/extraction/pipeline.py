"""The path from images to features: each image is decoded and passes through the backbone once.

With a cache, an image or view that passed the backbone before is not even decoded. Decoding,
augmentation and cache lookups run in a second thread while the backbone computes, and new features
are written to the cache in a third.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead._util.progress import progress_bar
from mivhead._util.threads import shared_cores
from mivhead.backbones.base import Backbone
from mivhead.backbones.preprocessing import DecodedImage
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


def extract_pictures(backbone: Backbone, pictures: Sequence[DecodedImage]) -> Features:
    """Pass one batch of decoded images through the backbone, without a cache."""
    with shared_cores():
        return backbone.extract(pictures)


def extract_table(
    backbone: Backbone,
    images: ImageSet,
    plan: ViewPlan = NO_VIEWS,
    how: Augmentation | None = None,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
    pictures: bool = False,
) -> FeatureTable:
    """Extract features of images and of their augmented views.

    Parameters
    ----------
    backbone : Backbone
        Extracts the features that the cache lacks.
    images : ImageSet
        At least one image.
    plan : ViewPlan, default=NO_VIEWS
        Views to make, such as `plan_views` returns.
    how : Augmentation, optional
        How views are made; by default as in the paper.
    cache : FeatureCache, optional
        Where features are read and stored.
    verbose : bool, default=True
        Show a progress bar if it takes more than two seconds.
    pictures : bool, default=False
        Also keep the hash of every image, and a picture of it that views can be made of.

    Returns
    -------
    FeatureTable
        Features, ids and labels of the images, and features of the views.
    """
    count = len(images) + len(plan.view_of)  # the images, then the views
    kept = _Kept() if pictures else None
    flow = _Flow(backbone, _loaders(images), plan, how or Augmentation(), cache, kept=kept)
    with flow, progress_bar("backbone", count, show=verbose) as advance:
        features = flow.take(0, count, advance)
    has_views = len(plan.view_of) > 0
    return FeatureTable(
        features[: len(images)],
        images.ids,
        images.labels,
        features[len(images) :] if has_views else None,
        plan.view_of if has_views else None,
        backbone.identity.as_json(),
        None if kept is None else tuple(kept.hashes),
        None if kept is None else tuple(kept.pictures),
    )


def extract_views(
    backbone: Backbone,
    pictures: Sequence[tuple[str, bytes]],
    plan: ViewPlan,
    how: Augmentation,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
) -> Features:
    """Extract features of augmented views alone, from kept pictures: one row per view of the plan.

    Pictures are the hash and the picture of every image, as in a table of `extract_table`.
    """
    loaders = [partial(LoadedImage.known, *each) for each in pictures]
    flow = _Flow(backbone, loaders, plan, how, cache, originals=False)
    with flow, progress_bar("backbone", len(plan.view_of), show=verbose) as advance:
        return flow.take(0, len(plan.view_of), advance)


def iter_features(
    backbone: Backbone,
    images: ImageSet,
    *,
    cache: FeatureCache | None = None,
    verbose: bool = True,
) -> Iterator[Features]:
    """Yield the features of any number of images, `PART` at a time, in constant memory.

    The next images are decoded while the caller processes a part.

    Parameters
    ----------
    backbone : Backbone
        The frozen backbone.
    images : ImageSet
        The images; they may be unlabelled.
    cache : FeatureCache, default=None
        Where features are looked up and stored; None: nowhere.
    verbose : bool, default=True
        Show a progress bar.

    Yields
    ------
    Features
        The features of the next images, in their order.
    """
    flow = _Flow(backbone, _loaders(images), NO_VIEWS, Augmentation(), cache)
    with flow, progress_bar("backbone", len(images), show=verbose) as advance:
        for start in range(0, len(images), PART):
            yield flow.take(start, min(PART, len(images) - start), advance)


def read_features(cache: FeatureCache, keys: Sequence[str]) -> Features:
    """Read features that were extracted before, in the order of their keys.

    Raises
    ------
    NotAvailableError
        If the cache lacks one of them.
    """
    rows = _Rows(len(keys))
    complete = True
    for place, key in enumerate(keys):
        parts = cache.get(key)
        if parts is None:
            complete = False  # read on, so that every corrupted entry is found now
        else:
            rows.put(place, parts)
    if not complete:
        raise NotAvailableError(
            f"The feature cache {cache.folder} no longer holds all features of this task: run "
            "the same command again to extract them."
        )
    return rows.features


class LoadedImage:
    """An image whose content has been read: it is hashed and decoded when that is needed."""

    def __init__(self, source: ImageSource) -> None:
        self._name = source.name
        given = source.get()
        self._content: bytes | Image.Image
        if isinstance(given, bytes):
            self._content = given
        elif isinstance(given, str | os.PathLike):
            self._content = read_file(Path(given), source.name)
        elif isinstance(given, Image.Image | np.ndarray):
            self._content = load_image(given, name=source.name)
        else:
            self._content = read_capped(given, source.name)

    @classmethod
    def known(cls, content_hash: str, picture: bytes) -> Self:
        """Return an image of which only the hash and a picture are left."""
        image = cls(ImageSource("picture", given(picture), "a picture in the model file"))
        image.__dict__["hash"] = content_hash
        return image

    @cached_property
    def hash(self) -> str:
        """Hash of the image file, or of the pixels of an image that was given in memory."""
        return content_hash(self._content)

    @cached_property
    def picture(self) -> Image.Image:
        """The decoded image."""
        content = self._content
        return content if isinstance(content, Image.Image) else load_image(content, name=self._name)

    def view(self, number: int, seed: int, size: int, how: Augmentation | None) -> Image.Image:
        """Make an augmented view."""
        return augment(self.picture, size, view_seed(seed, self.hash, number), how)


Loader: TypeAlias = Callable[[], LoadedImage]


def _loaders(images: ImageSet) -> list[Loader]:
    return [partial(LoadedImage, source) for source in images.sources]


class _Kept:
    """What is left of images after they have passed: hashes and small pictures."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.pictures: list[bytes] = []


class _Flow:
    """Images on their way through decoder, cache and backbone.

    With `originals`, the images themselves pass, not only their views.
    """

    def __init__(
        self,
        backbone: Backbone,
        loaders: Sequence[Loader],
        plan: ViewPlan,
        how: Augmentation,
        cache: FeatureCache | None,
        *,
        originals: bool = True,
        kept: _Kept | None = None,
    ) -> None:
        if not len(loaders):
            raise InputError("There are no images: give at least one.")
        self._backbone, self._writer = backbone, _Writer(cache)
        items = _items(loaders, plan, how, backbone, cache, originals, kept)
        self._items = prefetch(items, AHEAD)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._items.close()
        finally:
            self._writer.__exit__(kind)

    def take(self, start: int, count: int, advance: Callable[[int], object]) -> Features:
        """Return features of the next items, which belong to the rows from `start`."""
        rows = _Rows(count)
        batch: list[_Missing] = []

        def compute() -> None:
            """Pass the batch through the backbone."""
            tensors = extract_pictures(self._backbone, [item.picture for item in batch]).tensors
            computed: dict[str, Parts] = {}
            for i, item in enumerate(batch):
                parts = {name: tensor[i] for name, tensor in tensors.items()}
                # Store the copy: the backbone may reuse the memory of its output.
                stored = rows.put(item.place - start, parts)
                if item.kept is not None:
                    stored = {**stored, PICTURE: np.frombuffer(item.kept, np.uint8)}
                computed[item.key] = stored
            self._writer.put(computed)
            advance(len(batch))
            batch.clear()

        for item in islice(self._items, count):
            if isinstance(item, _Found):
                rows.put(item.place - start, item.parts)
                advance(1)
            else:
                batch.append(item)
            if len(batch) == BATCH:
                compute()
        if batch:
            compute()
        return rows.features


@dataclass(frozen=True)
class _Found:
    """Features that were in the cache, and their row in the result."""

    place: int
    parts: Parts


@dataclass(frozen=True)
class _Missing:
    """A picture to pass through the backbone, its row in the result, its key in the cache."""

    place: int
    key: str
    picture: Image.Image
    kept: bytes | None = None  # the picture to store with the features


def _items(
    loaders: Sequence[Loader],
    plan: ViewPlan,
    how: Augmentation,
    backbone: Backbone,
    cache: FeatureCache | None,
    originals: bool,
    kept: _Kept | None,
) -> Iterator[_Found | _Missing]:
    """Yield each image, followed by its views, so that no decoded image is kept."""
    size = backbone.preset.preprocessing.size
    keys = CacheKeys(backbone, how)
    views_of: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # place and number
    first = len(loaders) if originals else 0  # row of the first view
    for i, (row, number) in enumerate(zip(plan.view_of, plan.numbers, strict=True)):
        views_of[int(row)].append((first + i, int(number)))
    for row, load in enumerate(loaders):
        image = load()
        itself: list[tuple[int, int | None]] = [(row, None)] if originals else []
        wanted = [*itself, *views_of[row]]
        for place, number in wanted:
            key = ""
            if cache is not None:
                seed = None if number is None else view_seed(plan.seed, image.hash, number)
                key = keys.key(image.hash, seed)
                if (parts := cache.get(key)) is not None:
                    if number is None and kept is not None:
                        if PICTURE not in parts:
                            encoded = np.frombuffer(encode_square(image.picture, size), np.uint8)
                            parts = {**parts, PICTURE: encoded}
                            cache.put(key, parts)
                        kept.hashes.append(image.hash)
                        kept.pictures.append(parts[PICTURE].tobytes())
                    yield _Found(place, parts)
                    continue
            if number is not None:
                yield _Missing(place, key, image.view(number, plan.seed, size, how))
            elif kept is None:
                yield _Missing(place, key, image.picture)
            else:
                kept.hashes.append(image.hash)
                kept.pictures.append(encode_square(image.picture, size))
                yield _Missing(place, key, image.picture, kept.pictures[-1])


class _Rows:
    """Features of images that arrive in any order.

    They are copied into one array per part. Memory is then laid out the same way, and training
    rounds the same way, whether features come from a backbone or from the cache.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._arrays: dict[str, NDArray[np.floating]] = {}
        self._layout: dict[str, tuple[tuple[int, ...], np.dtype[np.floating]]] = {}

    def put(self, place: int, parts: Parts) -> Parts:
        """Copy the features of an image to their row and return the copy."""
        parts = {name: part for name, part in parts.items() if name != PICTURE}
        if not self._arrays:
            self._layout = {name: (part.shape, part.dtype) for name, part in parts.items()}
            self._arrays = {
                name: np.empty((self.count, *shape), dtype)
                for name, (shape, dtype) in self._layout.items()
            }
        if {name: (part.shape, part.dtype) for name, part in parts.items()} != self._layout:
            raise InputError(
                "The backbone extracts features of different shapes from different images, or "
                "extracted other ones under the same identity before; in the latter case, run "
                "`miv cache clear`."
            )
        for name, part in parts.items():
            self._arrays[name][place] = part
        return {name: array[place] for name, array in self._arrays.items()}

    @property
    def features(self) -> Features:
        """All rows."""
        return Features.from_tensors(self._arrays)


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T]:
    """Yield the items of an iterable, while another thread prepares up to `depth` in advance.

    The order is kept, and an exception appears where it would without the thread. When the
    consumer stops (also by Ctrl-C), only the item in progress is finished.

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
            yield item  # type: ignore[misc]  # it is not `end`
    finally:
        pool.shutdown(cancel_futures=True)


class _Writer:
    """Writes batches of entries to a cache (None: discards them) while the backbone continues."""

    def __init__(self, cache: FeatureCache | None) -> None:
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._last: Future[None] | None = None

    def put(self, entries: Mapping[str, Parts]) -> None:
        """Store entries by key, after those of the last call, so that they cannot pile up.

        The arrays must not change until then.
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
