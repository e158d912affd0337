"""`miv fit`, from images and from features."""

import json
import re
import shutil

import numpy as np
import pytest

import mivhead
from mivhead.cli.fit import _describe_estimate
from mivhead.cli.main import main
from mivhead.diagnostics.cross_validation import CrossValidation
from mivhead.features import FeatureTable
from mivhead.methods import METHODS

ON_FEATURES = [name for name, method in METHODS.items() if method.needs == "features"]
NCC = ("--method", "ncc")  # nothing is trained: for what does not depend on the head


def test_fit_reports_what_it_learned_and_cross_validates(miv, shots, new, tmp_path):
    output = tmp_path / "m.miv"
    answer = miv("fit", shots, "-o", output, "--threshold", "3", "--folds", "2")
    assert answer.code == 0
    assert answer.err == ""
    assert "Learned 3 classes from 9 images and 9 augmented views: features " in answer.out
    assert re.search(r"^class +shots\nchecks +3\nrings +3\nstripes +3$", answer.out, re.M)
    assert f"Saved {output} (" in answer.out
    assert re.search(r"\nExpected accuracy on new images: >?\d+ % \(95 % interval ", answer.out)
    right = r"2-fold cross-validation:\n\d of 9 shots were predicted correctly by a model that had"
    assert re.search(right, answer.out)
    assert re.search(r"^rings +3 +\d of 3 +>?\d+ %$", answer.out, re.M)
    loaded = mivhead.load(output)
    assert loaded.predict(sorted(new.glob("rings/*"))).tolist() == ["rings", "rings"]


def test_a_mislabelled_shot_is_pointed_out(miv, copy, tmp_path):
    (copy / "rings" / "0.png").rename(copy / "stripes" / "wrong.png")
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", "--no-augmentation", "--folds", "3")
    listed = answer.out.partition("likely to be mislabelled")[2]
    assert re.search(r"^stripes/wrong.png +stripes +rings +>?\d+ %  mislabelled\?$", listed, re.M)


def test_every_wrong_shot_is_listed():
    """Also where no class has more than half of the probability, as with many classes."""
    probabilities = np.array([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.3, 0.4, 0.3], [0, 0.5, 0.5]])
    ids, labels = ("a", "b", "c", "d", "e"), ("x", "x", "x", "z", "y")
    probabilities = np.concatenate([probabilities, np.full((1, 3), np.nan)])  # one alone: untested
    classes = np.array(["x", "y", "z"])
    result = CrossValidation(ids, labels, classes, probabilities, 2, calibrated=True)
    listed = _describe_estimate(result).partition("3 shots were predicted as another class. ")[2]
    assert listed.startswith("None looks mislabelled; they are only hard.\n")
    assert [line.split() for line in listed.splitlines()[2:]] == [
        ["b", "x", "y", "80", "%"],
        ["c", "x", "y", "40", "%"],
        ["d", "z", "y", "50", "%"],
    ]


def test_one_wrong_shot_that_is_hard():
    probabilities = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.1, 0.9]])
    result = CrossValidation(
        tuple("abcd"), tuple("xxyy"), np.array(["x", "y"]), probabilities, 2, calibrated=True
    )
    assert "another class. It does not look mislabelled, only hard." in _describe_estimate(result)


@pytest.mark.parametrize(("hard", "words"), [(0, "It is likely"), (1, "1 is likely")])
def test_a_shot_that_is_likely_to_be_mislabelled(hard, words):
    sure = [[0.99, 0.01]] * 9 + [[0.001, 0.999]] + [[0.01, 0.99]] * 9 + [[0.6, 0.4]] * hard
    ids, labels = tuple(map(str, range(len(sure)))), ("x",) * 10 + ("y",) * (9 + hard)
    result = CrossValidation(ids, labels, np.array(["x", "y"]), np.array(sure), 5, calibrated=True)
    listed = _describe_estimate(result)
    assert f"{words} to be mislabelled" in listed
    assert re.search(r"^9 +x +y +>99 % +mislabelled\?$", listed, re.M)
    assert listed.count("mislabelled?") == 1


def test_a_few_folds_are_not_called_leave_one_out(miv, features, tmp_path):
    answer = miv("fit", features, "-o", tmp_path / "m.miv", *NCC, "--folds", "2")
    assert "2-fold cross-validation" in answer.out
    answer = miv("fit", features, "-o", tmp_path / "m.miv", *NCC)
    assert "3-fold cross-validation" in answer.out  # each fold leaves out a shot of every class
    assert "eave-one-out" not in answer.out


def test_json_is_one_document(miv, shots, tmp_path):
    answer = miv("fit", shots, "-o", tmp_path / "m.miv", *NCC, "--json")
    document = json.loads(answer.out)
    assert document["classes"] == {"checks": 3, "rings": 3, "stripes": 3}
    assert document["images"] == 9
    assert document["views"] == 0
    check = document["check"]
    assert (check["tested"], check["folds"]) == (9, 3)  # no class has more than 3 shots
    assert check["per_class"].keys() == {"checks", "rings", "stripes"}
    assert check["interval"][0] < check["accuracy"] <= check["interval"][1] + 1e-9
    assert len(check["suspects"]) == 9 - check["right"]
    assert document["seconds"].keys() == {"features", "training"}


@pytest.mark.parametrize("method", ["ncc", "logistic", "miv"])
def test_cross_validation_is_that_of_the_saved_model(method, miv, tmp_path):
    """On shots that are hard to tell apart, so that the folds decide which ones are right."""
    if method in ("logistic", "svm"):
        pytest.importorskip("sklearn", reason="the extra bench is not installed")
    X = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    names = tuple(f"{i}.png" for i in range(40))
    table = FeatureTable(mivhead.Features(X), names, tuple("abcd" * 10))
    table.save(tmp_path / "f.safetensors")
    arguments = ("-o", tmp_path / "m.miv", "--method", method, "--folds", "3", "--json")
    printed = json.loads(miv("fit", tmp_path / "f.safetensors", *arguments).out)["check"]
    result = mivhead.load(tmp_path / "m.miv").check(folds=3)
    assert 0 < printed["right"] < 40
    assert (printed["tested"], printed["right"]) == (result.score.images, result.score.right)
    assert [(each["id"], each["predicted"]) for each in printed["suspects"]] == [
        (each.id, each.predicted) for each in result.suspects
    ]


def test_cross_validation_with_views_is_that_of_the_saved_model(miv, features, tmp_path):
    answer = miv("fit", features, "-o", tmp_path / "m.miv", "--folds", "2", "--json")
    result = mivhead.load(tmp_path / "m.miv").check(folds=2)
    printed = json.loads(answer.out)["check"]
    assert printed["right"] == result.score.right
    assert [each["probability"] for each in printed["suspects"]] == pytest.approx(
        [each.probability for each in result.suspects], abs=1e-4
    )


def test_one_shot_per_class_gives_no_estimate(miv, copy, tmp_path):
    for path in copy.glob("*/[12].png"):
        path.unlink()
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", *NCC)
    assert answer.code == 0
    assert "No estimate of the accuracy" in answer.out
    document = json.loads(miv("fit", copy, "-o", tmp_path / "m.miv", *NCC, "--json").out)
    assert document["check"]["accuracy"] is None


def test_quiet_fit_prints_nothing(miv, shots, tmp_path):
    answer = miv("fit", shots, "-o", tmp_path / "m.miv", *NCC, "--quiet")
    assert answer == (0, "", "")
    assert (tmp_path / "m.miv").exists()


def test_features_and_images_give_the_same_file_for_the_same_seed(miv, shots, features, tmp_path):
    images, extracted, other = (tmp_path / name for name in ("images", "features", "other"))
    assert miv("fit", shots, "-o", images, "--threshold", "3", "--no-check").code == 0
    answer = miv("fit", features, "-o", extracted, "--no-check")
    assert "9 images and 9 augmented views" in answer.out
    assert miv("fit", features, "-o", other, "--no-check", "--seed", "1").code == 0
    assert images.read_bytes() == extracted.read_bytes() != other.read_bytes()


def test_features_of_unknown_origin_give_a_model_on_features(miv, fails, new, tmp_path):
    X = np.eye(6, 16, dtype=np.float32)
    table = FeatureTable(mivhead.Features(X), tuple("abcdef"), tuple("xxxyyy"))
    table.save(tmp_path / "f.safetensors")
    model = tmp_path / "m.miv"
    assert miv("fit", tmp_path / "f.safetensors", "-o", model, "--folds", "2").code == 0
    answer = miv("predict", model, tmp_path / "f.safetensors", "--csv")
    assert [line.split(",")[1] for line in answer.out.split()] == ["label", *"xxxyyy"]
    assert "give it features" in fails("predict", model, new)


@pytest.mark.parametrize("method", [m for m in ON_FEATURES if not m.startswith(("miv-", "miv+"))])
def test_every_method_on_features(method, miv, features, tmp_path):
    if method in ("logistic", "svm"):
        pytest.importorskip("sklearn", reason="the extra bench is not installed")
    path = tmp_path / "m.miv"
    quick = ["--param", "steps=5"] if method in ("miv", "baseline", "baseline++") else []
    answer = miv("fit", features, "-o", path, "--method", method, "--no-check", *quick)
    assert answer.code == 0, answer.err
    assert f"\nmethod      {method}\n" in miv("info", path).out
    answer = miv("predict", path, features, "--csv")
    assert answer.code == 0
    assert len(answer.out.split()) == 10


def test_an_ablation_is_a_method_too(miv, features, tmp_path):
    path = tmp_path / "m.miv"
    assert miv("fit", features, "-o", path, "--method", "miv-gap-mean", "--no-check").code == 0
    assert "\nmethod      miv-gap-mean\n" in miv("info", path).out


def test_a_plain_head_is_used_on_new_images(miv, features, new, tmp_path):
    path = tmp_path / "m.miv"
    assert miv("fit", features, "-o", path, "--method", "ridge", "--no-check").code == 0
    assert miv("evaluate", path, new).code == 0


def test_hyperparameters_reach_the_method(miv, shots, tmp_path):
    path = tmp_path / "m.miv"
    params = ("--param", "use_views=true", "--param", "neighbours=2")
    answer = miv("fit", shots, "-o", path, "--method", "knn", "--threshold", "3", *params)
    assert "Learned 3 classes from 9 images and 9 augmented views" in answer.out
    fitted = mivhead.load(path).classifier_
    assert (fitted.use_views, fitted.neighbours) == (True, 2)
    assert len(fitted.learned_["keys"]) == 18


def test_hyperparameters_reach_a_method_on_features_of_unknown_origin(miv, tmp_path):
    X = mivhead.Features(np.eye(6, 16, dtype=np.float32))
    FeatureTable(X, tuple("abcdef"), tuple("xxxyyy")).save(tmp_path / "f.safetensors")
    arguments = ("fit", tmp_path / "f.safetensors", "-o", tmp_path / "m.miv", "--no-check")
    assert miv(*arguments, "--method", "ncc", "--param", "centred=True").code == 0
    assert mivhead.load(tmp_path / "m.miv").classifier_.centred is True


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (["neighbours"], "'neighbours' is not of the form NAME=VALUE"),
        (["neighbors=3"], "Did you mean 'neighbours'?"),
        (["neighbours=0"], "neighbours must be an integer of at least 1, got 0"),
        (["neighbours=many"], "neighbours must be an integer of at least 1, got 'many'"),
        (["random_state=1"], "random_state is not a hyperparameter: use --seed"),
    ],
)
def test_wrong_hyperparameters(params, words, capsys, shots, tmp_path):
    given = [each for param in params for each in ("--param", param)]
    arguments = ["fit", str(shots), "-o", str(tmp_path / "m.miv"), "--method", "knn", *given]
    try:
        code = main(arguments)
    except SystemExit as stop:  # of the parser
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "logistik"], "Did you mean 'logistic'?"),
        (["--recipe", "grandma"], "recipe must be one of"),
        (["--backbone", "efficientnet_lite9"], "'efficientnet_lite9'"),
        (["--folds", "1"], "--folds must be at least 2"),
        (["--recipe", "paper", "--method", "ncc"], "ncc has no recipe"),
    ],
)
def test_unknown_names(arguments, words, fails, shots, tmp_path):
    assert words in fails("fit", shots, "-o", tmp_path / "m.miv", *arguments)


def test_features_without_labels(miv, fails, shots, tmp_path):
    path = tmp_path / "f.safetensors"
    assert miv("extract", shots / "rings", "-o", path, "--unlabelled").code == 0
    assert "has no labels to learn from" in fails("fit", path, "-o", tmp_path / "m.miv")


def test_threshold_with_features(fails, features, tmp_path):
    error = fails("fit", features, "-o", tmp_path / "m.miv", "--threshold", "3")
    assert "already come with their views" in error


def test_names_of_decisions_are_refused_and_others_explained(miv, fails, copy, model, tmp_path):
    output, mine = tmp_path / "m.miv", shutil.copy(model, tmp_path / "mine.miv")
    (copy / "stripes").rename(copy / "Unsure")  # as `miv predict --sort-into` makes it
    assert "'Unsure' cannot be a class" in fails("fit", copy, "-o", output, *NCC)
    assert not output.exists()
    (copy / "Unsure").rename(copy / "other")
    (copy / "rings" / "notes.txt").write_text("not an image")
    (copy / "1.png").write_bytes((copy / "rings" / "0.png").read_bytes())
    (copy / "rings" / ".DS_Store").write_text("litter")
    answer = miv("fit", copy, "-o", output, *NCC, "--no-check")
    assert "'other' stands for everything else: an image like its images is named" in answer.err
    assert "Ignored 2 files that are not images in class folders (.png, .txt)." in answer.err
    assert "'none of these' cannot be a class" in fails("rename", mine, "rings", "none of these")
    sorted_ = tmp_path / "sorted"
    (sorted_ / "none of these").mkdir(parents=True)
    assert "'none of these' cannot be a class" in fails("add", mine, sorted_)


def test_twins_and_duplicates_are_pointed_out(miv, copy, tmp_path):
    (copy / "Rings").mkdir()
    for source, target in (
        *(("rings/0.png", "Rings/new.png"), ("rings/1.png", "stripes/wrong.png")),
        ("stripes/0.png", "stripes/again.png"),
    ):
        (copy / target).write_bytes((copy / source).read_bytes())
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", *NCC, "--no-check", "--json")
    notes = json.loads(answer.out)["notes"]
    assert notes[0].startswith("The classes 'Rings' and 'rings' differ in upper and lower case")
    assert sorted(notes[1:3]) == [
        "The same image is in several classes, so at least one label is wrong: "
        "Rings/new.png = rings/0.png.",
        "The same image is in several classes, so at least one label is wrong: "
        "rings/1.png = stripes/wrong.png.",
    ]
    assert notes[3].startswith("The same image occurs more than once, and counts once: ")
    assert "stripes/0.png" in notes[3]
    assert "stripes/again.png" in notes[3]
    assert all(note in answer.err for note in notes)


def test_the_message_about_an_unreadable_image_names_the_option(miv, fails, copy, tmp_path):
    (copy / "rings" / "0.png").write_bytes(b"Dear Sir or Madam")
    error = fails("fit", copy, "-o", tmp_path / "m.miv", *NCC)
    assert "rings/0.png is not a JPEG" in error
    assert error.strip().endswith("--skip-bad leaves out such images.")
    assert miv("fit", copy, "-o", tmp_path / "m.miv", *NCC, "--skip-bad").code == 0
