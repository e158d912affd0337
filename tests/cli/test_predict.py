"""`miv predict`: tables, JSON, CSV, sorting into folders."""

import csv
import json
import re
import zipfile

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead.cli.predict import _as_table
from mivhead.cli.sorting import safe_name, sort_images
from mivhead.extraction import pipeline as extraction
from mivhead.images.sources import open_unlabelled
from mivhead.model.prediction import Prediction
from mivhead.spreadsheets import restore


@pytest.fixture(scope="module")
def expected(model, new):
    """What the library says: by file, classes with falling probability."""
    return {p.id: p.probabilities for p in mivhead.load(model).classify(new)}


def test_a_table_for_people(miv, model, new, expected):
    lines = miv("predict", model, new, "--reject", "0").out.splitlines()
    assert lines[0].split() == ["file", "class", "probability"]
    assert len(lines) == 1 + 6
    for line, (file, ranked) in zip(lines[1:], expected.items(), strict=True):
        assert line.split()[-3] == next(iter(ranked))
        assert file.endswith(line.split()[0][-20:])


def test_runners_up(miv, model, new, expected):
    lines = miv("predict", model, new / "rings" / "5.png", "--top", "2").out.splitlines()
    first, second = list(expected[f"{new.as_posix()}/rings/5.png"])[:2]
    assert lines[0].endswith("runners-up")
    assert re.search(rf" {first} +>?\d+ %  {second} <?\d+ %$", lines[1])


def test_json(miv, model, new, expected):
    document = json.loads(miv("predict", model, new, "--json", "--top", "3").out)
    assert document["skipped"] == []
    assert [each["file"] for each in document["predictions"]] == list(expected)
    for each in document["predictions"]:
        ranked = {top["label"]: top["probability"] for top in each["top"]}
        assert ranked == pytest.approx(expected[each["file"]])
        assert list(ranked) == list(expected[each["file"]])
        assert each["label"] == next(iter(ranked))


def test_decisions(miv, fails, model, new, tmp_path):
    foreign = tmp_path / "noise.png"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(foreign)
    known = new / "rings" / "5.png"
    found = json.loads(miv("predict", model, foreign, known, "--json", "--coverage", "80%").out)
    first, second = found["predictions"]
    assert first["decision"] == "none of these"
    assert second["label"] in second["set"]
    assert first["unknown"] > second["unknown"]
    kept = json.loads(miv("predict", model, foreign, known, "--json", "--reject", "0").out)
    assert kept["predictions"][0]["decision"] in (first["label"], "unsure")
    assert "set" not in kept["predictions"][0]
    assert f"none of these ({first['label']}?)" in miv("predict", model, foreign).out
    rows = miv("predict", model, foreign, known, "--csv", "--coverage", "0.8").out.splitlines()
    first_row, second_row = csv.DictReader(rows)
    assert first_row["decision"] == "none of these"
    assert float(first_row["unknown"]) == pytest.approx(first["unknown"], abs=1e-5)
    assert second_row["set"].split(";") == second["set"]
    assert "needs 99 shots" in fails("predict", model, known, "--coverage", "99%")
    with pytest.raises(SystemExit):
        miv("predict", model, known, "--max-errors", "500")
    assert "between 0 and 1" in fails("predict", model, known, "--coverage", "1")


def test_the_last_line_counts_names_and_what_other_thresholds_would_name(miv, model, new, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    given = ("predict", model, new, tmp_path / "noise.png")
    document = json.loads(miv(*given, "--json", "--max-errors", "0.01%").out)
    found = [each["decision"] for each in document["predictions"]]
    counts = document["decisions"]
    assert counts["none"] == found.count("none of these") > 0
    assert counts["unsure"] == found.count("unsure") > 0
    assert counts["named"] == 7 - counts["none"] - counts["unsure"]
    assert counts["named_by_max_errors"]
    for share, named in counts["named_by_max_errors"].items():
        other = json.loads(miv(*given, "--json", "--max-errors", share).out)["decisions"]
        assert other["named"] == named != counts["named"]
    printed = miv(*given, "--max-errors", "0.01%").err
    assert f"{counts['named']} of 7 images " in printed
    assert "With --max-errors " in printed
    assert miv(*given, "--quiet").err == ""


def test_a_class_prior(miv, fails, model, new):
    first = new / "rings" / "5.png"
    never = miv("predict", model, first, "--json", "--prior", "checks=1,rings=0,stripes=1").out
    (found,) = json.loads(never)["predictions"]
    assert found["label"] != "rings"
    assert "no class 'spirals'" in fails("predict", model, first, "--prior", "spirals=1")
    bad = "checks=-1,rings=1,stripes=1"
    assert "from 0 to 1e+100, got -1.0 for checks" in fails("predict", model, first, "--prior", bad)
    assert "only zeros" in fails("predict", model, first, "--prior", "checks=0,rings=0,stripes=0")
    assert "'often'" in fails("predict", model, first, "--prior", "often")
    with pytest.raises(SystemExit):
        miv("predict", model, first, "--prior", "checks=much")


def test_csv(miv, model, new, expected):
    rows = list(csv.DictReader(miv("predict", model, new, "--csv", "--top", "9").out.splitlines()))
    assert [row["file"] for row in rows] == list(expected)
    for row in rows:
        ranked = list(expected[row["file"]].items())
        assert row["label_3"] == ranked[2][0]
        assert float(row["probability_2"]) == pytest.approx(ranked[1][1], abs=1e-6)
        assert "label_4" not in row


def test_chunks_do_not_change_the_answer(miv, model, new, monkeypatch):
    whole = miv("predict", model, new, "--json").out
    monkeypatch.setattr(extraction, "PART", 4)
    parts = json.loads(miv("predict", model, new, "--json").out)["predictions"]
    for one, other in zip(json.loads(whole)["predictions"], parts, strict=True):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_images_folders_zips_and_patterns_together(miv, model, new, tmp_path):
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        archive.write(new / "stripes" / "5.png", "deep/er/s.png")
    places = [new / "rings", new / "checks" / "6.png", tmp_path / "new.zip", new / "s*" / "6.png"]
    document = json.loads(miv("predict", model, *places, "--json").out)
    ends = [each["file"].rpartition("/")[2] for each in document["predictions"]]
    assert ends == ["5.png", "6.png", "6.png", "s.png", "6.png"]


def test_a_features_file(miv, fails, model, new, expected, tmp_path):
    path = tmp_path / "new.safetensors"
    assert miv("extract", new, "-o", path, "--unlabelled").code == 0
    document = json.loads(miv("predict", model, path, "--json").out)
    assert [each["label"] for each in document["predictions"]] == [
        next(iter(ranked)) for ranked in expected.values()
    ]
    assert "copies images" in fails("predict", model, path, "--sort-into", tmp_path / "out")


EVERY_NAME = ("--reject", "0", "--max-errors", "99.9%")  # never "unsure" or "none of these"


def test_sort_into_copies_by_class_and_never_overwrites(miv, model, new, expected, tmp_path):
    out = tmp_path / "sorted"
    answer = miv("predict", model, new, "--sort-into", out, *EVERY_NAME)
    assert answer.code == 0
    assert answer.err == f"All 6 images were named.\nCopied 6 images into {out}.\n"
    mine = next(out.rglob("*.png"))
    mine.write_bytes(b"mine")
    answer = miv("predict", model, new, "--sort-into", out, *EVERY_NAME)
    assert answer.err.endswith(f"Copied 1 image into {out}; not copied again: 5.\n")
    assert mine.read_bytes() == b"mine"
    for file, ranked in expected.items():
        original = new.parent / file.removeprefix(f"{new.parent.as_posix()}/")
        copies = [c.read_bytes() for c in (out / next(iter(ranked))).iterdir()]
        assert copies.count(original.read_bytes()) == 1  # identical copies are recognised
        assert original.exists()
    assert len(list(out.rglob("*.png"))) == 7


def test_sort_into_has_folders_for_images_without_a_name(miv, model, new, tmp_path):
    out = tmp_path / "sorted"
    answer = miv("predict", model, new, "--sort-into", out, "--max-errors", "0.01%", "--json")
    document = json.loads(answer.out)
    expected = {each["decision"] for each in document["predictions"]}
    assert expected & {"unsure", "none of these"}
    assert {folder.name for folder in out.iterdir()} == expected


def test_a_file_instead_of_the_terminal(miv, fails, model, new, tmp_path):
    printed = miv("predict", model, new, "--csv").out
    path = tmp_path / "names.csv"
    answer = miv("predict", model, new, "-o", path)
    assert answer.out == ""
    assert answer.err.startswith(f"Wrote 6 predictions to {path}.\n")
    assert path.read_text(encoding="utf-8") == printed
    assert miv("predict", model, new, "-o", path, "--excel").code == 0
    written = path.read_bytes()
    assert written.startswith(b"\xef\xbb\xbffile,label,")
    assert written.decode("utf-8-sig").replace("\r\n", "\n") == printed
    assert written.count(b"\r\n") == 7
    assert miv("predict", model, new, "-o", tmp_path / "names.json").code == 0
    assert len(json.loads((tmp_path / "names.json").read_text("utf-8"))["predictions"]) == 6
    assert miv("predict", model, new, "--json", "-o", tmp_path / "names.txt").code == 0
    assert "must be a .csv or .json" in fails("predict", model, new, "-o", tmp_path / "names.xls")
    assert "does not exist" in fails("predict", model, new, "-o", tmp_path / "no" / "names.csv")


def test_on_windows_a_csv_file_is_for_excel(miv, model, new, tmp_path, monkeypatch):
    monkeypatch.setattr("mivhead.cli.predict._on_windows", lambda: True)
    assert miv("predict", model, new / "rings", "-o", tmp_path / "names.csv").code == 0
    assert (tmp_path / "names.csv").read_bytes().startswith(b"\xef\xbb\xbf")


def test_names_in_a_csv_file_are_harmless(miv, model, new, tmp_path, monkeypatch):
    picture = (new / "rings" / "5.png").read_bytes()
    monkeypatch.chdir(tmp_path)
    name = "=HYPERLINK(1)\x1b[31m.png"
    (tmp_path / name).write_bytes(picture)
    lines = miv("predict", model, name, "--csv").out.splitlines()
    assert lines[1].startswith("'=HYPERLINK(1)\\x1b[31m.png,")
    assert restore(next(csv.reader(lines[1:]))[0]) == name
    assert miv("predict", model, name, "--csv", "--raw").out.splitlines()[1].startswith(f"{name},")


def test_sort_into_a_place_that_is_no_folder(fails, model, new, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in fails("predict", model, new, "--sort-into", tmp_path / "file")
    assert "does not exist" in fails("predict", model, new, "--sort-into", tmp_path / "a" / "b")
    assert (tmp_path / "file").read_text() == "mine"


def test_sorting_is_safe_for_any_class_name(new, tmp_path):
    images = open_unlabelled([new / "rings", new / "checks"])
    names = ["../../up", "a/b", "A_b", "CON"]
    copies = sort_images(images, names, names, tmp_path / "out")
    folders = {copy.parent.name for copy in copies}
    assert folders == {"_._.._up", "a_b", "A_b (2)", "CON_"}
    assert all(copy.parent.parent == tmp_path / "out" for copy in copies)


def test_members_of_a_zip_are_written(new, tmp_path):
    picture = (new / "rings" / "5.png").read_bytes()
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        archive.writestr("x/a:b?.png", picture)
        archive.writestr("y/a:b?.png", picture + b".")
    images = open_unlabelled(tmp_path / "new.zip")
    copies = sort_images(images, ["r", "r"], ["r"], tmp_path / "out")
    assert [copy.name for copy in copies] == ["a_b_.png", "a_b_ (2).png"]
    assert [copy.read_bytes() for copy in copies] == [picture, picture + b"."]
    assert sort_images(images, ["r", "r"], ["r"], tmp_path / "out") == []


def test_half_a_copy_is_removed(new, tmp_path, monkeypatch):
    def full(source, target):
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(mivhead.errors.NotAvailableError, match="No space left"):
        sort_images(open_unlabelled(new / "rings"), ["r", "r"], ["r"], tmp_path / "out")
    assert list((tmp_path / "out" / "r").iterdir()) == []


def test_safe_names_are_safe():
    generator = np.random.default_rng(0)
    alphabet = [*'ab.. /\\:*?"<>|\n\x00é猫', "con", "x" * 300]
    for _ in range(500):
        name = safe_name("".join(generator.choice(alphabet, size=generator.integers(0, 8))))
        assert 0 < len(name.encode()) <= 255
        assert not set(name) & set('/\\:*?"<>|\n\x00')
        assert not name.startswith(".")
        assert not name.endswith((".", " "))


def test_long_names_are_shortened_one_by_one():
    names = [letter * 60 for letter in "abc"]
    probabilities = dict(zip(names, (0.7, 0.2, 0.1), strict=True))
    text = _as_table([Prediction("d" * 90, names[0], 0.7, probabilities)], top=3)
    file, name, _, others = re.split("  +", text.splitlines()[1])
    assert len(file) == len(name) == 48
    assert re.fullmatch(r"b+\.\.\.b+ 20 %, c+\.\.\.c+ 10 %", others)
