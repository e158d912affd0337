"""What tasks need: images, views and features; what is missing, and whether it fits."""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import FeatureCache
from mivhead.extraction.pipeline import extract_table
from mivhead.images.augmentation import number_views
from mivhead_bench.benchmark import inputs as module
from mivhead_bench.benchmark.inputs import (
    FeatureKeys,
    Inputs,
    TaskFeatures,
    ViewLimit,
    count_views,
    find_missing,
)
from mivhead_bench.benchmark.tasks import Task
from tests.helpers.bench_data import write_sets
from tests.helpers.tiny_backbone import TinyBackbone

ids = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=6, unique=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(ids, min_size=1, max_size=4), st.integers(0, 6), st.integers(0, 4))
def test_views_are_those_of_plain_loops(supports, threshold, limit):
    tasks = [
        Task(("x", "y"), tuple(s), (0,) + (1,) * (len(s) - 1), ("q", s[0]), (0, 1))
        for s in supports
    ]
    expected = {}
    for task in tasks:
        for id_ in task.support + task.queries:
            expected.setdefault(id_, 0)
        for id_, label in zip(task.support, task.support_labels, strict=True):
            shots = task.support_labels.count(label)
            views = 0 if shots > threshold else min(limit, -(-threshold // shots))
            expected[id_] = max(expected[id_], views)
    found = count_views(tasks, [ViewLimit(threshold, "ceil", limit)])
    assert found == expected
    assert list(found) == sorted(found)


@pytest.fixture
def source(tmp_path):
    """A set of two classes of three images, and a backbone."""
    data = write_sets(tmp_path / "data", names=("dots",), classes=2, images=3)
    return Inputs(TinyBackbone(), "dots", data, tmp_path / "features", 10**9, seed=5)


VIEWS = {f"class{label}/{i}.png": label for label in (0, 1) for i in range(3)}


def keys_of(source):
    return FeatureKeys(source.backbone, source.open_images(), VIEWS, "dots", source.seed)


def extract(source, views=VIEWS):
    for extraction in find_missing(source, keys_of(source), views).extractions:
        extraction()


def test_what_is_missing_is_extracted_once(source, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    missing = find_missing(source, keys_of(source), VIEWS)
    assert (missing.images, missing.views) == (6, 3)
    assert [each.size for each in missing.extractions] == [3, 4, 2]  # no image is split
    missing.extractions[0]()
    missing.extractions[1]()
    missing = find_missing(source, keys_of(source), VIEWS)
    assert (missing.images, missing.views, len(missing.extractions)) == (1, 1, 1)
    (last,) = missing.extractions
    seconds = last()
    assert 0 < seconds.spent < 1
    assert find_missing(source, keys_of(source), VIEWS).extractions == ()
    assert source.cache.info().entries == 9
    assert missing.bytes_needed == source.cache.info().bytes
    assert last() is None  # the backbone was not needed


def test_only_missing_views_pass_the_backbone(source):
    extract(source, dict.fromkeys(VIEWS, 0))
    missing = find_missing(source, keys_of(source), VIEWS)
    assert (missing.images, missing.views) == (0, 3)
    seen = source.backbone.seen
    extract(source)
    # Twice one plain image: for the layout of the features, and to warm up.
    assert source.backbone.seen - seen == 3 + 2


TASK = Task(("a", "b"), ("class1/0.png", "class1/2.png"), (0, 1), ("class0/1.png",), (0,))


def test_features_of_a_task_are_those_of_extraction(source):
    extract(source)
    features = TaskFeatures(source, TASK, keys_of(source).of_task(TASK, [1, 1]))
    images = source.open_images()
    rows = [images.ids.index(id_) for id_ in TASK.support]
    plan = number_views([1, 1], source.seed)
    expected = extract_table(source.backbone, images.take(rows), plan, verbose=False)
    assert features.support == expected.features
    assert features.queries == source.backbone.extract([images.load(1)])
    taken = features.take_views([0, 1])
    assert taken["views"] == expected.views[[1]]
    assert taken["view_of"].tolist() == [1]
    assert features.take_views([0, 0]) == {}


def test_features_that_disappear_are_extracted_again(source):
    keys = keys_of(source).of_task(TASK, [1, 1])
    extract(source)
    expected = TaskFeatures(source, TASK, keys)
    shutil.rmtree(source.cache.folder)
    again = TaskFeatures(source, TASK, keys)
    assert (again.support, again.queries, again.views) == (
        expected.support,
        expected.queries,
        expected.views,
    )
    shutil.rmtree(source.cache.folder)
    blind = Inputs(None, "dots", source.data, source.features, source.limit, source.seed)
    with pytest.raises(NotAvailableError, match="run the same command again"):
        TaskFeatures(blind, TASK, keys)


def test_an_image_that_the_set_lacks_is_named(source):
    with pytest.raises(InputError, match=r"class7/0\.png"):
        FeatureKeys(source.backbone, source.open_images(), ["class7/0.png"], "dots", 0)


def test_a_limit_or_disk_that_is_too_small_is_an_error_before_extraction(source, monkeypatch):
    missing = find_missing(source, keys_of(source), VIEWS)
    small = FeatureCache(source.features, missing.bytes_needed)  # 90% of it can be relied on
    assert "--cache-gb" in missing.find_obstacle(small, "dots")
    enough = FeatureCache(source.features, int(missing.bytes_needed / 0.9) + 1)
    assert missing.find_obstacle(enough, "dots") is None
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    assert "but the disk has" in missing.find_obstacle(enough, "dots")


def test_a_run_does_not_evict_what_it_needs(source):
    """Its features fill the cache up to the limit, beside older entries of others."""
    extract(source, dict.fromkeys(VIEWS, 0))
    missing = find_missing(source, keys_of(source), VIEWS)
    tight = Inputs(
        source.backbone,
        "dots",
        source.data,
        source.features,
        int(missing.bytes_needed / 0.9) + 1,
        source.seed,
    )
    for i in range(4):  # others
        source.cache.put(f"{i:064x}", {"block0.token": np.ones(4, np.float16)})
        path = source.cache._path(f"{i:064x}")
        age(path)
    for own in VIEWS:  # older than those of others, until the run needs them
        age(source.cache._path(keys_of(source).key(own)), 20_000)
    extract(tight)
    assert find_missing(tight, keys_of(tight), VIEWS).extractions == ()


def age(path, seconds=10_000):
    import os
    import time

    then = time.time() - seconds
    os.utime(path, (then, then))
