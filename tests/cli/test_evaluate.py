"""`miv evaluate`."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix

import mivhead
from mivhead.cli.evaluate import _describe, _matrix
from mivhead.diagnostics.evaluation import Evaluation, Mistake
from tests.helpers.extras import needs


@pytest.fixture(scope="module")
def truth(model, new):
    """True and predicted classes, by the library."""
    predictions = mivhead.load(model).classify(new)
    return [p.id.split("/")[-2] for p in predictions], [p.label for p in predictions]


def test_accuracy_classes_and_confusions(miv, model, new, truth):
    true, predicted = truth
    right = sum(t == p for t, p in zip(true, predicted, strict=True))
    answer = miv("evaluate", model, new)
    assert f"{right} of 6 images right (95 % interval " in answer.out
    assert re.search(r"^stripes +2 +\d +\d+ % ", answer.out, re.M)


def test_json_agrees_with_scikit_learn(miv, model, new, truth):
    document = json.loads(miv("evaluate", model, new, "--json").out)
    names = ["checks", "rings", "stripes"]
    matrix = confusion_matrix(*truth, labels=names)
    assert document["right"] == np.trace(matrix)
    assert document["accuracy"] == np.trace(matrix) / 6
    for i, name in enumerate(names):
        assert document["classes"][name]["right"] == matrix[i, i]
    counted = sum(each["count"] for each in document["confusions"])
    assert counted == len(document["mistakes"]) == 6 - np.trace(matrix)
    wrong = {(m["label"], m["predicted"]) for m in document["mistakes"]}
    assert wrong == {(t, p) for t, p in zip(*truth, strict=True) if t != p}


def test_decisions_are_counted_and_foreign_images_too(miv, fails, model, new, features, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    foreign = ("--foreign", tmp_path)
    document = json.loads(miv("evaluate", model, new, *foreign, "--json").out)
    predicted = json.loads(miv("predict", model, new, "--json").out)
    counts = document["decisions"]
    assert counts["images"] == 6
    for name in ("named", "unsure", "none"):
        assert counts[name] == predicted["decisions"][name]
    wrong = [
        each["decision"] not in ("unsure", "none of these", each["file"].split("/")[-2])
        for each in predicted["predictions"]
    ]
    assert counts["wrong"] == sum(wrong)
    assert document["foreign"] == {"images": 1, "named": 0, "unsure": 0, "none": 1, "wrong": None}
    printed = miv("evaluate", model, new, *foreign).out
    assert "Of 1 foreign image, 1 was rejected as none of these (100 %), 0 are unsure" in printed
    assert "images were named" in printed
    strict = json.loads(miv("evaluate", model, new, "--max-errors", "0.01%", "--json").out)
    assert strict["decisions"]["named"] < counts["named"]
    assert strict["accuracy"] == document["accuracy"]
    assert strict["foreign"] is None
    error = fails("evaluate", model, features, "--include-shots", *foreign)
    assert "--foreign must be a features file" in error


def test_a_class_prior_changes_the_names(miv, fails, model, new):
    never = "checks=1,rings=0,stripes=1"
    document = json.loads(miv("evaluate", model, new, "--prior", never, "--json").out)
    assert document["classes"]["rings"]["right"] == 0
    assert "no class 'spirals'" in fails("evaluate", model, new, "--prior", "spirals=1")


def test_one_class_and_features_will_do(miv, model, shots, features, new, tmp_path):
    (tmp_path / "one").mkdir()
    shutil.copytree(new / "rings", tmp_path / "one" / "rings")
    assert json.loads(miv("evaluate", model, tmp_path / "one", "--json").out)["images"] == 2
    document = json.loads(miv("evaluate", model, features, "--include-shots", "--json").out)
    assert document["images"] == 9
    assert document["accuracy"] == 1.0  # the shots it was trained on


def test_readable_images_that_are_all_shots_are_told_from_unreadable_ones(
    fails, model, shots, tmp_path
):
    copied = shutil.copytree(shots, tmp_path / "copied")
    (copied / "rings" / "damaged.png").write_bytes(b"not an image")
    error = fails("evaluate", model, copied, "--skip-bad")
    assert "trained on all of the 9 readable images" in error


def test_images_that_the_model_was_trained_on_are_left_out(
    miv, fails, model, shots, features, new, tmp_path
):
    """Otherwise the accuracy is 100 %, whatever the model."""
    for source in (shots, features):
        error = fails("evaluate", model, source)
        assert "trained on all of the 9 images" in error
        assert "--include-shots" in error
    mixed = shutil.copytree(new, tmp_path / "mixed")
    shutil.copy(shots / "rings" / "0.png", mixed / "rings" / "renamed.png")
    answer = miv("evaluate", model, mixed)
    assert "Left out 1 image that the model was trained on" in answer.err
    assert "of 6 images right" in answer.out
    document = json.loads(miv("evaluate", model, mixed, "--json").out)
    assert (document["images"], document["shots"]) == (6, ["rings/renamed.png"])
    answer = miv("evaluate", model, mixed, "--include-shots")
    assert answer.err == ""
    assert "of 7 images right" in answer.out


def test_a_label_that_the_model_does_not_know(fails, model, copy, new, tmp_path):
    shutil.copytree(new / "rings", copy / "spirals")
    error = fails("evaluate", model, copy)
    assert "'spirals'" in error
    assert "checks, rings, stripes" in error


def test_features_without_labels(miv, fails, model, new, tmp_path):
    assert miv("extract", new, "-o", tmp_path / "f.safetensors", "--unlabelled").code == 0
    assert "has no labels" in fails("evaluate", model, tmp_path / "f.safetensors")


@needs("matplotlib", "plot")
def test_the_picture(miv, fails, model, new, tmp_path):
    picture = tmp_path / "confusion.png"
    assert miv("evaluate", model, new, "--picture", picture).code == 0
    with Image.open(picture) as image:
        assert min(image.size) > 300
    for name in ("confusion.gif", "confusion"):
        assert "must be a .png" in fails("evaluate", model, new, "--picture", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.png"]


@needs("matplotlib", "plot")
def test_misclassified_images_are_listed_and_drawn(miv, fails, model, features, new, tmp_path):
    wrong = tmp_path / "test"
    shutil.copytree(new / "rings", wrong / "checks")  # at least these are predicted as rings
    picture = tmp_path / "wrong.png"
    answer = miv("evaluate", model, wrong, "--mistakes", picture)
    listed = answer.out.partition("Misclassified images")[2]
    assert re.search(r"^checks/5.png +checks +rings +>?\d+ %$", listed, re.M)
    assert f"Saved {picture}." in answer.out
    with Image.open(picture) as image:
        assert min(image.size) > 300
    assert "--mistakes draws images" in fails("evaluate", model, features, "--mistakes", picture)


def test_many_misclassified_images():
    mistakes = tuple(Mistake(f"{i}.jpg", "a", "b", 0.7) for i in range(60))
    text = _describe(Evaluation(("a", "b"), np.array([[1, 60], [0, 1]]), mistakes))
    assert "49.jpg" in text
    assert "50.jpg" not in text
    assert text.endswith("... and 10 more (--json lists all)")


def test_the_matrix_as_text():
    result = Evaluation(("cat", "猫", "dog"), np.array([[9, 0, 1], [0, 120, 0], [2, 0, 0]]))
    lines = _matrix(result).splitlines()
    assert lines[1:] == [
        "          a   b   c",
        "cat  a    9   .   1",
        "猫   b    . 120   .",
        "dog  c    2   .   .",
    ]
    assert "Accuracy 97.7 %: 129 of 132 images right" in _describe(result)


def test_many_classes_are_listed_by_confusion():
    matrix = np.eye(20, dtype=int) * 5
    matrix[3][7], matrix[4][1] = 4, 2
    text = _describe(Evaluation(tuple(f"class{i:02}" for i in range(20)), matrix))
    assert re.search(r"images +true class +predicted as\n +4 +class03 +class07\n +2 +class04", text)
    assert "No confusions." in _describe(Evaluation(("a", "b"), np.array([[3, 0], [0, 0]])))
