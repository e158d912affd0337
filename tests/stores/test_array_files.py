"""Parquet, `.npz` and `.npy` files of embeddings: read, written, and refused if they are bad."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mivhead import Features, FeatureTable, stores
from mivhead.cli.main import main
from mivhead.errors import InputError, MivError

rng = np.random.default_rng(0)
X = (0.2 * rng.normal(size=(12, 6)) + np.repeat([[1], [-1]], 6, axis=0)).astype(np.float32)
IDS = tuple(f"row {i}" for i in range(12))
LABELS = ("cat",) * 6 + ("dog",) * 6


@pytest.fixture
def table():
    """Two blocks, with labels and views."""
    maps, tokens = rng.normal(size=(12, 3, 2, 2)), rng.normal(size=(12, 5))
    features = Features([{"map": maps}, {"token": tokens}]).to("float16")
    return FeatureTable(features, IDS, LABELS, features[[0, 3]], np.array([0, 3]))


def test_parquet_keeps_everything(table, tmp_path):
    pytest.importorskip("pyarrow", reason="the extra batch is not installed")
    with stores.open(tmp_path / "a.parquet") as store:
        store.write(table)
        found = store.read()
        batches = list(store.iter_batches(5))
    assert found.features == table.features
    assert (found.ids, found.labels) == (table.ids, table.labels)
    assert found.views == table.views
    assert found.view_of.tolist() == [0, 3]
    assert sum(map(len, batches)) == 12
    with pytest.raises(InputError, match="not changed"):
        store.annotate(IDS, {"x": LABELS})
    with pytest.raises(InputError, match="no filter"):
        stores.open(tmp_path / "a.parquet", where="x = 1")


@pytest.mark.parametrize("kind", ["list", "fixed", "large", "double"])
def test_foreign_parquet(tmp_path, kind):
    pa = pytest.importorskip("pyarrow", reason="the extra batch is not installed")
    import pyarrow.parquet as pq

    value = pa.float64() if kind == "double" else pa.float32()
    column = pa.array(
        X.tolist(),
        {"fixed": pa.list_(value, 6), "large": pa.large_list(value)}.get(kind, pa.list_(value)),
    )
    pq.write_table(
        pa.table({"embedding": column, "species": LABELS, "n": range(12)}), tmp_path / "a.parquet"
    )
    found = stores.open(tmp_path / "a.parquet", label="species", id="n").read()
    assert found.features.blocks[0].token == pytest.approx(X)
    assert (found.labels, found.ids[:2]) == (LABELS, ("0", "1"))
    with pytest.raises(InputError, match="must be one of"):
        stores.open(tmp_path / "a.parquet", label="nothing").read()
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    (tmp_path / "a.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        stores.open(tmp_path / "a.parquet").read()


@pytest.mark.parametrize("names", [("labels", "ids"), ("y", "names"), ("label", "id")])
def test_archives(tmp_path, names):
    np.savez(tmp_path / "a.npz", X=X, **{names[0]: LABELS, names[1]: IDS})
    found = stores.open(tmp_path / "a.npz").read()
    assert found.features.blocks[0].token == pytest.approx(X)
    assert (found.labels, found.ids) == (LABELS, IDS)
    np.savez(tmp_path / "b.npz", X=X, species=np.array(LABELS))
    assert stores.open(tmp_path / "b.npz", label="species").read().labels == LABELS


def test_archives_of_blocks(table, tmp_path):
    arrays = dict(table.features.tensors)
    np.savez(tmp_path / "a.npz", **arrays)
    assert stores.open(tmp_path / "a.npz").read().features == table.features


def test_arrays_without_labels(tmp_path):
    np.save(tmp_path / "a.npy", X)
    found = stores.open(tmp_path / "a.npy").read()
    assert (len(found), found.labels, found.ids[0]) == (12, None, "0")


def bad_archive(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def write_lying_header(path: Path) -> Path:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**6)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("X.npy", header.getvalue() + b"0" * 100)
    return path


def test_bad_files(tmp_path):
    bad = {
        "no column|exactly one": bad_archive(tmp_path / "two.npz", a=X, b=X),
        "exactly one": bad_archive(tmp_path / "none.npz", n=np.arange(3)),
        "labels have the shape": bad_archive(tmp_path / "short.npz", X=X, y=LABELS[:3]),
        "pickle|Object": bad_archive(tmp_path / "object.npz", X=np.array([{}], object)),
        "too short for its header": write_lying_header(tmp_path / "lie.npz"),
    }
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.npy").write_text("hello")
    np.save(tmp_path / "cut.npy", X)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-40])
    for message, path in bad.items():
        with pytest.raises(InputError, match=message):
            stores.open(path).read()
    for name in ("text.npz", "text.npy", "cut.npy", "nothing.npy"):
        with pytest.raises(InputError, match=r"cannot be read|does not exist"):
            stores.open(tmp_path / name).read()
    with pytest.raises(InputError, match=r"give a .safetensors or .parquet file"):
        stores.open(tmp_path / "a.npz").write(FeatureTable(Features(X), IDS))


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"


@pytest.mark.parametrize(
    "header",
    [
        *("-" * 9000 + "1", "(" * 9000, "1", "{}", HEADER % ("-" * 9000 + "1,")),
        *(HEADER % f"({shape})" for shape in ("-1, -4", f"{10**23}, 4", "True, True", "2.0,", "")),
    ],
)
def test_forged_headers(header: str, tmp_path: Path) -> None:
    text = header.encode() + b"\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X.npy", content)
    for path in (tmp_path / "a.npy", tmp_path / "a.npz"):
        with pytest.raises(MivError):
            stores.open(path).read()


def test_a_small_archive_does_not_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mivhead.stores.base.SMALL", 2**20)
    np.savez_compressed(tmp_path / "a.npz", X=np.zeros((2**18, 16), np.float32))
    with pytest.raises(InputError, match="would unpack to 16 MiB"):
        stores.open(tmp_path / "a.npz").read()


def test_a_small_parquet_file_does_not_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra batch is not installed")
    import pyarrow.parquet as pq

    monkeypatch.setattr("mivhead.stores.base.SMALL", 2**20)
    same = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2**22, np.float32)), 2**10)
    pq.write_table(pa.table({"v": same}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="would unpack to 16 MiB"):
        stores.open(tmp_path / "a.parquet").read()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_pipes_are_not_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra batch is not installed")
    for name in ("a.npz", "a.npy", "a.parquet", "a.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(MivError, match="is not a file"):
            stores.open(tmp_path / name).read()


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_the_command_line_fits_and_predicts_them(tmp_path, monkeypatch, capsys, suffix):
    monkeypatch.chdir(tmp_path)
    if suffix == "npz":
        np.savez("shots.npz", X=X, y=LABELS)
    else:
        pa = pytest.importorskip("pyarrow", reason="the extra batch is not installed")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"embedding": X.tolist(), "label": LABELS}), "shots.parquet")
    fit = ["fit", f"shots.{suffix}", "-o", "m.miv", "--method", "ncc", "--no-check"]
    assert main(fit) == 0
    np.save("new.npy", X[::-1])
    capsys.readouterr()
    assert main(["predict", "m.miv", "new.npy", "--csv"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == list(LABELS[::-1])
    if suffix == "parquet":
        assert main(["predict", "m.miv", "new.npy", "--job", "out.csv"]) == 0
        assert [row.split(",")[1] for row in Path("out.csv").read_text().splitlines()[1:]] == list(
            LABELS[::-1]
        )
