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
    return [prediction["top"] for prediction in answer["predictions"]]


def test_adding_equals_fitting_all_images(miv, shots, new, mine, tmp_path):
    answer = miv("add", mine, new)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("Added 6 shots: checks 2, rings 2, stripes 2.\n")
    assert "3 classes and 15 shots" in answer.out
    assert answer.out.endswith(f"the old model is {mine}.bak.\n")
    everything = shutil.copytree(shots, tmp_path / "all")
    shutil.copytree(new, everything, dirs_exist_ok=True)
    scratch = mivhead.FewShotClassifier(threshold=0, verbose=False).fit(everything)
    scratch.save(tmp_path / "scratch.miv")
    assert probabilities(miv, mine, new) == probabilities(miv, tmp_path / "scratch.miv", new)
    facts = json.loads(miv("info", mine, "--json").out)
    assert facts["estimate"]["accuracy"] == pytest.approx(scratch.check().accuracy)


def test_remove_rename_relabel_and_their_history(miv, mine):
    assert miv("remove", mine, "rings").out.startswith("Removed the class rings.\n")
    assert "Of 100 new photos" in miv("rename", mine, "checks", "chess board").out
    answer = miv("relabel", mine, "stripes/0.png", "chess board", "--json", "--no-check")
    document = json.loads(answer.out)
    assert document["change"] == "moved stripes/0.png from stripes to chess board"
    assert document["classes"] == {"chess board": 4, "stripes": 2}
    assert (document["changed"], document["estimate"]) == (True, None)
    facts = json.loads(miv("info", mine, "--shots", "--json").out)
    assert [change["action"] for change in facts["history"]] == ["remove", "rename", "relabel"]
    moved = next(shot for shot in facts["shots"] if shot["name"] == "stripes/0.png")
    assert moved["class"] == "chess board"
    text = miv("info", mine, "--shots").out
    assert "3 changes, the last on 20" in text
    assert "stripes/2.png  stripes" in text


def test_corrections_from_tables(miv, mine, new, tmp_path, monkeypatch):
    table = tmp_path / "corrections.csv"
    monkeypatch.chdir(new.parent)  # names of images are relative to where `miv predict` ran
    table.write_text(f"path,label\n{new.name}/rings/5.png,rings\n{new.name}/checks/6.png,new one\n")
    answer = miv("add", mine, table, "--no-check")
    assert answer.out.startswith("Added 2 shots: new one 1 (a new class), rings 1.")


def test_names_that_look_mistyped_make_no_class(miv, fails, mine, new, tmp_path):
    table = tmp_path / "corrections.csv"

    def correct(name):
        table.write_text(f'path,label\n"{new}/rings/5.png",{name}\n')

    for slip in ("Rings", "ring", "rinks"):
        correct(slip)
        assert "'rings'" in fails("add", mine, table)
    answer = miv("add", mine, table, "--no-check", "--new-class", "-o", tmp_path / "more.miv")
    assert "rinks 1 (a new class)" in answer.out
    correct("None of these")
    assert "other 1 (a new class)" in miv("add", mine, table, "--no-check").out


def test_what_nobody_named_is_left_out(miv, fails, mine, new, tmp_path):
    by_machine = tmp_path / "sorted"
    for folder, name in (
        ("rings", "rings/5"),
        ("unsure", "rings/6"),
        ("none of these", "checks/5"),
    ):
        (by_machine / folder).mkdir(parents=True)
        shutil.copy(new / f"{name}.png", by_machine / folder)
    answer = miv("add", mine, by_machine, "--no-check")
    assert answer.out.startswith("Added 1 shot: rings 1.")
    assert "2 images" in answer.err
    shutil.rmtree(by_machine / "rings")
    assert "class" in fails("add", mine, by_machine)


def test_a_duplicate_is_left_out(miv, mine, shots):
    before = mine.read_bytes()
    answer = miv("add", mine, shots)
    assert answer.code == 0
    assert "same content" in answer.err
    assert answer.out.endswith(f"{mine} was not changed.\n")
    assert mine.read_bytes() == before


def test_output_to_another_file(miv, mine, new, tmp_path):
    other, features = tmp_path / "other.miv", tmp_path / "new.safetensors"
    assert miv("rename", mine, "rings", "circles", "-o", other, "--quiet").out == ""
    assert "rings" in mivhead.load(mine).classes_
    assert "circles" in mivhead.load(other).classes_
    assert not (tmp_path / "mine.miv.bak").exists()
    assert miv("extract", new, "-o", features).code == 0
    assert miv("add", mine, features, "-o", other, "--no-check").out.startswith("Added 6 shots")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["remove", "MODEL", "ring"], "'rings'?"),
        (["remove", "MODEL", "rings", "checks"], "at least 2"),
        (["rename", "MODEL", "rings", "checks"], "--merge"),
        (["relabel", "MODEL", "rings/1.png"], "CLASS"),
        (["add", "MODEL", "nowhere"], "nowhere"),
        (["add", "none.miv", "nowhere"], "does not exist"),
        (["rename", "MODEL", "rings", "circles", "-o", "no/such/folder.miv"], "does not exist"),
    ],
)
def test_refusals(fails, mine, arguments, words):
    before = mine.read_bytes()
    assert words in fails(*[mine if word == "MODEL" else word for word in arguments])
    assert mine.read_bytes() == before


def test_two_processes_that_change_one_model(mine, tmp_path):
    """One wins, and the other is told; the file is whole."""
    extra = write_images(tmp_path / "extra", classes=("rings",), numbers=[8, 9])
    commands = [["add", str(mine), str(extra)], ["remove", str(mine), "rings/0.png"]]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "mivhead", *command, "--no-check", "--json"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for command in commands
    ]
    errors = [process.communicate()[1] for process in running]
    codes = [process.returncode for process in running]
    assert 0 in codes, errors
    for code, error in zip(codes, errors, strict=True):
        assert code == 0 or "is changing" in error, error
    left = mivhead.load(mine)
    assert len(left.history_) == codes.count(0)
    assert np.isfinite(left.predict_proba(left.shots_.features)).all()
