"""The stored figures against the averages that the paper prints in its own tables."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from mivhead.backbones import list_backbones
from mivhead_bench.benchmark.published import (
    LITERATURE,
    _all,
    _averages,
    literature,
    published,
    published_average,
)
from mivhead_bench.datasets.catalogue import BENCHMARKS

AVERAGES = [  # backbone, protocol, method, MD, MD+: the paper's rows "Average"
    ("resnet50", "varying", "ncc", 62.7, 63.5),
    ("resnet50", "varying", "tsa", 74.6, 73.1),
    ("resnet50", "varying", "miv", 78.3, 75.3),
    ("deit_small", "varying", "ett", 75.8, 74.1),
    ("deit_small", "varying", "miv", 76.8, 74.9),
    ("dino_resnet50", "varying", "tsa", 75.4, 73.8),
    ("dino_resnet50", "varying", "miv", 77.6, 74.6),
    ("dino_vits16", "varying", "ett", 80.3, 78.0),
    ("dino_vits8", "varying", "miv", 80.4, 77.8),
    ("dino_vits16", "varying", "miv", 79.1, 76.4),
    ("resnet50", "varying", "fit-lda", 63.6, 63.8),
    ("dino_vits8", "varying", "baseline++", 75.7, 74.3),
    ("sdl_resnet18", "varying", "tsa", 69.9, 68.2),
    ("resnet18", "varying", "miv", 69.4, 67.7),
    ("resnet50", "5-way 1-shot", "tsa", 58.5, 57.2),
    ("resnet50", "5-way 1-shot", "miv", 60.6, 58.9),
    ("dino_vits8", "5-way 1-shot", "miv", 64.1, 62.6),
    ("clip_vitl14", "varying", "miv", 83.7, None),
    ("densenet161", "varying", "baseline++", 68.8, None),
    ("resnet50", "varying", "miv-mean", 74.7, None),
    ("resnet50", "varying", "miv-gap", 75.1, None),
    ("resnet50", "varying", "miv-d6", 78.1, None),
    ("resnet50", "varying", "miv-blocks1", 73.5, None),
    ("resnet50", "varying", "miv-gap-blocks1-no-views", 69.1, None),
    ("resnet50", "varying", "miv-gap-mean-no-views", 64.7, None),
    ("resnet50", "varying", "miv-no-views", 76.3, None),
    ("dino_vits8", "varying", "miv-no-attention", 80.0, None),
]


def test_averages():
    for backbone, protocol, method, *averages in AVERAGES:
        for title, expected in zip(("MD", "MD+"), averages, strict=True):
            if expected is not None:
                found = [published(backbone, protocol, method, s) for s in BENCHMARKS[title]]
                mean = np.mean([each.accuracy for each in found])
                # each figure is rounded, and so is the average
                assert mean == pytest.approx(expected, abs=0.11), (backbone, protocol, method)


def test_all_printed_values_are_counted():
    """What item 96 of docs/explanation/the-paper.md says."""
    values = list(_all().values())
    assert sum(each.accuracy is not None for each in values) == 901
    assert sum(number is not None for each in values for number in astuple(each)) == 1687


def test_costs():
    gflops = [published("resnet50", "varying", "miv", s).gflops for s in BENCHMARKS["MD"]]
    assert np.mean(gflops) == pytest.approx(32232.3, abs=0.1)
    cell = published("dino_vits16", "varying", "ett", "birds")
    assert (cell.train_seconds, cell.infer_seconds) == (93.9, 1.4)
    assert published("resnet50", "varying", "miv-blocks2", "birds").gflops == 26716.7


def test_other_names_of_the_papers_head():
    for backbone in ("resnet50", "deit_small"):
        head = published(backbone, "varying", "miv", "mscoco")
        assert head is not None
        assert published(backbone, "varying", "miv-paper", "mscoco") == head
    assert published("resnet50", "varying", "miv-blocks2", "mscoco").accuracy == 60.8
    assert published("deit_small", "varying", "miv-blocks2", "mscoco") is None  # it has four


def test_names_are_ours():
    backbones = set(list_backbones())
    assert {key[0] for key in _all() if key[1] != LITERATURE} <= backbones
    assert {key[3] for key in _all()} == set(BENCHMARKS["MD+"])


def test_the_literature():
    averages = {"TSA": 76.2, "eTT": 78.7, "CTX": 75.6, "ALFA": 62.4, "ProtoNet": 61.1, "BOHB": 60.0}
    found = {method: each for (method, _), each in literature().items()}
    assert list(found) == list(averages)
    for method, expected in averages.items():
        assert set(found[method]) == set(BENCHMARKS["MD"])
        mean = np.mean([each.accuracy for each in found[method].values()])
        assert mean == pytest.approx(expected, abs=0.11)
    assert published("resnet34", "varying", "tsa", "omniglot") is None  # another backbone


def test_every_printed_average_is_that_of_the_printed_values():
    """Each value is rounded, and so is the average."""
    assert len(_averages()) == 96
    for (backbone, method, protocol, title), average in _averages().items():
        values = [published(backbone, protocol, method, name) for name in BENCHMARKS[title]]
        assert all(values), (backbone, method, title)
        mean = np.mean([each.accuracy for each in values])
        assert mean == pytest.approx(average.accuracy, abs=0.11), (backbone, method, title)
        if average.gflops is not None:
            assert np.mean([v.gflops for v in values]) == pytest.approx(average.gflops, abs=0.1)
    assert published_average("resnet50", "varying", "miv-blocks2", "MD").gflops == 32232.3
    assert published_average("mine", "varying", "miv", "MD") is None
