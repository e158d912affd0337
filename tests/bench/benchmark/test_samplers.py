"""The samplers against their formulas: derived again in plain loops, and as statistics."""

import hashlib
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mivhead.errors import InputError
from mivhead_bench.benchmark.samplers import LeftOut, Protocol, sample_tasks
from tests.helpers.image_sets import equal, labelled

VARYING = Protocol()
ONE_SHOT = Protocol.parse("5-way 1-shot")


def shots_of(task):
    return Counter(task.support_labels)


def test_the_defaults_are_the_papers():
    tasks = sample_tasks(equal(5, 4), "birds", VARYING, 0)
    assert len(tasks.tasks) == 600
    assert (tasks.set, tasks.protocol, tasks.seed) == ("birds", "varying", 0)


@pytest.mark.parametrize("number", range(5))
def test_varying_tasks_in_plain_loops(number):
    sizes = {f"c{i:02}": 3 + 7 * i for i in range(30)}
    key = json.dumps([4, "birds", "varying", number]).encode()
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()))
    names = sorted(sizes)
    assert rng.integers(1) == 0  # the one group of all classes
    ways = rng.integers(5, 31)
    classes = [names[i] for i in rng.choice(30, ways, replace=False)]
    queries = min(10, min(sizes[c] for c in classes) // 2)
    beta = rng.uniform()
    support_size = 0
    for c in classes:
        support_size += math.floor(beta * min(100, sizes[c] - queries)) + 1
    support_size = min(500, support_size)
    weights = rng.uniform(math.log(0.5), math.log(2), ways)
    total = sum(sizes[c] * math.exp(w) for c, w in zip(classes, weights, strict=True))
    support, asked = [], []
    for c, w in zip(classes, weights, strict=True):
        share = sizes[c] * math.exp(w) / total
        shots = min(math.floor(share * (support_size - ways)) + 1, sizes[c] - queries)
        order = rng.permutation(sizes[c])
        asked += [f"{c}/{i}.png" for i in order[:queries]]
        support += [f"{c}/{i}.png" for i in order[queries : queries + shots]]

    task = sample_tasks(labelled(sizes), "birds", VARYING, seed=4, count=5).tasks[number]
    assert task.classes == tuple(classes)
    assert task.support == tuple(support)
    assert task.queries == tuple(asked)
    assert [task.classes[i] for i in task.support_labels] == [s.split("/")[0] for s in support]
    assert [task.classes[i] for i in task.query_labels] == [q.split("/")[0] for q in asked]


@pytest.mark.parametrize(("classes", "most"), [(9, 9), (60, 50)])
def test_ways_are_uniform(classes, most):
    tasks = sample_tasks(equal(classes, 4), "a", VARYING, 0, 2000).tasks
    counts = Counter(len(task.classes) for task in tasks)
    assert set(counts) == set(range(5, most + 1))
    assert stats.chisquare([counts[ways] for ways in range(5, most + 1)]).pvalue > 0.001


def test_classes_and_images_are_uniform():
    tasks = sample_tasks(equal(8, 6), "a", ONE_SHOT, 0, 2000).tasks
    classes = Counter(name for task in tasks for name in task.classes)
    assert stats.chisquare([*classes.values()]).pvalue > 0.001
    images = Counter(each for task in tasks for each in task.support)
    assert len(images) == 48
    assert stats.chisquare([*images.values()]).pvalue > 0.001


def test_support_sizes_follow_beta():
    """With large classes a class adds floor(100 beta) + 1, which is uniform in 1..100."""
    rng = np.random.default_rng(0)
    sizes = np.full(5, 100_000)
    totals = np.array([VARYING.sample_shots(rng, sizes).sum() for _ in range(4000)])
    # The shares of 5 classes are rounded down: up to 4 images are lost.
    added = np.ceil(totals / 5)
    assert added.min() == 1
    assert added.max() == 100
    assert totals.max() <= 500
    expected = stats.kstest((added - 0.5) / 100, "uniform")
    assert expected.pvalue > 0.001


def test_support_is_capped():
    rng = np.random.default_rng(0)
    sizes = np.full(50, 1000)
    totals = [VARYING.sample_shots(rng, sizes).sum() for _ in range(500)]
    assert 450 < max(totals) <= 500
    assert np.mean(np.array(totals) > 450) == pytest.approx(0.9, abs=0.05)  # beta above 0.1
    small = Protocol(max_support=60)
    assert max(small.sample_shots(rng, sizes).sum() for _ in range(200)) <= 60


def test_shares_follow_sizes_and_weights():
    """Shots are proportional to size * exp(U(log 1/2, log 2)): their log ratio has a triangle."""
    rng = np.random.default_rng(0)
    sizes = np.array([20_000, 10_000, 10_000, 10_000, 10_000])
    drawn = np.array([VARYING.sample_shots(rng, sizes) for _ in range(4000)])
    drawn = drawn[drawn.sum(1) > 400]  # few shots are rounded too roughly
    ratios = np.log(drawn[:, 0] / drawn[:, 1])
    assert ratios.mean() == pytest.approx(math.log(2), abs=0.03)
    # Each weight has variance (2 log 2)^2 / 12, their difference twice that.
    assert ratios.std() == pytest.approx(2 * math.log(2) / math.sqrt(6), rel=0.06)
    assert np.abs(ratios - math.log(2)).max() < 2 * math.log(2) + 0.1


def test_no_class_gives_more_than_it_has_left():
    rng = np.random.default_rng(0)
    sizes = np.array([2, 5, 9, 200, 200])
    for _ in range(200):
        shots = VARYING.sample_shots(rng, sizes)
        assert (shots >= 1).all()
        assert (shots <= sizes - 1).all()  # one query, as the smallest class has two images


@given(
    sizes=st.lists(st.integers(4, 40), min_size=5, max_size=60),
    text=st.sampled_from(
        ["varying", "varying, max_ways 6, max_support 7", "5-way 1-shot", "20-way 3-shot"]
    ),
    seed=st.integers(0, 2**40),
)
@settings(deadline=None, max_examples=40)
def test_every_task_is_sound(sizes, text, seed):
    protocol = Protocol.parse(text)
    members = {f"c{i:02}": size for i, size in enumerate(sizes)}
    tasks = sample_tasks(labelled(members), "any", protocol, seed, 5)
    for task in tasks.tasks:
        own = [members[name] for name in task.classes]
        shots = shots_of(task)
        queries = set(Counter(task.query_labels).values())
        assert len(set(task.classes)) == len(task.classes)
        assert not set(task.support) & set(task.queries)
        assert len({*task.support, *task.queries}) == len(task.support) + len(task.queries)
        assert set(shots) == set(range(len(task.classes)))
        if protocol.shots is None:
            assert 5 <= len(task.classes) <= min(len(sizes), protocol.max_ways)
            assert len(task.support) <= protocol.max_support
            assert queries == {min(10, min(own) // 2)}
        else:
            assert len(task.classes) == min(len(sizes), protocol.ways)
            assert set(shots.values()) == {protocol.shots}
            assert queries == {min(10, min(own) // 2, min(own) - protocol.shots)}


def test_a_task_depends_on_its_number_not_on_the_count():
    images = equal(10, 8)
    assert (
        sample_tasks(images, "a", VARYING, 0, 3).tasks
        == sample_tasks(images, "a", VARYING, 0, 9).tasks[:3]
    )


def test_a_task_depends_on_seed_name_and_protocol():
    images = equal(10, 8)
    first = sample_tasks(images, "a", ONE_SHOT, 0, 3)
    others = [
        sample_tasks(images, "a", ONE_SHOT, 1, 3),
        sample_tasks(images, "b", ONE_SHOT, 0, 3),
        sample_tasks(images, "a", Protocol.parse("5-way 1-shot, max_queries 9"), 0, 3),
    ]
    assert sample_tasks(images, "a", ONE_SHOT, 0, 3).hash == first.hash
    for other in others:
        assert other.tasks[0].support != first.tasks[0].support
        assert other.hash != first.hash


OMNIGLOT = labelled(
    {f"Greek.character{i}": 6 for i in range(7)}
    | {f"Latin.character{i}": 6 for i in range(12)}
    | {f"Tagalog.character{i}": 6 for i in range(4)}
)


@pytest.mark.parametrize("text", ["varying", "5-way 1-shot", "10-way 1-shot"])
def test_an_omniglot_task_stays_in_one_alphabet(text):
    tasks = sample_tasks(OMNIGLOT, "omniglot", Protocol.parse(text), 0, 300)
    alphabets = [{name.split(".")[0] for name in task.classes} for task in tasks.tasks]
    counts = Counter(next(iter(each)) for each in alphabets)
    assert all(len(each) == 1 for each in alphabets)
    assert set(counts) == {"Greek", "Latin"}
    assert stats.chisquare([*counts.values()]).pvalue > 0.001
    assert tasks.left_out == ("Tagalog: 4 classes, at least 5 are needed",)
    if text == "10-way 1-shot":
        ways = {next(iter(a)): len(t.classes) for a, t in zip(alphabets, tasks.tasks, strict=True)}
        assert ways == {"Greek": 7, "Latin": 10}


def test_tasks_of_few_ways_need_few_classes():
    tasks = sample_tasks(OMNIGLOT, "omniglot", Protocol.parse("3-way 2-shot"), 0, 100)
    assert tasks.left_out == ()
    assert {len(task.classes) for task in tasks.tasks} == {3}


@pytest.mark.parametrize(
    ("images", "text", "reason"),
    [
        (equal(4, 9), "varying", "at most 4 classes and 'varying' needs at least 5: add cl"),
        (equal(4, 9), "20-way 5-shot", "needs at least 5: add classes, or use a fixed protocol"),
        (labelled({"a": 5, "b": 1, "c": 5, "d": 5, "e": 5}), "varying", "only 1 of the 2 images"),
        (equal(9, 5), "5-way 5-shot", r"'c00' and 8 more classes: .* or use fewer shots\."),
    ],
)
def test_sets_that_are_left_out_say_what_to_change(images, text, reason):
    found = sample_tasks(images, "pets", Protocol.parse(text), 0, 3)
    assert isinstance(found, LeftOut)
    assert (found.set, found.protocol) == ("pets", text)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


def test_all_alphabets_too_small():
    found = sample_tasks(labelled({"A.1": 5, "B.1": 5}), "omniglot", VARYING, 0, 3)
    assert "at most 1 classes in any of its groups" in found.reason


@pytest.mark.parametrize(
    "text",
    [
        *("varying", "5-way 1-shot", "varying, max_ways 20, max_support 100", "2-way 9-shot"),
        "5-way 1-shot, max_queries 5, unlabelled 60",
    ],
)
def test_protocols_are_read_from_their_names(text):
    assert Protocol.parse(text).name == text


@pytest.mark.parametrize(
    "text",
    [
        "vary",
        "1-way 1-shot",
        "5-way 0-shot",
        "5-way 1-shot, max_support 9",
        "varying, unlabelled 60",
        "varying, max_support",
        "varying, max_ways 9, max_ways 9",
        "varying, max_ways 4",
        "varying, max_support 49",
        "varying, max_queries 0",
    ],
)
def test_wrong_protocols(text):
    with pytest.raises(InputError):
        Protocol.parse(text)


UNLABELLED = Protocol.parse("5-way 1-shot, unlabelled 60")


def test_unlabelled_images_are_neither_shots_nor_queries():
    tasks = sample_tasks(equal(9, 30), "birds", UNLABELLED, 0, 20).tasks
    class_of = {id_: id_.split("/")[0] for task in tasks for id_ in task.images}
    frequencies = []
    for task in tasks:
        assert len(set(task.images)) == len(task.images)
        assert len(task.unlabelled) == 60
        known = [class_of[id_] for id_ in task.unlabelled if class_of[id_] in task.classes]
        assert len(known) == 42  # 30% are of other classes
        frequencies.append(sorted(Counter(known)[c] for c in task.classes))
        assert len(task.queries) == 5 * 9  # a third of what the shot leaves
    low, *_, high = np.mean(frequencies, axis=0)
    assert low < 5 < 8.4 < 12 < high  # unbalanced


def test_two_classes_stay_out_of_tasks_with_unlabelled_images():
    ten = Protocol.parse("10-way 5-shot, unlabelled 60")
    assert len(sample_tasks(equal(10, 30), "birds", ten, 0, 1).tasks[0].classes) == 8
    assert isinstance(sample_tasks(equal(6, 30), "birds", ten, 0, 1), LeftOut)


def test_few_images_give_few_unlabelled_ones():
    task = sample_tasks(equal(7, 4), "birds", UNLABELLED, 0, 1).tasks[0]
    assert len(task.queries) == 5
    assert len(task.unlabelled) == 5 * 2 + 2 * 4  # all that is left, and all of the other classes
