"""Files that are written atomically: safetensors with a JSON document, and small text files.

The metadata key `mivhead` holds JSON with a checksum of all of it. Reading runs no code.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mivhead._util.schema import parse_json
from mivhead.errors import InputError, ModelFileError, NotAvailableError, check_file, reason_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

METADATA_KEY = "mivhead"
CHECKSUM = "checksum"  # key of the document: CRC-32 of everything else in the file
MAX_BYTES = 16 * 2**30
TYPES = ("float16", "float32", "float64", "int64", "int32", "uint8", "bool")  # of tensors
ABANDONED = 3600.0  # age in seconds of a temporary file whose writer was killed


def cache_folder() -> Path | None:
    """Return the folder that `MIV_CACHE` names, or the platform's; None if the cache is off."""
    if folder := os.environ.get("MIV_CACHE"):
        return None if folder.lower() == "off" else Path(folder).expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA"):
        return Path(folder) / "mivhead"
    platforms = {"win32": "AppData/Local", "darwin": "Library/Caches"}
    return Path.home() / platforms.get(sys.platform, ".cache") / "mivhead"


def stamp(path: str | Path) -> tuple[int, int, int]:
    """Return what changes when a file is changed or replaced; links are followed."""
    status = Path(path).stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def replacing(path: str | Path, *, make_folders: bool = False) -> Iterator[Path]:
    """Yield a temporary path; on success its file replaces `path`, atomically.

    What a killed process leaves behind is removed by a later writer in the same folder.
    """
    path = Path(path)
    part = path.with_name(f".{uuid4().hex[:8]}.part{path.suffix}")
    try:
        if make_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # a folder that may be written, but not listed
            for abandoned in path.parent.glob(".????????.part*"):
                if time.time() - abandoned.stat().st_mtime > ABANDONED:
                    abandoned.unlink()
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write {path}: {reason_of(error)}. Nothing was changed; check that the "
            "folder exists, is writable and has space."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Keep the contents of a file as `.bak`, as soon as the file has been replaced."""
    kept = path.with_name(f"{path.name}.bak")
    if kept.is_dir():
        raise InputError(f"{kept} is a folder, where the old file would be kept: rename it.")
    with replacing(kept) as part:
        try:
            part.hardlink_to(path)  # no copy: the file is about to be replaced, not modified
        except OSError:
            shutil.copy2(path, part)
        yield


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Make sure that no other process of this computer changes a file or folder."""
    from filelock import FileLock, Timeout

    path = Path(path)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise NotAvailableError(
            f"Another process is changing {path}; nothing was changed: try again when it is done."
        ) from None
    except OSError as error:
        raise NotAvailableError(f"Cannot write to {path.parent}: {reason_of(error)}.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def write(path: str | Path, tensors: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write arrays and a JSON document as a safetensors file, atomically."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    document = {**meta, CHECKSUM: checksum(arrays, meta)}
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    with replacing(path) as part:
        try:
            save_file(arrays, part, metadata={METADATA_KEY: text})
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error


def read(
    path: str | Path, *, arrays: bool = True
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read arrays and the JSON document of a file written by `write`, or the document alone."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        check_file(path, ModelFileError)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelFileError(f"{path} is {size:,} bytes; at most {MAX_BYTES:,} are read.")
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if METADATA_KEY not in metadata:
                raise ModelFileError(f"{path} was not written by mivhead.")
            meta = parse_json(metadata[METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in (file.keys() if arrays else ())}
        for name, array in tensors.items():
            if array.dtype.name not in TYPES:
                raise TypeError(f"tensor {name!r} is of the type {array.dtype}")
    except ModelFileError:
        raise
    except (OSError, SafetensorError, TypeError, ValueError) as error:  # of types, such as bfloat16
        raise ModelFileError(
            f"{path} cannot be read: it is corrupted or not a mivhead file ({error})."
        ) from error
    if not isinstance(meta, dict):
        raise ModelFileError(f"{path} is corrupted: its metadata is not a JSON object.")
    stored = meta.pop(CHECKSUM, None)
    if arrays and stored != checksum(tensors, meta):
        raise ModelFileError(f"{path} is corrupted: its checksum does not match its contents.")
    return tensors, meta


def checksum(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a JSON document and of the names, types, shapes and values of arrays."""
    import numpy as np

    value = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        what = f"{name} {array.dtype.name} {list(array.shape)}"
        value = zlib.crc32(np.ascontiguousarray(array).data, zlib.crc32(what.encode(), value))
    return f"{value:08x}"


def write_text(path: str | Path, text: str, errors: str = "strict") -> None:
    """Write a text file, atomically; missing folders are created, `errors` is as for `open`."""
    with replacing(path, make_folders=True) as part:
        part.write_text(text, encoding="utf-8", errors=errors, newline="\n")


def is_exported(path: object) -> bool:
    """Whether a path names an exported model."""
    return str(path).lower().endswith(".onnx")
