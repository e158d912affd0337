"""ONNX files of strangers: answered with one sentence, in bounded time and memory."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead._util import onnx_check
from mivhead._util.onnx_check import check_graph
from mivhead._util.onnx_file import encode
from mivhead._util.onnx_reader import OnnxFile
from mivhead.backbones import load_backbone
from mivhead.errors import InputError, MivError, ModelFileError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
from tests.helpers import hostile_onnx as hostile

PICTURES = [np.full((8, 8, 3), grey, np.uint8) for grey in (0, 128, 255)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def test_an_honest_model_is_not_refused(path: Path) -> None:
    path.write_bytes(hostile.honest().SerializeToString())
    assert mivhead.load(path).predict_proba(PICTURES).shape == (3, 2)


@pytest.mark.parametrize("name", hostile.WRONG)
def test_whatever_it_computes_the_answer_is_one_sentence(name: str, path: Path) -> None:
    made, words = hostile.WRONG[name]
    path.write_bytes(made.SerializeToString())
    started = time.perf_counter()
    with pytest.raises((ModelFileError, InputError), match=words):
        mivhead.load(path).classify(PICTURES)
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("where", hostile.EXTERNAL)
@pytest.mark.parametrize("exported", [False, True])
def test_other_files_are_found_wherever_they_are_named(where: str, exported: bool) -> None:
    content = hostile.external(where).SerializeToString()
    with pytest.raises(InputError, match=r"stores weights in other files|its own operators"):
        check_graph(content, "x.onnx", exported=exported)


def test_a_backbone_that_loops_forever_is_stopped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_check, "MAX_SECONDS", 1.0)
    path.write_bytes(hostile.replaced(hostile.loop(), header={}).SerializeToString())
    monkeypatch.setattr("mivhead.backbones.onnx_model.read_metadata", lambda *_: None)
    started = time.perf_counter()
    with pytest.raises(InputError, match="terminate"):
        load_backbone(path, outputs=["looped"])
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    ("name", "words"), [("4 GB", "memory"), ("no rows", "one row"), ("more rows", "one row")]
)
def test_a_backbone_has_limits_too(
    name: str, words: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(hostile.WRONG[name][0].SerializeToString())
    monkeypatch.setattr("mivhead.backbones.onnx_model.read_metadata", lambda *_: None)
    with pytest.raises(InputError, match=words):
        load_backbone(path, outputs=["probabilities"])


def test_the_runtimes_own_format_is_refused(path: Path) -> None:
    path.write_bytes(b"\x18\0\0\0ORTM" + bytes(100))
    with pytest.raises(ModelFileError, match="not an ONNX file"):
        mivhead.load(path)


def test_damage_is_found_without_the_runtime() -> None:
    content = hostile.honest().SerializeToString()
    check_graph(content, "x", exported=True)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        data = bytearray(content[: rng.integers(1, len(content) + 1)])
        for place in rng.integers(0, len(data), rng.integers(0, 4)):
            data[place] = rng.integers(256)
        try:
            check_graph(bytes(data), "x", exported=True)
        except MivError:
            continue


def test_numbers_are_not_read_as_texts() -> None:
    """`bytes` of a number would be that many zeros: here 4 TB."""
    graph = encode({7: {1: {4: 2**42}}})
    with pytest.raises(InputError, match="not an ONNX file, or is corrupted"):
        check_graph(graph, "x.onnx", exported=True)
    with pytest.raises(InputError, match="not an ONNX file, or is corrupted"):
        OnnxFile(graph, "x.onnx")


def test_parts_and_depth_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    content = hostile.honest().SerializeToString()
    nested = b""
    for _ in range(200):  # a graph in an attribute of a node of a graph
        for number in (6, 5, 1):
            size, length = len(nested), b""
            while size > 127:
                length += bytes([size & 127 | 128])
                size >>= 7
            nested = bytes([number << 3 | 2]) + length + bytes([size]) + nested
    size, length = len(nested), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    with pytest.raises(InputError, match="corrupted"):
        check_graph(b"\x3a" + length + bytes([size]) + nested, "x")
    monkeypatch.setattr(onnx_check, "MAX_PARTS", 50)
    with pytest.raises(InputError, match="corrupted"):
        check_graph(content, "x")
