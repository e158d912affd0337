"""Addresses: fsspec's memory and local file systems, and a server that speaks S3."""

from __future__ import annotations

import json
import os
import socket
import tarfile
import zipfile
from io import BytesIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mivhead import batch
from mivhead.batch import output as output_module
from mivhead.batch.output import Folder
from mivhead.cli.main import main
from mivhead.errors import InputError, NotAvailableError
from mivhead.images import places


@pytest.fixture
def memory():
    """The memory file system, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def upload(fs, here, base):
    """Copy the images to `BASE/new`, and make a zip, a tar, a list and a Parquet file of them."""
    files = sorted(path for path in (here / "new").rglob("*") if path.is_file())
    names = [path.relative_to(here / "new").as_posix() for path in files]
    archive, tar = BytesIO(), BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped, tarfile.open(fileobj=tar, mode="w") as tarred:
        for path, name in zip(files, names, strict=True):
            fs.pipe_file(f"{base}/new/{name}", path.read_bytes())
            zipped.write(path, name)
            tarred.add(path, name)
    fs.pipe_file(f"{base}/new.zip", archive.getvalue())
    fs.pipe_file(f"{base}/new.tar", tar.getvalue())
    images = [name for name in names if not name.endswith(".txt")]
    fs.pipe_file(f"{base}/list.csv", "\n".join(["path", *(f"new/{n}" for n in images)]).encode())
    table, data = BytesIO(), [(here / "new" / name).read_bytes() for name in images]
    pq.write_table(pa.table({"file": images, "image": data}), table, row_group_size=3)
    fs.pipe_file(f"{base}/new.parquet", table.getvalue())


def read(path):
    with fsspec.open(path, "rb") as file:
        return pq.read_table(BytesIO(file.read())).to_pylist()


def check(rows, expected, prefix):
    found = {row["file"].removeprefix(prefix): row for row in rows}
    assert len(found) == len(rows) == 20
    for name, probability in expected.items():
        assert found[name]["probabilities"]["dark"] == pytest.approx(probability, abs=1e-5)
    assert {name for name in found if found[name]["error"]} == {"dark/empty.png", "light/text.jpg"}


def check_all_sources(here, expected, base):
    """Every kind of source at an address, into an output at an address."""
    prefixes = {"new": f"{base}/new/", "new.zip": f"{base}/new.zip/", "new.tar": f"{base}/new.tar/"}
    prefixes |= {"list.csv": "new/", "new.parquet": ""}
    for source, prefix in prefixes.items():
        out = f"{base}/{source}.out.parquet"
        result = batch.predict(here / "model.onnx", f"{base}/{source}", out, part_rows=6)
        assert (result.rows, result.errors) == (20, 2)
        check(read(out), expected, prefix)
        assert not places.exists(f"{out}.parts")
    batch.predict(here / "model.onnx", f"{base}/*.tar", f"{base}/parts/", part_rows=6)
    assert [each for each in Folder(f"{base}/parts").names() if each.startswith("part-")] == [
        f"part-000000-{i:04d}.parquet" for i in range(4)
    ]


def check_resuming(here, expected, base, monkeypatch):
    real, left = output_module.Output.write_part, [2]

    def write(self, *args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(self, *args)

    arguments = (here / "model.onnx", f"{base}/new", f"{base}/again.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(output_module.Output, "write_part", write)
        with pytest.raises(KeyboardInterrupt):
            batch.predict(*arguments, part_rows=4)
    with pytest.raises(InputError, match="was not finished"):
        batch.predict(*arguments, part_rows=4)
    result = batch.predict(*arguments, part_rows=4, resume=True)
    assert (result.rows, result.resumed) == (20, 8)
    check(read(f"{base}/again.parquet"), expected, f"{base}/new/")
    assert batch.predict(*arguments, part_rows=4, resume=True).complete


def test_memory(here, expected, memory, monkeypatch):
    upload(memory, here, "memory://bucket")
    check_all_sources(here, expected, "memory://bucket")
    check_resuming(here, expected, "memory://bucket", monkeypatch)


def test_local_addresses(here, expected, tmp_path):
    out = f"file://{tmp_path}/out.parquet"
    batch.predict(here / "model.onnx", f"file://{here}/new", out, part_rows=6)
    check(read(out), expected, f"{here}/new/")


def test_errors_of_addresses(here, memory, monkeypatch):
    monkeypatch.setattr(places, "WAITS", (0.0, 0.0))
    with pytest.raises(InputError, match=r"memory://none does not exist"):
        batch.predict(here / "model.onnx", "memory://none", "memory://out.parquet")
    memory.pipe_file("memory://bucket/a.png", (here / "new/dark/0.png").read_bytes())
    attempts = []

    def fail(*_, **__):
        attempts.append(1)
        raise ConnectionResetError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", fail)
        with pytest.raises(NotAvailableError, match="cannot be reached: connection reset"):
            places.read_image("memory://bucket/a.png", "a.png")
    assert len(attempts) == 3
    with pytest.raises(InputError, match="does not exist"):
        places.read_image("memory://bucket/b.png", "b.png")


def test_a_folder_that_cannot_be_listed_is_not_left_out(memory, monkeypatch):
    monkeypatch.setattr(places, "WAITS", (0.0,))
    for name in ("new/b/2.png", "new/a/10.png", "new/a/9.png", "new/.hidden/1.png", "new/1.png"):
        memory.pipe_file(f"memory://bucket/{name}", b"")
    expected = ["1.png", "a", "b", "a/9.png", "a/10.png", "b/2.png"]
    real, failures = type(memory).ls, [1]

    def ls(self, path, **how):
        if path.endswith("/a") and failures[0]:
            failures[0] -= 1
            raise ConnectionResetError("connection reset")
        return real(self, path, **how)

    monkeypatch.setattr(type(memory), "ls", ls)
    assert [name for name, _ in places.walk("memory://bucket/new")] == expected
    assert not failures[0]
    failures[0] = 2
    with pytest.raises(NotAvailableError, match="new/a cannot be reached: connection reset"):
        list(places.walk("memory://bucket/new"))


@pytest.mark.filterwarnings("ignore")  # of botocore and werkzeug
def test_s3(here, expected, monkeypatch):
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = server.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    started.start()
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "test", "secret": "test"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    try:
        fs = fsspec.filesystem("s3")
        fs.mkdir("photos")
        upload(fs, here, "s3://photos")
        check_all_sources(here, expected, "s3://photos")
        check_resuming(here, expected, "s3://photos", monkeypatch)
    finally:
        started.stop()
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize(
    "address",
    [
        *("memory://bucket/a.png", "https://127.0.0.1:9/a.png", "ftp://127.0.0.1:9/a.png"),
        *("file:///etc/a.png", "simplecache::memory://bucket/a.png", "//127.0.0.1/share/a.png"),
    ],
)
def test_addresses_in_lists_need_permission(here, memory, tmp_path, monkeypatch, address):
    def reach(*_):
        raise AssertionError("an address was opened")

    monkeypatch.setattr(places, "file_system", reach)
    paths = tmp_path / "list.csv"
    paths.write_text(f"path\n{here}/new/dark/0.png\n{address}\n")
    with pytest.raises(InputError, match=r"named by a file, not by you.*--allow-remote"):
        batch.predict(here / "model.onnx", paths, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_addresses_in_lists_with_permission(here, memory, tmp_path):
    memory.pipe_file("memory://bucket/a.png", (here / "new/dark/0.png").read_bytes())
    paths = tmp_path / "list.csv"
    paths.write_text("path\nmemory://bucket/a.png\n")
    out = tmp_path / "out.csv"
    command = ["predict", str(here / "model.onnx"), str(paths), "--job", str(out), "--quiet"]
    assert main(command) == 2
    assert main([*command, "--allow-remote"]) == 0
    assert "memory://bucket/a.png" in out.read_text()


def test_a_forged_plan_opens_nothing_elsewhere(here, memory, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = (here / "model.onnx", here / "new", out)
    with monkeypatch.context() as patch:
        patch.setattr(output_module.Output, "write_part", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.predict(*arguments)
    (plan,) = tmp_path.rglob("_plan.jsonl")
    document = json.loads(plan.read_text().splitlines()[0])
    document |= {"path": "", "items": ["memory://bucket/a.png", "a.png"]}
    plan.write_text(json.dumps(document) + "\n")
    with pytest.raises(InputError, match="named by a file, not by you"):
        batch.predict(*arguments, resume=True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.zip", "a.txt"])
def test_pipes_do_not_block(here, tmp_path, name):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.mkfifo(folder / name)
    source = folder if name in ("a.tar", "a.parquet") else folder / name
    with pytest.raises(InputError, match="not a regular file"):
        batch.predict(here / "model.onnx", source, tmp_path / "out.csv")
