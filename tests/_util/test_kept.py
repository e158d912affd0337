"""Content that is kept in the cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mivhead._util.kept import cache_folder, keep
from mivhead.extraction.cache import open_cache


class Maker:
    """Counts how often it is asked."""

    count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return b"content"


def test_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "new"))
    make = Maker()
    assert [keep("a/b", make) for _ in range(3)] == [b"content"] * 3
    assert make.count == 1
    assert [each.name for each in (tmp_path / "new" / "a").iterdir()] == ["b"]


def test_made_every_time_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in ("off", "OFF", str(tmp_path / "file")):
        monkeypatch.setenv("MIV_CACHE", folder)
        make = Maker()
        assert [keep("a/b", make) for _ in range(2)] == [b"content"] * 2
        assert make.count == 2


@pytest.mark.parametrize("folder", [None, "~/features", "off"])
def test_folder_is_that_of_the_feature_cache(
    folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder is None:
        monkeypatch.delenv("MIV_CACHE", raising=False)
    else:
        monkeypatch.setenv("MIV_CACHE", folder)
    cache = open_cache()
    assert cache_folder() == (None if cache is None else cache.folder)
