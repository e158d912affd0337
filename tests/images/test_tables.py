"""Tables of paths and labels."""

import pytest

from mivhead.errors import ImageError, InputError
from mivhead.images.imageset import check_images, iter_images
from mivhead.images.sources import open_labelled
from tests.helpers.sample_files import TWO, make_folder


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
        ("a,b\n1,2\n", r"path, file, image, filename.*label, class.*found a, b"),
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
