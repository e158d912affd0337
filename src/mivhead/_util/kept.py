"""What is computed once and kept in the user's cache folder, because reading it is faster."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mivhead._util.files import replacing
from mivhead.errors import NotAvailableError

FOLDER = "MIV_CACHE"  # the variable that names the folder, or disables the cache
OFF = "off"
_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path | None:
    """Return the folder that `MIV_CACHE` names, or the platform's; None if the cache is off."""
    if folder := os.environ.get(FOLDER):
        return None if folder.lower() == OFF else Path(folder).expanduser()
    return _platform_folder() / "mivhead"


def _platform_folder() -> Path:
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def keep(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returns, from a file in the cache folder if it was made before.

    The file ends in the hash of its content: one that is damaged is made again. Where no file can
    be written, the content is made every time. `name` is a path below the cache folder; it must
    change whenever the content does.
    """
    folder = cache_folder()
    if folder is None:
        return make()
    path = folder / name
    with suppress(OSError):
        stored = path.read_bytes()
        content = stored[:-_DIGEST]
        if hashlib.sha256(content).digest() == stored[-_DIGEST:]:
            return content
    content = make()
    with suppress(NotAvailableError, OSError), replacing(path, make_folders=True) as part:
        part.write_bytes(content + hashlib.sha256(content).digest())
    return content
