"""A fingerprint of the C files, which tells whether a compiled library belongs to them.

A module of its own without imports from the package, because `hatch_build.py` runs it as well.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def fingerprint(folder: Path) -> str:
    """Hash the C files of a folder."""
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
