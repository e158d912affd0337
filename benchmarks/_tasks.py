"""Seeded few-shot tasks from a folder of image sets, and their features, extracted once a set.

A task is 10-way (or all classes, if fewer) 5-shot with up to 10 queries a class. Task number k of a
set depends on the seed and k only: every method, today and tomorrow, sees the same tasks. Any
classes may meet in a task, for Omniglot too (the paper draws one alphabet a task).

Views come from a bank: an image that serves as a shot in several tasks has the same three augmented
views in all of them, so that it passes the backbone four times a set and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from _backbones import Subject
from mivhead import BlockPreset, Features, Preset
from mivhead.backbones.base import extract_all
from mivhead.extraction.pipeline import prefetch
from mivhead.images.augmentation import augment, plan_views, view_seed, views_per_image
from mivhead.images.imageset import ImageSet
from mivhead.images.sources import open_labelled

WAYS, SHOTS, QUERIES, THRESHOLD = 10, 5, 10, 15
VIEWS = views_per_image(SHOTS, THRESHOLD, "ceil")

TUNING = (
    "cub200_birds",
    "gtsrb_traffic_signs",
    "cifar10",
    "omniglot",
    "fgvc_aircraft",
    "dtd_textures10",
    "eurosat",
    "plantvillage_cropdisease",
)
CONFIRMATION = (
    "quickdraw345",
    "vgg_flower102",
    "mnist",
    "isic_skin_lesions",
    "chestx_nih",
    "food101_small",
    "mushrooms7",
    "mscoco_crops",
)

Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Task:
    """One few-shot task, as rows of its image set."""

    number: int
    support: Rows
    queries: Rows


def open_set(data: Path, name: str) -> ImageSet:
    """Open a set of the data folder: a folder of class folders or a zip of one."""
    folder = data / name
    return open_labelled(folder if folder.is_dir() else folder.with_name(f"{name}.zip"))


def sample_task(labels: Sequence[str], number: int, seed: int) -> Task:
    """Draw task `number`: classes, then a shuffle of each class, first its shots, then queries."""
    rng = np.random.default_rng((seed, number))
    names = np.asarray(labels)
    classes, counts = np.unique(names, return_counts=True)
    eligible = classes[counts > SHOTS]
    support, queries = [], []
    for name in rng.permutation(eligible)[:WAYS]:
        rows = rng.permutation(np.flatnonzero(names == name))
        support.append(rows[:SHOTS])
        queries.append(rows[SHOTS : SHOTS + QUERIES])
    return Task(number, np.concatenate(support), np.concatenate(queries))


@dataclass(frozen=True, eq=False)
class Bank:
    """Features of all images and views that a set's tasks need."""

    taps: tuple[str, ...]
    features: Features
    images: dict[int, int]  # row of the image set to row of the features
    views: dict[int, list[int]]  # row of the image set to the rows of its views
    labels: np.ndarray[Any, np.dtype[np.str_]]  # of the image set

    def of_images(self, rows: Rows, taps: Sequence[str]) -> Features:
        """Features of images."""
        return self._take([self.images[row] for row in rows.tolist()], taps)

    def of_views(self, rows: Rows, taps: Sequence[str]) -> tuple[Features, Rows]:
        """Features of the views of these images, and which image each was made from."""
        places = [place for row in rows.tolist() for place in self.views[row]]
        return self._take(places, taps), np.repeat(np.arange(len(rows)), VIEWS)

    def _take(self, places: Sequence[int], taps: Sequence[str]) -> Features:
        blocks = (self.features.blocks[self.taps.index(tap)] for tap in taps)
        return Features([block.apply(lambda t: t[list(places)]) for block in blocks])


def build_bank(
    subject: Subject,
    images: ImageSet,
    tasks: Sequence[Task],
    taps: Sequence[str],
    *,
    views: bool,
    seed: int,
) -> Bank:
    """Pass every needed image, and the views of every shot if wanted, through the backbone once."""
    support = sorted({row for task in tasks for row in task.support.tolist()})
    rows = sorted({*support, *(row for task in tasks for row in task.queries.tolist())})
    # An image taken as a class of its own gets as many views as the threshold says.
    view_of, numbers, _ = plan_views(range(len(images)), VIEWS if views else 0, "ceil")
    plan = [(row, n) for row, n in zip(view_of.tolist(), numbers.tolist(), strict=True)]
    plan = [(row, n) for row, n in plan if row in set(support)]
    preset = Preset(
        taps=tuple(tap for tap in subject.shapes if tap in taps),
        blocks=(BlockPreset(),) * len(set(taps)),
        preprocessing=subject.preprocessing,
    )

    def pictures() -> Iterator[Image.Image]:
        for row in rows:
            yield images.load(row)
        for row, number in plan:
            own_seed = view_seed(seed, images.ids[row], number)
            yield augment(images.load(row), preset.preprocessing.size, own_seed)

    features = extract_all(subject.load(preset), prefetch(pictures(), depth=8))
    places: dict[int, list[int]] = {}
    for place, (row, _) in enumerate(plan, start=len(rows)):
        places.setdefault(row, []).append(place)
    return Bank(
        preset.taps,
        features,
        {row: place for place, row in enumerate(rows)},
        places,
        np.asarray(images.labels),
    )
