"""`FewShotClassifier`: images in, names out."""

import io
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import mivhead
from mivhead import Features, FeatureTable, FewShotClassifier, Preset, Recipe
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.sources import open_labelled
from tests.helpers.tiny_backbone import TinyBackbone


def true_names(folder: Path) -> list[str]:
    return list(open_labelled(folder).labels)


def test_from_a_folder_to_names(shots: Path, queries: Path) -> None:
    classifier = FewShotClassifier(TinyBackbone()).fit(shots)
    assert classifier.classes_.tolist() == ["blue", "green", "red"]
    predictions = classifier.classify(queries)
    assert [p.label for p in predictions] == [p.id.split("/")[-2] for p in predictions]
    first = predictions[0]
    assert first.probability == max(first.probabilities.values())
    assert sum(first.probabilities.values()) == pytest.approx(1)


def test_each_image_and_view_passes_the_backbone_once(shots: Path, queries: Path) -> None:
    backbone = TinyBackbone(threshold=9)  # 4 shots: ceil(9 / 4) = 3 views each
    classifier = FewShotClassifier(backbone).fit(shots)
    assert backbone.seen == 12 + 36
    classifier.predict(queries)
    assert backbone.seen == 12 + 36 + 15


def test_a_table_is_fitted_with_the_backbone_that_is_set_now(shots: Path) -> None:
    other = TinyBackbone("other", weights="1" * 64)
    table = FewShotClassifier(other).extract(open_labelled(shots))
    classifier = FewShotClassifier(TinyBackbone(), recipe="experts").fit(shots)
    classifier.set_params(backbone=other).fit(table)
    assert classifier.identity_ == other.identity


def test_images_pass_the_backbone_that_is_set_now(shots: Path) -> None:
    first, second = TinyBackbone(), TinyBackbone()
    classifier = FewShotClassifier(first)
    classifier.extract(open_labelled(shots))
    seen = first.seen
    classifier.set_params(backbone=second).extract(open_labelled(shots))
    assert (first.seen, second.seen) == (seen, seen)


def test_threshold_and_rule(shots: Path) -> None:
    def views(**params: object) -> int:
        table = FewShotClassifier(TinyBackbone(threshold=9), **params).extract(open_labelled(shots))
        return 0 if table.views is None else len(table.views)

    assert views(threshold=0) == 0
    assert views(threshold=3) == 0  # 4 shots are above it
    assert views(recipe=Recipe(views_rule="floor")) == 12 * 2
    assert views(recipe=Recipe(views_rule="ceil")) == 12 * 3
    assert views(threshold=99) == 12 * 4  # the default recipe makes at most four
    assert views(threshold=99, recipe="paper") == 12 * 25


def test_views_are_made_of_the_image_they_are_said_to_be_of(shots: Path) -> None:
    from mivhead.extraction.cache import content_hash
    from mivhead.images.augmentation import augment, view_seed

    backbone = TinyBackbone(threshold=9)
    images = open_labelled(shots)
    table = FewShotClassifier(backbone, random_state=5).extract(images)
    np.testing.assert_array_equal(table.view_of, np.repeat(range(12), 3))
    for i in (0, 7, 35):
        row, number = divmod(i, 3)
        content = content_hash((shots / images.ids[row]).read_bytes())
        view = augment(images.load(row), 16, view_seed(5, content, number))
        assert table.views[i] == backbone.extract([view])


def test_all_kinds_of_images(shots: Path, queries: Path) -> None:
    paths = sorted(queries.rglob("*.png"))
    pictures = [Image.open(path) for path in paths]
    arrays = [np.asarray(picture) for picture in pictures]
    labels = [path.parent.name for path in paths]
    expected = FewShotClassifier(TinyBackbone()).fit(paths, labels).predict_proba(paths)
    for images in (pictures, arrays, [str(path) for path in paths]):
        classifier = FewShotClassifier(TinyBackbone()).fit(images, labels)
        np.testing.assert_array_equal(classifier.predict_proba(images), expected)
    assert classifier.predict(arrays[0]).tolist() == [labels[0]]
    assert classifier.predict(pictures[0]).tolist() == [labels[0]]
    assert classifier.predict(paths[0]).tolist() == [labels[0]]
    assert len(classifier.predict(queries)) == len(paths)


def test_fit_takes_what_predict_takes(shots: Path, queries: Path, tmp_path: Path) -> None:
    def model() -> FewShotClassifier:
        return FewShotClassifier(TinyBackbone())

    expected = model().fit(shots).predict_proba(queries)
    packed = shutil.make_archive(str(tmp_path / "shots"), "zip", shots)
    images = open_labelled(shots)
    for given in (shots, str(shots), packed, images, model().extract(images)):
        np.testing.assert_array_equal(model().fit(given).predict_proba(queries), expected)
    listed = model().fit(shots, images.labels)  # in the order of the folder's images
    np.testing.assert_array_equal(listed.predict_proba(queries), expected)
    with pytest.raises(InputError, match="Give a label for every image"):
        model().fit([images.load(0)])


def test_labels_of_any_type_follow_the_images_that_can_be_read(
    queries: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    paths = [*sorted(queries.rglob("*.png"))]
    numbers = [len(path.parent.name) for path in paths]
    whole = FewShotClassifier(TinyBackbone()).fit(paths, numbers)
    left = FewShotClassifier(TinyBackbone())
    left.fit([broken, *paths], [numbers[-1], *numbers], skip_bad=True)
    assert [each.id for each in left.skipped_] == [str(broken)]
    assert left.classes_.tolist() == whole.classes_.tolist()
    np.testing.assert_array_equal(left.predict_proba(paths), whole.predict_proba(paths))


def test_decoded_pictures_are_predicted_like_files(shots: Path, queries: Path) -> None:
    classifier = FewShotClassifier(TinyBackbone()).fit(shots)
    images = open_labelled(queries)
    pictures = [images.load(row) for row in range(len(images))]
    expected = classifier.classify(images)
    for ours, theirs in zip(
        classifier.classify_pictures(pictures, images.ids), expected, strict=True
    ):
        assert (ours.id, ours.label, ours.decision) == (theirs.id, theirs.label, theirs.decision)
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-6)
    strict = classifier.thresholds(max_errors=0.0)
    found = classifier.classify_pictures(pictures, thresholds=strict)
    assert [each.decision for each in found] == [
        each.decision for each in classifier.classify(images, max_errors=0.0)
    ]


def test_the_same_seed_gives_the_same_model(shots: Path, queries: Path) -> None:
    a, b = (FewShotClassifier(TinyBackbone()).fit(shots) for _ in range(2))
    np.testing.assert_array_equal(a.predict_proba(queries), b.predict_proba(queries))
    changes = {"recipe": "paper"}, {"threshold": 9}  # what is drawn: initial weights, or views
    for change in changes:
        first, second = (
            FewShotClassifier(TinyBackbone(), random_state=seed, **change).fit(shots)
            for seed in (0, 1)
        )
        assert (first.predict_proba(queries) != second.predict_proba(queries)).any()


def test_a_bad_image_is_named_or_skipped(shots: Path) -> None:
    (shots / "red" / "bad.jpg").write_text("not an image")
    with pytest.raises(ImageError, match=r"bad\.jpg"):
        FewShotClassifier(TinyBackbone()).fit(shots)
    classifier = FewShotClassifier(TinyBackbone()).fit(shots, skip_bad=True)
    assert [skipped.id for skipped in classifier.skipped_] == ["red/bad.jpg"]
    assert classifier.classifier_.shots_.tolist() == [4, 4, 4]


def test_wrong_input_is_named(shots: Path) -> None:
    with pytest.raises(InputError, match="1 images, but 2 labels"):
        FewShotClassifier(TinyBackbone()).fit([np.zeros((4, 4, 3), np.uint8)], ["a", "b"])
    with pytest.raises(InputError, match="did you mean 'efficientnet_lite"):
        FewShotClassifier("efficientnet_lite").fit(shots)


def test_features_of_another_backbone_are_refused(shots: Path) -> None:
    table = FewShotClassifier(TinyBackbone("other")).extract(open_labelled(shots))
    with pytest.raises(InputError, match="'other'"):
        FewShotClassifier(TinyBackbone()).fit(table)


def test_features_are_predicted_without_a_backbone(
    shots: Path, queries: Path, tmp_path: Path
) -> None:
    classifier = FewShotClassifier(TinyBackbone()).fit(shots)
    table = classifier.extract(open_labelled(queries))
    classifier.save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv")  # its backbone is not one that can be loaded by name
    expected = classifier.predict_proba(queries)
    for features in (table, table.features):
        np.testing.assert_array_equal(model.predict_proba(features), expected)
    assert [p.id for p in model.classify(table)] == list(table.ids)
    assert [p.id for p in model.classify(table.features)][:2] == ["0", "1"]
    other = replace(table, backbone=TinyBackbone("other").identity.as_json())
    with pytest.raises(InputError, match="The features come from the backbone 'other'"):
        model.predict(other)


def test_features_of_unknown_origin(shots: Path, queries: Path, tmp_path: Path) -> None:
    known = FewShotClassifier(TinyBackbone()).extract(open_labelled(shots))
    table = replace(known, backbone=None)
    model = FewShotClassifier(None).fit(table)
    assert model.identity_ is None
    model.save(tmp_path / "m.miv")
    loaded = mivhead.load(tmp_path / "m.miv")
    assert loaded.predict(table).tolist() == model.predict(table).tolist()
    with pytest.raises(InputError, match="trained on features of unknown origin: give it features"):
        loaded.predict(queries)
    with_backbone = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone())
    assert len(with_backbone.predict(queries)) == 15


def test_features_from_elsewhere_need_no_backbone() -> None:
    X = Features(np.random.default_rng(0).normal(size=(4, 8)))
    table = FeatureTable(X, tuple("abcd"), tuple("xxyy"))
    with pytest.raises(InputError, match=r"backbone=None"):
        FewShotClassifier(TinyBackbone()).fit(table)
    for features in (X, np.zeros((4, 8))):
        with pytest.raises(InputError, match=r"MIVClassifier"):
            FewShotClassifier(TinyBackbone()).fit(features, list("xxyy"))
    assert FewShotClassifier(None).fit(table).classes_.tolist() == ["x", "y"]


def test_a_table_may_name_the_backbone(shots: Path) -> None:
    table = FewShotClassifier(threshold=0).extract(open_labelled(shots))
    model = FewShotClassifier(None).fit(table)
    assert model.identity_ is not None
    assert model.identity_.name == "efficientnet_lite0"
    image = next((shots / "red").iterdir())
    expected = FewShotClassifier(threshold=0).fit(table).predict_proba(image)
    np.testing.assert_array_equal(model.predict_proba(image), expected)


def test_a_fit_says_what_it_saw_and_how_long_it_took(shots: Path) -> None:
    model = FewShotClassifier(TinyBackbone(), threshold=9).fit(shots)
    counts = {folder.name: len([*folder.iterdir()]) for folder in shots.iterdir()}
    assert model.shot_counts == counts
    assert model.shots_.view_count == len(model.extract(open_labelled(shots)).views)
    assert model.fit_seconds_.keys() == {"features", "training"}
    assert min(model.fit_seconds_.values()) > 0


def test_parameters_are_checked_before_the_backbone_is_loaded() -> None:
    classifier = FewShotClassifier("no such backbone", recipe="papr")
    with pytest.raises(InputError, match="papr"):
        classifier.fit(["missing.png", "nowhere.png"], ["a", "b"])


def test_a_loaded_model_keeps_its_recipe(shots: Path, tmp_path: Path) -> None:
    for recipe in ("experts", "paper"):
        classifier = FewShotClassifier(TinyBackbone(), recipe=recipe).fit(shots)
        classifier.save(tmp_path / "m.miv")
        again = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone()).fit(shots)
        again.save(tmp_path / "again.miv")
        assert (tmp_path / "again.miv").read_bytes() == (tmp_path / "m.miv").read_bytes()


def test_a_saved_model_needs_its_own_backbone(shots: Path, queries: Path, tmp_path: Path) -> None:
    classifier = FewShotClassifier(TinyBackbone()).fit(shots)
    classifier.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone())
    np.testing.assert_array_equal(again.predict_proba(queries), classifier.predict_proba(queries))
    other = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone("other"))
    with pytest.raises(NotAvailableError, match="trained on the backbone 'tiny'"):
        other.predict(queries)


def test_clone_and_pickle(shots: Path, queries: Path) -> None:
    classifier = FewShotClassifier(TinyBackbone(), threshold=2).fit(shots)
    assert clone(classifier).threshold == 2
    copy = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(copy.predict(queries), classifier.predict(queries))


def test_the_default_backbone_end_to_end(shots: Path, queries: Path, tmp_path: Path) -> None:
    classifier = FewShotClassifier(threshold=2).fit(shots)
    names = classifier.predict(queries)
    assert (names == true_names(queries)).mean() > 0.9
    classifier.save(tmp_path / "m.miv")
    assert (mivhead.load(tmp_path / "m.miv").predict(queries) == names).all()


def test_a_model_keeps_its_taps_when_the_suggested_preset_changes(
    shots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mivhead.backbones import efficientnet_lite as presets

    image = next((shots / "red").iterdir())
    classifier = FewShotClassifier(threshold=0).fit(shots)
    expected = classifier.predict_proba(image)
    classifier.save(tmp_path / "m.miv")
    old = presets.PRESETS["efficientnet_lite0"]
    changed = Preset(old.taps[-1:], old.blocks[-1:], old.preprocessing)
    monkeypatch.setitem(presets.PRESETS, "efficientnet_lite0", changed)
    again = mivhead.load(tmp_path / "m.miv").predict_proba(image)
    np.testing.assert_allclose(again, expected, rtol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "backbone", [TinyBackbone(), "efficientnet_lite0"], ids=["tiny", "default"]
)
def test_a_forked_child_of_a_process_that_has_predicted_predicts_too(
    backbone: Any, shots: Path, queries: Path, threads: int
) -> None:
    """As the workers of a server do, or those of a pool of processes."""
    classifier = FewShotClassifier(backbone, threshold=0, cache=False).fit(shots)
    expected = classifier.predict_proba(queries)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is killed
        try:
            os._exit(0 if np.array_equal(classifier.predict_proba(queries), expected) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_object_is_one_image(shots: Path, queries: Path) -> None:
    """As an upload handler passes it."""
    classifier = FewShotClassifier(TinyBackbone()).fit(shots)
    path = queries / "red" / "0.png"
    expected = classifier.predict_proba(path)
    with path.open("rb") as opened:
        np.testing.assert_array_equal(classifier.predict_proba(opened), expected)
    uploaded = io.BytesIO(path.read_bytes())
    assert [p.label for p in classifier.classify(uploaded, skip_bad=True)] == ["red"]
    pair = [io.BytesIO(path.read_bytes()), path.open("rb")]
    with pair[1]:
        assert len(classifier.classify(pair, skip_bad=True)) == 2
    assert classifier.skipped_ == []


def test_a_classifier_that_is_not_fitted_says_so(queries: Path, tmp_path: Path) -> None:
    image = queries / "red" / "0.png"
    for call in ("predict", "predict_proba", "classify"):
        with pytest.raises(NotFittedError):
            getattr(FewShotClassifier(), call)(image)
    with pytest.raises(NotFittedError):
        FewShotClassifier().score([image], ["red"])
    for model in (FewShotClassifier(), mivhead.MIVClassifier()):
        with pytest.raises(NotFittedError):
            mivhead.save(model, tmp_path / "model.miv")
    assert not (tmp_path / "model.miv").exists()


@pytest.mark.parametrize("missing", [None, float("nan"), np.float64("nan")])
def test_a_missing_label_is_an_error_that_names_it(missing: object) -> None:
    images = [np.zeros((8, 8, 3), np.uint8)] * 3
    with pytest.raises(InputError, match=r"labels\[1\] is missing \((None|nan)\)"):
        FewShotClassifier(TinyBackbone()).fit(images, ["cat", missing, "dog"])
    X = np.eye(3, 8, dtype=np.float32)
    for labels in (["cat", missing, "dog"], np.array(["cat", missing, "dog"], object)):
        with pytest.raises(InputError, match=r"y\[1\] is missing"):
            mivhead.MIVClassifier().fit(X, labels)


@pytest.mark.parametrize("labels", [[True, False, True], [1.0, 2.0, 1.0], [1, 2, 1]])
def test_labels_that_fit_can_be_saved(labels: list[object], tmp_path: Path) -> None:
    images = list(np.random.default_rng(0).integers(0, 255, (3, 24, 24, 3), np.uint8))
    classifier = FewShotClassifier(TinyBackbone()).fit(images, labels)
    classifier.save(tmp_path / "model.miv")
    loaded = mivhead.load(tmp_path / "model.miv", backbone=TinyBackbone())
    assert loaded.classes_.tolist() == classifier.classes_.tolist()
    assert loaded.classes_.dtype == classifier.classes_.dtype
    assert loaded.predict(images).tolist() == classifier.predict(images).tolist()


def test_a_class_for_everything_else(shots: Path, queries: Path, tmp_path: Path) -> None:
    """Called `blue` here: never a name, and still so after saving, loading and refitting."""
    classifier = FewShotClassifier(TinyBackbone(), other="blue", threshold=0).fit(shots)
    assert classifier.classifier_.decision_.other == classifier.classes_.tolist().index("blue")
    classifier.save(tmp_path / "model.miv")
    loaded = mivhead.load(tmp_path / "model.miv", backbone=TinyBackbone())
    assert loaded.other == "blue"
    found = classifier.classify(queries)
    assert [each.decision for each in loaded.classify(queries)] == [p.decision for p in found]
    assert "blue" not in {each.label for each in found} | set(classifier.predict(queries))
    blue = [each.decision for each in found if "blue" in each.id]
    assert set(blue) == {"none of these"}
    like_all = FewShotClassifier(TinyBackbone(), other=None, threshold=0).fit(shots)
    assert "blue" in set(like_all.predict(queries))


@pytest.mark.parametrize("threshold", [0, 3])
def test_exact_copies_change_nothing(shots, queries, tmp_path, threshold) -> None:
    """Neither names nor the estimate, bit for bit; views of a class follow its distinct shots."""
    copied = shutil.copytree(shots, tmp_path / "copied")
    for path in sorted((copied / "red").iterdir()):
        shutil.copy(path, path.with_name(f"copy of {path.name}"))
    given = {"threshold": threshold, "verbose": False}
    plain = FewShotClassifier(TinyBackbone(), **given).fit(shots)
    model = FewShotClassifier(TinyBackbone(), **given).fit(copied)
    assert plain.copies_ == {}
    reds = len(list((shots / "red").iterdir()))
    assert len(model.copies_) == reds
    assert model.shot_counts == plain.shot_counts
    assert model.shots_.view_count == plain.shots_.view_count
    np.testing.assert_array_equal(model.predict_proba(queries), plain.predict_proba(queries))
    assert model.check().accuracy == plain.check().accuracy


def test_a_fit_that_fails_leaves_the_model_as_it_was(shots, queries, tmp_path) -> None:
    model = FewShotClassifier(TinyBackbone(), threshold=0).fit(shots)
    before = model.predict(queries).tolist()
    (tmp_path / "bad.png").write_text("not an image")
    bad = [tmp_path / "bad.png", *sorted(queries.rglob("*.png"))[:2]]
    with pytest.raises(ImageError, match=r"bad\.png is not"):
        model.fit(bad, ["a", "b", "b"])
    table = model.extract(queries)
    with pytest.raises(InputError, match="1 class"):
        model.fit(table, ["a"] * len(table))
    assert model.predict(queries).tolist() == before
    assert "3 classes: blue, green, red" in repr(model)
    unfitted = FewShotClassifier(TinyBackbone())
    with pytest.raises(ImageError, match=r"bad\.png is not"):
        unfitted.fit(bad, ["a", "b", "b"])
    assert not [name for name in vars(unfitted) if name.endswith("_")]
