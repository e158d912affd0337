"""What a job reads: shards of images, and the rows of a shard.

A source is a folder, a zip, a tar of images as WebDataset writes them, or a list of paths (`.csv`,
`.tsv`, `.txt`, `.parquet`). `list_shards` goes through it without reading any image, and
`Shard.rows` reads one shard, on any machine.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, groupby, islice
from pathlib import Path, PurePath
from typing import IO, Any, Literal

from mivhead._util.imports import need
from mivhead._util.tables import PATHS, find_column, read_columns
from mivhead.errors import ImageError, InputError, NotAvailableError, reading
from mivhead.images.decoding import MAX_FILE_BYTES, read_capped
from mivhead.images.imageset import ImageSource, is_image_name, is_litter, normal
from mivhead.images.sources import Listing, list_zip
from mivhead.jobs import urls

TARS = (".tar", ".tar.gz", ".tgz")
LISTS = (".csv", ".tsv", ".txt", ".parquet")
MAX_HEADER = 2**20  # bytes, of a member of a tar


@dataclass(frozen=True)
class Shard:
    """A part of a source that is read by one worker, in order."""

    kind: Literal["files", "zip", "tar"]
    path: str  # the file, or the folder that the items are relative to
    name: str  # what the ids of its rows start with
    items: tuple[str, ...] = ()  # image files, or members of a zip
    stamp: str = ""  # what changes when the file changes
    skipped: int = 0  # files that are not images, passed over by the listing

    def rows(self, done: Counter[str]) -> Iterator[ImageSource]:
        """Yield the images in their order, and count other files as "skipped"."""
        if self.kind == "tar":
            yield from _read_tar(self, done)
            return
        members = {}
        if self.kind == "zip":
            members = {image.id: image.get for image in _open_zip(self.path, self.stamp).images}
        for item in self.items:
            name = safe_id(f"{self.name}/{item}" if self.name else item)
            path = item if urls.is_url(item) or Path(item).is_absolute() else f"{self.path}/{item}"
            yield ImageSource(name, members.get(item) or partial(urls.read_image, path, name), name)


def list_shards(
    sources: Iterable[str], rows: int, *, column: str | None = None, allow_remote: bool = False
) -> Iterator[Shard]:
    """Go through sources and yield their shards, of at most `rows` images, except for tars."""
    paths = (path for source in sources for path in urls.expand(source))
    for alone, group in groupby(paths, _is_one_image):
        if alone:
            yield from _files(urls.absolute("."), group, rows)
            continue
        for path in group:
            name, place = path.rstrip("/") or path, urls.absolute(path)
            if urls.is_folder(place):
                yield from _list_folder(place, name, rows)
            elif name.lower().endswith(".zip"):
                yield from _list_zip(place, name, rows)
            elif name.lower().endswith(TARS):
                yield Shard("tar", place, name, stamp=urls.stamp(place))
            elif name.lower().endswith(LISTS):
                base, entries = _read_list(place, name, column, allow_remote)
                yield from _files(base, entries, rows)
            else:
                raise InputError(f"{name} is not a folder, zip, tar, list of paths or image.")


def _is_one_image(path: str) -> bool:
    named_so = is_image_name(path) or not PurePath(path).suffix
    return named_so and not urls.is_folder(urls.absolute(path))


def _files(base: str, entries: Iterable[str], rows: int) -> Iterator[Shard]:
    """Yield shards of files whose paths are relative to `base`, absolute or URLs."""
    waiting = iter(entries)
    while items := tuple(islice(waiting, rows)):
        yield Shard("files", base, "", items)


def _list_folder(place: str, name: str, rows: int) -> Iterator[Shard]:
    """Yield the images of a folder, and the tars in it."""
    images: list[str] = []
    skipped = shards = 0
    for inside in urls.list_files(place):
        if is_image_name(inside):
            images.append(inside)
        elif inside.lower().endswith(TARS):
            path = f"{place}/{inside}"
            yield Shard("tar", path, f"{name}/{inside}", stamp=urls.stamp(path))
            shards += 1
        else:
            skipped += 1
        if len(images) == rows:
            yield Shard("files", place, name, tuple(images), skipped=skipped)
            images, skipped, shards = [], 0, shards + 1
    if images:
        yield Shard("files", place, name, tuple(images), skipped=skipped)
    elif not shards:
        raise InputError(f"{name} contains no images or tars.")


def _list_zip(place: str, name: str, rows: int) -> Iterator[Shard]:
    mark = urls.stamp(place)
    images, _, others = _open_zip(place, mark)
    if not images:
        raise InputError(f"{name} contains no images.")
    for start in range(0, len(images), rows):
        items = tuple(image.id for image in images[start : start + rows])
        yield Shard("zip", place, name, items, mark, 0 if start else len(others))


# Lists of paths.


def _read_list(
    path: str, name: str, column: str | None, allow_remote: bool
) -> tuple[str, Iterator[str]]:
    """Return the folder of a list, or the current one if the first entry is there; the entries."""
    base = path.rpartition("/")[0] if urls.is_url(path) else str(Path(path).parent)
    read = _read_parquet if path.lower().endswith(".parquet") else _read_csv
    cells = read(path, name, PATHS if column is None else (column,))

    def checked(cell: str) -> str:
        entry = cell.replace("\\", "/")
        remote = urls.is_url(entry) or entry.startswith("//")  # a share of Windows
        if remote and not allow_remote and not (urls.is_url(base) and entry.startswith(f"{base}/")):
            raise InputError(
                f"{entry!r:.200} is named by {name}, not by you: URLs in files are opened only "
                "with --allow-remote."
            )
        return entry

    entries = map(checked, cells)
    first = next(entries, None)
    if first is None:
        raise InputError(f"{name} lists no images.")
    if not urls.is_url(base) and not Path(base, first).exists() and Path(first).exists():
        base = urls.absolute(".")
    return base, chain([first], entries)


def _read_csv(path: str, name: str, names: Sequence[str]) -> Iterator[str]:
    is_data = is_image_name if names is PATHS else None  # a header names the column
    with urls.open_file(path) as file:
        cells = read_columns(file, name, names, is_data=is_data, option="--column")
        yield from (cell for _, (cell,) in cells)


def _read_parquet(path: str, name: str, names: Sequence[str]) -> Iterator[str]:
    pq = need("pyarrow.parquet")
    with reading(name, ValueError, RuntimeError), urls.open_file(path) as file:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        header = table.schema_arrow.names
        place = find_column(header, names)
        if place is None:
            raise InputError(f"{name} needs a column of paths; name it with --column.")
        for batch in table.iter_batches(columns=[header[place]]):
            for cell in batch.column(0).to_pylist():
                if not cell or not isinstance(cell, str):
                    raise InputError(f"{name} has {cell!r} in place of a path.")
                yield cell


# The images of a shard.


def safe_id(text: str) -> str:
    """Return a name in Unicode's composed form that can be encoded as UTF-8."""
    return normal(text).encode("utf-8", "backslashreplace").decode()


@lru_cache(maxsize=2)
def _open_zip(path: str, _mark: str) -> Listing:
    """List a zip; `_mark` makes a changed file another one."""
    return list_zip(path, urls.open_file(path) if urls.is_url(path) else None)


class _Limited:
    """A tar of which a limited number of bytes is read at a time: headers have no limit."""

    def __init__(self, file: Any) -> None:
        self._file, self.seek, self.tell, self.left = file, file.seek, file.tell, MAX_HEADER

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError("a header is too long")
        return bytes(self._file.read(size))


def _read_tar(shard: Shard, done: Counter[str]) -> Iterator[ImageSource]:
    """Read a tar once from the beginning to the end, as WebDataset does."""
    try:
        with urls.open_file(shard.path) as raw:
            zipped = shard.name.lower().endswith("gz")
            file: Any = _Limited(gzip.GzipFile(fileobj=raw) if zipped else raw)
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # the file is closed
            while (member := archive.next()) is not None:
                file.left = 2 * MAX_FILE_BYTES
                archive.members = []  # type: ignore[attr-defined]  # would hold all ever seen
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                inside = "/".join(parts)
                wanted = is_image_name(inside) and not any(map(is_litter, parts))
                if wanted and member.isreg() and (opened := archive.extractfile(member)):
                    name = safe_id(f"{shard.name}/{inside}")
                    yield ImageSource(name, _read_member(opened, member, name), name)
                elif not member.isdir():
                    done["skipped"] += 1
                file.left = MAX_HEADER
            # Python's tarfile stops silently at a damaged header.
            file.seek(archive.offset)
            if (block := file.read(tarfile.BLOCKSIZE)) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("a damaged header" if block else "the end is missing")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        # What follows cannot be found; the rows before it are good.
        reason = f"{shard.name} is corrupted or truncated: {error or type(error).__name__}."
        yield ImageSource(safe_id(shard.name), partial(_fail, reason), shard.name)
    except OSError as error:
        raise NotAvailableError(f"{shard.name} cannot be read: {error}.") from error


def _read_member(file: IO[bytes], member: tarfile.TarInfo, name: str) -> Callable[[], bytes]:
    """Read a member while the tar is at its place."""
    try:
        data = read_capped(file, name)
    except ImageError as error:
        return partial(_fail, str(error))
    if len(data) < member.size:
        raise tarfile.ReadError(f"unexpected end in {member.name}")
    return partial(bytes, data)


def _fail(reason: str) -> bytes:
    raise ImageError(reason)
