"""Jobs: every source gives the same rows, and a kill loses none."""

from __future__ import annotations

import gzip
import io
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
from PIL import Image

import mivhead
from mivhead import jobs
from mivhead._util.files import locked
from mivhead.errors import InputError, NotAvailableError
from mivhead.jobs import job as job_module

ROOT = Path(__file__).parents[2]
BAD = {"dark/empty.png", "light/text.jpg"}


def check_rows(rows, expected, prefix, *, bad=BAD):
    """All images once, with the right probabilities; the bad ones with an error."""
    by_name = {row["file"].removeprefix(prefix): row for row in rows}
    assert len(by_name) == len(rows)
    assert set(by_name) == set(expected) | bad
    for name, row in by_name.items():
        if name in bad:
            assert row["error"]
            assert row["closest"] is None
            assert row["probabilities"] is None
        else:
            assert row["error"] is None
            assert row["probabilities"]["dark"] == pytest.approx(expected[name], abs=1e-5)
            assert row["closest"] == ("dark" if expected[name] > 0.5 else "light")
            assert row["decision"] in ("dark", "light", "unsure", "none of these")
            assert row["probability"] == pytest.approx(max(row["probabilities"].values()))
            assert np.isfinite(row["unknown"])


def listed(folder="."):
    return sorted(path.name for path in Path(folder).iterdir())


def read(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture
def folder(here, tmp_path, monkeypatch):
    """An empty folder, in which `model.onnx` and `new/` are links."""
    for name in ("model.onnx", "head.onnx", "new"):
        (tmp_path / name).symlink_to(here / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tar(path, new, mode="w", names=None):
    with tarfile.open(path, mode) as archive:
        for file in names or sorted(p for p in new.rglob("*") if p.is_file()):
            archive.add(file, file.relative_to(new))
            if file.suffix == ".png":  # as WebDataset has them
                info = tarfile.TarInfo(str(file.relative_to(new).with_suffix(".cls")))
                info.size = 1
                archive.addfile(info, io.BytesIO(b"1"))
    return path


# Sources.


def test_a_folder_gives_the_rows_of_the_library(folder, expected):
    before = listed()
    result = jobs.predict("model.onnx", "new", "out.parquet", part_rows=5)
    assert (result.rows, result.errors, result.skipped, result.resumed) == (20, 2, 1, 0)
    rows = read("out.parquet")
    check_rows(rows, expected, "new/")
    assert [row["file"] for row in rows][:2] == ["new/dark/0.png", "new/dark/1.png"]
    assert listed() == sorted([*before, "out.parquet"])


def test_options_of_decisions(folder):
    options = {"class_prior": {"dark": 0, "light": 1}}
    jobs.predict("model.onnx", "new", "out.parquet", **options)
    rows = [row for row in read("out.parquet") if row["error"] is None]
    assert {row["closest"] for row in rows} == {"light"}


def test_zips(folder, expected):
    with zipfile.ZipFile("new.zip", "w") as archive:
        for path in sorted(Path("new").rglob("*.*")):
            archive.write(path, path.relative_to("new"))
    result = jobs.predict("model.onnx", "new.zip", "out.parquet", part_rows=6)
    assert result.skipped == 1
    check_rows(read("out.parquet"), expected, "new.zip/")


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tgz", "w:gz")])
def test_tars(folder, here, expected, suffix, mode):
    write_tar(f"data{suffix}", here / "new", mode)
    result = jobs.predict("model.onnx", f"data{suffix}", "out.parquet")
    assert (result.rows, result.skipped) == (20, 20)
    check_rows(read("out.parquet"), expected, f"data{suffix}/")


def test_a_tar_of_the_current_folder_gives_all_rows(folder, here, expected):
    subprocess.run(["tar", "cf", folder / "x.tar", "."], cwd=here / "new", check=True)
    result = jobs.predict("model.onnx", "x.tar", "out.parquet")
    assert (result.rows, result.skipped) == (20, 1)  # notes.txt
    check_rows(read("out.parquet"), expected, "x.tar/")


def test_a_tar_with_an_endless_header(folder, here):
    """A few kilobytes that unpack to a header of 64 MB."""
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 2**26
    with gzip.open("x.tar.gz", "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT) + bytes(2**26))
    jobs.predict("model.onnx", "x.tar.gz", "out.parquet")
    assert "too long" in read("out.parquet")[0]["error"]


def test_a_tar_without_images_is_an_error(folder):
    with tarfile.open("empty.tar", "w") as archive:
        archive.add("model.onnx")
    with pytest.raises(InputError, match="1 other"):
        jobs.predict("model.onnx", "empty.tar", "out.parquet")


def test_tar_shards_by_patterns_and_folders(folder, here, expected):
    files = sorted(p for p in (here / "new").rglob("*") if p.is_file())
    Path("shards").mkdir()
    for i in range(3):
        write_tar(f"shards/data-{i:03d}.tar", here / "new", names=files[i::3])
    for n, source in enumerate(["shards/*.tar", "shards"]):
        jobs.predict("model.onnx", source, f"out{n}.parquet")
        rows = read(f"out{n}.parquet")
        assert {row["file"].split(".tar/")[1] for row in rows} == set(expected) | BAD
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
    result = jobs.predict("model.onnx", path, "out.parquet")
    *rows, last = read("out.parquet")
    assert last["file"] == path.name
    assert "corrupted" in last["error"]
    assert 0 < len(rows) < 20
    good = [row for row in rows if row["error"] is None]
    for row in good:
        name = row["file"].removeprefix(f"{path.name}/")
        assert row["probabilities"]["dark"] == pytest.approx(expected[name], abs=1e-5)
    assert result.errors == 1 + len(rows) - len(good)


@pytest.mark.parametrize(
    ("header", "encoding"),
    [(None, "utf-8"), ("path", "utf-16"), ("file,label", "utf-8"), ("image;class", "utf-8")],
)
def test_lists_of_paths(folder, expected, header, encoding):
    separator = ";" if header and ";" in header else ","
    lines = [f"new\\{name}{separator}x" for name in sorted(expected | dict.fromkeys(BAD))]
    lines = [line.partition(separator)[0] for line in lines] if header == "path" else lines
    Path("list.csv").write_text("\n".join([header] * bool(header) + lines + ["", ""]), encoding)
    jobs.predict("model.onnx", "list.csv", "out.parquet", part_rows=7)
    check_rows(read("out.parquet"), expected, "new/")


def test_a_list_in_another_folder_may_have_absolute_paths_and_own_columns(folder, here, expected):
    Path("lists").mkdir()
    names = [str(here / "new" / name) for name in expected]
    Path("lists/list.tsv").write_text("".join(f"1\t{n}\n" for n in ["Photo", *names]))
    with pytest.raises(InputError, match="column"):
        jobs.predict("model.onnx", "lists/list.tsv", "out.parquet")
    jobs.predict("model.onnx", "lists/list.tsv", "out.parquet", column="photo")
    check_rows(read("out.parquet"), expected, f"{here}/new/", bad=set())


def test_parquet_lists_of_paths(folder, expected):
    names = [f"new/{name}" for name in sorted(expected | dict.fromkeys(BAD))]
    pq.write_table(pa.table({"n": range(len(names)), "File": names}), "list.parquet")
    jobs.predict("model.onnx", "list.parquet", "out.parquet", part_rows=7)
    check_rows(read("out.parquet"), expected, "new/")
    pq.write_table(pa.table({"file": ["new/dark/0.png", None]}), "holes.parquet")
    for options in ({}, {"column": "n"}):
        with pytest.raises(InputError):
            jobs.predict("model.onnx", "holes.parquet", "none.parquet", **options)


def test_images_one_by_one_share_parts(folder):
    names = [f"new/dark/{n}.png" for n in range(9)]
    jobs.predict("model.onnx", names, "out/", part_rows=6)
    assert len(listed("out")) == 2
    assert [row["file"] for row in read("out")] == names


def test_models_without_a_backbone_and_unknown_options_are_refused_at_once(folder):
    with pytest.raises(InputError):
        jobs.predict("head.onnx", "new", "out.parquet")
    with pytest.raises(TypeError):
        jobs.predict("model.onnx", "new", "out.parquet", rejekt=0.1)
    with pytest.raises(InputError):
        jobs.predict("model.onnx", "new", "out.parquet", reject=7)
    assert not [name for name in listed() if "out" in name]


def test_large_jpegs_are_decoded_at_a_fraction_of_their_size(folder):
    model = mivhead.load("model.onnx")
    rng = np.random.default_rng(3)
    Path("large").mkdir()
    for i in range(6):
        coarse = rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC)
        noisy = np.asarray(picture) + rng.normal(0, 4, (1200, 1600, 1))
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(f"large/{i}.jpg", quality=90)
    exact = model.predict_proba("large")[:, 0].tolist()
    jobs.predict("model.onnx", "large", "out.parquet")
    scaled = [row["probabilities"]["dark"] for row in read("out.parquet")]
    assert scaled == pytest.approx(exact, abs=1e-2)
    assert scaled != pytest.approx(exact, abs=1e-9)


def test_names_that_are_not_utf8(folder, here):
    Path("odd").mkdir()
    Path("odd", "caf\udce9.png").symlink_to(here / "new" / "dark" / "0.png")
    jobs.predict("model.onnx", "odd", "out.parquet")
    (row,) = read("out.parquet")
    assert (row["file"], row["closest"]) == ("odd/caf\\udce9.png", "dark")


# Kills.

KILLED = """
import os, random, signal, sys
import fsspec, onnxruntime, pyarrow.dataset, pyarrow.parquet  # once, not in every child
from mivhead import jobs
from mivhead.jobs import job

source, out, seed = sys.argv[1:]
rng, kills, OUT = random.Random(int(seed)), 0, os.path.abspath("out")
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "shutil.move"}
while True:
    limit = rng.randint(1, 6 + 4 * kills)
    child = os.fork()
    if not child:
        seen = 0

        def kill(event, args):
            global seen
            if event in EVENTS and any(OUT in os.path.abspath(str(path)) for path in args[:2]):
                seen += 1
                if seen == limit:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        jobs.predict("model.onnx", source, out, part_rows=3, resume=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    kills += 1
print(kills)
"""


@pytest.mark.parametrize(("source", "out"), [("new", "out.parquet"), ("shards", "out")])
def test_kills_lose_and_repeat_no_row(folder, here, expected, source, out):
    files = sorted(p for p in (here / "new").rglob("*") if p.is_file())
    Path("shards").mkdir()
    for i in range(3):
        write_tar(f"shards/{i}.tar", here / "new", names=files[i::3])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    jobs.predict("model.onnx", source, "reference.parquet", part_rows=3)
    reference = read("reference.parquet")
    assert len(reference) == 20
    command = [sys.executable, "-c", KILLED, source, out, "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert read(out) == reference
    assert not [name for name in listed() if "out" in name and name != out]
    assert int(done.stdout) >= 2


# Resuming, and what may be in the way.


class InterruptedJobError(Exception):
    pass


def test_parts_that_a_kill_left_empty_are_removed(folder):
    jobs.predict("model.onnx", "new", "out.parquet")
    Path("out.parquet.parts").mkdir()
    jobs.predict("model.onnx", "new", "out.parquet", resume=True)
    assert not Path("out.parquet.parts").exists()


def begin(monkeypatch, source="new", after=2):
    """Let a job of parts of four rows fail after some of them."""
    real, left = job_module.ShardCall.run, [after]

    def run(self, *args):
        if not left[0]:
            raise InterruptedJobError
        left[0] -= 1
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(job_module.ShardCall, "run", run)
        with pytest.raises(InterruptedJobError):
            jobs.predict("model.onnx", source, "out.parquet", part_rows=4)


def test_resuming_computes_only_what_is_missing(folder, expected, monkeypatch):
    begin(monkeypatch)
    with pytest.raises(InputError, match="--resume"):
        jobs.predict("model.onnx", "new", "out.parquet", part_rows=4)
    for resumed in (8, 20):  # of a job that was interrupted, and of one that is complete
        for other in ({"reject": 0.3}, {"column": "x"}, {"model": "head.onnx"}, {"sources": ["."]}):
            arguments = {"model": "model.onnx", "sources": "new", "out": "out.parquet"} | other
            with pytest.raises(InputError, match="other"):
                jobs.predict(**arguments, part_rows=4, resume=True)
        result = jobs.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True)
        assert (result.rows, result.resumed) == (20, resumed)
        assert (result.errors, result.skipped) == (2, 1)
        check_rows(read("out.parquet"), expected, "new/")


@pytest.mark.parametrize("out", ["out.parquet", "out"])
def test_a_finished_output_belongs_to_its_sources(folder, monkeypatch, out):
    jobs.predict("model.onnx", "new", out)
    Path("elsewhere/new").mkdir(parents=True)
    shutil.copy("new/dark/0.png", "elsewhere/new")
    place = Path(out).absolute()
    monkeypatch.chdir("elsewhere")
    with pytest.raises(InputError, match="other"):
        jobs.predict(folder / "model.onnx", "new", place, resume=True)
    pq.write_table(pa.table({"file": ["mine"]}), "mine.parquet")
    with pytest.raises(InputError, match="other"):
        jobs.predict(folder / "model.onnx", "new", "mine.parquet", resume=True)


def test_an_output_that_exists_is_replaced_only_if_it_is_said(folder, expected, monkeypatch):
    begin(monkeypatch)
    jobs.predict("model.onnx", "new", "out.parquet", part_rows=4, overwrite=True)
    check_rows(read("out.parquet"), expected, "new/")
    with pytest.raises(InputError, match="exists"):
        jobs.predict("model.onnx", "new", "out.parquet")
    jobs.predict("model.onnx", ["new/dark"], "out.parquet", overwrite=True)
    assert len(read("out.parquet")) == 10


def test_a_folder_of_parts_is_a_data_set(folder, expected):
    jobs.predict("model.onnx", "new", "parts/", part_rows=6)
    assert len(listed("parts")) == 4
    check_rows(read("parts"), expected, "new/")
    result = jobs.predict("model.onnx", "new", "parts/", part_rows=6, resume=True)
    assert (result.resumed, result.rows, result.errors) == (20, 20, 2)


def test_images_that_vanish_and_appear_and_archives_that_change(folder, here, monkeypatch):
    shutil.copytree(here / "new", "copy")
    write_tar("copy/data.tar", here / "new")
    begin(monkeypatch, "copy", after=5)
    Path("copy/light/8.png").unlink()
    shutil.copy("copy/dark/0.png", "copy/dark/00.png")
    write_tar("copy/data.tar", here / "new", names=[here / "new" / "dark" / "0.png"])
    result = jobs.predict("model.onnx", "copy", "out.parquet", part_rows=4, resume=True)
    assert (result.rows, result.errors) == (21, 2)
    names = [row["file"] for row in read("out.parquet")]
    assert len(set(names)) == 21
    assert "copy/dark/00.png" in names


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_corrupted_part_is_named(folder, expected, monkeypatch, damage):
    begin(monkeypatch, after=3)
    part = sorted(Path("out.parquet.parts").glob("part-*"))[1]
    data = bytearray(part.read_bytes())
    data[20] ^= 0xFF
    part.write_bytes(data if damage == "flipped" else data[:-20])
    with pytest.raises(InputError, match=part.name):
        jobs.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True)
    part.unlink()
    jobs.predict("model.onnx", "new", "out.parquet", part_rows=4, resume=True)
    check_rows(read("out.parquet"), expected, "new/")


def test_two_processes_do_not_share_an_output(folder):
    with locked("out.parquet"), pytest.raises(NotAvailableError, match="process"):
        jobs.predict("model.onnx", "new", "out.parquet")
    assert jobs.predict("model.onnx", "new", "out.parquet").rows == 20


def test_what_is_not_a_job_is_never_removed(folder):
    Path("photos").mkdir()
    Path("photos/mine.txt").write_text("precious")
    pq.write_table(pa.table({"file": ["mine"]}), "mine.parquet")
    for name in ("photo.png", "plain", "photo.parquet"):
        Path(name).write_text("precious")
    mine = {name: Path(name).read_bytes() for name in listed(".") if Path(name).is_file()}
    for out in ("photos", "photo.png", "plain", "photo.parquet", "mine.parquet"):
        for overwrite in (False, True):
            with pytest.raises(InputError):
                jobs.predict("model.onnx", "new", out, overwrite=overwrite)
    assert Path("photos/mine.txt").read_text() == "precious"
    assert all(Path(name).read_bytes() == content for name, content in mine.items())


def test_hidden_files_in_a_folder_of_parts_stay(folder):
    Path("parts").mkdir()
    Path("parts/.mine").write_text("precious")
    for overwrite in (False, True):
        jobs.predict("model.onnx", "new", "parts", part_rows=6, overwrite=overwrite)
    assert len(listed("parts")) == 5
    assert Path("parts/.mine").read_text() == "precious"


@pytest.mark.parametrize(
    "source",
    [
        *("nowhere", "new/*.webp", "void", "model.onnx", "broken.parquet", "broken.zip"),
        *("broken.csv", "numbers.parquet", "nosuch://bucket/x", []),
    ],
)
def test_bad_sources(folder, source):
    Path("void").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), "numbers.parquet")
    for name in ("broken.parquet", "broken.zip", "broken.csv"):
        Path(name).write_bytes(b"PAR1 hello PAR1")
    before = listed()
    with pytest.raises(mivhead.MivError):
        jobs.predict("model.onnx", source, "out.parquet")
    assert listed() == before


def test_worker_processes_give_the_same_rows(folder):
    jobs.predict("model.onnx", "new", "one.parquet", part_rows=6)
    jobs.predict("model.onnx", "new", "many.parquet", part_rows=6, workers=2)
    assert read("many.parquet") == read("one.parquet")
