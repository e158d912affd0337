"""ONNX graphs in onnxruntime: limits of time and memory, other files, and forked children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest

import mivhead
from mivhead._util import runtime
from mivhead._util.runtime import Session, check_self_contained
from mivhead.backbones import load_backbone
from mivhead.errors import InputError, MivError, ModelFileError
from tests.helpers import hostile_onnx as hostile

PICTURES = [np.full((8, 8, 3), grey, np.uint8) for grey in (0, 128, 255)]


def graph() -> bytes:
    head = '<ir_version: 8, opset_import: ["": 17]>'
    text = head + "g (float[n, 3] x) => (float[n, 3] y) {y = Add(x, x)}"
    content: bytes = onnx.parser.parse_model(text).SerializeToString()
    return content


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


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


def test_one_thread_watches_the_time_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(graph, "double", threads=1)
    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self), start(self)))
    for _ in range(100):
        (y,) = session.run(["y"], {"x": np.ones((1, 3), np.float32)})
        np.testing.assert_array_equal(y, [[2, 2, 2]])
    assert len(started) <= 1


def test_errors_name_the_graph() -> None:
    with pytest.raises(InputError, match="cannot load broken"):
        Session(lambda: b"nonsense", "broken", threads=1)
    session = Session(graph, "double", threads=1)
    with pytest.raises(InputError, match="cannot run double"):
        session.run(["y"], {"x": np.ones((1, 4), np.float32)})


def test_an_honest_model_is_not_refused(path: Path) -> None:
    path.write_bytes(hostile.content(hostile.honest()))
    assert mivhead.load(path).predict_proba(PICTURES).shape == (3, 2)


@pytest.mark.parametrize("name", hostile.WRONG)
def test_whatever_it_computes_the_answer_is_one_sentence(name: str, path: Path) -> None:
    made, words = hostile.WRONG[name]
    path.write_bytes(hostile.content(made))
    with pytest.raises((ModelFileError, InputError), match=words):
        mivhead.load(path).classify(PICTURES)


@pytest.mark.parametrize("where", hostile.EXTERNAL)
def test_an_exported_model_with_other_files(where, path, monkeypatch):
    path.write_bytes(hostile.content(hostile.external(where)))
    monkeypatch.setattr("mivhead.model.exported.Session", None)  # it is not run
    with pytest.raises(ModelFileError, match="other files"):
        mivhead.load(path)


@pytest.mark.parametrize("where", hostile.EXTERNAL)
def test_other_files_are_found_wherever_they_are_named(where: str) -> None:
    content = hostile.external(where).SerializeToString()
    with pytest.raises(InputError, match="other files"):
        check_self_contained(content, "x.onnx")


def test_an_endless_loop_is_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MAX_SECONDS", 0.5)
    path.write_bytes(hostile.content(hostile.replaced(hostile.loop())))
    with pytest.raises(InputError, match="terminate"):
        mivhead.load(path).classify(PICTURES)
    with pytest.raises(InputError, match="terminate"):
        load_backbone(path, outputs=["looped"])


@pytest.mark.parametrize(
    ("name", "words"), [("4 GB", "memory"), ("no rows", "one row"), ("more rows", "one row")]
)
def test_a_backbone_has_limits_too(name: str, words: str, path: Path) -> None:
    path.write_bytes(hostile.WRONG[name][0].SerializeToString())
    with pytest.raises(InputError, match=words):
        load_backbone(path, outputs=["probabilities"])


def test_damage_is_one_sentence(path: Path) -> None:
    content = hostile.content(hostile.honest())
    rng = np.random.default_rng(0)
    for _ in range(100):
        data = bytearray(content[: rng.integers(1, len(content) + 1)])
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        try:
            mivhead.load(path).classify(PICTURES)
        except MivError:
            continue
