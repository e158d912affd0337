"""Folders, zips and tables: what is found, in what order, and how hostile files are refused."""

import contextlib
import os
import stat
import struct
import sys
import unicodedata
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mivhead.errors import ImageError, InputError, MivError
from mivhead.images import sources as zips
from mivhead.images.imageset import (
    ImageSet,
    Skipped,
    check_images,
    from_images,
    natural_key,
)
from mivhead.images.sources import open_labelled, open_unlabelled
from tests.helpers.sample_files import TWO, make_folder, make_zip, png

LITTER = {
    "SOURCE.txt": b"where it is from",
    "preview.png": b"not even an image",
    ".DS_Store": b"x",
    "__MACOSX/cat/._1.png": b"x",
    ".git/images/a.png": b"x",
    "Thumbs.db": b"x",
    "cat/Thumbs.db": b"x",
    "cat/desktop.ini": b"x",
    "cat/.hidden.png": b"x",
    "cat/notes.txt": b"x",
}


@pytest.fixture(params=["folder", "zip", "wrapped zip", "wrapped folder"])
def build(request, tmp_path):
    """Make the same set in each of the shapes it may come in."""

    def make(files):
        if request.param == "folder":
            return make_folder(tmp_path / "set", files)
        if request.param == "zip":
            return make_zip(tmp_path / "set.zip", files)
        wrapped = {name if "MACOSX" in name else f"my set/{name}": files[name] for name in files}
        wrapped.pop("my set/preview.png", None)  # beside class folders, it would be a class's image
        if request.param == "wrapped zip":
            return make_zip(tmp_path / "set.zip", wrapped)
        return make_folder(tmp_path / "set", wrapped)

    return make


def test_order_ids_and_labels_are_the_same_for_folder_and_zip(build):
    images = open_labelled(build({**LITTER, **dict(reversed(TWO.items()))}))
    assert images.ids == tuple(TWO)
    assert images.labels == ("cat", "cat", "cat", "dog")
    assert images.classes == ("cat", "dog")
    assert [images.load(row).getpixel((0, 0))[0] for row in range(4)] == [1, 2, 10, 20]
    assert "cat/notes.txt" in {name.removeprefix("my set/") for name in images.ignored}
    assert not any("hidden" in name or "Thumbs" in name for name in images.ignored)
    assert images.load(3).getpixel((0, 0))[0] == 20


def test_folders_inside_a_class_belong_to_it(build):
    files = {**TWO, "dog/old/deep/b.png": png(3)}
    images = open_labelled(build(files))
    assert images.ids[-1] == "dog/old/deep/b.png"
    assert images.labels[-1] == "dog"


def test_class_names_with_spaces_and_unicode(build):
    decomposed = unicodedata.normalize("NFD", "Käfer älter")
    files = {f"{decomposed}/1.png": png(), "白い 猫/1.png": png(), "a.b c/1.PNG": png()}
    images = open_labelled(build(files))
    assert set(images.classes) == {"Käfer älter", "白い 猫", "a.b c"}
    assert check_images(images) == []


def test_what_is_not_a_set_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    make_folder(tmp_path / "flat", {"1.png": png()})
    make_folder(tmp_path / "one", {"cat/1.png": png()})
    make_folder(tmp_path / "gap", {**TWO, "bird/readme.txt": b"soon"})
    make_folder(tmp_path, {"a.bin": b"x", "a.zip": b"hello"})
    for name in ("nowhere", "empty", "flat", "one", "gap", "a.bin", "a.zip"):
        with pytest.raises(InputError, match=name):
            open_labelled(tmp_path / name)
    for name in ("nowhere", "empty", "a.zip"):
        with pytest.raises(InputError, match=name):
            open_unlabelled(tmp_path / name)
    with pytest.raises(InputError):
        open_unlabelled([])
    assert open_labelled(tmp_path / "one", min_classes=1).labels == ("cat",)


def test_unreadable_folder(tmp_path, monkeypatch):
    make_folder(tmp_path, TWO)
    original = os.scandir

    def refuse(folder):
        if Path(folder).name == "dog":
            raise PermissionError(13, "Permission denied")
        return original(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        open_labelled(tmp_path)


# One bad image among many.


def test_bad_image_can_be_skipped_and_is_reported(build):
    images = open_labelled(build({**TWO, "dog/b.jpg": b"", "cat/0.heic": b"ftypheic"}))
    with pytest.raises(ImageError, match=r"cat/0\.heic"):
        images.load(0)
    skipped = check_images(images)
    assert [image.id for image in skipped] == ["cat/0.heic", "dog/b.jpg"]
    assert "empty" in skipped[1].reason
    kept = images.without(skipped)
    assert kept.ids == tuple(TWO)
    assert kept.labels == ("cat", "cat", "cat", "dog")


def test_class_without_readable_images(build):
    images = open_labelled(build({**TWO, "bird/1.jpg": b"text", "bird/2.jpg": b""}))
    with pytest.raises(InputError, match="bird"):
        images.without(check_images(images))


def test_nothing_readable():
    images = from_images([b"", b"text"])
    with pytest.raises(InputError, match="image 0"):
        images.without(check_images(images))


# Prediction.


def test_unlabelled_from_everything_at_once(tmp_path, monkeypatch):
    make_folder(tmp_path, {f"new/{name}": content for name, content in {**LITTER, **TWO}.items()})
    (tmp_path / "new/preview.png").unlink()
    make_zip(tmp_path / "more.zip", {"x/2.png": png(), "x/1.png": png(), "SOURCE.txt": b""})
    make_folder(tmp_path, {"photo": png(7), ".me.png": png(8)})
    monkeypatch.chdir(tmp_path)
    images = open_unlabelled(["more.zip", "photo", "new", ".me.png", "new/Thumbs.db"])
    assert images.labels is None
    assert images.ids == (
        *("more.zip/x/1.png", "more.zip/x/2.png", "photo"),
        *("new/cat/1.png", "new/cat/2.png", "new/cat/10.png", "new/dog/a.png", ".me.png"),
    )
    assert check_images(images) == []


def test_patterns(tmp_path):
    make_folder(tmp_path, TWO)
    images = open_unlabelled(str(tmp_path / "cat" / "*.png"))
    assert [each.rpartition("/")[2] for each in images.ids] == ["1.png", "2.png", "10.png"]
    assert len(open_unlabelled(tmp_path / "**" / "?.png")) == 3
    odd = make_folder(tmp_path / "odd", {"a[1].png": png()})
    assert len(open_unlabelled(odd / "a[1].png")) == 1
    with pytest.raises(InputError, match="does not exist"):
        open_unlabelled(tmp_path / "*.gif")


def test_many_images_and_a_name_with_spaces_that_was_not_quoted(tmp_path):
    (tmp_path / "my cat.png").write_bytes(png())
    with pytest.raises(InputError, match="quotes"):
        open_unlabelled([tmp_path / "my", "cat.png"])
    assert len(open_unlabelled([tmp_path / "my cat.png"] * 999)) == 999  # longer than any name


def test_from_images_and_take(tmp_path):
    make_folder(tmp_path, {"a.png": png(5)})
    images = from_images([tmp_path / "a.png", np.zeros((2, 2), np.uint8), Image.new("L", (1, 1))])
    assert images.ids == (str(tmp_path / "a.png"), "image 1", "image 2")
    assert [images.load(row).size for row in range(3)] == [(3, 2), (2, 2), (1, 1)]
    labelled = ImageSet(images.sources, ("x", "y", "x")).take([2, 0])
    assert labelled.ids == ("image 2", str(tmp_path / "a.png"))
    assert labelled.labels == ("x", "x")
    assert labelled.without([Skipped("image 2", "bad")]).labels == ("x",)


@given(names=st.lists(st.text("ab019/é", min_size=1, max_size=8), max_size=8))
def test_order_is_total_and_does_not_depend_on_where_it_started(names):
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)


def test_numbers_of_any_length_are_ordered():
    longest = "a" + "1" * 5000
    assert sorted([longest, "a10", "a9"], key=natural_key) == ["a9", "a10", longest]


@pytest.mark.parametrize(
    "member",
    [
        *("/etc/cat/1.png", "../cat/1.png", "cat/../../1.png", "C:\\cat\\1.png", "..\\1.png"),
        "d/" * 15_000 + "1.png",
    ],
)
def test_zip_paths_that_lead_out_or_too_deep(member, tmp_path):
    path = make_zip(tmp_path / "a.zip", {**TWO, member: png()})
    with pytest.raises(InputError, match="path"):
        open_labelled(path)
    assert not list(tmp_path.glob("*.png"))


def test_zip_with_a_link_a_password_or_unusual_compression(tmp_path):
    link = zipfile.ZipInfo("dog/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    make_zip(tmp_path / "link.zip", {**TWO, link: b"/etc/passwd"})
    path = make_zip(tmp_path / "encrypted.zip", TWO)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag in the central directory
    path.write_bytes(data)
    make_zip(tmp_path / "compression.zip", TWO, zipfile.ZIP_BZIP2)
    for reason in ("link", "encrypted", "compression"):
        with pytest.raises(InputError, match=reason):
            open_labelled(tmp_path / f"{reason}.zip")


def test_zip_with_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(zips, "MAX_MEMBERS", 3)
    with pytest.raises(InputError, match="at most 3"):
        open_labelled(make_zip(tmp_path / "a.zip", TWO))


def test_zip_bomb_by_its_headers(tmp_path):
    path = make_zip(tmp_path / "a.zip", {f"cat/{i}.png": b"x" for i in range(5)})
    data = bytearray(path.read_bytes())
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 24 : at + 28] = struct.pack("<I", 2**30)  # each claims to unpack to 1 GiB
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"5\.0 GiB"):
        open_labelled(path)


def test_zip_member_is_read_up_to_a_limit_only(tmp_path, monkeypatch):
    monkeypatch.setattr("mivhead.images.decoding.MAX_FILE_BYTES", 2**20)
    path = make_zip(tmp_path / "a.zip", {**TWO, "cat/11.png": bytes(50 * 2**20)})
    skipped = check_images(open_labelled(path))
    assert [image.id for image in skipped] == ["cat/11.png"]


@pytest.mark.parametrize("claimed", [1, 10**6])
def test_zip_member_with_a_false_size(claimed, tmp_path):
    content = np.random.default_rng(0).bytes(5000)
    path = make_zip(tmp_path / "a.zip", {"cat/1.png": content, "dog/1.png": png()})
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", claimed)
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"a\.zip/cat/1\.png is (corrupted|not a)"):
        open_labelled(path).load(0)


@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_damaged_zip_gives_images_or_a_clear_error(changes, tmp_path_factory):
    path = make_zip(tmp_path_factory.getbasetemp() / "fuzz.zip", TWO)
    data = bytearray(path.read_bytes())
    for position, byte in changes:
        data[int(position * (len(data) - 1))] = byte
    path.write_bytes(data)
    with contextlib.suppress(MivError):
        check_images(open_labelled(path))


def test_zip_of_which_python_warns(tmp_path):
    odd = zipfile.ZipInfo("NAME")
    odd.extra = struct.pack("<HHBL", 0x7075, 5, 1, zlib.crc32(b"NAME"))  # "in Unicode: nothing"
    path = make_zip(tmp_path / "a.zip", {**TWO, odd: b"x"})
    with contextlib.suppress(MivError):  # Python 3.11 does not look at it
        assert open_labelled(path).ids == tuple(TWO)


def test_member_without_a_name(tmp_path):
    path = make_zip(tmp_path / "a.zip", {**TWO, "NAME": b"x"})
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\0AME"))  # Python cuts at a null byte
    assert open_labelled(path).ids == tuple(TWO)


def test_zip_is_read_while_iterating_not_before(tmp_path, monkeypatch):
    path = make_zip(tmp_path / "a.zip", TWO)
    reads = []
    original = zipfile.ZipFile.open

    def spy(self, info, *args):
        reads.append(info.filename)
        return original(self, info, *args)

    monkeypatch.setattr(zipfile.ZipFile, "open", spy)
    images = open_labelled(path)
    assert reads == []
    images.load(0)
    assert reads == ["cat/1.png"]


def table(tmp_path, text, encoding="utf-8"):
    make_folder(tmp_path / "pictures", TWO)
    path = tmp_path / "labels.csv"
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "path,label\npictures/dog/a.png,dog\npictures/cat/1.png,big cat\n",
        "pictures/dog/a.png,dog\r\npictures/cat/1.png,big cat",
        'Class;note;FileName\ndog;"a;b";pictures/dog/a.png\n\nbig cat;;pictures\\cat\\1.png\n',
        "image\tclass\n pictures/dog/a.png \tdog\npictures/./cat/1.png\tbig cat\n",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_table(text, encoding, tmp_path):
    images = open_labelled(table(tmp_path, text, encoding))
    assert images.ids == ("pictures/dog/a.png", "pictures/cat/1.png")
    assert images.labels == ("dog", "big cat")
    assert [images.load(row).getpixel((0, 0))[0] for row in range(2)] == [20, 1]


def test_table_with_absolute_paths(tmp_path):
    path = tmp_path / "pictures/cat/1.png"
    images = open_labelled(table(tmp_path, f"path,label\n{path},a\npictures/dog/a.png,b\n"))
    assert check_images(images) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "header"),
        ("path,label\n", "no images"),
        ("a,b\n1,2\n", "it has a, b"),
        ("path,label\na.png,\n", "line 2"),
        ("path,label\na.png,x\n./a.png,y\n", "line 3"),
        ("path,label\na.png,x\n", "only the class 'x'"),
        ('path,label\n"a.png,x\n', "read"),
        ("path,label\n\\\\host\\share\\a.png,x\n", "another computer"),
    ],
)
def test_bad_table(text, reason, tmp_path):
    with pytest.raises(InputError, match=reason):
        open_labelled(table(tmp_path, text))


def test_table_that_is_not_utf8(tmp_path):
    path = table(tmp_path, "path,label\na.png,Käfer\n", encoding="latin-1")
    with pytest.raises(InputError, match="UTF-8"):
        open_labelled(path)


def test_table_with_a_missing_image_names_file_and_line(tmp_path):
    images = open_labelled(table(tmp_path, "path,label\npictures/dog/a.png,x\ngone.png,y\n"))
    with pytest.raises(ImageError, match="line 3"):
        images.load(1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
@pytest.mark.parametrize("name", [b"caf\xe9/1.png", b"cat/caf\xe9.png"])
def test_names_that_are_not_utf_8_are_refused_before_any_work(name: bytes, tmp_path: Path) -> None:
    for inside in (b"cat/2.png", b"dog/1.png", name):
        path = tmp_path / os.fsdecode(inside)
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(InputError, match="UTF-8"):
        open_labelled(tmp_path)


def test_another_column_may_hold_the_labels(tmp_path):
    path = table(tmp_path, "file,site,Species\na.png,1,wren\nb.png,2,owl\n")
    assert open_labelled(path, label="species").labels == ("wren", "owl")
    for wrong in (None, "genus"):
        with pytest.raises(InputError, match="Species"):
            open_labelled(path, label=wrong)
    with pytest.raises(InputError, match="CSV"):
        open_labelled(tmp_path, label="species")


def linked_folders(root: Path, count: int) -> None:
    """Folders that all link to each other, with one image each."""
    for number in range(count):
        (root / f"c{number}").mkdir(parents=True)
        (root / f"c{number}" / "1.png").write_bytes(png())
        for other in range(count):
            if other != number:
                (root / f"c{number}" / f"to{other}").symlink_to(root / f"c{other}")


def test_folders_that_link_to_each_other_are_listed_once(tmp_path: Path) -> None:
    linked_folders(tmp_path, 12)
    assert open_labelled(tmp_path).ids == tuple(f"c{n}/1.png" for n in range(12))
    assert len(open_unlabelled(tmp_path)) == 12
    assert len(open_unlabelled(f"{tmp_path}/**/*.png")) == 12
    assert len(open_unlabelled(f"{tmp_path}/**")) == 12


def test_a_link_out_of_the_folder_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "1.png").write_bytes(png())
    (tmp_path / "shots" / "dog").mkdir(parents=True)
    (tmp_path / "shots" / "dog" / "1.png").write_bytes(png())
    (tmp_path / "shots" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path)
    ids = open_labelled(tmp_path / "shots").ids
    assert ids == ("cat/deep/1.png", "dog/1.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are for Unix")
@pytest.mark.parametrize("name", ["images.csv", "images.zip"])
def test_a_pipe_in_place_of_a_set_does_not_block(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a file"):
        open_labelled(tmp_path / name)
