"""`miv predict`: tables, JSON, CSV, sorting into folders."""

import csv
import json
import re
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead.cli.predict import _as_csv, _as_table
from mivhead.decision import NONE
from mivhead.images.imageset import safe_name, sort_images
from mivhead.images.sources import open_unlabelled
from mivhead.prediction import Prediction


@pytest.fixture(scope="module")
def expected(model, new):
    """What the library says: by file, classes with falling probability."""
    return {p.id: p.probabilities for p in mivhead.load(model).classify(new)}


@pytest.fixture
def noise(tmp_path):
    """An image of nothing."""
    path = tmp_path / "noise.png"
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_a_table_for_people(miv, model, new, expected):
    answer = miv("predict", model, new, "--reject", "0", "--top", "2")
    header, *lines = answer.out.splitlines()
    assert header.split() == ["file", "decision"]
    assert len(lines) == 6
    for line, (file, ranked) in zip(lines, expected.items(), strict=True):
        first, second = list(ranked)[:2]
        assert re.search(rf" ({first}|unsure) +{first} .*%, {second} ", line)
        assert file.endswith(line.split("  ")[0][-20:])
    assert "of 6 photos; " in answer.err
    assert miv("predict", model, new, "--quiet").err == ""


def test_json_and_csv(miv, fails, model, new, expected, tmp_path):
    document = json.loads(miv("predict", model, new, "--json", "--top", "3").out)
    assert document["skipped"] == []
    assert [prediction["file"] for prediction in document["predictions"]] == list(expected)
    for prediction in document["predictions"]:
        ranked = {top["label"]: top["probability"] for top in prediction["top"]}
        assert ranked == pytest.approx(expected[prediction["file"]])
        assert prediction["closest"] == next(iter(ranked))
    path = tmp_path / "names.csv"
    answer = miv("predict", model, new, "-o", path, "--top", "9")
    assert answer.out == ""
    assert answer.err.startswith(f"Wrote 6 predictions to {path}.\n")
    text = path.read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        ranked = list(expected[row["file"]].items())
        assert row["class_3"] == ranked[2][0]
        assert float(row["probability_2"]) == pytest.approx(ranked[1][1], abs=1e-6)
        assert "class_4" not in row
    assert miv("predict", model, new, "-o", path, "--top", "9", "--excel").code == 0
    assert path.read_bytes().startswith(b"\xef\xbb\xbffile,decision,")
    assert path.read_text(encoding="utf-8-sig").replace("\r\n", "\n") == text
    assert miv("predict", model, new, "-o", tmp_path / "names.json", "--top", "3").code == 0
    assert json.loads((tmp_path / "names.json").read_text("utf-8")) == document
    assert ".csv or .json" in fails("predict", model, new, "-o", tmp_path / "names.xls")


def test_runners_up_are_not_the_closest_class():
    ranked = {"other": 0.75, "dog": 0.125, "cat": 0.125}  # `other` is never the closest
    text = _as_csv([Prediction("a.jpg", "dog", 0.125, ranked, NONE, 1.5)], 2, excel=False)
    row = text.splitlines()[1].split(",")
    assert row[2] == "dog"
    assert row[5] == "other"


def test_decisions(miv, model, new, noise):
    known = new / "rings" / "5.png"
    document = json.loads(miv("predict", model, noise, known, "--json").out)
    first, second = document["predictions"]
    assert first["decision"] == "none of these"
    assert document["decisions"]["none"] == 1
    assert first["unknown"] > second["unknown"]
    kept = json.loads(miv("predict", model, noise, known, "--json", "--reject", "0").out)
    assert kept["predictions"][0]["decision"] in (first["closest"], "unsure")
    assert f"closest: {first['closest']}" in miv("predict", model, noise).out
    strict = json.loads(miv("predict", model, new, "--json", "--max-errors", "0.01%").out)
    assert strict["decisions"]["unsure"] > 0


def test_a_class_prior(miv, fails, model, new):
    first = new / "rings" / "5.png"
    never = miv("predict", model, first, "--json", "--prior", "checks=1,rings=0,stripes=1").out
    (prediction,) = json.loads(never)["predictions"]
    assert prediction["closest"] != "rings"
    assert "'spirals'" in fails("predict", model, first, "--prior", "spirals=1")


def test_images_folders_zips_and_patterns_together(miv, model, new, tmp_path):
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        archive.write(new / "stripes" / "5.png", "deep/er/s.png")
    places = [new / "rings", new / "checks" / "6.png", tmp_path / "new.zip", new / "s*" / "6.png"]
    document = json.loads(miv("predict", model, *places, "--json").out)
    ends = [prediction["file"].rpartition("/")[2] for prediction in document["predictions"]]
    assert ends == ["5.png", "6.png", "6.png", "s.png", "6.png"]


def test_a_features_file(miv, fails, model, new, expected, tmp_path):
    path = tmp_path / "new.safetensors"
    assert miv("extract", new, "-o", path, "--no-labels").code == 0
    document = json.loads(miv("predict", model, path, "--json").out)
    assert [prediction["closest"] for prediction in document["predictions"]] == [
        next(iter(ranked)) for ranked in expected.values()
    ]
    assert "not features" in fails("predict", model, path, "--sort-into", tmp_path / "out")


def test_crops_of_boxes(miv, model, new, tmp_path):
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("file,x,y,w,h\nrings/5.png,0,0,48,48\nchecks/5.png,0,0,48,48\n")
    document = json.loads(miv("predict", model, new, "--boxes", boxes, "--json").out)
    assert [prediction["closest"] for prediction in document["predictions"]] == ["rings", "checks"]
    assert miv("predict", model, new, "--boxes", boxes, "-o", tmp_path / "named.csv").code == 0
    assert "rings/5.png" in (tmp_path / "named.csv").read_text()


def test_predictions_as_a_page(miv, model, new, tmp_path):
    page = tmp_path / "results.html"
    answer = miv("predict", model, new, "--html", page, "--json")
    assert answer.code == 0, answer.err
    plain = json.loads(miv("predict", model, new, "--json").out)["predictions"]
    assert json.loads(answer.out)["predictions"] == plain
    text = page.read_text()
    assert "model: 6 photos" in text
    assert all(f"{name}/5.png" in text for name in ("rings", "checks", "stripes"))


EVERY_NAME = ("--reject", "0", "--max-errors", "99.9%")  # never "unsure" or "none of these"


def test_sort_into_copies_by_class_and_never_overwrites(miv, fails, model, new, expected, tmp_path):
    out = tmp_path / "sorted"
    answer = miv("predict", model, new, "--sort-into", out, *EVERY_NAME)
    assert answer.code == 0
    assert "5.png" not in answer.out  # a line per name, not per image
    assert f"Copied 6 photos into {out}.\n" in answer.err
    mine = next(out.rglob("*.png"))
    mine.write_bytes(b"mine")
    answer = miv("predict", model, new, "--sort-into", out, *EVERY_NAME)
    assert f"Copied 1 photo into {out}; not copied again: 5.\n" in answer.err
    assert mine.read_bytes() == b"mine"
    for file, ranked in expected.items():
        original = new.parent / file.removeprefix(f"{new.parent.as_posix()}/")
        copies = [copy.read_bytes() for copy in (out / next(iter(ranked))).iterdir()]
        assert copies.count(original.read_bytes()) == 1  # identical copies are recognised
    assert len(list(out.rglob("*.png"))) == 7
    assert "is a file" in fails("predict", model, new, "--sort-into", mine)


def test_sort_into_has_folders_for_images_without_a_name(miv, model, new, tmp_path):
    out = tmp_path / "sorted"
    answer = miv("predict", model, new, "--sort-into", out, "--max-errors", "0.01%", "--json")
    document = json.loads(answer.out)
    decisions = {prediction["decision"] for prediction in document["predictions"]}
    assert decisions & {"unsure", "none of these"}
    assert {folder.name for folder in out.iterdir()} == decisions


def test_sorting_stays_inside_for_any_class_name(new, tmp_path):
    names = ["../../x", "/etc/x", "..", "CON", "a\nb", "a b", "x" * 5000, "x" * 5000 + "y", "A B"]
    images = open_unlabelled([new / "rings" / "5.png"] * len(names))
    out = tmp_path / "deep" / "out"
    copies = sort_images(images, names, names, out)
    assert len({copy.parent.name.casefold() for copy in copies}) == len(names)
    assert all(copy.resolve().parent.parent == out.resolve() for copy in copies)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert sort_images(images, names, names, out) == []  # nothing is written twice


def test_safe_names_are_safe():
    generator = np.random.default_rng(0)
    alphabet = [*'ab.. /\\:*?"<>|\n\x00é猫', "con", "x" * 300]
    for _ in range(500):
        name = safe_name("".join(generator.choice(alphabet, size=generator.integers(0, 8))))
        assert 0 < len(name.encode()) <= 255
        assert not set(name) & set('/\\:*?"<>|\n\x00')
        assert not name.startswith(".")
        assert not name.endswith((".", " "))


def test_members_of_a_zip_are_written(new, tmp_path):
    picture = (new / "rings" / "5.png").read_bytes()
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        archive.writestr("x/a:b?.png", picture)
        archive.writestr("y/a:b?.png", picture + b".")
    images = open_unlabelled(tmp_path / "new.zip")
    copies = sort_images(images, ["r", "r"], ["r"], tmp_path / "out")
    assert [copy.name for copy in copies] == ["a_b_.png", "a_b_ (2).png"]
    assert [copy.read_bytes() for copy in copies] == [picture, picture + b"."]


def test_half_a_copy_is_removed(new, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copystat", full)  # the content is written by then
    with pytest.raises(mivhead.errors.NotAvailableError, match="No space left"):
        sort_images(open_unlabelled(new / "rings"), ["r", "r"], ["r"], tmp_path / "out")
    assert list((tmp_path / "out" / "r").iterdir()) == []


NAMES = ("\t=cmd|1.png", "red\x1b[31m.png", "left\u202egnp.png", "<b>bold.png", "+1;=2.png")


def test_names_of_strangers_are_inert(miv, model, new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / name).write_bytes((new / "rings" / "5.png").read_bytes())
    answer = miv("predict", model, *NAMES, "-o", "names.csv", "--html", "names.html")
    printed = answer.err + miv("predict", model, *NAMES).out + miv("explain", model, *NAMES).out
    document = miv("predict", model, *NAMES, "--json").out
    assert [row["file"] for row in json.loads(document)["predictions"]] == [*NAMES]
    lines = (tmp_path / "names.csv").read_text(encoding="utf-8").splitlines()
    cells = [row[0] for row in csv.reader(lines)]
    for text in (printed, document, *cells):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert not any(re.match(r"\s*[=+@-]", cell) for cell in cells)
    assert "<b>bold" not in (tmp_path / "names.html").read_text(encoding="utf-8")


def test_long_names_are_shortened_one_by_one():
    names = [letter * 60 for letter in "abc"]
    probabilities = dict(zip(names, (0.7, 0.2, 0.1), strict=True))
    text = _as_table([Prediction("d" * 90, names[0], 0.7, probabilities)], top=3)
    file, name, ranked = re.split("  +", text.splitlines()[1])
    assert len(file) == len(name) == 48
    assert re.fullmatch(r"a+\.\.\.a+ 70%, b+\.\.\.b+ 20%, c+\.\.\.c+ 10%", ranked)
    foreign = Prediction("d.jpg", "ant", 0.7, {"ant": 0.7, "bee": 0.3}, NONE)
    assert _as_table([foreign], top=1).endswith(
        "none of these  unlike all your photos; closest: ant"
    )


def test_hints_at_what_was_meant(fails, model, new, tmp_path, monkeypatch):
    shutil.copytree(new, tmp_path / "Neue Fotos")
    shutil.copy(model, tmp_path / "birds.miv")
    monkeypatch.chdir(tmp_path)
    assert '"Neue Fotos"' in fails("predict", "birds.miv", "Neue", "Fotos")
    assert "quotes" in fails("fit", "Neue", "Fotos")
    assert "mean Neue Fotos?" in fails("fit", "Neue Foto")
    assert "mean birds.miv?" in fails("predict", "bird.miv", "Neue Fotos")
    for command in ("serve", "predict"):
        assert "model comes first" in fails(command, "Neue Fotos", "birds.miv")
