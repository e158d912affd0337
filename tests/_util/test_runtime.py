"""Sessions of onnxruntime: a forked child of a process that has predicted predicts, too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from mivhead._util.onnx_file import Node, Tensor, encode_model
from mivhead._util.runtime import Session
from mivhead.errors import InputError

X = Tensor("float32", ["n", 3])


def graph() -> bytes:
    return encode_model([Node("Add", ["x", "x"], ["y"])], {}, {"x": X}, {"y": X}, opset=13)


def test_names_that_are_no_text_are_one_sentence() -> None:
    content = encode_model(
        [Node("Add", ["x", "x"], ["y"])], {}, {"x": X}, {"y": X}, opset=13, metadata={"k": "note"}
    )
    forged = content.replace(b"note", b"no\xb8e")
    with pytest.raises(InputError, match="its names are not valid text"):
        Session(lambda: forged, "forged.onnx", threads=1)


FORK = """
import os, sys
import numpy as np
from mivhead.backbones import load_backbone
backbone = load_backbone("efficientnet_lite0", dtype="float32").loaded()
x = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
expected = backbone.run(x)["bn2"]
for runs in (True, False):  # one that does not run must be able to end
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, "the child failed"
    else:
        same = not runs or np.array_equal(backbone.run(x)["bn2"], expected)
        del backbone
        sys.exit(not same)  # in the usual way, which deletes everything
assert np.array_equal(backbone.run(x)["bn2"], expected)  # the parent goes on
print("all well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_forked_child_runs_and_ends(threads: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "all well", done.stderr


def test_content_is_asked_for_once() -> None:
    asked = []
    session = Session(lambda: asked.append(1) or graph(), "double", threads=2)
    for _ in range(2):
        (y,) = session.run(["y"], {"x": np.ones((1, 3), np.float32)})
        np.testing.assert_array_equal(y, [[2, 2, 2]])
    assert len(asked) == 1


def test_one_thread_watches_the_time_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(graph, "double", threads=1)
    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self), start(self)))
    for _ in range(100):
        session.run(["y"], {"x": np.ones((1, 3), np.float32)})
    assert len(started) < 10  # it ends when there is nothing to watch, and starts again


WATCHED = """
import os, sys, threading, time
from mivhead._util import onnx_check
onnx_check.MAX_SECONDS, onnx_check.TICK = 0.2, 0.05

def stopped(seconds):
    late = threading.Event()
    with onnx_check._calling_later(late.set):
        time.sleep(seconds)
        return late.wait(20 if seconds else 0), late

_, finished = stopped(0)
assert stopped(0.5)[0] and not finished.is_set()
with onnx_check._calling_later(int):
    child = os.fork()  # which has no thread that watches
    if not child:
        os._exit(not stopped(0.5)[0])
    assert os.waitpid(child, 0)[1] == 0, "the child is not watched"
time.sleep(0.5)
assert not [each for each in threading.enumerate() if each.name == "deadlines"]
assert stopped(0.5)[0]
print("all well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_late_runs_are_stopped_also_in_a_forked_child() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "all well", done.stderr


def test_errors_name_the_graph() -> None:
    with pytest.raises(InputError, match=r"onnxruntime cannot load broken: "):
        Session(lambda: b"nonsense", "broken", threads=1)
    session = Session(graph, "double", threads=1)
    with pytest.raises(InputError, match=r"onnxruntime cannot run double: "):
        session.run(["y"], {"x": np.ones((1, 4), np.float32)})
