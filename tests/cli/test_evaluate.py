"""`miv evaluate`."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix

import mivhead
from mivhead.cli.evaluate import _describe
from mivhead.diagnostics.evaluation import Evaluation, Mistake
from tests.helpers.extras import needs


@pytest.fixture(scope="module")
def truth(model, new):
    """True and predicted classes, by the library."""
    predictions = mivhead.load(model).classify(new)
    return [p.id.split("/")[-2] for p in predictions], [p.label for p in predictions]


def test_the_report_agrees_with_scikit_learn(miv, model, new, truth):
    answer = miv("evaluate", model, new)
    document = json.loads(miv("evaluate", model, new, "--json").out)
    names = ["checks", "rings", "stripes"]
    matrix = confusion_matrix(*truth, labels=names)
    right = np.trace(matrix)
    assert f"{right} of 6 photos right" in answer.out
    assert re.search(r"^stripes +2 +\d +\d+ ?% ", answer.out, re.M)
    assert (document["right"], document["accuracy"]) == (right, right / 6)
    for i, name in enumerate(names):
        assert document["classes"][name]["right"] == matrix[i, i]
    wrong = {(m["label"], m["predicted"]) for m in document["mistakes"]}
    assert wrong == {(t, p) for t, p in zip(*truth, strict=True) if t != p}


def test_decisions_are_counted_and_foreign_images_too(miv, model, new, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    foreign = ("--foreign", tmp_path)
    document = json.loads(miv("evaluate", model, new, *foreign, "--json").out)
    predicted = json.loads(miv("predict", model, new, "--json").out)
    counts = document["decisions"]
    for name in ("named", "unsure", "none"):
        assert counts[name] == predicted["decisions"][name]
    assert document["foreign"] == {"images": 1, "named": 0, "unsure": 0, "none": 1, "wrong": None}
    assert "Foreign photos: Named 0 of 1 photo; " in miv("evaluate", model, new, *foreign).out
    strict = json.loads(miv("evaluate", model, new, "--max-errors", "0.01%", "--json").out)
    assert strict["decisions"]["named"] < counts["named"]
    assert strict["accuracy"] == document["accuracy"]
    never = "checks=1,rings=0,stripes=1"
    document = json.loads(miv("evaluate", model, new, "--prior", never, "--json").out)
    assert document["classes"]["rings"]["right"] == 0


def test_images_that_the_model_was_trained_on_are_left_out(
    miv, fails, model, shots, features, new, tmp_path
):
    """Otherwise the accuracy is 100%, whatever the model."""
    for source in (shots, features):
        assert "trained on all of the 9 images" in fails("evaluate", model, source)
    mixed = shutil.copytree(new, tmp_path / "mixed")
    shutil.copy(shots / "rings" / "0.png", mixed / "rings" / "renamed.png")
    answer = miv("evaluate", model, mixed)
    assert "Left out 1 photo" in answer.err
    assert "of 6 photos right" in answer.out


def test_one_class_and_features_will_do(miv, fails, model, new, tmp_path):
    shutil.copytree(new / "rings", tmp_path / "one" / "rings")
    assert json.loads(miv("evaluate", model, tmp_path / "one", "--json").out)["images"] == 2
    path = tmp_path / "f.safetensors"
    assert miv("extract", new, "-o", path).code == 0
    document = json.loads(miv("evaluate", model, path, "--json").out)
    assert document["right"] == json.loads(miv("evaluate", model, new, "--json").out)["right"]
    assert miv("extract", new, "-o", path, "--no-labels").code == 0
    assert "no labels" in fails("evaluate", model, path)
    shutil.copytree(new / "rings", tmp_path / "one" / "spirals")
    assert "'spirals'" in fails("evaluate", model, tmp_path / "one")


@needs("matplotlib", "plot")
def test_the_picture(miv, fails, model, new, tmp_path):
    picture = tmp_path / "confusion.png"
    assert miv("evaluate", model, new, "--picture", picture).code == 0
    with Image.open(picture) as image:
        assert min(image.size) > 300
    assert ".png" in fails("evaluate", model, new, "--picture", tmp_path / "confusion.gif")
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.png"]


def test_mistakes_are_listed_up_to_a_number():
    mistakes = tuple(Mistake(f"{i}.jpg", "a", "b", 0.7) for i in range(60))
    text = _describe(Evaluation(("a", "b"), np.array([[1, 60], [0, 1]]), mistakes))
    assert "49.jpg" in text
    assert "50.jpg" not in text
    assert text.endswith("... and 10 more (--json lists all)")


def test_many_classes_are_listed_by_confusion():
    matrix = np.eye(20, dtype=int) * 5
    matrix[3][7], matrix[4][1] = 4, 2
    text = _describe(Evaluation(tuple(f"class{i:02}" for i in range(20)), matrix))
    assert re.search(r"photos +true class +predicted as\n +4 +class03 +class07\n +2 +class04", text)
    assert "No confusions." in _describe(Evaluation(("a", "b"), np.array([[3, 0], [0, 0]])))
