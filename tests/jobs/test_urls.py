"""URLs: fsspec's memory and local file systems, and a server that implements S3."""

from __future__ import annotations

import os
import tarfile
import zipfile
from io import BytesIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mivhead import jobs
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.jobs import job as job_module
from mivhead.jobs import sources, urls


@pytest.fixture
def memory():
    """The memory file system, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def upload(fs, here, base):
    """Copy the images to `BASE/new`, and make a zip, a tar, a list and a Parquet file of them."""
    paths = sorted(path for path in (here / "new").rglob("*") if path.is_file())
    names = [path.relative_to(here / "new").as_posix() for path in paths]
    archive, tar = BytesIO(), BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped, tarfile.open(fileobj=tar, mode="w") as tarred:
        for path, name in zip(paths, names, strict=True):
            fs.pipe_file(f"{base}/new/{name}", path.read_bytes())
            zipped.write(path, name)
            tarred.add(path, name)
    fs.pipe_file(f"{base}/new.zip", archive.getvalue())
    fs.pipe_file(f"{base}/new.tar", tar.getvalue())
    images = [name for name in names if not name.endswith(".txt")]
    fs.pipe_file(f"{base}/list.csv", "\n".join(["path", *(f"new/{n}" for n in images)]).encode())
    table = BytesIO()
    pq.write_table(pa.table({"file": [f"new/{name}" for name in images]}), table)
    fs.pipe_file(f"{base}/list.parquet", table.getvalue())


def read(path):
    with fsspec.open(path, "rb") as file:
        return pq.read_table(BytesIO(file.read())).to_pylist()


def check(rows, expected, prefix):
    by_name = {row["file"].replace(":///", "://").removeprefix(prefix): row for row in rows}
    assert len(by_name) == len(rows) == 20
    for name, probability in expected.items():
        assert by_name[name]["probabilities"]["dark"] == pytest.approx(probability, abs=1e-5)
    assert {name for name in by_name if by_name[name]["error"]} == {
        "dark/empty.png",
        "light/text.jpg",
    }


def check_all_sources(here, expected, base):
    """Every kind of source at a URL, into an output at a URL."""
    prefixes = {"new": f"{base}/new/", "new.zip": f"{base}/new.zip/", "new.tar": f"{base}/new.tar/"}
    prefixes |= {"list.csv": "new/", "list.parquet": "new/", "*.tar": f"{base}/new.tar/"}
    for number, (source, prefix) in enumerate(prefixes.items()):
        out = f"{base}/out{number}.parquet"
        result = jobs.predict(here / "model.onnx", f"{base}/{source}", out, part_rows=6)
        assert (result.rows, result.errors) == (20, 2)
        check(read(out), expected, prefix)
        assert not urls.exists(f"{out}.parts")


def check_resuming(here, expected, base, monkeypatch):
    real, left = job_module.ShardCall.run, [2]

    def run(self, *args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(self, *args)

    arguments = (here / "model.onnx", f"{base}/new", f"{base}/again.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(job_module.ShardCall, "run", run)
        with pytest.raises(KeyboardInterrupt):
            jobs.predict(*arguments, part_rows=4)
    result = jobs.predict(*arguments, part_rows=4, resume=True)
    assert (result.rows, result.resumed) == (20, 8)
    check(read(f"{base}/again.parquet"), expected, f"{base}/new/")
    assert jobs.predict(*arguments, part_rows=4, resume=True).resumed == 20


def test_memory(here, expected, memory, monkeypatch):
    upload(memory, here, "memory://bucket")
    check_all_sources(here, expected, "memory://bucket")
    check_resuming(here, expected, "memory://bucket", monkeypatch)


def test_local_urls(here, expected, tmp_path):
    out = f"file://{tmp_path}/out.parquet"
    jobs.predict(here / "model.onnx", f"file://{here}/new", out, part_rows=6)
    check(read(out), expected, f"{here}/new/")


def test_a_network_that_fails_stops_the_job_and_a_missing_image_does_not(memory, monkeypatch):
    memory.pipe_file("memory://bucket/a.png", b"")
    with pytest.raises(ImageError):
        urls.read_image("memory://bucket/b.png", "b.png")

    def fail(*_, **__):
        raise ConnectionResetError("connection reset")

    monkeypatch.setattr(type(memory), "open", fail)
    with pytest.raises(NotAvailableError, match="connection reset"):
        urls.read_image("memory://bucket/a.png", "a.png")


def test_a_folder_that_cannot_be_listed_is_not_left_out(memory, monkeypatch):
    for name in ("new/b/2.png", "new/a/10.png", "new/a/9.png", "new/.hidden/1.png", "new/1.png"):
        memory.pipe_file(f"memory://bucket/{name}", b"")
    expected = ["1.png", "a/9.png", "a/10.png", "b/2.png"]
    assert list(urls.list_files("memory://bucket/new")) == expected
    real = type(memory).ls

    def ls(self, path, **how):
        if path.endswith("/a"):
            raise ConnectionResetError("connection reset")
        return real(self, path, **how)

    monkeypatch.setattr(type(memory), "ls", ls)
    with pytest.raises(NotAvailableError, match="connection reset"):
        list(urls.list_files("memory://bucket/new"))


@pytest.mark.filterwarnings("ignore")  # of botocore and werkzeug
def test_s3(here, expected, monkeypatch):
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    started = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    started.start()
    _, port = started.get_host_and_port()
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
    "url",
    [
        *("memory://bucket/a.png", "file:///etc/a.png", "simplecache::memory://bucket/a.png"),
        "\\\\127.0.0.1\\share\\a.png",
    ],
)
def test_urls_in_lists_need_permission(here, memory, tmp_path, url, monkeypatch):
    memory.pipe_file("memory://bucket/a.png", (here / "new/dark/0.png").read_bytes())
    paths, out = tmp_path / "list.csv", tmp_path / "out.parquet"
    paths.write_text(f"path\n{here}/new/dark/0.png\n{url}\n")
    with pytest.raises(InputError, match="--allow-remote"):
        jobs.predict(here / "model.onnx", paths, out)
    assert not out.exists()
    (tmp_path / "first.csv").write_text(f"path\n{url}\n")
    with monkeypatch.context() as patch:
        patch.setattr(sources.Path, "exists", None)  # it is not even looked for
        with pytest.raises(InputError, match="--allow-remote"):
            next(sources.list_shards([str(tmp_path / "first.csv")], 10))
    if url.startswith("memory:"):
        jobs.predict(here / "model.onnx", paths, out, allow_remote=True)
        assert [row["closest"] for row in read(str(out))] == ["dark", "dark"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.zip", "a.txt", "a.png"])
def test_pipes_do_not_block(here, tmp_path, name):
    folder, out = tmp_path / "theirs", tmp_path / "out.parquet"
    folder.mkdir()
    os.mkfifo(folder / name)
    (tmp_path / "list.csv").write_text("path\ntheirs/a.png\n")
    if name == "a.png":  # an image, and an entry of a list
        jobs.predict(here / "model.onnx", [folder / name, tmp_path / "list.csv"], out)
        assert all("regular" in row["error"] for row in read(str(out)))
        return
    source = folder if name == "a.tar" else folder / name
    with pytest.raises(InputError, match="regular"):
        jobs.predict(here / "model.onnx", source, out)
