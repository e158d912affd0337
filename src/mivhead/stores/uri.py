"""Open a store by its address."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from mivhead.errors import check_one_of
from mivhead.stores.base import Columns, FileStore, Store

# scheme of an address -> the class that opens it, imported on first use
SCHEMES = {
    "lancedb": "mivhead.stores.lance:LanceStore",
    "postgresql": "mivhead.stores.postgres:PostgresStore",
    "qdrant": "mivhead.stores.qdrant:QdrantStore",
}
# suffix of a file -> the class that opens it
SUFFIXES = {
    ".npy": "mivhead.stores.arrays:ArrayStore",
    ".npz": "mivhead.stores.arrays:ArrayStore",
    ".parquet": "mivhead.stores.parquet:ParquetStore",
}
_OPTIONS = ("id", "label", "vectors", "where")


def is_store(text: str | Path) -> bool:
    """Return whether a string is the address of a database rather than a file or folder.

    Parameters
    ----------
    text : str or Path
        An address or a path.

    Returns
    -------
    bool

    Examples
    --------
    >>> is_store("lancedb://data/birds"), is_store("shots/")
    (True, False)
    """
    return "://" in str(text)


def open_store(
    uri: str | Path,
    *,
    id: str | None = None,  # noqa: A002  # the column's name
    label: str | None = None,
    vectors: Sequence[str] = (),
    where: str | None = None,
) -> Store:
    """Open a table of features.

    Nothing is read or created until a method of the store is called.

    Parameters
    ----------
    uri : str or Path
        `lancedb://FOLDER/TABLE`, `postgresql://USER@HOST/DATABASE?table=NAME`,
        `qdrant://FOLDER/COLLECTION`, `qdrant://http://HOST:6333/COLLECTION`, or the path of a
        `.safetensors`, `.parquet`, `.npz` or `.npy` file or of a folder of `.parquet` files. The
        other parameters may also be part of the address:
        `lancedb://data/birds?label=species`.
    id : str, optional
        Column of the row ids; by default `id`, or the database's own ids.
    label : str, optional
        Column of the labels; by default `label`, if it exists.
    vectors : sequence of str, default=()
        Columns of the features, one per block, shallow to deep; by default those that mivhead
        wrote, or the only column of vectors.
    where : str, optional
        Filter in the database's own language: SQL, or JSON for Qdrant. It is passed on unchanged:
        never build it from untrusted strings.

    Returns
    -------
    Store

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mivhead import Features, stores
    >>> table = stores.FeatureTable(Features(np.ones((3, 4))), ids=("a", "b", "c"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = stores.open(f"{folder}/features.safetensors")
    ...     store.write(table)
    ...     [len(batch) for batch in store.iter_batches(batch_size=2)]
    [2, 1]
    """
    given = {"id": id, "label": label, "vectors": ",".join(vectors) or None, "where": where}
    if not is_store(uri):
        suffix = ".parquet" if Path(uri).is_dir() else Path(uri).suffix.lower()
        if suffix not in SUFFIXES:
            return FileStore(uri, _columns(given))
        opened: Store = _class(SUFFIXES[suffix])(str(uri), _columns(given))
        return opened
    scheme, _, rest = str(uri).partition("://")
    scheme = "postgresql" if scheme == "postgres" else scheme
    check_one_of("The kind of store", scheme, SCHEMES)
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query))
    own = {key: options.pop(key, None) for key in _OPTIONS}
    columns = _columns({key: given[key] or own[key] for key in _OPTIONS})
    store: Store = _class(SCHEMES[scheme]).from_address(f"{scheme}://{path}", options, columns)
    return store


def _class(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind)


def _columns(given: dict[str, str | None]) -> Columns:
    names = [each.strip() for each in (given["vectors"] or "").split(",")]
    return Columns(
        id=given["id"],
        label=given["label"],
        vectors=tuple(filter(None, names)),
        where=given["where"],
    )
