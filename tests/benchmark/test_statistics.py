"""Statistics against scipy, and against cases computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.benchmark.compare import average_ranks, calibration_error, holm, paired_test, summarise
from mivhead.errors import InputError

ACCURACIES = st.lists(st.integers(0, 40).map(lambda k: k / 40), min_size=3, max_size=60)


def test_interval_by_hand():
    summary = summarise([0.5, 0.7])  # std with ddof 0 is 0.1
    assert summary.mean == pytest.approx(0.6)
    assert summary.half_width == pytest.approx(1.96 * 0.1 / math.sqrt(2))
    assert summary.n == 2


def test_nothing_has_no_mean():
    with pytest.raises(InputError, match="no results"):
        summarise([])


def test_t_test_by_hand():
    # differences 1, 2, 3: mean 2, std 1, t = 2 sqrt(3) with two degrees of freedom, for which the
    # distribution is known: F(t) = 1/2 + t / (2 sqrt(2 + t^2))
    paired = paired_test([2, 3, 4], [1, 1, 1])
    t = 2 * math.sqrt(3)
    assert paired.p == pytest.approx(1 - t / math.sqrt(2 + t**2))
    assert paired.difference.mean == pytest.approx(2)


@settings(deadline=None, max_examples=25)  # the first call imports scipy
@given(ACCURACIES, st.integers(0, 2**32 - 1))
def test_tests_equal_scipy(first, seed):
    second = np.random.default_rng(seed).integers(0, 41, len(first)) / 40
    differences = np.round(np.asarray(first) - second, 12)
    if np.ptp(differences) == 0:
        return
    paired = paired_test(first, second)
    assert paired.p == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue, rel=1e-6)
    assert paired.p_wilcoxon == pytest.approx(scipy.stats.wilcoxon(differences).pvalue)
    turned = paired_test(second, first)
    assert turned.p == pytest.approx(paired.p)
    assert turned.difference.mean == pytest.approx(-paired.difference.mean)


def test_equal_methods_do_not_differ():
    paired = paired_test([0.1 + 0.2, 0.5], [0.3, 0.5])  # 0.1 + 0.2 is not quite 0.3
    assert (paired.p, paired.p_wilcoxon, paired.significant) == (1.0, 1.0, False)


def test_one_task_proves_nothing():
    assert paired_test([0.9], [0.1]).p == 1.0


def test_the_same_difference_everywhere_is_certain():
    assert paired_test([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]).p == 0.0


def test_unequal_tasks_are_refused():
    with pytest.raises(InputError, match="3 and 2"):
        paired_test([1, 2, 3], [1, 2])


def test_holm_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 = 0.02, 0.03, 0.06, 0.04; never falling
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_step_by_step(p_values, level):
    rejected, left = [], len(p_values)
    for p in sorted(p_values):  # Holm's procedure, as he wrote it
        if p * left > level:
            break
        rejected.append(p)
        left -= 1
    corrected = holm(p_values)
    found = sorted(p for p, c in zip(p_values, corrected, strict=True) if c <= level)
    assert found == rejected


def test_ranks_by_hand():
    ranks = average_ranks({"a": [0.9, 0.5, 0.5], "b": [0.8, 0.5, 0.7], "c": [0.7, 0.1, 0.6]})
    assert ranks == pytest.approx({"a": (1 + 1.5 + 3) / 3, "b": (2 + 1.5 + 1) / 3, "c": 8 / 3})


def test_ranks_need_the_same_sets():
    with pytest.raises(InputError, match="same data sets"):
        average_ranks({"a": [0.9], "b": [0.8, 0.7]})


def test_calibration_by_hand():
    # 10 queries at 0.9 of which 7 are right, in two tasks; 10 at 0.5 of which 5 are right
    tasks = [((4, 2.0, 3), (6, 5.4, 4)), ((6, 3.0, 2), (4, 3.6, 3))]
    assert calibration_error(tasks) == pytest.approx((abs(5 - 5.0) + abs(7 - 9.0)) / 20)
    assert math.isnan(calibration_error([()]))
    with pytest.raises(InputError, match="bins"):
        calibration_error([((1, 1, 1),), ((1, 1, 1), (1, 1, 1))])
