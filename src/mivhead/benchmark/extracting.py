"""Filling a bank: what is missing is cut into jobs, each of which writes one segment."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from PIL import Image

from mivhead.backbones.base import Backbone, extract_all
from mivhead.backbones.preprocessing import DecodedImage
from mivhead.benchmark.bank import Bank, write_segment
from mivhead.benchmark.plan import Picture, PictureKeys, view_seed
from mivhead.benchmark.source import Source
from mivhead.errors import NotAvailableError
from mivhead.features import Features
from mivhead.images.augmentation import augment

SEGMENT = 512  # pictures; what a kill loses


@dataclass(frozen=True)
class ExtractJob:
    """Passes pictures through the backbone and writes them as a segment; returns their number."""

    source: Source
    bank: Path
    pictures: tuple[Picture, ...]  # the views of an image follow each other
    keys: tuple[str, ...]
    seed: int

    def __call__(self) -> int:
        """Do it."""
        backbone = _Timed(self.source.open_backbone())
        backbone.warm_up()
        features = extract_all(backbone, self._load(backbone.preset.preprocessing.size))
        write_segment(self.bank, self.keys, features, backbone.seconds)
        return len(self.pictures)

    def _load(self, size: int) -> Iterator[Image.Image]:
        images = self.source.open_images()
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        for id_, pictures in groupby(self.pictures, lambda picture: picture.id):
            image = images.load(rows[id_])
            for _, view in pictures:
                if view is None:
                    yield image
                else:
                    yield augment(image, size, view_seed(self.seed, id_, view))


class _Timed:
    """A backbone that notes the seconds it takes per image.

    Those of the fastest batch: what others do on the machine at the same time does not count.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self.identity = backbone.identity
        self.preset = backbone.preset
        self.seconds = math.inf

    def warm_up(self) -> None:
        """Load what is loaded with the first image."""
        grey_features(self._backbone)

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Features of one batch."""
        start = time.perf_counter()
        features = self._backbone.extract(images)
        self.seconds = min(self.seconds, (time.perf_counter() - start) / len(images))
        return features


def grey_features(backbone: Backbone) -> Features:
    """Features of one plain image: they tell the layout and the size of all others."""
    size = backbone.preset.preprocessing.size
    return backbone.extract([Image.new("RGB", (size, size), "grey")])


@dataclass(frozen=True)
class Missing:
    """What a bank lacks."""

    jobs: tuple[ExtractJob, ...]
    images: int
    views: int
    nbytes: int

    def check_space(self, bank: Bank, limit: int | None) -> None:
        """Raise an error if the bank would outgrow its limit or the disk."""
        total = bank.nbytes + self.nbytes
        ways = "use fewer --views, --drop-bank, or another folder with --bank"
        if limit is not None and total > limit:
            raise NotAvailableError(
                f"The bank {bank.folder} would take {total / 1e9:.3f} GB, its limit is "
                f"{limit / 1e9:.3f} GB: raise it with --bank-gb, or {ways}."
            )
        bank.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(bank.folder).free
        if self.nbytes > free:
            raise NotAvailableError(
                f"The bank {bank.folder} needs {self.nbytes / 1e9:.3f} GB more, the disk has "
                f"{free / 1e9:.3f} GB left: {ways}."
            )


def find_missing(
    source: Source, bank: Bank, pictures: Sequence[Picture], keys: PictureKeys, seed: int
) -> Missing:
    """Cut the pictures that a bank lacks into jobs."""
    lacking = [picture for picture in pictures if keys.key(picture) not in bank]
    views = sum(picture.view is not None for picture in lacking)
    chunks = [tuple(lacking[i : i + SEGMENT]) for i in range(0, len(lacking), SEGMENT)]
    jobs = tuple(
        ExtractJob(source, bank.folder, chunk, tuple(map(keys.key, chunk)), seed)
        for chunk in chunks
    )
    each = grey_features(source.open_backbone()).nbytes if lacking else 0
    return Missing(jobs, len(lacking) - views, views, each * len(lacking))
