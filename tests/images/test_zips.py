"""Hostile and damaged zips."""

import contextlib
import os
import stat
import struct
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mivhead.errors import ImageError, InputError, MivError
from mivhead.images import sources as zips
from mivhead.images.imageset import check_images, iter_images
from mivhead.images.sources import open_labelled, open_unlabelled
from tests.helpers.sample_files import TWO, make_folder, make_zip, png


@pytest.mark.parametrize(
    "member", ["/etc/cat/1.png", "../cat/1.png", "cat/../../1.png", "C:\\cat\\1.png", "..\\1.png"]
)
def test_zip_paths_that_lead_out(member, tmp_path):
    path = make_zip(tmp_path / "a.zip", {**TWO, member: png()})
    with pytest.raises(InputError, match=r"a\.zip holds .* leads out of the zip"):
        open_labelled(path)
    assert not list(tmp_path.glob("*.png"))


def test_zip_with_a_link(tmp_path):
    link = zipfile.ZipInfo("dog/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = make_zip(tmp_path / "a.zip", {**TWO, link: b"/etc/passwd"})
    with pytest.raises(InputError, match=r"holds the link 'dog/link\.png'"):
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
    with pytest.raises(InputError, match="unusual compression"):
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
    assert "larger than 1 MiB" in skipped[0].reason


@pytest.mark.parametrize("claimed", [1, 10**6])
def test_zip_member_with_a_false_size(claimed, tmp_path):
    content = os.urandom(5000)
    path = make_zip(tmp_path / "a.zip", {"cat/1.png": content, "dog/1.png": png()})
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", claimed)
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"a\.zip/cat/1\.png is (damaged|not a)"):
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
