"""A model that lives: changes without its images equal a fit from scratch, bit for bit."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

import mivhead
from mivhead import FewShotClassifier
from mivhead.errors import InputError, ModelFileError, NotAvailableError
from mivhead.images.imageset import from_images, label_images
from mivhead.images.sources import open_labelled
from tests.helpers.tiny_backbone import TinyBackbone
from tests.model.test_file import change, document_of

COLOURS = ("red", "green", "blue", "grey")


def noise(seed: int) -> np.ndarray:
    """A picture of its own for every seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)


def fit(shots: dict[int, str], **params: Any) -> FewShotClassifier:
    """Fit to pictures by number."""
    backbone = params.pop("backbone", None) or TinyBackbone(threshold=5)
    model = FewShotClassifier(backbone, **{"recipe": mivhead.Recipe(steps=2), **params})
    return model.fit([noise(i) for i in shots], list(shots.values()))


def assert_equal(model: FewShotClassifier, expected: FewShotClassifier) -> None:
    """The same classes, parameters and predictions, bit for bit."""
    assert model.classes_.tolist() == expected.classes_.tolist()
    mine, theirs = model.classifier_.state(), expected.classifier_.state()
    assert mine[0] == theirs[0]
    assert mine[1].keys() == theirs[1].keys()
    assert model.shots_.hashes == expected.shots_.hashes
    for name, tensor in mine[1].items():
        np.testing.assert_array_equal(tensor, theirs[1][name], err_msg=name)
    queries = TinyBackbone().extract([noise(i) for i in range(9000, 9005)])
    assert model.classify(queries) == expected.classify(queries)


START = {0: "red", 1: "red", 2: "red", 3: "green", 4: "green", 5: "blue"}


@settings(
    max_examples=25, phases=[Phase.generate], deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_any_sequence_of_changes_equals_a_fit_from_scratch(
    data: st.DataObject, tmp_path: Path
) -> None:
    """Adding, removing, renaming, merging and relabelling, with or without a file in between."""
    shots = dict(START)  # the picture's number and its label
    names = {i: f"image {place}" for place, i in enumerate(START)}
    backbone = TinyBackbone(threshold=5)
    model = fit(shots, backbone=backbone)
    for step in range(data.draw(st.integers(1, 5), label="changes")):
        action = data.draw(
            st.sampled_from(["add", "remove", "class", "rename", "merge", "relabel"])
        )
        classes = sorted(set(shots.values()))
        sizes = {name: list(shots.values()).count(name) for name in classes}
        if action == "add":
            new = {
                100 * (step + 1) + k: c
                for k, c in enumerate(
                    data.draw(st.lists(st.sampled_from(COLOURS), min_size=1, max_size=3))
                )
            }
            before = set(model.shots_.names)
            model.add([noise(i) for i in new], list(new.values()))
            hashes = dict(zip(model.shots_.names, model.shots_.hashes, strict=True))
            for i in new:
                names[i] = next(n for n in hashes if n not in before and hashes[n] == hash_of(i))
            shots |= new
        elif action == "remove":
            i = data.draw(st.sampled_from(sorted(shots)))
            if sizes[shots[i]] > 1:
                model.remove(names[i])
                del shots[i]
        elif action == "class" and len(classes) > 2:
            gone = data.draw(st.sampled_from(classes))
            model.remove(gone)
            shots = {i: c for i, c in shots.items() if c != gone}
        elif action == "rename":
            old, new_name = data.draw(st.sampled_from(classes)), f"class {step}"
            model.rename(old, new_name)
            shots = {i: new_name if c == old else c for i, c in shots.items()}
        elif action == "merge" and len(classes) > 2:
            old, into = data.draw(st.permutations(classes))[:2]
            model.rename(old, into, merge=True)
            shots = {i: into if c == old else c for i, c in shots.items()}
        elif action == "relabel":
            i = data.draw(st.sampled_from(sorted(shots)))
            target = data.draw(st.sampled_from(classes))
            if target != shots[i] and sizes[shots[i]] > 1:
                model.relabel(names[i], target)
                shots[i] = target
        if data.draw(st.booleans(), label="saved"):
            model.save(tmp_path / "m.miv")
            model = mivhead.load(tmp_path / "m.miv", backbone=backbone)
    order = data.draw(st.permutations(sorted(shots)), label="order of the fit from scratch")
    assert_equal(model, fit({i: shots[i] for i in order}))


def hash_of(i: int) -> str:
    from mivhead.extraction.cache import content_hash

    return content_hash(Image.fromarray(noise(i)))


def test_a_class_that_becomes_the_rest_is_fitted_again() -> None:
    model = fit(START)
    model.rename("blue", "other")
    assert_equal(model, fit({i: "other" if c == "blue" else c for i, c in START.items()}))
    assert model.thresholds().other == 1
    model.rename("other", "blue")
    assert_equal(model, fit(START))
    assert model.thresholds().other is None


def test_the_settings_of_the_blocks_survive_a_file(tmp_path: Path) -> None:
    """The preset that a backbone suggests after loading is not the one of the fit."""
    from mivhead import BlockPreset

    def backbone() -> TinyBackbone:
        tiny = TinyBackbone(threshold=5)
        blocks = (BlockPreset((2,), tau=50.0, heads=3), BlockPreset(heads=2, plain=True))
        tiny.preset = replace(tiny.preset, blocks=blocks)
        return tiny

    fit(START, backbone=backbone()).save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone(threshold=5))
    views = [name for name in load_file(tmp_path / "m.miv") if name.startswith("shots.views")]
    assert views == ["shots.views.block0.map"]  # the plain block needs none
    model.remove("image 1")
    kept = {i: label for i, label in START.items() if i != 1}
    assert_equal(model, fit(kept, backbone=backbone()))


def test_only_new_images_pass_the_backbone(tmp_path: Path) -> None:
    backbone = TinyBackbone(threshold=5)
    model = fit(START, backbone=backbone)
    before = backbone.seen
    model.add([noise(9)], ["red"])  # 4 shots have 2 views each, as 3 have
    assert backbone.seen == before + 3
    model.rename("red", "crimson")
    assert backbone.seen == before + 3
    model.remove("image 0 (2)")
    assert backbone.seen == before + 3  # the views of the others are still there
    model.remove("image 1")  # 2 shots have 3 views each: one more of each
    assert backbone.seen == before + 5


def test_pictures_give_the_views_of_the_image_itself(tmp_path: Path) -> None:
    """A view that is made later, of the picture in the file, equals one made of the image."""
    model = fit(START)
    model.save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone(threshold=5))
    model.remove("image 0", "image 1")
    scratch = fit({i: label for i, label in START.items() if i not in (0, 1)})
    mine, theirs = model.shots_.support(), scratch.shots_.support()
    assert len(mine.view_rows) == 4 + 2 * 3 + 4
    assert mine.views == theirs.views
    np.testing.assert_array_equal(mine.view_rows, theirs.view_rows)


def test_a_file_of_the_default_backbone_holds_no_views(tmp_path: Path) -> None:
    """They are made again of the pictures, bit for bit: for a change, and for a check."""
    model = fit(START, backbone="efficientnet_lite0", cache=False)
    views = model.shots_.views
    model.save(tmp_path / "m.miv")
    assert not [name for name in load_file(tmp_path / "m.miv") if "views" in name]
    again = mivhead.load(tmp_path / "m.miv")
    again.cache = False
    assert again.shots_.views is None
    assert again.shots_.view_count == model.shots_.view_count == len(views)
    assert again.check(folds=2).accuracy == model.check(folds=2).accuracy
    again.remove("image 0")
    model.remove("image 0")
    mine, theirs = again.classifier_.state()[1], model.classifier_.state()[1]
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_a_check_loads_no_backbone_that_a_file_names() -> None:
    """Unless it is the default one, of which files hold no views."""
    backbone = TinyBackbone(threshold=5)
    model = fit(START, backbone=backbone)
    model.shots_ = model.shots_.without_views()
    before = backbone.seen
    model.check(folds=2)
    assert backbone.seen == before


def test_views_made_by_another_rule_are_made_again(shots: Path, queries: Path) -> None:
    """So that all views in a model are those of its rule."""
    old, new = sorted(shots.glob("*/0.png")), sorted(queries.glob("*/0.png"))
    labels = [path.parent.name for path in old]
    model, other, scratch = (
        FewShotClassifier(TinyBackbone(threshold=15), random_state=seed) for seed in (0, 7, 0)
    )
    model.fit(old, labels)
    model.add(other.extract(label_images(from_images(new), labels, min_classes=1)))
    scratch.fit(old + new, labels + labels)
    views = model.shots_.support().views
    assert len(views) > len(labels)
    assert views == scratch.shots_.support().views


def test_labels_may_be_numbers() -> None:
    """On the command line, they are strings."""
    model = FewShotClassifier(TinyBackbone()).fit([noise(i) for i in range(4)], [3, 3, 10, 10])
    model.add([noise(5)], [7])
    model.rename("7", "8")
    model.relabel("image 1", 8)
    assert model.classes_.tolist() == [3, 8, 10]
    assert sum(model.shots_.counts.values()) == 5
    with pytest.raises(InputError, match="seven"):
        model.rename("8", "seven")


def test_duplicates_are_noticed(tmp_path: Path) -> None:
    model = fit(START)
    done = model.add([noise(1), noise(20), noise(20)], ["red", "red", "red"])
    assert done.text == "added 1 shot: red 1"
    (note,) = done.notes
    assert "image 0" in note
    assert "image 2" in note
    assert_equal(model, fit({**START, 20: "red"}))
    before = len(model.history_)
    assert model.add([noise(1)], ["red"]).text == "added nothing"
    assert len(model.history_) == before
    with pytest.raises(InputError, match="relabel"):
        model.add([noise(1)], ["blue"])


def test_copies_that_a_change_brings_together_count_once() -> None:
    images, labels = [noise(0), noise(0), noise(1), noise(2)], ["red", "blue", "blue", "green"]
    how = {"recipe": mivhead.Recipe(steps=2)}
    model = FewShotClassifier(TinyBackbone(threshold=5), **how).fit(images, labels)
    model.rename("red", "blue", merge=True)
    assert_equal(model, fit({0: "blue", 1: "blue", 2: "green"}))


BAD: dict[str, tuple[Any, str]] = {
    "last class": (lambda m: m.remove("red", "green"), "at least 2"),
    "last shot": (lambda m: m.remove("image 5"), "'blue'"),
    "nothing": (lambda m: m.remove(), "at least one"),
    "unknown shot": (lambda m: m.remove("image 55"), "Did you mean"),
    "unknown class": (lambda m: m.rename("rde", "x"), "Did you mean 'red'"),
    "taken name": (lambda m: m.rename("red", "blue"), "merge"),
    "merge into nothing": (lambda m: m.rename("red", "bleu", merge=True), "Did you mean 'blue'"),
    "no name": (lambda m: m.rename("red", " "), "empty"),
    "a decision": (lambda m: m.rename("red", "unsure"), "unsure"),
    "same name": (lambda m: m.rename("red", "red"), "already"),
    "relabel to unknown": (lambda m: m.relabel("image 0", "gren"), "new=True"),
    "relabel to itself": (lambda m: m.relabel("image 0", "red"), "already"),
    "relabel the last": (lambda m: m.relabel("image 5", "red"), "last"),
    "no labels": (lambda m: m.add([noise(9)]), "label"),
    "too few labels": (lambda m: m.add([noise(9)], ["a", "b"]), "2 labels"),
}


@pytest.fixture(scope="module")
def fitted() -> FewShotClassifier:
    return fit(START)


@pytest.mark.parametrize("name", BAD)
def test_bad_changes_are_refused_and_change_nothing(name: str, fitted: FewShotClassifier) -> None:
    attempt, words = BAD[name]
    before = fitted.classifier_, fitted.shots_, list(fitted.history_)
    with pytest.raises(InputError, match=words):
        attempt(fitted)
    assert (fitted.classifier_, fitted.shots_, fitted.history_) == before


def test_features_can_be_added(shots: Path, queries: Path) -> None:
    model = FewShotClassifier(TinyBackbone(threshold=0)).fit(shots)
    table = FewShotClassifier(TinyBackbone(threshold=0)).extract(open_labelled(queries))
    model.add(table)
    merged = [*shots.rglob("*.png"), *queries.rglob("*.png")]
    expected = FewShotClassifier(TinyBackbone(threshold=0)).fit(
        merged, [path.parent.name for path in merged]
    )
    assert_equal(model, expected)
    assert "red/0.png" in model.shots_.names
    assert "red/0 (2).png" in model.shots_.names
    foreign = replace(table, backbone=TinyBackbone("other").identity.as_json())
    with pytest.raises(InputError, match="'other'"):
        model.add(foreign)
    wide = FewShotClassifier(TinyBackbone(token=True)).extract(open_labelled(queries))
    with pytest.raises(InputError, match="other blocks or channels than those of the model"):
        model.add(replace(wide, backbone=None))
    with pytest.raises(InputError, match="no labels"):
        model.add(replace(table, labels=None))


def test_a_model_fitted_on_features_says_what_it_lacks(shots: Path, tmp_path: Path) -> None:
    table = FewShotClassifier(TinyBackbone(threshold=5)).extract(open_labelled(shots))
    table.save(tmp_path / "t.safetensors")
    table = type(table).load(tmp_path / "t.safetensors")
    model = FewShotClassifier(TinyBackbone(threshold=5)).fit(table)
    assert model.rename("red", "crimson").notes == ()
    assert model.remove("red/0.png", "red/1.png").notes == ()  # the file has pictures
    bare = FewShotClassifier(TinyBackbone(threshold=5)).fit(replace(table, pictures=None))
    (note,) = bare.remove("red/0.png", "red/1.png").notes
    assert "without 2 of its augmented views" in note


def test_a_file_without_pictures(shots: Path, tmp_path: Path) -> None:
    model = FewShotClassifier(TinyBackbone(threshold=5)).fit(shots)
    model.save(tmp_path / "all.miv")
    model.save(tmp_path / "private.miv", pictures=False)
    assert model.shots_.pictures[0] is not None  # in memory nothing changed
    assert "shots.pictures.data" in load_file(tmp_path / "all.miv")
    assert "shots.pictures.data" not in load_file(tmp_path / "private.miv")
    private = mivhead.load(tmp_path / "private.miv", backbone=TinyBackbone(threshold=5))
    assert private.shots_.names == model.shots_.names
    (note,) = private.remove("red/0.png", "red/1.png").notes
    assert "views" in note


def test_the_history_is_in_the_file(fitted: FewShotClassifier, tmp_path: Path) -> None:
    model = fit(START)
    model.rename("red", "crimson")
    model.relabel({"image 3": "blue", "image 0": "blue"})
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone(threshold=5))
    assert again.history_ == model.history_
    assert [each.action for each in again.history_] == ["rename", "relabel"]
    assert (
        again.history_[1].text == "moved image 3 from green to blue, image 0 from crimson to blue"
    )
    assert again.history_[0].when.endswith("Z")
    assert not fit(START).history_


def test_names_may_be_shortened(shots: Path) -> None:
    model = FewShotClassifier(TinyBackbone()).fit(shots)
    assert model.shots_.names[model.shots_.find(f"{shots}/red/1.png")] == "red/1.png"
    with pytest.raises(InputError, match="may be any of"):
        model.remove("1.png")


FORGED: dict[str, dict[str, Any]] = {
    "not an object": {"meta": {"shots": []}},
    "unknown key": {"shots": {"evil": 1}},
    "too few names": {"shots": {"names": ["a"]}},
    "equal names": {"shots": {"names": ["a"] * 6}},
    "no hash": {"shots": {"hashes": ["x"] * 6}},
    "other counts": {"shots": {"counts": [1, 1, 1]}},
    "swapped counts": {"shots": {"counts": [4, 1, 1]}},
    "negative views": {"shots": {"views": [-1, 1, 0, 0, 0, 0]}},
    "other views": {"shots": {"views": [1, 1, 0, 0, 0, 0]}},
    "many views": {"shots": {"views": [2**70, 0, 0, 0, 0, 0]}},
    "endless rule": {"shots": {"rule": {"threshold": 10**9}}},
    "rule": {"shots": {"rule": {"threshold": "many"}}},
    "other lengths": {"shots": {"pictures": [1] * 6}},
    "foreign tensor": {"tensors": {"shots.x": np.ones(1, np.float32)}},
    "history": {"meta": {"history": {}}},
    "history entry": {"meta": {"history": [{"action": 1}]}},
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_shots_are_refused(name: str, fitted: FewShotClassifier, tmp_path: Path) -> None:
    path = tmp_path / "m.miv"
    fitted.save(path)
    forged = dict(FORGED[name])
    if "shots" in forged:
        forged["meta"] = {"shots": document_of(path)["shots"] | forged.pop("shots")}
    change(path, **forged)
    with pytest.raises(ModelFileError):
        mivhead.load(path)


# Changes of files.


@pytest.fixture
def path(fitted: FewShotClassifier, tmp_path: Path) -> Path:
    fitted.save(tmp_path / "m.miv")
    return tmp_path / "m.miv"


def open_change(path: Path, **how: Any) -> Any:
    return mivhead.changing(path, backbone=TinyBackbone(threshold=5), **how)


def test_a_file_is_replaced_and_the_old_one_kept(path: Path) -> None:
    before = path.read_bytes()
    with open_change(path) as model:
        model.rename("red", "crimson")
    assert "crimson" in mivhead.load(path).classes_
    backup = path.with_name("m.miv.bak")
    assert backup.read_bytes() == before
    with open_change(path, keep_old=False) as model:
        model.rename("crimson", "red")
    assert backup.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["m.miv", "m.miv.bak"]


def test_a_folder_in_the_place_of_the_backup(path: Path) -> None:
    before = path.read_bytes()
    path.with_name("m.miv.bak").mkdir()
    with pytest.raises(InputError, match="folder"), open_change(path) as model:
        model.rename("red", "crimson")
    assert path.read_bytes() == before


def test_a_write_protected_file_is_not_changed(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root may write, `chmod` says nothing
    before = path.read_bytes()
    with pytest.raises(NotAvailableError, match="write-protected"), open_change(path) as model:
        model.rename("red", "crimson")
    assert path.read_bytes() == before


def test_a_failure_leaves_the_file_and_its_backup(path: Path, monkeypatch) -> None:
    """An unknown class; then a disk that is full while the changed model is written."""
    backup = path.with_name("m.miv.bak")
    backup.write_bytes(b"an older model")
    before = path.read_bytes()

    def rename(*names: str) -> None:
        with open_change(path) as model:
            for name in names:
                model.rename(name, f"new {name}")

    with pytest.raises(InputError, match="no such"):
        rename("red", "no such")
    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    with pytest.raises(NotAvailableError, match="No space left"):
        rename("red")
    assert path.read_bytes() == before
    assert backup.read_bytes() == b"an older model"
    assert {each.name for each in path.parent.iterdir()} == {"m.miv", "m.miv.bak"}


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are for systems with signals")
def test_a_kill_while_a_changed_model_is_written(path: Path, monkeypatch) -> None:
    """The file, and the backup of an earlier change, are as they were."""
    backup = path.with_name("m.miv.bak")
    backup.write_bytes(b"an older model")
    before = path.read_bytes()

    def half(tensors: Any, part: Path, **_: Any) -> None:
        Path(part).write_bytes(b"half of a model")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("safetensors.numpy.save_file", half)
    child = os.fork()
    if not child:
        with open_change(path) as model:
            model.rename("red", "crimson")
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert path.read_bytes() == before
    assert backup.read_bytes() == b"an older model"


def test_two_processes(path: Path) -> None:
    """One wins, and the other is told; so is one that changes the file without asking."""
    with open_change(path) as model:
        model.rename("red", "crimson")
        with (
            pytest.raises(NotAvailableError, match="Another process is changing"),
            open_change(path),
        ):
            pass
    assert "crimson" in mivhead.load(path).classes_

    def without_asking() -> None:
        with open_change(path) as model:
            model.rename("crimson", "red")
            shutil.copy(path.with_name("m.miv.bak"), path)

    with pytest.raises(NotAvailableError, match="by another program"):
        without_asking()


def test_a_model_that_was_not_changed_is_not_written(path: Path) -> None:
    before = path.stat().st_mtime_ns
    with open_change(path):
        pass
    with open_change(path, output=path.with_name("other.miv")):
        pass
    assert path.stat().st_mtime_ns == before
    assert list(path.parent.iterdir()) == [path]
    with open_change(path, output=path.with_name("other.miv")) as model:
        model.remove("blue")
    assert path.stat().st_mtime_ns == before
    assert mivhead.load(path.with_name("other.miv")).classes_.tolist() == ["green", "red"]
