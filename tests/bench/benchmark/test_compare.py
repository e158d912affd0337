"""Statistics by hand, which tasks and sets count, and paired comparisons of two methods."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mivhead.errors import InputError
from mivhead_bench.benchmark.compare import (
    BENCHMARKS,
    Comparison,
    Emphasis,
    MethodResults,
    average_ranks,
    calibration_error,
    choose,
    compare,
    holm,
    pair,
    paired_test,
    summarise,
)
from tests.helpers.synthetic import cell, random_run, result

ACCURACIES = st.lists(st.integers(0, 40).map(lambda k: k / 40), min_size=3, max_size=60)


def test_interval_by_hand():
    summary = summarise([0.5, 0.7], "normal")  # std with ddof 0 is 0.1
    assert summary.mean == pytest.approx(0.6)
    assert summary.half_width == pytest.approx(1.96 * 0.1 / math.sqrt(2))
    assert summary.n == 2


def test_interval_of_a_small_sample_is_students():
    values = [0.9, 0.8, 0.85]
    low, high = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    summary = summarise(values)
    assert summary.mean == pytest.approx(0.85)
    assert summary.half_width == pytest.approx((high - low) / 2)
    assert summary.half_width > summarise(values, "normal").half_width


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
def test_p_values_equal_their_definitions(first, seed):
    second = np.random.default_rng(seed).integers(0, 41, len(first)) / 40
    differences = np.round(np.asarray(first) - second, 12)
    assume(np.ptp(differences) > 0)
    paired = paired_test(first, second)
    n, variance = len(differences), sum((d - np.mean(differences)) ** 2 for d in differences)
    t = np.mean(differences) / math.sqrt(variance / (n - 1) / n)
    assert paired.p == pytest.approx(2 * scipy.special.stdtr(n - 1, -abs(t)), rel=1e-6)
    assert paired.p_wilcoxon == pytest.approx(scipy.stats.wilcoxon(differences).pvalue)
    swapped = paired_test(second, first)
    assert swapped.p == pytest.approx(paired.p)
    assert swapped.difference.mean == pytest.approx(-paired.difference.mean)


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


# All methods of a run.


def only(results) -> Comparison:
    (comparison,) = compare(results)
    return comparison


def test_one_comparison_per_backbone_and_protocol():
    results = [result(), result(backbone="vit"), result(protocol="5-way 1-shot"), result(task=1)]
    found = [(c.backbone, c.protocol) for c in compare(results)]
    assert found == [("resnet50", "varying"), ("vit", "varying"), ("resnet50", "5-way 1-shot")]


def test_no_results_is_an_error():
    with pytest.raises(InputError, match="no results yet"):
        compare([])


def test_other_tasks_are_refused():
    with pytest.raises(InputError, match=r"birds \(varying\).*different tasks"):
        compare([result(), result(method="ncc", tasks="b" * 64)])


def test_means_are_over_tasks_that_all_have_finished():
    results = cell("birds", "miv", [0.9, 0.7, 0.2]) + cell("birds", "ncc", [0.5, 0.7])
    comparison = only(results)
    assert comparison.cell("birds", "miv").summary.mean == pytest.approx(0.8)
    assert comparison.tasks("birds") == 2


def test_a_task_that_failed_is_left_out_for_everybody():
    results = cell("birds", "miv", [0.9, None, 0.5], error="numerical: NaN") + cell(
        "birds", "ncc", [0.5, 0.1, 0.7]
    )
    comparison = only(results)
    assert comparison.cell("birds", "ncc").accuracies == [0.5, 0.7]
    assert comparison.complete == ("birds",)
    assert [r.task for r in comparison.errors] == [1]


def test_a_set_without_memory_is_left_out_of_all_averages():
    # one task out of three ran out of memory: the rest would be the small ones, so none count
    results = (
        cell("birds", "miv", [0.9, 0.9])
        + cell("birds", "tsa", [0.7, 0.7])
        + cell("quickdraw", "miv", [0.1, 0.1])
        + cell("quickdraw", "tsa", [0.9, None])
        + cell("dtd", "miv", [0.5, 0.7])
        + cell("dtd", "tsa", [0.5, 0.5])
    )
    comparison = only(results)
    assert comparison.cell("quickdraw", "tsa").state == "OOM"
    assert comparison.cell("quickdraw", "miv").summary.mean == pytest.approx(0.1)  # still shown
    md = comparison.averages()[0]
    assert md.title == "MD"
    assert md.sets == ("birds", "dtd")
    assert md.means == pytest.approx({"miv": 0.75, "tsa": 0.6})
    assert md.missing["quickdraw"] == "OOM of tsa"
    assert md.missing["fungi"] == "not run"
    assert len(md.missing) == 7


def test_md_and_md_plus_are_means_of_set_means():
    levels = {"miv": 0.8, "ncc": 0.7}
    results = random_run([*BENCHMARKS["MD+"], "my_own"], levels, tasks=5)
    comparison = only(results)
    md, plus, everything = comparison.averages()
    assert (len(md.sets), len(plus.sets), len(everything.sets)) == (9, 17, 18)
    assert md.missing == plus.missing == {}
    means = [
        sum(r.accuracy for r in results if r.set == name and r.method == "miv") / 5
        for name in BENCHMARKS["MD"]
    ]
    assert md.means["miv"] == pytest.approx(sum(means) / 9)
    assert comparison.sets[:2] == ("omniglot", "aircraft")  # the order of the paper's tables
    assert comparison.ranks()["miv"] < comparison.ranks()["ncc"]


def test_sets_have_the_papers_nine_and_seventeen():
    assert len(BENCHMARKS["MD"]) == 9
    assert len(BENCHMARKS["MD+"]) == 17


def test_best_only_if_significant():
    clear = random_run(["birds"], {"miv": 0.9, "ncc": 0.7})
    assert only(clear).best(["birds"]) == "miv"
    even = random_run(["birds"], {"miv": 0.8, "ncc": 0.8})
    assert only(even).best(["birds"]) is None
    assert only(cell("birds", "miv", [0.9, 0.8])).best(["birds"]) is None


def test_best_of_three_must_beat_the_second():
    results = random_run(["birds"], {"ncc": 0.5, "miv": 0.8, "tsa": 0.8})
    assert only(results).best(["birds"]) is None


def test_methods_with_no_common_task_show_nothing():
    results = [result(task=0), result(method="ncc", task=1)]
    comparison = only(results)
    assert comparison.cell("birds", "miv").state == "missing"
    assert comparison.complete == ()
    assert comparison.averages() == []


def test_unknown_names_are_errors():
    with pytest.raises(InputError, match="Did you mean 'birds'"):
        only([result()]).cell("bird", "miv")


# Two methods.


def test_rows_are_paired_tests_of_common_tasks():
    results = cell("birds", "miv", [0.9, 0.8, 0.7, None]) + cell("birds", "ncc", [0.5, 0.7, 0.7])
    (row,) = pair(choose(results, "miv", "run"), choose(results, "ncc", "run"))
    expected = paired_test([0.9, 0.8, 0.7], [0.5, 0.7, 0.7])
    assert row.paired == expected
    assert (row.set, row.holm) == ("birds", expected.p)


def test_pairs_of_other_tasks_are_refused():
    first = cell("birds", "miv", [0.9, 0.8])
    second = [replace(r, tasks="b" * 64) for r in first]
    with pytest.raises(InputError, match="different tasks"):
        pair(MethodResults("a", tuple(first)), MethodResults("b", tuple(second)))


def test_backbones_can_be_compared():
    first = cell("birds", "miv", [0.9, 0.8], backbone="small")
    second = cell("birds", "miv", [0.7, 0.7], backbone="large")
    (row,) = pair(MethodResults("a", tuple(first)), MethodResults("b", tuple(second)))
    assert row.backbone == "large / small"
    assert row.paired.difference.mean == pytest.approx(0.15)


def test_nothing_in_common():
    first, second = cell("birds", "miv", [0.9]), cell("signs", "miv", [0.9])
    with pytest.raises(InputError, match="no finished task in common"):
        pair(MethodResults("a", tuple(first)), MethodResults("b", tuple(second)))


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


def test_a_method_on_one_of_several_backbones():
    small = random_run(["birds"], {"miv": 0.8, "ett": 0.7})
    large = [replace(r, backbone="large") for r in random_run(["birds"], {"miv": 0.9}, seed=1)]
    results = small + large
    (row,) = pair(choose(results, "miv@large", "run"), choose(results, "ett@resnet50", "run"))
    assert row.backbone == "large / resnet50"
    assert row.paired.difference.mean > 0
    with pytest.raises(InputError, match="backbone of ett in run must be one of resnet50"):
        choose(results, "ett@large", "run")


# What the paper's tables emphasise.


def columns(**levels: float) -> list:
    """Results of columns on 40 tasks of one set; a level of 0.7 differs from 0.6, not from 0.7."""
    noise = np.random.default_rng(0).normal(0, 0.05, (len(levels), 40))
    return [
        r
        for (name, level), each in zip(levels.items(), noise, strict=True)
        for r in cell("birds", name.replace("_at_", "@"), (level + each).tolist())
    ]


def emphasis(rival: str, bold: str = "test", **levels: float) -> Emphasis:
    return Comparison("a", "varying", columns(**levels), rival, bold=bold).emphasis(["birds"])


def test_bold_compares_ours_with_the_rival_only():
    """Nearest centroids are not part of the paper's test."""
    found = emphasis("tsa@r", ncc_at_r=0.9, tsa_at_r=0.5, miv_at_r=0.7)
    assert found == Emphasis(frozenset({"miv@r"}))
    assert emphasis("tsa@r", ncc_at_r=0.9, tsa_at_r=0.7, miv_at_r=0.5) == Emphasis(
        frozenset({"tsa@r"})
    )
    assert emphasis("tsa@r", ncc_at_r=0.1, tsa_at_r=0.7, miv_at_r=0.7) == Emphasis()


@pytest.mark.parametrize(
    ("levels", "bold", "underlined"),
    [  # eTT, ours with patches of 8, ours with patches of 16, as in rows of the main table
        ((0.7, 0.8, 0.6), {"miv@8"}, {"ett@16"}),  # Aircraft
        ((0.7, 0.7, 0.6), set(), {"ett@16"}),  # VGG Flower
        ((0.7, 0.6, 0.6), {"ett@16"}, set()),  # Traffic Sign
        ((0.7, 0.8, 0.8), {"miv@8", "miv@16"}, set()),  # EuroSAT
        ((0.7, 0.8, 0.7), {"miv@8"}, set()),  # Omniglot
    ],
)
def test_underlined_rivals_are_between_our_two_columns(levels, bold, underlined):
    names = ("ett_at_16", "miv_at_8", "miv_at_16")
    found = emphasis("ett@16", **dict(zip(names, levels, strict=True)))
    assert found == Emphasis(frozenset(bold), frozenset(underlined))


def test_some_tables_of_the_paper_print_the_highest_in_bold():
    results = [
        r
        for m, a in (("ett@16", 0.65), ("miv@8", 0.6409), ("miv@16", 0.62))
        for r in cell("birds", m, [a, a]) + cell("signs", m, [a, a])
    ]
    found = Comparison("a", "varying", results, "ett@16", bold="highest")
    assert found.emphasis(["birds"]).bold == {"ett@16"}
    assert found.emphasis(["birds"]).underlined == frozenset()
    lower = [r for r in results if r.method != "ett@16"] + cell("birds", "ett@16", [0.63, 0.63])
    lower += cell("signs", "ett@16", [0.63, 0.63])
    averages = Comparison("a", "varying", lower, "ett@16", bold="highest").averages()
    assert averages[-1].emphasis == Emphasis(frozenset({"miv@8"}), frozenset({"ett@16"}))


def test_ablations_average_the_sets_of_md_only():
    results = cell("birds", "miv", [0.5]) + cell("mnist", "miv", [0.9])
    (comparison,) = compare(results)
    assert comparison.complete == ("birds", "mnist")
    assert comparison.averaged == ("birds",)
    assert compare(cell("mnist", "miv", [0.9]))[0].averaged == ("mnist",)


def test_the_rule_for_intervals_is_the_reports():
    accuracies = [0.5, 0.7, 0.9]
    for interval in ("student", "normal"):
        (comparison,) = compare(cell("birds", "miv", accuracies), interval)
        assert comparison.cell("birds", "miv").summary == summarise(accuracies, interval)
