"""Open a store by its address."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from mivhead.errors import InputError, check_one_of
from mivhead.stores.base import Columns, FileStore, Store

SCHEMES = ("lancedb", "postgresql", "qdrant")  # a new database is added here and in `open_store`
_OPTIONS = ("id", "label", "vectors", "where")


def is_store(text: str | Path) -> bool:
    """Return whether a string is the address of a database rather than a file or folder.

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
        `.safetensors` file. The other parameters may also be part of the address:
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
        return FileStore(uri, _columns(given))
    scheme, _, rest = str(uri).partition("://")
    scheme = "postgresql" if scheme == "postgres" else scheme
    check_one_of("The kind of store", scheme, SCHEMES)
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query))
    own = {key: options.pop(key, None) for key in _OPTIONS}
    columns = _columns({key: given[key] or own[key] for key in _OPTIONS})
    if scheme == "postgresql":
        from mivhead.stores.postgres import PostgresStore

        return PostgresStore(f"postgresql://{path}", options, columns)
    if options:
        check_one_of(f"An option of {scheme}", next(iter(options)), _OPTIONS)
    place, _, table = unquote(path).rpartition("/")
    if not place or not table:
        raise InputError(f"{uri} must be {scheme}://FOLDER/TABLE.")
    if scheme == "lancedb":
        from mivhead.stores.lance import LanceStore

        return LanceStore(place, table, columns)
    from mivhead.stores.qdrant import QdrantStore

    return QdrantStore(place, table, columns)


def _columns(given: dict[str, str | None]) -> Columns:
    names = [each.strip() for each in (given["vectors"] or "").split(",")]
    return Columns(
        id=given["id"],
        label=given["label"],
        vectors=tuple(filter(None, names)),
        where=given["where"],
    )
