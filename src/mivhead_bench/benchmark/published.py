"""The figures that the paper prints, for comparison with ours.

Only the names of backbone, protocol, method and data set correspond: the paper's tasks and images
are different, and often more. The column "NCC" of its DINO ViT-small is omitted because it does not
say which of two backbones it belongs to. Seconds were measured on an A100 GPU. GFLOPs are those of
the authors' code, whose head does more work than ours (see `docs/howto/reports.md`).

Results that the paper quotes from the literature have the protocol `literature`, and methods and
backbones as it names them: those backbones were trained specially, each in its own way.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mivhead_bench.datasets.catalogue import find_declared

# With two blocks, the head of ResNet-50 is the complete one.
_COMPLETE_HEAD = ("resnet50", "miv-blocks2")


@dataclass(frozen=True)
class Published:
    """One entry of the paper's tables; None where the paper prints no value."""

    accuracy: float  # in percent
    half_width: float | None
    gflops: float | None  # of adaptation
    train_seconds: float | None  # per task
    infer_seconds: float | None

    @property
    def total_seconds(self) -> float | None:
        """The sum of both; None unless both are printed."""
        if self.train_seconds is None or self.infer_seconds is None:
            return None
        return self.train_seconds + self.infer_seconds


def published(backbone: str, protocol: str, method: str, name: str) -> Published | None:
    """Find the figures that the paper prints; None if it has no such entry.

    The paper's head is `miv-paper` here, and `miv` in runs that give it the paper's recipe. `name`
    may be any name of the data set.

    >>> published("resnet50", "varying", "miv", "fgvc_aircraft").accuracy
    84.4
    >>> published("resnet50", "varying", "miv", "my_own_photos") is None
    True
    """
    info = find_declared(name)
    if info is None:
        return None
    backbone, method = _column(backbone, method)
    return _all().get((backbone, protocol, method, info.name))


def published_average(
    backbone: str, protocol: str, method: str, benchmark: str
) -> Published | None:
    """Find the average over MD or MD+ that the paper prints.

    >>> published_average("resnet50", "varying", "miv", "MD").accuracy
    78.3
    """
    return _averages().get((*_column(backbone, method), protocol, benchmark))


def _column(backbone: str, method: str) -> tuple[str, str]:
    """Return backbone and method as the paper's tables have them."""
    if "@" in method:  # a column across backbones
        method, _, backbone = method.partition("@")
    if method == "miv-paper" or (backbone, method) == _COMPLETE_HEAD:
        method = "miv"
    return backbone, method


LITERATURE = "literature"  # instead of a protocol


def literature() -> dict[tuple[str, str], dict[str, Published]]:
    """Return the results that the paper quotes: by method and backbone, then by data set.

    >>> list(literature())[:3]
    [('TSA', 'ResNet-34'), ('eTT', 'ViT-small/16'), ('CTX', 'ResNet-34')]
    """
    quoted: dict[tuple[str, str], dict[str, Published]] = {}
    for (backbone, protocol, method, name), printed in _all().items():
        if protocol == LITERATURE:
            quoted.setdefault((method, backbone), {})[name] = printed
    return quoted


@cache
def _all() -> Mapping[tuple[str, ...], Published]:
    return _load("published.csv", "backbone", "protocol", "method", "set")


@cache
def _averages() -> Mapping[tuple[str, ...], Published]:
    return _load("published_averages.csv", "backbone", "method", "protocol", "benchmark")


def _load(name: str, *keys: str) -> dict[tuple[str, ...], Published]:
    """Read a table of this folder; where it has no such column, a figure is None."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def figure(row: Mapping[str, str], column: str) -> float | None:
        return float(row[column]) if row.get(column) else None

    figures = ("half_width", "gflops", "train_seconds", "infer_seconds")
    return {
        tuple(row[key] for key in keys): Published(
            float(row["accuracy"]), *(figure(row, column) for column in figures)
        )
        for row in rows
    }
