"""One clock for everything that is added or compared."""

from __future__ import annotations

import threading
import time

from PIL import Image

from mivhead.benchmark import inputs
from mivhead.benchmark.clock import Clock
from tests.helpers.tiny_backbone import TinyBackbone


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_waiting_is_no_processor_time():
    clock = Clock("cpu")
    time.sleep(0.3)
    waited = clock.lap()
    assert waited.spent < 0.1
    assert waited.wall >= 0.3
    busy(0.1)
    assert clock.lap().spent >= 0.1


def test_other_threads_count_only_where_they_belong_to_the_work():
    both, own = Clock("cpu"), Clock("cpu", this_thread=True)
    other = threading.Thread(target=busy, args=(0.2,))
    other.start()
    other.join()
    assert both.lap().spent >= 0.2
    assert own.lap().spent < 0.1


class Waiting(TinyBackbone):
    """A backbone on a busy machine: it waits for the processor most of the time."""

    def extract(self, images):
        time.sleep(0.2)
        return super().extract(images)


def test_the_frozen_backbone_is_timed_by_the_same_clock():
    measured = inputs.measure_seconds(Waiting(), "cpu")
    assert measured.spent < measured.wall
    assert measured.wall * inputs.BATCH >= 0.2
    assert measured.spent * inputs.BATCH < 0.1


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
