"""Everything a person may hand over by mistake: one clear sentence, and nothing is lost."""

import io
import json
import re
import shutil
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import mivhead
from mivhead.cli.main import main
from mivhead.features import FeatureTable


def png_bomb():
    """A PNG of a few bytes that claims 30,000 x 30,000 pixels."""

    def chunk(tag, data):
        crc = struct.pack(">I", zlib.crc32(tag + data))
        return struct.pack(">I", len(data)) + tag + data + crc

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def truncated_jpeg():
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()[:900]


BAD_IMAGES = {
    "text.jpg": (b"Dear Sir or Madam", "is not a JPEG"),
    "cut.jpg": (truncated_jpeg(), "corrupted"),
    "bomb.png": (png_bomb(), "megapixels"),
    "empty.png": (b"", "empty"),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [("fit", "cut.jpg"), ("extract", "text.jpg"), ("evaluate", "empty.png")]
    + [("predict", name) for name in BAD_IMAGES],
)
def test_an_unreadable_image_is_named(command, name, fails, copy, model, tmp_path):
    content, words = BAD_IMAGES[name]
    (copy / "rings" / name).write_bytes(content)
    output = tmp_path / "out"
    writes = command in ("fit", "extract")
    error = fails(command, *([copy, "-o", output] if writes else [model, copy]))
    assert name in error
    assert words in error
    assert not output.exists()


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "explain", "add"])
def test_addresses_of_the_web_are_not_images(command, fails, model, tmp_path):
    url = "https://example.org/robin.jpg"
    error = fails(command, *([url, "-o", tmp_path / "x"] if command == "fit" else [model, url]))
    assert f"{url} is an address; only files on this computer are read: download it first" in error


@pytest.mark.parametrize("command", ["fit", "extract", "predict", "evaluate"])
def test_skip_bad_leaves_out_and_reports(command, miv, copy, model, tmp_path):
    for name, (content, _) in BAD_IMAGES.items():
        (copy / "rings" / name).write_bytes(content)
    writes = {"fit": ["--no-check", "--method", "ncc"], "extract": ["--no-augmentation"]}
    places = (
        [copy, "-o", tmp_path / "out", *writes[command]] if command in writes else [model, copy]
    )
    places += ["--include-shots"] * (command == "evaluate")
    answer = miv(command, *places, "--skip-bad")
    assert answer.code == 0
    assert answer.err.startswith("Skipped 4 images:\n")
    assert answer.err.count("\n") == 5 + answer.err.count(" were named")
    assert all(name in answer.err for name in BAD_IMAGES)
    answer = miv(command, *places, "--skip-bad", "--json")
    skipped = json.loads(answer.out)["skipped"]
    assert {each["id"].rpartition("/")[2] for each in skipped} == set(BAD_IMAGES)


def test_a_class_without_readable_images(fails, copy, tmp_path):
    for path in (copy / "rings").iterdir():
        path.write_bytes(b"nothing")
    error = fails("fit", copy, "-o", tmp_path / "m.miv", "--skip-bad")
    assert "The class 'rings' has no readable images" in error


def test_folders_that_make_no_sense(fails, copy, model, tmp_path):
    output = tmp_path / "m.miv"
    empty, one, flat, hollow = (tmp_path / name for name in ("empty", "one", "flat", "hollow"))
    for folder in (empty, flat, hollow / "cat", hollow / "dog"):
        folder.mkdir(parents=True)
    (copy / "rings").rename(tmp_path / "rings")
    one.mkdir()
    (tmp_path / "rings").rename(one / "rings")
    (flat / "a.png").write_bytes((copy / "checks" / "0.png").read_bytes())
    (hollow / "dog" / "a.png").write_bytes((copy / "checks" / "0.png").read_bytes())
    assert "contains no images" in fails("fit", empty, "-o", output)
    assert "only the class 'rings'" in fails("fit", one, "-o", output)
    assert "no class folders" in fails("fit", flat, "-o", output)
    assert "class folder 'cat'" in fails("fit", hollow, "-o", output)
    assert "does not exist" in fails("fit", tmp_path / "no", "-o", output)
    assert "contains no images" in fails("predict", model, empty)
    assert "does not exist" in fails("predict", model, tmp_path / "no.jpg")
    assert not output.exists()


@pytest.mark.parametrize("member", ["../evil.png", "/evil.png", "a/../../evil.png", "C:\\evil.png"])
def test_zips_that_lead_out(member, fails, shots, model, tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(shots / "rings" / "0.png", "rings/0.png")
        archive.writestr(member, b"evil")
    for arguments in (["fit", path, "-o", tmp_path / "m.miv"], ["predict", model, path]):
        assert "leads out of the zip" in fails(*arguments)
    into = tmp_path / "sorted"
    assert "leads out" in fails("predict", model, path, "--sort-into", into)
    assert [each.name for each in tmp_path.iterdir()] == ["z.zip"]


def test_a_disk_that_is_full_keeps_the_old_model(fails, features, model, tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        with open(path, "wb") as file:  # noqa: PTH123  # as safetensors gets it
            file.write(b"half")
        raise OSError(28, "No space left on device")

    output = tmp_path / "m.miv"
    output.write_bytes(model.read_bytes())
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    error = fails("fit", features, "-o", output, "--method", "ncc")
    assert "No space left on device" in error
    assert output.read_bytes() == model.read_bytes()
    assert list(tmp_path.iterdir()) == [output]


def test_model_files_that_cannot_be_used(fails, model, new, features, tmp_path):
    tensors = load_file(model)
    bytes_ = model.read_bytes()

    def write(name, document):
        save_file(tensors, tmp_path / name, metadata={"mivhead": json.dumps(document)})

    size = struct.unpack("<Q", bytes_[:8])[0]
    document = json.loads(json.loads(bytes_[8 : 8 + size])["__metadata__"]["mivhead"])
    document.pop("checksum.v1")
    write("newer.miv", {**document, "format": 99})
    write("classes.miv", {**document, "classes": ["a", "b"]})
    save_file(tensors, tmp_path / "foreign.miv")
    (tmp_path / "cut.miv").write_bytes(bytes_[: len(bytes_) // 2])
    (tmp_path / "text.miv").write_text("I am a model, trust me")
    (tmp_path / "nothing.miv").write_bytes(b"")
    words = {
        "newer.miv": "format 99",
        "classes.miv": "cannot be used",
        "foreign.miv": "not written by mivhead",
        "cut.miv": "corrupted or not a mivhead file",
        "text.miv": "corrupted or not a mivhead file",
        "nothing.miv": "corrupted or not a mivhead file",
        "missing.miv": "does not exist",
    }
    for name, expected in words.items():
        for command in (["predict", tmp_path / name, new], ["info", tmp_path / name]):
            error = fails(*command)
            assert name in error
            assert re.search(expected, error)
    assert "shots.safetensors" in fails("predict", features, new)
    assert "is a folder, not a model" in fails("predict", tmp_path, new)


def test_features_of_other_channels(fails, model, tmp_path):
    table = FeatureTable(mivhead.Features(np.ones((2, 8), np.float32)), ("a", "b"), ("rings",) * 2)
    table.save(tmp_path / "other.safetensors")
    for command in ("predict", "evaluate"):
        error = fails(command, model, tmp_path / "other.safetensors")
        assert "other blocks or channels" in error


def test_features_of_another_backbone(fails, model, features, tmp_path):
    table = FeatureTable.load(features)
    other = {**table.backbone, "weights": "0" * 64}
    FeatureTable(table.features, table.ids, table.labels, backbone=other).save(
        tmp_path / "o.safetensors"
    )
    assert "extract the features with the model's backbone" in fails(
        "predict", model, tmp_path / "o.safetensors"
    )
    assert "other weights" in fails("fit", tmp_path / "o.safetensors", "-o", tmp_path / "m.miv")


def test_damaged_features(fails, features, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(features.read_bytes()[:-100])
    assert "cut.safetensors" in fails("fit", path, "-o", tmp_path / "m.miv")
    assert "cut.safetensors" in fails("info", path)


def test_litter_and_odd_class_names(miv, copy, tmp_path):
    (copy / "rings").rename(copy / "Ringe & Kreise ☉")
    for name in (".DS_Store", "Thumbs.db", ".hidden.png"):
        (copy / "checks" / name).write_bytes(b"litter")
    answer = miv("fit", copy, "-o", tmp_path / "m.miv", "--method", "ncc")
    assert answer.code == 0
    assert re.search(r"^Ringe & Kreise ☉ +3$", answer.out, re.M)


def test_a_file_whose_name_starts_with_a_hyphen(capsys, model, new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(new / "rings" / "5.png", "-109.png")
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(model), "-109.png"])
    assert stop.value.code == 2
    assert "write ./-109.png, or ./* instead of *" in capsys.readouterr().err
    assert main(["predict", str(model), "./-109.png"]) == 0


def test_a_csv_file_with_another_label_column_in_another_encoding(miv, fails, new, tmp_path):
    files = sorted(new.rglob("*.png"))
    rows = "".join(f"{file};{'Möwe' if 'rings' in file.parts else 'Häher'}\n" for file in files)
    path = tmp_path / "birds.csv"
    path.write_text(f"path;Vogel\n{rows}", encoding="cp1252")
    assert "--encoding cp1252" in fails("fit", path, "-o", tmp_path / "m.miv")
    how = ("--label", "Vogel", "--encoding", "cp1252")
    answer = miv("fit", path, "-o", tmp_path / "m.miv", *how, "--method", "ncc", "--no-check")
    assert "Möwe" in answer.out
    assert miv("extract", path, "-o", tmp_path / "f.safetensors", *how).code == 0
    assert miv("evaluate", tmp_path / "m.miv", path, *how, "--include-shots").code == 0
