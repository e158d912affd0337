"""Files that are written atomically: safetensors with a JSON document, and small text files.

Model files and features files are safetensors. Reading them runs no code and trusts nothing:
safetensors holds raw tensors, and the metadata key `mivhead` holds JSON. A checksum in the JSON
detects damage; files of version 0.1.0 have none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mivhead._util.schema import parse_json
from mivhead.errors import ModelFileError, NotAvailableError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOCKS_FOLDERS = fcntl is not None
HUB = "hf://"  # how the address of a model on the Hugging Face hub starts
METADATA_KEY = "mivhead"
CHECKSUM = "checksum.v1"  # key of the document: CRC-32 of everything else in the file
MAX_BYTES = 16 * 2**30
TYPES = ("float16", "float32", "float64", "int64", "int32", "uint8", "bool")  # of tensors
ABANDONED = 3600.0  # age in seconds of what was abandoned, on systems without `flock`


def stamp(path: str | Path) -> tuple[int, int, int]:
    """Return what changes when a file is changed or replaced; links are followed."""
    found = Path(path).stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextmanager
def replacing(path: str | Path, *, make_folders: bool = False) -> Iterator[Path]:
    """Yield a temporary path; on success its file replaces `path`, atomically.

    Implemented here because no dependency offers it: readers see the old file or the new one.
    The temporary file is in a hidden folder next to `path`. A process that is killed leaves that
    folder behind, and the next one that writes the same `path` removes it. As long as its writer
    lives, the folder is locked.
    """
    path = Path(path)
    with ExitStack() as stack:
        try:
            if make_folders:
                path.parent.mkdir(parents=True, exist_ok=True)
            part = stack.enter_context(_temporary_folder(path)) / path.name
            yield part
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            raise NotAvailableError(
                f"Cannot write {path}: {getattr(error, 'strerror', None) or error}. Nothing was "
                "changed; check that the folder exists, is writable and has space."
            ) from error


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Create a folder for the temporary file of `path`, locked, and remove abandoned ones."""
    with ExitStack() as stack:
        while True:
            folder = path.with_name(f".{path.name}.{uuid4().hex[:12]}.part")
            folder.mkdir(mode=0o700)
            with suppress(FileNotFoundError):
                stack.enter_context(locked(folder))
            if folder.is_dir():  # else another process took it for abandoned before the lock
                break
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _remove_abandoned(path, folder)
        yield folder


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder until the end of the block, or of the process."""
    if fcntl is None:
        if not wait and time.time() - folder.stat().st_mtime < ABANDONED:
            raise BlockingIOError
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            if not wait:
                raise
            # A file system without locks: nothing there is ever taken for abandoned.
        yield
    finally:
        os.close(handle)


def _remove_abandoned(path: Path, own: Path) -> None:
    """Remove the temporary folders of `path` whose writers were killed."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.part")
    found: list[Path] = []
    with suppress(OSError):  # a folder that may be written, but not listed
        found = [each for each in path.parent.iterdir() if name.fullmatch(each.name)]
    for each in found:
        if each != own:
            with suppress(OSError), locked(each, wait=False):
                if each.is_dir():
                    shutil.rmtree(each)
                else:  # of version 0.1.0
                    each.unlink()


def write(path: str | Path, tensors: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write arrays and a JSON document as a safetensors file, atomically."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    text = json.dumps(
        {**meta, CHECKSUM: checksum(arrays, meta)}, ensure_ascii=False, allow_nan=False
    )
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
        size = path.stat().st_size
        if not path.is_file():
            kind = "a folder, not a model: the model comes first" if path.is_dir() else "not a file"
            raise ModelFileError(f"{path} is {kind}.")
        if size > MAX_BYTES:
            raise ModelFileError(f"{path} is {size:,} bytes; at most {MAX_BYTES:,} are read.")
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if METADATA_KEY not in metadata:
                raise ModelFileError(f"{path} was not written by mivhead.")
            meta = parse_json(metadata[METADATA_KEY])
            names = list(file.keys()) if arrays else []
            found = {name: _read_array(path, file, name) for name in names}
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist.") from None
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(
            f"{path} cannot be read: it is corrupted or not a mivhead file ({error})."
        ) from error
    if not isinstance(meta, dict):
        raise ModelFileError(f"{path} is corrupted: its metadata is not a JSON object.")
    stored = meta.pop(CHECKSUM, None)
    if arrays and stored is not None and stored != checksum(found, meta):
        raise ModelFileError(f"{path} is corrupted: its checksum does not match its contents.")
    return found, meta


def _read_array(path: Path, file: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = file.get_tensor(name)
        kind = array.dtype.name
    except TypeError as error:  # a type that NumPy does not have, such as bfloat16
        kind = str(error)
    if kind not in TYPES:
        raise ModelFileError(f"{path} cannot be used: tensor {name!r} has a wrong type ({kind}).")
    return array


def checksum(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a JSON document and of the names, types, shapes and values of arrays.

    >>> checksum({}, {"format": 1})
    'e234bd89'
    """
    import numpy as np

    value = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        what = f"{name} torch.{array.dtype.name} {list(array.shape)}"  # the name of PyTorch's type
        value = zlib.crc32(np.ascontiguousarray(array).data, zlib.crc32(what.encode(), value))
    return f"{value:08x}"


def check_format(path: str | Path, meta: Mapping[str, Any], newest: int) -> None:
    """Raise an error if a file has a format that this version does not support."""
    version = meta.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelFileError(f"{path} has no valid format number.")
    if version > newest:
        raise ModelFileError(
            f"{path} has format {version}, but this version reads at most format {newest}: "
            "update mivhead."
        )


def write_text(path: str | Path, text: str, errors: str = "strict") -> None:
    """Write a text file, atomically; missing folders are created.

    `errors` says what happens to characters that UTF-8 cannot encode, as for `open`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder, "tasks", "birds.json"), "{}")
    ...     Path(folder, "tasks", "birds.json").read_text()
    '{}'
    """
    with replacing(path, make_folders=True) as part:
        part.write_text(text, encoding="utf-8", errors=errors, newline="\n")


def is_exported(path: object) -> bool:
    """Return whether a path names an exported model, by its suffix.

    >>> is_exported("birds.onnx"), is_exported("birds.miv")
    (True, False)
    """
    return str(path).lower().endswith(".onnx")
