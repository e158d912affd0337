"""Model files: what is saved comes back, and nothing else gets in."""

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mivhead
from mivhead import Features, MIVClassifier, Recipe
from mivhead._util import files
from mivhead._util.schema import to_json
from mivhead.errors import InputError, MivError, ModelFileError, NotAvailableError
from mivhead.model import file as model_file
from mivhead.model.base import Estimate


def fitted(**params: Any) -> MIVClassifier:
    rng = np.random.default_rng(0)
    blocks = [
        rng.normal(size=(6, 4, 3, 3)).astype(np.float16),
        {"token": rng.normal(size=(6, 8)).astype(np.float16)},
    ]
    labels = np.array(["a", "b", "b", "c c", "ü", "ü"])
    params = {"recipe": Recipe(steps=3), **params}
    return MIVClassifier(random_state=7, **params).fit(Features(blocks), labels)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def queries() -> Features:
    rng = np.random.default_rng(1)
    return Features([rng.normal(size=(9, 4, 3, 3)), {"token": rng.normal(size=(9, 8))}])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mivhead.save(fitted(), tmp_path / "model.miv")
    return tmp_path / "model.miv"


def document_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "np") as file:
        document: dict[str, Any] = json.loads(file.metadata()["mivhead"])
    return document


def change(
    path: Path, meta: dict | None = None, tensors: dict | None = None, without: Any = ()
) -> None:
    """Write the file again with other contents and their checksum, as a forger would."""
    document = document_of(path)
    document.pop(files.CHECKSUM)
    values = {k: v for k, v in load_file(path).items() if k not in without} | (tensors or {})
    document.update(meta or {})
    document[files.CHECKSUM] = files.checksum(values, document)
    save_file(values, path, metadata={"mivhead": json.dumps(document)})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"recipe": Recipe(temperature_order="inside", steps=3)},
        {"recipe": Recipe.paper(steps=3)},
        {"recipe": Recipe(vote="logsumexp", steps=3)},
        {"recipe": "experts"},
    ],
)
def test_what_is_saved_comes_back(params: dict, tmp_path: Path) -> None:
    classifier = fitted(**params)
    mivhead.save(classifier, tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv")
    np.testing.assert_array_equal(again.classifier_.logits(queries()), classifier.logits(queries()))
    assert again.classes_.tolist() == ["a", "b", "c c", "ü"]
    assert again.classifier_.support_ == classifier.support_
    assert again.classifier_.seed_ == classifier.seed_
    assert again.classifier_.recipe == classifier.head_.recipe


def test_decisions_come_back(path: Path) -> None:
    before, again = fitted(), mivhead.load(path)
    predictions = again.classify(queries(), max_errors=0.2)
    assert again.thresholds(0.1, 0.2) == before.decision_.calibration.thresholds(0.1, 0.2)
    assert [p.unknown for p in predictions] == before.score_unknown(queries())[1].tolist()
    assert predictions == before.classify(queries(), max_errors=0.2)


def test_the_description_has_the_agreed_keys(path: Path) -> None:
    with safe_open(path, "np") as file:
        assert set(file.metadata()) == {"mivhead"}
    document = document_of(path)
    agreed = {"format", "recipe", "config", "classes", "backbone", "seed", "library", "decision"}
    assert agreed < set(document)
    info = model_file.read_info(path)
    assert info.config["shots"] == [1, 2, 1, 2]
    assert info.library == mivhead.__version__
    prefixes = ("support.block", "params.", "experts.", "decision.")
    assert all(name.startswith(prefixes) for name in load_file(path))


def test_classes_that_a_file_can_hold(tmp_path: Path) -> None:
    classifier = MIVClassifier(Recipe(steps=1)).fit(np.eye(4, 8), [3, 3, 10, 10])
    mivhead.save(classifier, tmp_path / "m.miv")
    assert mivhead.load(tmp_path / "m.miv").classes_.tolist() == [3, 10]
    for classes in ([0, "one"], ["a", "unsure"]):
        classifier.classes_ = np.array(classes, object)
        with pytest.raises(InputError):
            mivhead.save(classifier, tmp_path / "m.miv")


def test_loading_needs_no_backbone_and_no_timm(path: Path) -> None:
    code = (
        "import sys, mivhead; mivhead.load(sys.argv[1]);"
        "print([m for m in ('timm', 'torchvision', 'torch', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


NAN, INF = np.float32(np.nan), np.float32(np.inf)
MAP, TOKEN = "support.block0.map", "support.block1.token"
THETA = "params.blocks.0.pooling.theta"
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "other format": ({"meta": {"format": 2}}, "another version"),
    "unknown key": ({"meta": {"extra": 1}}, "unknown key 'extra'"),
    "unknown recipe key": ({"meta": {"recipe": {"depth": 3}}}, "unknown key 'depth'"),
    "not a float": ({"meta": {"recipe": {"eta": 10**400}}}, "recipe.eta"),
    "seed of a wrong type": ({"meta": {"seed": "7"}}, "seed"),
    "too few classes": ({"meta": {"classes": ["a"]}}, "1 classes"),
    "a million classes": ({"meta": {"classes": list(range(10**6))}}, "1000000 classes"),
    "long names": ({"meta": {"classes": ["a" * 10**6, *map(str, range(999))]}}, "too long"),
    "twice the same class": ({"meta": {"classes": ["a", "a", "b", "c"]}}, "distinct"),
    "classes of mixed types": ({"meta": {"classes": ["a", 1, "b", "c"]}}, "all strings"),
    "not UTF-8": ({"meta": {"classes": ["a", "b", "c", "\ud800"]}}, "not valid UTF-8"),
    "large integers": ({"meta": {"classes": [1, 2, 3, 10**400]}}, "more than 64 bits"),
    "a decision": ({"meta": {"classes": ["a", "b", "c", "unsure"]}}, "'unsure'"),
    "backbone is no identity": ({"meta": {"backbone": {"name": "x"}}}, "backbone"),
    "deep": ({"meta": {"config": json.loads("[" * 300 + "]" * 300)}}, "nested too deeply"),
    "missing tensor": ({"without": ["params.blocks.0.cap.key.weight"]}, "missing"),
    "unexpected tensor": ({"tensors": {"params.x": ones(1)}}, "unexpected"),
    "foreign tensor": ({"tensors": {"other": ones(1)}}, "other"),
    "wrong shape": ({"tensors": {THETA: ones(5)}}, "shape"),
    "wrong type": ({"tensors": {THETA: np.ones(4)}}, "float64"),
    "NaN": ({"tensors": {THETA: ones(4) * NAN}}, f"{THETA.removeprefix('params.')}.*NaN"),
    "foreign expert": ({"tensors": {"experts.block2.mean.intercepts": ones(4)}}, "unexpected"),
    "infinite support": ({"tensors": {TOKEN: ones(6, 8) * INF}}, "block1.token.*infinity"),
    "support of other channels": ({"tensors": {TOKEN: ones(6, 9)}}, "do not fit"),
    "no names": ({"tensors": {"names.vectors": ones(4, 8)}}, "does not describe"),
    "no shots": ({"tensors": {"shots.views.block0.map": ones(1)}}, "does not describe"),
    "decision: unknown key": ({"meta": {"decision": {"calibrated": True, "x": 1}}}, "unknown key"),
    "decision: missing": ({"without": ["decision.energy"]}, "missing"),
    "decision: shape": ({"tensors": {"decision.energy": ones(4, 1)}}, "shape"),
    "decision: NaN": ({"tensors": {"decision.energy": ones(4) * NAN}}, "decision.energy"),
    "decision: rows": ({"tensors": {"decision.rows": np.array([1, 2, 4, 6])}}, "do not fit"),
    "decision: other": ({"meta": {"decision": {"calibrated": True, "other": 4}}}, "do not fit"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(name: str, path: Path) -> None:
    changes, words = CHANGES[name]
    change(path, **changes)
    with pytest.raises(ModelFileError, match=words):
        mivhead.load(path)


CONFIGS: dict[str, Any] = {
    "shots": {"shots": [10**12, 2, 1, 2]},
    "no shots": {"shots": [0, 3, 1, 2]},
    "blocks": {"blocks": []},
    "a block": {"blocks": [{"channels": 2**40}]},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recipe", [Recipe(steps=3), "experts"], ids=["head", "experts"])
def test_a_forged_configuration_is_refused(name: str, recipe: Any, path: Path) -> None:
    mivhead.save(fitted(recipe=recipe), path)
    change(path, {"config": document_of(path)["config"] | CONFIGS[name]})
    with pytest.raises(ModelFileError):
        mivhead.load(path)


@pytest.mark.parametrize("channels", [10**6, 2**40])
def test_a_forged_size_costs_no_memory(channels: int, path: Path) -> None:
    """3 x 10^12 values would not fit anywhere; the tensors say what is there."""
    config = document_of(path)["config"]
    config["blocks"][1] |= {"channels": channels, "heads": 1}
    change(path, {"config": config}, {TOKEN: np.zeros((6, 10**6), np.float16)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError):
        mivhead.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@pytest.mark.parametrize("keep", [0, 9, 300, -1])
def test_a_truncated_file_is_refused(keep: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="cannot be read"):
        mivhead.load(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.miv"
    for content in (b"\x80\x04pickle", b"PK\x03\x04zip", b"hello", struct.pack("<Q", 2**62)):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match="cannot be read"):
            mivhead.load(path)
    for text in ("[1]", "[" * 100_000, '{"format":1,"config":' + '{"a":' * 5000):
        save_file({"x": ones(1)}, path, metadata={"mivhead": text})
        for use in (mivhead.load, model_file.read_info):
            with pytest.raises(ModelFileError):
                use(path)
    for missing in (tmp_path / "none.miv", tmp_path):
        with pytest.raises(ModelFileError):
            mivhead.load(missing)


@pytest.mark.parametrize("suffix", [".miv", ".onnx"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_a_pipe_or_a_device_is_not_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="not a file"):
        mivhead.load(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match="not a file"):
        mivhead.load(path)


def test_an_oversized_file_is_refused_unread(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(ModelFileError, match="at most 100"):
        mivhead.load(path)


def test_random_damage_is_detected(path: Path) -> None:
    """Flip bytes anywhere: the file is refused, or it says the same as before."""
    original = path.read_bytes()
    expected = mivhead.load(path).predict_proba(queries())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = bytearray(original)
        for position in rng.integers(0, len(data), 3):
            data[position] = rng.integers(256)
        path.write_bytes(data)
        try:
            again = mivhead.load(path)  # such as a space in the JSON that became a line break
        except ModelFileError:
            refused += 1
        else:
            np.testing.assert_array_equal(again.predict_proba(queries()), expected)
    assert refused > 290


@pytest.mark.parametrize(
    "name",
    [
        *("//host/share/net.onnx", "\\\\host\\net.onnx", "/etc/net.onnx", "../net.onnx", "a.py:b"),
        *("https://host/v1", "os:system", "hf://host/share", "net.onnx", "timm:resnet18+/net.onnx"),
        *("hf-onnx:owner/name", "hf-onnx:/etc", "open_clip:/etc", "open_clip:../x", "timm:../x"),
        *("", "x\x1b[2J", f"timm:{999 * 'x'}.onnx", "x" * 5000),
    ],
)
def test_a_backbone_elsewhere_is_not_opened(name: str, path: Path) -> None:
    identity = {"name": name, "weights": "0" * 64, "preprocessing": {}, "taps": ["a", "b"]}
    change(path, {"backbone": identity})
    with pytest.raises(MivError):
        mivhead.load(path).predict(np.zeros((1, 8, 8, 3), np.uint8))


def test_names_in_a_file_cannot_control_a_terminal(path: Path) -> None:
    change(path, {"classes": ["a", "b", "c", "x\x1b[2J\x07"]})
    model = mivhead.load(path)
    assert repr(model).isprintable()
    assert repr(model.classify(queries())[0]).isprintable()


def test_a_forged_model_answers_finitely_or_not_at_all(path: Path) -> None:
    name = "params.blocks.0.cap.value.weight"
    change(path, tensors={name: np.full_like(load_file(path)[name], 3e38)})
    model = mivhead.load(path)
    with pytest.raises(InputError, match="not finite"):
        model.predict_proba(queries())


def test_a_full_disk_leaves_the_old_model(path: Path, monkeypatch) -> None:
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(NotAvailableError, match="No space left"):
        mivhead.save(fitted(), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(NotAvailableError):
        mivhead.save(fitted(), path / "none" / "m.miv")


@pytest.mark.parametrize(
    "change_of", [{"accuracy": 1.5}, {"low": None}, {"wrong_names": None}, {"right": 99}]
)
def test_a_forged_estimate_is_refused(path: Path, change_of: dict[str, Any]) -> None:
    model = mivhead.load(path)
    assert model.estimate_ is None
    model.estimate_ = Estimate(0.5, 0.2, 0.8, 0.4, 0.1, 6, 3)
    model.save(path)
    assert mivhead.load(path).estimate_ == model.estimate_
    change(path, {"estimate": to_json(model.estimate_) | change_of})
    with pytest.raises(ModelFileError, match="estimate"):
        mivhead.load(path)
