"""A model that lives: changes without its images equal a fit from scratch, bit for bit."""

import json
import shutil
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
from tests.model.test_file import change

GOLDEN = Path(__file__).parents[1] / "golden"
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


def assert_equal(
    model: FewShotClassifier, expected: FewShotClassifier, *, exact: bool = True
) -> None:
    """The same classes, parameters and predictions, bit for bit; or close predictions."""
    assert model.classes_.tolist() == expected.classes_.tolist()
    mine, theirs = model.classifier_._state(), expected.classifier_._state()
    assert mine[0] == theirs[0]
    assert mine[1].keys() == theirs[1].keys()
    assert model.shots_.hashes == expected.shots_.hashes
    if not exact:
        queries = TinyBackbone().extract([noise(i) for i in range(9000, 9005)])
        found = model.predict_proba(queries)
        np.testing.assert_allclose(found, expected.predict_proba(queries), atol=1e-3)
        return
    for name, tensor in mine[1].items():
        np.testing.assert_array_equal(tensor, theirs[1][name], err_msg=name)
    queries = TinyBackbone().extract([noise(i) for i in range(9000, 9005)])
    np.testing.assert_array_equal(model.predict_proba(queries), expected.predict_proba(queries))


START = {0: "red", 1: "red", 2: "red", 3: "green", 4: "green", 5: "blue"}


@settings(
    max_examples=25, phases=[Phase.generate], deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_any_sequence_of_changes_equals_a_fit_from_scratch(
    data: st.DataObject, tmp_path: Path
) -> None:
    """Adding, removing, renaming, merging and relabelling, with or without a file in between.

    A model that was renamed keeps what it learned, until the next change.
    """
    exact = True
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
            exact = True
            hashes = dict(zip(model.shots_.names, model.shots_.hashes, strict=True))
            for i in new:
                names[i] = next(n for n in hashes if n not in before and hashes[n] == hash_of(i))
            shots |= new
        elif action == "remove":
            i = data.draw(st.sampled_from(sorted(shots)))
            if sizes[shots[i]] > 1:
                model.remove(names[i])
                exact = True
                del shots[i]
        elif action == "class" and len(classes) > 2:
            gone = data.draw(st.sampled_from(classes))
            model.remove(gone)
            exact = True
            shots = {i: c for i, c in shots.items() if c != gone}
        elif action == "rename":
            old, new_name = data.draw(st.sampled_from(classes)), f"class {step}"
            model.rename(old, new_name)
            exact = False
            shots = {i: new_name if c == old else c for i, c in shots.items()}
        elif action == "merge" and len(classes) > 2:
            old, into = data.draw(st.permutations(classes))[:2]
            model.rename(old, into, merge=True)
            exact = True
            shots = {i: into if c == old else c for i, c in shots.items()}
        elif action == "relabel":
            i = data.draw(st.sampled_from(sorted(shots)))
            target = data.draw(st.sampled_from(classes))
            if target != shots[i] and sizes[shots[i]] > 1:
                model.relabel(names[i], target)
                exact = True
                shots[i] = target
        if data.draw(st.booleans(), label="saved"):
            model.save(tmp_path / "m.miv")
            model = mivhead.load(tmp_path / "m.miv", backbone=backbone)
    order = data.draw(st.permutations(sorted(shots)), label="order of the fit from scratch")
    assert_equal(model, fit({i: shots[i] for i in order}), exact=exact)


def hash_of(i: int) -> str:
    from mivhead.extraction.cache import content_hash

    return content_hash(Image.fromarray(noise(i)))


@pytest.fixture
def no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every fit fail."""
    monkeypatch.setattr("mivhead.MIVClassifier.fit_support", lambda *_: 1 / 0)


RECIPES = {"default": mivhead.Recipe(steps=2), "experts": "experts", "paper": "paper"}


@pytest.mark.parametrize("shots", [(3, 2, 1), (2, 2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_another_name_changes_no_prediction(
    recipe: Any, shots: tuple[int, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    labels = [
        name for name, n in zip(("blue", "green", "red"), shots, strict=True) for _ in range(n)
    ]
    model = fit(dict(enumerate(labels)), recipe=recipe)
    model.check()
    queries = TinyBackbone().extract([noise(i) for i in range(9000, 9005)])
    before, seen = model.predict_proba(queries), model.classify(queries)
    estimate = dict(zip(model.classes_.tolist(), model.estimate_.per_class, strict=True))
    request.getfixturevalue("no_fit")
    assert model.rename("blue", "zinc").notes == ()
    model.save(tmp_path / "m.miv")
    for renamed in (model, mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone(threshold=5))):
        assert renamed.classes_.tolist() == ["green", "red", "zinc"]
        assert renamed.shot_counts == dict(
            zip(renamed.classes_, (*shots[1:], shots[0]), strict=True)
        )
        np.testing.assert_allclose(renamed.predict_proba(queries), before[:, [1, 2, 0]], atol=1e-5)
        for now, then in zip(renamed.classify(queries), seen, strict=True):
            assert now.decision == {"blue": "zinc"}.get(then.decision, then.decision)
            assert now.unknown == pytest.approx(then.unknown, abs=1e-4)
        assert renamed.estimate_.per_class == tuple(estimate[n] for n in ("green", "red", "blue"))
        assert [each.text for each in renamed.history_] == ["renamed blue to zinc"]


def test_a_name_at_the_same_place_gives_the_model_of_a_fit_from_scratch() -> None:
    model = fit(START)
    model.rename("green", "grey")
    assert_equal(model, fit({i: "grey" if c == "green" else c for i, c in START.items()}))


def test_a_renamed_class_keeps_its_frequency(request: pytest.FixtureRequest) -> None:
    prior = {"red": 1.0, "green": 2.0, "blue": 5.0}
    model = fit(START, class_prior=prior)
    queries = TinyBackbone().extract([noise(i) for i in range(9000, 9005)])
    before = model.predict_proba(queries)
    request.getfixturevalue("no_fit")
    model.rename("blue", "zinc")
    assert model.class_prior == {"red": 1.0, "green": 2.0, "zinc": 5.0}
    assert prior["blue"] == 5.0  # what was given stays as it was
    np.testing.assert_allclose(model.predict_proba(queries), before[:, [1, 2, 0]], atol=1e-5)
    uniform = model.classify(queries, class_prior="uniform")  # follows from the prior of the fit
    assert len(uniform) == 5


def test_frequencies_follow_the_classes_of_a_changed_model() -> None:
    """A model whose classes have frequencies can be changed, too."""
    prior = {"red": 1.0, "green": 2.0, "blue": 6.0}
    model = fit(START, class_prior=prior)
    change = model.add([noise(9001)], ["grey"])
    assert model.class_prior == {**prior, "grey": 3.0}
    assert any("grey is expected to be as frequent" in note for note in change.notes)
    model.rename("grey", "red", merge=True)
    assert model.class_prior == {"red": 4.0, "green": 2.0, "blue": 6.0}
    assert not model.rename("blue", "other").notes  # fitted again
    model.remove("red")
    assert model.class_prior == model.classifier_.class_prior == {"green": 2.0, "other": 6.0}
    left = {"green": 2.0, "other": 6.0}
    shots = {i: "other" if c == "blue" else c for i, c in START.items() if c != "red"}
    assert_equal(model, fit(shots, class_prior=left))
    with pytest.raises(InputError, match="at least 2"):
        model.remove("green")
    assert model.class_prior == left  # what fails changes nothing


def test_frequencies_may_name_numbers_by_strings(tmp_path: Path) -> None:
    numbers = {"red": 1, "green": 2, "blue": 3}
    model = fit({i: numbers[c] for i, c in START.items()}, class_prior={"1": 1, "2": 2, "3": 5})
    model.rename(1, 7)
    model.save(tmp_path / "m.miv")
    assert mivhead.load(tmp_path / "m.miv").class_prior == {2: 2.0, 3: 5.0, 7: 1.0}


def test_a_class_that_becomes_the_rest_is_fitted_again() -> None:
    model = fit(START)
    model.rename("blue", "other")
    assert_equal(model, fit({i: "other" if c == "blue" else c for i, c in START.items()}))
    assert model.thresholds().other == 1
    model.rename("other", "blue")
    assert_equal(model, fit(START))
    assert model.thresholds().other is None


@pytest.mark.parametrize("method", ["ncc", "logistic", "miv-paper", "miv-blocks1", "ridge"])
def test_other_methods_can_be_changed_too(method: str, tmp_path: Path) -> None:
    params = {"method": method, "recipe": None}
    model = fit(START, **params)
    model.save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone(threshold=5))
    model.add([noise(7), noise(8)], ["green", "grey"])
    model.remove("image 0")
    kept = {i: label for i, label in START.items() if i != 0} | {7: "green", 8: "grey"}
    assert_equal(model, fit(kept, **params))


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
    assert again.view_count == model.view_count == len(views)
    assert again.check(folds=2).accuracy == model.check(folds=2).accuracy
    again.remove("image 0")
    model.remove("image 0")
    mine, theirs = again.classifier_._state()[1], model.classifier_._state()[1]
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


def test_integers_are_labels_too(tmp_path: Path) -> None:
    model = FewShotClassifier(TinyBackbone()).fit([noise(i) for i in range(4)], [3, 3, 10, 10])
    model.add([noise(5)], [7])
    model.rename("7", "8")
    model.relabel("image 1", 8)
    assert model.classes_.tolist() == [3, 8, 10]
    assert model.shots_.counts == {3: 1, 8: 2, 10: 2}
    with pytest.raises(InputError, match="integers, and 'seven' is not one"):
        model.rename("8", "seven")


def test_duplicates_are_noticed(tmp_path: Path) -> None:
    model = fit(START)
    done = model.add([noise(1), noise(20), noise(20)], ["red", "red", "red"])
    assert done.text == "added 1 shot: red 1"
    assert sorted(done.notes) == [
        "image 0 is a duplicate of image 1 (the same content): not added again.",
        "image 2 is a duplicate of image 1 (the same content): not added again.",
    ]
    assert_equal(model, fit({**START, 20: "red"}))
    before = len(model.history_)
    assert model.add([noise(1)], ["red"]).text == "added nothing"
    assert len(model.history_) == before
    with pytest.raises(
        InputError, match=r"same content as the shot image 1 of the class 'red'.*relabel"
    ):
        model.add([noise(1)], ["blue"])


def test_names_of_classes_that_are_numbers() -> None:
    """On the command line, they are strings."""
    images = [noise(i) for i in range(4)]
    model = FewShotClassifier(TinyBackbone(), recipe=mivhead.Recipe(steps=2), threshold=0)
    model.fit(images, [1.0, 1.0, 2.0, 2.0])
    model.rename("1.0", "7")
    model.add([noise(9)], ["3"])
    assert model.classes_.tolist() == [2.0, 3.0, 7.0]
    assert model.classes_.dtype == float
    with pytest.raises(InputError, match="are numbers, and 'x' is not one"):
        model.rename("3.0", "x")


BAD: dict[str, tuple[Any, str]] = {
    "last class": (lambda m: m.remove("red", "green"), "would have 1 class"),
    "last shot": (lambda m: m.remove("image 5"), "leave the class 'blue' without shots.*name it"),
    "nothing": (lambda m: m.remove(), "Name at least one"),
    "unknown shot": (lambda m: m.remove("image 55"), "no class or shot 'image 55'. Did you mean"),
    "unknown class": (lambda m: m.rename("rde", "x"), "no class 'rde'. Did you mean 'red'"),
    "taken name": (lambda m: m.rename("red", "blue"), r"merge=True \(--merge\)"),
    "merge into nothing": (lambda m: m.rename("red", "bleu", merge=True), "Did you mean 'blue'"),
    "no name": (lambda m: m.rename("red", " "), "must not be empty"),
    "no class": (lambda m: m.add([noise(9)], [""]), "must not be empty"),
    "same name": (lambda m: m.rename("red", "red"), "already called 'red'"),
    "relabel unknown": (lambda m: m.relabel("image 9", "red"), "no shot 'image 9'. Did you mean"),
    "relabel to unknown": (lambda m: m.relabel("image 0", "gren"), "'green'.*new=True"),
    "relabel to itself": (lambda m: m.relabel("image 0", "red"), "is already a shot of 'red'"),
    "relabel the last": (lambda m: m.relabel("image 5", "red"), "last shot of the class 'blue'"),
    "no labels": (lambda m: m.add([noise(9)]), "Give a label"),
    "too few labels": (lambda m: m.add([noise(9)], ["a", "b"]), "1 images, but 2 labels"),
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
    model = FewShotClassifier(TinyBackbone(threshold=0)).fit_folder(shots)
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
    model = FewShotClassifier(TinyBackbone(threshold=5)).fit_table(table)
    assert model.rename("red", "crimson").notes == ()
    assert model.remove("red/0.png", "red/1.png").notes == ()  # the file has pictures
    bare = FewShotClassifier(TinyBackbone(threshold=5)).fit_table(replace(table, pictures=None))
    (note,) = bare.remove("red/0.png", "red/1.png").notes
    assert "without 2 of its augmented views" in note


def test_a_compact_file(shots: Path, tmp_path: Path) -> None:
    model = FewShotClassifier(TinyBackbone(threshold=5)).fit_folder(shots)
    model.save(tmp_path / "all.miv")
    model.save(tmp_path / "compact.miv", compact=True)
    assert model.shots_.pictures[0] is not None  # in memory nothing changed
    names = set(load_file(tmp_path / "compact.miv"))
    assert not [name for name in names if name.startswith("shots.")]
    assert {"shots.pictures.data", "shots.views.block0.map"} < set(load_file(tmp_path / "all.miv"))
    compact = mivhead.load(tmp_path / "compact.miv", backbone=TinyBackbone(threshold=5))
    assert compact.shots_.names == model.shots_.names
    (note,) = compact.remove("red/0.png").notes
    assert "compact" in note


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
    model = FewShotClassifier(TinyBackbone()).fit_folder(shots)
    assert model.shots_.names[model.shots_.find(f"{shots}/red/1.png")] == "red/1.png"
    with pytest.raises(InputError, match=r"'1\.png' may be any of 3 shots"):
        model.remove("1.png")


def test_a_model_of_0_1_0_can_be_changed_as_far_as_possible() -> None:
    model = mivhead.load(GOLDEN / "model-0.1.0.miv")
    counts = model.shots_.counts
    first = model.classes_[0]
    assert model.shots_.names[0] == f"{first} #1"
    assert model.rename(first, "renamed").action == "rename"
    assert "renamed" in model.classes_
    assert sum(model.shots_.counts.values()) == sum(counts.values())


def test_an_ablation_of_0_1_0_keeps_too_little() -> None:
    with pytest.raises(InputError, match="earlier version of mivhead wrote it"):
        mivhead.load(GOLDEN / "ablation-0.1.0.miv").rename("a", "b")


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "not an object": ({"meta": {"shots.v1": []}}, "shots.v1 must be an object"),
    "unknown key": ({"shots": {"evil": 1}}, "unknown key 'evil'"),
    "too few names": ({"shots": {"names": ["a"]}}, "names does not fit 6 shots"),
    "equal names": ({"shots": {"names": ["a"] * 6}}, "not distinct"),
    "no hash": ({"shots": {"hashes": ["x"] * 6}}, "SHA-256"),
    "other counts": ({"shots": {"counts": [1, 1, 1]}}, "counts do not fit"),
    "negative views": ({"shots": {"views": [-1, 1, 0, 0, 0, 0]}}, "negative"),
    "other views": ({"shots": {"views": [1, 1, 0, 0, 0, 0]}}, "do not fit the shots"),
    "many views": ({"shots": {"views": [2**70, 0, 0, 0, 0, 0]}}, "do not fit the shots"),
    "swapped counts": ({"shots": {"counts": [4, 1, 1]}}, r"counts are \[4, 1, 1\]"),
    "endless rule": ({"shots": {"rule": {"threshold": 10**9}}}, "threshold is too large"),
    "other lengths": ({"shots": {"pictures": [1] * 6}}, "pictures do not fit"),
    "rule": ({"shots": {"rule": {"threshold": "many"}}}, "threshold is not valid"),
    "foreign tensor": ({"tensors": {"shots.x": np.ones(1, np.float32)}}, "'x' is unexpected"),
    "history": ({"meta": {"history.v1": {}}}, "history.v1 must be a list"),
    "history entry": ({"meta": {"history.v1": [{"action": 1}]}}, "history.v1.action is not valid"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_section_is_refused(name: str, fitted: FewShotClassifier, tmp_path: Path) -> None:
    path = tmp_path / "m.miv"
    fitted.save(path)
    changes, words = FORGED[name]
    changes = dict(changes)
    if "shots" in changes:
        changes["meta"] = {"shots.v1": {**section(path), **changes.pop("shots")}}
    change(path, **changes)
    with pytest.raises(ModelFileError, match=words):
        mivhead.load(path)


def section(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        found: dict[str, Any] = json.loads(file.metadata()["mivhead"])["shots.v1"]
    return found


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


def test_a_failure_leaves_the_file(path: Path) -> None:
    before = path.read_bytes()

    def attempt() -> None:
        with open_change(path) as model:
            model.rename("red", "crimson")
            model.rename("no such", "class")

    with pytest.raises(InputError, match="no such"):
        attempt()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


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
