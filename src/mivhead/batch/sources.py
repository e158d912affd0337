"""What a job reads: shards of images or of features, and the rows of a shard.

A source is a folder, a zip, a list of paths (`.csv`, `.tsv`, `.txt`), a tar of images as WebDataset
writes them, a Parquet file of images or embeddings, or another store of features. `list_shards`
goes through it once without reading any image, and `Shard.rows` reads one shard, on any machine.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from PIL import Image

from mivhead._util.optional import need
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images import places
from mivhead.images.decoding import load_image, read_capped
from mivhead.images.imageset import ImageSource, is_image_name, is_litter, normal
from mivhead.images.sources import PATH_NAMES, expand_pattern, list_zip

Kind: TypeAlias = Literal["files", "zip", "tar", "images", "vectors", "store", "boxes"]
# An image file, a crop, or arrays of features by name.
Content: TypeAlias = "bytes | Image.Image | dict[str, Any]"
Wanted: TypeAlias = Callable[[int], bool]  # whether a row, by its number, is needed

LISTS = (".csv", ".tsv", ".txt")
TARS = (".tar", ".tar.gz", ".tgz")
ARRAYS = (".safetensors", ".npz", ".npy")
SCHEMES = ("lancedb", "postgresql", "postgres", "qdrant")  # databases: `mivhead.stores`
IMAGE_COLUMNS = ("image", "img", "bytes", "jpg", "jpeg", "png", "content", "data")
ID_COLUMNS = ("file", "path", "id", "name", "filename", "file_name", "image_path", "__key__", "key")
MAX_LINE = 2**20  # characters of a line in a list of paths


class ShardRow(NamedTuple):
    """One image, or the features of one."""

    id: str
    load: Callable[[], Content]  # raises an ImageError if it cannot be read


@dataclass(frozen=True)
class Shard:
    """A share of a source that is read by one worker, in order."""

    kind: Kind
    path: str  # the file, or the folder that the names are relative to
    name: str  # what the ids of its rows start with
    items: tuple[str, ...] = ()  # names of image files or members of a zip
    # Row groups of a Parquet file: the first one, and the one after the last
    groups: tuple[int, ...] = ()
    first: int = 0  # number of the first row in its file
    stamp: str = ""  # what changes when the file changes
    column: str = ""  # of the images in a Parquet file
    count: int = 0  # number of rows; 0 if it is not known

    @property
    def holds_features(self) -> bool:
        """Whether its rows are features, not images."""
        return self.kind in ("vectors", "store")

    def rows(self, wanted: Wanted) -> Iterator[ShardRow | None]:
        """Yield the rows in their order; None instead of a row that is not wanted."""
        self.check_unchanged()
        yield from _READERS[self.kind](self, wanted)

    def is_complete(self, rows: Mapping[int, int], part_rows: int) -> bool:
        """Return whether all parts exist: they have all rows, or the last one has fewer than usual.

        Only the last part of a shard has fewer rows than the others; it may have none.
        """
        if sorted(rows) != list(range(len(rows))):
            return False
        whole = bool(self.count) and sum(rows.values()) == self.count
        return whole or (bool(rows) and rows[len(rows) - 1] < part_rows)

    def check_unchanged(self) -> None:
        """Raise an error if the file is not the one that was listed."""
        if self.stamp and places.stamp(self.path) != self.stamp:
            raise InputError(
                f"{self.name} changed after the job had started: its predictions would be a "
                "mixture. Start again with --overwrite."
            )


def list_shards(sources: Sequence[str], rows: int, column: str | None = None) -> Iterator[Shard]:
    """Go through sources and yield their shards, of at most `rows` rows where that can be chosen.

    `column` is that of the images in Parquet files, or of the paths in a list.
    """
    for source in sources:
        for path in places.expand(places.plain(source)):
            yield from _list(path, rows, column)


def check_named(shard: Shard, sources: Sequence[str]) -> Shard:
    """Return a shard; raise an error if it is at an address that is not among the sources.

    A list of paths, or the plan of an earlier job, may come from a stranger, who must not have
    anything opened elsewhere.

    >>> check_named(Shard("files", "", "", ("ftp://host/1.jpg", "1.jpg")), ["list.csv"])
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: 'ftp://host/1.jpg' is named by a file, not by you: addresses in \
files are opened only with --allow-remote.
    """
    paths = [shard.path] if shard.path else shard.items[::2]
    for path in filter(_is_remote, paths):
        if not any(path == each or _is_below(path, each) for each in sources):
            raise InputError(
                f"{path!r:.200} is named by a file, not by you: addresses in files are opened only "
                "with --allow-remote."
            )
    return shard


def _is_remote(path: str) -> bool:
    return places.is_address(path) or path.startswith(("//", "\\\\"))  # a share of Windows


def _is_below(path: str, source: str) -> bool:
    """Return whether an address is below a source: a folder, a pattern, or the folder of a list."""
    path, source = (re.sub("://+", "://", each) for each in (path, source))
    folder = re.split(r"[*?[]", source)[0]
    if folder != source or source.lower().endswith(LISTS):
        folder = folder.rpartition("/")[0]
    return places.is_address(source) and f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _list(path: str, rows: int, column: str | None) -> Iterator[Shard]:
    if path.partition("://")[0] in SCHEMES:
        yield Shard("store", path, path)
        return
    absolute, name = places.absolute(path), path.rstrip("/") or path
    lower = name.lower()
    if places.is_folder(path):
        yield from _list_folder(path, absolute, name, rows, column)
    elif not places.exists(path):
        matches = [] if places.is_address(path) else expand_pattern(Path(path))
        if not matches:
            raise InputError(f"{path} does not exist.")
        yield from _files(absolute_of=matches, rows=rows, column=column)
    elif lower.endswith(".zip"):
        members = [each.id for each in _zip_members(absolute, places.stamp(absolute)).values()]
        if not members:
            raise InputError(f"{path} contains no images.")
        mark = places.stamp(absolute)
        for part in _batched(members, rows):
            yield Shard("zip", absolute, name, tuple(part), stamp=mark, count=len(part))
    elif lower.endswith(LISTS):
        yield from _list_paths(absolute, name, rows, column)
    elif lower.endswith(ARRAYS):
        yield Shard("store", absolute, name, stamp=places.stamp(absolute))
    elif (found := _list_archive(absolute, name, rows, column)) is not None:
        yield from found
    else:
        yield Shard("files", "", "", (absolute, name), count=1)


def _files(absolute_of: Sequence[Path], rows: int, column: str | None) -> Iterator[Shard]:
    """Yield what a pattern matches: consecutive images together, everything else by itself."""
    images: list[Path] = []

    def flush() -> Iterator[Shard]:
        for part in _batched(images, rows):
            names = [text for each in part for text in (str(each.absolute()), each.as_posix())]
            yield Shard("files", "", "", tuple(names), count=len(part))
        images.clear()

    for path in absolute_of:
        if path.is_file() and is_image_name(path.name):
            images.append(path)
        elif not is_litter(path.name):
            yield from flush()
            yield from _list(str(path), rows, column)
    yield from flush()


def _list_folder(
    path: str, absolute: str, name: str, rows: int, column: str | None
) -> Iterator[Shard]:
    """Yield the images of a folder, and the tars and Parquet files in it."""
    found = False
    images: list[str] = []
    for inside, is_folder in places.walk(absolute):
        if is_folder:
            continue
        if is_image_name(inside):
            images.append(inside)
        elif shards := _list_archive(f"{absolute}/{inside}", f"{name}/{inside}", rows, column):
            found = True
            yield from shards
        if len(images) == rows:
            yield Shard("files", absolute, name, tuple(images), count=len(images))
            found = True
            images = []
    if images:
        yield Shard("files", absolute, name, tuple(images), count=len(images))
    elif not found:
        raise InputError(f"{path} contains no images, tars or Parquet files.")


def _list_archive(
    absolute: str, name: str, rows: int, column: str | None
) -> Iterator[Shard] | None:
    """Return the shards of a tar or Parquet file; None if the file is neither."""
    lower = name.lower()
    if lower.endswith(TARS):
        return iter([Shard("tar", absolute, name, stamp=places.stamp(absolute))])
    if lower.endswith(".parquet"):
        return _list_parquet(absolute, name, rows, column)
    return None


def _batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def safe_id(text: str) -> str:
    r"""Return a name in Unicode's composed form that can be encoded as UTF-8.

    >>> safe_id("caf\udce9.jpg")
    'caf\\udce9.jpg'
    """
    return normal(text).encode("utf-8", "backslashreplace").decode()


# Image files, and members of zips.


def _read_files(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    if shard.path:
        pairs = [(f"{shard.path}/{item}", f"{shard.name}/{item}") for item in shard.items]
    else:  # each with its own path, followed by its name
        pairs = list(zip(shard.items[::2], shard.items[1::2], strict=True))
    for number, (path, name) in enumerate(pairs):
        name = safe_id(name)
        yield ShardRow(name, partial(places.read_image, path, name)) if wanted(number) else None


def _read_zip(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    members = _zip_members(shard.path, shard.stamp)
    for number, item in enumerate(shard.items):
        if not wanted(number):
            yield None
            continue
        load: Any = members[item].get
        yield ShardRow(safe_id(f"{shard.name}/{item}"), load)


@lru_cache(maxsize=2)
def _zip_members(path: str, stamp: str) -> dict[str, ImageSource]:
    """List a zip; `stamp` makes a changed file another one."""
    del stamp
    if not places.is_address(path):
        return {each.id: each for each in list_zip(Path(path))[1]}
    file: Any = places.open_file(path)  # stays open as long as its members are used
    return {each.id: each for each in list_zip(path, file)[1]}


# Boxes, whose crops are the images.


def list_boxes(
    folder: str, rows: int, path: str, margin: float, confidence: float
) -> Iterator[Shard]:
    """Yield the boxes of the photos in a folder, a photo's boxes one after the other."""
    from mivhead.images.boxes import open_boxes

    kept = open_boxes(path, folder).confident(confidence)
    absolute = str(Path(folder).absolute())
    for part in _batched(kept, rows):
        items = [json.dumps([b.photo, b.number, *b.sides, b.relative, margin]) for b in part]
        yield Shard("boxes", absolute, folder.rstrip("/"), tuple(items), count=len(items))


def hash_boxes(path: str) -> str:
    """Return what changes when a document of boxes changes."""
    digest = hashlib.sha256()
    root = Path(path)
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if file.is_file():
            name = os.fsencode(file.relative_to(root))  # which need not be UTF-8
            digest.update(name + f" {file.stat().st_size}\n".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _read_boxes(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    from mivhead.images.boxes import Box, crop

    load = lru_cache(maxsize=2)(load_image)
    for number, item in enumerate(shard.items):
        photo, place, *sides, relative, margin = json.loads(item)
        box = Box(photo, place, tuple(sides), relative, None, None, ())
        row = ShardRow(safe_id(box.id), partial(crop, box, Path(shard.path), margin, load))
        yield row if wanted(number) else None


# Lists of paths.


def _list_paths(path: str, name: str, rows: int, column: str | None) -> Iterator[Shard]:
    """Read a list of paths, which are relative to its folder, to the current one, or absolute."""
    base = path.rpartition("/")[0] if places.is_address(path) else str(Path(path).parent)
    items: list[str] = []
    empty = True
    with places.open_file(path) as file:
        for given in _read_list(file, name, column):
            items += [_locate(base, given), given]
            empty = False
            if len(items) == 2 * rows:
                yield Shard("files", "", "", tuple(items), count=len(items) // 2)
                items = []
    if empty:
        raise InputError(f"{name} lists no images.")
    if items:
        yield Shard("files", "", "", tuple(items), count=len(items) // 2)


def _locate(base: str, given: str) -> str:
    if places.is_address(given) or os.path.isabs(given):  # noqa: PTH117  # a string
        return given
    joined = f"{base}/{given}"
    if not places.is_address(base) and not Path(joined).exists() and Path(given).exists():
        return str(Path(given).absolute())
    return joined


def _read_list(file: IO[bytes], name: str, column: str | None) -> Iterator[str]:
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        first = lines.readline(MAX_LINE)
        delimiter = max(",;\t", key=first.count)
        cells = next(csv.reader([first], delimiter=delimiter, strict=True), [])
        header = [cell.strip().casefold() for cell in cells]
        names = PATH_NAMES if column is None else (column.casefold(),)
        place = next((i for i, cell in enumerate(header) if cell in names), None)
        if place is None:
            if column is not None or not cells or not is_image_name(cells[0].strip()):
                raise InputError(
                    f"{name} needs a header with a column of paths ({', '.join(names)}), or image "
                    "names in its first column; name another column with --column."
                )
            place = 0
            yield _given_path(cells[0])
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) <= place or not row[place].strip():
                raise InputError(f"{name}, line {reader.line_num + 1}: there is no path.")
            yield _given_path(row[place])
    except UnicodeDecodeError:
        raise InputError(f"{name} is not encoded in UTF-8: save it as CSV in UTF-8.") from None
    except csv.Error as error:
        raise InputError(f"{name} cannot be read: {error}.") from error
    finally:
        with suppress(ValueError):
            lines.detach()


def _given_path(cell: str) -> str:
    return cell.strip().replace("\\", "/")


# Tars: images in their order, read once from the beginning to the end, as WebDataset does.


def _read_tar(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    numbers = count()
    try:
        with places.open_file(shard.path) as raw:
            zipped = shard.name.lower().endswith("gz")
            file: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # the file is closed
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # which would hold every member ever seen
                if not member.isreg() or not is_image_name(member.name):
                    continue
                if any(map(is_litter, member.name.split("/"))):
                    continue
                if not wanted(next(numbers)):
                    yield None
                    continue
                name = safe_id(f"{shard.name}/{member.name}")
                yield ShardRow(name, _read_now(archive, member, name))
            # Python's tarfile stops silently at a damaged header.
            file.seek(archive.offset)
            if (block := file.read(tarfile.BLOCKSIZE)) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("a damaged header" if block else "the end is missing")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        # What follows cannot be found; the rows before it are good.
        reason = f"{shard.name} is corrupted or truncated: {error or type(error).__name__}."
        yield (
            ShardRow(safe_id(shard.name), partial(_fail, reason)) if wanted(next(numbers)) else None
        )
    except OSError as error:
        if isinstance(error, InputError):
            raise
        raise NotAvailableError(f"{shard.name} cannot be read: {error}.") from error


def _read_now(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> Callable[[], bytes]:
    """Read a member while the tar is at its place."""
    file = archive.extractfile(member)
    assert file is not None  # a regular file
    try:
        data = read_capped(file, name)
        if len(data) < member.size:
            raise tarfile.ReadError(f"unexpected end in {member.name}")
    except ImageError as error:
        return partial(_fail, str(error))
    return partial(bytes, data)


def _fail(reason: str) -> bytes:
    raise ImageError(reason)


# Parquet files of images or vectors.


def _list_parquet(path: str, name: str, rows: int, column: str | None) -> Iterator[Shard]:
    mark = places.stamp(path)
    with _parquet(path, name) as file:
        kind, chosen = _what_it_holds(file.schema_arrow, name, column)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    first = start = total = 0
    for group, size in enumerate(sizes):
        total += size
        if total >= rows or group == len(sizes) - 1:
            yield Shard(kind, path, name, (), (start, group + 1), first, mark, chosen, total)
            first, start, total = first + total, group + 1, 0


def _what_it_holds(schema: Any, name: str, column: str | None) -> tuple[Kind, str]:
    """Return whether a file holds images or vectors, and the column of the images."""
    types = need("pyarrow", places.EXTRA).types

    def is_image(kind: Any) -> bool:
        if types.is_struct(kind):  # as in the data sets of Hugging Face: bytes and path
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    images = [field.name for field in schema if is_image(field.type)]
    if column is not None:
        if column not in schema.names:
            raise InputError(f"{name} has no column {column!r}; it has {', '.join(schema.names)}.")
        if column in images:
            return "images", column
    elif images:
        known = [each for each in IMAGE_COLUMNS if each in images]
        if len(images) > 1 and not known:
            raise InputError(
                f"{name} has several columns of bytes, {', '.join(images)}: name the one with the "
                "images with --column."
            )
        return "images", (known or images)[0]
    from mivhead.stores.parquet import vector_columns

    vector_columns(schema, name)
    return "vectors", column or ""


def _parquet(path: str, name: str) -> Any:
    pq = need("pyarrow.parquet", places.EXTRA)
    if not places.is_address(path):
        with suppress(FileNotFoundError):
            return _explained(lambda: pq.ParquetFile(path, page_checksum_verification=True), name)
        raise InputError(f"{name} does not exist.")
    fs, inside = places.file_system(path)
    return _explained(
        lambda: pq.ParquetFile(fs.open(inside, "rb"), page_checksum_verification=True), name
    )


def _explained(action: Callable[[], Any], name: str) -> Any:
    """Turn errors of pyarrow into mivhead's."""
    try:
        return action()
    except FileNotFoundError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"{name} is corrupted, or not a Parquet file: {reason}.") from error


def _batches(shard: Shard, columns: list[str]) -> Iterator[Any]:
    """Yield the rows of a shard in batches of a few rows, as images may be large."""
    with _parquet(shard.path, shard.name) as file:
        batches = file.iter_batches(64, row_groups=list(range(*shard.groups)), columns=columns)
        while (batch := _explained(lambda: next(batches, None), shard.name)) is not None:
            yield batch


def _ids(batch: Any, column: str | None, shard: Shard, first: int) -> list[str]:
    if column is not None:
        return [safe_id(str(each)) for each in batch[column].to_pylist()]
    return [f"{safe_id(shard.name)}:{first + i}" for i in range(batch.num_rows)]


def _read_images(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    with _parquet(shard.path, shard.name) as file:
        schema = file.schema_arrow
    own = next((name for name in ID_COLUMNS if name in schema.names), None)
    if own == shard.column:
        own = None
    start, number = shard.first, 0
    for batch in _batches(shard, [*filter(None, [own]), shard.column]):
        images = batch[shard.column]
        for name, image in zip(_ids(batch, own, shard, start), images, strict=True):
            yield _image_row(name, image, own) if wanted(number) else None
            number += 1
        start += batch.num_rows


def _image_row(name: str, image: Any, own: str | None) -> ShardRow:
    value = image.as_py()
    if isinstance(value, dict):
        if own is None and value.get("path"):
            name = safe_id(str(value["path"]))
        value = value["bytes"]
    if value is None:
        return ShardRow(name, partial(_fail, f"{name} has no image."))
    return ShardRow(name, partial(bytes, value))


def _read_vectors(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    from mivhead.stores.arrow import vector
    from mivhead.stores.base import VIEW_OF, Columns
    from mivhead.stores.parquet import ERROR, info_of, vector_columns

    with _parquet(shard.path, shard.name) as file:
        schema = file.schema_arrow
    info = info_of(schema, shard.name)
    if info is not None:
        columns = list(info.shapes)
    else:
        given = Columns(vectors=(shard.column,) if shard.column else ())
        columns = list(given.choose_vectors(vector_columns(schema, shard.name), shard.name))
    own = next((name for name in ID_COLUMNS if name in schema.names), None)
    extra = [name for name in (VIEW_OF, ERROR) if info and name in schema.names]
    start, numbers = shard.first, count()
    for batch in _batches(shard, [*filter(None, [own]), *extra, *columns]):
        ids = _ids(batch, own, shard, start)
        errors = batch[ERROR].to_pylist() if ERROR in extra else [None] * len(ids)
        views = batch[VIEW_OF].to_pylist() if VIEW_OF in extra else [None] * len(ids)
        for i, name in enumerate(ids):
            if views[i] is not None:
                continue
            if not wanted(next(numbers)):
                yield None
                continue
            arrays = {each: vector(batch[each][i]) for each in columns}
            missing = next((each for each, array in arrays.items() if array is None), None)
            if missing is not None:
                reason = errors[i] or f"{name} has no vector in the column {missing!r}."
                yield ShardRow(name, partial(_fail, reason))
            else:
                yield ShardRow(name, partial(_shaped, arrays, {} if info is None else info.shapes))
        start += batch.num_rows


def _shaped(arrays: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    return {name: a.reshape(shapes.get(name, a.shape)) for name, a in arrays.items()}


# Other stores of features: read from the beginning to the end.


def _read_store(shard: Shard, wanted: Wanted) -> Iterator[ShardRow | None]:
    from mivhead import stores

    numbers = count()
    with stores.open(shard.path) as store:
        for table in store.iter_batches():
            arrays = table.features.tensors
            for i, name in enumerate(table.ids):
                if not wanted(next(numbers)):
                    yield None
                    continue
                yield ShardRow(safe_id(name), partial(_take, arrays, i))


def _take(arrays: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: array[row] for name, array in arrays.items()}


def backbone_of(shard: Shard) -> dict[str, Any] | None:
    """Return what a shard of features says about its backbone, if it does."""
    if shard.kind == "vectors":
        from mivhead.stores.parquet import info_of

        with _parquet(shard.path, shard.name) as file:
            info = info_of(file.schema_arrow, shard.name)
        return None if info is None else info.backbone
    from mivhead import stores

    with stores.open(shard.path) as store:
        return next((table.backbone for table in store.iter_batches()), None)


_READERS: dict[str, Callable[[Shard, Wanted], Iterable[ShardRow | None]]] = {
    "files": _read_files,
    "zip": _read_zip,
    "tar": _read_tar,
    "images": _read_images,
    "vectors": _read_vectors,
    "store": _read_store,
    "boxes": _read_boxes,
}
