"""`miv fit`, from images and from features."""

import json
import re
import shutil

import numpy as np
import pytest

import mivhead
from mivhead.cli.fit import _describe_estimate
from mivhead.diagnostics.cross_validation import CrossValidation
from mivhead.features import FeatureTable

QUICK = ("--recipe", "experts")  # no head is trained: for what does not depend on it


def test_fit_reports_what_it_learned_and_cross_validates(miv, features, new, tmp_path):
    output = tmp_path / "m.miv"
    answer = miv("fit", features, "-o", output)
    assert (answer.code, answer.err) == (0, "")
    assert "Learned 3 classes from 9 photos and 9 augmented views: " in answer.out
    assert re.search(r"^rings +3 +\d of 3$", answer.out, re.M)
    assert f"Saved {output} (" in answer.out
    assert re.search(
        r"^Of 100 new photos like these, about \d+ get the right name", answer.out, re.M
    )
    assert re.search(r"3-fold cross-validation: \d of 9 shots were predicted right", answer.out)
    loaded = mivhead.load(output)
    assert loaded.predict(sorted(new.glob("rings/*"))).tolist() == ["rings", "rings"]


def test_images_and_their_features_give_the_same_file(miv, shots, tmp_path):
    extracted, path = tmp_path / "images.miv", tmp_path / "f.safetensors"
    assert miv("fit", shots, "-o", extracted, "--no-check").code == 0
    assert miv("extract", shots, "-o", path).code == 0
    assert miv("fit", path, "--no-check").code == 0  # beside the features
    assert (tmp_path / "f.miv").read_bytes() == extracted.read_bytes()
    assert miv("fit", path, "--no-check", "--seed", "1", "--quiet") == (0, "", "")
    assert (tmp_path / "f.miv").read_bytes() != extracted.read_bytes()


def test_the_model_is_written_beside_the_folder(miv, fails, copy, monkeypatch):
    monkeypatch.chdir(copy)
    assert miv("fit", ".", *QUICK, "--no-check").code == 0
    output = copy.with_name("copy.miv")
    assert mivhead.load(output).classes_.tolist() == ["checks", "rings", "stripes"]
    output.write_text("something else")
    assert "not overwritten" in fails("fit", f"{copy}/", *QUICK)
    assert output.read_text() == "something else"
    assert "-o" in fails("fit", "lancedb://data/birds")


def test_json_is_one_document(miv, shots, tmp_path):
    document = json.loads(miv("fit", shots, "-o", tmp_path / "m.miv", *QUICK, "--json").out)
    assert document["classes"] == {"checks": 3, "rings": 3, "stripes": 3}
    assert document["images"] == 9
    estimate = document["estimate"]
    assert estimate["tested"] == 9
    assert 0 <= estimate["right_names"] <= 1
    assert estimate["low"] < estimate["accuracy"] <= estimate["high"] + 1e-9
    assert len(document["suspects"]) == 9 - estimate["right"]
    assert document["seconds"].keys() == {"features", "training"}


def test_cross_validation_is_that_of_the_saved_model(miv, tmp_path):
    """On shots that are hard to tell apart, so that the folds decide which ones are right."""
    X = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    names = tuple(f"{i}.png" for i in range(40))
    table = FeatureTable(mivhead.Features(X), names, tuple("abcd" * 10))
    table.save(tmp_path / "f.safetensors")
    printed = json.loads(miv("fit", tmp_path / "f.safetensors", "--json").out)
    result = mivhead.load(tmp_path / "f.miv").check()
    assert 0 < printed["estimate"]["right"] < 40
    assert printed["estimate"]["right"] == result.score.right
    assert [(shot["id"], shot["predicted"]) for shot in printed["suspects"]] == [
        (shot.id, shot.predicted) for shot in result.suspects
    ]


def test_one_shot_per_class_gives_no_estimate(miv, copy, tmp_path):
    for path in copy.glob("*/[12].png"):
        path.unlink()
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", *QUICK)
    assert answer.code == 0
    assert "How good the model is, is unknown" in answer.out
    document = json.loads(miv("fit", copy, "-o", tmp_path / "m.miv", *QUICK, "--json").out)
    assert document["estimate"]["accuracy"] is None


def test_every_wrong_shot_is_listed():
    """Also where no class has more than half of the probability, as with many classes."""
    probabilities = np.array([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.3, 0.4, 0.3], [0, 0.5, 0.5]])
    ids, labels = ("a", "b", "c", "d", "e"), ("x", "x", "x", "z", "y")
    probabilities = np.concatenate([probabilities, np.full((1, 3), np.nan)])  # one alone: untested
    classes = np.array(["x", "y", "z"])
    result = CrossValidation(ids, labels, classes, probabilities, 2, calibrated=True)
    listed = _describe_estimate(result).partition("3 shots predicted as another class")[2]
    assert listed.startswith(".\n")
    assert [line.split()[:3] for line in listed.splitlines()[2:]] == [
        ["b", "x", "y"],
        ["c", "x", "y"],
        ["d", "z", "y"],
    ]


def test_a_shot_in_the_wrong_folder_is_listed(miv, copy, tmp_path):
    (copy / "rings" / "0.png").rename(copy / "stripes" / "wrong.png")
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", *QUICK)
    assert re.search(r"^stripes/wrong.png +stripes +rings .*%$", answer.out, re.M)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "grandma"], "'grandma'"),
        (["--backbone", "efficientnet_lite9"], "'efficientnet_lite9'"),
        (["--boxes", "none.json"], "none.json"),
    ],
)
def test_refusals(arguments, words, fails, shots, tmp_path):
    assert words in fails("fit", shots, "-o", tmp_path / "m.miv", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_features_without_labels(miv, fails, shots, tmp_path):
    path = tmp_path / "f.safetensors"
    assert miv("extract", shots / "rings", "-o", path, "--no-labels").code == 0
    assert "no labels" in fails("fit", path)


def test_names_of_decisions_are_refused_and_others_explained(miv, fails, copy, model, tmp_path):
    output, mine = tmp_path / "m.miv", shutil.copy(model, tmp_path / "mine.miv")
    (copy / "stripes").rename(copy / "Unsure")  # as `miv predict --sort-into` makes it
    assert "'Unsure'" in fails("fit", copy, "-o", output, *QUICK)
    assert not output.exists()
    (copy / "Unsure").rename(copy / "other")
    (copy / "rings" / "notes.txt").write_text("not an image")
    (copy / "1.png").write_bytes((copy / "rings" / "0.png").read_bytes())
    (copy / "rings" / ".DS_Store").write_text("litter")
    answer = miv("fit", copy, "-o", output, *QUICK, "--no-check")
    assert "'other' stands for everything else" in answer.err
    assert "Ignored 2 files" in answer.err
    assert "'none of these'" in fails("rename", mine, "rings", "none of these")


def test_duplicates_are_pointed_out(miv, copy, tmp_path):
    for source, target in (
        ("rings/1.png", "stripes/wrong.png"),
        ("stripes/0.png", "stripes/again.png"),
    ):
        (copy / target).write_bytes((copy / source).read_bytes())
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", *QUICK, "--no-check", "--json")
    several, again = json.loads(answer.out)["notes"]
    assert "rings/1.png = stripes/wrong.png" in several
    assert "stripes/again.png" in again
    assert f"{several}\n{again}\n" in answer.err


def test_unreadable_images_are_an_error_or_left_out(miv, fails, copy, tmp_path):
    (copy / "rings" / "0.png").write_bytes(b"Dear Sir or Madam")
    error = fails("fit", copy, "-o", tmp_path / "m.miv", *QUICK)
    assert "rings/0.png" in error
    assert error.strip().endswith("--skip-bad leaves out such images.")
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", *QUICK, "--skip-bad", "--json")
    assert [image["id"] for image in json.loads(answer.out)["skipped"]] == ["rings/0.png"]
    assert answer.err.startswith("Skipped 1 image:\n")


def test_unlabelled_images_and_a_csv_file(miv, new, shots, tmp_path):
    files = sorted(shots.rglob("*.png"))
    path = tmp_path / "shots.csv"
    path.write_text("path;Vogel\n" + "".join(f"{f};{f.parent.name}\n" for f in files))
    answer = miv("fit", path, "--label", "Vogel", "--unlabelled", new, "--no-check", "--json")
    document = json.loads(answer.out)
    assert document["classes"] == {"checks": 3, "rings": 3, "stripes": 3}
    assert document["unlabelled"]["images"] == 6


def test_a_model_without_pictures(miv, shots, tmp_path):
    model = tmp_path / "m.miv"
    assert miv("fit", shots, "-o", model, *QUICK, "--no-check", "--no-pictures").code == 0
    assert json.loads(miv("info", model, "--json").out)["pictures"] is False
