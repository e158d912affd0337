"""Sessions of onnxruntime: a forked child of a process that has predicted predicts, too."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_errors_name_the_graph() -> None:
    with pytest.raises(InputError, match=r"onnxruntime cannot load broken: "):
        Session(lambda: b"nonsense", "broken", threads=1)
    session = Session(graph, "double", threads=1)
    with pytest.raises(InputError, match=r"onnxruntime cannot run double: "):
        session.run(["y"], {"x": np.ones((1, 4), np.float32)})
