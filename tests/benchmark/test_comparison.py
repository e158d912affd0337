"""Which tasks and sets count, and what averages are made of."""

from __future__ import annotations

import pytest

from mivhead.benchmark.compare import BENCHMARKS, Comparison, compare
from mivhead.errors import InputError
from tests.helpers.synthetic import cell, random_run, result


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
    assert comparison.sets[:2] == ("omniglot", "cu_birds")  # the paper's order
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
