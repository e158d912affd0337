"""The bank: right rows, whole segments, and the pictures that tasks need."""

import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead import Features
from mivhead.benchmark.bank import Bank, write_segment
from mivhead.benchmark.plan import Picture, ViewRule, needed_pictures, view_seed
from mivhead.benchmark.tasks import Task
from mivhead.errors import InputError, NotAvailableError


def some_features(start: int, count: int) -> Features:
    numbers = np.arange(start, start + count)
    maps = numbers[:, None, None, None] + np.arange(12).reshape(3, 2, 2) / 16
    return Features([maps.astype(np.float16), {"token": (-numbers[:, None]).astype(np.float16)}])


@pytest.fixture
def bank(tmp_path):
    write_segment(tmp_path, [f"k{i}" for i in range(5)], some_features(0, 5), 0.5)
    write_segment(tmp_path, [f"k{i}" for i in range(5, 9)], some_features(5, 4), 0.1)
    return Bank(tmp_path)


def test_rows_of_several_segments_in_any_order(bank):
    whole = some_features(0, 9)
    for rows in ([3], [8, 0, 5, 5, 1], list(range(9))):
        assert bank.take([f"k{row}" for row in rows]) == whole[rows]
    assert bank.seconds == pytest.approx(0.3)
    assert bank.nbytes == whole.nbytes


def test_unfinished_segments_are_never_seen(bank, tmp_path, monkeypatch):
    real, calls = np.save, []

    def full(file, array, **options):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, array, **options)

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(NotAvailableError, match="No space left on device"):
        write_segment(tmp_path, ["k9"], some_features(9, 1), 0.1)
    (tmp_path / "new-killed").mkdir()  # as a kill leaves it
    bank.refresh()
    assert "k9" not in bank
    assert len(list(tmp_path.glob("segment-*"))) == 2
    bank.drop()
    assert list(tmp_path.iterdir()) == []


def test_segments_that_come_later_are_found(bank, tmp_path):
    write_segment(tmp_path, ["k9"], some_features(9, 1), 0.1)
    assert bank.take(["k9"]) == some_features(9, 1)
    with pytest.raises(NotAvailableError, match="lacks features of 1 pictures"):
        bank.take(["k1", "absent"])


def test_a_damaged_segment_is_named(bank, tmp_path):
    path = next(tmp_path.glob("segment-*"))
    (path / "block0.map.npy").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=path.name):
        Bank(tmp_path)


ids = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=6, unique=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(ids, min_size=1, max_size=4), st.integers(0, 6), st.integers(0, 4))
def test_needed_pictures_are_those_of_plain_loops(supports, threshold, cap):
    tasks = [
        Task(("x", "y"), tuple(s), (0,) + (1,) * (len(s) - 1), ("q", s[0]), (0, 1))
        for s in supports
    ]
    expected = set()
    for task in tasks:
        expected |= {(id_, None) for id_ in task.support + task.queries}
        for id_, label in zip(task.support, task.support_labels, strict=True):
            shots = task.support_labels.count(label)
            views = 0 if shots > threshold else min(cap, -(-threshold // shots))
            expected |= {(id_, view) for view in range(views)}
    found = needed_pictures(tasks, [ViewRule(threshold, "ceil", cap)])
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert found == sorted(found, key=lambda p: (p.id, -1 if p.view is None else p.view))


def test_views_have_seeds_of_their_own():
    pictures = [Picture(id_, view) for id_ in ("a", "b", "a1") for view in range(11)]
    seeds = {view_seed(seed, p.id, p.view) for seed in (0, 1, 10) for p in pictures}
    assert len(seeds) == 3 * len(pictures)
    assert all(0 <= seed < 2**63 for seed in seeds)
