"""`miv export`, and the other commands on what it wrote."""

import json

import numpy as np
import onnx
import pytest

from mivhead.model.exported import CHECKSUM_KEY
from tests.cli.test_main import imported

LARGE = {"torch", "sklearn", "scipy", "safetensors", "onnx"}


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """An exported model; do not change it."""
    from mivhead.cli.main import main

    path = tmp_path_factory.mktemp("cli") / "model.onnx"
    assert main(["export", str(model), "-o", str(path), "--quiet"]) == 0
    return path


def test_predictions_are_the_same(miv, model, exported, new):
    def predicted(file):
        found = json.loads(miv("predict", file, new, "--json").out)["predictions"]
        return {each["file"]: (each["label"], each["probability"]) for each in found}

    mine, theirs = predicted(model), predicted(exported)
    assert mine.keys() == theirs.keys()
    for file, (label, probability) in mine.items():
        assert theirs[file][0] == label
        assert theirs[file][1] == pytest.approx(probability, abs=1e-4)
    assert miv("predict", exported, new).out == miv("predict", model, new).out
    assert miv("evaluate", exported, new).out == miv("evaluate", model, new).out


def test_info_shows_what_it_shows_of_the_model(miv, model, exported):
    facts, expected = (json.loads(miv("info", f, "--json").out) for f in (exported, model))
    assert facts["kind"] == "exported"
    assert facts["input"] == "images"
    same = ("method", "classes", "recipe", "config", "backbone", "seed", "library", "format")
    assert {name: facts[name] for name in same} == {name: expected[name] for name in same}
    text = miv("info", exported).out
    for line in miv("info", model).out.splitlines()[2:]:
        assert line in text


@pytest.mark.parametrize("command", ["predict", "evaluate", "info"])
def test_nothing_large_is_imported(exported, new, command):
    found = imported(command, exported, *([] if command == "info" else [new]))
    assert not found & LARGE
    assert "onnxruntime" in found


def test_from_features(miv, model, features, tmp_path):
    head = tmp_path / "head.onnx"
    text = miv("export", model, "-o", head, "--features", "--half").out
    assert text.startswith(f"Saved {head} (")
    mine, theirs = (
        json.loads(miv("predict", f, features, "--json").out)["predictions"] for f in (model, head)
    )
    assert [each["label"] for each in mine] == [each["label"] for each in theirs]
    np.testing.assert_allclose(
        [each["probability"] for each in mine],
        [each["probability"] for each in theirs],
        atol=1e-3,
    )


def test_inputs_that_do_not_fit(miv, model, exported, features, new, tmp_path):
    head = tmp_path / "head.onnx"
    assert miv("export", model, "-o", head, "--features", "--quiet").code == 0

    def error(*arguments):
        answer = miv(*arguments)
        assert answer.code == 2, answer
        assert answer.err.count("\n") == 1
        return answer.err

    assert "exported without its backbone" in error("predict", head, new)
    assert "give it images, not features" in error("predict", exported, features)
    assert "contains its backbone: omit --backbone" in error(
        "predict", exported, new, "--backbone", "efficientnet_lite0"
    )
    assert "omit --device" in error("predict", exported, new, "--device", "cuda")
    assert "is already an exported model" in error("export", exported, "-o", head)
    assert "must end in .onnx" in error("export", model, "-o", tmp_path / "model.pb")


def test_files_that_are_not_ours(miv, model, new, tmp_path):
    foreign = tmp_path / "foreign.onnx"

    def error(*arguments):
        answer = miv(*arguments)
        assert answer.code == 2, answer
        return answer.err

    foreign.write_bytes(b"not a model")
    for command in (["predict", foreign, new], ["info", foreign], ["evaluate", foreign, new]):
        assert "is not an ONNX file, or is corrupted" in error(*command)
    info = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph([node], "g", [info("x", kind, [1])], [info("y", kind, [1])])
    file = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)])
    file.ir_version = 8
    onnx.save(file, foreign)
    assert "not a model that `miv export` wrote" in error("predict", foreign, new)
    assert "is not overwritten" in error("export", model, "-o", foreign)
    for document, message in (
        ({"format": 1, "preset": {}}, "it is a backbone, not a classifier"),
        ({"format": 2, "kind": "classifier"}, "update mivhead"),
        ({"format": 1, "kind": "classifier"}, "lacks the key"),
    ):
        onnx.helper.set_model_props(file, {"mivhead": json.dumps(document)})
        onnx.save(file, foreign)
        assert message in error("info", foreign)
    assert "does not exist" in error("predict", tmp_path / "none.onnx", new)


def test_weights_in_other_files_are_not_read(miv, exported, new, tmp_path):
    """An untrusted file could name any file on this machine."""
    file = onnx.load(exported)
    kept = [entry for entry in file.metadata_props if entry.key != CHECKSUM_KEY]
    assert len(kept) == len(file.metadata_props) - 1  # or the checksum would be refused first
    del file.metadata_props[:]
    file.metadata_props.extend(kept)
    onnx.save(file, tmp_path / "model.onnx", save_as_external_data=True, location="weights")
    assert (tmp_path / "weights").stat().st_size > 1_000_000
    answer = miv("predict", tmp_path / "model.onnx", new)
    assert answer.code == 2
    assert "stores weights in other files, which are not read" in answer.err


def test_it_is_no_backbone(miv, shots, exported, tmp_path):
    answer = miv("fit", shots, "-o", tmp_path / "new.miv", "--backbone", exported)
    assert answer.code == 2
    assert "it is an exported classifier, not a backbone" in answer.err


def test_a_web_page_reports_its_size(miv, fails, model, tmp_path, monkeypatch):
    from mivhead.export import web

    folder = tmp_path / "runtime"
    folder.mkdir()
    for name in web.RUNTIME:
        (folder / name).write_text(f"/* {name} */")
    site = tmp_path / "site"
    answer = miv("export", model, "--web", site, "--half", "--runtime", folder)
    size = (site / "index.html").stat().st_size
    assert [path.name for path in site.iterdir()] == ["index.html"]
    assert answer.out.startswith(f"Saved {site}/index.html ({size / 1e6:.1f} MB, opset ")
    assert "Open it by double-click" in answer.out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web, "FOLDER", tmp_path / "none")
    assert "make web-runtime" in fails("export", model, "--web", tmp_path / "other")
