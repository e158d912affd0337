"""`miv add`, `remove`, `rename` and `relabel`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mivhead
from tests.helpers.patterns import write_images


@pytest.fixture
def mine(model, tmp_path):
    """A copy of the model to change."""
    return Path(shutil.copy(model, tmp_path / "mine.miv"))


def probabilities(miv, model, images):
    answer = json.loads(miv("predict", model, images, "--json", "--top", "9").out)
    return [each["top"] for each in answer["predictions"]]


def test_adding_equals_fitting_all_images(miv, shots, new, mine, tmp_path):
    answer = miv("add", mine, new)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("Added 6 shots: checks 2, rings 2, stripes 2.\n")
    assert "3 classes and 15 shots" in answer.out
    assert answer.out.endswith("the old model is " + str(mine) + ".bak.\n")
    everything = shutil.copytree(shots, tmp_path / "all")
    shutil.copytree(new, everything, dirs_exist_ok=True)
    scratch = tmp_path / "scratch.miv"
    assert miv("fit", everything, "-o", scratch, "--no-augmentation", "--no-check").code == 0
    assert probabilities(miv, mine, new) == probabilities(miv, scratch, new)


def test_fit_add_and_info_show_the_same_estimate(miv, shots, new, mine, tmp_path):
    everything = shutil.copytree(shots, tmp_path / "all")
    shutil.copytree(new, everything, dirs_exist_ok=True)
    scratch = tmp_path / "scratch.miv"
    given = ("-o", scratch, "--no-augmentation", "--json")
    fitted = json.loads(miv("fit", everything, *given).out)["check"]
    added = json.loads(miv("add", mine, new, "--json").out)["estimate"]
    assert added["accuracy"] == pytest.approx(fitted["accuracy"])
    assert [added["low"], added["high"]] == pytest.approx(fitted["interval"])
    assert added["per_class"] == pytest.approx(list(fitted["per_class"].values()))
    for path in (scratch, mine):
        assert json.loads(miv("info", path, "--json").out)["estimate"] == added
    line = next(each for each in miv("info", mine).out.splitlines() if "accuracy" in each)
    again = miv("add", mine, tmp_path / "all", "-o", tmp_path / "same.miv").out
    assert "Expected" not in again  # nothing was added, so nothing is estimated
    fewer = miv("remove", mine, "rings/5.png").out
    assert "Expected accuracy on new images: " in fewer
    assert "on new images" in line
    assert miv("remove", mine, "rings/6.png", "--no-check").code == 0
    assert json.loads(miv("info", mine, "--json").out)["estimate"] is None


def test_with_views_too(miv, shots, tmp_path):
    """A class that shrinks needs views that the file does not hold; they are made of pictures."""
    model, scratch = tmp_path / "m.miv", tmp_path / "scratch.miv"
    assert miv("fit", shots, "-o", model, "--threshold", "3", "--no-check").code == 0
    assert miv("remove", model, "rings/1.png", "-o", model).code == 0
    fewer = shutil.copytree(shots, tmp_path / "fewer")
    (fewer / "rings" / "1.png").unlink()
    assert miv("fit", fewer, "-o", scratch, "--threshold", "3", "--no-check").code == 0
    assert probabilities(miv, model, shots) == probabilities(miv, scratch, shots)


def test_remove_rename_relabel_and_their_history(miv, mine):
    assert miv("remove", mine, "rings").out.startswith("Removed the class rings.\n")
    assert miv("rename", mine, "checks", "chess board").code == 0
    answer = miv("relabel", mine, "stripes/0.png", "chess board", "--json")
    document = json.loads(answer.out)
    assert document["change"] == "moved stripes/0.png from stripes to chess board"
    assert document["classes"] == {"chess board": 4, "stripes": 2}
    assert document["changed"] is True
    facts = json.loads(miv("info", mine, "--shots", "--json").out)
    assert [each["action"] for each in facts["history"]] == ["remove", "rename", "relabel"]
    moved = next(each for each in facts["shots"] if each["name"] == "stripes/0.png")
    assert moved["class"] == "chess board"
    text = miv("info", mine, "--shots").out
    assert "3 changes, the last on 20" in text
    assert "stripes/2.png  stripes" in text
    assert "shots" not in json.loads(miv("info", mine, "--json").out)


def test_corrections_from_a_table(miv, mine, tmp_path):
    table = tmp_path / "corrections.csv"
    table.write_text("shot,class\nrings/0.png,checks\nrings/1.png,checks\n")
    assert miv("relabel", mine, table).code == 0
    assert mivhead.load(mine).shots_.counts == {"checks": 5, "rings": 1, "stripes": 3}


def test_corrections_of_predictions(miv, mine, new, tmp_path, monkeypatch):
    """A downloaded table names images as the command line did, from the folder it ran in."""
    monkeypatch.chdir(new.parent)
    table = tmp_path / "downloads.csv"
    table.write_text(f"path,label\n{new.name}/rings/5.png,rings\n{new.name}/checks/6.png,new one\n")
    answer = miv("add", mine, table)
    assert answer.out.startswith("Added 2 shots: new one 1 (a new class), rings 1.")


def test_a_duplicate_is_left_out(miv, mine, shots):
    before = mine.read_bytes()
    answer = miv("add", mine, shots)
    assert answer.code == 0
    assert "9 images have the same content as shots" in answer.err
    assert answer.out.endswith(f"{mine} was not changed.\n")
    assert mine.read_bytes() == before


def test_output_to_another_file(miv, mine, new, tmp_path):
    other = tmp_path / "other.miv"
    assert miv("rename", mine, "rings", "circles", "-o", other, "--quiet").out == ""
    assert "rings" in mivhead.load(mine).classes_
    assert "circles" in mivhead.load(other).classes_
    assert not (tmp_path / "mine.miv.bak").exists()
    assert miv("rename", mine, "rings", "circles", "--no-backup").code == 0
    assert not (tmp_path / "mine.miv.bak").exists()


def test_features_are_added(miv, mine, new, tmp_path):
    features = tmp_path / "new.safetensors"
    assert miv("extract", new, "-o", features, "--no-augmentation").code == 0
    assert miv("add", mine, features).out.startswith("Added 6 shots")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["remove", "MODEL", "ring"], "no class or shot 'ring'. Did you mean 'rings'?"),
        (["remove", "MODEL", "rings", "checks"], "at least 2"),
        (["rename", "MODEL", "rings", "checks"], "--merge"),
        (["relabel", "MODEL", "rings/9.png", "checks"], "Did you mean 'rings/"),
        (["relabel", "MODEL", "rings/1.png"], "Name the class that rings/1.png belongs to"),
        (["relabel", "MODEL", "none.csv"], "none.csv does not exist"),
        (["add", "MODEL", "nowhere"], "nowhere does not exist"),
        (["add", "none.miv", "nowhere"], "none.miv does not exist"),
        (["add", "MODEL", "nowhere", "--label", "x"], "for database tables"),
        (["rename", "MODEL", "rings", "circles", "-o", "no/such/folder.miv"], "does not exist"),
    ],
)
def test_bad_input(fails, mine, arguments, words):
    before = mine.read_bytes()
    assert words in fails(*[mine if each == "MODEL" else each for each in arguments])
    assert mine.read_bytes() == before


def test_a_model_that_tunes_the_backbone_is_refused(tmp_path):
    from tests.helpers.tiny_backbone import TinyBackbone

    model = mivhead.FewShotClassifier(TinyBackbone(), method="finetune")
    model.classifier_, model.shots_ = object(), None
    with pytest.raises(mivhead.errors.InputError, match="finetune tunes the backbone"):
        model.remove("a")


def test_two_processes_that_change_one_model(mine, tmp_path):
    """One wins, and the other is told; the file is whole."""
    extra = write_images(tmp_path / "extra", classes=("rings",), numbers=[8, 9])
    commands = [["add", str(mine), str(extra)], ["remove", str(mine), "rings/0.png"]]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "mivhead", *command], stderr=subprocess.PIPE, text=True,
            stdout=subprocess.DEVNULL,
        )
        for command in commands
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in running]
    codes = [process.returncode for process in running]
    assert 0 in codes, errors
    for code, error in zip(codes, errors, strict=True):
        assert code == 0 or "is changing" in error, error
    left = mivhead.load(mine)
    assert len(left.history_) == codes.count(0)
    assert np.isfinite(left.predict_proba(left.shots_.features)).all()


def test_another_name_keeps_the_estimate(miv, shots, mine):
    assert miv("fit", shots, "-o", mine).code == 0
    before = json.loads(miv("info", mine, "--json").out)
    first = next(iter(before["classes"]))
    assert miv("rename", mine, first, "zzz").code == 0  # now the last class
    after = json.loads(miv("info", mine, "--json").out)
    assert list(after["classes"])[-1] == "zzz"
    expected = before["estimate"]
    assert after["estimate"] == {
        **expected,
        "per_class": [*expected["per_class"][1:], expected["per_class"][0]],
    }


def test_another_name_costs_no_fit(miv, mine, new, monkeypatch):
    before = probabilities(miv, mine, new)
    for name in ("fit_support", "cross_validated_logits"):  # the model has no estimate
        monkeypatch.setattr(mivhead.MIVClassifier, name, lambda *_, **__: 1 / 0)
    assert miv("rename", mine, "checks", "zebra").code == 0
    for now, then in zip(probabilities(miv, mine, new), before, strict=True):
        expected = {each["label"].replace("checks", "zebra"): each["probability"] for each in then}
        assert {each["label"]: each["probability"] for each in now} == pytest.approx(
            expected, abs=1e-6
        )
