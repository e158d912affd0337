"""Files that are written atomically: safetensors with a JSON document, and small text files.

Model files and features files are safetensors. Reading them runs no code and trusts nothing:
safetensors holds raw tensors, and the metadata key `mivhead` holds JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mivhead.errors import ModelFileError, NotAvailableError

if TYPE_CHECKING:  # exported models run without PyTorch and safetensors
    from torch import Tensor

METADATA_KEY = "mivhead"
MAX_BYTES = 16 * 2**30


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces `path`, atomically.

    Hand-written, as no dependency offers it: readers see the old file or the new one, never half.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{uuid4().hex[:12]}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write {path}: {getattr(error, 'strerror', None) or error}. Nothing was "
            "changed; check that the folder exists, is writable and has space."
        ) from error
    finally:
        with suppress(OSError):  # left only if writing failed, and possibly not accessible
            part.unlink()


def write(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and a JSON document as a safetensors file, atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = json.dumps(meta, ensure_ascii=False, allow_nan=False)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as part:
        try:
            save_file(contiguous, part, metadata={METADATA_KEY: text})
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and the JSON document of a file written by `write`."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ModelFileError(f"{path} is not a file.")
        if size > MAX_BYTES:
            raise ModelFileError(f"{path} is {size:,} bytes; at most {MAX_BYTES:,} are read.")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if METADATA_KEY not in metadata:
                raise ModelFileError(f"{path} was not written by mivhead.")
            meta = json.loads(metadata[METADATA_KEY])
            # Copied: mapped memory changes with the file, and its alignment affects rounding.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
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
    return tensors, meta


def check_format(path: str | Path, meta: Mapping[str, Any], newest: int) -> None:
    """Raise an error if a file has a format that this version does not support."""
    version = meta.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelFileError(f"{path} has no valid format number.")
    if version > newest:
        raise ModelFileError(
            f"{path} has format {version}, but this mivhead reads at most format {newest}: "
            "update it with `pip install -U mivhead`."
        )


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, atomically; missing folders are created.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder, "tasks", "birds.json"), "{}")
    ...     Path(folder, "tasks", "birds.json").read_text()
    '{}'
    """
    with replacing(path) as part:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")


def is_exported(path: object) -> bool:
    """Tell whether a path names an exported model, by its suffix.

    >>> is_exported("birds.onnx"), is_exported("birds.miv")
    (True, False)
    """
    return str(path).lower().endswith(".onnx")
