"""The figures that the paper prints, to be shown beside ours.

They correspond only in the names of backbone, protocol, method and data set: the paper's tasks and
images are others, often many more. Left out is the column "NCC" of its DINO ViT-small, which does
not say which of two backbones it belongs to. Seconds were measured on an A100 GPU. GFLOPs are
those of the authors' code, whose head does more work than ours: `docs/howto/reports.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mivhead.datasets.catalogue import find_declared

FILE = Path(__file__).with_name("published.csv")

FULL = ("resnet50", "miv-blocks2")  # with two blocks, ResNet-50's head is the full one


@dataclass(frozen=True)
class Published:
    """One printed cell; what is not printed is None.

    Parameters
    ----------
    accuracy, half_width
        In percent.
    gflops
        Of adaptation.
    train_seconds, infer_seconds
        Of a task.
    """

    accuracy: float
    half_width: float | None
    gflops: float | None
    train_seconds: float | None
    infer_seconds: float | None


def published(backbone: str, protocol: str, method: str, name: str) -> Published | None:
    """Find what the paper prints; `name` is any name of the data set.

    The paper's head is `miv-paper` here, and `miv` where a run gives it the paper's recipe.

    >>> published("resnet50", "varying", "miv", "fgvc_aircraft").accuracy
    84.4
    >>> published("resnet50", "varying", "miv", "my_own_photos") is None
    True
    """
    info = find_declared(name)
    if info is None:
        return None
    if method == "miv-paper" or (backbone, method) == FULL:
        method = "miv"
    return _all().get((backbone, protocol, method, info.name))


@cache
def _all() -> Mapping[tuple[str, str, str, str], Published]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return {
            (row["backbone"], row["protocol"], row["method"], row["set"]): Published(
                float(row["accuracy"]),
                *(
                    float(row[key]) if row[key] else None
                    for key in ("half_width", "gflops", "train_seconds", "infer_seconds")
                ),
            )
            for row in csv.DictReader(file)
        }
