"""One clock for everything that is added or compared."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from PIL import Image

from mivhead_bench.benchmark import clock, inputs
from mivhead_bench.benchmark.clock import Clock, Seconds
from tests.helpers.tiny_backbone import TinyBackbone


@pytest.fixture
def now(monkeypatch):
    """What the clocks of Python show: waiting is no processor time."""
    shown = {"process_time": 0.0, "thread_time": 0.0, "perf_counter": 0.0}
    clocks = {name: partial(shown.get, name) for name in shown}
    monkeypatch.setattr(clock, "time", SimpleNamespace(**clocks))
    return shown


def test_other_threads_count_only_where_they_belong_to_the_work(now):
    both, own = Clock("cpu"), Clock("cpu", this_thread=True)
    now.update(process_time=3.0, thread_time=1.0, perf_counter=8.0)
    assert both.lap() == Seconds(spent=3.0, wall=8.0)
    assert own.lap() == Seconds(spent=1.0, wall=8.0)
    assert both.lap() == Seconds(0.0, 0.0)


def test_the_frozen_backbone_is_timed_by_the_same_clock(now):
    class Waiting(TinyBackbone):
        """A backbone on a busy machine: it waits for the processor most of the time."""

        def extract(self, images):
            now["thread_time"] += 1
            now["perf_counter"] += 8
            return super().extract(images)

    assert inputs.measure_seconds(Waiting(), "cpu").times(inputs.BATCH) == Seconds(1.0, 8.0)


def test_resizing_is_not_timed():
    sizes = []

    class Seen(TinyBackbone):
        def extract(self, images):
            sizes.extend(image.size for image in images)
            return super().extract(images)

    backbone = Seen()
    size = backbone.preset.preprocessing.size
    timed = inputs._Timed(backbone, "cpu")
    timed.extract([Image.new("RGB", (3 * size, 2 * size))])
    assert set(sizes) == {(size, size)}
