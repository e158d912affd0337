"""Jobs: every source gives the same rows, every output holds them, a kill loses none."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import mivhead
from mivhead import batch, stores
from mivhead.batch import output as output_module
from mivhead.errors import InputError, NotAvailableError
from mivhead.images.places import expand

ROOT = Path(__file__).parents[2]
BAD = {"dark/empty.png", "light/text.jpg"}


def names_of(rows, prefix):
    return [row["file"].removeprefix(prefix) for row in rows]


def check_rows(rows, expected, prefix, *, bad=BAD):
    """All images once, with the right probabilities; the bad ones with an error."""
    found = {row["file"].removeprefix(prefix): row for row in rows}
    assert len(found) == len(rows)
    assert set(found) == set(expected) | bad
    for name, row in found.items():
        if name in bad:
            assert row["error"]
            assert row["label"] is None
            assert row["probabilities"] is None
        else:
            assert row["error"] is None
            assert row["probabilities"]["dark"] == pytest.approx(expected[name], abs=1e-5)
            assert row["label"] == ("dark" if expected[name] > 0.5 else "light")
            assert row["decision"] in ("dark", "light", "unsure", "none of these")
            assert row["probability"] == pytest.approx(max(row["probabilities"].values()))
            assert np.isfinite(row["unknown"])


def listed(folder="."):
    return sorted(each.name for each in Path(folder).iterdir())


def read(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture
def folder(here, tmp_path, monkeypatch):
    """An empty folder, in which `model.onnx` and `new/` are links."""
    for name in ("model.onnx", "head.onnx", "new", "features.safetensors"):
        (tmp_path / name).symlink_to(here / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tar(path, new, mode="w", names=None):
    with tarfile.open(path, mode) as archive:
        for each in names or sorted(p for p in new.rglob("*") if p.is_file()):
            archive.add(each, each.relative_to(new))
            if each.suffix == ".png":  # as WebDataset has them
                data = b"1"
                info = tarfile.TarInfo(str(each.relative_to(new).with_suffix(".cls")))
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


# Sources.


def test_a_folder_gives_the_rows_of_the_library(folder, expected):
    result = batch.predict("model.onnx", "new", "out.parquet", part_rows=5)
    assert (result.rows, result.errors, result.resumed) == (20, 2, 0)
    rows = read("out.parquet")
    check_rows(rows, expected, "new/")
    assert names_of(rows, "new/dark/")[:3] == ["0.png", "1.png", "2.png"]
    assert listed() == sorted(
        ["model.onnx", "head.onnx", "new", "features.safetensors", "out.parquet"]
    )


def test_a_class_that_does_not_occur_is_never_named(folder):
    classes = ["dark", "light"]
    prior = dict.fromkeys(classes, 1) | {classes[0]: 0}
    batch.predict("model.onnx", "new", "out.parquet", class_prior=prior)
    labels = {row["label"] for row in read("out.parquet")}
    assert classes[0] not in labels
    assert labels - {None} == {classes[1]}


def test_zips(folder, expected):
    with zipfile.ZipFile("new.zip", "w") as archive:
        for path in sorted(Path("new").rglob("*.*")):
            archive.write(path, path.relative_to("new"))
    batch.predict("model.onnx", "new.zip", "out.parquet", part_rows=6)
    check_rows(read("out.parquet"), expected, "new.zip/")


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz")])
def test_tars(folder, here, expected, suffix, mode):
    write_tar(f"data{suffix}", here / "new", mode)
    result = batch.predict("model.onnx", f"data{suffix}", "out.parquet", part_rows=6)
    assert result.rows == 20
    check_rows(read("out.parquet"), expected, f"data{suffix}/")


@pytest.mark.parametrize("part_rows", [5, 7, 20])
def test_the_last_part_of_a_tar_says_that_it_is_the_last(folder, here, expected, part_rows):
    """20 rows: parts of 5 and 20 rows are all full, so that an empty one ends them."""
    write_tar("data.tar", here / "new")
    how = {"part_rows": part_rows}
    result = batch.predict("model.onnx", "data.tar", "out", **how)
    check_rows(read("out"), expected, "data.tar/")
    parts = len(list(Path("out").glob("part-*.parquet")))
    assert (result.rows, parts) == (20, 20 // part_rows + 1)
    again = batch.predict("model.onnx", "data.tar", "out", **how, resume=True)
    assert (again.complete, again.rows) == (True, 20)


def test_tar_shards_by_braces_patterns_and_folders(folder, here, expected):
    files = sorted(p for p in (here / "new").rglob("*") if p.is_file())
    Path("shards").mkdir()
    for i in range(3):
        write_tar(f"shards/data-{i:03d}.tar", here / "new", names=files[i::3])
    for n, source in enumerate(["shards/data-{000..002}.tar", "shards/*.tar", "shards"]):
        batch.predict("model.onnx", source, f"out{n}.parquet")
        rows = read(f"out{n}.parquet")
        found = {row["file"].split(".tar/")[1]: row for row in rows}
        assert set(found) == set(expected) | BAD
        assert rows[0]["file"].startswith("shards/data-000.tar/")


@pytest.mark.parametrize("damage", ["cut", "cut at a header", "header", "gzip"])
def test_a_damaged_tar_keeps_its_rows_and_says_so(folder, here, expected, damage):
    path = Path("data.tar.gz" if damage == "gzip" else "data.tar")
    write_tar(path, here / "new", "w:gz" if damage == "gzip" else "w")
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        member = archive.getmembers()[20]
    if damage == "gzip":
        data = data[: len(data) // 2]
    elif damage == "cut":
        data = data[: member.offset_data + 100]
    elif damage == "cut at a header":
        data = data[: member.offset]
    else:
        data[member.offset : member.offset + 512] = b"x" * 512
    path.write_bytes(data)
    result = batch.predict("model.onnx", path, "out.parquet", part_rows=4)
    *rows, last = read("out.parquet")
    assert last["file"] == path.name
    assert "corrupted or truncated" in last["error"]
    assert 0 < len(rows) < 20
    good = [row for row in rows if row["error"] is None]
    for row in good:
        name = row["file"].removeprefix(f"{path.name}/")
        assert row["probabilities"]["dark"] == pytest.approx(expected[name], abs=1e-5)
    assert result.errors == 1 + len(rows) - len(good)


@pytest.mark.parametrize("header", [None, "path", "file,label", "image;class"])
def test_lists_of_paths(folder, expected, header):
    separator = ";" if header and ";" in header else ","
    lines = [f"new/{name}{separator}x" for name in sorted(expected | dict.fromkeys(BAD))]
    lines = [line.partition(separator)[0] for line in lines] if header == "path" else lines
    Path("list.csv").write_text("\n".join([header] * bool(header) + lines + ["", ""]))
    batch.predict("model.onnx", "list.csv", "out.parquet", part_rows=7)
    check_rows(read("out.parquet"), expected, "new/")


def test_a_list_of_paths_as_windows_writes_them(folder, expected):
    names = [f"new/{name}".replace("/", "\\") for name in sorted(expected)]
    Path("list.txt").write_text("\n".join(names))
    batch.predict("model.onnx", "list.txt", "out.parquet")
    check_rows(read("out.parquet"), expected, "new/", bad=set())


def test_a_list_in_another_folder_may_have_absolute_paths_and_own_columns(folder, here, expected):
    Path("lists").mkdir()
    names = [str(here / "new" / name) for name in expected]
    Path("lists/list.tsv").write_text("".join(f"1\t{n}\n" for n in ["Photo", *names]))
    with pytest.raises(InputError, match="--column"):
        batch.predict("model.onnx", "lists/list.tsv", "out.parquet")
    batch.predict("model.onnx", "lists/list.tsv", "out.parquet", column="photo")
    check_rows(read("out.parquet"), expected, f"{here}/new/", bad=set())
    Path("lists/list.txt").write_text("a.png\nno-such.png\n")
    batch.predict("model.onnx", "lists/list.txt", "out2.parquet")
    assert ["does not exist" in row["error"] for row in read("out2.parquet")] == [True, True]


@pytest.mark.parametrize("form", ["bytes", "struct", "struct with path", "large"])
def test_parquet_files_of_images(folder, here, expected, form):
    names = sorted(expected | dict.fromkeys(BAD))
    data = [(here / "new" / name).read_bytes() for name in names]
    columns = {"label": pa.array([0] * len(names))}
    if form == "struct with path":
        pairs = zip(data, names, strict=True)
        columns["image"] = pa.array([{"bytes": d, "path": n} for d, n in pairs])
    else:
        columns["file"] = pa.array(names)
        kind = pa.large_binary() if form == "large" else pa.binary()
        columns["photo"] = pa.array(data, kind)
        if form == "struct":
            columns["photo"] = pa.array([{"bytes": each, "path": None} for each in data])
    pq.write_table(pa.table(columns), "images.parquet", row_group_size=4)
    batch.predict("model.onnx", "images.parquet", "out.parquet", part_rows=6)
    check_rows(read("out.parquet"), expected, "")


def test_parquet_rows_without_names_or_images(folder, here):
    image = (here / "new" / "dark" / "0.png").read_bytes()
    pq.write_table(pa.table({"a": [image, None], "b": [b"x", b"y"]}), "two.parquet")
    with pytest.raises(InputError, match="several columns of bytes, a, b: name the one"):
        batch.predict("model.onnx", "two.parquet", "out.parquet")
    with pytest.raises(InputError, match="no column 'c'"):
        batch.predict("model.onnx", "two.parquet", "out.parquet", column="c")
    batch.predict("model.onnx", "two.parquet", "out.parquet", column="a")
    first, second = read("out.parquet")
    assert (first["file"], first["label"]) == ("two.parquet:0", "dark")
    assert second["error"] == "two.parquet:1 has no image."


def test_features_of_every_kind(folder, here, expected):
    table = stores.open("features.safetensors").read()
    with stores.open("features.parquet") as store:
        store.write(table)
    arrays = table.features.tensors
    np.savez("features.npz", ids=table.ids, **arrays)
    for source in ("features.safetensors", "features.parquet", "features.npz"):
        batch.predict("head.onnx", source, f"{source}.out.parquet", part_rows=7)
        rows = read(f"{source}.out.parquet")
        check_rows(rows, expected, f"{here}/new/", bad=set())
    with pytest.raises(InputError, match="contains its backbone: give it images"):
        batch.predict("model.onnx", "features.parquet", "out.parquet")
    with pytest.raises(InputError, match="exported without its backbone"):
        batch.predict("head.onnx", "new", "out.parquet")
    with pytest.raises(InputError, match="images and features"):
        batch.predict("model.onnx", ["new", "features.parquet"], "out.parquet")
    assert not Path("out.parquet.parts").exists()


def test_large_jpegs_are_decoded_at_a_fraction_of_their_size(folder):
    model = mivhead.load("model.onnx")
    rng = np.random.default_rng(3)
    Path("large").mkdir()
    for i in range(6):
        coarse = rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC)
        noisy = np.asarray(picture) + rng.normal(0, 4, (1200, 1600, 1))
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(f"large/{i}.jpg", quality=90)
    own = model.predict_proba("large")[:, 0]
    batch.predict("model.onnx", "large", "out.parquet")
    found = [row["probabilities"]["dark"] for row in read("out.parquet")]
    assert found == pytest.approx(own.tolist(), abs=1e-2)
    assert found != pytest.approx(own.tolist(), abs=1e-9)


# Outputs.


def test_csv_and_json_lines_hold_the_same_rows(folder):
    for suffix in ("parquet", "csv", "jsonl"):
        batch.predict("model.onnx", "new", f"out.{suffix}", part_rows=7, coverage=0.6)
    rows = read("out.parquet")
    lines = Path("out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    with Path("out.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert list(cells[0]) == [
        *("file", "label", "probability", "decision", "unknown", "set"),
        *("probabilities.dark", "probabilities.light", "error"),
    ]
    for row, cell in zip(rows, cells, strict=True):
        assert cell["file"] == row["file"]
        assert cell["error"] == (row["error"] or "")
        if row["error"] is None:
            assert float(cell["probabilities.dark"]) == pytest.approx(
                row["probabilities"]["dark"], abs=1e-6
            )
            assert cell["set"].split(";") == row["set"]


def test_formulas_in_names_are_harmless_in_csv(folder, here):
    Path("=cmd").mkdir()
    Path("=cmd/a.png").symlink_to(here / "new" / "dark" / "0.png")
    batch.predict("model.onnx", "=cmd", "out.csv")
    assert Path("out.csv").read_text().splitlines()[1].startswith("'=cmd/a.png,dark")
    batch.predict("model.onnx", "=cmd", "raw.csv", raw=True, excel=True)
    assert Path("raw.csv").read_bytes().startswith(b"\xef\xbb\xbffile,")
    assert b"\r\n=cmd/a.png,dark" in Path("raw.csv").read_bytes()


def test_a_folder_of_parts_is_a_data_set(folder, expected):
    batch.predict("model.onnx", "new", "parts/", part_rows=6)
    assert listed("parts") == ["_job.json"] + [f"part-{i:06d}-0000.parquet" for i in range(4)]
    check_rows(read("parts"), expected, "new/")


def test_names_that_are_not_utf8(folder, here):
    Path("odd").mkdir()
    Path("odd", "caf\udce9.png").symlink_to(here / "new" / "dark" / "0.png")
    batch.predict("model.onnx", "odd", "out.parquet")
    (row,) = read("out.parquet")
    assert (row["file"], row["label"]) == ("odd/caf\\udce9.png", "dark")


def test_links_in_circles_end(folder, here):
    Path("loop/inner").mkdir(parents=True)
    Path("loop/inner/up").symlink_to("..")
    Path("loop/inner/a.png").symlink_to(here / "new" / "dark" / "0.png")
    assert batch.predict("model.onnx", "loop", "out.parquet").rows == 1


# Extracting.


def test_extracted_parts_are_features_for_every_command(folder, tmp_path):
    result = batch.extract("new", "features", part_rows=8)
    assert (result.rows, result.errors) == (20, 2)
    with stores.open("features") as store:
        table = store.read()
    assert len(table) == 18
    assert table.backbone["name"] == "efficientnet_lite0"
    batch.extract("new", "features.parquet", part_rows=8)
    with stores.open("features.parquet") as store:
        assert store.read().features == table.features
    from mivhead import FewShotClassifier

    labels = [each.split("/")[1] for each in table.ids]
    model = FewShotClassifier(threshold=0, method="ncc").fit_table(table, labels)
    model.save("lite.miv")
    for source in ("features", "features.parquet"):
        batch.predict("lite.miv", source, f"{source}.out.parquet", part_rows=7)
        rows = read(f"{source}.out.parquet")
        assert [row["error"] is None for row in rows].count(False) == 2
        own = model.predict_proba(table)[:, 0]
        found = [row["probabilities"]["dark"] for row in rows if row["error"] is None]
        assert found == pytest.approx(own.tolist(), abs=1e-5)
    # The backbone itself gives the same as its features.
    batch.predict("lite.miv", "new", "images.parquet")
    again = [row["probabilities"]["dark"] for row in read("images.parquet") if row["error"] is None]
    assert again == pytest.approx(found, abs=1e-3)


# Kills.

KILLED = """
import os, random, signal, sys
from mivhead import batch
from mivhead.batch import job, output, sources, work

source, out, seed = sys.argv[1:]
rng, kills = random.Random(int(seed)), 0
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "shutil.move"}
while True:
    limit = rng.randint(1, 20 + 15 * kills)
    child = os.fork()
    if not child:
        seen = 0

        def kill(event, args):
            global seen
            if event in EVENTS and any("out" in str(each) for each in args[:2]):
                seen += 1
                if seen == limit:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        batch.predict("model.onnx", source, out, part_rows=3, resume=True, threads=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    kills += 1
print(kills)
"""


@pytest.mark.parametrize(
    ("source", "out", "seeds"),
    [("new", "out.parquet", 2), ("data.tar", "out.csv", 1), ("data.tar", "out", 1)],
)
def test_kills_lose_and_repeat_no_row(folder, here, expected, source, out, seeds):
    write_tar("data.tar", here / "new")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    batch.predict("model.onnx", source, "reference.parquet", part_rows=3, threads=1)
    reference = read("reference.parquet")
    check_rows(reference, expected, f"{source}/")
    kills = 0
    for seed in range(seeds):
        command = [sys.executable, "-c", KILLED, source, out, str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        kills += int(done.stdout)
        if out == "out.csv":
            with Path(out).open(newline="") as file:
                rows = [row["file"] for row in csv.DictReader(file)]
            assert rows == [row["file"] for row in reference]
        else:
            assert read(out) == reference
        assert not [each for each in listed() if "out" in each and each != out]
        assert not [each for each in listed() if each.startswith(".")]
        if Path(out).is_dir():
            shutil.rmtree(out)
        else:
            Path(out).unlink()
    assert kills >= 2 * seeds


# Resuming, and what may be in the way.


class InterruptedJobError(Exception):
    pass


def interrupt(monkeypatch, after):
    """Let a job fail after this many parts."""
    real, left = output_module.Output.write_part, [after]

    def write(self, *args):
        if not left[0]:
            raise InterruptedJobError
        left[0] -= 1
        real(self, *args)

    monkeypatch.setattr(output_module.Output, "write_part", write)


def begin(monkeypatch, after=2, **options):
    with monkeypatch.context() as patch:
        interrupt(patch, after)
        with pytest.raises(InterruptedJobError):
            batch.predict("model.onnx", "new", "out.parquet", part_rows=4, **options)


def test_resuming_computes_only_what_is_missing(folder, expected, monkeypatch):
    begin(monkeypatch)
    result = batch.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True)
    assert (result.rows, result.resumed, result.errors) == (20, 8, 2)
    check_rows(read("out.parquet"), expected, "new/")
    assert batch.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True).complete


def test_an_output_that_exists_needs_a_decision(folder, expected, monkeypatch):
    begin(monkeypatch)
    with pytest.raises(InputError, match="was not finished: complete it with --resume, or"):
        batch.predict("model.onnx", "new", "out.parquet", part_rows=4)
    batch.predict("model.onnx", "new", "out.parquet", part_rows=4, overwrite=True)
    check_rows(read("out.parquet"), expected, "new/")
    with pytest.raises(InputError, match=r"out.parquet exists"):
        batch.predict("model.onnx", "new", "out.parquet")
    batch.predict("model.onnx", ["new/dark"], "out.parquet", overwrite=True)
    assert len(read("out.parquet")) == 10
    with pytest.raises(InputError, match="not both"):
        batch.predict("model.onnx", "new", "out.parquet", overwrite=True, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ["new", "new"]}, "on other images"),
        ({"part_rows": 5}, "another --part-rows"),
        ({"reject": 0.3}, "another reject"),
        ({"column": "x"}, "another column"),
        ({"model": "head.onnx"}, "with another model"),
    ],
)
def test_a_job_is_resumed_only_as_it_was_started(folder, monkeypatch, change, message):
    begin(monkeypatch)
    options = {"part_rows": 4, "resume": True, **change}
    model, sources = options.pop("model", "model.onnx"), options.pop("sources", "new")
    with pytest.raises(InputError, match=message):
        batch.predict(model, sources, "out.parquet", **options)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_a_corrupted_part_is_computed_again(folder, expected, monkeypatch, caplog, damage):
    begin(monkeypatch, after=3)
    part = Path("out.parquet.parts/part-000001-0000.parquet")
    data = bytearray(part.read_bytes())
    if damage == "flipped":
        data[20] ^= 0xFF
    part.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    if damage == "empty":
        part.write_bytes(b"")
    if damage == "gone":
        part.unlink()
    result = batch.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True)
    assert result.resumed == 8
    check_rows(read("out.parquet"), expected, "new/")
    assert ("part-000001-0000.parquet was corrupted" in caplog.text) == (damage != "gone")


def test_a_part_that_is_damaged_during_the_job(folder, expected, monkeypatch):
    real = output_module.Output.finish

    def finish(self, *args, **options):
        part = Path(self.folder.path, "part-000002-0000.parquet")
        part.write_bytes(part.read_bytes()[:-20])
        real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(output_module.Output, "finish", finish)
        with pytest.raises(InputError, match=r"part-000002-0000.parquet is corrupted: run"):
            batch.predict("model.onnx", "new", "out.parquet", part_rows=4)
    assert batch.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True).resumed == 16
    check_rows(read("out.parquet"), expected, "new/")


def test_a_source_that_changes(folder, here, monkeypatch):
    write_tar("data.tar", here / "new")
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        with pytest.raises(InterruptedJobError):
            batch.predict("model.onnx", "data.tar", "out.parquet", part_rows=4)
    write_tar("data.tar", here / "new", names=[here / "new" / "dark" / "0.png"])
    with pytest.raises(InputError, match=r"data.tar changed after the job had started"):
        batch.predict("model.onnx", "data.tar", "out.parquet", part_rows=4, resume=True)
    assert not Path("out.parquet").exists()
    batch.predict("model.onnx", "data.tar", "out.parquet", overwrite=True)
    assert len(read("out.parquet")) == 1


def test_images_that_vanish_and_appear(folder, here, monkeypatch):
    shutil.copytree(here / "new", "copy")
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        with pytest.raises(InterruptedJobError):
            batch.predict("model.onnx", "copy", "out.parquet", part_rows=4)
    Path("copy/light/8.png").unlink()
    shutil.copy("copy/dark/0.png", "copy/dark/00.png")
    result = batch.predict("model.onnx", "copy", "out.parquet", part_rows=4, resume=True)
    assert (result.rows, result.errors) == (20, 3)
    gone = next(row for row in read("out.parquet") if row["file"] == "copy/light/8.png")
    assert "does not exist" in gone["error"]


def test_two_processes_do_not_share_an_output(folder):
    from mivhead.batch.output import Output

    with Output("out.parquet").locked():
        with pytest.raises(InputError, match=r"Another process is working on out.parquet"):
            batch.predict("model.onnx", "new", "out.parquet")
        assert Path("out.parquet.parts").is_dir()  # of the other process, also if it is empty


def test_a_job_where_folders_cannot_be_locked(folder, monkeypatch):
    from mivhead._util import files
    from mivhead.batch.output import Output

    monkeypatch.setattr(files, "LOCKS_FOLDERS", False)  # Windows
    assert batch.predict("model.onnx", "new", "out.parquet").rows
    with Output("more.parquet").locked(), pytest.raises(InputError, match="Another process"):
        batch.predict("model.onnx", "new", "more.parquet")


def test_what_is_not_a_job_is_never_removed(folder):
    Path("photos").mkdir()
    Path("photos/mine.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"holds mine.txt, which is not a part of a job"):
            batch.predict("model.onnx", "new", "photos", overwrite=overwrite)
    assert Path("photos/mine.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("nowhere", "out.parquet", "nowhere does not exist"),
        ("new/*.webp", "out.parquet", "does not exist"),
        ("new", "out.xlsx", "must be a .parquet, .csv or .jsonl file, or a folder"),
        ("new", "no/such/out.parquet", "does not exist; create it first"),
        ("void", "out.parquet", "contains no images"),
        ("broken.parquet", "out.parquet", "is corrupted, or not a Parquet file"),
        ("broken.zip", "out.parquet", "cannot be read as a zip"),
        ("numbers.parquet", "out.parquet", "no column of vectors"),
        ("broken.csv", "out.parquet", "needs a header"),
        ("nosuch://bucket/x", "out.parquet", "nosuch://bucket/x cannot be opened"),
        ([], "out.parquet", "There are no images"),
    ],
)
def test_bad_input(folder, source, out, message):
    Path("void").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), "numbers.parquet")
    for name in ("broken.parquet", "broken.zip", "broken.csv"):
        Path(name).write_bytes(b"PAR1 hello PAR1")
    with pytest.raises(InputError, match=message):
        batch.predict("model.onnx", source, out)
    assert not Path("out.parquet").exists()
    assert not Path("out.parquet.parts").exists()


def test_a_cluster_that_does_not_answer(folder):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.raises(NotAvailableError, match=r"No Ray cluster answers at 127.0.0.1:9"):
        batch.predict("model.onnx", "new", "out.parquet", ray="127.0.0.1:9")


def test_worker_processes_give_the_same_rows(folder):
    batch.predict("model.onnx", "new", "one.parquet", part_rows=6, threads=1)
    batch.predict("model.onnx", "new", "many.parquet", part_rows=6, workers=2)
    assert read("many.parquet") == read("one.parquet")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 99), st.integers(0, 30), st.integers(1, 4))
def test_braces(first, more, width):
    found = expand(f"a-{{{first:0{width}d}..{first + more}}}.tar")
    assert found == [f"a-{n:0{width}d}.tar" for n in range(first, first + more + 1)]
    assert expand("x{a,b}y{1..2}") == ["xay1", "xay2", "xby1", "xby2"]
