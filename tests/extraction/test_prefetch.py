"""The background thread: order, bounds, errors, and a clean end."""

import threading
import time

import pytest

from mivhead.extraction.pipeline import prefetch


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_order_is_kept(depth):
    assert list(prefetch(range(20), depth)) == list(range(20))
    assert list(prefetch([], depth)) == []
    assert not workers()


def test_none_and_false_are_items():
    assert list(prefetch([None, 0, False], 2)) == [None, 0, False]


def test_work_runs_ahead_but_not_further_than_depth():
    made = []

    def source():
        for item in range(100):
            made.append(item)
            yield item

    stream = prefetch(source(), depth=3)
    assert next(stream) == 0
    wait_until(lambda: len(made) == 4)  # the one handed out, and three ahead while it is in use
    time.sleep(0.05)
    stream.close()
    assert len(made) == 4
    assert not workers()


def test_exception_appears_in_its_place():
    def source():
        yield 1
        yield 2
        raise ValueError("third")

    stream = prefetch(source(), depth=5)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(stream)
    assert not workers()


def test_interrupted_consumer_leaves_no_thread():
    def consume():
        for item in prefetch(iter(int, 1), depth=2):
            if item == 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    wait_until(lambda: not workers())
