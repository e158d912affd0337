"""Where the cache is and how large it may grow: parameters and environment variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mivhead.cache.store import DEFAULT_LIMIT, FeatureCache
from mivhead.errors import InputError

FOLDER = "MIV_CACHE"
LIMIT = "MIV_CACHE_GB"
OFF = "off"


def open_cache(folder: str | Path | None = None) -> FeatureCache | None:
    """Open the cache in a folder, or in the usual one; None if the user has switched it off.

    >>> open_cache("features").folder.name
    'features'
    """
    if folder is None:
        folder = os.environ.get(FOLDER) or _platform_folder() / "mivhead"
        if str(folder).lower() == OFF:
            return None
    return FeatureCache(Path(folder).expanduser(), _limit())


def _platform_folder() -> Path:
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def _limit() -> int:
    text = os.environ.get(LIMIT)
    if not text:
        return DEFAULT_LIMIT
    try:
        limit = float(text) * 1e9
        if not 0 < limit < float("inf"):
            raise ValueError
    except ValueError:
        raise InputError(f"{LIMIT} is {text!r}; expected a number of gigabytes, like 10.") from None
    return int(limit)
