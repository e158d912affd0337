"""Features with labels and ids in a file or a database; `open` finds out which by the name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from mivhead.errors import InputError, check_one_of
from mivhead.stores.base import Columns, Store

__all__ = ["Store", "open"]

DATABASES = ("lancedb", "postgresql")


def open(  # noqa: A001  # read as `stores.open`
    uri: str | Path,
    *,
    id: str | None = None,  # noqa: A002  # the column's name
    label: str | None = None,
    vectors: Sequence[str] = (),
    where: str | None = None,
) -> Store:
    """Open a table of features; nothing is read or created until a method of it is called.

    Parameters
    ----------
    uri : str or Path
        `lancedb://FOLDER/TABLE`, `postgresql://USER@HOST/DATABASE?table=NAME`, or the path of a
        `.safetensors`, `.parquet`, `.npz` or `.npy` file. The other parameters may also be part of
        the URL: `lancedb://data/birds?label=species`.
    id : str, optional
        Column of the row ids; by default `id`, if it exists.
    label : str, optional
        Column of the labels; by default `label`, if it exists.
    vectors : sequence of str, default=()
        Columns of the features, one per block, shallow to deep; by default those that mivhead
        wrote, or the only column of vectors.
    where : str, optional
        Filter of a database, in its SQL. It is passed on unchanged: never build it from untrusted
        strings.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mivhead import Features, FeatureTable, stores
    >>> table = FeatureTable(Features(np.ones((3, 4))), ids=("a", "b", "c"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = stores.open(f"{folder}/features.safetensors")
    ...     store.write(table)
    ...     [len(batch) for batch in store.iter_batches(batch_size=2)]
    [2, 1]
    """
    scheme, _, rest = str(uri).partition("://")
    if not rest:
        if where is not None:
            raise InputError(f"{uri} is a file, which has no filter: omit where.")
        columns = Columns(id, label, tuple(vectors))
        suffix = Path(uri).suffix.lower()
        if suffix == ".parquet":
            from mivhead.stores.arrow import ParquetStore

            return ParquetStore(str(uri), columns)
        from mivhead.stores.arrays import ArrayStore, FileStore

        return (ArrayStore if suffix in (".npz", ".npy") else FileStore)(str(uri), columns)
    scheme = "postgresql" if scheme == "postgres" else scheme
    check_one_of("The kind of store", scheme, DATABASES)
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query))
    in_url = [name for name in options.pop("vectors", "").split(",") if name]
    columns = Columns(
        id or options.pop("id", None),
        label or options.pop("label", None),
        tuple(vectors) or tuple(in_url),
        where or options.pop("where", None),
    )
    if scheme == "lancedb":
        from mivhead.stores.arrow import LanceStore

        for option in options:
            check_one_of("An option of lancedb", option, ("id", "label", "vectors", "where"))
        return LanceStore(path, columns)
    from mivhead.stores.postgres import PostgresStore

    return PostgresStore(f"{scheme}://{path}", options, columns)
