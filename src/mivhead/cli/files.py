"""Files a command reads and writes: what they hold, and whether writing will work."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from mivhead.errors import InputError, NotAvailableError


def kind_of(path: str | Path) -> str | None:
    """Return `"model"` or `"features"` for a file that mivhead wrote, else None.

    Only the header is read; the file is checked in full when it is loaded.
    """
    from safetensors import SafetensorError, safe_open

    from mivhead.safefile import METADATA_KEY

    if not Path(path).is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {}).get(METADATA_KEY, "null"))
    except (OSError, SafetensorError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    return "features" if document.get("kind") == "features" else "model"


def is_features(path: str | Path) -> bool:
    """Tell whether a path is meant to be a features file, damaged or not, or a table of them."""
    return (
        is_table(path) or Path(path).suffix.lower() == ".safetensors" or kind_of(path) == "features"
    )


def is_table(path: str | Path) -> bool:
    """Tell whether a path is the address of a table in a database, such as `lancedb://...`."""
    return "://" in str(path)


def check_output(path: str | Path, *, replaces: str | None = None) -> None:
    """Raise an error if a file cannot be written here; called before the expensive work.

    Parameters
    ----------
    path
        The file to be written.
    replaces
        The kind of file (`kind_of`) that may be overwritten; None: any.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"The output {path} is a folder; give the name of a file in it.")
    if path.exists() and not path.is_file():
        raise InputError(f"The output {path} is not a regular file.")
    if replaces and path.exists() and kind_of(path) != replaces:
        raise InputError(
            f"The output {path} exists and is not a {replaces} file of mivhead; "
            "it is left as it is: choose another name or remove it."
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise NotAvailableError(f"The output {path} is write-protected.")
    check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Raise an error if no file can be made in a folder."""
    if not folder.is_dir():
        raise InputError(f"The folder {folder} of the output does not exist; make it first.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotAvailableError(f"Cannot write into {folder}: {error.strerror}.") from error


def print_json(document: Any) -> None:
    """Print one JSON document, readable for people where the terminal allows it."""
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    print(json.dumps(document, indent=2, ensure_ascii=ascii_only, allow_nan=False))


def report_skipped(skipped: list[Any]) -> None:
    """List on stderr the images that `--skip-bad` left out."""
    from mivhead.cli.text import one_line, plural

    if skipped:
        print(f"Skipped {plural(len(skipped), 'image')}:", file=sys.stderr)
    for each in skipped:
        print(f"  {one_line(each.reason)}", file=sys.stderr)
