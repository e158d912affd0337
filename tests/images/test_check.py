"""`check_set` and `miv data check`: every kind of finding, and none where there is none."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from mivhead.cli.main import main
from mivhead.images.check import check_set
from mivhead.images.sources import open_labelled
from tests.helpers.record_files import write_set
from tests.helpers.sample_files import make_folder, make_zip, png


def picture(seed, kind="PNG", size=(8, 6)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


GOOD = {
    "cat/1.png": picture(1),
    "cat/2.png": picture(2, size=(10, 20)),
    "cat/3.png": picture(3),
    "dog/1.png": picture(4, size=(4, 30)),
}


def check(files, tmp_path):
    return check_set(open_labelled(make_folder(tmp_path / "set", files), min_classes=1))


def test_a_good_set(tmp_path):
    report = check(GOOD, tmp_path)
    assert report.good
    assert report.classes == {"cat": 3, "dog": 1}
    assert report.images == 4
    assert report.sizes == (4, 6.0, 10)  # short sides 6, 10, 6, 4
    assert report.most_common_size == (8, 6, 2)
    assert report.unreadable == report.duplicates == ()


def test_duplicates_by_file_and_by_pixels(tmp_path):
    files = {
        **GOOD,
        "cat/copy.png": picture(1),
        "dog/same.bmp": picture(2, "BMP", (10, 20)),  # the same pixels in another format
        "dog/turned.png": picture(2, size=(20, 10)),  # the same values in another shape
    }
    report = check(files, tmp_path)
    across, within = report.duplicates  # those across classes come first
    assert across.ids == ("cat/2.png", "dog/same.bmp")
    assert across.labels == ("cat", "dog")
    assert not across.same_files
    assert within.ids == ("cat/1.png", "cat/copy.png")
    assert within.labels == ("cat",)
    assert within.same_files
    assert report.contradictions == (across,)
    assert not report.good


def test_unreadable_images_are_counted_and_named(tmp_path):
    report = check({**GOOD, "dog/a.jpg": b"hello", "dog/b.jpg": b""}, tmp_path)
    assert report.classes == {"cat": 3, "dog": 3}
    assert [each.id for each in report.unreadable] == ["dog/a.jpg", "dog/b.jpg"]
    assert "a.jpg is not a JPEG" in report.unreadable[0].reason
    assert not report.good


def test_a_set_without_a_readable_image(tmp_path):
    report = check({"cat/a.jpg": b"hello"}, tmp_path)
    assert report.sizes is None
    assert report.most_common_size is None


def test_zips_and_records_are_checked_alike(tmp_path):
    files = {"cat/1.png": png(1), "cat/2.png": png(2), "dog/1.png": png(2)}
    in_zip = check_set(open_labelled(make_zip(tmp_path / "set.zip", files)))
    write_set(tmp_path / "records", [("cat", [png(1), png(2)]), ("dog", [png(2)])])
    in_records = check_set(open_labelled(tmp_path / "records"))
    assert in_zip.contradictions[0].ids == ("cat/2.png", "dog/1.png")
    assert in_records.contradictions[0].ids == ("cat/00001", "dog/00000")
    assert in_zip.sizes == in_records.sizes == (2, 2.0, 2)


def test_progress_counts_every_image(tmp_path):
    steps = []
    check_set(open_labelled(make_folder(tmp_path, {**GOOD, "dog/a.jpg": b"x"})), steps.append)
    assert steps == [1] * 5


@pytest.fixture
def miv(capsys):
    def run(*arguments):
        code = main([str(each) for each in arguments])
        return code, capsys.readouterr().out

    return run


def test_command_on_a_good_set(miv, tmp_path):
    code, out = miv("data", "check", make_folder(tmp_path / "set", GOOD))
    assert code == 0
    assert "4 images in 2 classes, 1 to 3 per class" in out
    assert "The short side has 4 to 10 pixels (median 6); the most common size is 8 x 6" in out
    assert "All images can be read, and there are no duplicates." in out


def test_command_on_a_bad_set(miv, tmp_path):
    files = {**GOOD, "dog/x.jpg": b"hello", "dog/2.png": picture(1), "dog/3.bmp": picture(4, "BMP")}
    code, out = miv("data", "check", make_folder(tmp_path / "set", files))
    assert code == 1
    assert "Images that cannot be read (1):\n" in out
    assert "Duplicates across classes (1):\n  cat/1.png = dog/2.png\n" in out
    assert "All images" not in out


def test_command_on_a_repetition_within_a_class(miv, tmp_path):
    files = {**GOOD, "cat/4.bmp": picture(1, "BMP")}
    code, out = miv("data", "check", make_folder(tmp_path / "set", files))
    assert code == 0
    assert "within a class (1):\n  cat/1.png = cat/4.bmp (same pixels, different files)" in out


def test_long_lists_are_cut_but_not_in_json(miv, tmp_path):
    files = {f"class{i}/{i}.jpg": b"hello" for i in range(30)}
    folder = make_folder(tmp_path / "set", files)
    code, out = miv("data", "check", folder)
    assert code == 1
    assert "... and 10 more classes" in out
    assert "  ... and 10 more (--json lists all)" in out
    code, out = miv("data", "check", folder, "--json")
    document = json.loads(out)
    assert code == 1
    assert len(document["classes"]) == len(document["unreadable"]) == document["images"] == 30
    assert document["good"] is False


def test_command_without_a_set(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path / "none")]) == 2
    assert "none does not exist" in capsys.readouterr().err
