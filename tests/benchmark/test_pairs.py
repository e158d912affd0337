"""Two methods, or two runs, on the same tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mivhead.benchmark.compare import Side, choose, pair, paired_test
from mivhead.errors import InputError
from tests.helpers.synthetic import cell, random_run


def test_rows_are_paired_tests_of_common_tasks():
    results = cell("birds", "miv", [0.9, 0.8, 0.7, None]) + cell("birds", "ncc", [0.5, 0.7, 0.7])
    (row,) = pair(choose(results, "miv", "run"), choose(results, "ncc", "run"))
    expected = paired_test([0.9, 0.8, 0.7], [0.5, 0.7, 0.7])
    assert row.paired == expected
    assert (row.set, row.holm) == ("birds", expected.p)


def test_other_tasks_are_refused():
    first = cell("birds", "miv", [0.9, 0.8])
    second = [replace(r, tasks="b" * 64) for r in first]
    with pytest.raises(InputError, match="different tasks"):
        pair(Side("a", tuple(first)), Side("b", tuple(second)))


def test_backbones_can_be_compared():
    first = cell("birds", "miv", [0.9, 0.8], backbone="small")
    second = cell("birds", "miv", [0.7, 0.7], backbone="large")
    (row,) = pair(Side("a", tuple(first)), Side("b", tuple(second)))
    assert row.backbone == "large / small"
    assert row.paired.difference.mean == pytest.approx(0.15)


def test_nothing_in_common():
    first, second = cell("birds", "miv", [0.9]), cell("signs", "miv", [0.9])
    with pytest.raises(InputError, match="no finished task in common"):
        pair(Side("a", tuple(first)), Side("b", tuple(second)))


def test_holm_over_sets():
    results = random_run(["birds", "signs"], {"miv": 0.8, "ncc": 0.79})
    rows = pair(choose(results, "miv", "run"), choose(results, "ncc", "run"))
    low, high = sorted(rows, key=lambda row: row.paired.p)
    assert low.holm == pytest.approx(min(1, 2 * low.paired.p))
    assert high.holm == pytest.approx(max(low.holm, high.paired.p))


def test_a_method_must_be_named_if_there_are_several():
    results = random_run(["birds"], {"miv": 0.8, "ncc": 0.7}, tasks=2)
    with pytest.raises(InputError, match="run:miv"):
        choose(results, None, "run")
    with pytest.raises(InputError, match="no method 'tsa'; it has miv, ncc"):
        choose(results, "tsa", "run")
    assert choose(results[:2], None, "run").name == "run:miv"
