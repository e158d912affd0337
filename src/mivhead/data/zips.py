"""Images in a zip, read one at a time and never unpacked to disk.

A zip may come from anywhere. One with absolute or `..` paths, links, passwords, or a content out
of all proportion to its size is refused as a whole; a member is read up to a limit, whatever its
header says.
"""

from __future__ import annotations

import stat
import zipfile
import zlib
from functools import partial
from pathlib import Path

from mivhead.data.images import read_capped
from mivhead.data.imageset import ImageSource
from mivhead.data.naming import is_image_name, is_litter, normal
from mivhead.errors import ImageError, InputError

MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 16 * 2**30
MAX_RATIO = 200  # checked above 1 GiB only: a zip of a few plain bitmaps may shrink this much
_RATIO_FROM = 2**30
# The others (bzip2, LZMA) can expand a few bytes to gigabytes before Python looks at the size.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def list_zip(path: Path) -> tuple[set[str], list[ImageSource]]:
    """Return the folders in a zip, and its images; their ids are the paths inside."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path} cannot be read as a zip: {error}.") from error
    infos = archive.infolist()
    _check_size(path, infos)
    folders: set[str] = set()
    sources = []
    for info in infos:
        member = normal(info.filename.replace("\\", "/"))
        _check_member(path, member, info)
        parts = [part for part in member.split("/") if part not in ("", ".")]
        if any(map(is_litter, parts)):
            continue
        is_folder = member.endswith("/")
        depth = len(parts) if is_folder else len(parts) - 1
        folders.update("/".join(parts[: end + 1]) for end in range(depth))
        if not is_folder and is_image_name(member):
            get = partial(_read_member, archive, info, f"{path}/{member}")
            sources.append(ImageSource("/".join(parts), get, f"{path}/{member}"))
    return folders, sources


def _check_size(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    if len(infos) > MAX_MEMBERS:
        raise InputError(f"{path} has {len(infos):,} members; at most {MAX_MEMBERS:,} are read.")
    total = sum(info.file_size for info in infos)
    ratio = total / max(1, path.stat().st_size)
    if total > MAX_TOTAL_BYTES or (total > _RATIO_FROM and ratio > MAX_RATIO):
        raise InputError(
            f"{path} would unpack to {total / 2**30:.1f} GiB, {ratio:,.0f} times its size; "
            f"at most {MAX_TOTAL_BYTES // 2**30} GiB and {MAX_RATIO} times are read."
        )


def _check_member(path: Path, member: str, info: zipfile.ZipInfo) -> None:
    """Refuse what no honest zip of images holds; `member` has forward slashes only."""
    if member.startswith("/") or member[1:2] == ":" or ".." in member.split("/"):
        raise InputError(
            f"{path} holds {info.filename!r}, a path that leads out of the zip; pack it anew."
        )
    if stat.S_ISLNK(info.external_attr >> 16):
        raise InputError(f"{path} holds the link {member!r}; pack the files themselves.")
    if info.flag_bits & 0x1:
        raise InputError(f"{path} is encrypted ({member!r}); pack it without a password.")
    if info.compress_type not in _METHODS:
        raise InputError(
            f"{path} holds {member!r} in an unusual compression; pack it as a plain zip (deflate)."
        )


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> bytes:
    try:
        with archive.open(info) as file:
            return read_capped(file, name)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ImageError(f"{name} is damaged: {error or type(error).__name__}.") from error
