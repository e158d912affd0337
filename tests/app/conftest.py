"""Photos for the tests of the app."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mivhead.app.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A new project."""
    opened = Project(tmp_path / "birds")
    yield opened
    opened.close()
