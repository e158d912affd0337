"""Settings in folders of the hub, which a stranger may have written."""

import os
from pathlib import Path

import pytest

from mivhead.backbones.hub_folders import read_json
from mivhead.errors import InputError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "does not contain a JSON object"),
        (b"{", "cannot be read as JSON"),
        (100_000 * b"[", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
    ],
)
def test_settings_that_are_none(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "config.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_pipes_and_huge_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match="is not a regular file"):
        read_json(tmp_path / "pipe.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(2**40)  # without taking space on the disk
    with pytest.raises(InputError, match="is larger than 64 MiB"):
        read_json(tmp_path / "huge.json")
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_json(tmp_path / "config.json")
