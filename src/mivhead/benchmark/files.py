"""Small text files of a benchmark: written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mivhead.errors import NotAvailableError


def write_text(path: str | Path, text: str) -> None:
    """Write to a temporary file beside `path`, then rename; folders are made as needed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder, "tasks", "birds.json"), "{}")
    ...     Path(folder, "tasks", "birds.json").read_text()
    '{}'
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write {path}: {error.strerror or error}. Nothing was changed; "
            "check that the folder is writable and has space."
        ) from error
    finally:
        with suppress(OSError):  # it is there only if writing failed, and then may be out of reach
            part.unlink()
