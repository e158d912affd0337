"""Folders, zips and tables: what is found, in what order, and how hostile files are refused."""

import contextlib
import os
import stat
import struct
import sys
import unicodedata
import zipfile
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
    iter_images,
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
    reds = [image.getpixel((0, 0))[0] for _, image in iter_images(images)]
    assert reds == [1, 2, 10, 20]
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


def test_missing_path(tmp_path):
    for open_it in (open_labelled, open_unlabelled):
        with pytest.raises(InputError, match="nowhere does not exist"):
            open_it(tmp_path / "nowhere")


def test_empty_folder(tmp_path):
    with pytest.raises(InputError, match=r"contains no images; put each class.*/cat/1\.jpg"):
        open_labelled(tmp_path)
    with pytest.raises(InputError, match="contains no images"):
        open_unlabelled(tmp_path)
    with pytest.raises(InputError, match="There are no images"):
        open_unlabelled([])


def test_images_without_class_folders(tmp_path):
    make_folder(tmp_path, {"1.png": png()})
    with pytest.raises(InputError, match=r"no class folders; put each class.*/dog/1\.jpg"):
        open_labelled(tmp_path)


def test_one_class_only(tmp_path):
    make_folder(tmp_path, {"cat/1.png": png()})
    with pytest.raises(InputError, match="only the class 'cat'; at least 2"):
        open_labelled(tmp_path)
    assert open_labelled(tmp_path, min_classes=1).labels == ("cat",)


def test_class_folder_without_images(build):
    with pytest.raises(InputError, match=r"class folder 'bird' .*contains no images"):
        open_labelled(build({**TWO, "bird/readme.txt": b"soon"}))


def test_wrong_kind_of_file(tmp_path):
    make_folder(tmp_path, {"a.bin": b"x"})
    with pytest.raises(InputError, match=r"is not a folder .*, a \.zip or a \.csv"):
        open_labelled(tmp_path / "a.bin")


def test_unreadable_folder(tmp_path, monkeypatch):
    make_folder(tmp_path, TWO)
    original = os.scandir

    def refuse(folder):
        if Path(folder).name == "dog":
            raise PermissionError(13, "Permission denied")
        return original(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="dog cannot be read: Permission denied"):
        open_labelled(tmp_path)


def test_links_are_followed_but_not_in_circles(tmp_path):
    make_folder(tmp_path / "store", {"dog/a.png": png(20)})
    root = make_folder(tmp_path / "set", {"cat/1.png": png(1)})
    (root / "dog").symlink_to(tmp_path / "store" / "dog")
    (root / "cat" / "again").symlink_to(root)
    images = open_labelled(root)
    assert {"cat/1.png", "dog/a.png"} <= set(images.ids)


# One bad image among many.


def test_bad_image_is_an_error_that_names_it(build):
    images = open_labelled(build({**TWO, "dog/b.jpg": b"text"}))
    with pytest.raises(ImageError, match=r"dog/b\.jpg is not a JPEG"):
        list(iter_images(images))


def test_bad_image_can_be_skipped_and_is_reported(build):
    images = open_labelled(build({**TWO, "dog/b.jpg": b"", "cat/0.heic": b"ftypheic"}))
    skipped = []
    rows = [row for row, _ in iter_images(images, skipped)]
    assert rows == [1, 2, 3, 4]
    assert [each.id for each in skipped] == ["cat/0.heic", "dog/b.jpg"]
    assert "empty" in skipped[1].reason
    assert check_images(images) == skipped
    kept = images.without(skipped)
    assert kept.ids == tuple(TWO)
    assert kept.labels == ("cat", "cat", "cat", "dog")


def test_class_without_readable_images(build):
    images = open_labelled(build({**TWO, "bird/1.jpg": b"text", "bird/2.jpg": b""}))
    with pytest.raises(InputError, match=r"class 'bird' has no readable images: .*1\.jpg is not"):
        images.without(check_images(images))


def test_nothing_readable():
    images = from_images([b"", b"text"])
    with pytest.raises(InputError, match="None of the images can be read: image 0 is empty"):
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


def test_from_images_and_take(tmp_path):
    make_folder(tmp_path, {"a.png": png(5)})
    images = from_images([tmp_path / "a.png", np.zeros((2, 2), np.uint8), Image.new("L", (1, 1))])
    assert images.ids == (str(tmp_path / "a.png"), "image 1", "image 2")
    assert [image.size for _, image in iter_images(images)] == [(3, 2), (2, 2), (1, 1)]
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


@pytest.mark.skipif("MIV_DATA" not in os.environ, reason="MIV_DATA names no folder of image sets")
def test_real_sets_open():
    roots = [each for each in Path(os.environ["MIV_DATA"]).iterdir() if each.is_dir()]
    assert roots
    for root in roots:
        images = open_labelled(root)
        assert len(images.classes) >= 2
        assert images.load(0).mode == "RGB"


@pytest.mark.parametrize(
    "member", ["/etc/cat/1.png", "../cat/1.png", "cat/../../1.png", "C:\\cat\\1.png", "..\\1.png"]
)
def test_zip_paths_that_lead_out(member, tmp_path):
    path = make_zip(tmp_path / "a.zip", {**TWO, member: png()})
    with pytest.raises(InputError, match=r"a\.zip contains .* leads out of the zip"):
        open_labelled(path)
    assert not list(tmp_path.glob("*.png"))


def test_zip_with_a_link(tmp_path):
    link = zipfile.ZipInfo("dog/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = make_zip(tmp_path / "a.zip", {**TWO, link: b"/etc/passwd"})
    with pytest.raises(InputError, match=r"contains the link 'dog/link\.png'"):
        open_labelled(path)


def test_encrypted_zip(tmp_path):
    path = make_zip(tmp_path / "a.zip", TWO)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag in the central directory
    path.write_bytes(data)
    with pytest.raises(InputError, match="is encrypted"):
        open_labelled(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_with_unusual_compression(method, tmp_path):
    path = make_zip(tmp_path / "a.zip", TWO, method)
    with pytest.raises(InputError, match="unsupported compression"):
        open_labelled(path)


def test_not_a_zip(tmp_path):
    path = make_folder(tmp_path, {"a.zip": b"hello"}) / "a.zip"
    for open_it in (open_labelled, open_unlabelled):
        with pytest.raises(InputError, match=r"a\.zip cannot be read as a zip"):
            open_it(path)


def test_zip_with_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(zips, "MAX_MEMBERS", 3)
    with pytest.raises(InputError, match="has 4 members; at most 3"):
        open_labelled(make_zip(tmp_path / "a.zip", TWO))


def test_zip_bomb_by_its_headers(tmp_path):
    path = make_zip(tmp_path / "a.zip", {f"cat/{i}.png": b"x" for i in range(5)})
    data = bytearray(path.read_bytes())
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 24 : at + 28] = struct.pack("<I", 2**30)  # each claims to unpack to 1 GiB
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"would unpack to 5\.0 GiB, .* times its size"):
        open_labelled(path)


def test_zip_member_is_read_up_to_a_limit_only(tmp_path, monkeypatch):
    monkeypatch.setattr("mivhead.images.decoding.MAX_FILE_BYTES", 2**20)
    path = make_zip(tmp_path / "a.zip", {**TWO, "cat/11.png": bytes(50 * 2**20)})
    skipped = check_images(open_labelled(path))
    assert [each.id for each in skipped] == ["cat/11.png"]
    assert "larger than the limit of 1 MiB" in skipped[0].reason


@pytest.mark.parametrize("claimed", [1, 10**6])
def test_zip_member_with_a_false_size(claimed, tmp_path):
    content = os.urandom(5000)
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
    stream = iter_images(open_labelled(path))
    assert reads == []
    next(stream)
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
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_table(text, encoding, tmp_path):
    images = open_labelled(table(tmp_path, text, encoding))
    assert images.ids == ("pictures/dog/a.png", "pictures/cat/1.png")
    assert images.labels == ("dog", "big cat")
    assert [image.getpixel((0, 0))[0] for _, image in iter_images(images)] == [20, 1]


def test_table_with_absolute_paths(tmp_path):
    path = tmp_path / "pictures/cat/1.png"
    images = open_labelled(table(tmp_path, f"path,label\n{path},a\npictures/dog/a.png,b\n"))
    assert check_images(images) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("path,label\n", "no rows"),
        ("a,b\n1,2\n", r"path, file, image, filename.*label, class.*got a, b"),
        ("path,label\na.png,\n", "line 2: expected a path and a label"),
        ("path,label\na.png\n", "line 2: expected a path and a label"),
        ("path,label\na.png,x\n./a.png,y\n", "line 3: a.png is listed twice"),
        ("path,label\na.png,x\n", "only the class 'x'"),
        ('path,label\n"a.png,x\n', "cannot be read"),
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
    with pytest.raises(ImageError, match=r"gone\.png \(labels\.csv, line 3\) does not exist"):
        list(iter_images(images))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
@pytest.mark.parametrize("name", [b"caf\xe9/1.png", b"cat/caf\xe9.png"])
def test_names_that_are_not_utf_8_are_refused_before_any_work(name: bytes, tmp_path: Path) -> None:
    for inside in (b"cat/2.png", b"dog/1.png", name):
        path = tmp_path / os.fsdecode(inside)
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(InputError, match=r"caf\\udce9.* is not valid UTF-8: rename"):
        open_labelled(tmp_path)


def write_table(folder, text, encoding="utf-8", name="labels.csv"):
    for file in ("a", "b"):
        Image.new("RGB", (4, 4)).save(folder / f"{file}.png")
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def test_another_column_may_hold_the_labels(tmp_path):
    path = write_table(tmp_path, "file,site,Species\na.png,1,wren\nb.png,2,owl\n")
    assert open_labelled(path, label="species").labels == ("wren", "owl")
    assert open_labelled(path, label="site").labels == ("1", "2")
    with pytest.raises(InputError, match=r"label, class; name another one with --label"):
        open_labelled(path)
    with pytest.raises(InputError, match=r"label column \(genus\); got file, site, Species"):
        open_labelled(path, label="genus")
    with pytest.raises(InputError, match="are for CSV files"):
        open_labelled(tmp_path, label="species")


def test_tables_in_other_encodings(tmp_path):
    text = "file;label\na.png;Möwe\nb.png;Häher\n"
    for encoding, how in (("utf-8", {}), ("utf-16", {}), ("cp1252", {"encoding": "cp1252"})):
        path = write_table(tmp_path, text, encoding, f"{encoding}.csv")
        assert open_labelled(path, **how).labels == ("Möwe", "Häher")
    with pytest.raises(InputError, match="--encoding cp1252"):
        open_labelled(path)
    with pytest.raises(InputError, match="'cp125' is not known"):
        open_labelled(path, encoding="cp125")


def test_files_of_arrays_say_what_is_possible(tmp_path):
    np.savez(tmp_path / "train.npz", X=np.eye(2))
    with pytest.raises(InputError, match=r"MIVClassifier\(\)\.fit\(X, y\).*FeatureTable"):
        open_labelled(tmp_path / "train.npz")


def linked_folders(root: Path, count: int) -> None:
    """Folders that all link to each other, with one image each."""
    for number in range(count):
        (root / f"c{number}").mkdir(parents=True)
        (root / f"c{number}" / "1.png").write_bytes(png())
        for other in range(count):
            if other != number:
                (root / f"c{number}" / f"to{other}").symlink_to(root / f"c{other}")


def test_folders_that_link_to_each_other_are_listed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    linked_folders(tmp_path, 12)
    assert open_labelled(tmp_path).ids == tuple(f"c{n}/1.png" for n in range(12))
    assert "Ignored 132 links to folders that were already listed" in caplog.text
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


def test_the_depth_of_folders_is_limited(tmp_path: Path) -> None:
    deep = tmp_path / "cat" / "/".join(["d"] * 70)
    deep.mkdir(parents=True)
    (deep / "1.png").write_bytes(png())
    with pytest.raises(InputError, match="nested deeper than 64 folders"):
        open_unlabelled(tmp_path)


def test_the_depth_of_paths_in_a_zip_is_limited(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deep.zip", "w") as archive:
        for number in range(3):
            archive.writestr("d/" * 15_000 + f"{number}.png", png())
    with pytest.raises(InputError, match="nested deeper than 64 folders"):
        open_unlabelled(tmp_path / "deep.zip")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are for Unix")
def test_a_pipe_in_place_of_a_table_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "images.csv")
    with pytest.raises(InputError, match="not a regular file"):
        open_labelled(tmp_path / "images.csv")
