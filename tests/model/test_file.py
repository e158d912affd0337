"""Model files: what is saved comes back, and nothing else gets in."""

import json
import shutil
import struct
import subprocess
import sys
from contextlib import nullcontext
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
from mivhead.methods import make_method, method_name
from mivhead.model import file as model_file
from mivhead.model.info import Estimate

GOLDEN = Path(__file__).parents[1] / "golden"
NAME = "support.block0.map"


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


def change(path: Path, meta: dict | None = None, tensors: dict | None = None, **drop: Any) -> None:
    """Write the file again with other contents, as a forger would: without a checksum."""
    with safe_open(path, "np") as file:
        document = json.loads(file.metadata()["mivhead"])
        document.pop("checksum.v1", None)
        values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    document.update(meta or {})
    values.update(tensors or {})
    for name in drop.get("without", []):
        values.pop(name)
    save_file(values, path, metadata={"mivhead": json.dumps(document)})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"recipe": Recipe.paper(prototype="mean", steps=3)},
        {"recipe": Recipe.paper(cross_attention=False, co_excitation=False, steps=3)},
        {"recipe": Recipe(temperature_order="inside", attention="dot", steps=3)},
        {"recipe": Recipe.paper(steps=3)},
        {"recipe": Recipe(vote="prior", steps=3)},
        {"recipe": Recipe(vote="logsumexp", steps=3)},
        {"recipe": Recipe(last_blocks=1, steps=3)},
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


def test_the_description_has_the_agreed_keys(path: Path) -> None:
    with safe_open(path, "np") as file:
        assert set(file.metadata()) == {"mivhead"}
        document = json.loads(file.metadata()["mivhead"])
        names = set(file.keys())
    assert set(document) == {
        "format", "method", "recipe", "config", "classes", "backbone", "seed", "library",
        "checksum.v1",
        "decision.v1",
    }  # fmt: skip
    assert document["format"] == 1
    assert document["method"] == "miv"
    assert {"support.block0.map", "support.block1.token"} <= names
    prefixes = ("support.block", "params.", "experts.", "decision.")
    assert all(name.startswith(prefixes) for name in names)


def test_integers_are_valid_classes(tmp_path: Path) -> None:
    classifier = MIVClassifier(Recipe(steps=1)).fit(np.eye(4, 8), [3, 3, 10, 10])
    mivhead.save(classifier, tmp_path / "m.miv")
    assert mivhead.load(tmp_path / "m.miv").classes_.tolist() == [3, 10]


def test_other_classes_are_refused_with_advice(tmp_path: Path) -> None:
    classifier = MIVClassifier(Recipe(steps=1)).fit(np.eye(4, 8), [0, 0, 1, 1])
    classifier.classes_ = np.array([0, "one"], object)
    with pytest.raises(InputError, match="convert the labels to strings"):
        mivhead.save(classifier, tmp_path / "m.miv")


@pytest.mark.parametrize("name", ["model-0.1.0.miv", "ablation-0.1.0.miv"])
def test_golden_files_of_every_release_load(name: str) -> None:
    classifier = mivhead.load(GOLDEN / name)
    with safe_open(GOLDEN / f"{name}.expected.safetensors", "np") as file:
        features = Features.from_tensors(
            {k: file.get_tensor(k) for k in file.keys() if k.startswith("block")}  # noqa: SIM118
        )
        expected = file.get_tensor("logits")
    found = classifier.classifier_.logits(features)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_a_recipe_without_newer_fields_is_the_papers() -> None:
    assert mivhead.load(GOLDEN / "model-0.1.0.miv").classifier_.head_.recipe == Recipe.paper(
        steps=3
    )


def test_an_ablation_of_an_earlier_version(tmp_path: Path) -> None:
    """It stores its parameters, and the layout of features of which it uses the last block."""
    classifier = mivhead.load(GOLDEN / "ablation-0.1.0.miv").classifier_
    assert classifier.recipe == Recipe.paper(last_blocks=1)
    assert method_name(classifier) == "miv-gap-blocks1"
    mivhead.save(classifier, tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv").classifier_
    assert model_file.read_info(tmp_path / "m.miv").method == "miv-gap-blocks1"
    assert again.layout_ == classifier.layout_
    assert again.recipe == classifier.recipe


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"last_blocks": 2}, "do not fit the layout"),
        ({"last_blocks": 3}, "last_blocks is 3, but the features have only 2"),
        ({"last_blocks": 0}, "last_blocks must be at least 1"),
        ({"last_blocks": "one"}, "config.params.last_blocks is not valid"),
        ({"use_views": 1}, "config.params.use_views is not valid"),
        ({"evil": 1}, "unknown key 'evil'"),
    ],
)
def test_a_changed_ablation_of_an_earlier_version_is_refused(
    params: dict, words: str, tmp_path: Path
) -> None:
    path = shutil.copy(GOLDEN / "ablation-0.1.0.miv", tmp_path / "m.miv")
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["mivhead"])["config"]
    config["params"] |= params
    change(path, {"config": config})
    with pytest.raises(ModelFileError, match=words):
        mivhead.load(path)


def test_loading_needs_no_backbone_and_no_timm(path: Path) -> None:
    code = (
        "import sys, mivhead; mivhead.load(sys.argv[1]);"
        "print([m for m in ('timm', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


TOKEN = "support.block1.token"
EXPERTS = ["experts.weights", "experts.block0.middle", "experts.block0.directions"] + [
    f"experts.{expert}.{part}"
    for expert in ("block0.second_order", "block0.layout", "block1.mean")
    for part in ("coefficients", "intercepts")
]

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "newer format": ({"meta": {"format": 2}}, "update mivhead"),
    "no format": ({"meta": {"format": None}}, "format number"),
    "format is a bool": ({"meta": {"format": True}}, "format number"),
    "other method": ({"meta": {"method": "magic"}}, "magic"),
    "unknown key": ({"meta": {"extra": 1}}, "unknown key 'extra'"),
    "newer section": ({"meta": {"shots.v99": {}}}, "newer version of mivhead.*'shots.v99'.*update"),
    "missing recipe": ({"meta": {"recipe": None}}, "recipe"),
    "unknown recipe key": ({"meta": {"recipe": {"depth": 3}}}, "unknown key 'depth'"),
    "recipe of a wrong type": ({"meta": {"recipe": {"eta": "0.1"}}}, "recipe.eta"),
    "seed of a wrong type": ({"meta": {"seed": "7"}}, "seed"),
    "too few classes": ({"meta": {"classes": ["a"]}}, "1 classes"),
    "wrong number of classes": ({"meta": {"classes": ["a", "b", "c"]}}, "3 classes"),
    "twice the same class": ({"meta": {"classes": ["a", "a", "b", "c"]}}, "distinct"),
    "classes of mixed types": ({"meta": {"classes": ["a", 1, "b", "c"]}}, "all strings"),
    "classes are no list": ({"meta": {"classes": "abcd"}}, "classes"),
    "backbone is no identity": ({"meta": {"backbone": {"name": "x"}}}, "backbone"),
    "missing tensor": ({"without": ["params.blocks.0.cap.key.weight"]}, "missing"),
    "unexpected tensor": ({"tensors": {"params.x": ones(1)}}, "unexpected"),
    "foreign tensor": ({"tensors": {"other": ones(1)}}, "other"),
    "wrong shape": ({"tensors": {"params.blocks.0.pooling.theta": ones(5)}}, "shape"),
    "wrong type": (
        {"tensors": {"params.blocks.0.pooling.theta": np.ones(4)}},
        "float64",
    ),
    "NaN": ({"tensors": {"params.blocks.0.pooling.theta": ones(4) * np.float32(np.nan)}}, "NaN"),
    "missing expert": ({"without": ["experts.block1.mean.intercepts"]}, "missing"),
    "no experts": ({"without": EXPERTS}, "missing"),
    "no weights": ({"without": ["experts.weights"]}, "missing"),
    "weights of a member too many": ({"tensors": {"experts.weights": ones(6)}}, "shape"),
    "NaN weights": ({"tensors": {"experts.weights": ones(5) * np.float32(np.nan)}}, "NaN"),
    "expert of a block that is not there": (
        {"tensors": {"experts.block2.mean.intercepts": ones(4)}},
        "unexpected",
    ),
    "expert for other classes": (
        {"tensors": {"experts.block1.mean.coefficients": ones(8, 5)}},
        "shape",
    ),
    "expert of a wrong type": (
        {"tensors": {"experts.block0.directions": np.eye(4)}},
        "float64",
    ),
    "experts in a recipe without": ({"meta": {"recipe": {}}}, "unexpected"),
    "infinite support": ({"tensors": {TOKEN: ones(6, 8) * np.float32(np.inf)}}, "infinity"),
    "support of other channels": ({"tensors": {TOKEN: ones(6, 9)}}, "support"),
    "one shot too few": ({"tensors": {TOKEN: ones(5, 8)}}, "same number"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(name: str, path: Path) -> None:
    changes, words = CHANGES[name]
    change(path, **changes)
    with pytest.raises(ModelFileError, match=words):
        mivhead.load(path)


def test_a_paper_model_has_no_experts_and_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "model.miv"
    mivhead.save(fitted(recipe="paper"), path)
    assert not [name for name in load_file(path) if name.startswith("experts.")]
    change(path, tensors={"experts.weights": ones(5)})
    with pytest.raises(ModelFileError, match="unexpected"):
        mivhead.load(path)


def test_a_forged_size_of_experts_costs_no_memory(path: Path) -> None:
    """A map of many patches would need large layouts; the tensors say what is there."""
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["mivhead"])["config"]
    config["blocks"][0] |= {"channels": 100_000, "heads": 1, "pool_sizes": []}
    wide = np.zeros((6, 100_000, 3, 3), np.float16)
    change(path, {"config": config}, {"support.block0.map": wide})
    with pytest.raises(ModelFileError, match=r"expected float32 of shape"):
        mivhead.load(path)  # 128 directions for each channel, and a layout of them


def test_a_forged_size_costs_no_memory(path: Path) -> None:
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["mivhead"])["config"]
    config["blocks"][1]["channels"] = 1_000_000
    config["blocks"][1]["heads"] = 1
    wide = np.zeros((6, 1_000_000), np.float16)
    change(path, {"config": config}, {"support.block1.token": wide})
    with pytest.raises(ModelFileError, match=r"expected float32 of shape"):
        mivhead.load(path)  # 3 x 10^12 values would not fit anywhere


def test_forged_numbers_of_shots_are_refused(path: Path) -> None:
    """The recipe "experts" keeps no features that would tell how many shots there are."""
    mivhead.save(fitted(recipe="experts"), path)
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["mivhead"])["config"]
    change(path, {"config": config | {"shots": [2**70, 2, 1, 2]}})
    with pytest.raises(ModelFileError, match="do not fit 4 classes"):
        mivhead.load(path)


@pytest.mark.parametrize("keep", [0, 4, 9, 300, -1])
def test_a_truncated_file_is_refused(keep: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="cannot be read"):
        mivhead.load(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    for content in (b"\x80\x04pickle", b"PK\x03\x04zip", b"hello", struct.pack("<Q", 2**60)):
        (tmp_path / "m.miv").write_bytes(content)
        with pytest.raises(ModelFileError, match="cannot be read"):
            mivhead.load(tmp_path / "m.miv")
    save_file({"x": ones(1)}, tmp_path / "m.miv", metadata={"mivhead": "[1]"})
    with pytest.raises(ModelFileError, match="metadata"):
        mivhead.load(tmp_path / "m.miv")
    with pytest.raises(ModelFileError, match="does not exist"):
        mivhead.load(tmp_path / "none.miv")
    with pytest.raises(ModelFileError, match="is a folder, not a model"):
        mivhead.load(tmp_path)


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


def test_a_file_without_a_checksum_loads(path: Path) -> None:
    expected = mivhead.load(path).predict_proba(queries())
    change(path)
    np.testing.assert_array_equal(mivhead.load(path).predict_proba(queries()), expected)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format":1,"config":' + '{"a":' * 5000])
def test_deeply_nested_metadata_is_refused(text: str, path: Path) -> None:
    save_file({"x": ones(1)}, path, metadata={"mivhead": text})
    for use in (mivhead.load, model_file.read_info):
        with pytest.raises(ModelFileError, match="cannot be read"):
            use(path)


def test_nesting_within_what_python_can_parse_is_refused(path: Path) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    change(path, {"config": {"blocks": deep}})
    with pytest.raises(ModelFileError, match="nested too deeply"):
        mivhead.load(path)


@pytest.mark.parametrize(
    "layout",
    [
        {"block0.map": [2**20] * 9},
        {"block0.map": [4, 3, 3], "block1.token": [10**400]},
        {"block0.map": [4, 3, 3], "block1.token": [[8]]},
        {"block0.map": [4, 3, 3], "block1.token": [8], "x": [1]},
        [],
    ],
)
def test_a_forged_layout_is_refused(layout: Any, path: Path) -> None:
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["mivhead"])["config"]
    change(path, {"config": config | {"layout": layout}})
    with pytest.raises(ModelFileError):
        mivhead.load(path)


def test_an_integer_that_is_no_float_is_refused(path: Path) -> None:
    with safe_open(path, "np") as file:
        recipe = json.loads(file.metadata()["mivhead"])["recipe"]
    change(path, {"recipe": recipe | {"eta": 10**400}})
    with pytest.raises(ModelFileError, match=r"recipe\.eta is not valid"):
        mivhead.load(path)


METHODS_OF_STRANGERS = (
    *("ctypes:cdll", "sklearn.pipeline:Pipeline", "mivhead.methods.ncc:NearestCentroid"),
    *(
        "os:system",
        "builtins:exec",
        "ncc:",
        ":",
        ".a:b",
        "a..b:C",
        "a\0:B",
        "x" * 5000,
        "",
        "a:b:c",
    ),
)


@pytest.mark.parametrize("method", METHODS_OF_STRANGERS)
def test_a_file_names_registered_methods_only(
    method: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreign(*_: object) -> None:
        raise AssertionError("a file has something imported or looked up")

    monkeypatch.setattr("mivhead.methods.registry._load", foreign)
    change(path, {"method": method, "config": {"params": {"memory": "x", "steps": []}}})
    with pytest.raises(ModelFileError, match="not registered") as caught:
        mivhead.load(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name",
    [
        *("//host/share/net.onnx", "\\\\host\\net.onnx", "/etc/net.onnx", "../net.onnx", "a.py:b"),
        *("https://host/v1", "os:system", "hf://host/share", "timm:resnet18+/net.onnx"),
    ],
)
def test_a_backbone_elsewhere_is_not_opened(name: str, path: Path) -> None:
    identity = {"name": name, "weights": "0" * 64, "preprocessing": {}, "taps": ["a", "b"]}
    change(path, {"backbone": identity})
    with pytest.raises(NotAvailableError, match="a file alone must not send"):
        mivhead.load(path).predict(np.zeros((1, 8, 8, 3), np.uint8))


@pytest.mark.parametrize(
    "name",
    ["", "x\x1b[2J", *(f"{kind}:{999 * 'x'}.onnx" for kind in ("timm", "hf", "")), "x" * 5000],
)
def test_a_long_name_of_a_backbone_is_an_error_of_one_line(name: str, path: Path) -> None:
    identity = {"name": name, "weights": "0" * 64, "preprocessing": {}, "taps": ["a", "b"]}
    change(path, {"backbone": identity})
    with pytest.raises(MivError):
        mivhead.load(path).predict(np.zeros((1, 8, 8, 3), np.uint8))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (["a", "b", "c", "\ud800"], "not valid UTF-8"),
        ([1, 2, 3, 10**400], "more than 64 bits"),
    ],
)
def test_forged_classes_are_refused(classes: list, words: str, path: Path) -> None:
    change(path, {"classes": classes})
    with pytest.raises(ModelFileError, match=words):
        mivhead.load(path)


def test_names_in_a_file_cannot_control_a_terminal(path: Path) -> None:
    change(path, {"classes": ["a", "b", "c", "x\x1b[2J\x07"]})
    model = mivhead.load(path)
    assert repr(model).isprintable()
    assert repr(model.classify(queries())[0]).isprintable()


@pytest.mark.parametrize("scale", [5, ["1"], [1], [0, 0, 1], [2000, 0], [10**400, 0]])
def test_a_forged_scale_is_refused(scale: Any, path: Path) -> None:
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["mivhead"])["config"]
    change(path, {"config": config | {"scale": scale}})
    with pytest.raises(ModelFileError):
        mivhead.load(path)


def test_a_forged_model_answers_finitely_or_not_at_all(path: Path) -> None:
    name = "params.blocks.0.cap.value.weight"
    with safe_open(path, "np") as file:
        values = file.get_tensor(name)
    change(path, tensors={name: np.full_like(values, 3e38)})
    model = mivhead.load(path)
    with pytest.raises(InputError, match="not finite"):
        model.predict_proba(queries())


def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.miv"
    mivhead.save(make_method("svm").fit(np.eye(4, 8), list("aabb")), path)
    with safe_open(path, "np") as file:
        vectors = file.get_tensor("params.vectors")
    change(path, tensors={"params.vectors": vectors[:-1]})
    with pytest.raises(ModelFileError, match=r"'labels' has shape \(4,\), expected vector=3"):
        mivhead.load(path)


def test_refusing_a_damaged_file_is_cheap(path: Path) -> None:
    """Nothing is built before the file is trusted: far fewer functions are called."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1

    def calls(refused: bool) -> int:
        events: list[str] = []
        with pytest.raises(ModelFileError) if refused else nullcontext():
            sys.setprofile(lambda _frame, event, _argument: events.append(event))
            try:
                mivhead.load(path)
            finally:
                sys.setprofile(None)
        return events.count("call")

    calls(False)  # imports what it needs
    intact = calls(False)
    path.write_bytes(data)
    assert calls(True) < intact / 2


def test_a_full_disk_leaves_the_old_model(path: Path, monkeypatch) -> None:
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(NotAvailableError, match="No space left"):
        mivhead.save(fitted(), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError, match="folder exists"):
        mivhead.save(fitted(), tmp_path / "none" / "m.miv")


def test_describe(path: Path) -> None:
    description = model_file.read_info(path)
    assert description.method == "miv"
    assert description.config["shots"] == [1, 2, 1, 2]
    assert description.library == mivhead.__version__


# Optional sections.


def write_notes(model: Any) -> tuple[Any, dict[str, np.ndarray]] | None:
    notes = getattr(model, "notes_", None)
    return None if notes is None else ({"text": notes}, {"length": np.array([len(notes)])})


def read_notes(model: Any, document: Any, tensors: Any) -> None:
    if tensors["length"].item() != len(document["text"]):
        raise InputError("the notes have another length.")
    model.notes_ = document["text"]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> None:
    section = model_file.Section("notes.v1", "notes", write_notes, read_notes)
    monkeypatch.setattr(model_file, "SECTIONS", (*model_file.SECTIONS, section))


def test_a_section_is_saved_and_comes_back(notes: None, path: Path) -> None:
    model = mivhead.load(path)
    assert not hasattr(model, "notes_")
    model.notes_ = "seen in May"
    model.save(path)
    assert load_file(path)["notes.length"].tolist() == [11]
    assert mivhead.load(path).notes_ == "seen in May"
    assert model_file.read_info(path).method == "miv"
    change(path, {"notes.v1": {"text": "May"}})
    with pytest.raises(ModelFileError, match="cannot be used: the notes have another length"):
        mivhead.load(path)


def test_tensors_of_a_section_that_is_not_there(notes: None, path: Path) -> None:
    change(path, tensors={"notes.length": ones(1)})
    with pytest.raises(ModelFileError, match=r"'notes\.length' is unexpected"):
        mivhead.load(path)


def test_a_section_of_a_newer_version(notes: None, path: Path) -> None:
    model = mivhead.load(path)
    model.notes_ = "seen in May"
    model.save(path)
    model_file.SECTIONS = model_file.SECTIONS[:-1]  # the fixture restores it
    for read in (mivhead.load, model_file.read_info):
        with pytest.raises(ModelFileError, match=r"newer version of mivhead.*'notes\.v1'"):
            read(path)


@pytest.mark.parametrize("name", ["model-0.1.0.miv", "ablation-0.1.0.miv"])
def test_an_old_model_is_refitted_with_its_own_recipe(name: str) -> None:
    model = mivhead.load(GOLDEN / name)
    assert model.recipe == model.classifier_.recipe


def test_a_mean_head_without_newer_fields_loads(tmp_path: Path) -> None:
    X, y = np.eye(4, 8, dtype=np.float32), ["a", "a", "b", "b"]
    mivhead.save(make_method("miv-mean", random_state=0).fit(X, y), tmp_path / "m.miv")
    tensors, document = files.read(tmp_path / "m.miv")
    for newer in ("self_mask", "start", "objective", "vote"):
        document["recipe"].pop(newer)
    files.write(tmp_path / "m.miv", tensors, document)
    assert mivhead.load(tmp_path / "m.miv").recipe == Recipe.paper(prototype="mean")


# The decision rule, an optional section.


def test_decisions_come_back(path: Path) -> None:
    before, again = fitted(), mivhead.load(path)
    found = again.classify(queries(), coverage=0.5)
    thresholds = before.decision_.thresholds(coverage=0.5)
    assert again.thresholds(coverage=0.5) == thresholds
    assert [each.unknown for each in found] == before.score_unknown(queries())[1].tolist()
    assert [each.decision for each in found] == before.decide(queries()).tolist()
    assert [each.prediction_set for each in found] == before.predict(queries(), coverage=0.5)
    assert again.no_decision is None


def test_a_model_of_an_earlier_version_always_gives_a_class() -> None:
    model = mivhead.load(GOLDEN / "model-0.1.0.miv")
    saved = load_file(GOLDEN / "model-0.1.0.miv.expected.safetensors")
    features = Features.from_tensors({k: v for k, v in saved.items() if k.startswith("block")})
    found = model.classify(features)
    assert [each.decision for each in found] == [each.label for each in found]
    assert {each.unknown for each in found} == {None}
    assert "earlier version" in model.no_decision
    with pytest.raises(InputError, match="no prediction sets: the model file comes from"):
        model.classify(features, coverage=0.9)
    with pytest.raises(InputError, match="fit it again"):
        model.classifier_.decide(features)


DECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"meta": {"decision.v1": {"weight": 0.1, "x": 1}}}, "unknown key 'x'"),
    "weight": ({"meta": {"decision.v1": {"weight": "0.1"}}}, r"decision\.v1\.weight"),
    "missing": ({"without": ["decision.own"]}, r"'decision\.own' is missing"),
    "extra": ({"tensors": {"decision.x": ones(1)}}, r"'decision\.x' is unexpected"),
    "type": ({"tensors": {"decision.own": np.ones(4)}}, "another type or shape"),
    "shape": ({"tensors": {"decision.own": ones(4, 1)}}, "another type or shape"),
    "nan": ({"tensors": {"decision.own": ones(4) * np.float32(np.nan)}}, "NaN"),
    "count": ({"tensors": {"decision.own": ones(3)}}, "do not fit"),
    "rows": ({"tensors": {"decision.rows": np.array([1, 2, 4, 6])}}, "do not fit"),
    "negative": ({"tensors": {"decision.rows": np.array([1, 2, 4, -1])}}, "do not fit"),
    "labels": ({"tensors": {"decision.labels": np.array([0, 1, 1, 2, 3, 4])}}, "do not fit"),
    "other": ({"meta": {"decision.v1": {"weight": 0.1, "other": 4}}}, "do not fit"),
    "channels": ({"tensors": {"decision.background": np.ones((1, 9), np.float16)}}, "do not fit"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_forged_decision_is_refused(path: Path, name: str) -> None:
    changes, message = DECISIONS[name]
    change(path, **changes)
    with pytest.raises(ModelFileError, match=message):
        mivhead.load(path)


@pytest.mark.parametrize(
    "change_of",
    [
        {"accuracy": 1.5},
        {"low": None},
        {"per_class": [0.5]},
        {"right": 99},
        {"tested": "many"},
        {"more": 1},
    ],
)
def test_a_forged_estimate_is_refused(path: Path, change_of: dict[str, Any]) -> None:
    model = mivhead.load(path)
    assert model.estimate_ is None
    model.estimate_ = Estimate(0.5, 0.2, 0.8, 6, 3, (0.5, 0.5, None, None))
    model.save(path)
    assert mivhead.load(path).estimate_ == model.estimate_
    change(path, {"estimate.v1": to_json(model.estimate_) | change_of})
    with pytest.raises(ModelFileError, match="estimate"):
        mivhead.load(path)


@pytest.fixture
def sparse(tmp_path: Path) -> tuple[Path, Features]:
    """A compact file of features as after a ReLU, with a negative zero, and these features."""
    rng = np.random.default_rng(0)
    maps = np.maximum(rng.normal(size=(6, 64, 14, 14)) - 1, 0).astype(np.float16)
    maps[0, 0, 0, :2] = -0.0, 6e-8
    features = Features([maps])
    classifier = MIVClassifier(Recipe.paper(steps=1), random_state=0)
    path = tmp_path / "m.miv"
    mivhead.save(classifier.fit(features, list("aabbcc")), path, compact=True)
    return path, features


def test_zeros_of_features_are_not_written(sparse: tuple[Path, Features]) -> None:
    path, features = sparse
    whole = path.with_name("whole.miv")
    mivhead.save(mivhead.load(path), whole)
    assert "support.block0.map" in load_file(whole)  # as others read it
    maps = features.tensors["block0.map"]
    with safe_open(path, "np") as file:
        names = [name for name in file.keys() if "support" in name]  # noqa: SIM118
        size = sum(file.get_tensor(name).nbytes for name in names)
    assert names == ["sparse.support.block0.map.mask", "sparse.support.block0.map.values"]
    assert size < maps.nbytes / 4
    again = mivhead.load(path).classifier_.support_.tensors["block0.map"]
    assert again.dtype == maps.dtype
    assert again.tobytes() == maps.tobytes()  # the sign of a zero too


def nothing(mask: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    return {f"sparse.{NAME}.mask": mask[:0], f"sparse.{NAME}.values": values[:0]}


@pytest.mark.parametrize(
    "forge",
    [
        lambda mask, values: ({"sparse.v1": []}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: "6"}}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: []}}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: [True] * 4}}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: ["6"]}}, nothing(mask, values)),
        lambda mask, values: ({"sparse.v1": {NAME: [0, -1, -1]}}, nothing(mask, values)),
        lambda mask, values: ({"sparse.v1": {NAME: [0, 10**30]}}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: [10**30]}}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: [6, 64, 14, 15]}}, {}),
        lambda mask, values: ({"sparse.v1": {NAME: [1] * 40 + [len(mask) * 8]}}, {}),
        lambda mask, values: ({"sparse.v1": {"params": [6, 64, 14, 14]}}, {}),
        lambda mask, values: ({}, {f"sparse.{NAME}.mask": mask[:-1]}),
        lambda mask, values: ({}, {f"sparse.{NAME}.mask": mask | 1}),
        lambda mask, values: ({}, {f"sparse.{NAME}.mask": mask.astype(np.int32)}),
        lambda mask, values: ({}, {f"sparse.{NAME}.values": values[:-1]}),
        lambda mask, values: ({}, {f"sparse.{NAME}.values": values[:, None]}),
        lambda mask, values: ({}, {f"sparse.{NAME}.values": values.astype(np.int64)}),
        lambda mask, values: ({}, {NAME: np.ones((6, 64, 14, 14), np.float16)}),
        lambda mask, values: ({}, {"sparse.more.mask": mask}),
    ],
)
def test_forged_zeros_are_refused(sparse: tuple[Path, Features], forge: Any) -> None:
    path, _ = sparse
    tensors = load_file(path)
    mask, values = (tensors[f"sparse.{NAME}.{part}"] for part in ("mask", "values"))
    change(path, *forge(mask, values))
    with pytest.raises(ModelFileError, match=r"m\.miv cannot be used"):
        mivhead.load(path)


def test_zeros_beyond_the_limit_are_refused(sparse: tuple[Path, Features], monkeypatch) -> None:
    path, features = sparse
    monkeypatch.setattr(files, "MAX_BYTES", features.tensors["block0.map"].nbytes - 1)
    with pytest.raises(ModelFileError, match="has wrong sizes"):
        mivhead.load(path)
