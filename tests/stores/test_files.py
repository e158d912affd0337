"""Files of embeddings: read, written, and refused if they are bad."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mivhead import Features, FeatureTable, stores
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
    views = features[[0, 3]]
    return FeatureTable(features, IDS, LABELS, views, np.array([0, 3]), {"name": "mine"})


@pytest.mark.parametrize("suffix", ["safetensors", "parquet"])
def test_what_is_written_is_read(table, tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="the extra jobs is not installed")
    store = stores.open(tmp_path / f"a.{suffix}")
    store.write(table)
    found = store.read()
    assert found.features == table.features
    assert (found.ids, found.labels, found.backbone) == (IDS, LABELS, {"name": "mine"})
    assert (found.views is None) == (suffix == "parquet")
    batches = list(store.iter_batches(5))
    assert [len(batch) for batch in batches] == [5, 5, 2]
    assert batches[1].labels == LABELS[5:10]
    with pytest.raises(InputError, match="filter"):
        stores.open(tmp_path / f"a.{suffix}", where="x = 1")


@pytest.mark.parametrize("kind", ["list", "fixed", "large", "double"])
def test_foreign_parquet(tmp_path, kind):
    pa = pytest.importorskip("pyarrow", reason="the extra jobs is not installed")
    import pyarrow.parquet as pq

    value = pa.float64() if kind == "double" else pa.float32()
    types = {"fixed": pa.list_(value, 6), "large": pa.large_list(value)}
    column = pa.array(X.tolist(), types.get(kind, pa.list_(value)))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"embedding": column, "species": LABELS, "n": range(12)}), path)
    found = stores.open(path, label="species", id="n").read()
    assert found.features.blocks[0].token == pytest.approx(X)
    assert (found.labels, found.ids[:2]) == (LABELS, ("0", "1"))
    with pytest.raises(InputError, match="species"):
        stores.open(path, label="nothing").read()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match="read"):
        stores.open(path).read()


@pytest.mark.parametrize("names", [("labels", "ids"), ("y", "names")])
def test_archives(tmp_path, names, table):
    np.savez(tmp_path / "a.npz", X=X, **{names[0]: LABELS, names[1]: IDS})
    found = stores.open(tmp_path / "a.npz").read()
    assert found.features.blocks[0].token == pytest.approx(X)
    assert (found.labels, found.ids) == (LABELS, IDS)
    np.savez(tmp_path / "b.npz", species=np.array(LABELS), **table.features.tensors)
    found = stores.open(tmp_path / "b.npz", label="species").read()
    assert found.features == table.features
    assert found.labels == LABELS
    np.save(tmp_path / "a.npy", X)
    found = stores.open(tmp_path / "a.npy").read()
    assert (len(found), found.labels, found.ids[0]) == (12, None, "0")


def write_lying_header(path: Path) -> None:
    header = io.BytesIO()
    facts = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**6)}
    np.lib.format.write_array_header_1_0(header, facts)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("X.npy", header.getvalue() + b"0" * 100)


def test_bad_archives(tmp_path):
    np.savez(tmp_path / "two.npz", a=X, b=X)
    np.savez(tmp_path / "none.npz", n=np.arange(3))
    np.savez(tmp_path / "short.npz", X=X, y=LABELS[:3])
    write_lying_header(tmp_path / "lie.npz")
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.npy").write_text("hello")
    np.save(tmp_path / "cut.npy", X)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-40])
    for path in [*tmp_path.iterdir(), tmp_path / "nothing.npy"]:
        with pytest.raises(MivError):
            stores.open(path).read()
    with pytest.raises(InputError, match="safetensors"):
        stores.open(tmp_path / "a.npz").write(FeatureTable(Features(X), IDS))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_pickled_arrays_run_no_code(tmp_path, suffix):
    save = np.save if suffix == "npy" else np.savez
    save(tmp_path / f"a.{suffix}", np.array([Bomb(tmp_path / "ran")], object))
    with pytest.raises(InputError):
        stores.open(tmp_path / f"a.{suffix}").read()
    assert not (tmp_path / "ran").exists()


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"


@pytest.mark.parametrize(
    "header",
    [
        *("-" * 9000 + "1", "(" * 9000, "1", "{}"),
        *(HEADER % f"({shape})" for shape in ("-1, -4", f"{10**23}, 4", "True, True", "")),
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


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra jobs is not installed")
    import pyarrow.parquet as pq

    monkeypatch.setattr("mivhead.stores.base.SMALL", 2**20)
    np.savez_compressed(tmp_path / "a.npz", X=np.zeros((2**18, 16), np.float32))
    same = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2**22, np.float32)), 2**10)
    pq.write_table(pa.table({"v": same}), tmp_path / "a.parquet")
    for name in ("a.npz", "a.parquet"):
        with pytest.raises(InputError, match="16 MiB"):
            stores.open(tmp_path / name).read()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_pipes_are_not_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra jobs is not installed")
    for name in ("a.npz", "a.npy", "a.parquet", "a.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(MivError, match="not a file"):
            stores.open(tmp_path / name).read()
