"""Where the cache is: parameters and environment variables."""

from pathlib import Path

import pytest

from mivhead.errors import InputError
from mivhead.extraction.cache import DEFAULT_LIMIT, open_cache


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MIV_CACHE", "MIV_CACHE_GB", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def folder_of(given: str | None = None) -> Path:
    cache = open_cache(given)
    assert cache is not None
    return cache.folder


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert folder_of() == tmp_path / ".cache" / "mivhead"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert folder_of() == Path("/somewhere/mivhead")
    monkeypatch.setenv("MIV_CACHE", "~/mine")
    assert folder_of() == tmp_path / "mine"
    assert folder_of("/given") == Path("/given")
    monkeypatch.setenv("MIV_CACHE", "off")
    assert open_cache() is None
    assert folder_of("/given") == Path("/given")  # asked for by name
    assert not list(tmp_path.iterdir())  # opening makes nothing


def test_other_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert folder_of() == tmp_path / "Library" / "Caches" / "mivhead"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert folder_of() == Path("/local/mivhead")


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache()
    assert cache is not None
    assert cache.limit == DEFAULT_LIMIT
    monkeypatch.setenv("MIV_CACHE_GB", "0.5")
    cache = open_cache()
    assert cache is not None
    assert cache.limit == 500_000_000


@pytest.mark.parametrize("text", ["much", "-1", "0", "nan", "inf"])
def test_a_wrong_limit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MIV_CACHE_GB", text)
    with pytest.raises(InputError, match=f"MIV_CACHE_GB is '{text}'"):
        open_cache()
