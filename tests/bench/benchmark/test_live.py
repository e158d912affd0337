"""The live view: counts, accuracy so far."""

import io

import pytest

from mivhead_bench.benchmark import live
from mivhead_bench.benchmark.live import LiveView
from tests.helpers.bench_data import result


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_where_nobody_watches(clock):
    stream = io.StringIO()
    view = LiveView(stream=stream)
    view.start("birds", 3)
    view.show(result(accuracy=0.5))
    assert stream.getvalue() == ""  # too early
    clock[0] += live.EVERY + 1
    view.show(result(accuracy=0.7))
    view.show(result(method="ncc", accuracy=None, error="memory: too little"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "birds: 2 of 3: miv 60.0%"
    assert lines[1] == "dots, task 0, ncc failed: memory: too little"
    assert lines[2].startswith("birds: 3 of 3, 1 failed")


def test_a_bar_on_a_terminal_and_silence_on_request():
    stream = Terminal()
    view = LiveView(stream=stream)
    with view.extracting(3) as advance:
        advance(3)
    view.start("birds", 1)
    view.show(result(accuracy=0.5))
    assert "backbone" in stream.getvalue()
    assert "miv 50.0%" in stream.getvalue()
    quiet = Terminal()
    view = LiveView(quiet=True, stream=quiet)
    with view.extracting(3) as advance:
        advance(3)
    view.note("a remark")
    view.start("birds", 1)
    view.show(result(accuracy=None, error="memory: x"))
    assert quiet.getvalue() == ""


def test_a_failing_method_shows_its_traceback_once():
    stream = io.StringIO()
    view = LiveView(stream=stream)
    view.start("birds", 50)
    for task in range(25):
        view.show(result(method="mine", task=task, accuracy=None, error="E: x"), "Traceback: here")
    for task in range(25, 50):  # the text of this error is different on every task
        failed = result(method="mine", task=task, accuracy=None, error=f"E: {task}")
        view.show(failed, "Traceback: there")
    text = stream.getvalue()
    assert text.startswith(
        "dots, task 0, mine failed: E: x\n    Traceback: here\ndots, task 1, mine"
    )
    assert text.count("Traceback: here") == 1
    assert text.count("Traceback: there") == 1
    assert len(text.splitlines()) < 10
    assert "50 failed" in text
